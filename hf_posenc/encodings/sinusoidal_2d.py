"""Sinusoidal embeddings of rows and columns: https://arxiv.org/abs/1802.05751, https://arxiv.org/abs/2111.06377"""

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.options import GreaterThan
from hf_posenc.encodings.sinusoidal import sinusoids


class Sinusoidal2D(PositionEncoding, type="sinusoidal_2d"):
    """PE(r, c) = (PE_1(r), PE_2(c)): half of the width for the row of a patch, half for its column, each a sinusoidal embedding
    of that width (Parmar et al., 2018, section 3.3; as in DETR, MoCo v3, MAE).

    `[..., L, 2]`, rows and columns counted from 0, -> `[..., L, D]`. Computed in float64 and cast last: no table, grids of any
    size. Of an odd D the half in front has one number more. Class and register tokens get zeros.

    Options:
        base: the wavelengths of each half grow from 2π to base^((D-4)/D)·2π.
        layout: "interleaved" (sine on even, cosine on odd columns of each half, as in DETR) or "concatenated" (all sines, then
            all cosines, as in MAE).
        first: which half is in front, that of the "row" (DETR) or of the "column" (MAE's own code).
    """

    title = "Sinusoidal embeddings of rows and columns"
    paper = ("https://arxiv.org/abs/1802.05751", "https://arxiv.org/abs/2111.06377")
    axes: ClassVar[int] = 2

    base: Annotated[float, GreaterThan(1)] = 10000.0
    layout: Literal["interleaved", "concatenated"] = "interleaved"
    first: Literal["row", "column"] = "row"

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        if geometry.hidden_size < 4:
            raise ValueError(
                f"'sinusoidal_2d' has a sine and a cosine of the row and of the column, and this host's hidden_size is "
                f"{geometry.hidden_size}: it takes 4 or more"
            )

    def embed(self, positions: Tensor) -> Tensor:
        halves = positions.unbind(-1) if self.first == "row" else positions.flip(-1).unbind(-1)
        size = self.geometry.hidden_size
        sizes = ((size + 1) // 2, size // 2)
        vectors = (sinusoids(each, width, self.base, self.layout) for each, width in zip(halves, sizes, strict=True))
        return torch.cat(list(vectors), dim=-1)
