"""Times several subjects in interleaved rounds. In each round, every subject runs once, in random order.

Other load on the machine affects all subjects of a round, so subjects are compared within rounds.
"""

import gc
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Run = Callable[[], float]
"""Runs one measurement and returns its seconds."""
Build = Callable[[str], Run]
"""Prepares the subject of a name."""


@dataclass
class Timed:
    """The times of subjects.

    seconds: subject -> its time in each round.
    failures: subject -> why it failed.
    runs: subject -> the function that was timed.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)


CLOCKS = {"wall": time.perf_counter, "process": time.process_time}
"""Name -> a clock, in seconds. The process clock stops while other processes use the core. It is for a single thread on a
shared machine."""


def clocked(function: Callable[[], Any], clock: str = "wall", after: Callable[[], Any] | None = None) -> Run:
    """A run that times `function`. `after` is then called, and isn't timed."""
    now = CLOCKS[clock]

    def run() -> float:
        started = now()
        function()
        seconds = now() - started
        if after is not None:
            after()
        return seconds

    return run


def interleaved(
    names: Iterable[str],
    build: Build,
    rounds: int,
    warmup: int = 1,
    seed: int = 0,
    progress: Callable[[], Any] = lambda: None,
) -> Timed:
    """Time subjects after building each and running it `warmup` times. `progress` is called after each round.

    If a subject fails, the others continue without it.
    """
    timed, draw = Timed(), random.Random(seed)
    for name in names:
        try:
            timed.runs[name] = build(name)
        except Exception as error:
            timed.failures[name] = described(error)
    gc.collect()
    frozen = gc.get_freeze_count()
    gc.freeze()  # so that collections don't traverse the subjects
    gc.disable()
    try:
        for number in range(warmup + rounds):
            order = list(timed.runs)
            draw.shuffle(order)
            for name in order:
                gc.collect()
                try:
                    seconds = timed.runs[name]()
                except Exception as error:
                    timed.failures[name] = described(error)
                    del timed.runs[name]
                    timed.seconds.pop(name, None)
                    continue
                if number >= warmup:
                    timed.seconds.setdefault(name, []).append(seconds)
            progress()
    finally:
        gc.enable()
        if not frozen:
            gc.unfreeze()
    return timed


def described(error: Exception) -> str:
    """The error in one line."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:300]
