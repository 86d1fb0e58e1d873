"""Inner products of sinusoidal vectors as a bias: https://arxiv.org/abs/2212.10356"""

from typing import Annotated

import torch
from torch import Tensor

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.options import GreaterThan

MAX_SIZE = 8192
"""Maximum of `size`, because the bias needs size/2 cosines per distance."""


class Sandwich(PositionEncoding, type="sandwich"):
    """bias[h, i, j] = (p_i · p_j - size/2) / c_h, added to the scaled scores (Chi et al., 2023, section 5).

    p_i · p_j = Σ_k cos((j - i) / base^(2k/size)) for k = 0 … size/2 - 1 is the inner product of the sinusoidal vectors of two
    positions. It depends only on their distance and decays approximately as its logarithm. With n heads, c_h = 8h/n for
    h = 1 … n, so heads differ as in ALiBi. There are no parameters and no length limit. In encoders, the bias is symmetric.

    The paper doesn't subtract size/2 = p_i · p_i. It doesn't change the softmax, but brings the biases of the nearest tokens
    close to zero, where half precision is finest.

    Options:
        size: width of the sinusoidal vectors, independent of the model's width. Even. The paper uses 128.
        base: the base of the frequencies.
    """

    title = "Inner products of sinusoidal vectors as a bias"
    paper = ("https://arxiv.org/abs/2212.10356",)

    size: Annotated[int, GreaterThan(0)] = 128
    base: Annotated[float, GreaterThan(1)] = 10000.0

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        if self.size % 2 or self.size > MAX_SIZE:
            raise ValueError(
                f"sandwich.size={self.size} isn't valid. It must be even and at most {MAX_SIZE}, because each frequency has a "
                "sine and a cosine."
            )

    def distance_bias(self, distance: Tensor) -> Tensor:
        heads, steps = self.geometry.num_attention_heads, distance.double()
        total = torch.zeros_like(steps)
        # One frequency at a time, because N may be the number of all pairs of queries and keys.
        for k in range(self.size // 2):
            total += (steps * self.base ** (-2 * k / self.size)).cos() - 1
        ratios = torch.arange(1, heads + 1, dtype=torch.float64, device=distance.device) * (8 / heads)
        return (total / ratios[:, None]).float()
