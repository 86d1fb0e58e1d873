"""Atomic writes: a file, or several files of a directory, are replaced completely or not at all.

A single file is written to a temporary file in the same directory, flushed to disk, and renamed.

Several renames are not atomic. All new files of a directory are therefore written to a temporary directory first, with a
journal that lists them. Then config.json is replaced by a marker that can't be loaded. (A save of an original model has no
marker. Its config.json is missing during the save.) Each old file is moved to the temporary directory and each new file to its
place, with the new config.json last. This last rename completes the save. If the save is interrupted earlier, the old files are
moved back: immediately after an error or Ctrl-C, and by `recover` after a kill. Every save and every command calls `recover`
first.
"""

import contextlib
import errno
import glob
import json
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from hf_posenc.serialization.interrupted import CONFIG, MARKER, json_of

try:
    import fcntl
except ImportError:  # On Windows, saves don't wait for each other, and interrupted saves are not undone.
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

ENTRY = "modeling_posenc.py"
PREFIX = ".posenc-"
"""The prefix of the names of temporary directories."""
UNPUSHED = ".cache/huggingface"
"""The subdirectory with the content of a temporary directory. Uploads by huggingface_hub skip it."""
FILES = "files"
OLD = "old"
LOCK = "lock"
JOURNAL = "journal.json"
UNFINISHED = "journal.part"
WEIGHTS = re.compile(r"(.+?)(?:\.([^.]+?))?(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index(?:\.([^.]+))?\.json)?")
"""Matches names of weight files, shards, and indices, with an optional variant.

Examples: model.safetensors, model.fp16-00001-of-00002.safetensors.
"""
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Free disk space, or choose another path"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Make it writable, or choose another path"),
    errno.EIO: "Check the disk, or choose another path",
}
"""Remedies for write errors."""


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], mode: str = "w", **options: Any) -> Iterator[IO[Any]]:
    """Opens a file for writing that replaces `path` at the end. If the block raises, `path` is not changed.

    Symlinks are followed, and an existing file keeps its permissions. Devices and pipes, such as /dev/stdout, can't be replaced
    and are written directly.

    mode: "w" (UTF-8) or "wb".
    **options: options of `open`.
    """
    if mode not in ("w", "wb"):
        raise ValueError(f"mode={mode!r} isn't supported. Use 'w' or 'wb'.")
    if mode == "w":
        options = {"encoding": "utf-8", **options}
    before = os.stat(path) if os.path.exists(path) else None
    if before is not None and not stat.S_ISREG(before.st_mode) and not stat.S_ISDIR(before.st_mode):
        with open(path, mode, **options) as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    with _explained(path), contextlib.ExitStack() as owned:
        if before is not None and stat.S_ISDIR(before.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if before is not None and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with _locked(target.parent):
            for leftover in target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 8}.part"):
                with _locked(leftover, wait=False) as abandoned:
                    if abandoned:
                        leftover.unlink()
            temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            owned.callback(temporary.unlink, missing_ok=True)
            owned.enter_context(_locked(temporary))
        with open(descriptor, mode, **options) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if before is not None:
            os.chmod(temporary, stat.S_IMODE(before.st_mode))
        os.replace(temporary, target)
        _synchronize(target.parent)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace the content of a file with `text` in UTF-8, completely or not at all."""
    with atomic_file(path) as file:
        file.write(text)


@contextlib.contextmanager
def new_directory(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary directory that replaces `directory` at the end. It is removed if the block raises.

    Its name is that of `directory` after a dot, so that several processes can write to it. Two can't be open at once.
    """
    target = Path(os.path.realpath(directory))
    temporary = target.with_name(f".{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            _synchronize(path)
        remove_directory(target)
        os.rename(temporary, target)
        _synchronize(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_directory(directory: Path) -> None:
    """Rename a directory to a hidden name, then remove it, so that an interruption leaves no partial directory."""
    if directory.exists():
        hidden = directory.with_name(f".{directory.name}-old")
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(directory, hidden)
        shutil.rmtree(hidden)


def superseded(folder: Path, new: Iterable[str]) -> list[str]:
    """The files of earlier saves that a new save must remove.

    They are weights, shards, and indices of the same name, because Transformers prefers a single file to shards. If the entry
    of a model's code is replaced, they include the code saved with that model, such as custom encodings.
    """
    saved = {_weights(name) for name in new} - {None}
    code = _code(folder / ENTRY) if ENTRY in new else set()
    there = (path.name for path in entries(folder))
    return [name for name in there if (name in code or _weights(name) in saved) and name not in new]


def _code(entry: Path) -> set[str]:
    """The files that the entry of a model's code imports. Only these were saved with the model."""
    try:
        text = entry.read_text(encoding="utf-8") if entry.is_file() else ""
    except (OSError, ValueError):
        return set()
    return {f"{name}.py" for name in re.findall(r"^from \.(posenc_\w+) import __name__ as _$", text, re.MULTILINE)}


@contextlib.contextmanager
def replaced(
    directory: str | os.PathLike[str],
    stale: Callable[[Path, list[str]], Iterable[str]] = superseded,
    last: str | None = None,
    flush: bool = False,
) -> Iterator[Path]:
    """A temporary directory whose files replace those of `directory` at the end. If the block raises, nothing is changed.

    Files are renamed, never overwritten. Targets of symlinks and tensors that are memory-mapped from a replaced file therefore
    keep their values. Other files are kept, except those that `stale(directory, new names)` returns.

    last: the file that is replaced last, by default config.json.
    flush: flush the new files to disk before any is replaced, so that a power failure leaves no mixture either. This takes
        several milliseconds per file.
    """
    folder = Path(os.path.realpath(directory))
    new = not folder.exists()
    if not new and not folder.is_dir():
        raise ValueError(f"{directory} is a file. Pass a directory to save into.")
    with _explained(directory):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with _temporary(folder) as temporary:
                yield temporary / FILES
                with _locked(folder):
                    _recover(folder)  # Another process may have been killed in the meantime.
                    try:
                        _prepare(folder, temporary, stale, last, flush)
                        _move(folder, temporary)
                    except BaseException:
                        _undo(folder, temporary)
                        raise
                    if flush:
                        _synchronize(folder)
        except BaseException:
            if new:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise


def recover(directory: str | os.PathLike[str]) -> None:
    """Undo an interrupted save into a directory, and log a warning. Other paths are ignored."""
    folder = Path(os.path.realpath(directory))
    if folder.is_dir() and any(folder.glob(f"{PREFIX}*")):
        with _locked(folder):
            _recover(folder)


def entries(folder: Path) -> list[Path]:
    """The content of a directory without the temporary directories of this module."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith(PREFIX))


def _prepare(
    folder: Path, temporary: Path, stale: Callable[[Path, list[str]], Iterable[str]], last: str | None, flush: bool
) -> None:
    """Check that all new files can be renamed, and write the journal. Nothing in `folder` is changed."""
    files = temporary / FILES
    names = sorted(path.relative_to(files).as_posix() for path in files.rglob("*") if path.is_file())
    obsolete = sorted(stale(folder, names))
    for name in (*names, *obsolete):
        if not _within(folder, name):
            raise ValueError(f"{folder / name} is outside {folder}. Remove the symlink, or choose another directory.")
    for name in names:
        there = folder / name
        if there.is_dir():
            raise ValueError(f"{there} is a directory, but the save writes a file of this name. Rename the directory.")
        if there.is_file():
            shutil.copymode(there, files / name)
    config = json_of(files / CONFIG)
    if isinstance(config, dict) and "position_encoding" in config:
        # The marker has the new model's type, whose config class raises an error for a marker.
        kept = {key: config[key] for key in ("model_type", "auto_map") if key in config}
        (temporary / CONFIG).write_text(json.dumps({**kept, MARKER: True}), encoding="utf-8")
    names.sort(key=lambda name: (name == last, name == CONFIG))
    (temporary / UNFINISHED).write_text(json.dumps({"move": names, "remove": obsolete}), encoding="utf-8")
    for path in (*temporary.rglob("*"), temporary) if flush else ():
        _synchronize(path)
    os.replace(temporary / UNFINISHED, temporary / JOURNAL)


def _move(folder: Path, temporary: Path) -> None:
    """Move the old files to the temporary directory and the new files to their places. The last rename completes the save."""
    journal = json_of(temporary / JOURNAL)
    names: list[str] = journal["move"]
    if CONFIG in names:
        if (temporary / CONFIG).exists():  # A missing config.json would raise an error without the cause.
            if os.path.lexists(folder / CONFIG):
                (temporary / OLD).mkdir()
                shutil.copy2(folder / CONFIG, temporary / OLD / CONFIG, follow_symlinks=False)
            os.replace(temporary / CONFIG, folder / CONFIG)
        else:
            _move_one(folder, temporary / OLD, CONFIG)
    for name in journal["remove"]:
        _move_one(folder, temporary / OLD, name)
    for name in names:
        if name != CONFIG:
            _move_one(folder, temporary / OLD, name)
        _move_one(temporary / FILES, folder, name)


def _undo(folder: Path, temporary: Path) -> None:
    """Move the old files back and remove the journal.

    Files aren't moved if the save is complete or hasn't started, or if another program has since saved a model.
    """
    journal = _journal(folder, temporary)
    files, old = temporary / FILES, temporary / OLD
    complete = not any((files / name).is_file() for name in journal["move"])
    config = json_of(folder / CONFIG) if (folder / CONFIG).exists() else {MARKER: True}
    loadable = (files / CONFIG).exists() and not (isinstance(config, dict) and MARKER in config)
    if not complete and not loadable:
        for name in reversed(journal["move"]):  # config.json first
            if not (files / name).is_file():
                _move_one(folder, files, name)
                with contextlib.suppress(OSError):
                    (folder / name).parent.rmdir()  # removes only an empty directory
        if CONFIG in journal["move"] and not os.path.lexists(old / CONFIG):
            (folder / CONFIG).unlink(missing_ok=True)  # the marker
        for name in (*journal["remove"], *sorted(journal["move"], key=lambda name: name == CONFIG)):
            _move_one(old, folder, name)
    (temporary / JOURNAL).unlink(missing_ok=True)


def _move_one(source: Path, target: Path, name: str) -> None:
    """Move a file or directory, if it exists, to the same relative path in another directory."""
    if os.path.lexists(source / name):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / name, target / name)


def _recover(folder: Path) -> None:
    for leftover in folder.glob(f"{PREFIX}*"):
        temporary = leftover / UNPUSHED
        if not _is_ours(leftover) or not _abandoned(temporary / LOCK):
            continue
        if any(path.is_file() for path in (temporary / FILES).rglob("*")):
            _undo(folder, temporary)
            logger.warning("The last save into %s was interrupted. It has been undone; the earlier files are kept.", folder)
        shutil.rmtree(leftover, ignore_errors=True)


def _is_ours(leftover: Path) -> bool:
    """Whether a path has the layout of a temporary directory of this module, which may be incomplete.

    A path with symlinks doesn't, because symlinks in a downloaded directory could point to any other directory.
    """
    level = leftover
    for name in Path(UNPUSHED).parts:
        if level.is_symlink() or not level.is_dir() or not {*os.listdir(level)} <= {name}:
            return False
        level /= name
        if not os.path.lexists(level):
            return True
    parts = (level, *(level / name for name in (FILES, OLD, LOCK, JOURNAL, UNFINISHED, CONFIG)))
    return level.is_dir() and not any(part.is_symlink() for part in parts)


def _journal(folder: Path, temporary: Path) -> dict[str, list[str]]:
    """The journal of a save. It is empty if the file is missing or malformed, or names files outside its directory."""
    journal = json_of(temporary / JOURNAL)
    try:
        names = [*journal["move"], *journal["remove"]]
        places = [folder, *(Path(os.path.realpath(temporary / place)) for place in (FILES, OLD))]
        if all(isinstance(name, str) and _within(place, name) for name in names for place in places):
            return journal
    except (TypeError, KeyError):
        pass
    return {"move": [], "remove": []}  # A downloaded directory may contain any journal.


def _within(folder: Path, name: str) -> bool:
    """Whether a relative path stays in a directory, even if parts of it are symlinks."""
    parent = Path(os.path.realpath((folder / name).parent))
    return Path(name).name not in ("", "..") and (parent == folder or folder in parent.parents)


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """A temporary directory within a directory, so that both are on one file system. It first recovers interrupted saves.

    Its owner holds a lock in it, which the system releases when the process ends. A process ID would mean nothing on another
    machine or in another container. If old files couldn't be moved back, the temporary directory is kept for `recover`.
    """
    with contextlib.ExitStack() as owned:
        with _locked(folder):
            _recover(folder)
            outer = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
            temporary = outer / UNPUSHED
            (temporary / FILES).mkdir(parents=True)
            (temporary / LOCK).touch()
            owned.enter_context(_locked(temporary / LOCK))
            owned.callback(_discard, folder, outer)
        yield temporary


def _discard(folder: Path, outer: Path) -> None:
    """Remove a temporary directory, unless an undo failed.

    The lock prevents other processes from looking for leftovers in the meantime.
    """
    temporary = outer / UNPUSHED
    if not folder.exists() or (
        (temporary / JOURNAL).exists() and any(path.is_file() for path in (temporary / FILES).rglob("*"))
    ):
        return
    with _locked(folder):
        shutil.rmtree(outer, ignore_errors=True)


def _abandoned(lock: Path) -> bool:
    if not lock.exists():
        return True
    with _locked(lock, wait=False) as had:
        return had


@contextlib.contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Holds the lock of a file or directory. Yields False if another process holds it or the file system has no locks."""
    if fcntl is None:
        yield False
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # NFS can't lock files open for reading.
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            had = True
        except OSError:
            had = False
        yield had
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(path: str | os.PathLike[str]) -> Iterator[None]:
    """Makes disk errors name the target path instead of a temporary file, and what to do."""
    try:
        yield
    except OSError as error:
        temporary = error.filename is None or any(
            part.startswith(PREFIX) or part.endswith(".part") for part in Path(os.fsdecode(error.filename)).parts
        )
        if error.errno not in REMEDIES or not (temporary or os.fsdecode(error.filename) == os.path.realpath(path)):
            raise
        said = f"{error.strerror}. {os.fspath(path)} was not changed. {REMEDIES[error.errno]}."
        raise OSError(error.errno, said) from error


def _synchronize(path: Path) -> None:
    """Flush a file or directory to disk. Windows and some file systems can't flush directories."""
    directory = path.is_dir()
    if directory and fcntl is None:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (directory and error.errno in (errno.EINVAL, errno.ENOTSUP, errno.EBADF)):
            raise
    finally:
        os.close(descriptor)


def _weights(name: str) -> tuple[str, str | None] | None:
    """The name and variant of the model that a weight file belongs to. None for other files."""
    match = WEIGHTS.fullmatch(name)
    return match and (match[1], match[2] or match[3])
