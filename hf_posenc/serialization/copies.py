"""Detects whether this code is a copy saved with a checkpoint, and saves such a copy again."""

import os
import shutil
from pathlib import Path

ENTRY = "modeling_posenc"
"""The module that a checkpoint's `auto_map` names."""
IS_COPY = not __name__.startswith("hf_posenc.")


def copy_code(directory: str | os.PathLike[str]) -> None:
    """Copy the modules of this saved copy to a directory."""
    os.makedirs(directory, exist_ok=True)
    for path in sorted(Path(__file__).parent.glob("*posenc*.py")):
        if path.parent != Path(directory).resolve():
            shutil.copyfile(path, Path(directory, path.name))
