"""The models of studies and their encodings: tiny models with random weights, models of a config file, and checkpoints.

A model's weights depend only on its config or directory and the seed, so all encodings start from the same weights.
"""

import hashlib
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
from transformers.utils import cached_file

import hf_posenc
from hf_posenc.serialization.tokenizer_files import required_tokenizer
from hf_posenc.studies import versions
from hf_posenc.studies.tasks import CAUSAL, LABELS, MASKED

STD, TOKEN_STD, OUTPUT_STD = 0.1, 0.7, 0.02
"""Standard deviations of weights, token embeddings (to match the size of sinusoidal embeddings), and output embeddings."""

HEADS: dict[str, Any] = {
    CAUSAL: MODEL_FOR_CAUSAL_LM_MAPPING,
    MASKED: MODEL_FOR_MASKED_LM_MAPPING,
    LABELS: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
}
"""Head -> config class -> model class."""
CHECKPOINT, CONFIG = "checkpoint:", "config:"
"""Prefixes of a model's name: the directory or Hub ID of a checkpoint follows, or a config.json for random weights."""
CONFIG_LEARNING_RATE = 1e-3
"""The default of a study for models of a config file."""
PLACEMENT = ("host", "inject", "max_length")
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


def version(encoding: Encoding) -> dict[str, str]:
    """A digest of the code of each custom encoding, by its name and file. Empty for encodings of hf_posenc."""
    kinds, found = hf_posenc.list_encodings(), {}
    for name in encoding.options["type"].split("+"):
        if name in kinds and not kinds[name].__module__.startswith("hf_posenc."):
            module = kinds[name].__module__
            found[f"encoding {name} ({Path(versions.source_of(module) or 'no file').name})"] = versions.digest(module)
    return found


def file_name(label: str) -> str:
    """A name for files and directories that is unique for each label."""
    plain = re.sub(r"[^A-Za-z0-9_.+-]+", "_", label)[:80]
    return plain if plain == label else f"{plain}-{zlib.crc32(label.encode()):08x}"


@dataclass(frozen=True)
class Kind:
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


MODELS = {
    "llama": Kind("llama", (CAUSAL, LABELS)),
    "gpt2": Kind("gpt2", (CAUSAL, LABELS), {"intermediate_size": "n_inner"}),
    "bert": Kind("bert", (MASKED, LABELS), learning_rate=2e-3),
}
"""Name -> kind of tiny model. Other config options are specified separately."""


def encoding(given: str | dict[str, Any]) -> Encoding:
    """An encoding by its name or dict. Raises ValueError if it is unknown."""
    whole = hf_posenc.PosEncLlamaConfig(position_encoding=given).position_encoding
    name, said = (given, {}) if isinstance(given, str) else (given["type"], given)
    options = {option: value for option, value in whole.items() if option not in PLACEMENT or option in said}
    kind = hf_posenc.list_encodings().get(options["type"])
    # An alias that sets options differs from its class with default options.
    name = name if kind and kind.aliases.get(name) else options["type"]
    changed = [f"{option}={json.dumps(value)}" for option, value in said.items() if option != "type"]
    return Encoding(" ".join([name, *changed]), options)


