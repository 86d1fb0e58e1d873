"""Which of Transformers' model types can be patched: tiny random models of all that build from common sizes.

    python scripts/reach.py            # a minute on one core; kept in scripts/results/reach.txt

For each type taken: by how much its outputs move when the input is permuted, without positions and with an encoding of
each kind. Without positions an encoder must not notice. A type refused is listed with the reason.
"""

import dataclasses
import logging
import warnings
from collections import defaultdict
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from tqdm.auto import tqdm
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedModel

import hf_posenc

KINDS = ("none", "sinusoidal", "rope", "alibi", "shaw")
LENGTH, VOCABULARY, MOST_VALUES = 11, 61, 3_000_000
# Every host's own word for the same few sizes; a config takes those that it knows.
SIZES = (
    dict.fromkeys(("hidden_size", "embedding_size", "n_embd", "dim", "d_model", "word_embed_proj_dim"), 32)
    | dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_layers"), 2)
    | dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads", "num_heads"), 4
    )
    | dict.fromkeys(("intermediate_size", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 48)
    | dict.fromkeys(("max_position_embeddings", "n_positions"), 24)
    | {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
)


def tiny(kind: str, generator: torch.Generator) -> PreTrainedModel | None:
    """A tiny random model of a type, or None where these sizes don't make one that reads token ids."""
    try:
        config_class = CONFIG_MAPPING[kind]
        known = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
        sizes: dict[str, Any] = {name: value for name, value in SIZES.items() if name in known}
        config = config_class(**sizes)
        with init_empty_weights(include_buffers=True):
            empty = AutoModel.from_config(config)
        if sum(tensor.numel() for tensor in (*empty.parameters(), *empty.buffers())) > MOST_VALUES:
            return None
        model = AutoModel.from_config(config).eval()
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        model(torch.arange(3, LENGTH + 3)[None])
    except Exception:  # whatever a host makes of sizes that aren't its own
        return None
    return model


def movements(model: PreTrainedModel, generator: torch.Generator) -> dict[str, float]:
    """Encoding -> the largest change of an output, each compared with the same token's, when the input is permuted."""
    ids = torch.randint(3, VOCABULARY, (1, LENGTH), generator=generator)
    order = torch.randperm(LENGTH, generator=generator)
    moved = {}
    for kind in KINDS:
        patched = hf_posenc.patch(model, kind)
        moved[kind] = float((patched(ids)[0][:, order] - patched(ids[:, order])[0]).abs().max())
    return moved


@torch.no_grad()
def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    taken, refused = {}, defaultdict(list)
    kinds = [kind for kind in sorted(CONFIG_MAPPING) if not kind.startswith("posenc-")]
    for kind in tqdm(kinds, desc="building", unit="type"):
        generator = torch.Generator().manual_seed(0)
        model = tiny(kind, generator)
        if model is None:
            continue
        try:
            taken[kind] = movements(model, generator)
        except ValueError as error:
            refused[reason(str(error))].append(kind)
    print(f"{len(taken)} model types taken; change of the outputs when the input is permuted\n")
    print(f"{'':24}" + "".join(f"{kind:>12}" for kind in KINDS))
    for kind, moved in taken.items():
        print(f"{kind:24}" + "".join(f"{value:12.1e}" for value in moved.values()))
    print(f"\n{sum(map(len, refused.values()))} refused")
    for why, names in sorted(refused.items(), key=lambda item: -len(item[1])):
        print(f"\n{why} ({len(names)}):\n    {', '.join(names)}")


def reason(error: str) -> str:
    """The kind of refusal that an error of `patch` is."""
    for words, why in {
        "rotary": "rotary positions of its own",
        "which can't be taken over": "other sources of position",
        "way of its own": "position ids in a way of its own",
        "goes through": "attention beside Transformers' interface",
        "no place": "neither a position table nor an attention of the interface",
        "no position table": "no position table",
        "doesn't take position_ids": "no position_ids in its forward",
    }.items():
        if words in error:
            return why
    return error


if __name__ == "__main__":
    main()
