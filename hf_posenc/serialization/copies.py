"""Whether this is the copy of the library that was saved with a checkpoint, and how a copy saves itself again."""

import os
import shutil
from pathlib import Path

ENTRY = "modeling_posenc"
"""The module that the `auto_map` of a checkpoint names."""
IS_COPY = not __name__.startswith("hf_posenc.")


def copy_code(directory: str | os.PathLike[str]) -> None:
    """Copy the modules of this copy into a directory."""
    os.makedirs(directory, exist_ok=True)
    for path in sorted(Path(__file__).parent.glob("*posenc*.py")):
        if path.parent != Path(directory).resolve():
            shutil.copyfile(path, Path(directory, path.name))
