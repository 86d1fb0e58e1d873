"""What the tasks of finetune.py share."""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator
from tqdm.auto import tqdm

from training import loop
from training.data import Row, load_splits, mapped


class Supervised(loop.Task):
    """A task with a head of its own; rows are checked where it is made."""

    kind: Any
    """The Auto class."""
    flags: tuple[str, ...]
    """What can be given for this task, and not for all others."""
    greater_is_better = True

    def __init__(self, accelerator: Accelerator, arguments: argparse.Namespace, tokenizer: Any) -> None:
        self.arguments, self.tokenizer = arguments, tokenizer
        self.splits = load_splits(accelerator, arguments)

    def checked(self, accelerator: Accelerator) -> Iterator[tuple[str, str, Row]]:
        """All rows, with the name of their split and words for where they are."""
        for name, split in self.splits.items():
            bar = tqdm(split, desc=f"reading the {name} rows", leave=False, disable=not accelerator.is_main_process)
            for number, row in enumerate(bar, start=1):
                yield name, f"row {number} of the {name} data", row

    def adapt(self, config: Any) -> None:
        """Tell the model's config what the rows have."""

    def prepare(self, accelerator: Accelerator, length: int, usable: int | None) -> dict[str, Any]:
        """The splits as rows that collate takes, of at most `length` tokens."""
        return {name: mapped(accelerator, split, self.encoder(length), name) for name, split in self.splits.items()}

    def encoder(self, length: int) -> Callable[[Row], Row]:
        """What makes these rows of a batch of the splits' rows. It holds no more than it needs: by what it holds, the rows
        that it made before are found again."""
        raise NotImplementedError


def check_fast(tokenizer: Any) -> None:
    if not tokenizer.is_fast:
        raise SystemExit(f"{type(tokenizer).__name__} can't tell where its tokens lie in a text: take a fast tokenizer")
