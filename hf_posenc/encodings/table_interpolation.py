"""Extends learned position embeddings to more positions without training.

Shapes: N rows, M rows of the extended table, D hidden_size. Positions count from 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_posenc.encodings.options import check_size, did_you_mean, quoted, short_repr

LINEAR, CUBIC, TILED, RECURRENT, GROUPED, KEEP_FIRST = "linear", "cubic", "tiled", "recurrent", "grouped", "keep_first"
STATIC = (LINEAR, CUBIC, TILED, RECURRENT, GROUPED, KEEP_FIRST)
"""The methods of `interpolate_table`."""
DYNAMIC = "dynamic"
"""The method that interpolates positions by the length of each text. Short texts keep their positions."""
WINDOWS = "windows"
"""The method by which an encoder reads longer inputs in overlapping windows. Any encoding supports it."""
KEPT = 20
"""The default number of rows that "keep_first" keeps, as in Long-CLIP."""


@dataclass(frozen=True)
class Grids:
    """Two grids of patches, which are numbered row by row.

    before, after: numbers of rows and columns.
    behind: number of other tokens after the patches.
    how: arguments of `torch.nn.functional.interpolate`, if the interpolation of the model isn't bicubic.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    behind: int = 0
    how: Mapping[str, Any] = field(default_factory=dict)

    def resize(self, vectors: Tensor) -> Tensor:
        """Vectors of patches `[..., N, D]` -> `[..., M, D]`, as in Transformers' `interpolate_pos_encoding`, in float32."""
        return _resized(vectors, self.before, self.after, **{"mode": "bicubic", **self.how})

    def resize_table(self, table: Tensor, shape: Sequence[int]) -> Tensor | None:
        """A table for the new grid, of this shape. None if the shapes don't agree with both grids.

        Position embeddings are `[..., rows, D]`, with rows of other tokens before and after the patches. BEiT's biases are
        `[distances + 3, H]`: (2 rows - 1)(2 columns - 1) distances, and three biases of the class token. They are interpolated
        bilinearly, as in BEiT, whose code supports only squares.
        """
        patches, others = math.prod(self.before), table.shape[-2] - math.prod(self.before) if table.ndim > 1 else -1
        if tuple(shape) == (*table.shape[:-2], math.prod(self.after) + others, table.shape[-1]) and others >= self.behind:
            before, inside, behind = table.split([others - self.behind, patches, self.behind], dim=-2)
            return torch.cat([before, self.resize(inside), behind], dim=-2)
        spans, wider = ((2 * rows - 1, 2 * columns - 1) for rows, columns in (self.before, self.after))
        sizes = ((math.prod(each) + 3, *table.shape[1:]) for each in (spans, wider))
        if (tuple(table.shape), tuple(shape)) == tuple(sizes) and spans[0] == spans[1] and wider[0] == wider[1]:
            return torch.cat([_resized(table[:-3], spans, wider, mode="bilinear"), table[-3:]])
        return None


