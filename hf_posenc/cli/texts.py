"""The texts and queries that a command reads from a file."""

from pathlib import Path
from typing import Any

from hf_posenc.evaluation import text_files
from hf_posenc.evaluation.model_comparison import FEWEST, Pair


def texts_in(path: Path, column: str) -> list[str]:
    """The texts of --texts, in the column of --text-column."""
    return [text for (text,) in read(path, {"--text-column": column})]


def pairs_in(path: Path | None) -> list[Pair]:
    """The queries of --queries with their documents, or none. Raises ValueError if there are too few."""
    pairs = [] if path is None else [Pair(*row) for row in read(path, {"query": "query", "document": "document"})]
    if path is not None and len(pairs) < FEWEST:
        raise ValueError(f"{path} has {len(pairs)} rows: {FEWEST} are needed to compare")
    return pairs


def read(path: Path, columns: dict[str, str]) -> list[tuple[str, ...]]:
    """The strings of these columns (flag -> name), row by row, without rows that have a blank string.

    Raises ValueError for a file that can't be read, a missing column, and a value that is not a string.
    """
    found: list[tuple[str, ...]] = []
    for number, row in enumerate(text_files.rows(path), start=1):
        values = tuple(_value(path, number, row, flag, name) for flag, name in columns.items())
        if all(map(str.strip, values)):
            found.append(values)
    if not found:
        raise ValueError(f"{path} holds no text: give a file with at least one")
    return found


def _value(path: Path, number: int, row: dict[str, Any], flag: str, name: str) -> str:
    if name not in row:
        remedy = f"see {flag}" if flag.startswith("--") else "rename the one that is meant"
        raise ValueError(f"row {number} of {path} has the columns {', '.join(row)}, but no {name!r}: {remedy}")
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"row {number} of {path} has {str(value)[:80]!r} as its {name!r}, and it must be a string")
    if not value.isascii() and (lone := [sign for sign in value if "\ud800" <= sign <= "\udfff"]):
        raise ValueError(f"row {number} of {path} has {lone[0]!r} in its {name!r}, which is half a character: remove it")
    return value
