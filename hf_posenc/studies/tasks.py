"""Tasks of variable length. Models are trained on inputs of up to a length L, and tested on longer inputs.

copy, reverse, addition (Kazemnejad et al., 2023: https://arxiv.org/abs/2305.19466): a question and its answer. Only the answer
    is scored.
clm (Press et al., 2022: https://arxiv.org/abs/2108.12409): a piece of text.
mlm: a piece of text with some masked tokens (Devlin et al., 2019: https://arxiv.org/abs/1810.04805).
classification: a sequence of symbols with two markers. The label indicates which marker comes first, so it depends only on
    their order.

A module that calls `register_task` adds a task. `hf-posenc compare --import MODULE` imports it.

Shapes: B rows, N length of the task, T tokens per row, P scored positions per row.
"""

import functools
import hashlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

import hf_posenc
from hf_posenc.encodings import did_you_mean
from hf_posenc.studies import versions

IGNORED = -100
"""The label of a token that isn't scored."""
SYMBOLS, DIGITS = 26, 10
BEGIN, THEN, END = range(3)
"""Special tokens, numbered after a task's symbols: beginning, end of the question, and end."""
TEST_SEED = 2**31 - 1
MARKERS = SYMBOLS + 3, SYMBOLS + 4
"""The two tokens whose order determines the label in classification, numbered after the special tokens."""
CAUSAL, MASKED, LABELS = "causal", "masked", "labels"
"""Heads of models: for the next token, for masked tokens, and for one label per row."""
EXACT_MATCH, ACCURACY, PERPLEXITY = "exact match", "accuracy", "perplexity"
MEASURES = {EXACT_MATCH: ("exact", "tokens"), ACCURACY: ("accuracy",), PERPLEXITY: ("perplexity",)}
"""Metric of a task -> the names of its scores."""
RESERVED = ("exact", "tokens", "accuracy", "perplexity", "loss")
"""Names of scores that a custom metric can't have."""

Rows = tuple[Tensor, Tensor]
"""input_ids `[B, T]` and labels: `[B, T]` with tokens or IGNORED, or `[B]` for a task with LABELS. Both are int64."""
Metric = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of a study.

    rows: length, number of rows, generator -> that number of rows. All rows of a length have the same number of tokens. Random
        numbers come from the generator only. For `head="causal"`, a label is the token itself, not the next one.
    metric: "exact match" of all scored tokens of a row (token accuracy is reported, too), "accuracy", "perplexity", or a
        function: predictions and labels, both `[B, P]` -> a score for each row `[B]`. The name of the function is the name of
        the score. Labels that aren't scored are IGNORED.
    vocabulary: number of token IDs.
    head: "causal" (next tokens), "masked" (tokens at their own places), or "labels" (a label for each row).
    classes: number of labels, for `head="labels"`.
    chance: score of random answers (token accuracy for "exact match"), which figures show as a line. None: no line.
    lower_is_better: whether a lower score is better. It applies to a metric that is a function.
    unit: unit of lengths, in the plural.
    length: default of L.
    steps, batch_size: other defaults of a study.
    shortest: minimum length.
    longest: maximum length of test rows, or None.
    fixed_length: whether all training rows have length L. Otherwise, each batch has a random length up to L.
    test_rows: length, number of rows -> test rows, which may be fewer. None: they come from `rows` with a fixed generator.
    texts: whether the rows are pieces of the study's texts (see `hf_posenc.studies.texts`).
    digest: the digest of data that `rows` reads, which identifies a study's setting.
    """

    rows: Callable[[int, int, Generator], Rows]
    metric: str | Metric
    vocabulary: int
    head: str = CAUSAL
    classes: int = 2
    chance: float | None = None
    lower_is_better: bool = False
    unit: str = "tokens"
    length: int = 32
    steps: int = 1000
    batch_size: int = 32
    shortest: int = 1
    longest: int | None = None
    fixed_length: bool = False
    test_rows: Callable[[int, int], Rows] | None = None
    texts: bool = False
    digest: Callable[[], str] = str

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of the scores."""
        return (self.metric.__name__,) if callable(self.metric) else MEASURES[self.metric]

    def descends(self) -> bool:
        """Whether a lower score is better."""
        return self.lower_is_better if callable(self.metric) else self.metric == PERPLEXITY

    def train(self, length: int, count: int, generator: Generator) -> Rows:
        """Training rows of one length, at most `length`, so that none is padded."""
        if not self.fixed_length:
            length = int(torch.randint(self.shortest, length + 1, (), generator=generator))
        return self.rows(length, count, generator)

    def test(self, length: int, count: int) -> Rows:
        """Test rows, the same in each call."""
        if self.test_rows:
            return self.test_rows(length, count)
        return self.rows(length, count, torch.Generator().manual_seed(TEST_SEED - length))

    def tokens(self, length: int) -> int:
        """The number of tokens of a row of a length."""
        return self.test(length, 1)[0].shape[1]


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
    return as_sum(_apart(first, second, torch.randint(1, DIGITS, (rows,), generator=generator)), second)


