"""What commands and scripts do first: print on any terminal or to a file, and import modules with custom encodings."""

import importlib
import io
import sys
from collections.abc import Iterable
from pathlib import Path

from hf_posenc import progress


def set_up() -> None:
    """Make what a command prints fit any terminal or file. Commands and scripts call this first.

    Characters that the encoding of standard output doesn't have are escaped, and the progress bars of all libraries print at
    most one line every 30 seconds without a terminal.
    """
    escape_unprintable()
    progress.limit_other_libraries()


def escape_unprintable() -> None:
    """Make standard output print characters that its encoding doesn't have as escapes such as `\\xd7`.

    Otherwise, printing a result raises UnicodeEncodeError, and the result is lost.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def import_modules(names: Iterable[str]) -> None:
    """Import modules by name, also from the current directory, to register the encodings that they define.

    Raises ImportError that says where modules are looked for.
    """
    for name in names:
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            importlib.import_module(name)
        except ImportError as error:
            where = f"the current directory, {Path.cwd()}, and the installed packages"
            raise ImportError(f"--import {name}: {error}. Modules are searched in {where}.") from error