def stock(
    model: str,
    sizes: Sizes | None,
    vocabulary: int,
    trained_tokens: int,
    seed: int,
    head: str = CAUSAL,
    options: dict[str, Any] | None = None,
    classes: int = 2,
) -> PreTrainedModel:
    """A model with its original positions, for inputs of up to `trained_tokens` tokens, without dropout.

    `sizes`, `vocabulary`, and config `options` don't apply to checkpoints.
    """
    torch.manual_seed(seed)
    if directory := directory_of(model):
        return _loaded(directory, head, classes)
    given: dict[str, Any] = {"vocab_size": vocabulary, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))}
    if head == LABELS:  # decoders look for the last non-padding token: add an unused padding token
        given |= {"vocab_size": vocabulary + 1, "pad_token_id": vocabulary, "num_labels": classes}
    if file := config_of(model):
        config = without_dropout(AutoConfig.from_pretrained(file, **given))
        return HEADS[head][type(config)](config)
    kind = MODELS[model]
    given |= {**vars(sizes or Sizes()), "max_position_embeddings": trained_tokens}
    given |= {"initializer_range": STD, "tie_word_embeddings": False}
    given = {kind.size_names.get(name, name): value for name, value in given.items()}
    config = without_dropout(AutoConfig.for_model(kind.model_type, **{**given, **(options or {})}))
    made = HEADS[head][type(config)](config)
    for module, std in ((made.get_input_embeddings(), TOKEN_STD), (made.get_output_embeddings(), OUTPUT_STD)):
        if module is not None:
            torch.nn.init.normal_(module.get_parameter("weight"), std=std)
    return made


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """Disable dropout and router noise, which would differ between encodings that consume random numbers and others."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            without_dropout(value)
        elif isinstance(value, float) and is_dropout(name):
            setattr(config, name, 0.0)
    return config


def is_dropout(option: str) -> bool:
    """Whether a config option is a dropout probability, or the noise of a router."""
    return any(word in option for word in ("dropout", "layerdrop", "jitter_noise")) or option.endswith("_pdrop")


def directory_of(model: str) -> str | None:
    """The directory or Hub ID of a checkpoint, or None for a model with random weights."""
    return model.removeprefix(CHECKPOINT) if model.startswith(CHECKPOINT) else None


def config_of(model: str) -> str | None:
    """The config file of a model, or its directory. None for other models."""
    return model.removeprefix(CONFIG) if model.startswith(CONFIG) else None


def heads_of(model: str) -> tuple[str, ...]:
    """The heads that a model supports. Raises ValueError if it isn't an encoder or decoder language model."""
    if model in MODELS:
        return MODELS[model].heads
    path = str(directory_of(model) or config_of(model))
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"The config of {path} can't be loaded: {error}") from None
    kind = type(config)
    decodes = getattr(config, "is_decoder", False) or kind not in HEADS[MASKED]
    own = CAUSAL if decodes else MASKED
    if config.is_encoder_decoder or kind not in HEADS[own]:
        raise ValueError(f"{path} is a model of type {config.model_type}. Use an encoder with a masked-LM head, or a decoder.")
    return (own, LABELS) if kind in HEADS[LABELS] else (own,)


def new_weights(directory: str, head: str, classes: int = 2) -> list[str]:
    """The weights that a checkpoint lacks for a head. They are initialized at random from the seed."""
    config = without_dropout(AutoConfig.from_pretrained(directory, num_labels=classes))
    kind = HEADS[head][type(config)]
    found = kind.from_pretrained(directory, config=config, output_loading_info=True, ignore_mismatched_sizes=head == LABELS)[1]
    return sorted([*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])])


def _loaded(directory: str, head: str, classes: int) -> PreTrainedModel:
    config = without_dropout(AutoConfig.from_pretrained(directory, **({"num_labels": classes} if head == LABELS else {})))
    if head == LABELS and config.pad_token_id is None:
        tokenizer = required_tokenizer(directory)
        config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    kind = HEADS[head][type(config)]
    return kind.from_pretrained(directory, config=config, dtype=torch.float32, ignore_mismatched_sizes=head == LABELS)


def files_digest(path: str) -> str:
    """A digest of a config file, or of a directory's weights, config, and tokenizer. For a Hub ID, the commit."""
    found, directory = hashlib.sha256(), Path(path)
    if not directory.exists():
        return Path(str(cached_file(path, "config.json"))).parent.name
    files = [file for end in ("safetensors", "bin", "json") for file in directory.glob(f"*.{end}")] or [directory]
    for file in sorted(files):
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


def why_unsupported(
    model: str, sizes: Sizes | None, chosen: Encoding, head: str = CAUSAL, options: dict[str, Any] | None = None
) -> str | None:
    """The reason why a model doesn't support an encoding, or None."""
    try:
        made = fitting(lambda: stock(model, sizes, 4, 8, 0, head, options), chosen, 0, tokens=8)
        with torch.no_grad():
            made(input_ids=torch.arange(4)[None])
    except (ValueError, hf_posenc.UnsupportedModelError) as error:
        return str(error)
    return None