def tested_numbers(length: int, rows: int) -> Rows:
    first, second = torch.randint(DIGITS, (2, rows, length), generator=torch.Generator().manual_seed(TEST_SEED - length))
    return as_sum(_apart(first, second, 0), second)


def _apart(first: Tensor, second: Tensor, shift: Tensor | int) -> Tensor:
    """`first` with a last digit that the other digits of a question determine in test rows, and exclude in training rows."""
    rest = (first[:, 1:].sum(1) + second.sum(1)) % DIGITS
    last = (torch.tensor([0, 2, 4, 6, 8, 1, 3, 5, 7, 9])[rest] + shift) % DIGITS
    return torch.cat([last[:, None], first[:, 1:]], dim=1)


def drawn_order(length: int, rows: int, generator: Generator) -> Rows:
    symbols = torch.randint(SYMBOLS, (rows, length), generator=generator)
    return as_order(symbols, torch.rand(rows, length, generator=generator).argsort(1)[:, :2])


def as_order(symbols: Tensor, places: Tensor) -> Rows:
    """BEGIN, the symbols with the markers at two places `[B, 2]`, END. The label is 1 if the first marker comes first."""
    begin, end = (special(SYMBOLS, which, len(symbols)) for which in (BEGIN, END))
    marked = symbols.scatter(1, places, torch.tensor([MARKERS]).expand_as(places))
    return torch.cat([begin, marked, end], dim=1), (places[:, 0] < places[:, 1]).long()


def _task(
    rows: Callable[[int, int, Generator], Rows],
    unit: str,
    symbols: int,
    length: int,
    steps: int,
    batch_size: int = 32,
    **more: Any,
) -> Task:
    """A task with symbols and three special tokens."""
    return Task(
        **more,
        rows=rows,
        metric=EXACT_MATCH,
        vocabulary=symbols + 3,
        chance=1 / symbols,
        unit=unit,
        length=length,
        steps=steps,
        batch_size=batch_size,
    )


def _of_texts(length: int, count: int, generator: Generator) -> Rows:
    raise ValueError("The rows of this task come from texts. Call hf_posenc.studies.texts.task first.")


_text_task = functools.partial(Task, rows=_of_texts, metric=PERPLEXITY, vocabulary=0, length=64, steps=600, texts=True)

TASKS: dict[str, Task] = {
    "mlm": _text_task(head=MASKED, batch_size=32),
    "clm": _text_task(batch_size=16, shortest=2),
    "copy": _task(functools.partial(drawn_symbols, as_copied), "symbols", SYMBOLS, length=8, steps=1200),
    "reverse": _task(functools.partial(drawn_symbols, as_reversed), "symbols", SYMBOLS, length=8, steps=800),
    "addition": _task(drawn_numbers, "digits", DIGITS, length=2, steps=800, test_rows=tested_numbers),
    "classification": Task(
        rows=drawn_order,
        metric=ACCURACY,
        vocabulary=SYMBOLS + 5,
        chance=0.5,
        unit="symbols",
        length=16,
        steps=600,
        head=LABELS,
        shortest=2,
    ),
}
"""Name -> task."""
BUILT_IN = tuple(TASKS)


