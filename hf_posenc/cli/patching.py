"""hf-posenc patch"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import transformers
import typer
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel
from transformers.utils import has_file

import hf_posenc
from hf_posenc.cli import app, console


@app.command("patch")
def patch(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a model that isn't patched.")],
    encoding: Annotated[str, typer.Argument(help='A name, a composition "a+b", or JSON with "type".')],
    output_dir: Annotated[Path, typer.Option(help="Where the patched model and its tokenizer are saved.")],
    max_length: Annotated[int | None, typer.Option(help="The longest input in tokens; default: see hf_posenc.patch.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="name=value, or part__name=value; may be repeated.")] = None,
    inject: Annotated[str, typer.Option(help="input, every_layer or after_attention.")] = "input",
    keep_host: Annotated[bool, typer.Option(help="Keep the host's own positions, for unpatch.")] = True,
    overwrite: Annotated[bool, typer.Option(help="Replace what is in the output folder.")] = False,
) -> None:
    """Put an encoding into a model, and save it with its tokenizer.

    [bold]hf-posenc patch bert-base-uncased alibi --max-length 2048 --output-dir bert-alibi[/]

    [bold]hf-posenc patch bert-base-uncased sinusoidal+alibi --option sinusoidal__base=5000 --output-dir both[/]
    """
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())) and not overwrite:
        raise ValueError(f"{output_dir} isn't empty: choose another --output-dir, or --overwrite it")
    chosen = _parsed(encoding) if encoding.startswith("{") else encoding
    options = dict(_option(given) for given in option or [])
    patched = hf_posenc.patch(load(model), chosen, max_length=max_length, inject=inject, keep_host=keep_host, **options)
    tokenizer = load_tokenizer(model)
    report = hf_posenc.inspect(patched)
    # Beside the folder, then moved: a failure leaves no half model.
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_dir.parent, prefix=f".{output_dir.name}-") as folder:
        patched.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.model_max_length = report.max_length or transformers.tokenization_utils_base.VERY_LARGE_INTEGER
            tokenizer.save_pretrained(folder)
        Path(folder).chmod(0o755)
        if output_dir.exists():
            shutil.rmtree(output_dir)
        shutil.copytree(folder, output_dir)
    console.print(str(report), markup=False)
    console.print(f"saved to {output_dir}" + ("" if tokenizer else " (there was no tokenizer beside the model)"), markup=False)
    console.print("A trained model has lost its sense of order now: fine-tune it, or distil it from its original.")


def load(model: str) -> PreTrainedModel:
    """A model of the class that its config names, so that its head comes along."""
    config = AutoConfig.from_pretrained(model)
    name = (config.architectures or [""])[0]
    kind: Any = getattr(hf_posenc if name.startswith("PosEnc") else transformers, name, AutoModel) if name else AutoModel
    return kind.from_pretrained(model)


def load_tokenizer(model: str) -> Any:
    """The tokenizer beside a model, or None. (AutoTokenizer makes an empty one where there are no files.)"""
    there = any(has_file(model, name) for name in ("tokenizer_config.json", "tokenizer.json"))
    return AutoTokenizer.from_pretrained(model) if there else None


def _option(given: str) -> tuple[str, Any]:
    name, equals, value = given.partition("=")
    if not name or not equals:
        raise ValueError(f"--option {given!r}: give name=value")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _parsed(encoding: str) -> Any:
    try:
        return json.loads(encoding)
    except json.JSONDecodeError as error:
        raise ValueError(f"{encoding!r} is no JSON: {error}") from None
