"""The base class of the tasks of finetune.py."""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator

from hf_posenc.progress import ProgressBar
from hf_posenc.training.data import Row, check_known, load_splits, mapped
from hf_posenc.training.task import Task


class Supervised(Task):
    """A task with a head of its own. The rows are checked on construction."""

    kind: Any
    """The Auto class of the model."""
    flags: tuple[str, ...]
    """Flags that only some tasks have, this one among them."""
    greater_is_better = True

    def __init__(self, accelerator: Accelerator, arguments: argparse.Namespace, tokenizer: Any) -> None:
        self.arguments, self.tokenizer = arguments, tokenizer
        self.splits = load_splits(accelerator, arguments)

    def checked(self, accelerator: Accelerator) -> Iterator[tuple[str, str, Row]]:
        """All rows as (name of the split, description of the row's place for errors, row)."""
        for name, split in self.splits.items():
            bar = ProgressBar(split, desc=f"reading the {name} rows", leave=False, disable=not accelerator.is_main_process)
            for number, row in enumerate(bar, start=1):
                yield name, f"row {number} of the {name} data", row

    def adapt(self, config: Any) -> None:
        """Adapt the model's config to the rows."""

    def prepare(self, accelerator: Accelerator, length: int) -> dict[str, Any]:
        """The splits as rows for `collate`, of at most `length` tokens."""
        made = {name: mapped(accelerator, split, self.encoder(length), name) for name, split in self.splits.items()}
        for split in made.values():
            check_known(split, self.tokenizer)
        return made

    def encoder(self, length: int) -> Callable[[Row], Row]:
        """The function that encodes a batch of rows. It refers only to what it needs, since `datasets` finds cached rows by a
        hash of the function and all that it refers to."""
        raise NotImplementedError


def check_fast(tokenizer: Any) -> None:
    """Raises SystemExit for a tokenizer that has no offsets."""
    if not tokenizer.is_fast:
        raise SystemExit(f"{type(tokenizer).__name__} can't tell where its tokens lie in a text: take a fast tokenizer")
