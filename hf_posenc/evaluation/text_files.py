"""Reads examples from text, CSV, JSON, and Parquet files."""

import csv
import json
from pathlib import Path
from typing import Any

KINDS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
"""Suffix -> the name of its reader in `datasets`."""


def rows(path: Path) -> list[dict[str, Any]]:
    """The examples of one file, as dicts of column -> value. Each line of a .txt file is a `text`.

    A .json file is one list of examples or texts, one example, or JSON Lines.

    Raises ValueError if the file can't be read or has no examples.
    """
    if path.suffix not in KINDS or not path.is_file():
        raise ValueError(f"{path} is not a file of a supported format. Use one of {', '.join(KINDS)}.")
    try:
        found = _read(path)
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise ValueError(f"{path} can't be read: {error}") from None
    if not found:
        raise ValueError(f"{path} has no rows. Use a file with at least one.")
    return found


def _read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        with path.open("rb") as opened:
            return list(parquet.ParquetFile(opened).read().to_pylist())
    if path.suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            csv.field_size_limit(2**31 - 1)
            reader = csv.DictReader(file, strict=True)
            found = []
            for row in reader:
                if None in row:
                    raise ValueError(f"line {reader.line_num} has more fields than the header. Quote texts with commas.")
                found.append(row)
            return found
    text = path.read_text(encoding="utf-8-sig")
    lines = text.removesuffix("\n").split("\n") if text else []
    if path.suffix == ".txt":
        return [{"text": line} for line in lines]
    try:
        whole = [json.loads(text)] if path.suffix == ".json" or text.startswith("[") else []
    except ValueError:  # JSON Lines
        whole = []
    values = whole or [_parsed(line, number) for number, line in enumerate(lines, start=1) if line.strip()]
    values = values[0] if whole and isinstance(values[0], list) else values
    values = [{"text": value} if isinstance(value, str) else value for value in values]
    if other := [value for value in values if not isinstance(value, dict)]:
        raise ValueError(f'a row is {json.dumps(other[0])[:80]}, but must be an object such as {{"text": "…"}}.')
    return values


def _parsed(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None
