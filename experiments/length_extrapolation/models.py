"""The models of studies, which are tiny models with random weights or checkpoints, and their encodings.

A model's weights depend only on its config or directory and the seed, so all encodings start from the same weights.
"""

import hashlib
import inspect
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

import hf_posenc
from experiments.length_extrapolation.tasks import CAUSAL, LABELS, MASKED
from hf_posenc.serialization.tokenizer_files import required_tokenizer

STD, TOKEN_STD, OUTPUT_STD = 0.1, 0.7, 0.02
"""Standard deviations of weights, token embeddings (to match the size of sinusoidal embeddings), and output embeddings."""

HEADS: dict[str, Any] = {
    CAUSAL: MODEL_FOR_CAUSAL_LM_MAPPING,
    MASKED: MODEL_FOR_MASKED_LM_MAPPING,
    LABELS: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
}
"""Head -> config class -> model class."""
CHECKPOINT = "checkpoint:"
"""Prefix of a checkpoint's name, followed by its directory."""

BESIDE = ("host", "inject", "max_length")
"""Keys in an encoding's dict besides its options."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a tiny model."""

    hidden_size: int = 64
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    intermediate_size: int = 128


@dataclass(frozen=True)
class Encoding:
    """An encoding of a study: its label (name and specified options), and its canonical dict."""

    label: str
    options: dict[str, Any]

    @property
    def file_name(self) -> str:
        return file_name(self.label)


def own_code(encoding: Encoding) -> dict[str, str]:
    """A digest of the files that define a custom encoding, as `code`. Empty for encodings of hf_posenc."""
    kind = hf_posenc.list_encodings()
    files = [
        inspect.getsourcefile(kind[name])
        for name in encoding.options["type"].split("+")
        if name in kind and not kind[name].__module__.startswith("hf_posenc.")
    ]
    code = b"".join(Path(file).read_bytes() for file in files if file is not None)
    return {"code": hashlib.sha256(code).hexdigest()[:16]} if code else {}


def file_name(label: str) -> str:
    """A name for files and directories that is unique for each label."""
    plain = re.sub(r"[^A-Za-z0-9_.+-]+", "_", label)[:80]
    return plain if plain == label else f"{plain}-{zlib.crc32(label.encode()):08x}"


@dataclass(frozen=True)
class Host:
    """A kind of tiny model.

    model_type: its name in Transformers.
    heads: supported heads. CAUSAL is for decoders, MASKED for encoders.
    size_names: name in Sizes -> name in its config, if they differ.
    learning_rate: default of a study.
    """

    model_type: str
    heads: tuple[str, ...]
    size_names: dict[str, str] = field(default_factory=dict)
    learning_rate: float = 5e-3


HOSTS = {
    "llama": Host("llama", (CAUSAL, LABELS)),
    "gpt2": Host("gpt2", (CAUSAL, LABELS), {"intermediate_size": "n_inner"}),
    "bert": Host("bert", (MASKED, LABELS), learning_rate=2e-3),
}
"""Name -> kind of tiny model. Other config options are specified separately."""


def encoding(given: str | dict[str, Any]) -> Encoding:
    """An encoding by its name or dict. Raises ValueError if it is unknown."""
    whole = hf_posenc.PosEncLlamaConfig(position_encoding=given).position_encoding
    name, said = (given, {}) if isinstance(given, str) else (given["type"], given)
    options = {option: value for option, value in whole.items() if option not in BESIDE or option in said}
    kind = hf_posenc.list_encodings().get(options["type"])
    # An alias that sets options differs from its class with default options.
    name = name if kind and kind.aliases.get(name) else options["type"]
    changed = [f"{option}={json.dumps(value)}" for option, value in said.items() if option != "type"]
    return Encoding(" ".join([name, *changed]), options)


