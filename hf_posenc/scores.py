"""Scores of retrieval: ranks of queries, their means, and the difference of two methods, with bootstrap intervals.

Two methods are compared by `paired`, over the same queries: the interval of a difference is much narrower than those of the
two scores, which overlap long after the difference is clear.

Shapes: N queries, M documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

TIE = 1e-5
"""Similarities that differ by no more than this are equal: the same text embedded in another batch differs in its last bits."""
BLOCK = 500
"""Bootstrap samples drawn at a time."""


@dataclass(frozen=True)
class Ranks:
    """For each of N queries 1 if the right document comes first, the reciprocal of its rank, and the query's group.

    Queries of a group depend on each other, and are resampled together: facts in copies of one document, say.
    """

    hits: np.ndarray
    reciprocals: np.ndarray
    groups: np.ndarray


@dataclass(frozen=True)
class Score:
    """Recall at 1 and mean reciprocal rank over all queries, each with its 95 % bootstrap interval."""

    recall_at_1: float
    recall_at_1_interval: tuple[float, float]
    mrr: float
    mrr_interval: tuple[float, float]
    queries: int

    def shown(self, metric: str, digits: int = 2) -> str:
        """A metric with its interval, which has as many decimal places as `digits` says."""
        low, high = getattr(self, f"{metric}_interval")
        return f"{getattr(self, metric):.3f} [{low:.{digits}f}, {high:.{digits}f}]"


@dataclass(frozen=True)
class Difference:
    """The mean difference of two methods over the same queries, with its 95 % bootstrap interval."""

    value: float
    interval: tuple[float, float]
    queries: int

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return not self.interval[0] <= 0 <= self.interval[1]

    def shown(self, digits: int = 2) -> str:
        """The difference with its interval, which has as many decimal places as `digits` says."""
        low, high = self.interval
        return f"{self.value:+.3f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def ranked(similarity: Tensor, right: Sequence[int] | None = None, groups: Sequence[int] | None = None) -> Ranks:
    """The ranks by similarities `[N, M]`; `right` has the number of each query's document (None: N = M, in the same order).

    Documents that are equally similar (TIE) are in random order: hits and reciprocal ranks are the expected ones, so that a
    method which sees no difference is at the level of chance.
    """
    if not similarity.isfinite().all():
        raise ValueError("the similarities hold NaN or infinite values: look at the model's outputs")
    if right is None and len(similarity) != similarity.shape[1]:
        raise ValueError(f"{len(similarity)} queries and {similarity.shape[1]} documents: give `right`, each query's document")
    values = similarity.double().numpy()
    own = values[np.arange(len(values)), np.arange(len(values)) if right is None else np.asarray(right)][:, None]
    above = (values > own + TIE).sum(1)
    level = (np.abs(values - own) <= TIE).sum(1)
    harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, values.shape[1] + 1))])
    reciprocals = (harmonic[above + level] - harmonic[above]) / level
    return Ranks((above == 0) / level, reciprocals, np.arange(len(values)) if groups is None else np.asarray(groups))


def joined(parts: Sequence[Ranks]) -> Ranks:
    """The ranks of several sets of queries together."""
    names = ("hits", "reciprocals", "groups")
    return Ranks(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def score(found: Ranks | Tensor, seed: int = 0, samples: int = 10_000) -> Score:
    """The score of ranks, or of similarities `[N, N]` whose right documents are on the diagonal."""
    ranks = ranked(found) if isinstance(found, Tensor) else found
    hits, reciprocals = (bootstrapped(values, ranks.groups, seed, samples) for values in (ranks.hits, ranks.reciprocals))
    return Score(*hits, *reciprocals, len(ranks.hits))


def paired(ranks: Ranks, baseline: Ranks, metric: str = "mrr", seed: int = 0, samples: int = 10_000) -> Difference:
    """How much better (above 0) or worse than the baseline, by "mrr" or "recall_at_1", over the same queries."""
    names = {"mrr": "reciprocals", "recall_at_1": "hits"}
    if metric not in names:
        raise ValueError(f"metric={metric!r}: allowed are {', '.join(names)}")
    if not np.array_equal(ranks.groups, baseline.groups):
        raise ValueError(f"{len(ranks.groups)} and {len(baseline.groups)} queries, or other groups: compare the same queries")
    values = getattr(ranks, names[metric]) - getattr(baseline, names[metric])
    return Difference(*bootstrapped(values, ranks.groups, seed, samples), len(values))


def bootstrapped(
    values: np.ndarray, groups: np.ndarray, seed: int = 0, samples: int = 10_000
) -> tuple[float, tuple[float, float]]:
    """The mean of values `[N]`, and its 95 % percentile interval when groups are drawn with replacement."""
    _, number = np.unique(groups, return_inverse=True)
    sizes, sums = np.bincount(number), np.bincount(number, weights=values)
    generator, means = np.random.default_rng(seed), []
    for start in range(0, samples, BLOCK):
        drawn = generator.integers(0, len(sizes), (min(BLOCK, samples - start), len(sizes)))
        means.append(sums[drawn].sum(1) / sizes[drawn].sum(1))
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(values.mean()), (float(low), float(high))
