"""Ratios of times that were measured in the same rounds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """The median of a ratio over rounds, and its 95% bootstrap interval."""

    value: float
    interval: tuple[float, float]
    rounds: int


def ratio(above: Sequence[float], below: Sequence[float], seed: int = 0, samples: int = 10_000) -> Ratio:
    """The ratio of two subjects' times within each round.

    If `above` has the times of a reference, this is the relative throughput of `below`: 1.0 is as fast as the reference, and
    less is slower.

    Raises ValueError if the numbers of rounds differ, or if there are none.
    """
    if len(above) != len(below) or not above:
        raise ValueError(f"{len(above)} and {len(below)} rounds: ratios are taken within rounds, of both subjects")
    values = np.asarray(above) / np.asarray(below)
    drawn = np.random.default_rng(seed).integers(0, len(values), (samples, len(values)))
    low, high = np.percentile(np.median(values[drawn], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(values)), (float(low), float(high)), len(values))
