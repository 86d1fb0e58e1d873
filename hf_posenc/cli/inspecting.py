"""hf-posenc inspect"""

import json
from dataclasses import asdict
from typing import Annotated

import typer

import hf_posenc
from hf_posenc.cli import app, console


@app.command("inspect")
def inspect(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a model, patched or not.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Report a model's position encoding: where it enters, the usable length, ignored settings.

    Only the config is read, no weights: [bold]hf-posenc inspect roberta-base[/]
    """
    report = hf_posenc.inspect(model)
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        console.print(str(report), markup=False)
