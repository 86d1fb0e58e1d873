"""Tasks whose inputs have a length: what a model is trained on up to a length L, and tested on beyond it.

A row of copy, reverse or addition (Kazemnejad et al., 2023: https://arxiv.org/abs/2305.19466) is a question and its answer;
the answer alone is scored. One of lm (Press et al., 2022: https://arxiv.org/abs/2108.12409) is a piece of text.

Shapes: B rows, N length of the task, T tokens of a row.
"""

import functools
import hashlib
import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

IGNORED = -100
"""The label of a token that isn't scored."""
SYMBOLS, DIGITS, BYTES = 26, 10, 256
BEGIN, THEN, END = range(3)
"""Special tokens behind a task's symbols: of the beginning, between the question's parts, of the end."""
TEST_SEED = 2**31 - 1
HELD_OUT = 8
"""Every so many topics of `help()`, one is for tests."""
TEST_BYTES = 2**13

Rows = tuple[Tensor, Tensor]
"""input_ids and labels, `[B, T]` each. A label is the token itself or IGNORED."""


@dataclass(frozen=True)
class Task:
    """
    unit: what a length counts.
    measure: "exact match" or "perplexity".
    vocabulary: number of tokens, special ones included.
    chance: token accuracy of answers drawn at random.
    tokens: a length -> the tokens of a row of it.
    train: L, number of rows, generator -> the rows of one step.
    test: a length, number of rows -> rows that are the same in each call.
    length, steps, batch_size: what a study has by default; length is L.
    digest: of texts that come from the machine, else empty.
    """

    unit: str
    measure: str
    vocabulary: int
    chance: float
    tokens: Callable[[int], int]
    train: Callable[[int, int, Generator], Rows]
    test: Callable[[int, int], Rows]
    length: int
    steps: int
    batch_size: int
    digest: Callable[[], str] = str


def special(symbols: int, which: int, rows: int) -> Tensor:
    """A column `[B, 1]` of a special token."""
    return torch.full((rows, 1), symbols + which)


def scored_from(input_ids: Tensor, start: int) -> Rows:
    labels = input_ids.clone()
    labels[:, :start] = IGNORED
    return input_ids, labels


def as_copied(symbols: Tensor) -> Rows:
    """BEGIN, the symbols, THEN, the symbols again, END."""
    return _repeated(symbols, symbols)


def as_reversed(symbols: Tensor) -> Rows:
    """BEGIN, the symbols, THEN, the symbols from last to first, END."""
    return _repeated(symbols, symbols.flip(1))


def _repeated(symbols: Tensor, answer: Tensor) -> Rows:
    rows, length = symbols.shape
    begin, then, end = (special(SYMBOLS, which, rows) for which in (BEGIN, THEN, END))
    return scored_from(torch.cat([begin, symbols, then, answer, end], dim=1), length + 2)


def as_sum(first: Tensor, second: Tensor) -> Rows:
    """BEGIN, two numbers, digit by digit in turns, THEN, their sum with one digit more, END. The last digits come first."""
    rows, length = first.shape
    digits, carry = [], torch.zeros(rows, dtype=torch.long)
    for place in range(length):
        total = first[:, place] + second[:, place] + carry
        digits.append(total % DIGITS)
        carry = total // DIGITS
    question = torch.stack([first, second], dim=2).flatten(1)
    begin, then, end = (special(DIGITS, which, rows) for which in (BEGIN, THEN, END))
    answer = torch.stack([*digits, carry], dim=1)
    return scored_from(torch.cat([begin, question, then, answer, end], dim=1), 2 * length + 2)


def drawn_symbols(make: Callable[[Tensor], Rows], length: int, rows: int, generator: Generator) -> Rows:
    return make(torch.randint(SYMBOLS, (rows, length), generator=generator))


def drawn_numbers(length: int, rows: int, generator: Generator) -> Rows:
    first, second = torch.randint(DIGITS, (2, rows, length), generator=generator)
    return as_sum(first, second)


def up_to(draw: Callable[[int, int, Generator], Rows], longest: int, rows: int, generator: Generator) -> Rows:
    """Rows of one length, drawn from 1 to `longest`, so that none is padded."""
    return draw(int(torch.randint(1, longest + 1, (), generator=generator)), rows, generator)


def always_the_same(draw: Callable[[int, int, Generator], Rows], length: int, rows: int) -> Rows:
    return draw(length, rows, torch.Generator().manual_seed(TEST_SEED - length))


@functools.cache
def texts() -> tuple[Tensor, Tensor]:
    """The topics of `help()` as bytes, for training and for tests. They share no paragraph."""
    topics = pydoc_data.topics.topics
    held_out = sorted(topics)[HELD_OUT // 2 :: HELD_OUT]
    tested = [paragraph for name in held_out for paragraph in topics[name].split("\n\n")]
    trained = [paragraph for name in sorted(topics) if name not in held_out for paragraph in topics[name].split("\n\n")]
    known = {paragraph.strip() for paragraph in tested}
    kept = [paragraph for paragraph in trained if paragraph.strip() not in known]
    first, second = (torch.tensor(list("\n\n".join(text).encode())) for text in (kept, tested))
    return first, second[:TEST_BYTES]


def text_digest() -> str:
    """Of the texts, which differ between versions of Python."""
    return hashlib.sha256(b"|".join(bytes(text.tolist()) for text in texts())).hexdigest()[:16]


def windows(length: int, rows: int, generator: Generator) -> Rows:
    """Pieces of `length` bytes from anywhere in the training text."""
    text = texts()[0]
    starts = torch.randint(len(text) - length + 1, (rows, 1), generator=generator)
    return scored_from(text[starts + torch.arange(length)], 1)


def tiled(length: int, rows: int) -> Rows:
    """The test text in pieces of `length` bytes, one behind the other, a remainder left out; `rows` don't count here."""
    text = texts()[1]
    return scored_from(text[: len(text) // length * length].view(-1, length), 1)


def _task(
    draw: Callable[[int, int, Generator], Rows],
    unit: str,
    symbols: int,
    tokens: Callable[[int], int],
    length: int,
    steps: int,
    batch_size: int = 32,
) -> Task:
    """A task whose answers are symbols and three special tokens."""
    train, test = functools.partial(up_to, draw), functools.partial(always_the_same, draw)
    return Task(unit, "exact match", symbols + 3, 1 / symbols, tokens, train, test, length, steps, batch_size)


TASKS = {
    "copy": _task(functools.partial(drawn_symbols, as_copied), "symbols", SYMBOLS, lambda n: 2 * n + 3, length=8, steps=1200),
    "reverse": _task(
        functools.partial(drawn_symbols, as_reversed), "symbols", SYMBOLS, lambda n: 2 * n + 3, length=8, steps=800
    ),
    "addition": _task(drawn_numbers, "digits", DIGITS, lambda n: 3 * n + 4, length=2, steps=800),
    "lm": Task(
        unit="bytes",
        measure="perplexity",
        vocabulary=BYTES,
        chance=1 / BYTES,
        tokens=lambda n: n,
        train=windows,
        test=tiled,
        length=64,
        steps=600,
        batch_size=16,
        digest=text_digest,
    ),
}
"""Name -> task."""
