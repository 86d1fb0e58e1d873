"""One model called by many threads at once, from within its own forward pass, and after one that failed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from attacks.cases import Case, Comparison, Settings, no_grad
from attacks.subjects import Subject, padded, subject, tokens

TEXTS = [tokens(length, length) for length in (3, 17, 5, 11, 8, 23, 2, 14)]


def cases(settings: Settings) -> Iterator[Case]:
    attacks: dict[str, Any] = {
        "lengths": lengths,
        "padded batches": batches,
        "each with its cache": caches,
        "after an error": after_an_error,
        "two models in one thread": nested,
    }
    for attack, run in attacks.items():
        for host in ("bert", "gpt2", "llama") if run is not caches else ("gpt2", "llama"):
            for encoding in settings.encodings:
                yield Case(attack, host, encoding, no_grad(on, run, host, encoding))


def on(attack: Any, host: str, encoding: str) -> Iterator[Comparison]:
    return attack(made(host, encoding))


def made(host: str, encoding: str) -> Subject:
    return subject(host, encoding, AutoModelForCausalLM) if host != "bert" else subject(host, encoding)


def at_once(function: Any, items: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(torch.no_grad()(function), items))


def lengths(it: Subject) -> Iterator[Comparison]:
    texts = TEXTS * 4
    for text, output in zip(texts, at_once(lambda text: it.model(text[None])[0][0], texts), strict=True):
        yield output, it.expected(text)


def batches(it: Subject) -> Iterator[Comparison]:
    groups = [(TEXTS[index : index + 3], side) for index in range(6) for side in ("left", "right")] * 2

    def run(group: tuple[list[Tensor], str]) -> list[Tensor]:
        ids, mask = padded(*group)
        output = it.model(ids, attention_mask=mask)[0]
        return [row[shown.bool()] for row, shown in zip(output, mask, strict=True)]

    for (texts, _), rows in zip(groups, at_once(run, groups), strict=True):
        for text, row in zip(texts, rows, strict=True):
            yield row, it.expected(text)


def caches(it: Subject) -> Iterator[Comparison]:
    def run(text: Tensor) -> Tensor:
        cache = DynamicCache(config=it.model.config)
        return torch.cat([it.model(token[None], past_key_values=cache)[0][0] for token in text.split(1)])

    texts = TEXTS * 2
    for text, output in zip(texts, at_once(run, texts), strict=True):
        yield output, it.expected(text)


def after_an_error(it: Subject) -> Iterator[Comparison]:
    """An exception in the last layer leaves nothing behind, neither in this model nor in another one."""

    def fail(*_: Any) -> None:
        raise KeyError("on purpose")

    last = [module for name, module in it.model.named_modules() if name.endswith((".1", ".1.attention"))][-1]
    handle = last.register_forward_pre_hook(fail)
    for text in TEXTS[:3]:
        try:
            it.model(text[None])
            raise AssertionError("the hook didn't run")
        except KeyError:
            pass
    handle.remove()
    for text in TEXTS:
        yield it.model(text[None])[0][0], it.expected(text)


def nested(it: Subject) -> Iterator[Comparison]:
    """A model that is called while another one, and it itself, are in their forward passes."""
    inner, depth = [], 0

    def call(*_: Any) -> None:
        nonlocal depth
        if depth == 0:
            depth += 1
            inner.append((TEXTS[1], it.model(TEXTS[1][None])[0][0]))
            inner.append((TEXTS[3], it.oracle(TEXTS[3][None])[0][0]))
            depth -= 1

    layers = [module for name, module in it.model.named_modules() if name.endswith((".0", ".1")) and "." in name]
    handles = [layer.register_forward_pre_hook(call) for layer in layers]
    outer = it.model(TEXTS[5][None])[0][0]
    for handle in handles:
        handle.remove()
    yield len(inner) >= 2, True
    yield outer, it.expected(TEXTS[5])
    for text, output in inner:
        yield output, it.expected(text)
