"""Student's 95% intervals of means over a few seeds."""

import math
import statistics
from collections.abc import Sequence

from hf_posenc.evaluation.metrics import student


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95% interval.

    Raises ValueError for fewer than two values, and for values that aren't finite.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        raise ValueError(f"the values are {[*values]}. An interval needs two finite numbers or more.")
    return statistics.fmean(values), student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
