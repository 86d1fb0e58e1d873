"""Detects whether this code is a copy saved with a checkpoint, saves such a copy again, and names derived classes."""

import os
import shutil
from pathlib import Path
from typing import Any

ENTRY = "modeling_posenc"
"""The module that a checkpoint's `auto_map` names."""
IS_COPY = not __name__.startswith("hf_posenc.")
PREFIX, TYPE_PREFIX = "PosEnc", "posenc-"
"""The prefixes of the names of derived classes and of their model types."""


def prefixed(name: Any, prefix: str) -> Any:
    """A class name of an Auto class's mapping, or a tuple of them, with a prefix. None stays None."""
    return tuple(prefixed(part, prefix) for part in name) if isinstance(name, tuple) else name and prefix + name


def copy_code(directory: str | os.PathLike[str]) -> None:
    """Copy the modules of this saved copy to a directory."""
    os.makedirs(directory, exist_ok=True)
    for path in sorted(Path(__file__).parent.glob("*posenc*.py")):
        if path.parent != Path(directory).resolve():
            shutil.copyfile(path, Path(directory, path.name))
