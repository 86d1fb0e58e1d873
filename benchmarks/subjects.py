"""The models to measure: original models with random weights, and the same models with every encoding.

Shapes: B batch, L tokens.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTModel,
)

import hf_posenc
from benchmarks.comparing import NONE
from benchmarks.grid import Group, Settings

PROMPT = 8
"""Tokens of a prompt, and the number of tokens that a model for "decode" accepts beyond those in the cache."""
VOCABULARY = 1000
"""Vocabulary size. It is small, because token embeddings aren't part of the cost of positions."""
PATCHES = {"vit": 16, "swin": 4}
"""Side length of a patch in pixels, for the model types that read images."""


def check(settings: Settings) -> None:
    """Raises ValueError for unknown encodings."""
    known = _registered()
    if unknown := {*settings.encodings} - {*known}:
        raise ValueError(f"there is no encoding {', '.join(sorted(unknown))}; registered: {', '.join(known)}")


def _registered() -> list[str]:
    return [NONE, *(name for name in hf_posenc.list_encodings() if name != NONE)]


def encodings(group: Group, settings: Settings) -> list[str]:
    """The encodings of a group: `none`, then all others that its model supports. Raises ValueError for unknown names."""
    check(settings)
    return [
        name
        for name in _registered()
        if (not group.encodings or name in group.encodings) and (not settings.encodings or name in settings.encodings)
        if _takes(group.host, hf_posenc.list_encodings()[name])
    ]


def _takes(host: str, kind: type[hf_posenc.PositionEncoding]) -> bool:
    """Whether a model type supports an encoding, which may be only for decoders or for image patches."""
    return kind.axes in (1, 2 if host in PATCHES else 1) and (host in ("gpt2", "llama") or not kind.causal_only)


def stock(group: Group, settings: Settings, **changes: Any) -> PreTrainedModel:
    """An original model with random weights, SDPA, and the dtype of the group, in eval mode."""
    torch.manual_seed(settings.seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": group.hidden_size,
        "num_hidden_layers": group.layers,
        "num_attention_heads": group.heads,
        "max_position_embeddings": room(group),
    }
    config: Any
    if group.host == "bert":
        kept: dict[str, Any] = {"hidden_dropout_prob": group.dropout, "attention_probs_dropout_prob": group.dropout}
        config = BertConfig(**{**sizes, "intermediate_size": 4 * group.hidden_size, **kept, **changes})
        model: PreTrainedModel = BertModel(config)
    elif group.host == "gpt2":
        kept = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), group.dropout)
        kept |= {"bos_token_id": None, "eos_token_id": None}
        model = GPT2Model(GPT2Config(**{**sizes, **kept, **changes}))
    elif group.host == "vit":
        kept = {"image_size": side(group), "patch_size": PATCHES["vit"], "hidden_dropout_prob": group.dropout}
        sizes = {name: size for name, size in sizes.items() if name not in ("vocab_size", "max_position_embeddings")}
        model = ViTModel(ViTConfig(**{**sizes, "intermediate_size": 4 * group.hidden_size, **kept, **changes}))
    elif group.host == "swin":
        kept = {"depths": (group.layers // 2,) * 2, "num_heads": (group.heads // 2, group.heads), "embed_dim": 16 * group.heads}
        model = SwinModel(SwinConfig(**{"image_size": side(group), "patch_size": PATCHES["swin"], **kept, **changes}))
    else:
        config = LlamaConfig(**{**sizes, "intermediate_size": 4 * group.hidden_size, "eos_token_id": None, **changes})
        model = (LlamaForCausalLM if group.kind == "generate" else LlamaModel)(config)
    model.set_attn_implementation("sdpa")
    made: Any = model
    return made.to(getattr(torch, group.dtype)).eval()


def side(group: Group) -> int:
    """Side length in pixels of an image with as many patches as the group has tokens."""
    return PATCHES[group.host] * math.isqrt(group.length)


def room(group: Group) -> int:
    """Maximum length of the model in tokens."""
    return group.length + PROMPT if group.kind in ("decode", "generate") else group.length


def patched(model: PreTrainedModel, name: str, group: Group, settings: Settings, **options: Any) -> PreTrainedModel:
    """A patched model that shares the model's parameters. Those of the encoding are random, as in a trained model."""
    new = hf_posenc.patch(model, name, max_length=room(group), **options)
    generator = torch.Generator().manual_seed(settings.seed)
    with torch.no_grad():
        for key, parameter in new.named_parameters():
            if "posenc." in key:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return new


def about(model: PreTrainedModel) -> dict[str, Any]:
    """Whether an encoding is learned. Targets depend on it."""
    return {"learned": any("posenc." in key for key, parameter in model.named_parameters() if parameter.requires_grad)}


def encoding_of(model: Any) -> str | None:
    """The encoding of a model. None for an original model."""
    chosen = getattr(model.config, "position_encoding", None)
    return chosen and chosen["type"]


def scores_content(model: Any) -> bool:
    """Whether a model's encoding depends on token content."""
    return "score_bias" in hf_posenc.list_encodings()[encoding_of(model) or NONE].mechanisms()


def inputs(group: Group, settings: Settings) -> dict[str, Tensor]:
    """`input_ids` `[B, L]`, and an `attention_mask` if texts are padded. For vision models, images with L patches."""
    generator = torch.Generator().manual_seed(settings.seed)
    if group.host in PATCHES:
        images = torch.randn(group.batch, 3, side(group), side(group), generator=generator)
        return {"pixel_values": images.to(getattr(torch, group.dtype))}
    ids = torch.randint(0, VOCABULARY, (group.batch, group.length), generator=generator)
    made = {"input_ids": ids}
    if group.padded:
        made["attention_mask"] = torch.ones_like(ids)
        made["attention_mask"][::2, group.length - group.length // 4 :] = 0
    return made
