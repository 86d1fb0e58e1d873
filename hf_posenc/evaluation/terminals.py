"""Output on terminals that can't print every character."""

import io
import sys


def escape_unprintable() -> None:
    """Make standard output print characters that its encoding doesn't have as escapes such as `\\xd7`.

    Otherwise, printing a result raises UnicodeEncodeError, and the result is lost. Commands and scripts call this first.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
