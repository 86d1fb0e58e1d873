"""A case: one attack on one model. Running it gives a verdict."""

import functools
import logging
import multiprocessing
import re
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import hf_posenc

SKIPPED, EQUAL, REFUSED, STOCK_TOO, WRONG, CRASH, HANG = "skipped", "equal", "refused", "stock too", "WRONG", "CRASH", "HANG"
OUTCOMES = (SKIPPED, EQUAL, REFUSED, STOCK_TOO, WRONG, CRASH, HANG)
FAULTS = (WRONG, CRASH, HANG)
SAME = 1e-4
"""Part of the largest expected magnitude up to which two results are equal."""
Comparison = tuple[Any, ...]
"""What was computed, then what it may equal: one or more values, each a tensor or anything that compares by ==."""


@dataclass(frozen=True)
class Settings:
    """encodings: those that each family takes, where it takes any. kills: random moments at which a save is killed."""

    encodings: tuple[str, ...]
    seed: int = 0
    kills: int = 100


@dataclass(frozen=True)
class Case:
    """One attack on one model.

    host, encoding: of the model, by the names of `subjects`; or what else is attacked.
    run: yields the comparisons; all must hold. None: the attack doesn't apply here.
    stock: the same call of a stock model: if it raises the same error, or yields False, the fault isn't the encoding's.
    limit: seconds until the case counts as hanging. same: as SAME, where it is another.
    """

    attack: str
    host: str
    encoding: str
    run: Callable[[], Iterator[Comparison]]
    stock: Callable[[], Any] | None = None
    limit: float = 60.0
    same: float = SAME

    def name_in(self, family: str) -> str:
        return "/".join((family, self.attack, self.host, self.encoding))


@dataclass(frozen=True)
class Verdict:
    """name: family/attack/host/encoding, of the case. note: the error's first line, or by how much the results differ."""

    family: str
    attack: str
    host: str
    encoding: str
    outcome: str
    note: str = ""

    @property
    def name(self) -> str:
        return "/".join((self.family, self.attack, self.host, self.encoding))


class Refused(Exception):
    """Raised by a case in which another process ended by an error that is documented."""


class Hanging(BaseException):
    """Raised in a case that takes longer than its limit; no `except Exception` on the way stops it."""


def judge(family: str, case: Case) -> Verdict:
    """Run a case."""

    def verdict(outcome: str, note: str = "") -> Verdict:
        return Verdict(family, case.attack, case.host, case.encoding, outcome, note)

    try:
        comparisons = _within(case.limit, lambda: list(case.run()))
        for compared in comparisons:
            apart = _apart(*compared)
            if not apart <= case.same:
                note = (
                    f"differs by {apart:.2g} of the largest value"
                    if isinstance(compared[0], Tensor)
                    else f"it gave {compared[0]}"
                )
                return verdict(STOCK_TOO if _stock_fails(case, None) else WRONG, note)
    except Hanging:
        return verdict(HANG, f"not done in {case.limit:g} s")
    except Exception as error:
        note = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if isinstance(error, Refused):
            return verdict(REFUSED, str(error))
        if isinstance(error, ValueError) and _has_remedy(error):
            return verdict(REFUSED, note)
        note += f" [{_place(error)}]"
        return verdict(STOCK_TOO if _stock_fails(case, error) else CRASH, note)
    return verdict(EQUAL if comparisons else SKIPPED)


def _within(limit: float, run: Callable[[], Any]) -> Any:
    """The result of a call in the main thread. Raises Hanging after so many seconds."""

    def stop(*_: Any) -> None:
        raise Hanging

    handler, (left, _) = signal.signal(signal.SIGALRM, stop), signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return run()
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, handler)


def _apart(actual: Any, *allowed: Any) -> float:
    """By what part of the largest value a result differs from the nearest of those allowed; nan if it isn't finite."""
    return min((_distance(actual, expected) for expected in allowed), key=lambda apart: (apart != apart, apart))


def _distance(actual: Any, expected: Any) -> float:
    if not isinstance(expected, Tensor):
        return 0.0 if actual == expected else float("inf")
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = actual.detach().double(), expected.detach().double()
    if not bool(actual.isfinite().all()):
        return float("nan")
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-9)) if actual.numel() else 0.0


def _stock_fails(case: Case, error: Exception | None) -> bool:
    if case.stock is None:
        return False
    try:
        return _within(case.limit, case.stock) is False
    except Hanging:
        return False
    except Exception as raised:
        return error is not None and type(raised) is type(error)


def _has_remedy(error: Exception) -> bool:
    """Whether hf-posenc itself raised it, with a message that goes on after what is wrong."""
    raised_here = Path(_raised_in(error)[0]).is_relative_to(Path(str(hf_posenc.__file__)).parent)
    return raised_here and any(mark in str(error) for mark in (": ", "; "))


def _raised_in(error: Exception) -> tuple[str, str]:
    """File and line, of the other process if the error is from one."""
    lines = "".join(traceback.format_exception(error.__cause__ or error))
    return re.findall(r'File "([^"]+)", line (\d+)', lines.partition("The above exception")[0])[-1]


def _place(error: Exception) -> str:
    file, line = _raised_in(error)
    return f"{Path(file).name}:{line}"


def new_folder() -> str:
    """A folder that is deleted with all that the run writes."""
    return tempfile.mkdtemp()


def quiet() -> None:
    """Leaves only the verdicts to be printed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=quiet)


def elsewhere(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a module's function in another process, which has seen none of this one's classes."""
    return _process().submit(function, *arguments).result()


def end_elsewhere() -> None:
    """Ends that process: this one can't end before."""
    _process().shutdown()
    _process.cache_clear()


def no_grad(run: Callable[..., Iterator[Comparison]], *arguments: Any) -> Callable[[], Iterator[Comparison]]:
    """The comparisons of `run(*arguments)`, computed without gradients."""

    def computed() -> Iterator[Comparison]:
        with torch.no_grad():
            yield from list(run(*arguments))

    return computed
