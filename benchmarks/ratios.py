"""Ratios of times that were measured in the same rounds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """The median of a ratio over rounds, and its interval by order statistics (see `interval`)."""

    value: float
    interval: tuple[float, float]
    rounds: int


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """The ratio of two subjects' times within each round.

    If `above` has the times of a reference, this is the relative throughput of `below`: 1.0 is as fast as the reference, and
    less is slower.

    Raises ValueError if the numbers of rounds differ, or if there are none.
    """
    if len(above) != len(below) or not above:
        raise ValueError(f"{len(above)} and {len(below)} rounds: ratios are taken within rounds, of both subjects")
    values = [a / b for a, b in zip(above, below, strict=True)]
    return Ratio(statistics.median(values), interval(values), len(values))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Order statistics that contain the median of any distribution with a probability of at least 95%.

    Fewer than six values have no such interval. Their range contains the median with a probability of 1 - 2^(1 - n): 93.75%
    for five.
    """
    count, dropped, below = len(values), 0, 1
    while 2 * (below := below + math.comb(count, dropped + 1)) <= 0.05 * 2**count:
        dropped += 1
    return sorted(values)[dropped], sorted(values)[count - 1 - dropped]