def register_task(name: str, task: Task) -> None:
    """Add a task under a name, for `--tasks`. A module that is executed again replaces its own task.

    Raises:
        ValueError: the name isn't an identifier or is in use by another module's task, or a field is invalid.
    """
    if not name.isidentifier():
        raise ValueError(f"A task can't be named {name!r}. Use a name of letters, digits, and underscores.")
    if name in TASKS and (name in BUILT_IN or source_file(TASKS[name]) != source_file(task)):
        raise ValueError(f"The task {name!r} exists. Choose another name.")
    if not callable(task.metric) and task.metric not in MEASURES:
        hint = did_you_mean(str(task.metric), MEASURES)
        raise ValueError(
            f"Task {name!r}: metric={task.metric!r} isn't available{hint}. Use {', '.join(map(repr, MEASURES))}, or a function "
            "of predictions and labels."
        )
    if callable(task.metric):
        metric = getattr(task.metric, "__name__", None)
        if metric is None or not metric.isidentifier() or metric in RESERVED:
            raise ValueError(
                f"Task {name!r}: the metric's name is {metric!r}. Define a function whose name isn't one of "
                f"{', '.join(RESERVED)}, because it names the score."
            )
    if task.head not in (CAUSAL, MASKED, LABELS):
        raise ValueError(f"Task {name!r}: head={task.head!r} isn't available. Use 'causal', 'masked', or 'labels'.")
    for field in ("vocabulary", "classes", "length", "batch_size", "shortest"):
        value = getattr(task, field)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"Task {name!r}: {field} is {value!r}, but must be an integer of at least 1.")
    if task.length < task.shortest:
        raise ValueError(f"Task {name!r}: length {task.length} is below shortest, {task.shortest}. Increase length.")
    TASKS[name] = task


def get_task(name: str) -> Task:
    """A task by its name. Raises ValueError if there is none."""
    if name not in TASKS:
        hint = did_you_mean(name, TASKS)
        raise ValueError(f"There is no task {name!r}{hint}. Use one of {', '.join(TASKS)}, or pass --import MODULE.")
    return TASKS[name]


def source_file(task: Task) -> str:
    """The file that defines a task's rows, or an empty string if there is none."""
    return str(versions.source_of(versions.module_of(task.rows)) or "")


def version(name: str) -> dict[str, str]:
    """A digest of a custom task's code, fields, rows, and metric, by its name and file. Empty for built-in tasks."""
    if name in BUILT_IN or name not in TASKS:
        return {}
    task, found = TASKS[name], hashlib.sha256()
    functions = [value for each in fields(task) if callable(value := getattr(task, each.name))]
    found.update(versions.digest(*map(versions.module_of, functions)).encode())
    plain = [getattr(task, each.name) for each in fields(task) if not callable(getattr(task, each.name))]
    found.update(repr((plain, task.digest(), task.measures)).encode())
    for length in () if task.texts else (task.shortest, task.length):
        drawn, tested = task.rows(length, 4, torch.Generator().manual_seed(0)), task.test(length, 4)
        for tensor in (*drawn, *tested, *_trial_scores(task, tested[1])):
            found.update(repr(tensor.tolist()).encode())
    return {f"task {name} ({Path(source_file(task)).name or 'no file'})": found.hexdigest()[:16]}


def check(name: str, task: Task, lengths: list[int], count: int = 8) -> None:
    """Raises ValueError that names the row, if a task's rows or its metric are invalid at one of the lengths."""
    for length in lengths:
        where = f"Task {name!r}, length {length:,}"
        drawn = _called(where, task.rows, length, count, torch.Generator().manual_seed(0))
        _check_rows(where, task, drawn, count)
        tested = _called(f"{where}, test rows", task.test, length, count)
        _check_rows(f"{where}, test rows", task, tested, None if task.test_rows else count)
        if tested[0].shape[1] != drawn[0].shape[1]:
            raise ValueError(
                f"{where}: rows have {drawn[0].shape[1]} tokens and then {tested[0].shape[1]}. All rows of a length must have "
                "the same number of tokens."
            )
        if not all(map(torch.equal, tested, task.test(length, count))):
            raise ValueError(f"{where}: test rows differ between two calls. Draw all random numbers from the generator.")
        for scores in _called(f"{where}, metric", _trial_scores, task, tested[1]):
            check_scores(where, task, scores, len(tested[1]))


