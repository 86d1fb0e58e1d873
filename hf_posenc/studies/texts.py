"""The texts of a study, as bytes or as a checkpoint's tokens, and the tasks that read them.

By default, the texts are the topics of Python's `help()`. Otherwise, they come from a file (`hf_posenc.evaluation.text_files`).
"""

import functools
import hashlib
import pydoc_data.topics
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Generator, Tensor

from hf_posenc.evaluation import text_files
from hf_posenc.serialization.tokenizer_files import required_tokenizer
from hf_posenc.studies.tasks import CAUSAL, IGNORED, MASKED, TEST_SEED, Rows, Task, scored_from

BYTES = 256
MASK = BYTES
"""The mask token, numbered after the bytes."""
MASKED_PART = 0.15
HELD_OUT = 8
"""One in this many topics of `help()`, or the last of this many parts of a file, is for tests."""
TEST_TOKENS = 2**13
"""Length of the test text in bytes, or in a tokenizer's tokens."""


@dataclass(frozen=True)
class Texts:
    """The texts of a study.

    train, test: token IDs without special tokens, `[N]`. The latter is truncated to TEST_TOKENS.
    unit: "bytes" or "tokens".
    vocabulary: number of token IDs, without the mask token for bytes.
    mask: ID of the mask token, or None.
    """

    train: Tensor
    test: Tensor
    unit: str
    vocabulary: int
    mask: int | None

    def digest(self) -> str:
        dtype = torch.uint8 if self.unit == "bytes" else torch.long
        found = b"|".join(each.to(dtype).numpy().tobytes() for each in (self.train, self.test))
        return hashlib.sha256(found).hexdigest()[:16]


def topics() -> tuple[str, str]:
    """The topics of `help()` for training and for tests, without common paragraphs."""
    found = pydoc_data.topics.topics
    held_out = sorted(found)[HELD_OUT // 2 :: HELD_OUT]
    trained = [paragraph for name in sorted(found) if name not in held_out for paragraph in found[name].split("\n\n")]
    return _without_common(trained, [paragraph for name in held_out for paragraph in found[name].split("\n\n")])


def _without_common(trained: list[str], tested: list[str]) -> tuple[str, str]:
    """Joined paragraphs for training and for tests. The former don't contain the latter."""
    known = {paragraph.strip() for paragraph in tested}
    return "\n\n".join(paragraph for paragraph in trained if paragraph.strip() not in known), "\n\n".join(tested)


@functools.cache
def paragraphs(file: str | None = None) -> tuple[str, str]:
    """The texts for training and for tests. A file's last texts, an eighth of its characters, are for tests.

    Raises ValueError if the file can't be read, has no column `text`, or has too few texts.
    """
    if file is None:
        return topics()
    found, column = [], "text"
    for number, row in enumerate(text_files.rows(Path(file)), start=1):
        if not isinstance(row.get(column), str):
            raise ValueError(f"{file}, row {number}: it has no text in the column {column!r}, only {', '.join(row)}.")
        found.append(row[column])
    total, held_out, place = sum(map(len, found)), 0, len(found)
    while place > 1 and held_out < total / HELD_OUT:
        place -= 1
        held_out += len(found[place])
    trained, tested = _without_common(found[:place], found[place:])
    if not trained.strip() or not tested.strip():
        raise ValueError(f"{file} has too few different texts to hold some out for tests. Use a file with more texts.")
    return trained, tested


@functools.cache
def of_bytes(file: str | None = None) -> Texts:
    train, test = (torch.tensor(list(text.encode())) for text in paragraphs(file))
    return Texts(train, test[:TEST_TOKENS], "bytes", BYTES, MASK)


@functools.cache
def of_tokenizer(directory: str, file: str | None = None) -> Texts:
    """Raises ValueError if the directory has no tokenizer."""
    tokenizer = _tokenizer(directory)
    numbers = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in paragraphs(file)]
    train, test = map(torch.tensor, numbers)
    return Texts(train, test[:TEST_TOKENS], "tokens", len(tokenizer), tokenizer.mask_token_id)


@functools.cache
def _tokenizer(directory: str):  # type: ignore[no-untyped-def]
    try:
        return required_tokenizer(directory)
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory} has no tokenizer that can be loaded: {error}") from None


