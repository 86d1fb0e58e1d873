"""hf-posenc patch"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel
from transformers.utils import has_file

import hf_posenc
from hf_posenc import saving
from hf_posenc.cards import architecture
from hf_posenc.cli import app, console

TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    *("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model"),  # the only files of older models
)


@app.command("patch")
def patch(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a model that isn't patched.")],
    encoding: Annotated[str, typer.Argument(help='A name, a composition "a+b", or JSON with "type".')],
    output_dir: Annotated[Path, typer.Option(help="Where the patched model and its tokenizer are saved.")],
    max_length: Annotated[int | None, typer.Option(help="The longest input in tokens; default: see hf_posenc.patch.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="name=value, or part__name=value; may be repeated.")] = None,
    layers: Annotated[
        str | None, typer.Option(help="A slice such as 3::4, or a JSON list of layer indices; default: all layers.")
    ] = None,
    inject: Annotated[str, typer.Option(help="input, every_layer or after_attention.")] = "input",
    keep_host: Annotated[bool, typer.Option(help="Keep the host's own positions, for unpatch.")] = True,
    overwrite: Annotated[bool, typer.Option(help="Replace the model in the output folder, and all that is with it.")] = False,
) -> None:
    """Replace a model's positions by an encoding, and save it with its tokenizer.

    [bold]hf-posenc patch bert-base-uncased alibi --max-length 2048 --output-dir bert-alibi[/]

    [bold]hf-posenc patch bert-base-uncased sinusoidal+alibi --option sinusoidal__base=5000 --output-dir both[/]
    """
    _check_output_dir(output_dir, overwrite)
    chosen = _encoding(encoding, option or [])
    some = {} if layers is None else {"layers": _value(layers)}
    patched = hf_posenc.patch(load(model), chosen, max_length=max_length, inject=inject, keep_host=keep_host, **some)
    tokenizer, pooling = load_tokenizer(model), has_file(model, "modules.json")
    report = hf_posenc.inspect(patched)
    with saving.replaced(output_dir, _all_others) as folder:
        patched.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.model_max_length = report.model_max_length
            tokenizer.save_pretrained(folder)
    console.print(str(report), markup=False)
    missing = " (there was no tokenizer beside the model)" if tokenizer is None else ""
    console.print(f"saved to {output_dir}{missing}", markup=False)
    if pooling:
        console.print(
            "Its sentence-transformers modules (pooling) are not saved: hf_posenc.patch(SentenceTransformer(…), …) keeps them."
        )
    console.print("A trained model has lost its sense of order now: fine-tune it, or distil it from its original.")


def load(model: str) -> PreTrainedModel:
    """Loads a model with the head that its config names."""
    cls: Any = architecture(AutoConfig.from_pretrained(model)) or AutoModel
    try:
        return cls.from_pretrained(model)
    except (RuntimeError, SafetensorError) as error:  # shapes that differ from the config's, a truncated file
        raise ValueError(f"the weights of {model} don't load: {error}") from None


def load_tokenizer(model: str) -> Any:
    """The tokenizer saved with a model, or None. (Without files, AutoTokenizer would return an empty one.)"""
    return AutoTokenizer.from_pretrained(model) if any(has_file(model, name) for name in TOKENIZER_FILES) else None


def _encoding(given: str, options: list[str]) -> dict[str, Any]:
    encoding = _parsed(given) if given.startswith("{") else {"type": given}
    for option in options:
        name, equals, value = option.partition("=")
        if not name or not equals:
            raise ValueError(f"--option {option!r}: give name=value")
        if name in ("type", "max_length", "layers", "inject", "host"):
            raise ValueError(f"--option {option!r}: {name!r} is no option of an encoding; see hf-posenc patch --help")
        if name in encoding:
            raise ValueError(f"--option {option!r}: {name!r} is given twice")
        encoding[name] = _value(value)
    return encoding


def _value(text: str) -> Any:
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


def _check_output_dir(output_dir: Path, overwrite: bool) -> None:
    if not output_dir.exists() or (output_dir.is_dir() and not saving.entries(output_dir)):
        return
    if not output_dir.is_dir():
        raise ValueError(f"{output_dir} is a file: choose another --output-dir")
    if not overwrite:
        raise ValueError(f"{output_dir} isn't empty: choose another --output-dir, or --overwrite it")
    if not (output_dir / "config.json").is_file():
        raise ValueError(f"{output_dir} holds no model, and --overwrite replaces nothing else: choose another --output-dir")


def _all_others(output_dir: Path, new: list[str]) -> list[str]:
    return [path.name for path in saving.entries(output_dir) if path.name not in new]
