"""The record of a study, compare.json: settings, a row for each score, and the table of means and paired differences."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from hf_posenc.studies.results import Mean, Results
from hf_posenc.studies.runs import finite, times
from hf_posenc.studies.study import Study
from hf_posenc.studies.tasks import Task

HOLM = "holm"
LEVEL = 0.05
Record = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """The study of one model, and the results of its runs."""

    study: Study
    results: Results

    def task(self, name: str) -> Task:
        return self.study.setup.task(name)

    def lengths(self, task: str) -> dict[float, int]:
        """Multiple of L -> test length."""
        return {multiple: times(self.study.trainings[task].length, multiple) for multiple in self.study.setup.multiples}

    def scores(self) -> list[tuple[str, str, str]]:
        """Task, metric, and encoding of all results."""
        tasks = self.results.tasks
        return [
            (task, metric, label)
            for task in tasks
            for metric in self.task(task).measures
            for label in self.results.encodings(task)
        ]


def as_record(
    parts: Sequence[Part], left_out: Mapping[str, list[str]], failed: Mapping[str, str], correction: str | None
) -> Record:
    """The whole record.

    versions: of the packages. models: label -> settings of a model's study (see `_settings`). failed: run -> reason.
    rows: a dict for each model, task, encoding, seed, length, and metric, with its `value` (None if it isn't finite).
    table: a dict for each of these without the seed (see `_summary`). baseline: the encoding of its differences.
    correction: "holm", or None.

    left_out: model -> tasks that it has no head for.
    """
    baseline = next((label for part in parts for _, _, label in part.scores()), None)
    cells = _cells(parts)
    table = [_summary(part, *key, length, multiple, baseline) for part, key, multiple, length in cells]
    _mark_significant(table, correction)
    return {
        "versions": {name: version(name) for name in ("hf-posenc", "torch", "transformers")},
        "models": {part.study.label: _settings(part, left_out.get(part.study.label, [])) for part in parts},
        "failed": dict(failed),
        "baseline": baseline,
        "correction": correction,
        "table": table,
        "rows": [
            {**_where(part, *key, length, multiple), "seed": seed, "value": finite(value)}
            for part, key, multiple, length in cells
            for seed, value in _values(part, *key, length).items()
        ],
    }


def _cells(parts: Sequence[Part]) -> list[tuple[Part, tuple[str, str, str], float, int]]:
    return [(part, key, *cell) for part in parts for key in part.scores() for cell in part.lengths(key[0]).items()]


def _where(part: Part, task: str, metric: str, label: str, length: int, multiple: float) -> Record:
    where = {"model": part.study.label, "task": task, "encoding": label, "length": length, "multiple": multiple}
    return {**where, "metric": metric}


def _values(part: Part, task: str, metric: str, label: str, length: int) -> dict[int, float]:
    return {seed: part.results.value(task, label, seed, length, metric) for seed in part.results.seeds(task, label)}


def _summary(part: Part, task: str, metric: str, label: str, length: int, multiple: float, baseline: str | None) -> Record:
    """The mean over seeds, the paired difference from the baseline over common seeds, and half the width of both intervals.

    max_length: maximum length of the encoding in tokens, or None. diverged: number of runs with a non-finite loss.
    p: of a two-sided paired t-test, or None. `p_holm` and `significant` are added later.
    """
    results = part.results
    mean = results.mean(task, label, length, metric)
    gap = None
    if baseline is not None and label != baseline and baseline in results.encodings(task):
        gap = results.difference(task, label, baseline, length, metric)
    return {
        **_where(part, task, metric, label, length, multiple),
        "seeds": len(mean.values),
        "mean": finite(mean.mean),
        "half_width": mean.half,
        "difference": None if gap is None else finite(gap.mean),
        "difference_half_width": None if gap is None else gap.half,
        "p": None if gap is None or gap.half is None else p_value(gap),
        "max_length": results.ends(task, label),
        "diverged": results.diverged(task, label),
    }


def p_value(difference: Mean) -> float:
    """The p-value of a two-sided t-test of differences that are paired by seed."""
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(difference.values, 0.0).pvalue)


def _mark_significant(table: list[Record], correction: str | None) -> None:
    """Add to each row Holm's corrected `p_holm`, and `significant`: whether the interval of its difference excludes 0.

    With Holm's correction, a difference is significant if p_holm < 0.05.
    """
    tested = sorted((row for row in table if row["p"] is not None), key=lambda row: row["p"])
    adjusted = 0.0
    for place, row in enumerate(tested):
        adjusted = max(adjusted, min(1.0, row["p"] * (len(tested) - place)))
        row["p_holm"] = adjusted
    for row in table:
        row.setdefault("p_holm", None)
        p = row["p_holm" if correction == HOLM else "p"]
        row["significant"] = p is not None and p < LEVEL


def _settings(part: Part, left_out: list[str]) -> Record:
    """The settings of a model's study. digests: of what all encodings share, by task and seed."""
    study, results = part.study, part.results
    digests: dict[str, Record] = {}
    for (task, _, seed), run in results.records.items():
        digests.setdefault(task, {}).setdefault(str(seed), run["digests"])
    tasks = {}
    for name, training in study.trainings.items():
        task = part.task(name)
        about = {"unit": task.unit, "metrics": task.measures, "lower_is_better": task.descends(), "chance": task.chance}
        tasks[name] = {**asdict(training), **about}
    return {
        "setup": study.setup,
        "seeds": study.seeds,
        "tasks": tasks,
        "encodings": {each.label: each.options for each in study.encodings},
        "unsupported": study.unsupported,
        "tasks_left_out": left_out,
        "runs": runs_of(part),
        "digests": digests,
    }


def runs_of(part: Part) -> Record:
    """The numbers of planned and finished runs, and their processor time."""
    seconds = [run["cpu_seconds"] for run in part.results.records.values()]
    return {"planned": len(part.study.runs()), "finished": len(seconds), "cpu_seconds": round(sum(seconds))}
