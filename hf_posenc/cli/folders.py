"""The folders that the commands read and write: a model, or one of sentence-transformers, with its tokenizer."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file, has_file

import hf_posenc
from hf_posenc import saving
from hf_posenc.cards import architecture
from hf_posenc.cli import console
from hf_posenc.encodings import canonical, encoding_class, shown
from hf_posenc.inspection import Report
from hf_posenc.patching import changed_within
from hf_posenc.spec import V4_RELATIVE

TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    *("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model"),  # the only files of older models
)
SENTENCES = "config_sentence_transformers.json"
SENTENCE_CLASSES = ("SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder")
"""Values of `model_type` in SENTENCES, which older folders don't have: classes of sentence-transformers."""

Overwrite = Annotated[bool, typer.Option(help="Replace the model in the output folder, and all that is with it.")]


def load(model: str) -> Any:
    """A model of sentence-transformers, where that package is installed, or else one of Transformers."""
    sentences = _load_sentences(model)
    return load_model(model) if sentences is None else sentences


def asks_for_its_own(model: str, encoding: dict[str, Any]) -> bool:
    """Whether an encoding is the one that a checkpoint of Transformers v4 has vectors for, which Transformers 5 drops.

    Raises ValueError where it is that one with other options.
    """
    kind = PreTrainedConfig.get_config_dict(model)[0].get("position_embedding_type")
    if kind not in V4_RELATIVE or encoding_class(encoding.get("type")) is not encoding_class(kind):
        return False
    if encoding.keys() != {"type"} or canonical(encoding) != canonical(kind):
        raise ValueError(
            f"{model} has the vectors of {kind!r} from Transformers v4, with which {shown(encoding)} doesn't go: give {kind}, "
            "without options"
        )
    return True


def load_v4(model: str, max_length: int | None) -> Any:
    """A checkpoint of Transformers v4 with relative positions, as `load` gives models."""
    sentences = _load_sentences(model)
    if sentences is not None:
        return changed_within(sentences, lambda stock: _from_v4(str(stock.name_or_path), type(stock), max_length))
    return _from_v4(model, architecture(AutoConfig.from_pretrained(model)) or AutoModel, max_length)


def _from_v4(model: str, cls: Any, max_length: int | None) -> PreTrainedModel:
    with _reading_weights(model):
        return hf_posenc.from_v4(model, cls, max_length=max_length)


def load_model(model: str) -> PreTrainedModel:
    """A model of Transformers with the head that its config names."""
    cls: Any = architecture(AutoConfig.from_pretrained(model)) or AutoModel
    with _reading_weights(model):
        return cls.from_pretrained(model)


def _load_sentences(model: str) -> Any:
    """A model of sentence-transformers; None if this isn't one, or that package isn't installed."""
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


def save(changed: Any, source: str, output_dir: Path) -> None:
    """Saves a model as `load` gives it, with the tokenizer of the one it was made from, and reports on it."""
    found = write(changed, source, output_dir)
    console.print(str(_report(changed)), markup=False)
    missing = "" if found else " (there was no tokenizer beside the model)"
    console.print(f"saved to {output_dir}{missing}", markup=False)
    if isinstance(changed, PreTrainedModel) and has_file(source, "modules.json"):
        console.print(
            "Its sentence-transformers modules (pooling) are not saved: pip install sentence-transformers, and do it again."
        )


def write(changed: Any, source: str, output_dir: Path) -> bool:
    """Saves the same without a word. Returns whether there was a tokenizer."""
    sentences = not isinstance(changed, PreTrainedModel)
    report = _report(changed)
    tokenizer = changed.tokenizer if sentences else load_tokenizer(source)
    with saving.replaced(output_dir, _all_others) as folder:
        if sentences:
            changed.save_pretrained(str(folder), create_model_card=False)
        else:
            changed.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.model_max_length = report.model_max_length
                tokenizer.save_pretrained(folder)
    return tokenizer is not None


def _report(model: Any) -> Report:
    """How a model knows word order; of a stock one that is made of several, how the one does that reads texts."""
    try:
        return hf_posenc.inspect(model)
    except hf_posenc.HostRefused as refused:
        if not refused.submodels:
            raise
        return hf_posenc.inspect(model.base_model.get_submodule(refused.submodels[0]))


def check_output_dir(output_dir: Path, overwrite: bool) -> None:
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
