"""hf-posenc plot: the kinds that show a model"""

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_posenc import diagnostics, plots
from hf_posenc.cli.folders import load, names_of
from hf_posenc.cli.plot import Dark, Output, kinds, said
from hf_posenc.cli.texts import read
from hf_posenc.diagnostics import Result
from hf_posenc.plots.style import checked_path
from hf_posenc.serialization.saved_files import read_json
from hf_posenc.serialization.tokenizer_files import load_tokenizer

MODEL = "Folder or Hub id of a model, patched or not; or a .json file with what hf_posenc.diagnostics measured (to_json)."
Model = Annotated[str, typer.Argument(help=MODEL)]
Models = Annotated[list[str], typer.Argument(help=f"One or more. {MODEL}")]
Texts = Annotated[
    Path | None,
    typer.Option(
        help="Texts of the model's kind: .jsonl, .json, .csv, .parquet, or .txt.", show_default="none, for .json files"
    ),
]
Column = Annotated[str, typer.Option(help="The column of --texts.")]
Count = Annotated[int, typer.Option(min=1, help="How many of the texts are read, from the first.")]
Length = Annotated[int, typer.Option(help="Texts are cut to so many tokens.")]
Layer = Annotated[list[int] | None, typer.Option(help="From 0; may be repeated.", show_default="up to 4")]


@kinds.command("probing")
def probing(
    model: Model,
    output: Output,
    length: Annotated[int, typer.Option(help="How often a word is repeated.")] = 32,
    layer: Layer = None,
    head: Annotated[list[int] | None, typer.Option(help="From 0; may be repeated.", show_default="up to 6")] = None,
    dark: Dark = False,
) -> None:
    """Attention among identical words, where position alone decides.

    [bold]hf-posenc plot probing bert-base-uncased --output probing.png[/]
    """
    checked_path(output)
    result = _given(model) or diagnostics.probing(load(model), length=length)
    plots.probing(result, layers=layer or None, heads=head or None, dark=dark, path=output)
    said(output)


@kinds.command("attention")
def attention(
    models: Models,
    output: Output,
    texts: Texts = None,
    text_column: Column = "text",
    count: Count = 8,
    length: Length = 256,
    layer: Layer = None,
    dark: Dark = False,
) -> None:
    """Attention by distance, on texts.

    [bold]hf-posenc plot attention bert-base-uncased bert-alibi --texts my.jsonl --output attention.png[/]
    """
    found = _measured(diagnostics.attention_by_distance, models, output, texts, text_column, count, length=length)
    plots.attention(found, layers=layer or None, dark=dark, path=output)
    said(output)


@kinds.command("receptive-field")
def receptive_field(
    models: Models,
    output: Output,
    texts: Texts = None,
    text_column: Column = "text",
    count: Count = 8,
    length: Length = 256,
    dark: Dark = False,
) -> None:
    """How far away the tokens are on which a state depends.

    [bold]hf-posenc plot receptive-field bert-base-uncased --texts my.jsonl --output field.png[/]
    """
    found = _measured(diagnostics.receptive_field, models, output, texts, text_column, count, length=length)
    plots.receptive_field(found, dark=dark, path=output)
    said(output)


@kinds.command("length-curve")
def length_curve(
    models: Models,
    output: Output,
    texts: Texts = None,
    text_column: Column = "text",
    count: Count = 8,
    dark: Dark = False,
) -> None:
    """How well the same tokens are read behind more and more text.

    [bold]hf-posenc plot length-curve gpt2 gpt2-alibi --texts my.jsonl --output curve.png[/]
    """
    found = _measured(diagnostics.length_curve, models, output, texts, text_column, count)
    plots.length_curve(found, dark=dark, path=output)
    said(output)


def _measured(
    measure: Any, models: list[str], output: Path, texts: Path | None, column: str, count: int, **options: Any
) -> dict[str, Any]:
    """Name -> result, of each model, measured on the texts, or of a file."""
    checked_path(output)
    found: dict[str, Any] = {}
    for name, model in zip(names_of(models), models, strict=True):
        result = _given(model)
        if result is None:
            if texts is None:
                raise ValueError(f"{model} is measured on texts: give a file of them as --texts")
            rows = [text for (text,) in read(texts, {"--text-column": column})][:count]
            loaded = load(model)
            tokenizer = getattr(loaded, "tokenizer", None) or load_tokenizer(model)
            result = measure(loaded, rows, tokenizer=tokenizer, **options)
        found[name] = result
    return found


def _given(model: str) -> Any:
    """The result that a .json file holds; None for a model."""
    file = Path(model)
    if file.suffix != ".json":
        return None
    try:
        return Result.from_dict(read_json(file))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no result of hf_posenc.diagnostics, as to_json writes it: {error}") from None
