"""Reading and writing a Transformers or sentence-transformers model with its tokenizer."""

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModel, PreTrainedModel
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER
from transformers.utils import cached_file, has_file

import hf_posenc
from hf_posenc.architectures.components.component import is_transformers
from hf_posenc.architectures.detection import submodels_of
from hf_posenc.cli.output import Output
from hf_posenc.configuration import V4_RELATIVE
from hf_posenc.encodings import canonical, encoding_class, short_repr
from hf_posenc.evaluation.retrieval import Embedder, pooling
from hf_posenc.hub.cards import architecture
from hf_posenc.inspection import Report
from hf_posenc.modeling.derived import PosEncModelMixin
from hf_posenc.modeling.sentence_transformers import apply_to_sentence_transformer
from hf_posenc.serialization import atomic
from hf_posenc.serialization.saved_files import check_there, explained, load_config, read_config, read_json, read_json_object
from hf_posenc.serialization.sentence_models import MODULES, load_sentence_model
from hf_posenc.serialization.tokenizer_files import copied, drop_foreign_code, load_tokenizer

MODEL_FILES = re.compile(
    r"config\.json|generation_config\.json|adapter_config\.json|(modeling_)?posenc(_\w+)?\.py|"
    r"(adapter_|pytorch_)?model(\.\w+)?(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index(\.\w+)?\.json)?|"
    r"tokenizer\.(json|model)|(tokenizer_config|special_tokens_map|added_tokens)\.json|"
    r"chat_template\.(jinja|json)|additional_chat_templates|"
    r"((entity_)?vocab|vocab-(src|tgt))\.json|vocab\.txt|merges\.txt|bpe\.codes|prophetnet\.tokenizer|"
    r"(spiece|sentencepiece(\.bpe)?|spm|spm_char)\.model|"
    r"(video_)?preprocessor_config\.json|processor_config\.json|"
    r"modules\.json|config_sentence_transformers\.json|sentence_\w+_config\.json"
)
"""The files of a saved model and its tokenizer. --overwrite removes those of the previous model."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""The files of processors of images and audio."""
MODULE = re.compile(r"\d+_\w+")
"""Subdirectories with the modules of a SentenceTransformer. modules.json lists them."""


@dataclass(frozen=True)
class Original:
    """A model before a command changes it.

    name: its local path or Hub ID.
    model: the model as returned by `load`, or None if `load_v4` reads the weights.
    tokenizer: None if the model has none.
    """

    name: str
    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, name: str) -> "Original":
        model = load(name)
        return cls(name, model, model.tokenizer if _is_sentences(model) else load_tokenizer(name))


def load(model: str) -> Any:
    """A sentence-transformers model if that package is installed and the model is one. Otherwise, a Transformers model."""
    check_there(model)
    sentences = _load_sentences(model)
    return load_model(model) if sentences is None else sentences


def asks_for_its_own(model: str, encoding: dict[str, Any]) -> bool:
    """Whether a Transformers v4 checkpoint contains the vectors of this encoding, which Transformers 5 drops.

    Raises ValueError if it contains them for other options.
    """
    check_there(model)
    kind = read_config(model, subfolder=_subfolder(model)).get("position_embedding_type")
    if kind not in V4_RELATIVE or encoding_class(encoding.get("type")) is not encoding_class(kind):
        return False
    if encoding.keys() != {"type"} or canonical(encoding) != canonical(kind):
        raise ValueError(
            f"{model} contains the vectors of {kind!r} from Transformers v4, and {short_repr(encoding)} doesn't match them. "
            f"Use {kind} without options."
        )
    return True


def load_v4(name: str, max_length: int | None) -> tuple[Original, Any]:
    """A Transformers v4 checkpoint with relative positions: as Transformers 5 loads it, and with its relative positions."""
    sentences = _load_sentences(name)
    if sentences is not None:
        place = _subfolder(name)
        changed = apply_to_sentence_transformer(sentences, lambda stock: _from_v4(name, type(stock), max_length, place))
        return Original(name, sentences, sentences.tokenizer), changed
    changed = _from_v4(name, architecture(load_config(name)) or AutoModel, max_length)
    return Original(name, None, load_tokenizer(name)), changed


