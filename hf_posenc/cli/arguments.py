"""Arguments of several commands, and how their values are parsed."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_posenc.cli import completion
from hf_posenc.cli.catalog import catalog

LISTS = "A value may be JSON; a list is [1, 2] or 1,2."

ENCODING = 'A name, a composition "a+b", or JSON with "type".'

Encoding = Annotated[str, typer.Argument(help=ENCODING, autocompletion=completion.encodings)]
MaxLength = Annotated[
    int | None,
    typer.Option(
        help="Maximum length in tokens.", show_default="no limit for computed encodings, the model's own length for tables"
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        help=f"An option of the encoding, name=value or part__name=value. Can be repeated. {LISTS}",
        show_default="the encoding's, see hf-posenc list",
    ),
]
Layers = Annotated[str | None, typer.Option(help="A slice such as 3::4, or indices such as 0,2.", show_default="all layers")]
Submodel = Annotated[
    str | None,
    typer.Option(
        help="The submodel of a composite model (CLIP), as a dotted path. The error without it lists them.",
        show_default="the whole model",
    ),
]
Where = Annotated[
    str | None,
    typer.Option(
        help="One or more of encoder, decoder, cross, such as encoder,cross, or JSON with an encoding for each.",
        show_default="encoder,decoder",
        autocompletion=completion.one_of("where"),
    ),
]
Inject = Annotated[
    str,
    typer.Option(
        help=f"Where an additive encoding adds its vectors: {', '.join(catalog()['inject'])}.",
        autocompletion=completion.one_of("inject"),
    ),
]
KeepHost = Annotated[bool, typer.Option(help="Keep the model's own positions, for unpatch.")]
Overwrite = Annotated[bool, typer.Option(help="Replace the model and tokenizer in the output directory. Other files are kept.")]
MODEL = "Local path or Hub ID of a model, patched or not."
FILES = ".jsonl, .json, .csv, .parquet, or .txt"
Queries = Annotated[
    Path | None,
    typer.Option(help="20 rows or more: a `query` and the `document` it should find.", show_default="sentences of the texts"),
]
TextColumn = Annotated[str, typer.Option(help="The column of --texts.")]
OutputDir = Annotated[Path, typer.Option(help="The directory to save the model and its tokenizer in.")]


def given_encoding(given: str, options: list[str]) -> dict[str, Any]:
    encoding = _parsed(given) if given.startswith("{") else {"type": given}
    settings = given_settings(options)
    for name in settings:
        if name in ("type", "max_length", "layers", "submodel", "where", "inject", "original"):
            raise ValueError(f"--option {name}: {name!r} is no option of an encoding; see hf-posenc patch --help")
        if name in encoding:
            raise ValueError(f"--option {name}: {name!r} is given twice")
    return {**encoding, **settings}


def given_settings(options: list[str]) -> dict[str, Any]:
    """The values of --option name=value, by name."""
    from hf_posenc.encodings import parse_value

    settings: dict[str, Any] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not name or not equals:
            raise ValueError(f"--option {option!r}: give name=value")
        if name in settings:
            raise ValueError(f"--option {option!r}: {name!r} is given twice")
        settings[name] = parse_value(value)
    return settings


def given_where(text: str) -> Any:
    """The value of --where: a name, several with commas, or JSON."""
    from hf_posenc.encodings import parse_value

    value = parse_value(text)
    return [name.strip() for name in value.split(",")] if isinstance(value, str) and "," in value else value


def _parsed(encoding: str) -> dict[str, Any]:
    from hf_posenc.encodings import short_repr
    from hf_posenc.serialization.saved_files import parsed_json

    try:
        return parsed_json(encoding)
    except ValueError as error:
        raise ValueError(f"{short_repr(encoding)} is no JSON: {error}") from None
