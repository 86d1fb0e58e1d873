"""hf-posenc plot"""

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from hf_posenc.cli import app
from hf_posenc.cli.catalog import catalog


class Figures(TyperGroup):
    """Lists the figures of the catalog, and makes their commands when one is run, or torch is imported already."""

    def list_commands(self, ctx: Any) -> list[str]:
        if "hf_posenc.diagnostics.registry" in sys.modules:  # to which --import may have added
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
    help="Draw encodings, models, and records of what was measured: `hf-posenc plot vectors sinusoidal --output vectors.png`",
)
app.add_typer(kinds, name="plot")


def _placeholder() -> None:
    """Stands for a command in the list of all."""


for _name, _about in catalog()["figures"].items():
    kinds.command(_name.replace("_", "-"), help=_about)(_placeholder)
