"""Every way that models are run × hosts of different kind × an encoding for each way to act.

What a way gives is compared with one plain forward pass of the same patched model, and has to be far from that of the model
without positions, so that an encoding which is dropped is seen. A way that can't carry an encoding has to say so.

Shapes: B batch, L tokens, V vocabulary.
"""

import copy
import functools
import itertools
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import (
    ContinuousBatchingConfig,
    DataCollatorWithFlattening,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    PreTrainedTokenizerFast,
    QuantizedCache,
    StaticCache,
    pipeline,
)
from transformers.cache_utils import Fp8QuantizedLayer

import hf_posenc
from closeness import assert_apart, assert_close
from models import BERT, LENGTH, LLAMA, VOCABULARY, randomize_encoding, tokens

ENCODINGS = {"rope": {"theta": 50.0}, "alibi": {}, "sinusoidal": {"scale": 1.0}}
"""One that rotates, one that biases, one that adds vectors, with their options."""
NEW = 5
"""How many tokens are generated."""


@dataclass(frozen=True)
class Host:
    """A tiny model of one kind.

    kind: decoder, encoder-decoder, vision. name: of its class. config: makes its config. submodel: the part that is patched.
    """

    kind: str
    name: str
    config: Callable[[], Any]
    submodel: str | None = None


def _t5gemma() -> Any:
    part = dict(LLAMA, head_dim=8, layer_types=["full_attention"] * 2, dropout_rate=0.0)
    half = transformers.T5GemmaModuleConfig(vocab_size=VOCABULARY, **part)
    return transformers.T5GemmaConfig(
        encoder=half, decoder=half, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )


HALF = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
"""Sizes of BART's encoder and decoder."""
HOSTS = {
    "llama": Host("decoder", "LlamaForCausalLM", lambda: transformers.LlamaConfig(vocab_size=VOCABULARY, **LLAMA)),
    "mistral": Host(
        "windowed",
        "MistralForCausalLM",
        lambda: transformers.MistralConfig(vocab_size=VOCABULARY, sliding_window=6, **LLAMA),
    ),
    "gemma3": Host(
        "windowed",
        "Gemma3ForCausalLM",
        lambda: transformers.Gemma3TextConfig(
            vocab_size=VOCABULARY,
            sliding_window=6,
            head_dim=8,
            layer_types=["sliding_attention", "full_attention"],
            **LLAMA,
        ),
    ),
    "t5gemma": Host("encoder-decoder", "T5GemmaForConditionalGeneration", _t5gemma, submodel="decoder"),
    "bart": Host(
        "encoder-decoder",
        "BartForConditionalGeneration",
        lambda: transformers.BartConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            max_position_embeddings=LENGTH,
            dropout=0.0,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            **{f"{half}_{name}": size for half in ("encoder", "decoder") for name, size in HALF.items()},
        ),
    ),
    "vit": Host(
        "vision",
        "ViTModel",
        lambda: transformers.ViTConfig(**BERT, image_size=32, patch_size=8, hidden_dropout_prob=0.0),
    ),
}
DECODERS, READERS = ("decoder", "windowed"), ("decoder", "windowed", "encoder-decoder")
WHOLE = ("decoder", "encoder-decoder", "vision")
EVERY = (*READERS, "vision")
"""Kinds of hosts."""


