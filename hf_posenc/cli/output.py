"""What a command prints: text, or with --json one JSON document on standard output and every message on standard error."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from hf_posenc.evaluation.model_comparison import Row


_RESERVED: ContextVar[TextIO | None] = ContextVar("reserved", default=None)
"""What documents are written to; None for standard output."""


def _reserve(context: typer.Context, as_json: bool) -> bool:
    """Reserves standard output until the command ends."""
    if as_json and not context.resilient_parsing:
        context.with_resource(_reserved_stdout())
    return as_json


@contextlib.contextmanager
def _reserved_stdout() -> Iterator[None]:
    """Keeps standard output for documents. What this process, its libraries, or its children print goes to standard error."""
    with contextlib.ExitStack() as ending:
        reserved = sys.stdout
        try:
            stdout, stderr = sys.stdout.fileno(), sys.stderr.fileno()
        except (OSError, ValueError):  # a file in memory, which children don't have
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
    bool, typer.Option("--json", callback=_reserve, help="Print one JSON document; messages go to standard error.")
]


def by_length(title: str, cells: Mapping[int, Mapping[str, str]], what: str = "model", caption: str | None = None) -> Table:
    """A table with a row for each model and a column for each length. cells: length -> model -> text."""
    table = Table(what, title=title, caption=caption)
    for length in cells:
        table.add_column(f"{length} tokens", justify="right")
    for name in dict.fromkeys(name for column in cells.values() for name in column):
        table.add_row(name, *(column.get(name, "") for column in cells.values()))
    return table


def comparison(rows: Mapping[int, Mapping[str, "Row"]], title: str) -> Table:
    """A comparison by length, with a row for each method."""
    from hf_posenc.evaluation.metrics import UNCORRECTED

    cells = {length: {name: _scored(row) for name, row in column.items()} for length, column in rows.items()}
    return by_length(title, cells, "method", UNCORRECTED)


def _scored(row: "Row") -> str:
    return f"{row.score.mrr:.3f}" + (f" ({row.difference.shown()})" if row.difference else "")


class Output:
    """The output of one run of a command."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._console = Console(stderr=as_json, soft_wrap=True)

    def message(self, text: str) -> None:
        """A line in addition to the result, on standard error with --json."""
        self._console.print(text, markup=False, highlight=False)

    def result(self, shown: str | Table) -> None:
        """A part of the result for people. --json omits it."""
        if self.as_json:
            return
        self._console.print(shown, markup=False)

    def document(self, values: Any) -> None:
        """The result as JSON; nothing without --json. Once for each run of a command, at its end."""
        if self.as_json:
            from hf_posenc.diagnostics.result import plain

            self.plain_document(plain(values))

    def plain_document(self, values: Any) -> None:
        """The same for what JSON has words for."""
        if self.as_json:
            print(json.dumps(values, indent=2, allow_nan=False), file=_RESERVED.get(), flush=True)
