"""Arguments that several commands share, and parsers for their values."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_posenc.cli import completion
from hf_posenc.cli.catalog import catalog

LISTS = "Values can be JSON. Lists: [1, 2] or 1,2."

ENCODING = 'Encoding name, composition "a+b", or JSON with "type".'

Encoding = Annotated[str, typer.Argument(help=ENCODING, autocompletion=completion.encodings)]
MaxLength = Annotated[
    int | None,
    typer.Option(
        help="Maximum length in tokens.", show_default="no limit; for position embeddings, the model's maximum length"
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Option of the encoding: name=value or part__name=value. Can be repeated. {LISTS}",
        show_default="see hf-posenc list",
    ),
]
Layers = Annotated[str | None, typer.Option(help="Layers to apply the encoding in: 3::4 or 0,2.", show_default="all")]
Submodel = Annotated[
    str | None,
    typer.Option(
        help="Dotted path of the submodel to use in a composite model such as CLIP (for example, text_model).",
        show_default="none",
    ),
]
Where = Annotated[
    str | None,
    typer.Option(
        help="Encoder-decoder models: where the encoding applies (encoder, decoder, cross; comma-separated), or JSON that maps "
        "each to an encoding.",
        show_default="encoder,decoder",
        autocompletion=completion.one_of("where"),
    ),
]
Inject = Annotated[
    str,
    typer.Option(
        help=f"Where an additive encoding is added: {', '.join(catalog()['inject'][:-1])}, or {catalog()['inject'][-1]}.",
        autocompletion=completion.one_of("inject"),
    ),
]
KeepHost = Annotated[bool, typer.Option(help="Keep the original positions for hf-posenc unpatch.")]
Overwrite = Annotated[bool, typer.Option(help="Replace the model and tokenizer in the output directory. Other files are kept.")]
MODEL = "Local path or Hub ID of a model, patched or not."
FILES = ".jsonl, .json, .csv, .parquet, or .txt"
Queries = Annotated[
    Path | None,
    typer.Option(help="File with at least 20 rows, columns `query` and `document`.", show_default="generated from --texts"),
]
TextColumn = Annotated[str, typer.Option(help="Column of --texts that contains the texts.")]
OutputDir = Annotated[Path, typer.Option(help="Output directory for the model and its tokenizer.")]


def given_encoding(given: str, options: list[str]) -> dict[str, Any]:
    encoding = _parsed(given) if given.startswith("{") else {"type": given}
    settings = given_settings(options)
    for name in settings:
        if name in ("type", "max_length", "layers", "submodel", "where", "inject", "original"):
            raise ValueError(f"--option {name}: {name!r} isn't an option of an encoding. See hf-posenc patch --help.")
        if name in encoding:
            raise ValueError(f"--option {name}: {name!r} is set twice. Set it once.")
    return {**encoding, **settings}


def given_settings(options: list[str]) -> dict[str, Any]:
    """The values of --option name=value by name."""
    from hf_posenc.encodings import parse_value

    settings: dict[str, Any] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not name or not equals:
            raise ValueError(f"--option {option!r} must have the form name=value.")
        if name in settings:
            raise ValueError(f"--option {option!r}: {name!r} is set twice. Set it once.")
        settings[name] = parse_value(value)
    return settings


def given_where(text: str) -> Any:
    """The parsed value of --where: a name, several names separated by commas, or JSON."""
    from hf_posenc.encodings import parse_value

    value = parse_value(text)
    return [name.strip() for name in value.split(",")] if isinstance(value, str) and "," in value else value


def _parsed(encoding: str) -> dict[str, Any]:
    from hf_posenc.encodings import short_repr
    from hf_posenc.serialization.saved_files import parsed_json

    try:
        return parsed_json(encoding)
    except ValueError as error:
        raise ValueError(f"{short_repr(encoding)} isn't valid JSON: {error}") from None
