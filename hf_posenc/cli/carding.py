"""hf-posenc card"""

from pathlib import Path
from typing import Annotated

import typer

import hf_posenc
from hf_posenc.cards import replaceable
from hf_posenc.cli import app, console


@app.command("card")
def card(
    folder: Annotated[Path, typer.Argument(help="Folder of a saved model.", exists=True, file_okay=False)],
    repo_id: Annotated[str | None, typer.Option(help="What the model is to be loaded by; default: the folder's name.")] = None,
    figure: Annotated[list[str] | None, typer.Option(help="Name of an image beside the card; may be repeated.")] = None,
    output: Annotated[Path | None, typer.Option(help="The file to write, README.md; default: to the screen.")] = None,
) -> None:
    """The model card, from the model's config and what was measured of it. No weights are read.

    [bold]hf-posenc card bert-alibi --repo-id me/bert-alibi --output bert-alibi/README.md[/]

    Figures in its tables are those of evaluation.json in the folder, which the training scripts write.
    """
    there = output.read_text(encoding="utf-8") if output and output.exists() else ""
    if (kept := replaceable(there)) is None:
        raise ValueError(f"{output} was written by hand, and stays as it is: choose another --output")
    text = hf_posenc.model_card(folder, repo_id or folder.resolve().name, figures=figure or (), metadata=kept)
    if output is None:
        print(text, end="")
    else:
        output.write_text(text, encoding="utf-8")
        console.print(f"written to {output}", markup=False)
