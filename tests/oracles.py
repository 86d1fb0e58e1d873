"""Slow, simple reference implementations for tests, and their padded inputs.

Shapes: B batch, L length, H heads, E head_dim, D vector size.
"""

import itertools
import math

import pytest
import torch
from transformers import DynamicCache

import models
from hf_posenc.encodings import Geometry, PositionContext, build, canonical
from models import CACHE, HOSTS, first, stock

MASKS = {
    "none": None,
    "right": [[1] * 11, [1] * 7 + [0] * 4],
    "left": [[0] * 3 + [1] * 8, [1] * 11],
}


def make(
    kind, hidden_size=16, heads=4, head_dim=8, *, seed=None, dtype=None,
    max_length=None, is_causal=False, groups=0, trained=7, axes=1, **options,
):  # fmt: skip
    """Build an encoding from its name and options. If `seed` is given, its parameters are drawn from N(0, 1)."""
    sizes = Geometry(hidden_size, heads, head_dim, max_length, is_causal, groups, trained, axes=axes)
    encoding = build(canonical({"type": kind, **options}), sizes)
    return (encoding if seed is None else drawn(encoding, seed)).to(dtype)


def drawn(module, seed=0):
    """Draw the parameters of a module from N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def context_of(encoding, positions, keys=None, past=0, start=None, **more):
    """The context of queries at `positions` `[B][Q]` after `past` cached keys.

    start: the index from which the positions of the keys increase by one.
    keys: the positions of all keys `[B][K]`, if they don't increase by one.
    """
    positions = torch.as_tensor(positions)
    start = past - positions[:, :1] if start is None else torch.as_tensor(start)
    return PositionContext(encoding, positions, past, start, keys if keys is None else torch.as_tensor(keys), **more)


def turned(states, turn, layout="half", width=None):
    """The rotated states `[B, H, L, E]` in float64.

    Each pair of the first `width` features is a complex number, and is multiplied by `turn(b, h, i, pair)`.
    """
    out, width = states.double().clone(), width or states.shape[-1]
    for b, h, i in itertools.product(*map(range, states.shape[:3])):
        for pair in range(width // 2):
            one, two = (pair, pair + width // 2) if layout == "half" else (2 * pair, 2 * pair + 1)
            point = complex(states[b, h, i, one], states[b, h, i, two]) * turn(b, h, i, pair)
            out[b, h, i, one], out[b, h, i, two] = point.real, point.imag
    return out


every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def padding_of(mask):
    """The arguments for a mask, and which tokens are real."""
    if mask is None:
        return {}, torch.ones(2, 11, dtype=torch.bool)
    return {"attention_mask": torch.tensor(mask)}, torch.tensor(mask).bool()


def counted(mask):
    """The positions `[B][L]` of tokens, with real tokens counted one by one. Those of padding are arbitrary."""
    return [[max(sum(row[: i + 1]) - 1, 0) for i in range(len(row))] for row in mask or [[1] * 11] * 2]


def ids_of(host, mask=None):
    """The same positions as explicit `position_ids` `[B, L]` for an architecture.

    Original models need them, because most of them count left padding.
    """
    return torch.tensor(counted(mask)) + (HOSTS[host] if isinstance(host, str) else host).offset


def sinusoids(positions, size):
    """The sinusoids `[B, L, D]` by the formula of the paper."""
    return torch.tensor(
        [
            [
                [(math.cos if d % 2 else math.sin)(position / 10000 ** ((d - d % 2) / size)) for d in range(size)]
                for position in row
            ]
            for row in positions
        ]
    )


def without_positions(host, part=0.0, **changes):
    """The original model, with its position parameters multiplied by `part`."""
    model = stock(host, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in (*HOSTS[host].tables, *HOSTS[host].biases):
                parameter.mul_(part)
    return model


INJECT = ["every_layer", "after_attention"]


def adding(model, host, inject, vectors):
    """The original model, with hooks that add `vectors["now"]` in each layer."""

    def before(module, args):
        return (args[0] + vectors["now"], *args[1:])

    def after(module, args, output):
        if isinstance(output, torch.Tensor):
            return output + vectors["now"]
        return (output[0] + vectors["now"], *output[1:])

    for layer in model.get_submodule(HOSTS[host].layers):
        if inject == "every_layer":
            layer.register_forward_pre_hook(before)
        else:
            layer.get_submodule(HOSTS[host].block).register_forward_hook(after)
    return model


def alibi(length):
    """`[4, L, L]`: ALiBi's biases for the four heads of each model."""
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    return -slopes[:, None, None] * (torch.arange(length)[None, :] - torch.arange(length)[:, None]).abs()


def heads(states):
    """`[B, L, D]` -> `[B, H, L, E]`, for the four heads of each model."""
    return states.unflatten(-1, (4, -1)).transpose(1, 2)


def gpt2_query_key(block, hidden):
    """The queries and keys `[B, H, L, E]` of a layer of GPT-2, before positions are applied."""
    query, key, _ = block.attn.c_attn(block.ln_1(hidden)).chunk(3, dim=-1)
    return heads(query), heads(key)


def future(length):
    """`[L, L]`: True for the keys that a causal mask hides."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def in_pieces(model, ids, cuts, mask=None, cache=None):
    """The outputs `[B, L, …]` of cached decoding, with one forward pass for the tokens between two cuts."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    pieces = []
    for start, stop in itertools.pairwise((0, *cuts, ids.shape[1])):
        more = {} if mask is None else {"attention_mask": mask[:, :stop]}
        pieces.append(first(model(ids[:, start:stop], **{CACHE: cache}, use_cache=True, **more)))
    return torch.cat(pieces, dim=1)


def gradients(model, loss):
    """The gradients by parameter name, after a backward pass from `loss(model)`."""
    model.zero_grad()
    loss(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def checkpointed(model, loss, reentrant):
    """The same gradients with gradient checkpointing, reentrant or not."""
    models.checkpointing(model, use_reentrant=reentrant)
    if reentrant:
        model.enable_input_require_grads()
    return gradients(model, loss)


def padded(ids, lengths, side):
    """Ids and a mask. Row i holds its first `lengths[i]` tokens, with padding on the given side."""
    width = ids.shape[1] + 3
    out, mask = torch.zeros(len(ids), width, dtype=torch.long), torch.zeros(len(ids), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        place = slice(width - length, width) if side == "left" else slice(0, length)
        out[row, place], mask[row, place] = ids[row, :length], 1
    return out, mask
