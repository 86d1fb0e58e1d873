"""Examples: reading, tokenization, and order.

Training examples are an endless stream of permutations. Each permutation depends only on the seed and the epoch. Step s
trains on examples s·G to (s + 1)·G - 1 of the stream, where G is the global batch: batch size x processes x accumulated
batches. Therefore, a run trains on the same examples in the same steps if it is resumed, or divided differently over
processes and accumulation.
"""

import argparse
import glob
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError

from hf_posenc.evaluation.text_files import KINDS
from hf_posenc.modeling.text_batches import special_tokens
from hf_posenc.serialization import tokenizer_files

Row = dict[str, Any]
Rows = list[tuple[int, Row]]
"""Examples with their numbers in the stream. All randomness of an example depends on its number."""


def read(path: Path, streaming: bool = False) -> Any:
    """The examples in a local file or in all files of a directory. Raises SystemExit if it can't be read."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    suffixes = sorted({file.suffix for file in files})
    kind, *others = {KINDS.get(each) for each in suffixes} or {None}
    if kind is None or others:
        raise SystemExit(f"{path} has files of the types {suffixes}. Use files of one of the types {', '.join(KINDS)}.")
    # `datasets` reads a path as a pattern, and a relative one also as a URL.
    names = [glob.escape(str(file.absolute())) for file in files]
    # By default, pandas reads texts such as "NA" as missing, and the first column as an index if all rows end with a comma.
    options = {"index_col": False, "keep_default_na": False} if kind == "csv" else {}
    return _loaded(str(path), kind, data_files=names, split="train", streaming=streaming, **options)


def load_splits(accelerator: Accelerator, arguments: argparse.Namespace) -> dict[str, Any]:
    """The split `train`, and `validation` if it exists. Raises SystemExit if a split can't be read."""
    if bool(arguments.train_file) == bool(arguments.dataset_name):
        raise SystemExit("The texts come from either --train_file or --dataset_name. Set exactly one of them.")
    with accelerator.main_process_first():  # fills the cache for the other processes
        if arguments.train_file:
            splits = {"train": read(arguments.train_file, arguments.streaming)}
        else:
            name, part = arguments.dataset_name, arguments.dataset_config_name
            check_folder(name)
            loaded = _loaded(name, name, part, streaming=arguments.streaming)
            if "train" not in loaded:
                raise SystemExit(
                    f"The dataset {name} has no split `train`, only {list(loaded)}. Use a dataset with this split."
                )
            splits = {"train": loaded["train"]}
            if "validation" in loaded:
                # Not streamed, so that every evaluation uses the same examples.
                splits["validation"] = _loaded(name, name, part, split="validation")
        if arguments.validation_file:
            splits["validation"] = read(arguments.validation_file)
        if percentage := arguments.validation_split_percentage:
            # The seed is fixed, so that runs with other seeds and later training stages have the same validation data.
            parts = splits["train"].train_test_split(test_size=percentage / 100, seed=0)
            splits = {"train": parts["train"], "validation": parts["test"]}
    if "validation" not in splits:
        if arguments.load_best_model_at_end or arguments.early_stopping_patience:
            raise SystemExit(
                "--load_best_model_at_end and --early_stopping_patience need validation data. Set --validation_file or "
                "--validation_split_percentage."
            )
        accelerator.print("Without validation data, the model is trained and saved, but not evaluated.")
    return splits


def check_folder(name: str) -> None:
    """Raises SystemExit if `datasets` would read the local path of a dataset as a pattern or a URL."""
    path = str(Path(name).absolute())
    if Path(name).exists() and (glob.escape(path) != path or "::" in path):
        raise SystemExit(
            f"--dataset_name {name}: `datasets` reads *, ?, [ and :: in the path of a directory ({path}) as a pattern. Rename "
            "the directory, or use --train_file."
        )


def check_columns(splits: dict[str, Any], columns: dict[str, str]) -> None:
    """Raises SystemExit if a split has no examples, or lacks one of the columns (flag -> name)."""
    for name, data in splits.items():
        try:
            first = next(iter(data), None)
        except (DatasetGenerationError, ValueError) as error:  # a stream is read here for the first time
            raise SystemExit(f"The {name} data can't be read: {error.__cause__ or error}") from None
        if first is None:
            raise SystemExit(f"The {name} data have no rows. Use a file or dataset with at least one row.")
        for flag, column in columns.items():
            if column not in first:
                raise SystemExit(f"The {name} data have no column `{column}`, only {list(first)}. See {flag}.")


def check_texts(accelerator: Accelerator, splits: dict[str, Any], column: str) -> dict[str, Any]:
    """The splits without examples of blank text. Raises SystemExit if none remains, or if a text isn't a string."""
    check_columns(splits, {"--text_column": column})

    def has_text(text: Any) -> bool:
        if text is not None and not isinstance(text, str):
            raise SystemExit(f"A row has {text!r} in the column `{column}`, which must contain strings.")
        return bool(text and text.strip())

    with accelerator.main_process_first():
        kept = {name: data.filter(has_text, input_columns=column) for name, data in splits.items()}
    check_columns(kept, {"--text_column": column})
    return kept


