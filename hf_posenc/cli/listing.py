"""hf-posenc list"""

import json
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

import hf_posenc
from hf_posenc.cli import app, console
from hf_posenc.encodings import described


@app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List all encodings: aliases, how they act, options with defaults and allowed values, papers.

    One model can have several, as in "sinusoidal+alibi": [bold]hf-posenc list --json[/]
    """
    rows = {name: _row(kind) for name, kind in hf_posenc.list_encodings().items()}
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("name", "acts by", "what it is, and its options", leading=1)
    for name, row in rows.items():
        aliases = [f"[dim]{alias}{_preset(options)}[/]" for alias, options in row["aliases"].items()]
        options = [
            escape(f"{option} = {spec['default']!r}" if "default" in spec else option) + f"[dim]: {escape(spec['allowed'])}[/]"
            for option, spec in row["options"].items()
        ]
        table.add_row(
            "\n".join([f"[bold]{name}[/]", *aliases]),
            "\n".join(row["acts_by"]),
            "\n".join([*filter(None, [escape(row["title"])]), *options, *row["papers"]]),
        )
    console.print(table)


def _preset(options: dict[str, Any]) -> str:
    return escape("".join(f"\n  {name}={value!r}" for name, value in options.items()))


def _row(kind: type[hf_posenc.PositionEncoding]) -> dict[str, Any]:
    return {
        "title": kind.title,
        "aliases": kind.aliases,
        "acts_by": kind.acts_by(),
        "options": {
            option: ({"default": getattr(kind, option)} if hasattr(kind, option) else {}) | {"allowed": described(annotation)}
            for option, annotation in kind.option_types().items()
        },
        "papers": kind.paper,
    }
