"""Runs each request in a separate process, which is killed when its budget is spent or its visitor has left."""

import multiprocessing
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from huggingface_hub.errors import HTTPError

from hf_posenc import _compat
from hf_posenc.explorer.budget import Budget, Refused

EXPECTED = (ValueError, OSError, ImportError, HTTPError)
"""Errors that a visitor's input or an unreachable Hub can cause. Any other error is a bug."""
POLL = 0.25
"""The interval in seconds at which the visitor's presence is checked."""
REMEDY = "Choose smaller options, a smaller model, or fewer texts."
_PRELOADED = ("hf_posenc.explorer.encodings", "hf_posenc.explorer.models", "matplotlib.backends.backend_agg")


def results(
    function: Callable[..., Iterable[Any]], *args: Any, budget: Budget, left: Callable[[], bool] = lambda: False
) -> Iterator[Any]:
    """Yield what `function(*args)` yields in a separate process. Stop early if `left()` returns True.

    The process ends with the iteration, also if the caller closes the iterator early.

    Args:
        function: importable by name. Its arguments and results can be pickled.
        budget: the resources of the process.
        left: returns whether the visitor has left.

    Raises:
        `Refused`: the function raised an error, or the budget is spent. The message is for the visitor.
    """
    receiver, sender = _context().Pipe(duplex=False)
    scratch = tempfile.TemporaryDirectory(prefix="hf-posenc-", ignore_cleanup_errors=True)
    process = _context().Process(target=_work, args=(sender, scratch.name, budget, function, args), daemon=True)
    process.start()
    sender.close()
    deadline = time.monotonic() + budget.seconds
    try:
        while not left():
            if time.monotonic() > deadline:
                raise Refused(f"{budget.too_slow()} {REMEDY}")
            if not wait([receiver], POLL):
                continue
            try:
                kind, value = receiver.recv()
            except EOFError:
                raise Refused(_died(process, budget)) from None
            if kind == "error":
                raise Refused(value)
            if kind == "end":
                return
            yield value
    finally:
        receiver.close()
        process.kill()
        process.join()
        process.close()
        scratch.cleanup()


def check_main() -> None:
    """Raises RuntimeError in a child process of a script that serves the page without `if __name__ == "__main__":`."""
    if _compat.is_starting_process():
        raise RuntimeError(
            "The script that serves the page is imported again by its child processes. Call serve() only under "
            'if __name__ == "__main__":'
        )


def prepare() -> None:
    """Start the server process from which requests are forked, so that the first request doesn't wait for imports."""
    if _context().get_start_method() == "forkserver":
        from multiprocessing import forkserver

        forkserver.ensure_running()


def _context() -> Any:
    """Forks of a small server process start fast, and inherit neither threads nor connections. Windows doesn't support fork."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED])
    return context


def _work(
    sender: Connection, scratch: str, budget: Budget, function: Callable[..., Iterable[Any]], args: tuple[Any, ...]
) -> None:
    tempfile.tempdir = scratch  # removed after the request
    torch.set_num_threads(1)  # leaves the other cores to other visitors
    if hasattr(signal, "SIGXFSZ"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a file above the limit raises OSError
    budget.enforce()
    try:
        for result in function(*args):
            sender.send(("result", result))
        sender.send(("end", None))
    except BrokenPipeError:  # the visitor has left
        sys.exit(1)
    except Exception as error:
        sender.send(("error", _said(error, budget)))


def _said(error: Exception, budget: Budget) -> str:
    """The message for the visitor. It is never empty."""
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "Cannot allocate memory" in str(error):
        return f"{budget.too_large()} {REMEDY}"
    if isinstance(error, EXPECTED):
        return str(error) or f"{type(error).__name__} without a message. {REMEDY}"
    traceback.print_exception(error)
    return f"An unexpected error occurred: {type(error).__name__}: {error}. Please report it with the inputs that caused it."


def _died(process: Any, budget: Budget) -> str:
    """Why a process ended without a result. Usually, a library aborted because it couldn't allocate memory."""
    process.join()
    if process.exitcode == -getattr(signal, "SIGXCPU", 0):
        return f"{budget.too_slow()} {REMEDY}"
    return f"The request ended early (exit code {process.exitcode}), probably for lack of memory. {REMEDY}"
