"""Sinusoidal position embeddings: https://arxiv.org/abs/1706.03762"""

from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.options import Above


class Sinusoidal(PositionEncoding, type="sinusoidal"):
    """PE(p, 2i) = sin(p / base^(2i/D)), PE(p, 2i+1) = cos(p / base^(2i/D)) (Vaswani et al., 2017, section 3.5).

    Computed in float64 for the given positions and cast last: no table, any length. An odd D has one cosine less.

    Options:
        base: the wavelengths grow from 2π to base^((D-2)/D)·2π.
        layout: "interleaved" (sine on even, cosine on odd columns) or "concatenated" (all sines, then all cosines).
        scale: a factor on the vectors, or "learned" for one trained factor, initially 1
            (https://arxiv.org/abs/1809.08895, section 3.2).
    """

    title = "Sinusoidal position embeddings"
    paper = ("https://arxiv.org/abs/1706.03762",)

    base: Annotated[float, Above(1)] = 10000.0
    layout: Literal["interleaved", "concatenated"] = "interleaved"
    scale: float | Literal["learned"] = 1.0

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        if self.scale == "learned":
            self.factor = nn.Parameter(torch.empty(()))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.scale == "learned":
            nn.init.ones_(self.factor)

    def embed(self, positions: Tensor) -> Tensor:
        table = sinusoids(positions, self.geometry.hidden_size, self.base, self.layout)
        if self.scale == "learned":
            return table.to(self.factor.dtype) * self.factor
        return table if self.scale == 1 else table * self.scale

    def shift_matrix(self, offset: int) -> Tensor:
        """M of shape `[D, D]`, float64, with PE(p + offset) = M · PE(p) for every p and every `scale`.

        M consists of 2×2 rotations, one for each frequency. Raises ValueError for an odd D, whose last sine has no cosine
        to be rotated with.
        """
        size = self.geometry.hidden_size
        if size % 2:
            raise ValueError(f"hidden_size={size} is odd, so its last sine has no cosine: only an even one can be shifted")
        angles = offset * frequencies(size, self.base)
        interleaved = self.layout == "interleaved"
        sines = torch.arange(0, size, 2) if interleaved else torch.arange(size // 2)
        cosines = sines + (1 if interleaved else size // 2)
        matrix = torch.zeros(size, size, dtype=torch.float64)
        matrix[sines, sines] = matrix[cosines, cosines] = angles.cos()
        matrix[sines, cosines] = angles.sin()
        matrix[cosines, sines] = -angles.sin()
        return matrix


def frequencies(size: int, base: float, device: torch.device | None = None) -> Tensor:
    """base^(-2i/size) for i = 0 … ceil(size/2) - 1, float64, radians per position."""
    return base ** (-torch.arange(0, size, 2, dtype=torch.float64, device=device) / size)


def sinusoids(positions: Tensor, size: int, base: float, layout: str = "interleaved") -> Tensor:
    """Integer positions `[..., L]` -> float64 sines and cosines `[..., L, size]`."""
    angles = positions.to(torch.float64)[..., None] * frequencies(size, base, positions.device)
    sines, cosines = angles.sin(), angles.cos()
    if layout == "concatenated":
        return torch.cat([sines, cosines[..., : size // 2]], dim=-1)
    return torch.stack([sines, cosines], dim=-1).flatten(-2)[..., :size]
