"""What a command prints: text, or with --json one JSON document on standard output and every message on standard error."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document; messages go to standard error.")]


class Output:
    """The output of one run of a command."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._console = Console(stderr=as_json, soft_wrap=True)

    def message(self, text: str) -> None:
        """A line beside the result; on standard error with --json."""
        self._console.print(text, markup=False, highlight=False)

    def result(self, shown: str | Table) -> None:
        """A part of the result for people; --json leaves it out, since the document has it."""
        if self.as_json:
            return
        self._console.print(shown, markup=False)

    def document(self, values: Any) -> None:
        """The result as JSON; nothing without --json. Once for each run of a command, at its end."""
        if self.as_json:
            print(json.dumps(values, indent=2))
