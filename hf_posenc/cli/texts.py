"""Reading texts and queries from files."""

from pathlib import Path
from typing import Any

from hf_posenc.evaluation import text_files
from hf_posenc.evaluation.model_comparison import FEWEST, Pair


def texts_in(path: Path, column: str) -> list[str]:
    """The texts in a file, from this column."""
    return [text for (text,) in read(path, {"--text-column": column})]


def labeled_texts_in(path: Path, column: str, label_column: str) -> tuple[list[str], list[str | int]]:
    """The texts in a file with their labels, which are strings or integers. Rows with a blank text are skipped.

    Raises ValueError if the file can't be read, a column is missing, or a value is invalid.
    """
    texts, labels = list[str](), list[str | int]()
    for number, row in enumerate(text_files.rows(path), start=1):
        text, label = (
            _value(path, number, row, "--text-column", column),
            _cell(path, number, row, "--label-column", label_column),
        )
        if isinstance(label, bool) or not isinstance(label, (str, int)) or label == "":
            raise ValueError(
                f"Row {number} of {path}, column {label_column!r}, must be a label, a string or an integer, but it is "
                f"{str(label)[:80]!r}."
            )
        if text.strip():
            texts.append(text)
            labels.append(label)
    if not texts:
        raise ValueError(f"{path} contains no text. Use a file with at least one text.")
    return texts, labels


def pairs_in(path: Path | None) -> list[Pair]:
    """The queries in a file with their documents. Without a file, none. Raises ValueError if there are too few."""
    pairs = [] if path is None else [Pair(*row) for row in read(path, {"query": "query", "document": "document"})]
    if path is not None and len(pairs) < FEWEST:
        raise ValueError(f"{path} has {len(pairs)} rows, and the comparison needs at least {FEWEST}. Add rows to the file.")
    return pairs


def read(path: Path, columns: dict[str, str]) -> list[tuple[str, ...]]:
    """The strings of these columns (flag -> name), row by row. Rows with a blank string are skipped.

    Raises ValueError if the file can't be read, a column is missing, or a value isn't a string.
    """
    found: list[tuple[str, ...]] = []
    for number, row in enumerate(text_files.rows(path), start=1):
        values = tuple(_value(path, number, row, flag, name) for flag, name in columns.items())
        if all(map(str.strip, values)):
            found.append(values)
    if not found:
        raise ValueError(f"{path} contains no text. Use a file with at least one text.")
    return found


def _cell(path: Path, number: int, row: dict[str, Any], flag: str, name: str) -> Any:
    if name not in row:
        remedy = f"Choose a column with {flag}." if flag.startswith("--") else f"Rename the column to {name!r}."
        raise ValueError(f"Row {number} of {path} has no column {name!r}, only {', '.join(row)}. {remedy}")
    return row[name]


def _value(path: Path, number: int, row: dict[str, Any], flag: str, name: str) -> str:
    value = _cell(path, number, row, flag, name)
    if not isinstance(value, str):
        raise ValueError(f"Row {number} of {path}, column {name!r}, must be a string, but it is {str(value)[:80]!r}.")
    if not value.isascii() and (lone := [sign for sign in value if "\ud800" <= sign <= "\udfff"]):
        raise ValueError(f"Row {number} of {path}, column {name!r}, contains the unpaired surrogate {lone[0]!r}. Remove it.")
    return value
