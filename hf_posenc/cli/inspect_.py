"""hf-posenc inspect"""

from dataclasses import asdict
from typing import Annotated

import typer

from hf_posenc.cli import ModelCommand, app
from hf_posenc.cli.arguments import MODEL, Submodel
from hf_posenc.cli.output import AsJson, Output


@app.command("inspect", cls=ModelCommand)
def inspect(
    model: Annotated[str, typer.Argument(help=MODEL)],
    submodel: Submodel = None,
    as_json: AsJson = False,
) -> None:
    """Show a model's position encoding, where it is applied, its maximum length, and ignored settings.

    The command reads only the config, not the weights.

    Examples:
    [bold]hf-posenc inspect roberta-base[/]
    [bold]hf-posenc inspect openai/clip-vit-base-patch32 --submodel text_model --json[/]
    """
    import hf_posenc
    from hf_posenc.serialization.saved_files import check_there

    check_there(model)
    out, report = Output(as_json), hf_posenc.inspect(model, submodel=submodel)
    out.result(str(report))
    out.document(asdict(report))
