"""Replaces files of a folder together: a save that is killed leaves the old ones, the new ones, or a folder that doesn't load.

Several renames are not atomic. So all files are written aside first; then config.json is replaced by a marker, which loading
refuses, then the other files are renamed, and the new config.json last.
"""

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: saves don't wait for each other, and leftovers stay
    fcntl = None  # type: ignore[assignment]

CONFIG = "config.json"
PREFIX = ".posenc-"
"""Of the names of temporary folders."""
UNPUSHED = ".cache/huggingface"
"""What is in a temporary folder is in a folder of this name in it, which uploads by huggingface_hub leave out."""
MARKER = "interrupted_save"
WEIGHTS = re.compile(r"(.+?)(?:\.([^.]+?))?(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index(?:\.([^.]+))?\.json)?")
"""Names of weight files, shards and indices, with the variant: model.safetensors, model.fp16-00001-of-00002.safetensors."""


def superseded(folder: Path, new: Iterable[str]) -> list[str]:
    """The shards and indices of earlier saves under the same name. Transformers reads a single file rather than shards."""
    saved = {_weights(name) for name in new} - {None}
    return [path.name for path in entries(folder) if _weights(path.name) in saved and path.name not in new]


@contextlib.contextmanager
def replaced(
    directory: str | os.PathLike[str], stale: Callable[[Path, list[str]], Iterable[str]] = superseded
) -> Iterator[Path]:
    """A temporary folder, whose files replace those of `directory` at the end. If the block raises, nothing is changed.

    Files are renamed, never written over: links stay what they point to, and tensors that are memory-mapped from a replaced
    file keep their values. Other files stay, but for the names that `stale(directory, new names)` gives.
    """
    folder = Path(directory).absolute()
    new = not folder.exists()
    if not new and not folder.is_dir():
        raise ValueError(f"{directory} is a file: give a folder to save into")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _temporary(folder) as temporary:
            files = temporary / "files"
            files.mkdir()
            yield files
            marker = _marker(files / CONFIG, temporary / CONFIG)
            with _locked(folder):
                _move(files, folder, marker, stale)
    except BaseException:
        if new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def entries(folder: Path) -> list[Path]:
    """What is in a folder, without temporary folders of this module."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith(PREFIX))


def refuse_interrupted(config: dict[str, Any] | Path) -> None:
    """Raises ValueError for a config.json, its content or its path, that is the marker of an interrupted save."""
    where: Any = "this folder"
    if isinstance(config, Path):
        where = config.parent
        try:
            config = json.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # it isn't there or isn't needed: another was given to from_pretrained
            return
    if isinstance(config, dict) and MARKER in config:
        raise ValueError(
            f"the last save into {where} was interrupted, and its files are of two models: save the model again, or load "
            "another checkpoint"
        )


def _marker(config: Path, marker: Path) -> Path | None:
    """A config.json of the new model's type that no class of ours loads; None for a stock model, or without a config.json."""
    values = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    if "position_encoding" not in values:
        return None
    kept = {key: values[key] for key in ("model_type", "auto_map") if key in values}
    marker.write_text(json.dumps({**kept, MARKER: True}), encoding="utf-8")
    return marker


def _move(files: Path, folder: Path, marker: Path | None, stale: Callable[[Path, list[str]], Iterable[str]]) -> None:
    names = sorted(path.relative_to(files).as_posix() for path in files.rglob("*") if path.is_file())
    obsolete = list(stale(folder, names))
    if marker is not None:
        os.replace(marker, folder / CONFIG)
    elif CONFIG in names:
        (folder / CONFIG).unlink(missing_ok=True)  # a stock model: its classes know no marker
    for path in (folder / name for name in obsolete):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for name in sorted(names, key=lambda name: name == CONFIG):
        if "/" in name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(files / name, folder / name)


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """A temporary folder in a folder, so that both are on one file system. Removes those that killed processes have left.

    Its owner holds a lock in it. The system frees that when the process ends; a process id would say nothing to another
    machine or container.
    """
    with contextlib.ExitStack() as owned:
        with _locked(folder):
            for leftover in folder.glob(f"{PREFIX}*"):
                if _abandoned(leftover / UNPUSHED / "lock"):
                    shutil.rmtree(leftover, ignore_errors=True)
            outer = tempfile.mkdtemp(prefix=PREFIX, dir=folder)
            owned.callback(shutil.rmtree, outer, ignore_errors=True)
            temporary = Path(outer, UNPUSHED)
            temporary.mkdir(parents=True)
            (temporary / "lock").touch()
            owned.enter_context(_locked(temporary / "lock"))
        yield temporary


def _abandoned(lock: Path) -> bool:
    if not lock.exists():
        return True
    with _locked(lock, wait=False) as had:
        return had


@contextlib.contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Holds the lock of a file or folder. Gives False where another process has it, or the file system has no locks."""
    if fcntl is None:
        yield False
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # NFS locks no file that is open for reading
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            had = True
        except OSError:
            had = False
        yield had
    finally:
        os.close(descriptor)


def _weights(name: str) -> tuple[str, str | None] | None:
    """The name and variant of the model that a weight file belongs to; None for other files."""
    match = WEIGHTS.fullmatch(name)
    return match and (match[1], match[2] or match[3])
