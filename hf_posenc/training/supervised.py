"""The base class of the tasks of finetune.py."""

import argparse
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from hf_posenc.training.data import Row, check_known, load_splits, mapped
from hf_posenc.training.task import Task


class Supervised(Task):
    """A task with its own head. The constructor checks the columns."""

    kind: Any
    """The Auto class of the model."""
    flags: tuple[str, ...]
    """Options of this task that not all tasks have."""
    greater_is_better = True

    def __init__(self, accelerator: Accelerator, arguments: argparse.Namespace, tokenizer: Any) -> None:
        self.arguments, self.tokenizer = arguments, tokenizer
        self.splits = load_splits(accelerator, arguments)

    def adapt(self, config: Any) -> None:
        """Adapt the model's config to the examples."""

    def prepare(self, accelerator: Accelerator, length: int) -> dict[str, Any]:
        """The splits as examples for `collate`, of at most `length` tokens."""
        made = {name: mapped(accelerator, split, self.encoder(length), name) for name, split in self.splits.items()}
        for split in made.values():
            check_known(split, self.tokenizer)
        return made

    def encoder(self, length: int) -> Callable[[Row], Row]:
        """The function that encodes a batch of examples.

        It refers only to the objects that it needs. `datasets` looks up cached examples by a hash of the function and of
        everything that it refers to.
        """
        raise NotImplementedError


def check_fast(tokenizer: Any) -> None:
    """Raises SystemExit if a tokenizer has no offsets."""
    if not tokenizer.is_fast:
        raise SystemExit(f"{type(tokenizer).__name__} doesn't return the offsets of tokens. Use a fast tokenizer.")
