"""The output of commands: text, or with --json one JSON document on standard output and all messages on standard error."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from hf_posenc.evaluation.model_comparison import Row


_RESERVED: ContextVar[TextIO | None] = ContextVar("reserved", default=None)
"""The stream that documents are written to. None means standard output."""


def _reserve(context: typer.Context, as_json: bool) -> bool:
    """Reserves standard output until the command ends."""
    if as_json and not context.resilient_parsing:
        context.with_resource(_reserved_stdout())
    return as_json


@contextlib.contextmanager
def _reserved_stdout() -> Iterator[None]:
    """Keeps standard output for documents. Other output of this process and its children goes to standard error."""
    with contextlib.ExitStack() as ending:
        reserved = sys.stdout
        try:
            stdout, stderr = sys.stdout.fileno(), sys.stderr.fileno()
        except (OSError, ValueError):  # an in-memory stream, which child processes don't inherit
            pass
        else:
            sys.stdout.flush()
            reserved = ending.enter_context(os.fdopen(os.dup(stdout), "w", encoding=sys.stdout.encoding))
            ending.callback(os.dup2, reserved.fileno(), stdout)
            os.dup2(stderr, stdout)
        ending.enter_context(contextlib.redirect_stdout(sys.stderr))
        ending.callback(_RESERVED.reset, _RESERVED.set(reserved))
        yield


AsJson = Annotated[
    bool, typer.Option("--json", callback=_reserve, help="Print one JSON document, and messages on standard error.")
]


def by_length(
    title: str,
    cells: Mapping[int, Mapping[str, str]],
    what: str = "model",
    caption: str | None = None,
    models: Sequence[str] = (),
) -> Table:
    """A table with a row per model or method and a column per length.

    cells: length -> model or method -> text. models: if given, the methods of each model are adjacent.
    """
    table = Table(title=title, caption=caption)
    table.add_column(what, overflow="fold")
    for length in cells:
        table.add_column(f"{length} tokens", justify="right")
    names = list(dict.fromkeys(name for column in cells.values() for name in column))
    of_models = [name for model in models for name in names if name == model or name.startswith(f"{model}, ")]
    for name in dict.fromkeys([*of_models, *names]):
        table.add_row(name, *(column.get(name, "") for column in cells.values()))
    return table


def comparison(rows: Mapping[int, Mapping[str, "Row"]], title: str, models: Sequence[str] = ()) -> Table:
    """A comparison by length, with a row per method. models: if given, the methods of each model are adjacent."""
    from hf_posenc.evaluation.metrics import UNCORRECTED

    cells = {length: {name: _scored(row) for name, row in column.items()} for length, column in rows.items()}
    return by_length(title, cells, "method", UNCORRECTED, models)


def _scored(row: "Row") -> str:
    return f"{row.score.mrr:.3f}" + (f" ({row.difference.shown()})" if row.difference else "")


class Output:
    """The output of a command."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._console = Console(stderr=as_json, soft_wrap=True)

    def message(self, text: str) -> None:
        """Prints a line in addition to the result. With --json, it is printed on standard error."""
        self._console.print(text, markup=False, highlight=False)

    def result(self, shown: str | Table) -> None:
        """Prints a part of the result as text. --json omits it."""
        if self.as_json:
            return
        self._console.print(shown, markup=False)

    def document(self, values: Any) -> None:
        """Prints the result as JSON if --json is set. A command calls it once, at its end."""
        if self.as_json:
            from hf_posenc.diagnostics.result import plain

            self.plain_document(plain(values))

    def plain_document(self, values: Any) -> None:
        """The same as `document`, for values that JSON can represent."""
        if self.as_json:
            print(json.dumps(values, indent=2, allow_nan=False), file=_RESERVED.get(), flush=True)