def _loaded(shown: str, *what: Any, **how: Any) -> Any:
    try:
        return load_dataset(*what, **how)
    except (DatasetGenerationError, OSError, ValueError) as error:
        raise SystemExit(f"{shown} can't be read: {error.__cause__ or error}") from None
    except StopIteration:  # raised by the JSON reader
        raise SystemExit(f"{shown} has no rows. Give a file with one row or more.") from None


class Cut:
    """Truncates token IDs as the tokenizer does, and keeps the special tokens at both ends."""

    def __init__(self, tokenizer: Any) -> None:
        self.prefix, self.suffix = special_tokens(tokenizer)
        self.head, self.tail = len(self.prefix), len(self.suffix)

    def __call__(self, ids: list[int], length: int) -> list[int]:
        return ids if len(ids) <= length else ids[: length - self.tail] + ids[len(ids) - self.tail :]


def packed(rows: Row, cut: Cut, length: int) -> Row:
    """Token IDs without special tokens, `[rows][L]`, packed into blocks of `length` with special tokens at both ends.

    The remainder is dropped. Attention isn't masked between the texts of a block.
    """
    size = length - cut.head - cut.tail
    joined = list(itertools.chain.from_iterable(rows["input_ids"]))
    starts = range(0, len(joined) - size + 1, size)
    return {"input_ids": [cut.prefix + joined[i : i + size] + cut.suffix for i in starts]}


def tokenized(
    accelerator: Accelerator,
    splits: dict[str, Any],
    tokenizer: Any,
    column: str,
    length: int,
    packing: bool,
) -> dict[str, Any]:
    """The splits as examples of `input_ids` with at most `length` tokens, or with `packing` exactly `length` tokens.

    The column `length` is the number of tokens before truncation.
    """
    cut = Cut(tokenizer)

    def encode(rows: Row) -> Row:
        ids = tokenizer(rows[column], add_special_tokens=not packing, verbose=False).input_ids
        return {"input_ids": ids if packing else [cut(each, length) for each in ids], "length": [len(each) for each in ids]}

    made = {}
    for name, data in splits.items():
        made[name] = mapped(accelerator, data, encode, name)
        check_known(made[name], tokenizer)
        if packing:
            ends = cut.suffix or [each for each in (tokenizer.eos_token_id,) if each is not None]

            def pack(rows: Row, ends: list[int] = ends) -> Row:
                return packed({"input_ids": [ids + ends for ids in rows["input_ids"]]}, cut, length)

            made[name] = mapped(accelerator, made[name], pack, f"{name}, packed")
            if next(iter(made[name]), None) is None:
                raise SystemExit(
                    f"The {name} data are too short for a block of {length} tokens. Lower --text_length, or omit --packing."
                )
    return made


def mapped(accelerator: Accelerator, data: Any, function: Callable[[Row], Row], name: str) -> Any:
    """The data with all columns replaced by those that the function returns for a batch. A stream is mapped on reading.

    Raises SystemExit if the function raises TypeError or ValueError.
    """
    options: Row = {"batched": True, "remove_columns": list(next(iter(data)))}
    if isinstance(data, IterableDataset):
        return data.map(function, **options)
    try:
        with accelerator.main_process_first():
            return data.map(function, **options, desc=f"tokenizing {name}")
    except (TypeError, ValueError) as error:
        raise SystemExit(f"The {name} data can't be tokenized: {error}") from None


def check_known(data: Any, tokenizer: Any) -> None:
    """Raises SystemExit if the tokenizer knows hardly any token of the first 100 tokenized examples."""
    try:
        tokenizer_files.check_known(tokenizer, (row["input_ids"] for row in itertools.islice(data, 100)))
    except ValueError as error:
        raise SystemExit(str(error)) from None


def endless(
    data: Any, seed: int, start: int, buffer: int, wanted: Callable[[int], bool] = lambda number: True
) -> Iterator[tuple[int, Row]]:
    """The examples of all epochs, each shuffled, with their numbers, which are `wanted` and at least `start`."""
    if not isinstance(data, IterableDataset):
        epoch, offset = divmod(start, len(data))
        for number in itertools.count(epoch):
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed + number)).tolist()
            for row in order[offset:]:
                if wanted(start):
                    yield start, data[row]
                start += 1
            offset = 0
    number, shuffled = 0, data.shuffle(seed=seed, buffer_size=buffer)
    for epoch in itertools.count():
        shuffled.set_epoch(epoch)
        for row in shuffled:
            if number >= start and wanted(number):
                yield number, row
            number += 1


@dataclass
class Batches(torch.utils.data.IterableDataset):
    """The batches of one of several processes, from example `start` of the stream on. Its workers take turns."""

    data: Any
    collate: Callable[[Rows, int], Any]
    seed: int
    buffer: int
    start: int
    batch_size: int
    global_batch: int
    process: int
    processes: int

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        workers, own = (worker.num_workers, worker.id) if worker else (1, 0)

        def wanted(number: int) -> bool:
            turn, process = divmod((number - self.start) // self.batch_size, self.processes)
            return process == self.process and turn % workers == own

        rows: Rows = []
        for number, row in endless(self.data, self.seed, self.start, self.buffer, wanted):
            rows.append((number, row))
            if len(rows) == self.batch_size:
                yield self.collate(rows, number // self.global_batch + 1)
                rows = []


class Numbered(torch.utils.data.Dataset):
    """A dataset of pairs (number, example)."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> tuple[int, Row]:
        return number, self.data[number]