def _from_v4(model: str, cls: Any, max_length: int | None, subfolder: str = "") -> PreTrainedModel:
    with explained(f"the weights of {model}"):
        return hf_posenc.from_v4(model, cls, max_length=max_length, subfolder=subfolder)


def _subfolder(model: str) -> str:
    """The subdirectory with the Transformers model, from `modules.json`. Older versions of sentence-transformers used one."""
    if not has_file(model, MODULES):
        return ""
    modules = read_json(Path(str(cached_file(model, MODULES))))
    first = modules[0] if isinstance(modules, list) and modules else {}
    path = first.get("path") if isinstance(first, dict) else None
    return path if isinstance(path, str) else ""


def load_model(model: str) -> PreTrainedModel:
    """A Transformers model with the head that its config names."""
    cls: Any = architecture(load_config(model)) or AutoModel
    with explained(f"the weights of {model}"):
        return cls.from_pretrained(model)


def _load_sentences(model: str) -> Any:
    """A sentence-transformers model, or None if the model isn't one or the package isn't installed."""
    try:
        import sentence_transformers  # noqa: F401
    except ImportError:
        return None
    return load_sentence_model(model)


def save(
    out: Output, changed: Any, original: Original, output_dir: Path, submodel: str | None = None, image_size: Any = None
) -> dict[str, Any]:
    """Saves a changed model with the original's tokenizer and processors, prints a report, and returns the document of --json.

    changed: a model such as `load` returns. submodel: the submodel that was changed. image_size: its new image size, if any.
    """
    before = _inodes(output_dir)
    tokenizer = write(changed, original, output_dir, image_size)
    kept = sorted(name for name, inode in (before.items() & _inodes(output_dir).items()) if not _of_model(output_dir, name))
    report, inner = _report(changed, submodel), inner_model(changed)
    out.result(str(report))
    processed = any((output_dir / name).exists() for name in PROCESSORS)
    missing = "" if tokenizer is not None or processed else " The model has no tokenizer or processor, so none was saved."
    out.message(f"Saved to {output_dir}.{missing}")
    if kept:
        out.message(f"Kept in {output_dir}: {', '.join(kept)}. Check that they apply to the new model.")
    lengths = _changed_lengths(original, changed, tokenizer)
    for what, each in lengths.items():
        named = "The tokenizer's model_max_length" if what == "model_max_length" else what
        out.message(f"{named} changed from {_length(each['before'])} to {_length(each['after'])}.")
    needs = isinstance(inner, PosEncModelMixin)
    if needs:
        out.message("To load the model, `import hf_posenc` first. Without hf-posenc, pass trust_remote_code=True.")
    if not _is_sentences(changed) and has_file(original.name, MODULES):
        out.message(
            "The model's sentence-transformers modules (such as pooling) were not saved. To keep them, run "
            "`pip install sentence-transformers` and repeat the command."
        )
    return {
        "output_dir": str(output_dir),
        "kept": kept,
        "report": asdict(report),
        "tokenizer": tokenizer is not None,
        "lengths": lengths,
        "needs_hf_posenc": needs,
    }


def write(changed: Any, original: Original, output_dir: Path, image_size: Any = None) -> Any:
    """Saves a changed model with its processors, without printing. Returns the saved tokenizer, or None."""
    sentences = _is_sentences(changed)
    tokenizer = changed.tokenizer if sentences else copied(original.tokenizer)
    if tokenizer is not None and not sentences:
        tokenizer.model_max_length = _reader(changed).model_max_length
    inner = inner_model(changed)
    if is_transformers(type(inner)):  # a custom class needs its own code
        drop_foreign_code(inner.config, "config")
    with atomic.replaced(output_dir, _obsolete) as folder:
        if sentences:
            changed.save_pretrained(str(folder), create_model_card=False)
        else:
            changed.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            for name in PROCESSORS:
                if has_file(original.name, name):
                    settings = read_json_object(Path(str(cached_file(original.name, name))))
                    atomic.write_text(folder / name, json.dumps(_resized(settings, image_size), indent=2) + "\n")
    return tokenizer


