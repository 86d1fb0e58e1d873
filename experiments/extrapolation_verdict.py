"""Compare the papers' claims about length generalization with the results of a study.

Differences are computed within each seed, with the same data and model weights. A difference counts if Student's 95% interval
of its mean excludes zero. A bound counts if the interval is on one side of it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_posenc.studies.results import Mean, Results

EXPECTED, KAZEMNEJAD, PRESS = "expected of copy", "Kazemnejad et al. 2023", "Press et al. 2022"
"""Sources of claims. The first is a common expectation, not a paper's claim: Kazemnejad et al. find no encoding better than
`none` over all tasks."""
NEAR_ZERO = 0.05
"""Accuracies up to this value are near zero. Token accuracy is rescaled so that chance is 0 and the maximum is 1."""
FLAT, BLOWN_UP = 1.05, 1.5
"""Ratios of perplexity at 8 L to that at L. Up to FLAT, it stays flat. From BLOWN_UP, it blows up."""
LEARNED = 0.9
"""Minimum accuracy at L for a task to count as learned."""
TRIED = 0.5
"""Below this accuracy at L, a task wasn't learned, and scores beyond L mean nothing."""
SEEN, NOT_SEEN, OPEN, UNLEARNED, FLOOR, MISSING = "seen", "not seen", "open", "not learned", "all near zero", "not measured"
ANSWERS = {
    SEEN: "as the paper has it",
    NOT_SEEN: "the opposite, or on the other side of the bound",
    OPEN: "the seeds differ too much to tell",
    UNLEARNED: f"below {TRIED} at L already",
    FLOOR: "so are all encodings, and nothing follows",
    MISSING: "runs are missing",
}


@dataclass(frozen=True)
class Finding:
    """A claim and its verdict. answer: one of ANSWERS. figures: the numbers that it is computed from, as text."""

    source: str
    claim: str
    answer: str
    figures: str


def findings(results: Results) -> list[Finding]:
    """The findings for all claims. Accuracy is judged by exact match and by token accuracy, since the former can be zero."""
    made = []
    for measure in ("exact", "tokens"):
        name = {"exact": "exact match", "tokens": "tokens above chance"}[measure]
        for better in ("t5", "alibi"):
            made.append(_above(results, ["copy"], better, "none", measure, EXPECTED, f"copy at 2 L, {name}"))
        for low in ("rope", "sinusoidal"):
            made.append(_near_zero(results, "copy", low, measure, f"copy at 2 L, {name}"))
        tasks = [task for task in results.tasks if task != "lm"]
        for other in ("alibi", "rope", "sinusoidal"):
            where = f"{', '.join(tasks) or 'no task'} together at 2 L, {name}"
            made.append(_above(results, tasks, "none", other, measure, KAZEMNEJAD, where))
    for label in ("sinusoidal", "rope"):
        made.append(_grown(results, label, "blows up", lambda mean: mean >= BLOWN_UP))
    made.append(_grown(results, "alibi", "stays flat", lambda mean: mean <= FLAT))
    for low, high in (("alibi", "t5"), ("t5", "rope"), ("rope", "sinusoidal")):
        made.append(_grows_less(results, low, high))
    return made


def at(results: Results, task: str, multiple: int) -> int | None:
    """The test length for a multiple of L, or None if it wasn't tested."""
    length = multiple * results.trained_length(task)
    return length if length in results.lengths(task) else None


def accuracy(results: Results, task: str, label: str, multiple: int, measure: str) -> dict[int, float] | None:
    """Seed -> accuracy. Token accuracy is rescaled so that chance or less is 0."""
    length = at(results, task, multiple) if task in results.tasks else None
    if length is None or not results.seeds(task, label):
        return None
    chance = (results.chance(task) or 0.0) if measure == "tokens" else 0.0
    values = {seed: results.value(task, label, seed, length, measure) for seed in results.seeds(task, label)}
    return {seed: max(0.0, value - chance) / (1 - chance) for seed, value in values.items()}


def growth(results: Results, label: str) -> dict[int, float] | None:
    """Seed -> ratio of the perplexity at 8 L to that at L."""
    lengths = [at(results, "lm", multiple) if "lm" in results.tasks else None for multiple in (1, 8)]
    if None in lengths or not results.seeds("lm", label):
        return None
    found = {}
    for seed in results.seeds("lm", label):
        short, long = (results.value("lm", label, seed, length, "perplexity") for length in lengths if length)
        found[seed] = long / short if math.isfinite(short) else math.inf
    return found


def compared(higher: dict[int, float], lower: dict[int, float]) -> tuple[str, Mean] | None:
    """Whether the first is higher, and the differences over common seeds. None without common seeds."""
    if not (common := sorted(higher.keys() & lower.keys())):
        return None
    difference = Mean(tuple(_minus(higher[seed], lower[seed]) for seed in common))
    if difference.half is None or abs(difference.mean) <= difference.half:
        return OPEN, difference
    return (SEEN if difference.mean > 0 else NOT_SEEN), difference


def _minus(first: float, second: float) -> float:
    return 0.0 if first == second else first - second  # two infinite perplexities are equal


def _over(results: Results, tasks: Sequence[str], label: str, multiple: int, measure: str) -> dict[int, float] | None:
    """Seed -> mean accuracy over tasks, for seeds with all tasks."""
    each = [accuracy(results, task, label, multiple, measure) for task in tasks]
    if not each or None in each:
        return None
    common = set.intersection(*(set(values) for values in each if values))
    return {seed: sum(values[seed] for values in each if values) / len(each) for seed in sorted(common)} or None


