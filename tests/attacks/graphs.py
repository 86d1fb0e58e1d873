"""Graphs that were traced at one length and run at others: torch.compile, torch.export, ONNX; with masks, caches and gradients.

From 256 keys on an untraced CPU takes other kernels than a traced graph, so lengths lie on both sides of that.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache

from attacks.cases import Case, Comparison, Settings, new_folder, no_grad
from attacks.seq2seq import made as translator
from attacks.seq2seq import once
from attacks.subjects import COMPOSITIONS, ITSELF, Subject, padded, subject, tokens

SHORT, LONG = 9, 300
LENGTHS = (2, 3, 17, 255, 256, 257, 400)
"""Those that a graph traced at `SHORT` or `LONG` tokens is run at."""
SOME = (ITSELF, "sinusoidal", "learned", "rope", "alibi", "t5", "shaw", "fire", "cope", "fox", COMPOSITIONS[-1])
FEW = (ITSELF, "alibi", "rope", "shaw", "learned")
SIZES = {"max_position_embeddings": 512}
ROOM = {"bert": SIZES, "llama": SIZES, "gpt2": {"n_positions": 512}}
OPEN = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}


def cases(settings: Settings) -> Iterator[Case]:
    def taken(some: tuple[str, ...]) -> list[str]:
        return [encoding for encoding in settings.encodings if encoding in some]

    for host in ("bert", "gpt2", "llama"):
        for encoding in taken(FEW if host != "llama" else ()):
            for length in (SHORT, LONG):
                yield Case(f"compiled at {length}", host, encoding, no_grad(compiled, host, encoding, length))
        for encoding in taken(("alibi", "rope", "shaw") if host != "bert" else ()):
            yield Case("compiled, training", host, encoding, partial(trained, host, encoding))
    for host in ("gpt2", "llama"):
        for encoding in taken(FEW):
            for name, make in CACHES.items():
                yield Case(f"compiled, {name} cache", host, encoding, no_grad(cached, host, encoding, make))
    for host in ("bert", "gpt2", "llama"):
        for encoding in taken(SOME):
            for length in (SHORT, LONG):
                yield Case(f"exported at {length}", host, encoding, no_grad(exported, host, encoding, length), limit=120)
    for encoding in taken(FEW):
        yield Case(f"ONNX at {SHORT}", "bert", encoding, no_grad(in_onnx, "bert", encoding), limit=120)
        yield Case("compiled decoder", "t5", encoding, no_grad(decoder, encoding))


def made(host: str, encoding: str, causal: bool = False) -> Subject:
    it = subject(host, encoding, AutoModelForCausalLM if causal else AutoModel, **ROOM[host])
    torch._dynamo.reset()
    return it


def batch(length: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Three texts of about this length; ids and mask, padded on the right."""
    texts = [tokens(length, length), tokens(max(1, length - 1), length + 1), tokens(max(1, length // 2), length + 2)]
    return texts, *padded(texts, "right")


def rows(output: Tensor, texts: list[Tensor], it: Subject) -> Iterator[Comparison]:
    for row, text in zip(output, texts, strict=True):
        yield row[: len(text)], it.expected(text)


def compiled(host: str, encoding: str, traced: int) -> Iterator[Comparison]:
    it = made(host, encoding)
    run: Any = torch.compile(it.model, backend="eager", dynamic=True)
    for length in (traced, *LENGTHS):
        texts, ids, mask = batch(length)
        yield from rows(run(ids, attention_mask=mask, use_cache=False)[0], texts, it)
    yield run(tokens(LONG)[None], use_cache=False)[0][0], it.expected(tokens(LONG))  # without a mask


def trained(host: str, encoding: str) -> Iterator[Comparison]:
    """Gradients of all parameters, by a graph for all lengths."""
    it = made(host, encoding)
    run: Any = torch.compile(it.model, backend="aot_eager", dynamic=True)
    for length in (SHORT, 257, 30):
        expected = gradients(it.model, it.model, length)
        for name, gradient in gradients(run, it.model, length).items():
            yield gradient, expected[name]


def gradients(run: Any, model: Any, length: int) -> dict[str, Tensor]:
    model.zero_grad()
    _, ids, mask = batch(length)
    output = run(ids, attention_mask=mask, use_cache=False)[0]
    (output * mask[..., None] * torch.arange(output.shape[-1]).cos()).sum().backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in found.values())
    return {name: gradient for name, gradient in found.items() if float(gradient.abs().max()) > 1e-3 * largest}


CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=320),
}


def cached(host: str, encoding: str, make: Callable[[Any], Any]) -> Iterator[Comparison]:
    """A long prompt, left-padded, then tokens one by one; then another text from the start."""
    it = made(host, encoding, causal=True)
    run: Any = torch.compile(it.model, backend="eager", dynamic=True)
    for prompt in (253, 6):
        texts, cache = [tokens(prompt + 8, 1), tokens(prompt + 6, 2)], make(it.model)
        ids, mask = padded(texts, "left")
        expected = [it.expected(text) for text in texts]
        for start, end in ((0, prompt), *((each, each + 1) for each in range(prompt, prompt + 6)), (prompt + 6, prompt + 8)):
            given = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, start:end]} if encoding == ITSELF else {}
            logits = run(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, **given).logits
            for row, (text, right) in enumerate(zip(texts, expected, strict=True)):
                begin = ids.shape[1] - len(text)
                yield logits[row, max(begin - start, 0) :], right[max(start - begin, 0) : end - begin]


def exported(host: str, encoding: str, traced: int) -> Iterator[Comparison]:
    it = made(host, encoding)
    it.model.config.use_cache = False
    _, ids, mask = batch(traced)
    given = {"input_ids": ids, "attention_mask": mask}
    program = torch.export.export(it.model, (), given, dynamic_shapes=dict.fromkeys(given, OPEN)).module()
    for length in LENGTHS:
        texts, ids, mask = batch(length)
        yield from rows(program(input_ids=ids, attention_mask=mask)[0], texts, it)


def in_onnx(host: str, encoding: str) -> Iterator[Comparison]:
    import onnxruntime

    it = made(host, encoding)
    it.model.config.use_cache = False
    _, ids, mask = batch(SHORT)
    given = {"input_ids": ids, "attention_mask": mask}
    program = torch.onnx.export(it.model, kwargs=given, dynamo=True, dynamic_shapes=dict.fromkeys(given, OPEN), verbose=False)
    file = os.path.join(new_folder(), "model.onnx")
    program.save(file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for length in LENGTHS:
        texts, ids, mask = batch(length)
        (output, *_) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        yield from rows(torch.from_numpy(output), texts, it)


def decoder(encoding: str) -> Iterator[Comparison]:
    """Source and target of several lengths, both padded."""
    model, oracle = translator("t5", encoding)
    torch._dynamo.reset()
    run: Any = torch.compile(model, backend="eager", dynamic=True)
    for source, target in ((9, 5), (4, 11), (30, 2), (3, 31)):
        sources, targets = [[tokens(length, length), tokens(length - 1, length + 1)] for length in (source, target)]
        (ids, mask), (decoded, shown) = padded(sources, "left"), padded(targets, "left")
        logits = run(
            input_ids=ids, attention_mask=mask, decoder_input_ids=decoded, decoder_attention_mask=shown, use_cache=False
        ).logits
        for row, pair in enumerate(zip(sources, targets, strict=True)):
            yield logits[row, target - len(pair[1]) :], once(oracle, *pair)