@dataclass(frozen=True)
class Case:
    """A patched model, the same without positions, and inputs for them."""

    host: Host
    encoding: str
    model: Any
    without: Any

    @property
    def twin(self) -> Any:
        """A copy of the model, to be changed."""
        return copy.deepcopy(self.model)

    def plain(self, model: Any, ids: Any = None, **more: Any) -> Any:
        """`[B, L] -> [B, L, V]`: the first output of one forward pass without a cache."""
        return model(**{**self.inputs(tokens(2, 12) if ids is None else ids), **more})[0]

    def inputs(self, ids: Any) -> dict[str, Any]:
        if self.host.kind == "vision":
            return {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))}
        if self.host.kind == "encoder-decoder":
            return {"input_ids": source(len(ids)), "decoder_input_ids": ids, "use_cache": False}
        return {"input_ids": ids, "use_cache": False}

    def step(self, model: Any, ids: Any, cache: Any, **more: Any) -> Any:
        """The logits of the tokens behind those that a cache holds."""
        return model(**{**self.inputs(ids), "past_key_values": cache, "use_cache": True, **more}).logits

    def cache(self, model: Any, kind: type = DynamicCache, **more: Any) -> Any:
        config = model.config.get_text_config(decoder=True)
        own = kind(config=config, **more)
        return EncoderDecoderCache(own, DynamicCache()) if self.host.kind == "encoder-decoder" else own

    def prompt(self, rows: int) -> dict[str, Any]:
        """For `generate`: of a decoder the first row is padded on the left."""
        ids, mask = tokens(rows, 6), torch.ones(rows, 6, dtype=torch.long)
        if self.host.kind == "encoder-decoder":
            return {"input_ids": source(rows), "decoder_input_ids": ids, "attention_mask": torch.ones(rows, 7)}
        mask[0, :2] = 0
        return {"input_ids": ids, "attention_mask": mask}

    def continued(self, model: Any, ids: Any) -> Any:
        """The logits from which the last NEW tokens of what `generate` has made were chosen."""
        if self.host.kind == "encoder-decoder":
            return self.plain(model, ids[:, :-1])[:, -NEW:]
        mask = torch.ones_like(ids)
        mask[(ids[:, :6] == self.prompt(1)["input_ids"]).all(1), :2] = 0
        return self.plain(model, ids[:, :-1], attention_mask=mask[:, :-1])[:, -NEW:]


def source(rows: int) -> Any:
    return tokens(1, 7, seed=5).expand(rows, -1)


