"""hf-posenc extend"""

from pathlib import Path
from typing import Annotated

import typer

import hf_posenc
from hf_posenc.cli import app
from hf_posenc.cli.folders import Overwrite, check_output_dir, load, save


@app.command("extend")
def extend(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a patched model.")],
    output_dir: Annotated[Path, typer.Option(help="Where the model and its tokenizer are saved.")],
    max_length: Annotated[int | None, typer.Option(help="The new longest input in tokens, no shorter than before.")] = None,
    no_limit: Annotated[bool, typer.Option("--no-limit", help="Instead of --max-length: inputs of any length.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Raise a patched model's promised length, and save it with its tokenizer. Nothing learned is lost.

    [bold]hf-posenc extend bert-alibi --max-length 4096 --output-dir bert-alibi-4096[/]
    """
    if (max_length is None) != no_limit:
        raise ValueError("give the new longest input, --max-length or --no-limit")
    check_output_dir(output_dir, overwrite)
    save(hf_posenc.extend(load(model), max_length), model, output_dir)