def _resized(settings: dict[str, Any], image_size: Any) -> dict[str, Any]:
    """A processor's settings for another image size, an integer or height and width. None leaves them as they are."""
    if image_size is None:
        return settings
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    inner = {name: _resized(part, image_size) for name, part in settings.items() if name.endswith("_processor")}
    whole = {"height": height, "width": width}
    sizes = {name: whole for name in ("size", "crop_size") if "height" in (settings.get(name) or {})}
    if "shortest_edge" in (settings.get("size") or {}):
        sizes["size"] = {**settings["size"], "shortest_edge": min(height, width)}
    return {**settings, **inner, **sizes}


def _is_sentences(model: Any) -> bool:
    return not isinstance(model, PreTrainedModel)


def inner_model(model: Any) -> PreTrainedModel:
    """The Transformers model inside a model that `load` returns."""
    return model[0].model if _is_sentences(model) else model


def embedder(model: Any, tokenizer: Any) -> Embedder:
    """An embedder of texts from a model that `load` returns, without its head.

    A SentenceTransformer keeps its own pooling. For other models, embeddings are the mean of the hidden states.
    """
    sentences = model if _is_sentences(model) else None
    inner: Any = inner_model(model).base_model
    return Embedder(inner, getattr(sentences, "tokenizer", tokenizer), pooling(sentences))


def names_of(models: list[str]) -> list[str]:
    """The names of models in tables and figures: the last parts of their paths. Raises ValueError if two are equal."""
    names = [Path(model).name.removesuffix(".json") for model in models]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"Two models are named {twice[0]!r}. Use directories with different names.")
    return names


def _changed_lengths(original: Original, changed: Any, tokenizer: Any) -> dict[str, dict[str, int | None]]:
    """The truncation lengths that changed, before and after. None means no limit. SentenceTransformers use the tokenizer's."""
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
    """The report on a model. For an unpatched composite model, the report on `submodel`, or else on its first submodel."""
    try:
        return hf_posenc.inspect(model)
    except hf_posenc.UnsupportedModelError as refused:
        if not refused.submodels:
            raise
        return hf_posenc.inspect(model, submodel=submodel or refused.submodels[0])


def _reader(model: PreTrainedModel) -> Report:
    """The report on the model that reads the tokens: the model itself, or the first submodel of a composite model."""
    return hf_posenc.inspect(model, submodel=next(iter(submodels_of(model)), None))


def check_output_dir(output_dir: Path, overwrite: bool) -> None:
    """Raises ValueError if the command can't write to the output directory. Call it before any expensive step."""
    parent = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    if not parent.is_dir():
        raise ValueError(f"{parent} is a file. Choose another --output-dir.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{parent} isn't writable. Change its permissions, or choose another --output-dir.")
    if not (there := _entries(output_dir)):
        return
    if not overwrite:
        raise ValueError(f"{output_dir} isn't empty. Choose another --output-dir, or replace its model with --overwrite.")
    if not any(_of_model(output_dir, path.name) for path in there):  # after an interrupted save, config.json is missing
        raise ValueError(f"{output_dir} contains no model, and --overwrite replaces only models. Choose another --output-dir.")


def _obsolete(output_dir: Path, new: list[str]) -> list[str]:
    """The files of the previous model that the new one doesn't replace."""
    names = [path.name for path in _entries(output_dir) if _of_model(output_dir, path.name)]
    replaced = {name.partition("/")[0] for name in new}
    within = [path for name in names if MODULE.fullmatch(name) and name in replaced for path in (output_dir / name).rglob("*")]
    files = [path.relative_to(output_dir).as_posix() for path in within if path.is_file() or path.is_symlink()]
    return [name for name in names if name not in replaced] + [name for name in files if name not in new]


def _of_model(output_dir: Path, name: str) -> bool:
    """Whether an entry of a directory is part of the model in it."""
    if MODULE.fullmatch(name):
        try:
            return any(module["path"] == name for module in json.loads((output_dir / "modules.json").read_text("utf-8")))
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return False
    return MODEL_FILES.fullmatch(name) is not None


def _entries(folder: Path) -> list[Path]:
    """The content of a directory, without the cache in which new files are staged. Empty if it doesn't exist."""
    return sorted(path for path in folder.iterdir() if path.name != atomic.CACHE) if folder.is_dir() else []


def _inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.lstat().st_ino for path in _entries(folder)}
