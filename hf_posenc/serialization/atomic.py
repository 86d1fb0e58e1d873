"""Writes that an interruption can't turn into a mixture of old and new content.

A file is written next to its target and renamed. The files of a model are written to a staging directory inside the target,
which uploads skip. Then the old config.json and superseded files are removed, and the new files are renamed, config.json last.
An interrupted save leaves the old model, or a directory without config.json, which can't be loaded. The next save removes the
staging directory.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

CACHE = ".cache"
STAGING = f"{CACHE}/huggingface"
"""The directory of staging directories, which uploads by huggingface_hub skip."""
CONFIG = "config.json"
ENTRY = "modeling_posenc.py"
WEIGHTS = re.compile(r"(.+?)(?:\.([^.]+?))?(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index(?:\.([^.]+))?\.json)?")
"""Matches names of weight files, shards, and indices, with an optional variant.

Examples: model.safetensors, model.fp16-00001-of-00002.safetensors.
"""


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], mode: str = "w", **options: Any) -> Iterator[IO[Any]]:
    """Opens a file for writing that replaces `path` at the end. If the block raises, `path` is not changed.

    Symlinks are followed, and an existing file keeps its permissions. Devices and pipes, such as /dev/stdout, are written
    directly.

    mode: "w" (UTF-8) or "wb".
    **options: options of `open`.
    """
    if mode == "w":
        options = {"encoding": "utf-8", **options}
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with open(path, mode, **options) as file:
            yield file
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with open(temporary, mode, **options) as file:
            yield file
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
        shutil.rmtree(target, ignore_errors=True)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def superseded(folder: Path, new: Iterable[str]) -> list[str]:
    """The files of earlier saves that a new save must remove.

    They are weights, shards, and indices of the same name, because Transformers prefers a single file to shards. If the entry
    of a model's code is replaced, they include the code saved with that model, such as custom encodings.
    """
    saved = {_weights(name) for name in new} - {None}
    entry = folder / ENTRY
    text = entry.read_text(encoding="utf-8") if ENTRY in new and entry.is_file() else ""
    code = {f"{name}.py" for name in re.findall(r"^from \.(posenc_\w+) import __name__ as _$", text, re.MULTILINE)}
    there = (path.name for path in folder.iterdir())
    return [name for name in there if (name in code or _weights(name) in saved) and name not in new]


def _weights(name: str) -> tuple[str, str | None] | None:
    """The name and variant of the model that a weight file belongs to. None for other files."""
    match = WEIGHTS.fullmatch(name)
    return match and (match[1], match[2] or match[3])


@contextlib.contextmanager
def replaced(
    directory: str | os.PathLike[str], stale: Callable[[Path, list[str]], Iterable[str]] = superseded
) -> Iterator[Path]:
    """A staging directory whose files replace those of `directory` at the end. If the block raises, nothing is changed.

    Files are renamed, never overwritten. Targets of symlinks and tensors that are memory-mapped from a replaced file therefore
    keep their values. Other files are kept, except those that `stale(directory, new names)` returns.
    """
    folder = Path(os.path.realpath(directory))
    created = not folder.exists()
    staging = folder / STAGING / f"posenc-{os.environ.get('RANK', 0)}"  # processes of one launch may all save
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        names = sorted(path.relative_to(staging).as_posix() for path in staging.rglob("*") if not path.is_dir())
        obsolete = [folder / name for name in stale(folder, names)]
        if CONFIG in names:
            (folder / CONFIG).unlink(missing_ok=True)
        for path in obsolete:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        for name in sorted(names, key=lambda name: name == CONFIG):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / name, folder / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        with contextlib.suppress(OSError):  # directories that aren't empty stay
            for path in (staging.parent, folder / CACHE, *[folder] * created):
                path.rmdir()