@torch.no_grad()
def drawn(model: Any, seed: int = 0) -> Any:
    """The model with weights by which much of what comes out depends on where tokens are."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        if "posenc." not in name:
            start = 1.0 if name.endswith("weight") and value.ndim == 1 else 0.0
            value.copy_(start + torch.randn(value.shape, generator=generator) * (0.1 if value.ndim == 1 else 0.4))
    return model


@functools.cache
def case(host: str, encoding: str) -> Case:
    of = HOSTS[host]
    torch.manual_seed(0)
    stock = drawn(getattr(transformers, of.name)(of.config())).eval()
    if stock.can_generate():
        stock.generation_config.update(pad_token_id=0, decoder_start_token_id=1, forced_eos_token_id=None)
    model = hf_posenc.patch(stock, encoding, submodel=of.submodel, **ENCODINGS[encoding])
    return Case(of, encoding, randomize_encoding(model), hf_posenc.patch(stock, "none", submodel=of.submodel))


Expected = Callable[[Any], Any]
"""Model -> what it gives in one forward pass."""


@dataclass(frozen=True)
class Way:
    """run: what comes out, and what should. kinds: of hosts. refused: encoding -> the error instead.

    slow: "always", or "mostly", where make test runs it on Llama with alibi. needs: why it can't run without a GPU.
    close: tolerance, of the largest value.
    """

    run: Callable[[Case], tuple[Any, Expected]]
    kinds: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    slow: str = ""
    needs: str = ""
    close: float = 1e-5

    def marks(self, host: str, encoding: str) -> list[Any]:
        return [
            *([pytest.mark.gpu(self.needs)] if self.needs else []),
            *([pytest.mark.slow] if self.slow and (self.slow, host, encoding) != ("mostly", "llama", "alibi") else []),
        ]


WAYS: dict[str, Way] = {}
OFFLOADED = "an offloaded cache is brought back by a stream of CUDA's"


def way(name: str, kinds: tuple[str, ...] = READERS, **more: Any) -> Callable[[Any], Any]:
    def add(run: Any) -> Any:
        WAYS[name] = Way(run, kinds, **more)
        return run

    return add


def parameters() -> list[Any]:
    """Every way × host × encoding. `make test` runs each two of them together: on Llama and BART every way with every encoding,
    elsewhere each way with one, the next host with the next."""
    found = []
    for (row, (name, way)), (column, (host, of)) in itertools.product(enumerate(WAYS.items()), enumerate(HOSTS.items())):
        for number, encoding in enumerate(ENCODINGS if of.kind in way.kinds else ()):
            marks = way.marks(host, encoding)
            if host not in ("llama", "bart") and (row + column) % len(ENCODINGS) != number:
                marks.append(pytest.mark.slow)
            found.append(pytest.param(name, host, encoding, marks=marks))
    return found


# Caches.


def in_pieces(it: Case, model: Any, cache: Any, ids: Any = None, cuts: tuple[int, ...] = (7, 1, 2, 2)) -> Any:
    pieces = (tokens(2, 12) if ids is None else ids).split(cuts, dim=1)
    return torch.cat([it.step(model, piece, cache) for piece in pieces], dim=1)


def cached(kind: type, **more: Any) -> Callable[[Case], tuple[Any, Expected]]:
    @torch.no_grad()
    def run(it: Case) -> tuple[Any, Expected]:
        return in_pieces(it, it.model, it.cache(it.model, kind, **more)), it.plain

    return run


WAYS["DynamicCache"] = Way(cached(DynamicCache), READERS)
WAYS["StaticCache"] = Way(cached(StaticCache, max_cache_len=16), READERS)
WAYS["DynamicCache, offloaded"] = Way(cached(DynamicCache, offloading=True), READERS, needs=OFFLOADED)
WAYS["StaticCache, offloaded"] = Way(cached(StaticCache, max_cache_len=16, offloading=True), READERS, needs=OFFLOADED)
WAYS["QuantizedCache"] = Way(cached(functools.partial(QuantizedCache, "fp8")), ("decoder", "encoder-decoder"), close=5e-3)


@way("a prompt read once, continued in several ways")
@torch.no_grad()
def prompt_reuse(it: Case) -> tuple[Any, Expected]:
    prompt, cache = tokens(1, 6), it.cache(it.model)
    it.step(it.model, prompt, cache)
    texts = torch.cat([prompt.expand(3, -1), tokens(3, 4, seed=9)], dim=1)
    found = torch.cat([in_pieces(it, it.model, copy.deepcopy(cache), row[None, 6:], (1, 3)) for row in texts])
    return found, lambda model: it.plain(model, texts)[:, 6:]


@way("a cache cropped", ("decoder", "encoder-decoder"))
@torch.no_grad()
def cropped(it: Case) -> tuple[Any, Expected]:
    ids, cache = tokens(2, 12), it.cache(it.model)
    it.step(it.model, torch.cat([ids[:, :5], tokens(2, 4, seed=8)], dim=1), cache)
    cache.crop(-4)
    return in_pieces(it, it.model, cache, ids[:, 5:], (1, 6)), lambda model: it.plain(model, ids)[:, 5:]


# Generation: each token has been chosen from the logits that a forward pass over the text gives.


def generated(**settings: Any) -> Callable[[Case], tuple[Any, Expected]]:
    @torch.no_grad()
    def run(it: Case) -> tuple[Any, Expected]:
        return generate(it, it.model, **settings)

    return run


def generate(it: Case, model: Any, rows: int = 2, **settings: Any) -> tuple[Any, Expected]:
    torch.manual_seed(4)
    output = model.generate(
        **it.prompt(rows),
        max_new_tokens=NEW,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        **{"do_sample": False, **settings},
    )
    ids = output.sequences
    return torch.stack(output.logits, dim=1), lambda model: it.continued(model, ids)


for _name, _settings in {
    "greedy": {},
    "without a cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "offloaded cache": {"cache_implementation": "offloaded"},
    "offloaded static cache": {"cache_implementation": "offloaded_static"},
    "prefill in chunks": {"prefill_chunk_size": 4},
}.items():
    _kinds = DECODERS if "prefill" in _name else READERS
    WAYS[f"generate, {_name}"] = Way(generated(**_settings), _kinds, needs=OFFLOADED if "offloaded" in _name else "")
WAYS["generate, quantized cache"] = Way(
    generated(cache_implementation="quantized", cache_config={"backend": "fp8"}), ("decoder",), close=5e-3
)
WAYS["generate, prompt lookup"] = Way(generated(rows=1, prompt_lookup_num_tokens=3), READERS)


@way("generate, sampling several answers")
@torch.no_grad()
def sampled(it: Case) -> tuple[Any, Expected]:
    return generate(it, it.model, rows=1, num_return_sequences=2, do_sample=True, top_k=20)


@way("generate, assisted")
@torch.no_grad()
def assisted(it: Case) -> tuple[Any, Expected]:
    assistant = drawn(it.twin, seed=3)
    return generate(it, it.model, rows=1, assistant_model=assistant)


@way("generate, beams")
@torch.no_grad()
def beams(it: Case) -> tuple[Any, Expected]:
    """The score of a beam is the sum of the log-probabilities of its tokens."""
    output = it.model.generate(
        **it.prompt(2),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        num_beams=3,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ids = output.sequences

    def expected(model: Any) -> Any:
        likely = it.continued(model, ids).log_softmax(-1)
        return likely.gather(2, ids[:, -NEW:, None]).sum((1, 2))

    return output.sequences_scores, expected


# Packed texts.


ENDS = (0, 5, 12)
"""Where texts in a row begin and end."""


def apart(it: Case, model: Any) -> Any:
    ids = tokens(1, 12)
    return torch.cat([it.plain(model, ids[:, start:end]) for start, end in itertools.pairwise(ENDS)], dim=1)


def packed(it: Case, **more: Any) -> tuple[Any, Expected]:
    with torch.no_grad():
        return it.plain(it.model, tokens(1, 12), **more), functools.partial(apart, it)


@way("packed texts, by position_ids", DECODERS)
def packed_by_ids(it: Case) -> tuple[Any, Expected]:
    return packed(it, position_ids=torch.tensor([[*range(5), *range(7)]]))


@way("packed texts, as DataCollatorWithFlattening gives them", DECODERS)
@torch.no_grad()
def flattened(it: Case) -> tuple[Any, Expected]:
    texts = [{"input_ids": tokens(1, 12)[0, start:end].tolist()} for start, end in itertools.pairwise(ENDS)]
    rows = DataCollatorWithFlattening(return_flash_attn_kwargs=True, separator_id=-100)(texts)
    rows.pop("labels")
    return it.model(**rows, use_cache=False).logits, functools.partial(apart, it)


ENDS_ALONE = "cu_seq_lens_q.*position_ids"


@way("packed texts, by their ends alone", DECODERS, refused=dict.fromkeys(ENCODINGS, ENDS_ALONE))
def packed_by_ends(it: Case) -> tuple[Any, Expected]:
    ends = torch.tensor(ENDS, dtype=torch.int32)
    return packed(it, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=7, max_length_k=7)


# Training.


def embeddings(model: Any) -> Any:
    """The parameter which reads the inputs, so that all that comes after it has its part in its gradient."""
    ends = ("embed_tokens.weight", "shared.weight", "patch_embedding.weight", "patch_embeddings.projection.weight")
    return [parameter for name, parameter in model.named_parameters() if name.endswith(ends)][-1]


def gradient(it: Case, model: Any) -> Any:
    model.zero_grad()
    with torch.enable_grad():
        it.plain(model).square().mean().backward()
    return embeddings(model).grad


def checkpointed(reentrant: bool) -> Callable[[Case], tuple[Any, Expected]]:
    def run(it: Case) -> tuple[Any, Expected]:
        model = it.twin.train()
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return gradient(it, model), functools.partial(gradient, it)

    return run


WAYS["gradient checkpointing, reentrant"] = Way(checkpointed(True), EVERY)
WAYS["gradient checkpointing, not reentrant"] = Way(checkpointed(False), EVERY)


ADAPTED = r".*\.(q_proj|v_proj|query|value|fc1)"


@way("LoRA, saved and loaded", EVERY)
@torch.no_grad()
def lora(it: Case) -> tuple[Any, Expected]:
    with tempfile.TemporaryDirectory() as folder:
        it.model.save_pretrained(f"{folder}/base")
        base = type(it.model).from_pretrained(f"{folder}/base")
        adapted = get_peft_model(base, LoraConfig(r=2, lora_alpha=6, target_modules=ADAPTED))
        adapters = {name: value for name, value in adapted.named_parameters() if "lora_" in name}
        for number, value in enumerate(adapters.values()):
            value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(number)) / 5)
        adapted.save_pretrained(f"{folder}/adapter")
        again = PeftModel.from_pretrained(type(it.model).from_pretrained(f"{folder}/base"), f"{folder}/adapter").eval()

    def expected(model: Any) -> Any:
        merged = copy.deepcopy(model)
        for name, value in adapters.items():
            if "lora_A" in name:
                path = name.removeprefix("base_model.model.").partition(".lora_A")[0]
                merged.get_submodule(path).weight += 6 / 2 * adapters[name.replace("lora_A", "lora_B")] @ value
        return it.plain(merged)

    return it.plain(again), expected


# Compiled, exported.


@way("torch.compile, fullgraph", WHOLE, slow="mostly")
@torch.no_grad()
def compiled(it: Case) -> tuple[Any, Expected]:
    torch._dynamo.reset()
    return it.plain(torch.compile(it.model, fullgraph=True, backend="eager")), it.plain


@way("torch.compile, by inductor", WHOLE, slow="always")
@torch.no_grad()
def compiled_by_inductor(it: Case) -> tuple[Any, Expected]:
    torch._dynamo.reset()
    return it.plain(torch.compile(it.model, fullgraph=True)), it.plain


@way("torch.compile, a step with a static cache", slow="mostly")
@torch.no_grad()
def compiled_step(it: Case) -> tuple[Any, Expected]:
    torch._dynamo.reset()
    cache, pieces = it.cache(it.model, StaticCache, max_cache_len=16), tokens(2, 12).split((10, 1, 1), 1)
    step = torch.compile(it.model, fullgraph=True, backend="eager")
    found = [it.step(model, piece, cache) for model, piece in zip((it.model, step, step), pieces, strict=True)]
    return torch.cat(found, dim=1), it.plain


@way("torch.export", WHOLE, slow="mostly")
@torch.no_grad()
def exported(it: Case) -> tuple[Any, Expected]:
    program = torch.export.export(it.twin, (), it.inputs(tokens(2, 12)), strict=False)
    return it.plain(program.module()), it.plain


# Weights elsewhere, other modules.


def offloaded(offload: Callable[..., Any], *arguments: Any) -> Callable[[Case], tuple[Any, Expected]]:
    @torch.no_grad()
    def run(it: Case) -> tuple[Any, Expected]:
        model = it.twin
        with tempfile.TemporaryDirectory() as folder:
            offload(model, *([folder] if offload is disk_offload else []), execution_device="cpu", offload_buffers=True)
            return it.plain(model), it.plain

    return run


WAYS["weights offloaded to the CPU"] = Way(offloaded(cpu_offload), EVERY)
WAYS["weights offloaded to a disk"] = Way(offloaded(disk_offload), EVERY)


class EightBit(nn.Linear):
    """A linear layer whose weight is stored in 8 bits."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__(original.in_features, original.out_features, original.bias is not None, device="meta")
        self.register_buffer("scale", original.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.weight = nn.Parameter((original.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = original.bias

    def forward(self, states: Any) -> Any:
        return nn.functional.linear(states, self.weight * self.scale, self.bias)


def in_eight_bits(model: Any, stored: bool = True) -> Any:
    """The model with rounded weights: stored in 8 bits, or as plain linear layers."""
    model = copy.deepcopy(model)
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and not path.endswith("lm_head.out_proj") and path != "lm_head":
            rounded = EightBit(module)
            if stored:
                model.set_submodule(path, rounded)
            else:
                module.weight.copy_(rounded.weight * rounded.scale)
    return model


@way("linear layers replaced behind patch", EVERY)
@torch.no_grad()
def quantised_behind(it: Case) -> tuple[Any, Expected]:
    return it.plain(in_eight_bits(it.model)), lambda model: it.plain(in_eight_bits(model, stored=False))


CHANGED = "parts were replaced can't be rebuilt"


@way("linear layers replaced before patch", EVERY, refused=dict.fromkeys(ENCODINGS, CHANGED))
def quantised_before(it: Case) -> tuple[Any, Expected]:
    stock = in_eight_bits(hf_posenc.unpatch(it.model))
    hf_posenc.patch(stock, it.encoding, submodel=it.host.submodel)
    raise AssertionError("not refused")


def chosen(it: Case, made: Any) -> tuple[Any, Expected]:
    """Which tokens were chosen behind a prompt of six, and which forward passes would choose: `[B, NEW, V]`."""

    def expected(model: Any) -> Any:
        return nn.functional.one_hot(it.plain(model, made[:, :-1])[:, 5:].argmax(-1), VOCABULARY).float()

    return nn.functional.one_hot(made[:, 6:], VOCABULARY).float(), expected


@way("generate_batch", ("decoder",), refused={"alibi": "generate_batch.*no bias by distance"})
@torch.no_grad()
def continuous(it: Case) -> tuple[Any, Expected]:
    outputs = it.twin.generate_batch(
        tokens(3, 6).tolist(),
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, page_size=16, max_batch_tokens=32),
    )
    assert all(output.error is None for output in outputs.values())
    return chosen(it, torch.tensor([[*output.prompt_ids, *output.generated_tokens] for output in outputs.values()]))


@way("a pipeline", ("decoder",))
def piped(it: Case) -> tuple[Any, Expected]:
    words = {f"w{number}": number for number in range(VOCABULARY)}
    plain = Tokenizer(WordLevel(words))
    plain.pre_tokenizer = WhitespaceSplit()
    write = pipeline("text-generation", model=it.twin, tokenizer=PreTrainedTokenizerFast(tokenizer_object=plain))
    texts = [" ".join(f"w{number}" for number in row) for row in tokens(3, 6).tolist()]
    answers = write(texts, return_tensors=True, max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    return chosen(it, torch.tensor([answer["generated_token_ids"] for (answer,) in answers]))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of PEFT and inductor
@pytest.mark.parametrize(("name", "host", "encoding"), parameters())
def test_ways(name, host, encoding, monkeypatch):
    # The rounding of a quantised cache would hide faults.
    monkeypatch.setattr(Fp8QuantizedLayer, "fp8_dtype", torch.float16)
    monkeypatch.setattr(Fp8QuantizedLayer, "fp8_max", 1.0)
    it, way = case(host, encoding), WAYS[name]
    if encoding in way.refused:
        with pytest.raises(ValueError, match=way.refused[encoding]):
            way.run(it)
        return
    found, expected = way.run(it)
    check(it, found, expected, way.close)


def check(it: Case, found: Any, expected: Expected, close: float = 1e-5) -> None:
    with torch.no_grad():
        right, without = expected(it.model), expected(it.without)
    assert_close(found, right, rtol=max(1e-4, close), atol=close)
    assert_apart(right, without, by=max(1e-2, 3 * close))


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory, launch):
    """What two processes have found."""
    folder = tmp_path_factory.mktemp("ways")
    codes, said = launch("ways_worker", folder, processes=2)
    assert codes == [0, 0], said[-4000:]
    return torch.load(folder / "found.pt", weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["FSDP2", "DDP", "tensor parallel"])
def test_two_processes(name, host, encoding, in_two_processes):
    it, found = case(host, encoding), in_two_processes[name, host, encoding]
    if name == "tensor parallel" and not it.model.supports_tp_plan:
        assert re.search("ValueError: .*has no `tp_plan`", found)  # an error of Transformers, for stock models, too
        return
    if (name, encoding) == ("tensor parallel", "alibi"):
        assert re.search("ValueError: .*of 4 heads, of which this attention has 2: a tensor-parallel plan.*Take FSDP", found)
        return
    assert not isinstance(found, str), found
    check(it, found[0], it.plain)
    if name != "tensor parallel":
        check(it, found[1], functools.partial(gradient, it))
