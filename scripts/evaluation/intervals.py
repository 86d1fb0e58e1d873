"""Student's 95 % intervals of means over a few seeds."""

import math
import statistics
from collections.abc import Sequence

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Number of runs n -> 97.5 % quantile of Student's t with n - 1 degrees of freedom."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval."""
    return statistics.fmean(values), STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
