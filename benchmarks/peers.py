"""Compares encodings with other libraries: the encoder of x-transformers, and the rotation of rotary-embedding-torch.

Shapes: B batch, H heads, L tokens, E head_dim.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks import whole
from benchmarks.attention import Alone
from benchmarks.comparing import NONE, Record, compared, peak
from benchmarks.grid import HEAD_DIM, Group, Settings
from benchmarks.subjects import VOCABULARY, inputs, patched, stock
from benchmarks.timing import Run, clocked

THEIRS = "x-transformers: "
MODELS: dict[str, dict[str, Any]] = {
    NONE: {},
    "alibi": {"alibi_pos_bias": True},
    "rope": {"rotary_pos_emb": True},
    "t5": {"rel_pos_bias": True, "attn_flash": False},  # x-transformers doesn't support flash attention with this bias
}
"""Encoding -> the arguments of x-transformers' Encoder."""
ROTATION = "rotary-embedding-torch"
LAYOUTS = {"rope": "half", "rope, interleaved": "interleaved"}


def compare_models(group: Group, settings: Settings) -> dict[str, Record]:
    """Compare BERT with our encodings to x-transformers' encoder of the same size with its own encodings.

    Because the layers differ, each model also has a ratio to a model without positions: ours is compared with our own, and
    theirs with theirs.
    """
    from x_transformers import Encoder, TransformerWrapper

    host, given = stock(group, settings), inputs(group, settings)["input_ids"]

    def ours(name: str) -> Run:
        return whole.forward(patched(host, name, group, settings), group, settings)

    def theirs(name: str) -> Run:
        torch.manual_seed(settings.seed)
        sizes = {"dim": group.hidden_size, "depth": group.layers, "heads": group.heads, "attn_dim_head": HEAD_DIM}
        layers = Encoder(**{**sizes, "attn_flash": True, **MODELS[name]})
        model = (
            TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=group.length, attn_layers=layers, use_abs_pos_emb=False)
            .to(getattr(torch, group.dtype))
            .eval()
        )

        def run() -> None:
            with torch.no_grad():
                model(given, return_embeddings=True)

        return clocked(run, settings.clock)

    def build(name: str) -> Run:
        return theirs(name.removeprefix(THEIRS)) if name.startswith(THEIRS) else ours(name)

    chosen = [name for name in MODELS if not settings.encodings or name in (NONE, *settings.encodings)]
    names = [*chosen, *(THEIRS + name for name in chosen)]
    references = (NONE, *(THEIRS + name for name in chosen))
    records, timed = compared(names, build, group, settings, references)
    for name, record in records.items():
        kept = {THEIRS + name, NONE} if name in chosen else {THEIRS + NONE}
        if name in timed.runs:
            record["ratios"] = {other: value for other, value in record["ratios"].items() if other in kept}
            record["peak_mb"] = peak(timed.runs[name], settings)
    return records


def compare_rotations(group: Group, settings: Settings) -> dict[str, Record]:
    """Compare the rotation of queries by our RoPE, in both layouts, with rotary-embedding-torch.

    rotary-embedding-torch caches cosines and sines between calls. Our RoPE caches them within a forward pass.
    """
    from rotary_embedding_torch import RotaryEmbedding

    host = stock(group, settings, intermediate_size=HEAD_DIM)
    shape, dtype = (group.batch, group.heads, group.length, HEAD_DIM), getattr(torch, group.dtype)
    queries = torch.randn(shape, generator=torch.Generator().manual_seed(settings.seed)).to(dtype)

    def ours(layout: str) -> Run:
        model: Any = patched(host, "rope", group, settings, layout=layout)
        context = Alone(model, group, settings).context()

        def run() -> Tensor:
            with torch.no_grad():
                return model.posenc("rotate", queries, None, context)

        return clocked(run, settings.clock)

    def theirs() -> Run:
        rotary = RotaryEmbedding(dim=HEAD_DIM)

        def run() -> Tensor:
            with torch.no_grad():
                return rotary.rotate_queries_or_keys(queries)

        return clocked(run, settings.clock)

    def build(name: str) -> Run:
        return theirs() if name == ROTATION else ours(LAYOUTS[name])

    records, timed = compared((ROTATION, *LAYOUTS), build, group, settings, (ROTATION,))
    for name, run in timed.runs.items():
        records[name]["peak_mb"] = peak(run, settings)
    return records
