"""Measure how often 95% intervals of retrieval scores contain the true mean, by method and number of queries.

    python -m tools.coverage --output_file scripts/results/coverage.txt      # four minutes

Each cell has the coverage in percent and, in brackets, the mean width. The methods are the percentile bootstrap, the
bias-corrected and accelerated bootstrap (BCa), Student's t, and `hf_posenc.evaluation.metrics` (Wilson intervals for scores,
Newcombe intervals for differences).
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

import numpy as np

from hf_posenc.evaluation import metrics, terminals
from hf_posenc.progress import ProgressBar
from hf_posenc.serialization.atomic import write_text

COUNTS = (10, 20, 50, 150)
RESAMPLES = 2000
BLOCK = 100
"""Number of trials that share resamples."""
LOWEST = 90.0
"""Cells with a coverage below this percentage are marked."""
NORMAL = NormalDist()
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
Intervals = np.ndarray
"""`[trials, 2]`."""


def hits(probability: float) -> Draw:
    """R@1 of independent queries."""
    return lambda random, shape: (random.random(shape) < probability).astype(float)


def reciprocals(probability: float) -> Draw:
    """Reciprocal ranks. Rank 1 has this probability, and ranks 2 to 50 have probabilities proportional to 1 / rank."""

    def draw(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        others = np.floor(np.exp(random.uniform(math.log(2), math.log(51), shape)))
        return np.where(random.random(shape) < probability, 1.0, 1 / others)

    return draw


def changed(part: float, better: float, worse: float) -> Draw:
    """Two methods whose reciprocal ranks differ in the share `part` of the queries."""

    def draw(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        both, differ = reciprocals(0.6)(random, shape), random.random(shape) < part
        return np.stack([np.where(differ, reciprocals(each)(random, shape), both) for each in (better, worse)])

    return draw


def discordant(gained: float, lost: float, both: float) -> Draw:
    """R@1 of two methods, from the shares of queries that only the first, only the second, or both answer."""

    def draw(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        drawn = random.random(shape)
        right = drawn >= 1 - both
        return np.stack([(drawn < gained) | right, ((drawn >= gained) & (drawn < gained + lost)) | right]).astype(float)

    return draw


def shifted(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Two methods whose scores differ slightly in every query."""
    first = 0.1 + 0.8 * reciprocals(0.6)(random, shape)
    return np.stack([np.clip(first + random.normal(0.02, 0.05, shape), 0, 1), first])


SCORES: dict[str, Draw] = {
    "R@1, p = 0.5": hits(0.5),
    "R@1, p = 0.8": hits(0.8),
    "R@1, p = 0.95": hits(0.95),
    "MRR, 30% first": reciprocals(0.3),
    "MRR, 70% first": reciprocals(0.7),
    "MRR, 95% first": reciprocals(0.95),
}
PAIRS: dict[str, Draw] = {
    "MRR, every query differs": shifted,
    "MRR, 20% differ": changed(0.2, 0.5, 0.3),
    "MRR, 10% differ, no gain": changed(0.1, 0.5, 0.5),
    "R@1, 10% gained, 5% lost": discordant(0.10, 0.05, 0.7),
    "R@1, 10% gained, 0% lost": discordant(0.10, 0.0, 0.8),
    "R@1, 5% gained, 5% lost": discordant(0.05, 0.05, 0.85),
}


