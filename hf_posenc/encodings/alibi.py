"""Attention with linear biases: https://arxiv.org/abs/2108.12409"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding

UNSEEN = -1e4
"""The bias of keys on the side that a head doesn't see. It leaves them no weight compared with other keys. It is finite and
above the bias of padding: if a cross-attention query has no key on its head's side, the head uses other keys, not padding."""


class ALiBi(PositionEncoding, type="alibi"):
    """bias[h, i, j] = -m_h · |j - i|, added to the scaled scores (Press et al., 2022).

    With n heads, n a power of two, m_h = 2^(-8h/n) for h = 1 … n. For other n, the authors use the slopes of the next lower
    power of two, then every other slope of the next higher one. There is no length limit.

    In decoders j ≤ i, as in the paper. For encoders, the authors recommend the symmetric bias and propose two variants that
    distinguish keys before the query from keys after it (github.com/ofirpress/attention_with_linear_biases, issue 5):

    - one_sided, "nonsymmetric with mask": the first half of the heads sees no later keys, the other half no earlier keys. Every
      query sees its own key. Each half has the slopes of n/2 heads. If n is odd, the first half has one head more.
    - asymmetric, "nonsymmetric with no mask": earlier and later keys have separate slopes. The authors learn both from random
      values. Here they are, or start as, m_h for earlier keys and √2 · m_h for later ones. With a rational factor, some tokens
      on either side would have the same bias.

    Options:
        slopes: "fixed" (no parameters) or "learned". Learned slopes start as the fixed ones: `weight`, [H]; for asymmetric
            [2, H], with the slopes for earlier keys first.
        sides: "symmetric", "one_sided", or "asymmetric". The last two are for encoders and cross-attention only.
    """

    title = "Attention with linear biases"
    paper = ("https://arxiv.org/abs/2108.12409",)

    slopes: Literal["fixed", "learned"] = "fixed"
    sides: Literal["symmetric", "one_sided", "asymmetric"] = "symmetric"

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        if self.sides != "symmetric" and geometry.is_causal:
            raise ValueError(
                f"alibi.sides={self.sides!r} isn't supported in causal attention, where tokens see only earlier tokens. Omit "
                "sides. In an encoder-decoder model, use where={'encoder': {'type': 'alibi', 'sides': …}, 'decoder': 'alibi'}."
            )
        if self.sides == "one_sided" and geometry.num_attention_heads < 2:
            raise ValueError(
                "alibi.sides='one_sided' needs at least two heads, but this attention has one, which would see only one side. "
                "Use 'symmetric' or 'asymmetric'."
            )
        if self.slopes == "learned":
            self.weight = nn.Parameter(self._fixed_slopes().to(torch.get_default_dtype()))

    def distance_bias(self, distance: Tensor) -> Tensor:
        learned = self.slopes == "learned"
        slopes = self.weight if learned else self._fixed_slopes(distance.device).float()
        if self.sides == "asymmetric":
            return -torch.where(distance > 0, slopes[1, :, None], slopes[0, :, None]) * distance.abs()
        bias = -slopes[:, None] * distance.abs()
        if self.sides == "symmetric":
            return bias
        heads = torch.arange(len(slopes), device=distance.device)[:, None]
        return bias.masked_fill(torch.where(heads < _first_half(len(slopes)), distance > 0, distance < 0), UNSEEN)

    def _fixed_slopes(self, device: torch.device | None = None) -> Tensor:
        """Slopes `[H]`, or `[2, H]` for asymmetric. They are computed on the device, because a copy would wait for a GPU."""
        heads = self.geometry.num_attention_heads
        if self.sides == "one_sided":
            first = _first_half(heads)
            return torch.cat([alibi_slopes(first, device), alibi_slopes(heads - first, device)])
        slopes = alibi_slopes(heads, device)
        return torch.stack([slopes, math.sqrt(2) * slopes]) if self.sides == "asymmetric" else slopes


def _first_half(heads: int) -> int:
    return (heads + 1) // 2


def alibi_slopes(num_heads: int, device: torch.device | None = None) -> Tensor:
    """The slopes m_1 … m_n of the paper's section 3, float64."""
    power = 2 ** math.floor(math.log2(num_heads))
    exponents = torch.arange(1, power + 1, dtype=torch.float64, device=device) * (-8 / power)
    between = exponents[: num_heads - power] + 4 / power
    return torch.exp2(torch.cat([exponents, between]))