@dataclass(frozen=True)
class Extension:
    """The arguments of `extend`.

    method: its name.
    before, after: the current and the new maximum length in tokens.
    settings: further arguments by name.
    grids: for another image size, the grids of patches.
    """

    method: str
    before: int
    after: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    grids: Grids | None = None

    def windows(self) -> dict[str, int]:
        """The windows of the method "windows": by default as long as the current maximum length, and a quarter overlapping.

        Raises ValueError for a setting that the method doesn't have, or for a window longer than the current maximum length.
        """
        self.refuse_other_settings("window", "stride", "prefix", "suffix")
        given = {name: value for name, value in self.settings.items() if value is not None}
        chosen = {"window": self.before, "prefix": 1, "suffix": 1, **given}
        if any(type(value) is not int for value in chosen.values()) or chosen["window"] > self.before:
            raise ValueError(
                f"{short_repr(dict(given))} isn't valid. The settings of method='windows' are integers, and window is at most "
                f"{self.before}, the current maximum length. The model was not changed."
            )
        room = chosen["window"] - chosen["prefix"] - chosen["suffix"]
        return {"stride": max(1, 3 * room // 4), **chosen}

    def refuse_other_settings(self, *allowed: str) -> None:
        """Raises ValueError for a setting that the method doesn't have."""
        for name, value in self.settings.items():
            if name not in allowed:
                raise ValueError(
                    f"{name}={short_repr(value)}{did_you_mean(name, allowed)} isn't a setting of extend with "
                    f"method={self.method!r}. Its settings: {quoted(allowed) or 'none'}. Omit {name}."
                )

    def interpolate_table(self, table: Tensor) -> Tensor:
        """Extends a table `[before, D]` to `[after, D]`. Raises ValueError for a setting that the method doesn't have."""
        if self.grids is not None:
            return self.grids.resize(table)
        self.refuse_other_settings(*(("keep",) if self.method == KEEP_FIRST else ()))
        keep = self.settings.get("keep", min(KEPT, len(table) - 1) if self.method == KEEP_FIRST else 0)
        if type(keep) is not int or not 0 <= keep < len(table):
            raise ValueError(f"keep={short_repr(keep)} isn't valid. It must be an integer from 0 to {len(table) - 1}.")
        check_size(f"max_length={self.after} at {table.shape[1]} features", self.after * table.shape[1])
        return interpolate_table(table, self.after, self.method, keep)


def interpolate_table(table: Tensor, length: int, method: str, keep: int = 0) -> Tensor:
    """Extends a table `[N, D]` to `[M, D]`, M = `length` ≥ N, in the same dtype. Computed in float64.

    "linear"      row p is interpolated linearly at x = p(N - 1)/(M - 1), so both ends stay the same
                  (https://arxiv.org/abs/2306.15595, for positions).
    "cubic"       the same x, with cubic convolution of four rows (Keys, 1981, a = -3/4, as in torch's "bicubic", which enlarges
                  Vision Transformers). The first and the last row are repeated beyond the ends.
    "tiled"       row p mod N: consecutive copies (https://arxiv.org/abs/2004.05150, section 5), called "recurrent" in
                  https://arxiv.org/abs/2404.12096.
    "grouped"     row floor(p / s), s = ceil(M/N): s adjacent positions share a row (https://arxiv.org/abs/2404.12096).
    "keep_first"  the first `keep` rows stay the same, and the others are interpolated as in "linear"
                  (https://arxiv.org/abs/2403.15378).
    """
    rows = len(table)
    position = torch.arange(length, device=table.device)
    if method in (TILED, RECURRENT):
        return table[position % rows]
    if method == GROUPED:
        return table[position // -(-length // rows)]
    below, part = fractions(position[: length - keep], rows - keep, length - keep)
    precise = table[keep:].double()
    if method == CUBIC:
        return _cubic(precise, below, part).to(table.dtype)
    above = (below + 1).clamp(max=len(precise) - 1)
    longer = torch.lerp(precise[below], precise[above], part[:, None])
    return torch.cat([table[:keep], longer.to(table.dtype)])


def _resized(vectors: Tensor, before: tuple[int, ...], after: tuple[int, ...], **how: Any) -> Tensor:
    """Interpolates vectors `[..., rows · columns, D]` to another number of rows and columns."""
    width = vectors.shape[-1]
    grid = vectors.float().reshape(-1, *before, width).permute(0, 3, 1, 2)
    resized = F.interpolate(grid, size=after, align_corners=False, **how).permute(0, 2, 3, 1)
    return resized.reshape(*vectors.shape[:-2], math.prod(after), width).to(vectors.dtype)


def fractions(position: Tensor, rows: int, length: int | Tensor) -> tuple[Tensor, Tensor]:
    """The row below each position of a text of `length` tokens, and the fraction of the way to the next row, float64.

    Positions are scaled so that the first and the last fall on the ends of the table. Fractions are exact on rows."""
    spaces = torch.as_tensor(length, device=position.device).sub(1).clamp(min=1)
    steps = position * (rows - 1)
    return steps // spaces, (steps % spaces).double() / spaces


def _cubic(table: Tensor, below: Tensor, part: Tensor) -> Tensor:
    """Rows interpolated by cubic convolution."""
    total = torch.zeros(len(below), table.shape[1], dtype=table.dtype, device=table.device)
    for offset in (-1, 0, 1, 2):
        distance = (part - offset).abs()
        near = (1.25 * distance - 2.25) * distance**2 + 1
        far = -0.75 * (((distance - 5) * distance + 8) * distance - 4)
        total += torch.where(distance <= 1, near, far)[:, None] * table[(below + offset).clamp(0, len(table) - 1)]
    return total
