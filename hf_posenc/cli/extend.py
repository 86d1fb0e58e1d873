"""hf-posenc extend"""

from typing import Annotated

import typer

from hf_posenc.cli import ModelCommand, app, completion
from hf_posenc.cli.arguments import LISTS, MODEL, OutputDir, Overwrite, Submodel, given_settings
from hf_posenc.cli.catalog import catalog
from hf_posenc.cli.output import AsJson, Output

METHODS = " ".join(f"{kind}: {', '.join(names)}." for kind, names in catalog()["extend_methods"].items())


@app.command("extend", cls=ModelCommand)
def extend(
    model: Annotated[str, typer.Argument(help=MODEL)],
    output_dir: OutputDir,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="New maximum length in tokens. Required unless --no-limit or --image-size is set.", show_default="none"
        ),
    ] = None,
    no_limit: Annotated[bool, typer.Option("--no-limit", help="Remove the maximum length.")] = False,
    method: Annotated[
        str | None,
        typer.Option(help=f"Extension method. {METHODS}", show_default="none", autocompletion=completion.one_of("methods")),
    ] = None,
    image_size: Annotated[
        str | None,
        typer.Option(help="New image size in pixels instead, one number or height,width.", show_default="none"),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(help="The half of an original encoder-decoder to extend: encoder or decoder.", show_default="both"),
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
    """Extend a model to longer inputs, and save it with its tokenizer.

    The weights don't change. Encodings without a length limit need only a new maximum length. Learned position embeddings and
    RoPE also need a method.

    Examples:
    [bold]hf-posenc extend bert-alibi --max-length 4096 --output-dir bert-alibi-4096[/]
    [bold]hf-posenc extend bert-base-uncased --max-length 2048 --method dynamic --output-dir bert-2048[/]
    [bold]hf-posenc extend gpt2 --max-length 4096 --method keep_first --option keep=64 --output-dir gpt2-4096[/]
    [bold]hf-posenc extend google/vit-base-patch16-224 --image-size 384 --output-dir vit-384[/]
    """
    import hf_posenc
    from hf_posenc.cli.folders import Original, check_output_dir, save
    from hf_posenc.encodings import parse_value

    if max_length is None and not no_limit and image_size is None:
        raise ValueError("The new maximum length is missing. Set --max-length, --no-limit, or --image-size.")
    if max_length is not None and no_limit:
        raise ValueError(f"--max-length {max_length} and --no-limit exclude each other. Set only one of them.")
    check_output_dir(output_dir, overwrite)
    settings = given_settings(option or [])
    size = None if image_size is None else parse_value(image_size)
    out, original = Output(as_json), Original.load(model)
    extended = hf_posenc.extend(original.model, max_length, method, image_size=size, submodel=submodel, where=where, **settings)
    out.document(save(out, extended, original, output_dir, submodel, size))
