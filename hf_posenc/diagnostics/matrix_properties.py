"""The three properties of Wang et al. (2021, https://openreview.net/forum?id=onxoVA9FxMw) as numbers.

The paper defines them for a proximity φ of positions: translation invariance, φ(x, x + m) = φ(y, y + m); monotonicity,
φ(x, x + m) < φ(x, x + n) where m > n; symmetry, φ(x, y) = φ(y, x). The numbers are ours: how far each holds, from 0 to 1.

Shapes: matrices `[..., L, L]`, query by key; cells that aren't finite (a later key in a decoder) are left out.
"""

import torch
from torch import Tensor


def distances(length: int) -> Tensor:
    """Key index - query index, `[L, L]`."""
    index = torch.arange(length)
    return index - index[:, None]


def by_distance(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the standard deviation of the cells at each distance 1 - L … L - 1, `[..., 2L - 1]`; NaN where none counts.

    Infinite cells count here: a distance that is masked everywhere has the mean -inf.
    """
    length = matrix.shape[-1]
    column = (distances(length) + length - 1).flatten()
    cells, known = matrix.flatten(-2), ~matrix.flatten(-2).isnan()

    def mean(values: Tensor) -> Tensor:
        count, total = (torch.zeros(*matrix.shape[:-2], 2 * length - 1, dtype=torch.float64) for _ in range(2))
        count.index_add_(-1, column, known.double())
        return total.index_add_(-1, column, values.double().where(known, 0.0)) / count

    means = mean(cells)
    there = means[..., column]
    return means, mean((cells - there).where(cells != there, 0.0) ** 2).sqrt()


def strength(matrix: Tensor) -> Tensor:
    """The standard deviation of all cells, `[...]`."""
    known = matrix.isfinite()
    count = known.sum((-2, -1)).double()
    mean = matrix.where(known, 0.0).sum((-2, -1)) / count
    return ((matrix - mean[..., None, None]).where(known, 0.0) ** 2).sum((-2, -1)).div(count).sqrt()


def translation_invariance(matrix: Tensor, still: float) -> Tensor:
    """The part of the variance of the cells beside the diagonal that their distance explains, R², `[...]`.

    still: the standard deviation up to which cells count as equal; the number is then NaN, as there is nothing to explain.
    """
    length = matrix.shape[-1]
    known = matrix.isfinite() & (distances(length) != 0)
    cells = matrix.where(known, torch.nan)
    means, _ = by_distance(cells)
    rest = (cells - means[..., distances(length) + length - 1]).where(known, 0.0) ** 2
    whole = strength(cells)
    explained = 1 - rest.sum((-2, -1)) / (whole**2 * known.sum((-2, -1)))
    return explained.clamp(0, 1).masked_fill(whole <= still, torch.nan)


def monotonicity(matrix: Tensor, still: float, near: int | None = None) -> Tensor:
    """Of all pairs of keys on one side of a query, itself among them, the part in which the farther one has the smaller value,
    `[...]`. Differences up to `still` are ties, and count half. near: the greatest distance that counts.
    """
    length = matrix.shape[-1]
    right, count = (torch.zeros(matrix.shape[:-2], dtype=torch.float64) for _ in range(2))
    for query in range(length):
        for side in (matrix[..., query, query:], matrix[..., query, : query + 1].flip(-1)):
            values = side if near is None else side[..., : near + 1]
            fall = values[..., :, None] - values[..., None, :]  # of a nearer key (rows) above a farther one
            known = torch.ones(fall.shape[-2:], dtype=torch.bool).triu(1) & fall.isfinite()
            right += (((fall > still) + 0.5 * (fall.abs() <= still)) * known).sum((-2, -1))
            count += known.sum((-2, -1))
    return (right / count).masked_fill(strength(matrix) <= still, torch.nan)


def symmetry(matrix: Tensor, still: float) -> Tensor:
    """The part of the variance of the cells beside the diagonal that is left when keys and queries change places, `[...]`."""
    known = matrix.isfinite() & matrix.mT.isfinite() & ~torch.eye(matrix.shape[-1], dtype=torch.bool)
    count = known.sum((-2, -1)).double()
    mean = matrix.where(known, 0.0).sum((-2, -1)) / count
    centred = (matrix - mean[..., None, None]).where(known, 0.0)
    whole = (centred**2).sum((-2, -1))
    same = (((centred + centred.mT) / 2) ** 2).sum((-2, -1))
    return (same / whole).masked_fill((whole / count).sqrt() <= still, torch.nan)
