"""Tasks of variable length. Models are trained on inputs of up to a length L, and tested on longer inputs.

copy, reverse, addition (Kazemnejad et al., 2023: https://arxiv.org/abs/2305.19466): a question and its answer. Only the answer
    is scored.
lm (Press et al., 2022: https://arxiv.org/abs/2108.12409): a piece of text.
mlm: a piece of text with some masked bytes (Devlin et al., 2019: https://arxiv.org/abs/1810.04805).
classification: a sequence of symbols with two markers. The label indicates which marker comes first, so it depends only on
    their order.

Shapes: B examples, N length of the task, T tokens per example.
"""

import functools
import hashlib
import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

IGNORED = -100
"""The label of a token that isn't scored."""
SYMBOLS, DIGITS, BYTES = 26, 10, 256
BEGIN, THEN, END = range(3)
"""Special tokens, numbered after a task's symbols: beginning, end of the question, and end."""
TEST_SEED = 2**31 - 1
HELD_OUT = 8
"""One in this many topics of `help()` is for tests."""
TEST_TOKENS = 2**13
"""Length of the test text in bytes, or in a tokenizer's tokens."""

MASK = BYTES
"""The mask token, numbered after the bytes."""
MASKED_PART = 0.15
MARKERS = SYMBOLS + 3, SYMBOLS + 4
"""The two tokens whose order determines the label in classification, numbered after the special tokens."""
CAUSAL, MASKED, LABELS = "causal", "masked", "labels"
"""Heads of models: for the next token, for masked tokens, and for one label per example."""

Rows = tuple[Tensor, Tensor]
"""input_ids `[B, T]`, and labels: `[B, T]` with the token itself or IGNORED, or `[B]` for a task with LABELS."""


@dataclass(frozen=True)
class Task:
    """A task.

    unit: the unit of lengths.
    measure: the metric, "exact match", "accuracy", or "perplexity".
    vocabulary: number of tokens, including special tokens.
    chance: token accuracy of random answers.
    tokens: length -> number of tokens of an example.
    train: L, number of examples, generator -> the examples of one step.
    test: length, number of examples -> test examples, the same in each call.
    length, steps, batch_size: defaults of a study. `length` is L.
    digest: digest of texts that depend on the Python version, otherwise empty.
    head: head of the model: CAUSAL, MASKED, or LABELS.
    shortest: minimum length of an example.
    longest: maximum length of a test example, if the test text is limited.
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
    head: str = CAUSAL
    shortest: int = 1
    longest: int | None = None


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
    """BEGIN, the interleaved digits of two numbers, THEN, their sum with one more digit, END. The last digits come first."""
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


def drawn_order(length: int, rows: int, generator: Generator) -> Rows:
    symbols = torch.randint(SYMBOLS, (rows, length), generator=generator)
    return as_order(symbols, torch.rand(rows, length, generator=generator).argsort(1)[:, :2])


def as_order(symbols: Tensor, places: Tensor) -> Rows:
    """BEGIN, the symbols with the markers at two places `[B, 2]`, END. The label is 1 if the first marker comes first."""
    begin, end = (special(SYMBOLS, which, len(symbols)) for which in (BEGIN, END))
    marked = symbols.scatter(1, places, torch.tensor([MARKERS]).expand_as(places))
    return torch.cat([begin, marked, end], dim=1), (places[:, 0] < places[:, 1]).long()


def up_to(
    draw: Callable[[int, int, Generator], Rows], longest: int, rows: int, generator: Generator, shortest: int = 1
) -> Rows:
    """Examples of one random length from `shortest` to `longest`, so that none is padded."""
    return draw(int(torch.randint(shortest, longest + 1, (), generator=generator)), rows, generator)


def always_the_same(draw: Callable[[int, int, Generator], Rows], length: int, rows: int) -> Rows:
    return draw(length, rows, torch.Generator().manual_seed(TEST_SEED - length))


def paragraphs() -> tuple[str, str]:
    """The topics of `help()` for training and for tests, without common paragraphs."""
    topics = pydoc_data.topics.topics
    held_out = sorted(topics)[HELD_OUT // 2 :: HELD_OUT]
    tested = [paragraph for name in held_out for paragraph in topics[name].split("\n\n")]
    trained = [paragraph for name in sorted(topics) if name not in held_out for paragraph in topics[name].split("\n\n")]
    known = {paragraph.strip() for paragraph in tested}
    kept = [paragraph for paragraph in trained if paragraph.strip() not in known]
    return "\n\n".join(kept), "\n\n".join(tested)


@functools.cache
def texts() -> tuple[Tensor, Tensor]:
    """The texts as bytes, for training and for tests. The latter is truncated to TEST_TOKENS."""
    first, second = (torch.tensor(list(text.encode())) for text in paragraphs())
    return first, second[:TEST_TOKENS]


def digest_of(found: tuple[Tensor, Tensor]) -> str:
    return hashlib.sha256(b"|".join(bytes(text.tolist()) for text in found)).hexdigest()[:16]


def text_digest() -> str:
    """A digest of the texts, which differ between Python versions."""
    return digest_of(texts())


def windows(length: int, rows: int, generator: Generator) -> Rows:
    """Pieces of `length` bytes from random places in the training text."""
    return scored_from(pieces(texts()[0], length, rows, generator), 1)


def tiled(length: int, rows: int) -> Rows:
    """The test text in consecutive pieces of `length` bytes, without the remainder. `rows` is ignored."""
    return scored_from(cut(texts()[1], length), 1)


def pieces(text: Tensor, length: int, rows: int, generator: Generator) -> Tensor:
    starts = torch.randint(len(text) - length + 1, (rows, 1), generator=generator)
    return text[starts + torch.arange(length)]


def cut(text: Tensor, length: int) -> Tensor:
    return text[: len(text) // length * length].view(-1, length)


def masked(input_ids: Tensor, mask: int, generator: Generator) -> Rows:
    """Replace MASKED_PART of each example's tokens, at least one, by `mask`. Only these tokens are scored."""
    count = max(1, round(MASKED_PART * input_ids.shape[1]))
    hidden = torch.rand(input_ids.shape, generator=generator).argsort(1) < count
    return input_ids.masked_fill(hidden, mask), input_ids.masked_fill(~hidden, IGNORED)


