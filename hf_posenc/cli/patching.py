"""hf-posenc patch"""

import contextlib
import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file, has_file

import hf_posenc
from hf_posenc.cards import architecture
from hf_posenc.cli import app, console

TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    *("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model"),  # the only files of older models
)
SENTENCES = "config_sentence_transformers.json"
SENTENCE_CLASSES = ("SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder")
"""Values of `model_type` in SENTENCES, which older folders don't have: classes of sentence-transformers."""


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

    A folder of sentence-transformers comes back as one, with all its modules, if that package is installed.

    [bold]hf-posenc patch bert-base-uncased alibi --max-length 2048 --output-dir bert-alibi[/]

    [bold]hf-posenc patch bert-base-uncased sinusoidal+alibi --option sinusoidal__base=5000 --output-dir both[/]
    """
    _check_output_dir(output_dir, overwrite)
    chosen = _encoding(encoding, option or [])
    some = {} if layers is None else {"layers": _value(layers)}
    sentences = load_sentences(model)
    given = load(model) if sentences is None else sentences
    patched: Any = hf_posenc.patch(given, chosen, max_length=max_length, inject=inject, keep_host=keep_host, **some)
    tokenizer = load_tokenizer(model) if sentences is None else sentences.tokenizer
    report = hf_posenc.inspect(patched if sentences is None else patched[0].model)
    with _replaced_when_complete(output_dir) as folder:
        if sentences is not None:
            patched.save_pretrained(str(folder), create_model_card=False)
        else:
            patched.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.model_max_length = report.model_max_length
                tokenizer.save_pretrained(folder)
    console.print(str(report), markup=False)
    missing = " (there was no tokenizer beside the model)" if tokenizer is None else ""
    console.print(f"saved to {output_dir}{missing}", markup=False)
    if sentences is None and has_file(model, "modules.json"):
        console.print(
            "Its sentence-transformers modules (pooling) are not saved: pip install sentence-transformers, and patch again."
        )
    lost = "A trained model has lost its sense of order now: fine-tune it"
    if sentences is not None and type(sentences).__name__ != "SentenceTransformer":  # scripts/distill.py takes no others
        console.print(f"{lost}.")
    else:
        console.print(f"{lost}, or distil it from its original:")
        console.print(_distillation(model, output_dir, keep_host), markup=False, highlight=False)


def load(model: str) -> PreTrainedModel:
    """Loads a model with the head that its config names."""
    cls: Any = architecture(AutoConfig.from_pretrained(model)) or AutoModel
    with _reading_weights(model):
        return cls.from_pretrained(model)


def load_sentences(model: str) -> Any:
    """Loads a model of sentence-transformers; None if this isn't one, or that package isn't installed."""
    if not has_file(model, "modules.json"):
        return None
    try:
        import sentence_transformers
    except ImportError:
        return None
    about = json.loads(Path(str(cached_file(model, SENTENCES))).read_text("utf-8")) if has_file(model, SENTENCES) else {}
    kind = about.get("model_type", SENTENCE_CLASSES[0])
    if kind not in SENTENCE_CLASSES:
        raise ValueError(f"{SENTENCES} of {model} has model_type {kind!r}: allowed is {', '.join(SENTENCE_CLASSES)}")
    with _reading_weights(model):
        return getattr(sentence_transformers, kind)(model, device="cpu")


def load_tokenizer(model: str) -> Any:
    """The tokenizer saved with a model, or None. (Without files, AutoTokenizer would return an empty one.)"""
    return AutoTokenizer.from_pretrained(model) if any(has_file(model, name) for name in TOKENIZER_FILES) else None


@contextlib.contextmanager
def _reading_weights(model: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, SafetensorError) as error:  # shapes that differ from the config's, a truncated file
        raise ValueError(f"the weights of {model} don't load: {error}") from None


def _distillation(original: str, patched: Path, keep_host: bool) -> str:
    """The command that distils a patched model from its original."""
    script = Path(hf_posenc.__file__).parents[1] / "scripts" / "distill.py"
    if not script.is_file():  # installed without the repository
        script = Path("scripts", "distill.py")
    fading = () if keep_host else ("--fade_steps", "0")
    names = ("--model_name_or_path", str(patched), "--teacher", original, *fading, "--output_dir", f"{patched}-distilled")
    return shlex.join(["python", str(script), *names])


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
    if not output_dir.exists() or (output_dir.is_dir() and not any(output_dir.iterdir())):
        return
    if not output_dir.is_dir():
        raise ValueError(f"{output_dir} is a file: choose another --output-dir")
    if not overwrite:
        raise ValueError(f"{output_dir} isn't empty: choose another --output-dir, or --overwrite it")
    if not (output_dir / "config.json").is_file():
        raise ValueError(f"{output_dir} holds no model, and --overwrite replaces nothing else: choose another --output-dir")


@contextlib.contextmanager
def _replaced_when_complete(output_dir: Path) -> Iterator[Path]:
    """A temporary folder whose files replace those of output_dir once all of them are written."""
    new = not output_dir.exists()
    output_dir.mkdir(parents=True, exist_ok=True)
    try:
        # Inside output_dir: on the same file system, and output_dir itself, which may be a mount, is kept.
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
