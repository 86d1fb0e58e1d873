"""Attention implementations, switched in every place where Transformers can: the encoding stays, or there is an error."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoModelForCausalLM, EncoderDecoderModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from attacks.cases import Case, Comparison, Settings, no_grad
from attacks.subjects import ITSELF, as_itself, padded, patched, stock, subject, tokens

NAMES = itertools.count()
TEXTS = [tokens(9, 1), tokens(6, 2)]


def own(kind: str = "attack_own") -> str:
    """An attention implementation under a name that nothing has been told of before."""
    name = f"{kind}_{next(NAMES)}"
    AttentionInterface.register(name, sdpa_attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def through_config(model: Any, name: str) -> None:
    model.config._attn_implementation = name


SWITCHES: dict[str, Callable[[Any], Any]] = {
    "eager": lambda model: model.set_attn_implementation("eager"),
    "sdpa": lambda model: model.set_attn_implementation("sdpa"),
    "flex_attention": lambda model: model.set_attn_implementation("flex_attention"),
    "there and back": lambda model: [model.set_attn_implementation(name) for name in ("eager", "sdpa", "eager")],
    "own function": lambda model: model.set_attn_implementation(own()),
    "own function that sounds known": lambda model: model.set_attn_implementation(own("sdpa_attack")),
    "own function, in the config": lambda model: through_config(model, own()),
    "eager, in the config": lambda model: through_config(model, "eager"),
    "flex_attention, in the config": lambda model: through_config(model, "flex_attention"),
    "by a dict": lambda model: model.set_attn_implementation({"": "eager"}),
    "flash_attention_2": lambda model: model.set_attn_implementation("flash_attention_2"),
    "paged|eager": lambda model: model.set_attn_implementation("paged|eager"),
    "an unknown name": lambda model: model.set_attn_implementation("nonsense"),
    "an unknown name, in the config": lambda model: through_config(model, "nonsense"),
}
PLACES: dict[str, Callable[[Any], Any]] = {
    "parent": lambda it: it,
    "child": lambda it: it.decoder,
    "base of a child": lambda it: it.decoder.base_model,
}
"""Where in an encoder-decoder model."""


def cases(settings: Settings) -> Iterator[Case]:
    for attack, switch in SWITCHES.items():
        for host in ("bert", "gpt2", "llama", "distilbert"):
            for encoding in settings.encodings:
                run = no_grad(switched, host, encoding, switch)
                yield Case(attack, host, encoding, run, stock=functools.partial(used, host, switch))
    for place, at in PLACES.items():
        for attack, switch in SWITCHES.items():
            for encoding in settings.encodings:
                run, alone = no_grad(within, encoding, switch, at), functools.partial(used_within, switch, at)
                yield Case(f"{attack}, {place}", "encoder-decoder", encoding, run, stock=alone)


def switched(host: str, encoding: str, switch: Callable[[Any], Any]) -> Iterator[Comparison]:
    it = subject(host, encoding)
    switch(it.model)
    ids, mask = padded(TEXTS, "right")
    output = it.model(ids, attention_mask=mask)[0]
    for row, text in zip(output, TEXTS, strict=True):
        yield row[: len(text)], it.expected(text)


def used(host: str, switch: Callable[[Any], Any]) -> Any:
    model = stock(host)
    switch(model)
    ids, mask = padded(TEXTS, "right")
    return model(ids, attention_mask=mask)[0]


def couple(encoding: str) -> Any:
    """BERT reads, and another BERT writes what it reads on; both patched."""

    def part(auto: Any, **changes: Any) -> Any:
        model = stock("bert", auto, **changes)
        return model if not encoding else as_itself(model, "bert") if encoding == ITSELF else patched(model, encoding)

    decoder = part(AutoModelForCausalLM, is_decoder=True, add_cross_attention=True)
    return EncoderDecoderModel(encoder=part(AutoModel), decoder=decoder).eval()


def within(encoding: str, switch: Callable[[Any], Any], at: Callable[[Any], Any]) -> Iterator[Comparison]:
    expected, model = couple(encoding if encoding != ITSELF else ""), couple(encoding)
    switch(at(model))
    yield spoken(model), spoken(expected)


def used_within(switch: Callable[[Any], Any], at: Callable[[Any], Any]) -> Any:
    model = couple("")
    switch(at(model))
    return spoken(model)


def spoken(model: Any) -> torch.Tensor:
    return model(input_ids=TEXTS[0][None], decoder_input_ids=TEXTS[1][None]).logits
