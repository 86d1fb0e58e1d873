"""Loads sentence-transformers models from directories and from the Hub."""

from pathlib import Path
from typing import Any

from transformers.utils import cached_file, has_file

from hf_posenc.encodings import did_you_mean
from hf_posenc.serialization.saved_files import check_sentence_modules, explained, read_json_object
from hf_posenc.serialization.tokenizer_files import check_tokenizer

ABOUT, MODULES = "config_sentence_transformers.json", "modules.json"
CLASSES = ("SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder")
"""Values of `model_type` in ABOUT: classes of sentence-transformers. Older directories have no `model_type`."""


def load_sentence_model(name: str, classes: tuple[str, ...] = CLASSES, **options: Any) -> Any:
    """The sentence-transformers model with this name, on the CPU. None if it is a plain Transformers model.

    Raises ValueError for other classes than `classes` and for damaged files, and ImportError without sentence-transformers.
    """
    if not has_file(name, MODULES):
        return None
    import sentence_transformers

    about = read_json_object(Path(str(cached_file(name, ABOUT)))) if has_file(name, ABOUT) else {}
    kind = about.get("model_type", CLASSES[0])
    if kind not in classes:
        raise ValueError(
            f"{ABOUT} of {name} has model_type {kind!r}{did_you_mean(kind, classes)}. Allowed: {', '.join(classes)}."
        )
    check_sentence_modules(name)
    with explained(f"the weights of {name}"):
        found = getattr(sentence_transformers, kind)(name, device="cpu", **options)
    check_tokenizer(found.tokenizer, name)
    return found
