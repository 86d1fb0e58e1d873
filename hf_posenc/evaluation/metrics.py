"""Retrieval metrics: ranks of queries, their means, and the difference of two methods, with 95% intervals.

`paired` compares two methods over the same queries. The interval of the difference is much narrower than the intervals of the
two scores, which can overlap although the difference is significant.

`tools/coverage.py` measures how often the intervals contain the true mean. No interval is corrected for multiple
comparisons (`UNCORRECTED`).

Shapes: N queries, M documents, G groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any

import numpy as np
from torch import Tensor

TIE = 1e-5
"""Similarities that differ by at most this are ties, because a text's embedding varies in its last bits with the batch."""
UNCORRECTED = "95% intervals, not corrected for multiple comparisons"
"""A note for tables with several intervals."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class Ranks:
    """The ranks of N queries, as arrays `[N]`.

    hits: 1 if the right document comes first, otherwise 0. Ties have values in between.
    reciprocals: the reciprocal of the right document's rank.
    groups: the group of each query. Queries of one group depend on each other, such as questions about copies of one document.
        Intervals treat a group as one observation.

    Raises:
        ValueError: the arrays are empty, are not 1-D, or differ in length.
    """

    hits: np.ndarray
    reciprocals: np.ndarray
    groups: np.ndarray

    def __post_init__(self) -> None:
        shapes = {name: np.shape(getattr(self, name)) for name in ("hits", "reciprocals", "groups")}
        if len({*shapes.values()}) > 1 or len(shapes["hits"]) != 1 or not shapes["hits"][0]:
            shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise ValueError(f"Ranks has arrays of shapes {shown}. Pass three 1-D arrays of one length, 1 or more.")


@dataclass(frozen=True)
class Score:
    """Recall at 1 and mean reciprocal rank over all queries, each with its 95% interval."""

    recall_at_1: float
    recall_at_1_interval: Interval
    mrr: float
    mrr_interval: Interval
    queries: int

    def shown(self, metric: str, digits: int = 2) -> str:
        """A metric with its interval, rounded to `digits` decimal places."""
        low, high = getattr(self, f"{metric}_interval")
        return f"{getattr(self, metric):.3f} [{low:.{digits}f}, {high:.{digits}f}]"


@dataclass(frozen=True)
class Difference:
    """The mean difference of two methods over the same queries, with its 95% interval."""

    value: float
    interval: Interval
    queries: int

    @property
    def significant(self) -> bool:
        """Whether the interval excludes 0."""
        return not self.interval[0] <= 0 <= self.interval[1]

    def shown(self, digits: int = 2) -> str:
        """The difference with its interval, rounded to `digits` decimal places."""
        low, high = self.interval
        return f"{self.value:+.3f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def ranked(similarity: Tensor, right: Sequence[int] | None = None, groups: Sequence[int] | None = None) -> Ranks:
    """Rank documents by their similarities to queries, `[N, M]`.

    Ties (see TIE) are in random order, and hits and reciprocal ranks are expected values. A method that distinguishes no
    documents therefore scores at the level of chance.

    Args:
        right: the index of each query's document. Default: query i belongs to document i, and N = M.
        groups: the group of each query (see `Ranks`). Default: each query is its own group.

    Raises:
        ValueError: `similarity` isn't 2-D, is empty, or isn't finite. `right` or `groups` doesn't have one value per query. A
            value of `right` isn't the index of a document.
    """
    if not isinstance(similarity, Tensor) or similarity.ndim != 2 or not similarity.numel() or similarity.is_complex():
        shown = f"shape {[*similarity.shape]}" if isinstance(similarity, Tensor) else f"type {type(similarity).__name__}"
        raise ValueError(f"similarity has {shown}. Pass a tensor of real numbers, [queries, documents], one or more of each.")
    if not similarity.isfinite().all():
        raise ValueError("The similarities contain NaN or infinite values. Check the model's outputs.")
    count, documents = similarity.shape
    if right is None and count != documents:
        raise ValueError(
            f"{count} queries and {documents} documents don't match. Pass `right`, the index of each query's document."
        )
    values = similarity.detach().double().cpu().numpy()
    targets = np.arange(count) if right is None else _one_each("right", right, count)
    if right is not None:
        for query, target in enumerate(targets.tolist()):
            if isinstance(target, bool) or not isinstance(target, int) or not 0 <= target < documents:
                allowed = f"the index of a document, an integer from 0 to {documents - 1}"
                raise ValueError(f"right[{query}] is {target!r}. Allowed: {allowed}.")
    own = values[np.arange(count), targets.astype(int)][:, None]
    above = (values > own + TIE).sum(1)
    level = (np.abs(values - own) <= TIE).sum(1)
    harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, documents + 1))])
    reciprocals = (harmonic[above + level] - harmonic[above]) / level
    # Because of rounding, the difference of two sums can exceed 1.
    reciprocals = np.minimum(reciprocals, 1)
    return Ranks((above == 0) / level, reciprocals, np.arange(count) if groups is None else _one_each("groups", groups, count))


def _one_each(name: str, given: Any, count: int) -> np.ndarray:
    """An argument as an array with one value per query."""
    found = np.asarray(given.tolist() if isinstance(given, Tensor) else given)
    if found.shape != (count,):
        raise ValueError(f"{name} has shape {[*found.shape]}. Pass one value for each of the {count} queries.")
    return found


def joined(parts: Sequence[Ranks]) -> Ranks:
    """Concatenate the ranks of several sets of queries."""
    if not parts:
        raise ValueError("There are no ranks to join. Pass one set of queries or more.")
    names = ("hits", "reciprocals", "groups")
    return Ranks(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def score(found: Ranks | Tensor) -> Score:
    """The score of ranks, or of similarities `[N, N]` whose right documents are on the diagonal."""
    ranks = ranked(found) if isinstance(found, Tensor) else found
    hits, reciprocals = (share(values, ranks.groups) for values in (ranks.hits, ranks.reciprocals))
    return Score(*hits, *reciprocals, len(ranks.hits))


def paired(ranks: Ranks, baseline: Ranks, metric: str = "mrr") -> Difference:
    """The difference to the baseline in "mrr" or "recall_at_1", over the same queries. It is positive if `ranks` are better."""
    names = {"mrr": "reciprocals", "recall_at_1": "hits"}
    if metric not in names:
        raise ValueError(f"metric={metric!r} isn't a metric. Choose one of {', '.join(names)}.")
    if not np.array_equal(ranks.groups, baseline.groups):
        raise ValueError(
            f"{len(ranks.groups)} and {len(baseline.groups)} queries, or different groups, can't be paired. Use the same "
            "queries."
        )
    if ranks is baseline:
        return Difference(0.0, (0.0, 0.0), len(ranks.hits))
    values, others = getattr(ranks, names[metric]), getattr(baseline, names[metric])
    return Difference(*difference(values, others, ranks.groups), len(values))


def student(freedom: int) -> float:
    """The 97.5% quantile of Student's t, accurate to 0.1% (Abramowitz and Stegun, 26.7.5).

    It is exact for 1 and 2 degrees of freedom.
    """
    if freedom < 1:
        raise ValueError(f"freedom={freedom} is too small, because an interval needs two or more observations.")
    if freedom <= 2:
        return math.tan(0.475 * math.pi) if freedom == 1 else 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean over a few seeds, and half the width of its 95% interval.

    Raises ValueError for fewer than two values, or for values that aren't finite.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        raise ValueError(f"The values are {[*values]}. An interval needs two finite numbers or more.")
    return fmean(values), student(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def mean(values: np.ndarray, groups: np.ndarray) -> tuple[float, Interval]:
    """The mean of unbounded values `[N]`, such as losses, and its interval by Student's t over the groups.

    Raises ValueError for fewer than two groups, or for values that aren't finite.
    """
    center, errors = _errors(values, groups)
    half = student(len(errors) - 1) * math.sqrt(_variance(errors))
    return center, (center - half, center + half)


def share(values: np.ndarray, groups: np.ndarray) -> tuple[float, Interval]:
    """The mean of values `[N]` between 0 and 1, and its Wilson interval for the effective number of observations.

    The effective number is that of independent right or wrong answers whose mean has the same variance. If all groups have the
    same mean, their variance can't be estimated, and the interval is that of `_without_variance`.
    """
    center, errors = _errors(values, groups)
    if np.min(values) < 0 or np.max(values) > 1:
        raise ValueError(f"The values range from {np.min(values)} to {np.max(values)}, but must be between 0 and 1.")
    variance = _variance(errors)
    if not variance:
        return center, _without_variance(center, len(errors), (0.0, 1.0))
    square = student(len(errors) - 1) ** 2
    effective = center * (1 - center) / variance
    middle = (center + square / (2 * effective)) / (1 + square / effective)
    half = math.sqrt(square * (center * (1 - center) / effective + square / (4 * effective**2))) / (1 + square / effective)
    return center, (max(0.0, middle - half), min(1.0, middle + half))


def difference(values: np.ndarray, others: np.ndarray, groups: np.ndarray) -> tuple[float, Interval]:
    """The mean of `values - others`, all between 0 and 1, and its Newcombe interval for paired observations.

    The interval combines those of the two means (see `share`) by their correlation.
    R. G. Newcombe, Statistics in Medicine 17 (1998), 2635-2650, method 10 without its correction.
    """
    (center, errors), (other, its_errors) = _errors(values, groups), _errors(others, groups)
    gap = center - other
    (low, high), (its_low, its_high) = share(values, groups)[1], share(others, groups)[1]
    if not _variance(errors - its_errors):
        return gap, _without_variance(gap, len(errors), (-1.0, 1.0))
    scale = math.sqrt(_variance(errors) * _variance(its_errors))
    correlation = float(errors @ its_errors) * _factor(len(errors)) / scale if scale else 0.0

    def half(ours: float, theirs: float) -> float:
        return math.sqrt(max(0.0, ours**2 - 2 * correlation * ours * theirs + theirs**2))

    return gap, (gap - half(center - low, its_high - other), gap + half(high - center, other - its_low))


def _errors(values: np.ndarray, groups: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean, and the contribution of each group to its error, `[G]`, for the mean as a linearized ratio of sums."""
    values = np.asarray(values, dtype=float)
    if values.ndim != 1 or np.shape(groups) != values.shape or not values.size:
        raise ValueError(f"{[*values.shape]} values and {[*np.shape(groups)]} groups. Pass two 1-D arrays of one length.")
    if not np.isfinite(values).all():
        raise ValueError("The values contain NaN or infinity. Check the model's outputs.")
    _, number = np.unique(groups, return_inverse=True)
    center = values.mean()
    return float(center), np.bincount(number, weights=values - center) / len(values)


def _factor(groups: int) -> float:
    return groups / (groups - 1) if groups > 1 else 0.0


def _variance(errors: np.ndarray) -> float:
    """The squared standard error of the mean. 0 if the groups differ only by rounding errors."""
    return float(errors @ errors) * _factor(len(errors)) if np.abs(errors).max() > 1e-12 else 0.0


def _without_variance(center: float, groups: int, bounds: Interval) -> Interval:
    """The interval of a mean if all groups have this mean.

    A sample can miss other groups by chance. Its probability is at least 2.5% if their share is at most `missed`, and the
    interval covers their possible effect. If all answers are right, it equals the interval of Clopper and Pearson. For 20 right
    answers, it begins at 0.832.
    """
    missed = 1 - 0.025 ** (1 / groups)
    low, high = bounds
    return center - missed * (center - low), center + missed * (high - center)
