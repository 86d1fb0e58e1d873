"""Kernelized relative positional embedding: https://arxiv.org/abs/2205.09921"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding


class Kerple(PositionEncoding, type="kerple"):
    """Kernels of the distance with two learned numbers per head, added to the scaled scores (Chi et al., 2022):

    - log: bias[h, i, j] = -r1_h · log(1 + r2_h · |j - i|), with r1, r2 > 0. It extrapolates best in the paper.
    - power: bias[h, i, j] = -r1_h · |j - i|^r2_h, with r1 > 0 and 0 < r2 < 2. With r2 = 1, the bias is linear.

    The paper covers decoders, where j ≤ i. In encoders, the bias is symmetric. There is no length limit.

    `weight` is [2, H], and the kernels are valid for all real numbers: r1 = softplus(weight[0]), and r2 = softplus(weight[1])
    for log or 2 · sigmoid(weight[1]) for power. (The authors learn r1 and r2 directly and clamp them in each forward pass.) As
    in the authors' code, initial values are uniformly distributed: r1 up to 2 and r2 up to 1 for log, r1 up to 1 and r2 up to 2
    for power. Heads therefore differ, and with per_layer=True so do layers.

    Options:
        kernel: "log" or "power".
    """

    title = "Kernelized relative positional embedding"
    paper = ("https://arxiv.org/abs/2205.09921",)

    kernel: Literal["log", "power"] = "log"

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        self.weight = nn.Parameter(torch.empty(2, geometry.num_attention_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        first, second = nn.init.uniform_(self.weight, 0.01, 0.99)
        if self.kernel == "log":
            first.mul_(2).expm1_().log_()
            second.expm1_().log_()
        else:
            first.expm1_().log_()
            second.logit_()

    def distance_bias(self, distance: Tensor) -> Tensor:
        # float64 is precise enough for distances above 2^24 and their powers.
        first, second = self.weight.double()[..., None]
        steps = distance.abs().double()
        if self.kernel == "log":
            kernel = torch.log1p(F.softplus(second) * steps)
        else:
            # The derivative of 0^r isn't finite, and log 0 is undefined, so distance 0 is set separately.
            kernel = torch.where(steps > 0, steps.clamp(min=1) ** (2 * second.sigmoid()), 0.0)
        return (-F.softplus(first) * kernel).to(torch.promote_types(self.weight.dtype, torch.float32))
