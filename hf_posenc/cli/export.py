"""hf-posenc export"""

from typing import Annotated

import typer

from hf_posenc.cli import ModelCommand, app
from hf_posenc.cli.arguments import OutputDir, Overwrite
from hf_posenc.cli.output import AsJson, Output


@app.command("export", cls=ModelCommand)
def export(
    model: Annotated[str, typer.Argument(help="Local path or Hub ID of a patched model.")],
    output_dir: OutputDir,
    max_length: Annotated[
        int | None,
        typer.Option(help="Number of tokens for tables, if the class has tables.", show_default="the model's maximum length"),
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Save a patched model as an equivalent class of Transformers, which loads without hf-posenc.

    [bold]hf-posenc export minilm-t5 --output-dir minilm-mpnet[/]
    """
    import hf_posenc
    from hf_posenc.cli.folders import Original, check_output_dir, inner_model, save
    from hf_posenc.conversion.exporting import without_unused_inputs

    check_output_dir(output_dir, overwrite)
    out, original = Output(as_json), Original.load(model)
    stock = hf_posenc.to_stock(original.model, max_length=max_length)
    if original.tokenizer is not None:
        without_unused_inputs(original.tokenizer, inner_model(stock))
    out.document(save(out, stock, original, output_dir))
