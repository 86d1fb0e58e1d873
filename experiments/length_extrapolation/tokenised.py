"""Tasks in the tokens of a checkpoint: its tokenizer encodes texts, and ordinary tokens of its vocabulary represent symbols."""

import functools
import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from experiments.length_extrapolation import tasks
from experiments.length_extrapolation.tasks import ALL, CAUSAL, IGNORED, MASKED, TEST_TOKENS, Rows, Task
from hf_posenc.serialization.tokenizer_files import required_tokenizer

SYMBOLIC = max(task.vocabulary for task in ALL.values() if task.unit != "bytes")
"""Maximum number of tokens that a task of symbols needs."""


@dataclass(frozen=True)
class Texts:
    """The texts as tokens of a checkpoint.

    train, test: token IDs without special tokens, `[N]`.
    mask: ID of the mask token, or None.
    ordinary: token IDs for symbols, `[SYMBOLIC]`.
    """

    train: Tensor
    test: Tensor
    mask: int | None
    ordinary: Tensor
    vocabulary: int

    def digest(self) -> str:
        return hashlib.sha256(self.train.numpy().tobytes() + self.test.numpy().tobytes()).hexdigest()[:16]


@functools.cache
def texts(folder: str) -> Texts:
    """The texts as tokens of the tokenizer in a directory. Raises ValueError if it has none, or too few ordinary tokens."""
    try:
        tokenizer = required_tokenizer(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} has no tokenizer that can be loaded: {error}") from None
    numbers = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in _paragraphs()]
    train, test = map(torch.tensor, numbers)
    special = {*tokenizer.all_special_ids}
    ordinary = [number for number in range(len(tokenizer)) if number not in special][:SYMBOLIC]
    if len(ordinary) < SYMBOLIC:
        raise ValueError(f"{folder} has {len(ordinary)} ordinary tokens, and the symbols of the tasks take {SYMBOLIC}")
    return Texts(train, test[:TEST_TOKENS], tokenizer.mask_token_id, torch.tensor(ordinary), len(tokenizer))


@functools.cache
def _paragraphs() -> tuple[str, str]:
    return tasks.paragraphs()


def task(name: str, folder: str) -> Task:
    """A task in the tokens of a checkpoint. Raises ValueError if its tokenizer lacks tokens for the task."""
    own, found = ALL[name], texts(folder)
    if own.unit != "bytes":
        return replace(
            own,
            vocabulary=found.vocabulary,
            train=functools.partial(_mapped_training, own, found.ordinary),
            test=functools.partial(_mapped_test, own, found.ordinary),
        )
    if own.head == MASKED:
        mask_of(found)
    return replace(
        own,
        unit="tokens",
        vocabulary=found.vocabulary,
        chance=1 / found.vocabulary,
        train=functools.partial(_training, found, own.head),
        test=functools.partial(_test, found, own.head),
        digest=found.digest,
        longest=len(found.test),
    )


def _training(found: Texts, head: str, length: int, rows: int, generator: Generator) -> Rows:
    input_ids = tasks.pieces(found.train, length, rows, generator)
    return tasks.scored_from(input_ids, 1) if head == CAUSAL else tasks.masked(input_ids, mask_of(found), generator)


def _test(found: Texts, head: str, length: int, rows: int) -> Rows:
    if head == CAUSAL:
        return tasks.scored_from(tasks.cut(found.test, length), 1)
    return tasks.cut_masked(found.test, length, mask_of(found))


def mask_of(found: Texts) -> int:
    """The ID of the mask token. Raises ValueError if the tokenizer has none."""
    if found.mask is None:
        raise ValueError("the tokenizer of the checkpoint has no mask token, which mlm needs")
    return found.mask


def _mapped_training(own: Task, ordinary: Tensor, length: int, rows: int, generator: Generator) -> Rows:
    return _mapped(own.train(length, rows, generator), ordinary)


def _mapped_test(own: Task, ordinary: Tensor, length: int, rows: int) -> Rows:
    return _mapped(own.test(length, rows), ordinary)


def _mapped(rows: Rows, ordinary: Tensor) -> Rows:
    """Replace symbols by ordinary tokens. Labels of whole examples and IGNORED labels stay the same."""
    input_ids, labels = rows
    if labels.dim() > 1:
        labels = ordinary[labels.clamp(min=0)].where(labels != IGNORED, IGNORED)
    return ordinary[input_ids], labels
