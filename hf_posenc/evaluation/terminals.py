"""Setup of commands and scripts: output to any terminal or file, and imports of modules with custom encodings."""

import importlib
import io
import sys
from collections.abc import Iterable
from pathlib import Path


def set_up() -> None:
    """Make standard output and standard error escape characters that their encoding doesn't support, for example as `\\xd7`.

    Commands and scripts call this first. Otherwise, printing a result can raise UnicodeEncodeError, and the result is lost.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def import_modules(names: Iterable[str]) -> None:
    """Import modules by name, also from the current directory, to register the encodings that they define.

    Raises ImportError with the places that were searched.
    """
    for name in names:
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            importlib.import_module(name)
        except ImportError as error:
            where = f"the current directory, {Path.cwd()}, and the installed packages"
            raise ImportError(f"--import {name}: {error}. Modules are searched in {where}.") from error
