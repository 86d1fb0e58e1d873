"""hf-posenc patch"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import transformers
import typer
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER
from transformers.utils import has_file

import hf_posenc
from hf_posenc.cli import app, console

TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    *("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model"),  # all that older models have
)


@app.command("patch")
def patch(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a model that isn't patched.")],
    encoding: Annotated[str, typer.Argument(help='A name, a composition "a+b", or JSON with "type".')],
    output_dir: Annotated[Path, typer.Option(help="Where the patched model and its tokenizer are saved.")],
    max_length: Annotated[int | None, typer.Option(help="The longest input in tokens; default: see hf_posenc.patch.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="name=value, or part__name=value; may be repeated.")] = None,
    inject: Annotated[str, typer.Option(help="input, every_layer or after_attention.")] = "input",
    keep_host: Annotated[bool, typer.Option(help="Keep the host's own positions, for unpatch.")] = True,
    overwrite: Annotated[bool, typer.Option(help="Replace the model in the output folder, and all that is with it.")] = False,
) -> None:
    """Put an encoding into a model, and save it with its tokenizer.

    [bold]hf-posenc patch bert-base-uncased alibi --max-length 2048 --output-dir bert-alibi[/]

    [bold]hf-posenc patch bert-base-uncased sinusoidal+alibi --option sinusoidal__base=5000 --output-dir both[/]
    """
    _refuse_to_lose(output_dir, overwrite)
    chosen = _encoding(encoding, option or [])
    patched = hf_posenc.patch(load(model), chosen, max_length=max_length, inject=inject, keep_host=keep_host)
    tokenizer, pooling = load_tokenizer(model), has_file(model, "modules.json")
    report = hf_posenc.inspect(patched)
    with _complete_or_not_at_all(output_dir) as folder:
        patched.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.model_max_length = VERY_LARGE_INTEGER if report.max_length is None else report.max_length
            tokenizer.save_pretrained(folder)
    console.print(str(report), markup=False)
    alone = " (there was no tokenizer beside the model)" if tokenizer is None else ""
    console.print(f"saved to {output_dir}{alone}", markup=False)
    if pooling:
        console.print(
            "Its sentence-transformers modules (pooling) are not saved: hf_posenc.patch(SentenceTransformer(…), …) keeps them."
        )
    console.print("A trained model has lost its sense of order now: fine-tune it, or distil it from its original.")


def load(model: str) -> PreTrainedModel:
    """A model of the class that its config names, so that its head comes along."""
    config = AutoConfig.from_pretrained(model)
    name = (config.architectures or [""])[0]
    kind: Any = getattr(hf_posenc if name.startswith("PosEnc") else transformers, name, AutoModel) if name else AutoModel
    try:
        return kind.from_pretrained(model)
    except (RuntimeError, SafetensorError) as error:  # shapes which don't fit the config, a file cut short
        raise ValueError(f"the weights of {model} don't load: {error}") from None


def load_tokenizer(model: str) -> Any:
    """The tokenizer beside a model, or None. (AutoTokenizer makes an empty one where there are no files.)"""
    return AutoTokenizer.from_pretrained(model) if any(has_file(model, name) for name in TOKENIZER_FILES) else None


def _encoding(given: str, options: list[str]) -> dict[str, Any]:
    encoding = _parsed(given) if given.startswith("{") else {"type": given}
    for option in options:
        name, equals, value = option.partition("=")
        if not name or not equals:
            raise ValueError(f"--option {option!r}: give name=value")
        if name in ("type", "max_length", "inject", "host"):
            raise ValueError(f"--option {option!r}: {name!r} is no option of an encoding; see hf-posenc patch --help")
        if name in encoding:
            raise ValueError(f"--option {option!r}: {name!r} is given twice")
        try:
            encoding[name] = json.loads(value)
        except json.JSONDecodeError:
            encoding[name] = value
    return encoding


def _parsed(encoding: str) -> dict[str, Any]:
    try:
        return json.loads(encoding)
    except json.JSONDecodeError as error:
        raise ValueError(f"{encoding!r} is no JSON: {error}") from None


def _refuse_to_lose(output_dir: Path, overwrite: bool) -> None:
    if not output_dir.exists() or (output_dir.is_dir() and not any(output_dir.iterdir())):
        return
    if not output_dir.is_dir():
        raise ValueError(f"{output_dir} is a file: choose another --output-dir")
    if not overwrite:
        raise ValueError(f"{output_dir} isn't empty: choose another --output-dir, or --overwrite it")
    if not (output_dir / "config.json").is_file():
        raise ValueError(f"{output_dir} holds no model, and --overwrite replaces nothing else: choose another --output-dir")


@contextlib.contextmanager
def _complete_or_not_at_all(output_dir: Path) -> Iterator[Path]:
    """A folder to write to, whose files replace those of output_dir when all is written."""
    new = not output_dir.exists()
    output_dir.mkdir(parents=True, exist_ok=True)
    try:
        # Inside it: the same file system, and the folder itself, which may be a mount or a shell's own, stays.
        with tempfile.TemporaryDirectory(dir=output_dir, prefix=".") as name:
            yield Path(name)
            for old in output_dir.iterdir():
                if old.name != Path(name).name:
                    shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
            for file in Path(name).iterdir():
                file.rename(output_dir / file.name)
    except BaseException:
        if new:
            output_dir.rmdir()
        raise
