"""hf-posenc model-card"""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hf_posenc.cli import ModelCommand, app, console


@app.command("model-card", cls=ModelCommand)
def card(
    folder: Annotated[Path, typer.Argument(help="Local path of a saved model.", exists=True, file_okay=False)],
    repo_id: Annotated[str | None, typer.Option(help="Hub ID in the card.", show_default="the directory's name")] = None,
    figures: Annotated[
        list[str] | None, typer.Option(help="File name of an image next to the card. Can be repeated.", show_default="none")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Output file, such as README.md.", show_default="standard output")] = None,
) -> None:
    """Generate a model card from the model's config and evaluation, without reading weights.

    The tables show the results in evaluation.json in the model's directory. The training scripts write this file. The text of
    an existing output file is kept, and its metadata are updated.

    Example:
    [bold]hf-posenc model-card bert-alibi --repo-id me/bert-alibi --output bert-alibi/README.md[/]
    """
    import hf_posenc
    from hf_posenc.hub.cards import updated_card
    from hf_posenc.serialization import atomic

    existing = output.read_text(encoding="utf-8") if output and output.exists() else ""
    card_of = partial(hf_posenc.model_card, folder, repo_id or folder.resolve().name, figures=figures or ())
    text = updated_card(existing, lambda kept: card_of(metadata=kept))
    if output is None:
        print(text, end="")
    else:
        atomic.write_text(output, text)
        console.print(f"Model card written to {output}.", markup=False)
