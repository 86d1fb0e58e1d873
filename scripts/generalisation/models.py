"""Tiny decoders with random weights, and the encodings that they are given.

A host's weights depend on its sizes and the seed alone, so all encodings start from the same ones.
"""

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_posenc

STD, TOKEN_STD, OUTPUT_STD = 0.1, 0.7, 0.02
"""Standard deviations of the weights, of token vectors, which have the size of sinusoidal ones so, and of what makes logits."""


BESIDE = ("host", "inject", "max_length")
"""What a config has beside the options of an encoding."""


@dataclass(frozen=True)
class Sizes:
    """Of a host."""

    hidden_size: int = 64
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    intermediate_size: int = 128


@dataclass(frozen=True)
class Encoding:
    """An encoding of a study: a label, its name and the options that were given, and its canonical dict."""

    label: str
    options: dict[str, Any]

    @property
    def file_name(self) -> str:
        plain = re.sub(r"[^A-Za-z0-9_.+-]+", "_", self.label)[:80]
        return plain if plain == self.label else f"{plain}-{zlib.crc32(self.label.encode()):08x}"


def encoding(given: str | dict[str, Any]) -> Encoding:
    """An encoding by its name, or as a dict. Raises ValueError where there is none such."""
    whole = hf_posenc.PosEncLlamaConfig(position_encoding=given).position_encoding
    name, said = (given, {}) if isinstance(given, str) else (given["type"], given)
    options = {option: value for option, value in whole.items() if option not in BESIDE or option in said}
    kind = hf_posenc.list_encodings().get(options["type"])
    # An alias that sets options is another encoding than its class by default.
    name = name if kind and kind.aliases.get(name) else options["type"]
    changed = [f"{option}={json.dumps(value)}" for option, value in said.items() if option != "type"]
    return Encoding(" ".join([name, *changed]), options)


def llama(sizes: Sizes, vocabulary: int, trained_tokens: int) -> PreTrainedModel:
    given: dict[str, Any] = {**vars(sizes), "vocab_size": vocabulary, "max_position_embeddings": trained_tokens}
    given |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return LlamaForCausalLM(LlamaConfig(**given, initializer_range=STD))


HOSTS: dict[str, Callable[[Sizes, int, int], PreTrainedModel]] = {"llama": llama}
"""Name -> sizes, vocabulary, longest row in tokens that is trained -> a causal language model."""


def stock(host: str, sizes: Sizes, vocabulary: int, trained_tokens: int, seed: int) -> PreTrainedModel:
    """A host with its own positions."""
    torch.manual_seed(seed)
    model = HOSTS[host](sizes, vocabulary, trained_tokens)
    for module, std in ((model.get_input_embeddings(), TOKEN_STD), (model.get_output_embeddings(), OUTPUT_STD)):
        torch.nn.init.normal_(module.get_parameter("weight"), std=std)
    return model


def patched(model: PreTrainedModel, chosen: Encoding, seed: int, max_length: int | None = None) -> PreTrainedModel:
    """A host with another encoding, whose parameters depend on the seed alone."""
    torch.manual_seed(seed)
    return hf_posenc.patch(model, dict(chosen.options), max_length=max_length)


def fitting(make: Callable[[], PreTrainedModel], chosen: Encoding, seed: int, tokens: int) -> PreTrainedModel:
    """A host with another encoding, for rows of so many tokens: what ends at a length is given this, others have no limit."""
    model = patched(make(), chosen, seed)
    return model if hf_posenc.inspect(model).max_length is None else patched(make(), chosen, seed, tokens)


def refusal(host: str, sizes: Sizes, chosen: Encoding) -> str | None:
    """Why a host can't have an encoding, or None."""
    try:
        model = fitting(lambda: stock(host, sizes, 4, 8, seed=0), chosen, 0, tokens=8)
        with torch.no_grad():
            model(input_ids=torch.arange(4)[None])
    except (ValueError, hf_posenc.HostRefused) as error:
        return str(error)
    return None
