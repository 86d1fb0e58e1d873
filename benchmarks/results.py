"""Saves the results of each group during a run, merges them at its end, and describes the machine."""

import datetime
import hashlib
import importlib.util
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.grid import Group, Settings
from hf_posenc.evaluation import records

HERE = Path(__file__).resolve().parent
REPORTING = {"bench.py", "report.py", "targets.py", "results.py"}
"""Modules that don't affect measurements."""


def machine(settings: Settings) -> dict[str, Any]:
    """The hardware, software versions, and settings that results depend on."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9) if hasattr(os, "sysconf") else None,
        "threads": settings.threads,
        "clock": settings.clock,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def state(settings: Settings) -> str:
    """A hash of the code, settings, and machine that a group's record depends on."""
    files = [
        *(HERE.parent / "hf_posenc").rglob("*.py"),
        *(path for path in HERE.glob("*.py") if path.name not in REPORTING),
        *(path for name in settings.modules for path in _files(name)),
    ]
    digest = hashlib.sha256(json.dumps([asdict(settings), machine(settings)]).encode())
    for path in sorted(files):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _files(name: str) -> Iterator[Path]:
    """The file of a top-level module. For a module in a package, all files of the top-level package."""
    found = importlib.util.find_spec(name.partition(".")[0])
    for folder in (found and found.submodule_search_locations) or ():
        yield from Path(folder).rglob("*.py")
    if found and found.origin and Path(found.origin).is_file():
        yield Path(found.origin)


def has_failed(record: Any) -> bool:
    """Whether every subject of a group failed."""
    subjects = record["subjects"].values()
    return bool(subjects) and all("failed" in each for each in subjects)


class Kept:
    """The saved records of a run's groups, one file each.

    Records of other code, settings, or machines are ignored. Groups in which every subject failed aren't saved.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.state = folder, state(settings)
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, group: Group) -> Any:
        file = self.folder / f"{group.name}.json"
        found = records.read(file) if file.exists() else {}
        return found["record"] if found.get("state") == self.state else None

    def time(self, group: Group) -> str:
        """When a saved group was measured."""
        written = (self.folder / f"{group.name}.json").stat().st_mtime
        return datetime.datetime.fromtimestamp(written).isoformat(" ", "minutes")

    def add(self, group: Group, record: Any) -> None:
        if not has_failed(record):
            records.write(self.folder / f"{group.name}.json", {"state": self.state, "record": record})


def together(measured: dict[str, Any], settings: Settings, command: str, file: Path | None, order: list[str]) -> dict[str, Any]:
    """Merge new results with those of an earlier file. New groups replace those of the same name.

    order: names of the groups in the order of the result.

    Raises ValueError if the earlier file is from another machine or has other settings, and some of its groups aren't replaced.
    """
    about, today = machine(settings), datetime.date.today().isoformat()
    before: dict[str, Any] = records.read(file) if file is not None and file.exists() else {}
    partial = [name for name in before.get("groups", {}) if name not in measured]
    if partial and before["machine"] != about:
        raise ValueError(
            f"{file} has the results of another machine or setting ({before['machine']}): give another --output_dir"
        )
    groups = {
        **before.get("groups", {}),
        **{name: {**record, "date": record.get("date", today)} for name, record in measured.items()},
    }
    ordered = {name: groups[name] for name in order if name in groups}
    command = before["command"] if partial else command
    return {"command": command, "machine": about, "date": today, "groups": ordered}
