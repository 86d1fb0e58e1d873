"""Progress bars."""

import sys
from typing import Any

from tqdm.auto import tqdm

SECONDS = 30.0
"""The time between two updates of a bar in a log file."""
DELAY = 2.0
"""The time in seconds after which the bar of a short step appears."""


class ProgressBar(tqdm):
    """tqdm's bar. In a log file, it appears after 30 seconds and is updated every 30 seconds."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        in_log = not (sys.stderr is None or sys.stderr.isatty() or "ipykernel.zmqshell" in sys.modules)
        super().__init__(*args, **{**settings, **({"mininterval": SECONDS, "delay": SECONDS} if in_log else {})})
