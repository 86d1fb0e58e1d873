"""T5's relative position bias: https://arxiv.org/abs/1910.10683"""

import math
from typing import Annotated

import torch
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.options import GreaterThan


class T5(PositionEncoding, type="t5"):
    """bias[h, i, j] = weight[bucket(j - i), h], added to the scaled scores (Raffel et al., 2020, section 2.1).

    Half of the buckets hold one distance each. The others grow logarithmically up to max_distance, and all greater distances
    share the last bucket. In encoders, half of all buckets are for keys before the query and half for keys after it. Decoders
    use all buckets for keys before the query. There is no length limit.

    Options:
        num_buckets: total number in both directions. A multiple of 4.
        max_distance: start of the last bucket. Above num_buckets.
    """

    title = "T5's relative position bias"
    paper = ("https://arxiv.org/abs/1910.10683",)

    num_buckets: Annotated[int, GreaterThan(0)] = 32
    max_distance: Annotated[int, GreaterThan(0)] = 128

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        if self.num_buckets % 4 or self.max_distance <= self.num_buckets:
            raise ValueError(
                f"t5.num_buckets={self.num_buckets}, t5.max_distance={self.max_distance} isn't valid. num_buckets must be a "
                "multiple of 4, and max_distance must be above it."
            )
        self.weight = nn.Parameter(torch.empty(self.num_buckets, geometry.num_attention_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.geometry.hidden_size**-0.5)

    def distance_bias(self, distance: Tensor) -> Tensor:
        return self.weight[self.rows(distance)].T

    @torch.no_grad()
    def add_to_bias_rows(self, amounts: Tensor) -> bool:
        self.weight.add_(amounts.T)
        return True

    def rows(self, distance: Tensor) -> Tensor:
        """The bucket of each signed distance (key position - query position), integers `[N] -> [N]`."""
        if self.geometry.is_causal:
            buckets, offset, steps = self.num_buckets, torch.zeros_like(distance), (-distance).clamp(min=0)
        else:
            buckets = self.num_buckets // 2
            offset, steps = (distance > 0).long() * buckets, distance.abs()
        exact = buckets // 2
        # float32 and truncation give the same buckets as in T5.
        ratio = torch.log(steps.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = exact + (ratio * (buckets - exact)).long()
        return offset + torch.where(steps < exact, steps, far.clamp(max=buckets - 1))
