"""Resumes an interrupted run of tests.

If RESUME_FILE is set, the tests that pass are written to that file. They don't run again until a source changes.
"""

import hashlib
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("hf_posenc", "tests", "scripts", "experiments", "benchmarks", "tools", "docs", "model_cards")


def digest():
    """The hash of all sources."""
    files = sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".json"))
    found = hashlib.sha256((ROOT / "pyproject.toml").read_bytes())
    for path in files:
        found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return found.hexdigest()


class Resume:
    """The plugin. The controller process reads and writes the file, and sends the passed tests to the workers."""

    def __init__(self, config):
        self.is_controller = not hasattr(config, "workerinput")
        self.file, self.passed, self.failed = Path(os.environ["RESUME_FILE"]), set(), set()
        if not self.is_controller:
            self.passed = set(config.workerinput["passed"])
            return
        now = digest()
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        if lines[:1] == [now]:
            self.passed = set(lines[1:])
        else:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(now + "\n")
        self.new = self.file.open("a")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["passed"] = sorted(self.passed)

    def pytest_collection_modifyitems(self, config, items):
        done = [item for item in items if item.nodeid in self.passed]
        if done:
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item.nodeid not in self.passed]

    def pytest_runtest_logreport(self, report):
        if not self.is_controller:
            return
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self.failed:
            self.new.write(report.nodeid + "\n")
            self.new.flush()

    def pytest_terminal_summary(self, terminalreporter):
        if self.passed:
            terminalreporter.write_line(f"{len(self.passed)} more have passed before, as {self.file} says")
