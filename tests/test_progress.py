"""Progress bars in terminals and log files."""

import contextlib
import io
import time

import pytest
from tqdm import std

from conftest import said_by_python
from hf_posenc.progress import ProgressBar


def test_importing_the_library_changes_no_other_bars():
    _, errors = said_by_python("import hf_posenc.evaluation.retrieval\nfrom tqdm.auto import tqdm\n[*tqdm(range(3))]")
    assert "0/3" in errors and "3/3" in errors


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_in_a_log_file_appears_every_30_seconds(terminal, monkeypatch):
    """Each of 24 steps takes 10 seconds."""
    clock, log = [0.0], io.StringIO()
    log.isatty = lambda: terminal
    monkeypatch.setattr(std, "time", lambda: clock[0])
    with contextlib.redirect_stderr(log):
        for _ in ProgressBar(range(24), desc="steps"):
            clock[0] += 10
    states = [state for state in log.getvalue().split("\r") if state.strip()]
    assert len(states) >= 24 if terminal else 7 <= len(states) <= 9
    monkeypatch.setattr(std, "time", time.time)
