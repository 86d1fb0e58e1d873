"""Computes the bias of an encoding, and merges it with the attention mask.

Shapes: B batch, Q queries, K keys, H heads, E head_dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_posenc.encodings import PositionContext, PositionEncoding


def biases(encoding: PositionEncoding | type[PositionEncoding]) -> bool:
    """Whether an encoding adds anything to scores."""
    return not {"distance_bias", "score_bias"}.isdisjoint(encoding.acts_by())


def score_bias(encodings: Sequence[PositionEncoding], query: Tensor, key: Tensor, context: PositionContext) -> Tensor | None:
    """The sum of all that these encodings add to the scaled scores, broadcastable to `[B, H, Q, K]`, or None.

    Keys of grouped-query attention may have fewer heads than queries. Tokens aside have a bias of 0.
    """
    total = None
    query, key = context.of_positions(query), context.of_positions(key)  # type: ignore[assignment]
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    for encoding in encodings:
        verbs = encoding.acts_by()
        for term in (
            _distance_bias(encoding, query.shape[2], key.shape[2], context) if "distance_bias" in verbs else None,
            encoding("score_bias", query, key, context) if "score_bias" in verbs else None,
        ):
            if term is not None and term.shape[1] not in (1, query.shape[1]):
                raise ValueError(
                    f"the {encoding.type!r} encoding has a bias for each of {term.shape[1]} heads, of which this attention has "
                    f"{query.shape[1]}: a tensor-parallel plan has split them over processes. Take FSDP or DDP, or an encoding "
                    "that rotates or adds vectors"
                )
            if term is not None:
                total = term if total is None else total + term
    if total is not None and any(context.aside):
        total = context.framed(total.expand(*total.shape[:2], query.shape[2], key.shape[2]), dims=2)
    return total


def _distance_bias(encoding: PositionEncoding, queries: int, keys: int, context: PositionContext) -> Tensor | None:
    if context.consecutive:
        return _toeplitz_bias(encoding, queries, keys, context)
    return _general_bias(encoding, keys, context)


def _toeplitz_bias(encoding: PositionEncoding, queries: int, keys: int, context: PositionContext) -> Tensor | None:
    """`[1, H, Q, K]` from one value for each of the Q + K - 1 distances."""
    distance = torch.arange(1 - queries, keys, device=context.positions.device) + context.first_key - context.past
    bias = encoding("distance_bias", distance)
    if bias is None:
        return None
    if torch.compiler.is_compiling():
        # unfold takes its length as a plain int, which would make a traced graph one for this length only.
        index = torch.arange(keys, device=distance.device) - torch.arange(queries, device=distance.device)[:, None]
        return bias[:, index + (queries - 1)][None]
    return bias.unfold(-1, keys, 1).flip(1)[None]


def _general_bias(encoding: PositionEncoding, keys: int, context: PositionContext) -> Tensor | None:
    """`[1 or B, H, Q, K]` for positions which jump: packed sequences, ids given by hand."""
    distance = context.distances(keys)
    bias = encoding("distance_bias", distance.flatten())
    return None if bias is None else bias.unflatten(-1, distance.shape).movedim(0, 1)


def biased_mask(
    encodings: Sequence[PositionEncoding],
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    context: PositionContext,
    is_causal: bool,
) -> Tensor | None:
    """The additive mask `[1 or B, 1 or H, Q, K]` with the encodings' bias in it; the mask as it was if there is none.

    Without gradients, and where the bias depends on distances alone, it is built once for all layers that share it. With
    gradients each layer builds its own, inside its own (re)computation, as gradient checkpointing and sharded training
    expect.

    is_causal: whether the attention masks the future by itself where it gets no mask; beside a bias it would not.
    """
    biasing = [encoding for encoding in encodings if biases(encoding)]
    if not biasing:
        return mask
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError(
            f"the attention mask is a {type(mask).__name__}, made for another implementation than this attention runs: its "
            "name was set in one of several configs of the model; set it by model.set_attn_implementation"
        )
    causal = mask is None and query.shape[2] > 1 and is_causal

    def compute() -> Tensor | None:
        bias = score_bias(biasing, query, key, context)
        return mask if bias is None else _merged(bias.to(query.dtype), mask, causal, context)

    if any(encoding.is_trained() or encoding.per_layer or "score_bias" in encoding.acts_by() for encoding in biasing):
        return compute()
    wanted = (biasing, causal, query.dtype, query.shape[2], key.shape[2], context.first_key)
    # Masks are compared by identity: hosts hand the same one to all layers of a kind.
    seen = context.cached("masks", list)
    for other, built_for, merged in seen:
        if other is mask and built_for == wanted:
            return merged
    merged = compute()
    seen.append((mask, wanted, merged))
    return merged


def _merged(bias: Tensor, mask: Tensor | None, causal: bool, context: PositionContext) -> Tensor:
    lowest = torch.finfo(bias.dtype).min
    if mask is None and not causal:
        return bias
    if mask is None:
        queries, keys = bias.shape[-2:]
        index = torch.arange(keys, device=bias.device) - torch.arange(queries, device=bias.device)[:, None]
        return bias.masked_fill(index + context.first_key > context.past, lowest)
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, lowest)
    if not mask.is_floating_point():
        raise ValueError(
            f"an attention_mask of shape {tuple(mask.shape)} and type {mask.dtype} would be added to the scores as it is: give "
            "a boolean one (True: seen), a float one (0: seen, -inf: hidden), or a 2-D one of 0 and 1"
        )
    # A sum below the lowest number would be -inf, and a row of those is NaN.
    return (bias + mask.to(bias.dtype)).clamp(min=lowest)
