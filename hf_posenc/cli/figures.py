"""The commands of `hf-posenc plot`. Each figure of hf_posenc.plots has a command with the options of its signature."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_posenc import plots  # noqa: F401  # registers the figures
from hf_posenc.cli import ModelCommand, console
from hf_posenc.cli.arguments import ENCODING, FILES, MODEL, Encoding, Options, TextColumn, given_encoding
from hf_posenc.cli.folders import load, names_of
from hf_posenc.cli.texts import texts_in
from hf_posenc.diagnostics.figures import checked_path
from hf_posenc.diagnostics.registry import FIGURES, Figure
from hf_posenc.serialization.saved_files import read_json
from hf_posenc.serialization.tokenizer_files import load_tokenizer

Output = Annotated[Path, typer.Option(help="Output file: .png, .svg, or .pdf.")]


def _encoding(encoding: Encoding, *, option: Options = None) -> dict[str, Any]:
    return given_encoding(encoding, option or [])


def _encodings(
    encodings: Annotated[list[str], typer.Argument(help=f"One or more. {ENCODING}")], *, option: Options = None
) -> list[dict[str, Any]]:
    if option and len(encodings) > 1:
        raise ValueError(
            f"--option {option[0]!r} applies to a single encoding. With several encodings, pass options as JSON: "
            '\'{"type": "rope", "theta": 100}\''
        )
    return [given_encoding(each, option or []) for each in encodings]


def _record(record: Annotated[Path, typer.Argument(help="JSON record, or the directory of a study.")]) -> Any:
    return read_json(record / "compare.json" if record.is_dir() else record)


def _result(measure: Callable[..., Any], model: Annotated[str, typer.Argument(help=MODEL)], **options: Any) -> Any:
    return measure(load(model), **options)


def _results(
    measure: Callable[..., Any],
    models: Annotated[list[str], typer.Argument(help=f"One or more. {MODEL}")],
    *,
    texts: Annotated[Path, typer.Option(help=f"File with in-domain texts ({FILES}).")],
    text_column: TextColumn = "text",
    count: Annotated[int, typer.Option(min=1, help="Number of texts, from the start.")] = 8,
    **options: Any,
) -> dict[str, Any]:
    rows, found = texts_in(texts, text_column)[:count], {}
    for name, model in zip(names_of(models), models, strict=True):
        loaded = load(model)
        tokenizer = getattr(loaded, "tokenizer", None) or load_tokenizer(model)
        found[name] = measure(loaded, rows, tokenizer=tokenizer, **options)
    return found


READERS: dict[str, Callable[..., Any]] = {
    "encoding": _encoding,
    "encodings": _encodings,
    "record": _record,
    "result": _result,
    "results": _results,
}
"""The subject of a figure -> the function that reads it from arguments. For models, its first argument is the diagnostic."""


def _options(function: Callable[..., Any], settings: dict[str, Any]) -> list[inspect.Parameter]:
    """The arguments of a function that have a `Help`, as options. settings: defaults that differ."""
    found = []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        for help_ in getattr(parameter.annotation, "__metadata__", ()):
            kind, flag = parameter.annotation.__origin__, "--" + parameter.name.replace("_", "-")
            names = {bool: [flag], Sequence[int] | None: [flag.removesuffix("s")]}.get(kind, [])
            option = typer.Option(*names, help=help_.text, show_default=help_.default or True)
            taken: Any = list[int] | None if kind == Sequence[int] | None else kind
            default = settings.get(parameter.name, parameter.default)
            found.append(parameter.replace(annotation=Annotated[taken, option], default=default, kind=parameter.KEYWORD_ONLY))
    return found


def _command(figure: Figure) -> Callable[..., None]:
    """The command that draws a figure."""
    subject, read_subject, arguments = figure.subject, None, []
    if subject is not None:
        reader = READERS[subject.name]
        read_subject = partial(reader, figure.measure) if figure.measure else reader
        arguments = [
            each for each in inspect.signature(read_subject, eval_str=True).parameters.values() if each.kind != each.VAR_KEYWORD
        ]
        if subject.default is not subject.empty:
            arguments[0] = arguments[0].replace(default=subject.default)
        if figure.measure:
            arguments += _options(figure.measure, figure.settings)
    output = inspect.Parameter("output", inspect.Parameter.KEYWORD_ONLY, annotation=Output)
    parameters = [*arguments, output, *_options(figure.draw, {})]

    def command(output: Path, **given: Any) -> None:
        checked_path(output)
        given = {name: None if value == [] else value for name, value in given.items()}
        of_subject = {each.name: given.pop(each.name) for each in arguments}
        subjects = [] if read_subject is None else [read_subject(**of_subject)]
        figure.draw(*subjects, path=output, **given)
        console.print(f"Figure written to {output}.", markup=False, highlight=False)

    command.__signature__ = inspect.Signature([each.replace(kind=each.KEYWORD_ONLY) for each in parameters])  # type: ignore[attr-defined]
    return command


def commands() -> dict[str, Any]:
    """The command of each registered figure, by name."""
    kinds = typer.Typer(rich_markup_mode="rich", no_args_is_help=True)
    for name, figure in sorted(FIGURES.items()):
        kind = name.replace("_", "-")
        about = inspect.getdoc(figure.draw).partition("\n\n")[0]
        example = f"Example:\n[bold]hf-posenc plot {kind} {figure.example} --output {kind}.png[/]"
        kinds.command(kind, cls=ModelCommand, help=f"{about}\n\n{example}")(_command(figure))
    return typer.main.get_command(kinds).commands  # type: ignore[attr-defined]