def stock(
    host: str,
    sizes: Sizes | None,
    vocabulary: int,
    trained_tokens: int,
    seed: int,
    head: str = CAUSAL,
    options: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """A model with its original positions, for inputs of up to `trained_tokens` tokens, without dropout.

    `sizes`, `vocabulary`, and config `options` apply to tiny models only.
    """
    torch.manual_seed(seed)
    if folder := folder_of(host):
        return _loaded(folder, head)
    row, given = HOSTS[host], {**vars(sizes or Sizes()), "vocab_size": vocabulary, "max_position_embeddings": trained_tokens}
    given |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    given |= {"initializer_range": STD, "tie_word_embeddings": False}
    if head == LABELS:  # decoders look for the last non-padding token: add an unused padding token
        given |= {"vocab_size": vocabulary + 1, "pad_token_id": vocabulary, "num_labels": 2}
    given = {row.size_names.get(name, name): value for name, value in given.items()}
    config = without_dropout(AutoConfig.for_model(row.model_type, **{**given, **(options or {})}))
    model = HEADS[head][type(config)](config)
    for module, std in ((model.get_input_embeddings(), TOKEN_STD), (model.get_output_embeddings(), OUTPUT_STD)):
        if module is not None:
            torch.nn.init.normal_(module.get_parameter("weight"), std=std)
    return model


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """Disable dropout. It would differ between encodings that consume random numbers and others."""
    for name, value in vars(config).items():
        if isinstance(value, float) and is_dropout(name):
            setattr(config, name, 0.0)
    return config


def is_dropout(option: str) -> bool:
    """Whether a config option is a dropout probability."""
    return "dropout" in option or option.endswith("_pdrop")


def folder_of(host: str) -> str | None:
    """The directory of a checkpoint, or None for a tiny model."""
    return host.removeprefix(CHECKPOINT) if host.startswith(CHECKPOINT) else None


def heads_of(host: str) -> tuple[str, ...]:
    """The heads that a model supports. Raises ValueError if a checkpoint isn't an encoder or decoder language model."""
    if (folder := folder_of(host)) is None:
        return HOSTS[host].heads
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"{folder} is no checkpoint: it is to be a local folder with a config.json")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is no checkpoint: {error}") from None
    kind = type(config)
    decodes = getattr(config, "is_decoder", False) or kind not in HEADS[MASKED]
    own = CAUSAL if decodes else MASKED
    if config.is_encoder_decoder or kind not in HEADS[own]:
        raise ValueError(f"{folder} is a {config.model_type}: allowed are encoders with a masked, decoders with a causal head")
    return (own, LABELS) if kind in HEADS[LABELS] else (own,)


def new_weights(folder: str, head: str) -> list[str]:
    """The weights that a checkpoint lacks for a head. They are initialized at random from the seed."""
    config = without_dropout(AutoConfig.from_pretrained(folder))
    kind = HEADS[head][type(config)]
    return sorted(kind.from_pretrained(folder, config=config, output_loading_info=True)[1]["missing_keys"])


def _loaded(folder: str, head: str) -> PreTrainedModel:
    config = without_dropout(AutoConfig.from_pretrained(folder, **({"num_labels": 2} if head == LABELS else {})))
    if head == LABELS and config.pad_token_id is None:
        tokenizer = required_tokenizer(folder)
        config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return HEADS[head][type(config)].from_pretrained(folder, config=config, dtype=torch.float32)


def weights_digest(folder: str) -> str:
    """A digest of a checkpoint's weights, config, and tokenizer."""
    found = hashlib.sha256()
    for file in sorted(file for end in ("safetensors", "bin", "json") for file in Path(folder).glob(f"*.{end}")):
        with file.open("rb") as opened:
            while part := opened.read(2**20):
                found.update(part)
    return found.hexdigest()[:16]


def patched(model: PreTrainedModel, chosen: Encoding, seed: int, max_length: int | None = None) -> PreTrainedModel:
    """The model with another encoding, whose parameters depend only on the seed."""
    torch.manual_seed(seed)
    return hf_posenc.patch(model, dict(chosen.options), max_length=max_length)


def fitting(make: Callable[[], PreTrainedModel], chosen: Encoding, seed: int, tokens: int) -> PreTrainedModel:
    """The model with another encoding, for inputs of `tokens` tokens. Encodings with a length limit get this limit."""
    model = patched(make(), chosen, seed)
    return model if hf_posenc.inspect(model).max_length is None else patched(make(), chosen, seed, tokens)


def refusal(
    host: str, sizes: Sizes | None, chosen: Encoding, head: str = CAUSAL, options: dict[str, Any] | None = None
) -> str | None:
    """The reason why a model doesn't support an encoding, or None."""
    try:
        model = fitting(lambda: stock(host, sizes, 4, 8, 0, head, options), chosen, 0, tokens=8)
        with torch.no_grad():
            model(input_ids=torch.arange(4)[None])
    except (ValueError, hf_posenc.UnsupportedModelError) as error:
        return str(error)
    return None
