"""hf-posenc extend"""

from typing import Annotated

import typer

from hf_posenc.cli import ModelCommand, app, completion
from hf_posenc.cli.arguments import LISTS, MODEL, OutputDir, Overwrite, Submodel, given_settings
from hf_posenc.cli.catalog import catalog
from hf_posenc.cli.output import AsJson, Output

METHODS = catalog()["extend_methods"]


@app.command("extend", cls=ModelCommand)
def extend(
    model: Annotated[str, typer.Argument(help=MODEL)],
    output_dir: OutputDir,
    max_length: Annotated[
        int | None,
        typer.Option(help="New maximum length in tokens, not below the old one.", show_default="none: give it, or --no-limit"),
    ] = None,
    no_limit: Annotated[bool, typer.Option("--no-limit", help="Remove the maximum length.")] = False,
    method: Annotated[
        str | None,
        typer.Option(
            help=f"How positions change: {METHODS}.", show_default="none", autocompletion=completion.one_of("methods")
        ),
    ] = None,
    submodel: Submodel = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A setting of the method, name=value. Can be repeated. {LISTS}",
            show_default="the method's, see docs/reference/extend_methods.md",
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Extend a model to longer inputs, and save it with its tokenizer. Its weights are kept.

    A patched model whose encoding has no length limit needs only a new maximum length:

    [bold]hf-posenc extend bert-alibi --max-length 4096 --output-dir bert-alibi-4096[/]

    Learned position embeddings and rotary embeddings need a method:

    [bold]hf-posenc extend bert-base-uncased --max-length 2048 --method dynamic --output-dir bert-2048[/]

    [bold]hf-posenc extend gpt2 --max-length 4096 --method keep_first --option keep=64 --output-dir gpt2-4096[/]
    """
    import hf_posenc
    from hf_posenc.cli.folders import Original, check_output_dir, save

    if max_length is None and not no_limit:
        raise ValueError("give the new maximum length, --max-length or --no-limit")
    if max_length is not None and no_limit:
        raise ValueError(f"--max-length {max_length} and --no-limit: give one of them, not both")
    check_output_dir(output_dir, overwrite)
    settings = given_settings(option or [])
    out, original = Output(as_json), Original.load(model)
    extended = hf_posenc.extend(original.model, max_length, method, submodel=submodel, **settings)
    out.document(save(out, extended, original, output_dir, submodel))
