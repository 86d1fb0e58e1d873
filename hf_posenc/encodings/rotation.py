"""Rotates pairs of features.

Shapes: L tokens, E head_dim, R the rotated features, the first of each head. Cosines are `[..., L, R]`, one for each feature,
and sines are `[..., L, R/2]`, one for each pair.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_posenc._compat import records_operations
from hf_posenc.encodings.context import PositionContext


def cos_sin(angles: Tensor, dtype: torch.dtype, layout: str, factor: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of angles `[..., L, R/2]`, times a factor."""
    cos, sin = ((wave * factor).to(dtype) for wave in (angles.cos(), angles.sin()))
    cos = by_feature(cos, layout)
    if torch.compiler.is_compiling():  # Otherwise, the compiler would compute them again for each head and layer.
        cos, sin = torch.cat([cos, sin], dim=-1).split([cos.shape[-1], sin.shape[-1]], dim=-1)
    return cos, sin


def by_feature(of_pairs: Tensor, layout: str) -> Tensor:
    """One value for each feature, `[..., R/2] -> [..., R]`."""
    return torch.cat([of_pairs, of_pairs], dim=-1) if layout == "half" else of_pairs.repeat_interleave(2, dim=-1)


def rotated(states: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """States `[..., L, E]` with the first R features rotated in pairs.

    layout: which features form a pair, "half" (i and i + R/2) or "interleaved" (2i and 2i + 1).
    """
    if torch.compiler.is_compiling():  # The compiler fuses the products. Attention keeps the axes' order of projections.
        states, cos, sin = (each.transpose(-2, -3) for each in (states, cos, sin))
        return joined(states, cos, sin, layout).transpose(-2, -3)
    rotate = Rotation.apply if records_operations(states) else Rotation.forward
    return rotate(states, cos, sin, layout)


def rotated_by(
    encoding: Any,
    compute: Callable[[int, torch.dtype], tuple[Tensor, Tensor]],
    states: Tensor | None,
    context: PositionContext,
    layout: str,
) -> Tensor | None:
    """States `[B, H, L, E]` rotated by an encoding that may have parameters. None stays None.

    compute: returns cosines and sines for a number of heads and a dtype. It is called once for all layers if the encoding isn't
        trained.
    """
    if states is None:
        return None
    heads, dtype = states.shape[1], states.dtype
    if encoding.is_trained():
        return joined(states, *compute(heads, dtype), layout)
    cos, sin = context.cached((encoding, heads, dtype), lambda: compute(heads, dtype))
    return rotated(states, cos, sin, layout)


def _halves(states: Tensor, size: int, layout: str) -> tuple[Tensor, Tensor]:
    """Views of the first and the second features of all pairs, `[..., R/2]` each. size: R."""
    if size < states.shape[-1]:
        states = states[..., :size]
    if layout == "half":
        first, second = states.chunk(2, dim=-1)
        return first, second
    return states[..., 0::2], states[..., 1::2]


def joined(states: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Like `rotated`, but differentiable in cosines and sines."""
    size = cos.shape[-1]
    (first, second), (cos, _) = _halves(states, size, layout), _halves(cos, size, layout)
    turned = first * cos - second * sin, second * cos + first * sin
    joined = torch.cat(turned, dim=-1) if layout == "half" else torch.stack(turned, dim=-1).flatten(-2)
    return joined if size == states.shape[-1] else torch.cat([joined, states[..., size:]], dim=-1)


class Rotation(torch.autograd.Function):
    """`rotated` as a function that keeps only the angles for the backward pass, which rotates gradients back."""

    @staticmethod
    def forward(states: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
        size, still = cos.shape[-1], states.shape[-1] - cos.shape[-1]
        # One pass over all features, because a pass over half of each row takes nearly as long, and one over each half.
        result = states * (F.pad(cos, (0, still), value=1.0) if still else cos)
        (first, second), (to_first, to_second) = _halves(states, size, layout), _halves(result, size, layout)
        to_first.addcmul_(second, sin, value=-1)
        to_second.addcmul_(first, sin)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, cos, sin, ctx.layout = inputs
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)

    @staticmethod
    def jvp(ctx: Any, of_states: Tensor, *_: None) -> Tensor:
        return Rotation.apply(of_states, *ctx.saved_tensors, ctx.layout)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return Rotation.apply(upstream, cos, -sin, ctx.layout), None, None, None

    @staticmethod
    def vmap(info: Any, axes: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        *tensors, layout = inputs
        # All tensors have the same number of axes. Leading axes may be 1.
        pairs = zip(tensors, axes, strict=False)
        return Rotation.apply(*(each[None] if axis is None else each.movedim(axis, 0) for each, axis in pairs), layout), 0