def task(own: Task, directory: str | None = None, file: str | None = None) -> Task:
    """A task whose rows can be drawn: on the study's texts, or with the tokens of a checkpoint's directory.

    In a checkpoint's tokens, ordinary tokens of its vocabulary represent symbols. Raises ValueError if its tokenizer lacks
    tokens for the task.
    """
    if own.texts:
        return _on(own, of_bytes(file) if directory is None else of_tokenizer(directory, file))
    return own if directory is None else _in_tokens(own, directory)


def _on(own: Task, texts: Texts) -> Task:
    if own.head == MASKED and texts.mask is None:
        raise ValueError("The checkpoint's tokenizer has no mask token, which the task mlm needs. Use another task.")
    vocabulary = texts.vocabulary + (own.head == MASKED and texts.unit == "bytes")
    return replace(
        own,
        rows=functools.partial(_pieces, texts, own.head),
        test_rows=functools.partial(_tiles, texts, own.head),
        vocabulary=vocabulary,
        chance=1 / texts.vocabulary,
        unit=texts.unit,
        longest=len(texts.test),
        fixed_length=True,
        digest=texts.digest,
    )


def _pieces(texts: Texts, head: str, length: int, count: int, generator: Generator) -> Rows:
    """Pieces of `length` tokens from random places in the training text. Raises ValueError if it is shorter."""
    if length > len(texts.train):
        raise ValueError(f"The training text has {len(texts.train):,} {texts.unit}, fewer than {length:,}. Decrease --length.")
    starts = torch.randint(len(texts.train) - length + 1, (count, 1), generator=generator)
    input_ids = texts.train[starts + torch.arange(length)]
    return scored_from(input_ids, 1) if head == CAUSAL else masked(input_ids, _mask(texts), generator)


def _tiles(texts: Texts, head: str, length: int, count: int) -> Rows:
    """The test text in consecutive pieces of `length` tokens, without the remainder. `count` is ignored.

    Masked tokens are at the same places for each length, so that lengths differ only in the context.
    """
    if head == CAUSAL:
        return scored_from(_cut(texts.test, length), 1)
    input_ids, labels = masked(texts.test[None], _mask(texts), torch.Generator().manual_seed(TEST_SEED))
    return _cut(input_ids[0], length), _cut(labels[0], length)


def _mask(texts: Texts) -> int:
    assert texts.mask is not None  # checked in `_on`
    return texts.mask


def _cut(text: Tensor, length: int) -> Tensor:
    return text[: len(text) // length * length].view(-1, length)


def masked(input_ids: Tensor, mask: int, generator: Generator) -> Rows:
    """Replace MASKED_PART of each row's tokens, at least one, by `mask`. Only these tokens are scored."""
    count = max(1, round(MASKED_PART * input_ids.shape[1]))
    hidden = torch.rand(input_ids.shape, generator=generator).argsort(1) < count
    return input_ids.masked_fill(hidden, mask), input_ids.masked_fill(~hidden, IGNORED)


def _in_tokens(own: Task, directory: str) -> Task:
    tokenizer = _tokenizer(directory)
    special = {*tokenizer.all_special_ids}
    ordinary = [number for number in range(len(tokenizer)) if number not in special][: own.vocabulary]
    if len(ordinary) < own.vocabulary:
        raise ValueError(f"{directory} has {len(ordinary)} ordinary tokens, fewer than the {own.vocabulary} of the task.")
    ids = torch.tensor(ordinary)

    def rows(length: int, count: int, generator: Generator) -> Rows:
        return _mapped(own.rows(length, count, generator), ids)

    def test_rows(length: int, count: int) -> Rows:
        return _mapped(own.test(length, count), ids)

    return replace(own, vocabulary=len(tokenizer), rows=rows, test_rows=test_rows)


def _mapped(rows: Rows, ordinary: Tensor) -> Rows:
    """Replace symbols by ordinary tokens. Labels of whole rows and IGNORED labels stay the same."""
    input_ids, labels = rows
    if labels.dim() > 1:
        labels = ordinary[labels.clamp(min=0)].where(labels != IGNORED, IGNORED)
    return ordinary[input_ids], labels
