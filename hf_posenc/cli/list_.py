"""hf-posenc list"""

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hf_posenc.cli import Command, app
from hf_posenc.cli.catalog import encodings
from hf_posenc.cli.output import AsJson, Output


@app.command("list", cls=Command)
def list_(
    as_json: AsJson = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/reference/encodings.md.")] = False,
) -> None:
    """List all encodings with their aliases, mechanisms, learned parameters, options, and papers.

    Options are listed with their defaults and allowed values. The numbers of parameters are those of a model of BERT-base's
    size with 512 positions. A model can have several encodings, such as "sinusoidal+alibi".

    Example:
    [bold]hf-posenc list --json[/]
    """
    if as_json and as_markdown:
        raise ValueError("--json and --markdown exclude each other. Set only one of them.")
    if as_markdown:
        from hf_posenc.encodings import catalog

        print(catalog.as_markdown(), end="")
        return
    out, rows = Output(as_json), encodings()
    out.result(_table(rows))
    out.plain_document({name: {key: value for key, value in row.items() if key != "facts"} for name, row in rows.items()})


def _table(rows: dict[str, Any]) -> Table:
    table = Table("name", "mechanism", "description and options", leading=1)
    for name, row in rows.items():
        aliases = [f"[dim]{alias}{_preset(options)}[/]" for alias, options in row["aliases"].items()]
        options = [
            escape(f"{option} = {said['default']!r}" if "default" in said else option) + f"[dim]: {escape(said['allowed'])}[/]"
            for option, said in row["options"].items()
        ]
        facts = ", ".join(f"[dim]{heading}:[/] {escape(fact)}" for heading, fact in [*row["facts"].items()][1:])
        cells = (
            [f"[bold]{name}[/]", *aliases],
            row["mechanisms"],
            [*filter(None, [escape(row["title"])]), facts, *options, *row["papers"]],
        )
        table.add_row(*(Text.from_markup("\n".join(cell)) for cell in cells))
    return table


def _preset(options: dict[str, Any]) -> str:
    return escape("".join(f"\n  {name}={value!r}" for name, value in options.items()))
