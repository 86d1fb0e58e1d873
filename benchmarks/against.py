"""Compare the speed of two commits: `python scripts/bench.py --against REVISION`.

The same groups are measured with the code of the revision and with the current code, in turn. In both, the throughput of a
subject is relative to the reference of its group, in the same rounds, so other load on the machine doesn't matter. A subject is
slower if its interval is below that of the revision.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posenc.evaluation import records

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Change:
    """The relative throughput of a subject in both commits, with intervals: (median, low, high)."""

    group: str
    subject: str
    reference: str
    before: tuple[float, float, float]
    now: tuple[float, float, float]

    @property
    def sign(self) -> int:
        """-1 if the subject is slower than before, 1 if it is faster, and 0 if the intervals overlap."""
        return (self.now[1] > self.before[2]) - (self.now[2] < self.before[1])

    def __str__(self) -> str:
        before, now = (f"{value:.2f} [{low:.2f}, {high:.2f}]" for value, low, high in (self.before, self.now))
        return f"{self.group:28}{self.subject:18}x {self.reference:8}{before:22} -> {now}"


def compare(revision: str, flags: Sequence[str]) -> str:
    """Measure both commits with these flags of bench.py. Returns a report. Raises ValueError if one can't be measured."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder, "revision")
        _extract(revision, there)
        before = _measured(there, Path(folder, "before"), flags)
        now = _measured(ROOT, Path(folder, "now"), flags)
    return report(revision, [*changes(before["groups"], now["groups"])])


def _extract(revision: str, folder: Path) -> None:
    done = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True)
    if done.returncode:
        raise ValueError(f"--against {revision}: {done.stderr.decode().strip()}. Pass a commit, branch, or tag.")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")


def _measured(tree: Path, output: Path, flags: Sequence[str]) -> Any:
    """The record of a tree's bench.py, which measures its own hf_posenc."""
    command = [sys.executable, str(tree / "scripts" / "bench.py"), *flags, "--no-resume"]
    command += ["--output_dir", str(output), "--parts_dir", str(output / "parts")]
    done = subprocess.run(command, cwd=tree, stdout=subprocess.DEVNULL)
    if not (output / "bench.json").exists():
        raise ValueError(f"{tree / 'scripts' / 'bench.py'} measured nothing (status {done.returncode}). The reasons are above.")
    return records.read(output / "bench.json")


def changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[Change]:
    """The changes of all subjects that were measured in both commits."""
    for group, record in now.items():
        for subject, each in record["subjects"].items():
            old = before.get(group, {}).get("subjects", {}).get(subject, {})
            for reference, ratio in each.get("ratios", {}).items():
                if reference != subject and reference in old.get("ratios", {}):
                    yield Change(group, subject, reference, tuple(old["ratios"][reference]), tuple(ratio))


def report(revision: str, found: Sequence[Change]) -> str:
    """The subjects that are slower, those that are faster, and the number of others."""
    lines = [f"Throughput relative to the reference of each group, {revision} -> now"]
    for title, sign in (("slower", -1), ("faster", 1)):
        chosen = [each for each in found if each.sign == sign]
        lines += ["", f"{len(chosen)} {title}", *(f"  {each}" for each in chosen)]
    lines += ["", f"{sum(each.sign == 0 for each in found)} with overlapping intervals"]
    return "\n".join(lines) + "\n"
