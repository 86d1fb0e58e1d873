"""Learned absolute position embeddings: https://arxiv.org/abs/1705.03122, https://arxiv.org/abs/1810.04805"""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.options import Above
from hf_posenc.encodings.sinusoidal import sinusoids


class Learned(PositionEncoding, type="learned", aliases=("absolute", "learnable")):
    """One trained vector for each position: PE(p) = weight[p], `[max_length, D]`
    (Gehring et al., 2017; Devlin et al., 2019).

    Options:
        init: "normal" (std below), "sinusoidal", or "host": the rows of the host's own table; rows beyond it, and all
            rows of a model without pretrained weights, start as "normal".
        std: standard deviation of "normal" (0.02 as in BERT; 1.0 is `torch.randn`).
    """

    title = "Learned absolute position embeddings"
    paper = ("https://arxiv.org/abs/1705.03122", "https://arxiv.org/abs/1810.04805")

    init: Literal["normal", "sinusoidal", "host"] = "normal"
    std: Annotated[float, Above(0)] = 0.02

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        if geometry.max_length is None:
            raise ValueError("'learned' has one row for each position: give max_length, the number of rows")
        self.weight = nn.Parameter(torch.empty(geometry.max_length, geometry.hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.init == "sinusoidal":
            rows, size = self.weight.shape
            with torch.no_grad():
                self.weight.copy_(sinusoids(torch.arange(rows, device=self.weight.device), size, base=10000.0))
        else:
            nn.init.normal_(self.weight, std=self.std)

    def adopt(self, table: Tensor | None) -> None:
        if self.init == "host":
            if table is None:
                raise ValueError("learned.init='host': this host has no position table: choose init='normal' or 'sinusoidal'")
            if table.shape[1] != self.weight.shape[1]:
                raise ValueError(
                    f"learned.init='host': the host's table has {table.shape[1]} columns, but vectors of "
                    f"{self.weight.shape[1]} are added here: choose init='normal' or 'sinusoidal'"
                )
            rows = min(len(table), len(self.weight))
            with torch.no_grad():
                self.weight[:rows].copy_(table[:rows])

    @classmethod
    def needs_max_length(cls, geometry: Geometry) -> bool:
        return True

    def embed(self, positions: Tensor) -> Tensor:
        # Reading values would synchronize a GPU and break a traced graph, where only the shapes are checked.
        if positions.device.type == "cpu" and not torch.compiler.is_compiling() and positions.numel():
            low, high = positions.aminmax()
            if low < 0 or high >= len(self.weight):
                raise ValueError(
                    f"position_ids from {int(low)} to {int(high)} don't fit a learned table of {len(self.weight)} rows: "
                    "pass ids below that, or patch the stock model with a larger max_length and train that"
                )
        return F.embedding(positions, self.weight)
