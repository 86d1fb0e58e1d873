"""Hosts, which are tiny models with random weights or checkpoints, and the encodings that they are given.

A host's weights depend on its config or folder and the seed alone, so all encodings start from the same ones.
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
"""Standard deviations of the weights, of token vectors, which have the size of sinusoidal ones so, and of what makes logits."""

HEADS: dict[str, Any] = {
    CAUSAL: MODEL_FOR_CAUSAL_LM_MAPPING,
    MASKED: MODEL_FOR_MASKED_LM_MAPPING,
    LABELS: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
}
"""Head -> class of a config -> class of a model."""
CHECKPOINT = "checkpoint:"
"""Begins the name of a host that is a checkpoint: a folder follows."""

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
        return file_name(self.label)


def own_code(encoding: Encoding) -> dict[str, str]:
    """A digest of the files that define an encoding of one's own, as `code`; nothing of one that is part of hf_posenc."""
    kind = hf_posenc.list_encodings()
    files = [
        inspect.getsourcefile(kind[name])
        for name in encoding.options["type"].split("+")
        if name in kind and not kind[name].__module__.startswith("hf_posenc.")
    ]
    code = b"".join(Path(file).read_bytes() for file in files if file is not None)
    return {"code": hashlib.sha256(code).hexdigest()[:16]} if code else {}


def file_name(label: str) -> str:
    """A name for files and folders, another one for each label."""
    plain = re.sub(r"[^A-Za-z0-9_.+-]+", "_", label)[:80]
    return plain if plain == label else f"{plain}-{zlib.crc32(label.encode()):08x}"


@dataclass(frozen=True)
class Host:
    """
    model_type: of Transformers.
    heads: those that it can have; a decoder's is CAUSAL, an encoder's MASKED.
    size_names: the names of Sizes that its config has others for.
    learning_rate: what a study has by default.
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
"""Name -> host. What a config has beside is given by its own options."""


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


def stock(
    host: str,
    sizes: Sizes | None,
    vocabulary: int,
    trained_tokens: int,
    seed: int,
    head: str = CAUSAL,
    options: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """A host with its own positions, for rows of up to `trained_tokens`, without dropout.

    Sizes, vocabulary and options of the config are those of tiny hosts; a checkpoint has its own.
    """
    torch.manual_seed(seed)
    if folder := folder_of(host):
        return _loaded(folder, head)
    row, given = HOSTS[host], {**vars(sizes or Sizes()), "vocab_size": vocabulary, "max_position_embeddings": trained_tokens}
    given |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    given |= {"initializer_range": STD, "tie_word_embeddings": False}
    if head == LABELS:  # decoders look for the last token that is no padding: one more, which no row has
        given |= {"vocab_size": vocabulary + 1, "pad_token_id": vocabulary, "num_labels": 2}
    given = {row.size_names.get(name, name): value for name, value in given.items()}
    config = without_dropout(AutoConfig.for_model(row.model_type, **{**given, **(options or {})}))
    model = HEADS[head][type(config)](config)
    for module, std in ((model.get_input_embeddings(), TOKEN_STD), (model.get_output_embeddings(), OUTPUT_STD)):
        if module is not None:
            torch.nn.init.normal_(module.get_parameter("weight"), std=std)
    return model


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """Chance would be another for encodings that draw numbers of their own."""
    for name, value in vars(config).items():
        if isinstance(value, float) and is_dropout(name):
            setattr(config, name, 0.0)
    return config


def is_dropout(option: str) -> bool:
    """Whether an option of a config is the probability of a dropout."""
    return "dropout" in option or option.endswith("_pdrop")


def folder_of(host: str) -> str | None:
    """The folder of a host that is a checkpoint."""
    return host.removeprefix(CHECKPOINT) if host.startswith(CHECKPOINT) else None


def heads_of(host: str) -> tuple[str, ...]:
    """The heads that a host can have. Raises ValueError for a checkpoint that isn't a language model of one stack."""
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
    """The weights of a head that a checkpoint doesn't have: they are drawn at random, by the seed."""
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
    """Of a checkpoint's weights, config and tokenizer."""
    found = hashlib.sha256()
    for file in sorted(file for end in ("safetensors", "bin", "json") for file in Path(folder).glob(f"*.{end}")):
        with file.open("rb") as opened:
            while part := opened.read(2**20):
                found.update(part)
    return found.hexdigest()[:16]


def patched(model: PreTrainedModel, chosen: Encoding, seed: int, max_length: int | None = None) -> PreTrainedModel:
    """A host with another encoding, whose parameters depend on the seed alone."""
    torch.manual_seed(seed)
    return hf_posenc.patch(model, dict(chosen.options), max_length=max_length)


def fitting(make: Callable[[], PreTrainedModel], chosen: Encoding, seed: int, tokens: int) -> PreTrainedModel:
    """A host with another encoding, for rows of so many tokens: what ends at a length is given this, others have no limit."""
    model = patched(make(), chosen, seed)
    return model if hf_posenc.inspect(model).max_length is None else patched(make(), chosen, seed, tokens)


def refusal(
    host: str, sizes: Sizes | None, chosen: Encoding, head: str = CAUSAL, options: dict[str, Any] | None = None
) -> str | None:
    """Why a host can't have an encoding, or None."""
    try:
        model = fitting(lambda: stock(host, sizes, 4, 8, 0, head, options), chosen, 0, tokens=8)
        with torch.no_grad():
            model(input_ids=torch.arange(4)[None])
    except (ValueError, hf_posenc.UnsupportedModelError) as error:
        return str(error)
    return None
