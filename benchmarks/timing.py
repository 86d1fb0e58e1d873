"""Times several subjects side by side: in each round every one of them once, in an order drawn anew.

What slows the machine down slows all subjects of a round down, so that they are compared within rounds. Needs torch alone:
v4_worker.py uses it beside another version of Transformers.
"""

import gc
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

Run = Callable[[], float]
"""One measurement; returns its seconds."""
Build = Callable[[str], Run]
"""Makes a subject ready, by name."""


@dataclass
class Timed:
    """seconds: subject -> its time in each round. failures: subject -> why it wasn't timed. runs: subject -> what was timed."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)


def synchronize(device: str) -> None:
    """Wait until the device has done all that was asked of it."""
    if device == "cuda":
        torch.cuda.synchronize()


CLOCKS = {"wall": time.perf_counter, "process": time.process_time}
"""Name -> a clock, in seconds. That of the process stands still while others have its core: for one thread, on a machine that
others use."""


def clocked(
    function: Callable[[], Any], device: str = "cpu", clock: str = "wall", after: Callable[[], Any] | None = None
) -> Run:
    """A run of `function`, until the device is done. What `after` does isn't timed."""
    now = CLOCKS[clock]

    def run() -> float:
        synchronize(device)
        started = now()
        function()
        synchronize(device)
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
    """The times of subjects, each built and run `warmup` times first. `progress` is called after each round.

    A subject that fails is left out from there on, and the others go on.
    """
    timed, draw = Timed(), random.Random(seed)
    for name in names:
        try:
            timed.runs[name] = build(name)
        except Exception as error:
            timed.failures[name] = described(error)
    gc.collect()
    frozen = gc.get_freeze_count()
    gc.freeze()  # what was built isn't looked through at each collection
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
    """The error in a line."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:300]
