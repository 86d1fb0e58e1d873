"""Measures the three properties of Wang et al. (2021, https://openreview.net/forum?id=onxoVA9FxMw).

The paper defines them for a proximity φ of positions:
    translation invariance   φ(x, x + m) = φ(y, y + m)
    monotonicity             φ(x, x + m) < φ(x, x + n) if m > n
    symmetry                 φ(x, y) = φ(y, x)
The degree to which each holds, from 0 to 1, is our definition.

Shapes: matrices `[..., L, L]`, query by key. Cells that aren't finite (a later key in a decoder) are omitted.
"""

import torch
from torch import Tensor

CELLS = (-2, -1)


def distances(length: int) -> Tensor:
    """Key index - query index, `[L, L]`."""
    index = torch.arange(length)
    return index - index[:, None]


def by_distance(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the standard deviation of the cells at each distance 1 - L … L - 1, `[..., 2L - 1]`. NaN if there are none.

    Infinite cells are included, so a distance that is masked everywhere has the mean -inf.
    """
    length = matrix.shape[-1]
    diagonals = [matrix.double().diagonal(distance, *CELLS) for distance in range(1 - length, length)]
    means = [cells.nanmean(-1, keepdim=True) for cells in diagonals]
    squares = [(cells - mean).where(cells != mean, 0.0) ** 2 for cells, mean in zip(diagonals, means, strict=True)]
    return torch.cat(means, -1), torch.stack([each.nanmean(-1) for each in squares], -1).sqrt()


def strength(matrix: Tensor) -> Tensor:
    """The standard deviation of all cells, `[...]`."""
    return (_centered(matrix) ** 2).nanmean(CELLS).sqrt()


def translation_invariance(matrix: Tensor, still: float) -> Tensor:
    """The share of the variance of off-diagonal cells that distance explains, R², `[...]`.

    still: the standard deviation up to which cells count as equal. The result is then NaN.
    """
    distance = distances(matrix.shape[-1])
    cells = matrix.where(matrix.isfinite() & (distance != 0), torch.nan)
    means, _ = by_distance(cells)
    rest = (cells - means[..., distance + len(distance) - 1]) ** 2
    explained = 1 - rest.nanmean(CELLS) / strength(cells) ** 2
    return explained.clamp(0, 1).masked_fill(strength(cells) <= still, torch.nan)


def monotonicity(matrix: Tensor, still: float, near: int | None = None) -> Tensor:
    """The share of key pairs in which the farther key has the smaller value, `[...]`.

    Pairs are on one side of a query, which is itself included. Differences up to `still` are ties and count half.
    near: the largest distance that counts.
    """
    length = matrix.shape[-1]
    right, count = (torch.zeros(matrix.shape[:-2], dtype=torch.float64) for _ in range(2))
    for query in range(length):
        for side in (matrix[..., query, query:], matrix[..., query, : query + 1].flip(-1)):
            values = side if near is None else side[..., : near + 1]
            fall = values[..., :, None] - values[..., None, :]  # nearer key (rows) minus farther key (columns)
            known = torch.ones(fall.shape[-2:], dtype=torch.bool).triu(1) & fall.isfinite()
            right += (((fall > still) + 0.5 * (fall.abs() <= still)) * known).sum((-2, -1))
            count += known.sum((-2, -1))
    return (right / count).masked_fill(strength(matrix) <= still, torch.nan)


def symmetry(matrix: Tensor, still: float) -> Tensor:
    """The share of the variance of off-diagonal cells that is unchanged when keys and queries are swapped, `[...]`."""
    cells = _centered(matrix.where(matrix.mT.isfinite() & (distances(matrix.shape[-1]) != 0), torch.nan))
    variance = (cells**2).nanmean(CELLS)
    same = (((cells + cells.mT) / 2) ** 2).nanmean(CELLS) / variance
    return same.masked_fill(variance.sqrt() <= still, torch.nan)


def _centered(matrix: Tensor) -> Tensor:
    """The finite cells minus their mean. Other cells are NaN."""
    cells = matrix.double().where(matrix.isfinite(), torch.nan)
    return cells - cells.nanmean(CELLS, keepdim=True)
