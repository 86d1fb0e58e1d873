"""hf-posenc unpatch"""

import warnings
from pathlib import Path
from typing import Annotated

import typer

import hf_posenc
from hf_posenc.cli import app, console
from hf_posenc.cli.folders import Overwrite, check_output_dir, load, save


@app.command("unpatch")
def unpatch(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a patched model.")],
    output_dir: Annotated[Path, typer.Option(help="Where the stock model and its tokenizer are saved.")],
    overwrite: Overwrite = False,
) -> None:
    """Give a patched model its own positions back, and save it with its tokenizer.

    [bold]hf-posenc unpatch bert-alibi --output-dir bert[/]
    """
    check_output_dir(output_dir, overwrite)
    patched = load(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        stock = hf_posenc.unpatch(patched)
    save(stock, model, output_dir)
    for warning in caught:
        console.print(f"Note: {warning.message}", markup=False)
