"""The folders that the commands read and write: a model, or one of sentence-transformers, with its tokenizer."""

import contextlib
import copy
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER
from transformers.utils import cached_file, has_file

import hf_posenc
from hf_posenc import saving
from hf_posenc.cards import architecture
from hf_posenc.cli.output import Output
from hf_posenc.encodings import canonical, encoding_class, meant, shown
from hf_posenc.inspection import Report
from hf_posenc.modeling import PosEncModelMixin
from hf_posenc.patching import changed_within
from hf_posenc.retrieval import Embedder, pooling
from hf_posenc.spec import V4_RELATIVE
from hf_posenc.structure import submodels_of
from hf_posenc.tokenizer_files import check_tokenizer, load_tokenizer

SENTENCES = "config_sentence_transformers.json"
SENTENCE_CLASSES = ("SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder")
"""Values of `model_type` in SENTENCES, which older folders don't have: classes of sentence-transformers."""


@dataclass(frozen=True)
class Original:
    """A model before a command changes it.

    name: its folder or Hub id.
    model: as `load` gives it; None where its weights are read in another way (`load_v4`).
    tokenizer: None where it has none.
    """

    name: str
    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, name: str) -> "Original":
        model = load(name)
        return cls(name, model, model.tokenizer if _is_sentences(model) else load_tokenizer(name))


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


def load_v4(name: str, max_length: int | None) -> tuple[Original, Any]:
    """A checkpoint of Transformers v4 with relative positions, before and after: as Transformers 5 has it, and with them."""
    sentences = _load_sentences(name)
    if sentences is not None:
        changed = changed_within(sentences, lambda stock: _from_v4(str(stock.name_or_path), type(stock), max_length))
        return Original(name, sentences, sentences.tokenizer), changed
    changed = _from_v4(name, architecture(AutoConfig.from_pretrained(name)) or AutoModel, max_length)
    return Original(name, None, load_tokenizer(name)), changed


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
        raise ValueError(
            f"{SENTENCES} of {model} has model_type {kind!r}{meant(kind, SENTENCE_CLASSES)}: allowed is "
            f"{', '.join(SENTENCE_CLASSES)}"
        )
    with _reading_weights(model):
        found = getattr(sentence_transformers, kind)(model, device="cpu")
    check_tokenizer(found.tokenizer, model)
    return found


@contextlib.contextmanager
def _reading_weights(model: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, SafetensorError) as error:  # shapes that differ from the config's, a truncated file
        raise ValueError(f"the weights of {model} don't load: {error}") from None


def save(out: Output, changed: Any, original: Original, output_dir: Path, submodel: str | None = None) -> dict[str, Any]:
    """Saves a model as `load` gives it, with the tokenizer of the one it was made from, and reports on it.

    submodel: the part that was changed. Returns what --json prints.
    """
    tokenizer = write(changed, original, output_dir)
    report, inner = _report(changed, submodel), inner_model(changed)
    out.result(str(report))
    missing = "" if tokenizer is not None else " (there was no tokenizer beside the model)"
    out.message(f"saved to {output_dir}{missing}")
    lengths = _changed_lengths(original, changed, tokenizer)
    for what, each in lengths.items():
        named = "The tokenizer's model_max_length" if what == "model_max_length" else what
        out.message(f"{named} was {_length(each['before'])}, and is {_length(each['after'])} now.")
    needs = isinstance(inner, PosEncModelMixin)
    if needs:
        out.message("To load it, `import hf_posenc` first; where that isn't installed, trust_remote_code=True does as well.")
    if not _is_sentences(changed) and has_file(original.name, "modules.json"):
        out.message(
            "Its sentence-transformers modules (pooling) are not saved: pip install sentence-transformers, and do it again."
        )
    return {
        "output_dir": str(output_dir),
        "report": asdict(report),
        "tokenizer": tokenizer is not None,
        "lengths": lengths,
        "needs_hf_posenc": needs,
    }


def write(changed: Any, original: Original, output_dir: Path) -> Any:
    """Saves the same without a word. Returns the tokenizer as it is saved, or None."""
    sentences = _is_sentences(changed)
    tokenizer = changed.tokenizer if sentences else copy.deepcopy(original.tokenizer)
    if tokenizer is not None and not sentences:
        tokenizer.model_max_length = _reader(changed).model_max_length
    with saving.replaced(output_dir, _all_others) as folder:
        if sentences:
            changed.save_pretrained(str(folder), create_model_card=False)
        else:
            changed.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
    return tokenizer


def _is_sentences(model: Any) -> bool:
    return not isinstance(model, PreTrainedModel)


def inner_model(model: Any) -> PreTrainedModel:
    """The model of Transformers in what `load` gives."""
    return model[0].model if _is_sentences(model) else model


def embedder(model: Any, tokenizer: Any) -> Embedder:
    """A model as `load` gives it, without its head, to embed texts: a SentenceTransformer's by its own modules, others by the
    mean of their states."""
    sentences = model if _is_sentences(model) else None
    inner: Any = inner_model(model).base_model
    return Embedder(inner, getattr(sentences, "tokenizer", tokenizer), pooling(sentences))


def names_of(models: list[str]) -> list[str]:
    """What tables and figures call these models: the last parts of their names. Raises ValueError where two are the same."""
    names = [Path(model).name.removesuffix(".json") for model in models]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two models are called {twice[0]!r}: give folders of different names")
    return names


def _changed_lengths(original: Original, changed: Any, tokenizer: Any) -> dict[str, dict[str, int | None]]:
    """Which lengths at which texts are cut have changed; None: no limit. A SentenceTransformer's is its tokenizer's."""
    if tokenizer is None:
        return {}
    name = "max_seq_length" if _is_sentences(changed) else "model_max_length"
    before, after = (_limit(each.model_max_length) for each in (original.tokenizer, tokenizer))
    return {} if before == after else {name: {"before": before, "after": after}}


def _limit(model_max_length: int) -> int | None:
    return None if model_max_length >= VERY_LARGE_INTEGER else model_max_length


def _length(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)


def _report(model: Any, submodel: str | None) -> Report:
    """How a model knows word order; of a stock one that is made of several, how the named one does or the one that reads."""
    try:
        return hf_posenc.inspect(model)
    except hf_posenc.HostRefused as refused:
        if not refused.submodels:
            raise
        return hf_posenc.inspect(model, submodel=submodel or refused.submodels[0])


def _reader(model: PreTrainedModel) -> Report:
    """The report on what reads the tokens: the model, or the first of several."""
    return hf_posenc.inspect(model, submodel=next(iter(submodels_of(model)), None))


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
