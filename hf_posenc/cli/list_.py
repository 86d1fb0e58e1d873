"""hf-posenc list"""

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hf_posenc.cli import app
from hf_posenc.cli.catalog import encodings
from hf_posenc.cli.output import AsJson, Output


@app.command("list")
def list_(
    as_json: AsJson = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/reference/encodings.md.")] = False,
) -> None:
    """List all encodings: aliases, how they act, what they learn, options with defaults and allowed values, papers.

    Parameters are counted at BERT-base's size, of 512 positions. One model can have several encodings, as in
    "sinusoidal+alibi".

    [bold]hf-posenc list --json[/]
    """
    if as_json and as_markdown:
        raise ValueError("--json and --markdown are two forms of one table: give one of them")
    if as_markdown:
        from hf_posenc.encodings import catalog

        print(catalog.as_markdown(), end="")
        return
    out, rows = Output(as_json), encodings()
    out.result(_table(rows))
    out.plain_document({name: {key: value for key, value in row.items() if key != "facts"} for name, row in rows.items()})


def _table(rows: dict[str, Any]) -> Table:
    table = Table("name", "acts by", "what it is, and its options", leading=1)
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
