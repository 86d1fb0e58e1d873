"""Compares the times and the peak memory of subjects."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import hf_posenc
from benchmarks.grid import Group, Settings
from benchmarks.memory import Peak
from benchmarks.ratios import ratio
from benchmarks.timing import Build, Timed, interleaved
from hf_posenc.progress import ProgressBar

STOCK, NONE = "stock", "none"
Record = dict[str, Any]
DIGITS = 4


def compared(
    names: Sequence[str], build: Build, group: Group, settings: Settings, references: tuple[str, ...] = (STOCK, NONE)
) -> tuple[dict[str, Record], Timed]:
    """Time subjects in interleaved rounds. Each record has the median, and throughput ratios to the available references."""
    with ProgressBar(total=settings.warmup + settings.rounds, desc=group.name, unit="round", leave=False, position=1) as bar:
        timed = interleaved(names, build, settings.rounds, settings.warmup, settings.seed, bar.update)
    return {name: {**mechanisms_of(name), **figures(timed, name, references)} for name in names}, timed


def mechanisms_of(name: str) -> Record:
    """The mechanisms of an encoding, on which targets depend. Empty for other subjects."""
    kind = hf_posenc.list_encodings().get(name)
    return {} if kind is None else {"mechanisms": list(kind.mechanisms())}


def figures(timed: Timed, name: str, references: tuple[str, ...]) -> Record:
    """The median time and the ratios of a subject, or why it failed."""
    if name in timed.failures:
        return {"failed": timed.failures[name]}
    ratios = {}
    for other in references:
        if other in timed.seconds and other != name:
            found = ratio(timed.seconds[other], timed.seconds[name])
            ratios[other] = [round(each, DIGITS) for each in (found.value, *found.interval)]
    return {"milliseconds": round(1e3 * statistics.median(timed.seconds[name]), DIGITS), "ratios": ratios}


def peak(run: Callable[[], Any], settings: Settings) -> float:
    """The peak memory of a run in MB, in addition to what was allocated before, measured after a first run."""
    with Peak() as taken:
        run()
        taken.start()
        run()
    return round(taken.bytes / 1e6, 2)