def _above(results: Results, tasks: Sequence[str], better: str, worse: str, measure: str, source: str, where: str) -> Finding:
    claim = f"{where}: {better} above {worse}"
    first, second = (_over(results, tasks, label, 2, measure) for label in (better, worse))
    answer = compared(first, second) if first and second else None
    if not (first and second and answer):
        return Finding(source, claim, MISSING, "")
    at_length = {label: _over(results, tasks, label, 1, measure) for label in (better, worse)}
    concluded = answer[0] if any(_tried(values) for values in at_length.values()) else UNLEARNED
    concluded = FLOOR if _all_near_zero(results, tasks, measure) else concluded
    figures = [
        f"{label} {_shown(values)} (at L {_shown(at_length[label])})" for label, values in ((better, first), (worse, second))
    ]
    return Finding(source, claim, concluded, f"{'; '.join(figures)}; difference {answer[1].shown()}")


def _near_zero(results: Results, task: str, label: str, measure: str, where: str) -> Finding:
    claim = f"{where}: {label} near zero (up to {NEAR_ZERO})"
    values = accuracy(results, task, label, 2, measure)
    if not values:
        return Finding(EXPECTED, claim, MISSING, "")
    answer = _bounded(values, lambda mean: mean <= NEAR_ZERO)
    before = accuracy(results, task, label, 1, measure)
    answer = answer if _tried(before) else UNLEARNED
    answer = FLOOR if _all_near_zero(results, [task], measure) else answer
    return Finding(EXPECTED, claim, answer, f"{label} {_shown(values)} (at L {_shown(before)})")


def _all_near_zero(results: Results, tasks: Sequence[str], measure: str) -> bool:
    """Whether all encodings are at or below NEAR_ZERO at 2 L in all of these tasks."""
    found = [accuracy(results, task, label, 2, measure) for task in tasks for label in results.encodings(task)]
    return all(Mean(tuple(values.values())).mean <= NEAR_ZERO for values in found if values)


def _tried(values: dict[int, float] | None) -> bool:
    """Whether the mean accuracy at L shows that the task was mostly learned."""
    return values is not None and Mean(tuple(values.values())).mean >= TRIED


def _grown(results: Results, label: str, does: str, holds: Callable[[float], bool]) -> Finding:
    bound = f"×{BLOWN_UP} or more" if does == "blows up" else f"×{FLAT} or less"
    claim = f"perplexity of {label} {does} from L to 8 L ({bound})"
    values = growth(results, label)
    if not values:
        return Finding(PRESS, claim, MISSING, "")
    return Finding(PRESS, claim, _bounded(values, holds), f"×{_shown(values)}")


def _bounded(values: dict[int, float], holds: Callable[[float], bool]) -> str:
    """Whether a bound holds at both ends of the mean's interval (SEEN), at neither (NOT_SEEN), or at one (OPEN)."""
    mean = Mean(tuple(values.values()))
    if math.isinf(mean.mean):
        return SEEN if holds(mean.mean) else NOT_SEEN
    if mean.half is None:
        return OPEN
    ends = {holds(mean.mean - mean.half), holds(mean.mean + mean.half)}
    return OPEN if len(ends) == 2 else SEEN if ends == {True} else NOT_SEEN


def _grows_less(results: Results, low: str, high: str) -> Finding:
    claim = f"perplexity from L to 8 L grows less with {low} than with {high}"
    first, second = growth(results, low), growth(results, high)
    answer = compared(second, first) if first and second else None
    if not (first and second and answer):
        return Finding(PRESS, claim, MISSING, "")
    return Finding(PRESS, claim, answer[0], f"{low} ×{_shown(first)}; {high} ×{_shown(second)}; difference {answer[1].shown()}")


def _shown(values: dict[int, float] | None) -> str:
    return "not tested" if not values else Mean(tuple(values.values())).shown()


def summary(found: Sequence[Finding]) -> str:
    """A sentence on whether the papers' ranking is reproduced."""
    measured = [each for each in found if each.answer != MISSING]
    if not measured:
        return "Whether the papers' ranking is seen: nothing of it was measured."
    seen = sum(each.answer == SEEN for each in measured)
    whole = "is seen" if seen == len(measured) else "is seen in part" if seen else "is not seen"
    counts = [
        f"{sum(each.answer == answer for each in measured)} {answer}" for answer in (SEEN, NOT_SEEN, OPEN, UNLEARNED, FLOOR)
    ]
    rest = f"; {len(found) - len(measured)} not measured" if len(measured) < len(found) else ""
    return f"The papers' ranking {whole}: of {len(measured)} claims {', '.join(counts)}{rest}."


def as_record(found: Sequence[Finding]) -> dict[str, Any]:
    bounds = {"near_zero": NEAR_ZERO, "flat": FLAT, "blown_up": BLOWN_UP, "learned": LEARNED}
    return {"summary": summary(found), "bounds": bounds, "findings": [asdict(each) for each in found]}


def learned(results: Results, task: str) -> list[str]:
    """The encodings whose mean exact match over seeds reaches LEARNED at L."""
    length = at(results, task, 1)
    if length is None or task == "lm":
        return []
    means = {label: results.mean(task, label, length, "exact").mean for label in results.encodings(task)}
    return [label for label, mean in means.items() if not math.isnan(mean) and mean >= LEARNED]
