"""hf-posenc unpatch"""

from typing import Annotated

import typer

from hf_posenc.cli import ModelCommand, app
from hf_posenc.cli.arguments import OutputDir, Overwrite, Submodel
from hf_posenc.cli.output import AsJson, Output


@app.command("unpatch", cls=ModelCommand)
def unpatch(
    model: Annotated[str, typer.Argument(help="Local path or Hub ID of a patched model.")],
    output_dir: OutputDir,
    submodel: Submodel = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Restore a patched model's original positions, and save the model with its tokenizer.

    Example:
    [bold]hf-posenc unpatch bert-alibi --output-dir bert[/]
    """
    import hf_posenc
    from hf_posenc.cli.folders import Original, check_output_dir, inner_model, save

    check_output_dir(output_dir, overwrite)
    out, original = Output(as_json), Original.load(model)
    stock = hf_posenc.unpatch(original.model, submodel=submodel)
    saved = save(out, stock, original, output_dir, inner_model(original.model).config.position_spec.submodel)
    out.document(saved)
