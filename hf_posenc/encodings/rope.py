"""Rotary position embeddings: https://arxiv.org/abs/2104.09864"""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import PositionContext
from hf_posenc.encodings.options import Above
from hf_posenc.encodings.sinusoidal import frequencies


class RoPE(PositionEncoding, type="rope", aliases=("rotary",)):
    """Each pair of features of a query or key at position p is rotated by p·theta^(-2i/E), so that the score of two
    tokens depends on their distance (Su et al., 2021, equation 15).

    Angles are computed in float64 and cast last; any length.

    Options:
        theta: the base of the frequencies.
        layout: which features form a pair, "half" (i and i + E/2, as in GPT-NeoX and Llama) or "interleaved"
            (2i and 2i + 1, as in the paper and GPT-J).
    """

    title = "Rotary position embeddings"
    paper = ("https://arxiv.org/abs/2104.09864",)
    translation_invariant = True

    theta: Annotated[float, Above(1)] = 10000.0
    layout: Literal["half", "interleaved"] = "half"

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        if geometry.head_dim % 2:
            raise ValueError(
                f"'rope' turns pairs of features, but this host's head_dim is {geometry.head_dim}, an odd number: "
                "choose an encoding which embeds or biases"
            )

    def rotate(self, query: Tensor | None, key: Tensor | None, context: PositionContext) -> tuple[Tensor | None, Tensor | None]:
        def turned(states: Tensor | None) -> Tensor | None:
            if states is None:
                return None
            cos, sin = context.cached((self, "cos_sin", states.dtype), lambda: self._cos_sin(context.positions, states.dtype))
            if torch.compiler.is_compiling():  # which fuses the products by itself
                return _joined(states, cos, sin, self.layout)
            return _Rotation.apply(states, cos, sin, self.layout)

        return turned(query), turned(key)

    def _cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`[1 or B, 1, L, E/2]` each."""
        steps = frequencies(self.geometry.head_dim, self.theta, positions.device)
        angles = positions.double()[:, None, :, None] * steps
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _halves(states: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The first and the second features of all pairs, `[..., E/2]` each, views."""
    if layout == "half":
        first, second = states.chunk(2, dim=-1)
        return first, second
    return states[..., 0::2], states[..., 1::2]


def _joined(states: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    first, second = _halves(states, layout)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat(turned, dim=-1) if layout == "half" else torch.stack(turned, dim=-1).flatten(-2)


class _Rotation(torch.autograd.Function):
    """States `[..., L, E]`, each pair turned by its angle. For gradients, which are turned back, the angles alone are kept."""

    @staticmethod
    def forward(states: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
        result = torch.empty_like(states)
        (first, second), (to_first, to_second) = _halves(states, layout), _halves(result, layout)
        # Two passes over each half: sums of products, and both joined, would take five.
        torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=to_second).addcmul_(first, sin)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, cos, sin, ctx.layout = inputs
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)

    @staticmethod
    def jvp(ctx: Any, of_states: Tensor, *_: None) -> Tensor:
        return _Rotation.apply(of_states, *ctx.saved_tensors, ctx.layout)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _Rotation.apply(upstream, cos, -sin, ctx.layout), None, None, None

    @staticmethod
    def vmap(info: Any, axes: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        *tensors, layout = inputs
        # All have as many axes, of which those in front may be 1.
        pairs = zip(tensors, axes, strict=False)
        return _Rotation.apply(*(each[None] if axis is None else each.movedim(axis, 0) for each, axis in pairs), layout), 0
