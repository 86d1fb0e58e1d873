"""Rotary position embeddings: https://arxiv.org/abs/2104.09864"""

from typing import Annotated, Literal

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
        cos, sin = context.cached((self, "cos_sin"), lambda: self._cos_sin(context.positions))
        return self._turn(query, cos, sin), self._turn(key, cos, sin)

    def _cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`[1 or B, 1, L, E/2]` each, float64."""
        steps = frequencies(self.geometry.head_dim, self.theta, positions.device)
        angles = positions.double()[:, None, :, None] * steps
        return angles.cos(), angles.sin()

    def _turn(self, states: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor | None:
        if states is None:
            return None
        cos, sin = cos.to(states.dtype), sin.to(states.dtype)
        if self.layout == "half":
            first, second = states.chunk(2, dim=-1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        first, second = states[..., 0::2], states[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
