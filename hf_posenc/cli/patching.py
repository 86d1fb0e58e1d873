"""hf-posenc patch"""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

import hf_posenc
from hf_posenc.cli import app, console
from hf_posenc.cli.folders import SENTENCE_CLASSES, Overwrite, asks_for_its_own, check_output_dir, load, load_v4, save
from hf_posenc.spec import lost_within

Encoding = Annotated[str, typer.Argument(help='A name, a composition "a+b", or JSON with "type".')]
MaxLength = Annotated[int | None, typer.Option(help="The longest input in tokens; default: see hf_posenc.patch.")]
Options = Annotated[list[str] | None, typer.Option(help="name=value, or part__name=value; may be repeated.")]
Layers = Annotated[str | None, typer.Option(help="A slice such as 3::4, or a JSON list of layer indices; default: all layers.")]

Submodel = Annotated[
    str | None,
    typer.Option(help="Of a model made of several (CLIP), the one to change; the error without it names them."),
]
Where = Annotated[
    str | None,
    typer.Option(help="Of an encoder and a decoder, which: encoder, decoder, cross, or JSON, a list or an encoding for each."),
]


@app.command("patch")
def patch(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a model that isn't patched.")],
    encoding: Encoding,
    output_dir: Annotated[Path, typer.Option(help="Where the patched model and its tokenizer are saved.")],
    max_length: MaxLength = None,
    option: Options = None,
    layers: Layers = None,
    submodel: Submodel = None,
    where: Where = None,
    inject: Annotated[str, typer.Option(help="input, every_layer or after_attention.")] = "input",
    keep_host: Annotated[bool, typer.Option(help="Keep the host's own positions, for unpatch.")] = True,
    overwrite: Overwrite = False,
) -> None:
    """Replace a model's positions by an encoding, and save it with its tokenizer.

    A folder of sentence-transformers comes back as one, with all its modules, if that package is installed.

    [bold]hf-posenc patch bert-base-uncased alibi --max-length 2048 --output-dir bert-alibi[/]

    A checkpoint of Transformers v4 with relative_key or relative_key_query gets that encoding with its own vectors, which
    Transformers 5 drops.

    [bold]hf-posenc patch bert-base-uncased sinusoidal+alibi --option sinusoidal__base=5000 --output-dir both[/]

    [bold]hf-posenc patch openai/clip-vit-base-patch32 alibi --submodel text_model --output-dir clip-alibi[/]
    """
    check_output_dir(output_dir, overwrite)
    chosen = given_encoding(encoding, option or [])
    if asks_for_its_own(model, chosen):
        others = {"--layers": layers, "--submodel": submodel, "--where": where, "--inject": inject != "input" or None}
        if meant := [name for name, value in others.items() if value is not None]:
            raise ValueError(f"{meant[0]} can't be given for the relative positions that {model} has: leave it out")
        save(load_v4(model, max_length), model, output_dir)
        console.print("These are the checkpoint's own vectors of distances: its outputs are those of Transformers v4.")
        return
    some = {} if layers is None else {"layers": option_value(layers)}
    original = load(model)
    wrong = lost_within(original)
    patched = hf_posenc.patch(
        original,
        chosen,
        max_length=max_length,
        submodel=submodel,
        where=None if where is None else option_value(where),
        inject=inject,
        keep_host=keep_host,
        **some,
    )
    save(patched, model, output_dir)
    lost = "A trained model has lost its sense of order now: fine-tune it"
    if wrong:
        console.print(
            f"{lost}. Its original computes wrong under Transformers 5; `hf-posenc patch {model} relative_key` saves one that "
            "is right, and can teach this one (scripts/distill.py --teacher).",
            markup=False,
        )
    elif submodel is not None or type(patched).__name__ in SENTENCE_CLASSES[1:]:  # scripts/distill.py takes no others
        console.print(f"{lost}.")
    else:
        console.print(f"{lost}, or distil it from its original:")
        console.print(_distillation(model, output_dir), markup=False, highlight=False)


def _distillation(original: str, patched: Path) -> str:
    """The command that distils a patched model from its original."""
    script = Path(hf_posenc.__file__).parents[1] / "scripts" / "distill.py"
    if not script.is_file():  # installed without the repository
        script = Path("scripts", "distill.py")
    names = ("--model_name_or_path", str(patched), "--teacher", original, "--output_dir", f"{patched}-distilled")
    return shlex.join(["python", str(script), *names])


def given_encoding(given: str, options: list[str]) -> dict[str, Any]:
    encoding = _parsed(given) if given.startswith("{") else {"type": given}
    settings = given_settings(options)
    for name in settings:
        if name in ("type", "max_length", "layers", "submodel", "where", "inject", "host"):
            raise ValueError(f"--option {name}: {name!r} is no option of an encoding; see hf-posenc patch --help")
        if name in encoding:
            raise ValueError(f"--option {name}: {name!r} is given twice")
    return {**encoding, **settings}


def given_settings(options: list[str]) -> dict[str, Any]:
    """The values of --option name=value, by name."""
    settings: dict[str, Any] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not name or not equals:
            raise ValueError(f"--option {option!r}: give name=value")
        if name in settings:
            raise ValueError(f"--option {option!r}: {name!r} is given twice")
        settings[name] = option_value(value)
    return settings


def option_value(text: str) -> Any:
    """The value of an option: JSON, or else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _parsed(encoding: str) -> dict[str, Any]:
    try:
        return json.loads(encoding)
    except json.JSONDecodeError as error:
        raise ValueError(f"{encoding!r} is no JSON: {error}") from None