def _called(where: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a task's function. Raises ValueError that names the line if the function raises an error."""
    try:
        return function(*arguments)
    except Exception as error:  # any error of the user's code
        raise ValueError(f"{where}: {described(error)}.") from error


def described(error: Exception) -> str:
    """An error in one line, with the place in the user's code, if there is any in the traceback."""
    lines = traceback.extract_tb(error.__traceback__)
    libraries = str(Path(hf_posenc.__file__).parent), "site-packages"
    line = next((each for each in reversed(lines) if not any(name in each.filename for name in libraries)), lines[-1])
    return f"{type(error).__name__}: {error} ({line.filename}, line {line.lineno})"


def _trial_scores(task: Task, labels: Tensor) -> list[Tensor]:
    """The scores of a custom metric for right predictions and for zeros."""
    if not callable(task.metric):
        return []
    labels = aligned(labels, task.head)
    return [task.metric(predictions, labels) for predictions in (labels.clamp(min=0), torch.zeros_like(labels))]


def _check_rows(where: str, task: Task, rows: Rows, count: int | None) -> None:
    if not (isinstance(rows, tuple) and len(rows) == 2 and all(isinstance(each, Tensor) for each in rows)):
        raise ValueError(f"{where}: rows returned {type(rows).__name__}. Return a tuple of two tensors, input_ids and labels.")
    input_ids, labels = rows
    if any(each.dtype != torch.long for each in rows):
        raise ValueError(f"{where}: the dtypes are {input_ids.dtype} and {labels.dtype}. Return two int64 tensors.")
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(f"{where}: input_ids has the shape {[*input_ids.shape]}. Return at least one row of tokens, [B, T].")
    if count is not None and len(input_ids) != count:
        raise ValueError(f"{where}: {count} rows were requested, and {len(input_ids)} were returned.")
    wanted = input_ids.shape[:1] if task.head == LABELS else input_ids.shape
    if labels.shape != wanted:
        raise ValueError(
            f"{where}: labels have the shape {[*labels.shape]}, but must have {[*wanted]} for head={task.head!r} and input_ids "
            f"{[*input_ids.shape]}."
        )
    limit = task.classes if task.head == LABELS else task.vocabulary
    labels = labels[:, None] if task.head == LABELS else labels
    for what, values, most in (("token", input_ids, task.vocabulary), ("label", labels, limit)):
        wrong = (values < 0) | (values >= most)
        if what == "label" and task.head != LABELS:
            wrong &= values != IGNORED
        for row, place in wrong.nonzero()[:1].tolist():
            raise ValueError(
                f"{where}, row {row}: the {what} at position {place} is {values[row, place]}, but must be from 0 to "
                f"{most - 1:,}."
            )
    if task.head == CAUSAL:
        for row, place in ((labels != IGNORED) & (labels != input_ids)).nonzero()[:1].tolist():
            raise ValueError(
                f"{where}, row {row}: the label at position {place} is {labels[row, place]}, but the token is "
                f"{input_ids[row, place]}. Give the token itself, not the next one."
            )
    unscored = (aligned(rows[1], task.head) == IGNORED).all(1)
    if count is None and not unscored.all():  # fixed test rows, such as pieces of a text, may include unscored ones
        return
    for row in unscored.nonzero()[:1].flatten().tolist():
        first = " The first token of a row can't be scored." if task.head == CAUSAL else ""
        raise ValueError(f"{where}, row {row}: no token is scored. Give at least one label other than {IGNORED}.{first}")


def check_scores(where: str, task: Task, scores: Tensor, count: int) -> None:
    """Raises ValueError if a custom metric's scores aren't one finite number for each row."""
    name = task.measures[0]
    if not isinstance(scores, Tensor) or scores.shape != (count,):
        found = [*scores.shape] if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"{where}: the metric {name} returned {found} for {count} rows. Return a tensor of shape [{count}].")
    for row in (~scores.double().isfinite()).nonzero()[:1].flatten().tolist():
        raise ValueError(f"{where}, row {row}: the metric {name} is {scores[row].item()}, but must be finite.")


def aligned(labels: Tensor, head: str) -> Tensor:
    """The labels that logits predict, `[B, P]`: all tokens but the first, all tokens, or one label per row."""
    return labels[:, 1:] if head == CAUSAL else labels[:, None] if head == LABELS else labels
