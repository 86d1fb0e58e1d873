"""Rotary embeddings of rows and columns: https://arxiv.org/abs/2403.13298"""

import math
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import PositionContext
from hf_posenc.encodings.options import GreaterThan
from hf_posenc.encodings.rotation import cos_sin, rotated_by
from hf_posenc.encodings.sinusoidal import frequencies


class RoPE2D(PositionEncoding, type="rope_2d"):
    """Each pair of features of a query or key in row r and column c is rotated by a·r + b·c, so that the score of two patches
    depends on how many rows and columns lie between them (Heo et al., 2024, equations 10 to 13).

    "axial": the first E/4 pairs are rotated by r·theta^(-4i/E), the others by c·theta^(-4i/E), i = 0 … E/4 - 1.
    "mixed": (a, b) are trained, two numbers for each pair and key-value head. They start as the two axes of "axial", rotated by
    a different angle for each head. Heads therefore attend along different diagonals. The paper draws the angles at random.

    Angles are computed in float64 and cast last. Grids can have any size. Class and register tokens aren't rotated.

    Options:
        frequencies: "axial" or "mixed".
        theta: the base of the frequencies. For short grids, the paper uses 100, and 10 for "mixed".
        layout: which features form a pair, "half" (i and i + E/2) or "interleaved" (2i and 2i + 1, as in the paper's code).
        per_layer: whether each attention has separate frequencies, as in the paper.
    """

    title = "Rotary embeddings of rows and columns"
    paper = ("https://arxiv.org/abs/2403.13298",)
    axes: ClassVar[int] = 2
    translation_invariant = True

    frequencies: Literal["axial", "mixed"] = "axial"
    theta: Annotated[float, GreaterThan(1)] = 100.0
    layout: Literal["half", "interleaved"] = "half"
    per_layer: bool = False

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        if geometry.head_dim % 4 or not geometry.head_dim:
            raise ValueError(
                f"'rope_2d' needs a head_dim divisible by 4, because it rotates as many pairs by row as by column, but this "
                f"model's head_dim is {geometry.head_dim}. Choose an additive encoding or a bias, such as 'sinusoidal_2d'."
            )
        if self.frequencies == "mixed":
            heads = geometry.num_key_value_heads or geometry.num_attention_heads
            self.weight = nn.Parameter(torch.empty(2, heads, geometry.head_dim // 2))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.frequencies == "mixed":
            heads, device = self.weight.shape[1], self.weight.device
            by_row, by_column = self._axial(device)
            turns = torch.arange(heads, dtype=torch.float64, device=device)[:, None] * (math.pi / 2 / heads)
            with torch.no_grad():
                self.weight[0] = by_row * turns.cos() - by_column * turns.sin()
                self.weight[1] = by_row * turns.sin() + by_column * turns.cos()

    def rotate(self, query: Tensor | None, key: Tensor | None, context: PositionContext) -> tuple[Tensor | None, Tensor | None]:
        def compute(heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            return self._cos_sin(context.coordinates(2), heads, dtype)

        return rotated_by(self, compute, query, context, self.layout), rotated_by(self, compute, key, context, self.layout)

    def _cos_sin(self, cells: Tensor, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines `[1 or B, 1 or H, L, E]` and sines `[1 or B, 1 or H, L, E/2]`, for rows and columns `[1 or B, L, 2]`."""
        steps = self._axial(cells.device)
        if self.frequencies == "mixed":  # several query heads may share a key head
            steps = self.weight.double().repeat_interleave(heads // self.weight.shape[1], dim=1)
        row, column = cells.double()[:, None, :, :, None].unbind(3)
        angles = row * steps[0, :, None] + column * steps[1, :, None]
        return cos_sin(angles, dtype, self.layout)

    def _axial(self, device: torch.device) -> Tensor:
        """Radians per row and per column, `[2, 1, E/2]`, float64."""
        steps = frequencies(self.geometry.head_dim // 2, self.theta, device)
        return torch.block_diag(steps, steps)[:, None]
