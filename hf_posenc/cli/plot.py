"""hf-posenc plot"""

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from hf_posenc.cli import app
from hf_posenc.cli.catalog import catalog


class Figures(TyperGroup):
    """Lists the figures of the catalog. Creates their commands when one is run, or if torch has already been imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        if "hf_posenc.diagnostics.registry" in sys.modules:  # --import can register figures
            self._make_commands()
        return super().list_commands(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self._make_commands()
        return super().resolve_command(ctx, args)

    def _make_commands(self) -> None:
        from hf_posenc.cli import figures

        self.commands = figures.commands()


kinds = typer.Typer(
    cls=Figures,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Plot encodings, models, and records of studies.\n\n"
    "Example:\n[bold]hf-posenc plot vectors sinusoidal --output vectors.png[/]",
)
app.add_typer(kinds, name="plot")


def _placeholder() -> None:
    """A placeholder for a command in the list of commands."""


for _name, _about in catalog()["figures"].items():
    kinds.command(_name.replace("_", "-"), help=_about)(_placeholder)
