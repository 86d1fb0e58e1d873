"""One learned number per head and distance, inside the scaling of the scores: https://arxiv.org/abs/1803.02155"""

from typing import Annotated

import torch
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.options import GreaterThan


class Relative(PositionEncoding, type="relative"):
    """softmax((QKᵀ + R) / √E) V with R[h, i, j] = weight[h, clip(j - i, -max_distance, max_distance)].

    This is the scalar form of relative position representations (Shaw et al., 2018), in which R is q·a(j - i). R is added
    before scaling, so R/√head_dim is added to the scaled scores, for any scaling of the model. Distances are clipped, so there
    is no length limit.

    Options:
        max_distance: larger distances are clipped to it.
    """

    title = "One learned number per head and distance, inside the scaling of the scores"
    paper = ("https://arxiv.org/abs/1803.02155",)

    max_distance: Annotated[int, GreaterThan(0)] = 128

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        self.weight = nn.Parameter(torch.empty(geometry.num_attention_heads, 2 * self.max_distance + 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # With zeros the model would ignore word order until the first optimizer step.
        nn.init.normal_(self.weight, std=0.02)

    def rows(self, distance: Tensor) -> Tensor:
        return distance.clamp(-self.max_distance, self.max_distance) + self.max_distance

    def distance_bias(self, distance: Tensor) -> Tensor:
        return self.weight[:, self.rows(distance)] / self.geometry.head_dim**0.5

    @torch.no_grad()
    def add_to_bias_rows(self, amounts: Tensor) -> bool:
        self.weight.add_(amounts * self.geometry.head_dim**0.5)
        return True
