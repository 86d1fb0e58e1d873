"""Learnable Fourier features: https://arxiv.org/abs/2106.02795"""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.options import GreaterThan

GELU_POWER = 0.425
"""The mean of GELU(z)² for z from N(0, 1)."""


class Fourier(PositionEncoding, type="fourier"):
    """PE(x) = W_2 GELU(W_1 r(x) + b_1) + b_2, r(x) = [cos(W_r x), sin(W_r x)] / √features (Li et al., 2021, section 3.2).

    All W and b are learned. W_r, the `frequencies` `[features / 2, 1]`, starts from N(0, γ^-2). Then r(x) · r(y) is about
    exp(-(x - y)² / 2γ²) / 2: positions up to about γ apart are similar, and those more than 3γ apart are unrelated. With
    positions x = scale · 0, 1, 2, … and the defaults, r of adjacent positions differs by 0.1 of its length. Angles are computed
    in float64, and are exact at any position. The rest is in float32 or better. There is no length limit.

    Options:
        features: number of cosines and sines together. Even.
        width: number of hidden values.
        gamma: γ, in units of scaled positions. Smaller values separate adjacent positions more.
        scale: factor on positions. For example, 1 / 512 maps 512 positions to [0, 1), and γ must be smaller by the same factor.
            Optimizer steps, which have the same size for all parameters, then change angles less.
        std: approximate initial standard deviation of the vectors' entries.
    """

    title = "Learnable Fourier features"
    paper = ("https://arxiv.org/abs/2106.02795",)

    features: Annotated[int, GreaterThan(0)] = 384
    width: Annotated[int, GreaterThan(0)] = 32
    gamma: Annotated[float, GreaterThan(0)] = 10.0
    scale: Annotated[float, GreaterThan(0)] = 1.0
    std: Annotated[float, GreaterThan(0)] = 0.02

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        if self.features % 2:
            raise ValueError(
                f"fourier.features={self.features} isn't valid. It must be even, because each frequency has a sine and cosine. "
                f"Use {self.features + 1}."
            )
        self.frequencies = nn.Parameter(torch.empty(self.features // 2, 1))
        self.hidden_weight = nn.Parameter(torch.empty(self.width, self.features))
        self.hidden_bias = nn.Parameter(torch.empty(self.width))
        self.weight = nn.Parameter(torch.empty(geometry.hidden_size, self.width))
        self.bias = nn.Parameter(torch.empty(geometry.hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.frequencies, std=1 / self.gamma)
        nn.init.normal_(self.hidden_weight, std=2**0.5)  # r has the length √½, so hidden values start as N(0, 1)
        nn.init.normal_(self.weight, std=self.std * (GELU_POWER * self.width) ** -0.5)
        for bias in (self.hidden_bias, self.bias):
            nn.init.zeros_(bias)

    def embed(self, positions: Tensor) -> Tensor:
        angles = F.linear(positions[..., None].double() * self.scale, self.frequencies.double())
        features = torch.cat([angles.cos(), angles.sin()], dim=-1) * self.features**-0.5
        kind = torch.promote_types(self.weight.dtype, torch.float32)
        each: list[Tensor] = [self.hidden_weight, self.hidden_bias, self.weight, self.bias]
        hidden_weight, hidden_bias, weight, bias = (parameter.to(kind) for parameter in each)
        with torch.autocast(positions.device.type, enabled=False):
            return F.linear(F.gelu(F.linear(features.to(kind), hidden_weight, hidden_bias)), weight, bias)

    def angular_frequencies(self, length: int) -> Tensor:
        return self.frequencies.detach().double().flatten() * self.scale
