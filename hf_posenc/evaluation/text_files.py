"""Reads examples from text, CSV, JSON, and Parquet files. A path names one file. It is never a pattern or a URL."""

import codecs
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
"""Suffix -> the name of its reader in `datasets`."""
LONGEST = 10_000_000
"""Maximum size of a line in bytes. A tokenizer needs about 200 bytes of memory for each of them."""
LARGEST = 256_000_000
"""Maximum size in bytes of a JSON document that isn't JSON Lines, because it is read as a whole."""
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "Zstandard",
}
"""First bytes -> format."""


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """The examples of one file, as dicts of column -> value. Each line of a .txt file is a `text`.

    Raises ValueError that names the file and, if possible, the line.
    """
    _check_file(path)
    kind = KINDS[path.suffix]
    try:
        if kind == "text":
            yield from ({"text": part} for _, line in _lines(path) for part in line.rstrip("\r\n").split("\r"))
        elif kind == "csv":
            yield from _csv_rows(path)
        elif kind == "json":
            yield from _json_rows(path)
        else:
            yield from _parquet_rows(path)
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror or error}") from None


def check(path: Path) -> None:
    """Raises ValueError if `rows` can't read a file, or finds no examples."""
    if not sum(1 for _ in rows(path)):
        raise ValueError(f"{path} has no rows. Use a file with at least one.")


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is not a file. Use one of {', '.join(KINDS)}.")
    if path.suffix not in KINDS:
        raise ValueError(f"{path} has an unsupported format. Use one of {', '.join(KINDS)}.")
    with path.open("rb") as file:
        start = file.read(8)
    for magic, name in COMPRESSED.items():
        if start.startswith(magic):
            raise ValueError(f"{path} is compressed ({name}). Decompress it first.")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers and line breaks."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LONGEST + 1):
            number += 1
            if len(line) > LONGEST:
                raise ValueError(
                    f"{path}, line {number}: the text exceeds the maximum of {LONGEST:,} bytes. Divide it into several texts."
                )
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: the text is not valid UTF-8 ({error.reason}). Save it as UTF-8."
                ) from None


def _csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST))
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    try:
        header = next(reader, [])
        if twice := [name for name in header if header.count(name) > 1]:
            raise ValueError(f"{path}: the column {twice[0]!r} occurs {header.count(twice[0])} times. Rename all but one.")
        for values in filter(None, reader):
            if len(values) > len(header):
                raise ValueError(f"{path}, line {reader.line_num}: the row has {len(values)} fields, the header {len(header)}.")
            yield dict.fromkeys(header) | dict(zip(header, values, strict=False))
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: the row is not valid CSV ({error}).") from None


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The examples of a JSON Lines file, or of one JSON document: an example, or a list of examples or texts."""
    if _is_document(path):
        found = _document(path)
        values = found if isinstance(found, list) else [found]
        numbered = ((f"{path}, row {number}", value) for number, value in enumerate(values, start=1))
        numbered = ((where, {"text": value} if isinstance(value, str) else value) for where, value in numbered)
    else:
        lines = ((f"{path}, line {number}", line) for number, line in _lines(path) if line.strip())
        numbered = ((where, _parsed(line, where)) for where, line in lines)
    for where, value in numbered:
        if not isinstance(value, dict):
            raise ValueError(f'{where} is {json.dumps(value)[:80]}, but must be an object such as {{"text": "…"}}.')
        yield value


def _is_document(path: Path) -> bool:
    """Whether a file is one JSON value, which may have several lines."""
    with path.open("rb") as file:
        line = b""
        while (part := file.readline(LONGEST + 1)) and not (line := part.removeprefix(codecs.BOM_UTF8).strip()):
            pass
    if line.startswith(b"[") or path.suffix != ".json":
        return line.startswith(b"[")
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return bool(line)
    return False


def _document(path: Path) -> Any:
    if (size := path.stat().st_size) > LARGEST:
        raise ValueError(
            f"{path} is one JSON value of {size:,} bytes, above the maximum of {LARGEST:,}. Save it as JSON Lines, with one "
            "row per line."
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid UTF-8 (byte {error.start:,}). Save it as UTF-8.") from None
    return _parsed(text, str(path))


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f", line {error.lineno}" if "\n" in text.strip() else ""
        raise ValueError(f"{where}{place}: the value is not valid JSON ({error.msg} at column {error.colno}).") from None
    except RecursionError:
        raise ValueError(f"{where}: the value is nested too deeply.") from None
    except ValueError as error:  # an integer with more digits than Python converts
        raise ValueError(f"{where}: the value can't be read ({error}).") from None


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a valid Parquet file: {error}") from None
