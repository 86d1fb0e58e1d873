"""hf-posenc extend"""

from pathlib import Path
from typing import Annotated

import typer

import hf_posenc
from hf_posenc.cli import app, console
from hf_posenc.cli.folders import Overwrite, check_output_dir, load, load_tokenizer, save
from hf_posenc.cli.patching import Submodel, given_settings
from hf_posenc.extension import CHOICE


@app.command("extend")
def extend(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a model, patched or not.")],
    output_dir: Annotated[Path, typer.Option(help="Where the model and its tokenizer are saved.")],
    max_length: Annotated[int | None, typer.Option(help="The new longest input in tokens, no shorter than before.")] = None,
    no_limit: Annotated[bool, typer.Option("--no-limit", help="Instead of --max-length: inputs of any length.")] = False,
    method: Annotated[str | None, typer.Option(help=f"How positions change; {CHOICE}. Default: they don't.")] = None,
    submodel: Submodel = None,
    option: Annotated[list[str] | None, typer.Option(help="A setting of the method, name=value; may be repeated.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Make a model take longer inputs, and save it with its tokenizer. Nothing learned is lost.

    A patched model whose encoding goes on by itself needs a new promise:

    [bold]hf-posenc extend bert-alibi --max-length 4096 --output-dir bert-alibi-4096[/]

    A learned table, or rotary positions, need a method:

    [bold]hf-posenc extend bert-base-uncased --max-length 2048 --method dynamic --output-dir bert-2048[/]

    [bold]hf-posenc extend gpt2 --max-length 4096 --method keep_first --option keep=64 --output-dir gpt2-4096[/]
    """
    if (max_length is None) != no_limit:
        raise ValueError("give the new longest input, --max-length or --no-limit")
    check_output_dir(output_dir, overwrite)
    settings = given_settings(option or [])
    extended = hf_posenc.extend(load(model), max_length, method, submodel=submodel, **settings)
    save(extended, model, output_dir)
    tokenizer, length = load_tokenizer(model), hf_posenc.inspect(extended).model_max_length
    if tokenizer is not None and tokenizer.model_max_length != length:
        console.print(f"The tokenizer's model_max_length was {tokenizer.model_max_length}, and is {length} now.")
