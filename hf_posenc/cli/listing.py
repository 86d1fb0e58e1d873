"""hf-posenc list"""

import json
import sys
from typing import Annotated, Any

import typer
from rich.table import Table

import hf_posenc
from hf_posenc.cli import app, console


@app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """All encodings, with their options and defaults.

    Several can be put into one model: "sinusoidal+alibi".
    """
    rows = {name: _described(kind) for name, kind in hf_posenc.list_encodings().items()}
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("name", "acts by", "options", "paper")
    for name, row in rows.items():
        aliases = f"\n[dim]{', '.join(row['aliases'])}[/]" if row["aliases"] else ""
        options = "\n".join(f"{option} = {default!r}" for option, default in row["options"].items())
        table.add_row(f"[bold]{name}[/]{aliases}", "\n".join(row["acts_by"]), options, row["paper"])
    console.print(table)


def _described(kind: type[hf_posenc.PositionEncoding]) -> dict[str, Any]:
    title = (sys.modules[kind.__module__].__doc__ or "").partition("\n")[0]
    return {
        "aliases": list(kind.aliases),
        "acts_by": list(kind.acts_by()),
        "options": {option: getattr(kind, option, None) for option in kind.option_types()},
        "paper": next((word for word in title.split() if word.startswith("https://")), "").rstrip(","),
    }
