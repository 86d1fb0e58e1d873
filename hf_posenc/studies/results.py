"""The scores of a study's runs, by task, encoding, and length."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.evaluation.metrics import interval
from hf_posenc.studies.tasks import TASKS

Record = dict[str, Any]
DIGESTS = {"model": "initial weights", "train": "training rows", "test": "test rows"}


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, in their order.

    half: half the width of Student's 95% interval. None for a single seed, and for equal values: scores are discrete, so equal
        values don't show how much the seeds vary.
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def half(self) -> float | None:
        varies = max(self.values) - min(self.values) > 1e-9 * max(map(abs, self.values))
        return interval(self.values)[1] if varies and math.isfinite(self.mean) else None

    def shown(self, digits: int = 2) -> str:
        return f"{self.mean:.{digits}f}" + ("" if self.half is None else f" ± {self.half:.{digits}f}")


def _check_same(found: Sequence[Record]) -> None:
    first: dict[tuple[str, int], Record] = {}
    for record in found:
        other = first.setdefault((record["task"], record["seed"]), record)
        for name, digest in record.get("digests", {}).items():  # records of earlier versions have no digests
            if digest != other.get("digests", {}).get(name, digest):
                raise SystemExit(
                    f"{record['task']}, seed {record['seed']}: {record['encoding']} and {other['encoding']} had different "
                    f"{DIGESTS[name]}, so they can't be compared. The cause can be another version of torch or Transformers. "
                    "Remove the older of their files."
                )


def value_of(scores: Record, measure: str) -> float:
    """A score of one length: "exact", "tokens", "accuracy", a custom metric, or "perplexity", which can be infinite."""
    if measure == "accuracy":
        return scores["exact"]
    if measure != "perplexity":
        return scores[measure]
    return math.inf if scores["loss"] is None else math.exp(min(scores["loss"], 700.0))


class Results:
    """The results of finished runs. Raises SystemExit if encodings had different data or model weights."""

    def __init__(self, found: Sequence[Record]) -> None:
        _check_same(found)
        self.records = {(record["task"], record["encoding"], record["seed"]): record for record in found}
        self.tasks = [task for task in TASKS if any(key[0] == task for key in self.records)]

    def encodings(self, task: str) -> list[str]:
        return list(dict.fromkeys(label for kind, label, _ in self.records if kind == task))

    def seeds(self, task: str, label: str) -> list[int]:
        return sorted(seed for kind, each, seed in self.records if (kind, each) == (task, label))

    def diverged(self, task: str, label: str) -> int:
        """The number of runs with a non-finite loss in training or at L."""
        runs = [self.records[task, label, seed] for seed in self.seeds(task, label)]
        at_length = str(self.trained_length(task))
        return sum(None in run.get("losses", []) or run["scores"].get(at_length, {}).get("loss", 0.0) is None for run in runs)

    def trained_length(self, task: str) -> int:
        """L of a task that has runs."""
        return next(record for (kind, *_), record in self.records.items() if kind == task)["settings"]["length"]

    def lengths(self, task: str) -> list[int]:
        return [int(length) for length in next(r for (kind, *_), r in self.records.items() if kind == task)["scores"]]

    def ends(self, task: str, label: str) -> int | None:
        """The maximum length of an encoding in tokens, or None."""
        return self.records[task, label, self.seeds(task, label)[0]]["max_length"]

    def value(self, task: str, label: str, seed: int, length: int, measure: str) -> float:
        return value_of(self.records[task, label, seed]["scores"][str(length)], measure)

    def mean(self, task: str, label: str, length: int, measure: str) -> Mean:
        return Mean(tuple(self.value(task, label, seed, length, measure) for seed in self.seeds(task, label)))

    def difference(self, task: str, label: str, base: str, length: int, measure: str) -> Mean | None:
        """The difference of an encoding from another over common seeds. None without common seeds."""
        both = [seed for seed in self.seeds(task, label) if seed in self.seeds(task, base)]
        values = [
            self.value(task, label, seed, length, measure) - self.value(task, base, seed, length, measure) for seed in both
        ]
        return Mean(tuple(values)) if values else None

    def chance(self, task: str) -> float | None:
        """The score of random answers."""
        return TASKS[task].chance
