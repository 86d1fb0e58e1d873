"""Checkpoint directories that are complete or absent, even after a killed process, a full disk, or an interrupted copy.

A directory is written under a hidden name and renamed. Its manifest is written last and lists every file
with its size.
"""

import contextlib
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError

from hf_posenc.evaluation import records
from hf_posenc.serialization import atomic

MANIFEST = "checkpoint.json"
NAMES = re.compile(r"(step|epoch|best)_\d+")


def write(accelerator: Accelerator, folder: Path, fill: Callable[[Path], None], about: dict[str, Any]) -> None:
    """Replace `folder` with the files that `fill` writes on all processes, and a manifest that contains `about`.

    If writing fails, `folder` doesn't change. Raises SystemExit if it can't be written.
    """

    def finish(aside: Path) -> None:
        files = {str(file.relative_to(aside)): file.stat().st_size for file in aside.rglob("*") if file.is_file()}
        records.write(aside / MANIFEST, {**about, "files": files})

    last = newest(folder.parent)
    kept = f"The last complete checkpoint is {last}." if last else "There is no earlier checkpoint."
    _together(accelerator, folder.parent, atomic.new_directory(folder), fill, finish, f"{folder} can't be written", kept)


def replace(accelerator: Accelerator, output_dir: Path, fill: Callable[[Path], None]) -> None:
    """Replace the model in `output_dir` with the files that `fill` writes on all processes.

    Raises SystemExit if they can't be written.
    """
    refusal, kept = f"The model can't be written to {output_dir}", "The checkpoints were not changed."
    _together(accelerator, output_dir, atomic.replaced(output_dir), fill, lambda _: None, refusal, kept)


def _together(
    accelerator: Accelerator,
    output_dir: Path,
    writer: AbstractContextManager[Path],
    fill: Callable[[Path], None],
    finish: Callable[[Path], None],
    refusal: str,
    kept: str,
) -> None:
    """Fill the directory of an atomic writer on all processes. The main process opens, finishes, and closes the writer."""

    def attempt(act: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return act(*arguments)
        except (OSError, RuntimeError, SafetensorError) as error:
            if isinstance(error, RuntimeError) and "inline_container" not in str(error):  # not from torch.save
                raise
            place = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
            free = shutil.disk_usage(place).free // 2**20
            raise SystemExit(f"{refusal} ({error}). The disk has {free:,} MiB free. {kept}") from None

    main, folder = accelerator.is_main_process, [""]
    with contextlib.ExitStack() as opened:
        if main:
            folder = [str(attempt(opened.enter_context, writer))]
        (aside,) = broadcast_object_list(folder)
        attempt(fill, Path(aside))
        accelerator.wait_for_everyone()
        if main:
            attempt(finish, Path(aside))
            attempt(opened.close)
    accelerator.wait_for_everyone()


def manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a directory, or None if the manifest or a listed file is missing or truncated."""
    try:
        about = records.read(folder / MANIFEST)
        whole = all((folder / name).stat().st_size == size for name, size in about["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return about if whole else None


def found(output_dir: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The complete checkpoints in a directory with their manifests, newest first. Warns about incomplete ones."""
    complete = {}
    for folder in [*output_dir.glob("step_*"), *output_dir.glob("epoch_*")]:
        if not folder.is_dir() or not NAMES.fullmatch(folder.name):
            continue
        if about := manifest(folder):
            complete[folder] = about
        else:
            warnings.warn(f"{folder} is incomplete and was ignored.", stacklevel=3)
    return iter(sorted(complete.items(), key=lambda each: each[1]["step"], reverse=True))


def newest(output_dir: Path) -> Path | None:
    """The newest complete checkpoint in a directory, or None."""
    return next((folder for folder, _ in found(output_dir)), None)


def prune(output_dir: Path, keep_last: int | None, best: int | None) -> None:
    """Remove incomplete directories, old checkpoints, and best models that no checkpoint refers to.

    keep_last: the number of newest checkpoints to keep. None keeps all.
    """
    for leftover in output_dir.glob(".*_*"):
        if NAMES.fullmatch(leftover.name[1:]):
            shutil.rmtree(leftover)
    complete = list(found(output_dir))
    kept, old = complete[:keep_last], complete[keep_last:] if keep_last else []
    wanted = {best, *(about["best_step"] for _, about in kept)}
    for folder in [*(folder for folder, _ in old), *output_dir.glob("best_*")]:
        if not (folder.name.startswith("best_") and int(folder.name.removeprefix("best_")) in wanted):
            shutil.rmtree(folder)
