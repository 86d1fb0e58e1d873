"""Sinusoidal embeddings of rows and columns: https://arxiv.org/abs/1802.05751, https://arxiv.org/abs/2111.06377"""

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.options import GreaterThan
from hf_posenc.encodings.sinusoidal import sinusoids


class Sinusoidal2D(PositionEncoding, type="sinusoidal_2d"):
    """PE(r, c) = (PE_1(r), PE_2(c)): sinusoidal embeddings of the row and the column of a patch, each with half of the width
    (Parmar et al., 2018, section 3.3; as in DETR, MoCo v3, MAE).

    Shapes: `[..., L, 2]`, rows and columns counted from 0, -> `[..., L, D]`. Vectors are computed in float64 and cast last.
    Grids can have any size. If D is odd, the first half has one number more. Class and register tokens get zeros.

    Options:
        base: the wavelengths of each half increase from 2π to base^((D-4)/D)·2π.
        layout: "interleaved" (sine in even, cosine in odd columns of each half, as in DETR) or "concatenated" (all sines, then
            all cosines, as in MAE).
        first: the first half, "row" (DETR) or "column" (MAE's code).
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
                f"'sinusoidal_2d' needs a hidden_size of at least 4, for a sine and a cosine of the row and of the column, but "
                f"this model's hidden_size is {geometry.hidden_size}. Choose another encoding."
            )

    def embed(self, positions: Tensor) -> Tensor:
        halves = positions.unbind(-1) if self.first == "row" else positions.flip(-1).unbind(-1)
        size = self.geometry.hidden_size
        sizes = ((size + 1) // 2, size // 2)
        vectors = (sinusoids(each, width, self.base, self.layout) for each, width in zip(halves, sizes, strict=True))
        return torch.cat(list(vectors), dim=-1)