def masked_windows(length: int, rows: int, generator: Generator) -> Rows:
    return masked(pieces(texts()[0], length, rows, generator), MASK, generator)


def masked_tiled(length: int, rows: int) -> Rows:
    return cut_masked(texts()[1], length, MASK)


def cut_masked(text: Tensor, length: int, mask: int) -> Rows:
    """A text in pieces, masked at the same places for each length, so that lengths differ only in the context."""
    input_ids, labels = masked(text[None], mask, torch.Generator().manual_seed(TEST_SEED))
    return cut(input_ids[0], length), cut(labels[0], length)


def _task(
    draw: Callable[[int, int, Generator], Rows],
    unit: str,
    symbols: int,
    tokens: Callable[[int], int],
    length: int,
    steps: int,
    batch_size: int = 32,
) -> Task:
    """A task with symbols and three special tokens."""
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
        longest=TEST_TOKENS,
    ),
}
"""Name -> task for extrapolation.py."""

COMPARED = {
    "mlm": replace(
        TASKS["lm"], vocabulary=BYTES + 1, train=masked_windows, test=masked_tiled, head=MASKED, steps=600, batch_size=32
    ),
    "clm": TASKS["lm"],
    **{name: TASKS[name] for name in ("copy", "reverse", "addition")},
    "classification": Task(
        unit="symbols",
        measure="accuracy",
        vocabulary=SYMBOLS + 5,
        chance=0.5,
        tokens=lambda n: n + 2,
        train=functools.partial(up_to, drawn_order, shortest=2),
        test=functools.partial(always_the_same, drawn_order),
        length=16,
        steps=600,
        batch_size=32,
        head=LABELS,
        shortest=2,
    ),
}
"""Name -> task for compare.py."""

ALL = {**TASKS, **COMPARED}
