"""A learned table made longer without training: rows for more positions than it was trained with.

Shapes: N rows, M rows of the longer table, D hidden_size. Positions count from 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_posenc.encodings.options import check_size, did_you_mean, quoted, short_repr

LINEAR, CUBIC, TILED, RECURRENT, GROUPED, KEEP_FIRST = "linear", "cubic", "tiled", "recurrent", "grouped", "keep_first"
STATIC = (LINEAR, CUBIC, TILED, RECURRENT, GROUPED, KEEP_FIRST)
"""The methods by which `stretched` makes a table longer."""
DYNAMIC = "dynamic"
"""The method by which positions are stretched to the length of each text, and short texts keep theirs."""
KEPT = 20
"""The rows that "keep_first" keeps unless it is told otherwise, as Long-CLIP does."""


@dataclass(frozen=True)
class Extension:
    """What `extend` was asked for.

    method: its name.
    before, after: the longest input in tokens that positions were made for, and the new one.
    settings: what was given besides, by name.
    """

    method: str
    before: int
    after: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    def refuse_other_settings(self, *allowed: str) -> None:
        """Raises ValueError for a setting that this method doesn't take."""
        for name, value in self.settings.items():
            if name not in allowed:
                raise ValueError(
                    f"{name}={short_repr(value)}{did_you_mean(name, allowed)}: extend with method={self.method!r} takes "
                    f"{quoted(allowed) or 'no setting'} here; leave it out"
                )

    def interpolate_table(self, table: Tensor) -> Tensor:
        """A table `[before, D]` made `[after, D]` by this method. Raises ValueError for a setting that it doesn't take."""
        self.refuse_other_settings(*(("keep",) if self.method == KEEP_FIRST else ()))
        keep = self.settings.get("keep", min(KEPT, len(table) - 1) if self.method == KEEP_FIRST else 0)
        if type(keep) is not int or not 0 <= keep < len(table):
            raise ValueError(f"keep={short_repr(keep)}: allowed is a number of rows from 0 to {len(table) - 1}")
        check_size(f"max_length={self.after} at {table.shape[1]} features", self.after * table.shape[1])
        return interpolate_table(table, self.after, self.method, keep)


def interpolate_table(table: Tensor, length: int, method: str, keep: int = 0) -> Tensor:
    """A table `[N, D]` made `[M, D]`, M = `length` and no less than N, in its dtype; computed in float64.

    "linear"      row p is the table at x = p(N - 1)/(M - 1), between two rows their mean by distance: both ends stay
                  (https://arxiv.org/abs/2306.15595, for positions).
    "cubic"       the same x, by cubic convolution of four rows (Keys, 1981, a = -3/4, as torch's "bicubic", by which Vision
                  Transformers are made larger); beyond an end its row is repeated.
    "tiled"       row p mod N: copies behind one another (https://arxiv.org/abs/2004.05150, section 5). "recurrent" is its name
                  in https://arxiv.org/abs/2404.12096.
    "grouped"     row floor(p / s), s = ceil(M/N): s neighbours share a row (https://arxiv.org/abs/2404.12096).
    "keep_first"  the first `keep` rows as they are, the others stretched as in "linear" (https://arxiv.org/abs/2403.15378).
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


def fractions(position: Tensor, rows: int, length: int | Tensor) -> tuple[Tensor, Tensor]:
    """Where positions of a text of `length` tokens lie in a table of so many rows, both ends on its ends: the row below, and
    the part of the way from there to the next, float64. Exact where they lie on a row."""
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