def bootstraps(values: np.ndarray, random: np.random.Generator) -> tuple[Intervals, Intervals]:
    """The percentile and the BCa interval of the mean of each row of values."""
    count = values.shape[1]
    weights = random.multinomial(count, np.full(count, 1 / count), RESAMPLES) / count
    means = np.sort(values @ weights.T, axis=1)
    centers = values.mean(1)
    below = ((means < centers[:, None] - 1e-12).mean(1) + (means <= centers[:, None] + 1e-12).mean(1)) / 2
    cubes, squares = ((values - centers[:, None]) ** 3).sum(1), ((values - centers[:, None]) ** 2).sum(1)
    percentiles, corrected = np.empty((2, len(values), 2))
    for row, sorted_means in enumerate(means):
        percentiles[row] = np.quantile(sorted_means, (0.025, 0.975))
        bias = NORMAL.inv_cdf(min(max(below[row], 1 / RESAMPLES), 1 - 1 / RESAMPLES))
        acceleration = cubes[row] / (6 * squares[row] ** 1.5) if squares[row] > 1e-12 else 0.0
        moved = [bias + NORMAL.inv_cdf(level) for level in (0.025, 0.975)]
        levels = [NORMAL.cdf(bias + each / (1 - acceleration * each)) for each in moved]
        corrected[row] = np.quantile(sorted_means, levels)
    return percentiles, corrected


def by_method(drawn: np.ndarray, random: np.random.Generator) -> dict[str, Intervals]:
    """The intervals of each method.

    drawn: `[trials, queries]`, or `[2, trials, queries]` for the difference of two methods.
    """
    values = drawn if drawn.ndim == 2 else drawn[0] - drawn[1]
    groups = np.arange(values.shape[1])
    blocks = [bootstraps(block, random) for block in np.split(values, range(BLOCK, len(values), BLOCK))]
    percentiles, corrected = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return {
        "percentile": percentiles,
        "BCa": corrected,
        "Student": np.array([metrics.mean(row, groups)[1] for row in values]),
        "hf_posenc": ours(drawn),
    }


def ours(drawn: np.ndarray) -> Intervals:
    groups = np.arange(drawn.shape[-1])
    if drawn.ndim == 2:
        return np.array([metrics.share(row, groups)[1] for row in drawn])
    return np.array([metrics.difference(one, other, groups)[1] for one, other in zip(*drawn, strict=True)])


def true_mean(draw: Draw, random: np.random.Generator) -> float:
    many = draw(random, (20_000, 200))
    return float((many if many.ndim == 2 else many[0] - many[1]).mean())


def measured(draw: Draw, count: int, trials: int, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Method -> coverage in percent and mean width."""
    random = np.random.default_rng(seed)
    true = true_mean(draw, random)
    found = by_method(draw(random, (trials, count)), random)
    return {
        name: (100 * np.mean((low <= true) & (true <= high)), float(np.mean(high - low)))
        for name, (low, high) in ((name, intervals.T) for name, intervals in found.items())
    }


def report(trials: int, counts: tuple[int, ...] = COUNTS) -> str:
    """All tables as text."""
    lines = [f"coverage of nominal 95% intervals in {trials} trials, in brackets the mean width; * below {LOWEST:.0f}%"]
    lowest: dict[str, float] = {}
    rows = [(title, name, draw, n) for title, of in TITLES.items() for name, draw in of.items() for n in counts]
    last = ""
    for title, name, draw, count in ProgressBar(rows, unit="row", leave=False):
        found = measured(draw, count, trials)
        if title != last:
            lines += ["", f"{title:28}{'queries':>8}" + "".join(f"{method:>16}" for method in found)]
        cells = [f"{covered:.1f}{'*' if covered < LOWEST else ''} ({width:.3f})" for covered, width in found.values()]
        lines.append(f"{name if count == counts[0] else '':28}{count:>8}" + "".join(f"{cell:>16}" for cell in cells))
        lowest |= {method: min(lowest.get(method, 100.0), covered) for method, (covered, _) in found.items()}
        last = title
    return "\n".join([*lines, "", "lowest: " + ", ".join(f"{method} {each:.1f}%" for method, each in lowest.items())]) + "\n"


TITLES = {"scores": SCORES, "differences of two methods": PAIRS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4000)
    parser.add_argument("--output_file", type=Path, help="a file for the tables, which are also printed")
    arguments = parser.parse_args()
    text = report(arguments.trials)
    print(text, end="")
    if arguments.output_file:
        write_text(arguments.output_file, text)


if __name__ == "__main__":
    terminals.set_up()
    main()
