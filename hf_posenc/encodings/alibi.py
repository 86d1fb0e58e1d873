"""Attention with linear biases: https://arxiv.org/abs/2108.12409"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding


class ALiBi(PositionEncoding, type="alibi"):
    """bias[h, i, j] = -m_h · |j - i|, added to the scaled scores (Press et al., 2022).

    With n heads, n a power of two, m_h = 2^(-8h/n) for h = 1 … n; for other n the authors take the slopes of the power
    of two below, then every other slope of the one above. In causal hosts j ≤ i, as in the paper; in encoders the bias
    is symmetric, as the authors recommend (github.com/ofirpress/attention_with_linear_biases, issue 5). Any length.

    Options:
        slopes: "fixed" (no parameters) or "learned", which start as the fixed ones.
    """

    title = "Attention with linear biases"
    paper = ("https://arxiv.org/abs/2108.12409",)

    slopes: Literal["fixed", "learned"] = "fixed"

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        if self.slopes == "learned":
            self.weight = nn.Parameter(torch.tensor(alibi_slopes(geometry.num_attention_heads)))

    def distance_bias(self, distance: Tensor) -> Tensor:
        fixed = alibi_slopes(self.geometry.num_attention_heads)
        slopes = self.weight if self.slopes == "learned" else torch.tensor(fixed, dtype=torch.float32, device=distance.device)
        return -slopes[:, None] * distance.abs()


def alibi_slopes(num_heads: int) -> list[float]:
    """The slopes m_1 … m_n of the paper's section 3."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-4 * h / power) for h in range(1, 2 * power + 1, 2)]
    return slopes + between[: num_heads - power]
