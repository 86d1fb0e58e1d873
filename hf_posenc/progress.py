"""Progress bars. Without a terminal, all bars of a process together print at most one line every 30 seconds."""

import functools
import os
import sys
import time
from typing import Any

from tqdm import std
from tqdm.auto import tqdm

SECONDS = 30.0
"""The shortest time between two lines of progress bars without a terminal."""
DELAY = 2.0
"""The time in seconds after which the bar of a short step appears."""
INTERVAL = "TQDM_MININTERVAL"
"""The environment variable of tqdm for this time. If it is set, all bars are as tqdm makes them."""


class _Lines:
    """Standard error as progress bars write to it: prints their state as a line if one is due, and nothing otherwise."""

    due = time.monotonic() + SECONDS

    def write(self, text: str) -> None:
        state = text.strip()
        if text.startswith("\r") and state and time.monotonic() >= self.due:  # else empties a line, or moves the cursor
            self.due = time.monotonic() + SECONDS
            sys.stderr.write(f"{state}\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


_LINES = _Lines()


def _file() -> _Lines | None:
    """Where bars are written. None, tqdm's default, on a terminal, in a notebook, and if the user has set the interval."""
    as_usual = sys.stderr is None or sys.stderr.isatty() or "ipykernel.zmqshell" in sys.modules or INTERVAL in os.environ
    return None if as_usual else _LINES


class ProgressBar(tqdm):
    """tqdm's bar for terminals and notebooks. Elsewhere, it prints a line if none was printed for 30 seconds."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"file": _file(), **settings})


_tqdm = std.tqdm.__init__


def limit_other_libraries() -> None:
    """Apply the same limit to the progress bars of other libraries in this process. Commands call this, the library doesn't."""
    if file := _file():
        std.tqdm.__init__ = functools.partialmethod(_tqdm, file=file)
