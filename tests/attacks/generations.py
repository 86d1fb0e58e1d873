"""Two generations of the code in one process: checkpoints of an older version and of this one, each run by the code that it
carries, and the installed package. Every model gives what it gave in the process that made it."""

import functools
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from attacks.cases import Case, Comparison, Settings, new_folder

WORKER = Path(__file__).with_name("generations_worker.py")
SCRIPTS = WORKER.parent.parent
WINDOW = "attack-window"
ENCODINGS = ("alibi", "rope", "sinusoidal", "shaw", "t5", "learned", "learned+shaw", WINDOW)
OWN = """
import torch

import hf_posenc


class Window(hf_posenc.PositionEncoding, type="{type}"):
    width: int = {width}

    def distance_bias(self, distance):
        return torch.where(distance.abs() > self.width, -{penalty}, 0.0)[None]
"""
PLACED = "    context = of_stack.with_length("
CALLED = "    of_stack = context_for(module, "
OLDER = {
    "__init__.py": {'__version__ = "0.1.0"': '__version__ = "0.0.1"'},
    "attention/dispatch.py": {
        PLACED: f'    scaling = kwargs["scaling"] = 1.5 * scaling\n{PLACED}',
        'CONTEXT = "position_context"': 'CONTEXT = "older_context"',
        "    position_context: PositionContext | None = None,": "    older_context: PositionContext | None = None,",
        f"{CALLED}position_context)": f"{CALLED}older_context)",
    },
    "modeling/cache_positions.py": {
        'POSITIONS = "Remembering", "key_positions"': 'POSITIONS = "Remembering", "older_positions"'
    },
}
"""File of the package -> what stands there -> what another generation has in its place."""
COMMITS = 100
"""How many commits ago the other older generation was made."""
ORDERS = ("older new", "commit new", "new older package")
ATTACKS = ("outputs", "copies", "implementations", "nested", "threads", "checkpointing", "decoding", "saved_again", "configs")


def cases(settings: Settings) -> Iterator[Case]:
    encodings = tuple(name for name in ENCODINGS if name in settings.encodings or name == WINDOW)
    for order in ORDERS:
        attacks = [*ATTACKS[:-2], "package"] if "package" in order else ATTACKS
        for attack in (*attacks, "functions"):
            for host in ("bert", "gpt2") if attack != "decoding" else ("gpt2",):
                for encoding in encodings:
                    run = functools.partial(compared, encodings, order, attack, host, encoding)
                    yield Case(f"{order}: {attack.replace('_', ' ')}", host, encoding, run, limit=600)


def compared(encodings: tuple[str, ...], order: str, attack: str, host: str, encoding: str) -> Iterator[Comparison]:
    results = used(encodings, order)
    result = None if results is None else results[attack, host, encoding]
    if isinstance(result, str):
        raise RuntimeError(result)
    yield from result or ()


@functools.cache
def used(encodings: tuple[str, ...], order: str) -> dict[tuple[str, str, str], Any] | None:
    """(attack, host, encoding) -> the comparisons, or the error, in a process that took these steps. None without git."""
    folder, steps = checkpoints(), order.split()
    if not all(made(encodings, step) for step in ("new", *steps) if step != "package"):
        return None
    run(folder / "new" if "package" in steps else folder, "use", folder, *steps)
    return torch.load(folder / ("-".join(steps) + ".pt"), weights_only=False)


@functools.cache
def checkpoints() -> Path:
    """The folder of all checkpoints: generation/host/encoding."""
    return Path(new_folder())


@functools.cache
def made(encodings: tuple[str, ...], generation: str) -> bool:
    """Whether the checkpoints of a generation could be made."""
    root, package = SCRIPTS.parent, checkpoints() / generation / "hf_posenc"
    if generation != "commit":
        copied(root / "hf_posenc", package, OLDER if generation == "older" else {})
    elif not from_git(root, package.parent):
        return False
    window = OWN.format(type=WINDOW, width=2 if generation == "new" else 3, penalty=5.0 if generation == "new" else 2.0)
    (package.parent / "own_window.py").write_text(window)
    run(package.parent, "make", package.parent, *encodings)
    return True


def copied(package: Path, new: Path, changes: dict[str, dict[str, str]]) -> None:
    if missing := [name for name in changes if not (package / name).is_file()]:
        raise AssertionError(f"there is no {missing[0]} to change")
    for path in package.rglob("*.py"):
        name, text = path.relative_to(package).as_posix(), path.read_text(encoding="utf-8")
        for old, other in changes.get(name, {}).items():
            if text.count(old) != 1:
                raise AssertionError(f"{name} has {old!r} {text.count(old)} times")
            text = text.replace(old, other)
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        (new / name).write_text(text, encoding="utf-8")


def from_git(root: Path, folder: Path) -> bool:
    """Unpack the package as it was. False where there is no history."""
    command = ["git", "-C", str(root), "archive", f"HEAD~{COMMITS}", "hf_posenc"]
    archive = subprocess.run(command, capture_output=True)
    if archive.returncode == 0:
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as file:
            file.extractall(folder, filter="data")
    return archive.returncode == 0


def run(path: Path, *arguments: object) -> None:
    modules = {"HF_MODULES_CACHE": modules_cache(), "PYTHONPATH": os.pathsep.join([str(path), str(SCRIPTS)])}
    command = [sys.executable, str(WORKER), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **modules})
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip().rpartition("\n")[2])


@functools.cache
def modules_cache() -> str:
    return new_folder()
