"""The texts that a command reads from a file."""

from pathlib import Path
from typing import Any

KINDS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}


def read(path: Path, columns: dict[str, str]) -> list[tuple[str, ...]]:
    """The strings of these columns (flag -> name), row by row; of a .txt file each line is a `text`.

    Raises ValueError for a file that can't be read, a column that isn't there, and blank or other values.
    """
    # Imported here: it takes most of a second, which the Tab key has to wait for.
    from datasets import disable_progress_bars, enable_progress_bars, load_dataset
    from datasets.exceptions import DatasetGenerationError

    if not path.is_file():
        raise ValueError(f"{path} is no file: give one of {', '.join(KINDS)}")
    if path.suffix not in KINDS:
        raise ValueError(f"{path} is none of the files that are read here: {', '.join(KINDS)}")
    disable_progress_bars()
    try:
        data: Any = load_dataset(KINDS[path.suffix], data_files=str(path), split="train")
    except DatasetGenerationError as error:
        raise ValueError(f"{path} can't be read: {error.__cause__ or error}") from None
    finally:
        enable_progress_bars()
    for flag, name in columns.items():
        if name not in data.column_names:
            remedy = f"see {flag}" if flag.startswith("--") else "rename the one that is meant"
            raise ValueError(f"{path} has the columns {', '.join(data.column_names)}, but no {name!r}: {remedy}")
    rows = [tuple(row[name] for name in columns.values()) for row in data]
    if odd := [value for row in rows for value in row if not isinstance(value, str)]:
        raise ValueError(f"{path} holds {odd[0]!r} where a text is to be")
    rows = [row for row in rows if all(map(str.strip, row))]
    if not rows:
        raise ValueError(f"{path} holds no text")
    return rows
