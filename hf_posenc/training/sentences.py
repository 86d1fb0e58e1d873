"""SentenceTransformers in training: the modules behind their Transformers model pool its states, and are saved as they were."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import cached_file, has_file

from hf_posenc.serialization.saved_files import check_sentence_modules
from hf_posenc.serialization.tokenizer_files import check_tokenizer

ABOUT = "config_sentence_transformers.json"


def load(name: str) -> Any:
    """The SentenceTransformer in a folder or on the Hub, frozen; None for a plain Transformers model.

    Raises SystemExit where its modules would be lost.
    """
    if not has_file(name, "modules.json"):
        return None
    about = json.loads(Path(str(cached_file(name, ABOUT))).read_text("utf-8")) if has_file(name, ABOUT) else {}
    kind = about.get("model_type", "SentenceTransformer")  # not written by older versions
    if kind != "SentenceTransformer":
        raise SystemExit(f"{name} is a {kind} of sentence-transformers: allowed are SentenceTransformer and plain models")
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise SystemExit(f"{name} has modules of sentence-transformers: pip install sentence-transformers") from None
    try:
        check_sentence_modules(name)
        found = SentenceTransformer(name, device="cpu", model_kwargs={"dtype": torch.float32})
        check_tokenizer(found.tokenizer, name)
    except (OSError, ValueError, RuntimeError) as error:
        raise SystemExit(f"{name}: {error}") from None
    if not isinstance(getattr(found[0], "model", None), PreTrainedModel):
        raise SystemExit(f"{name} begins with a {type(found[0]).__name__}: allowed is a Transformers model")
    return found.requires_grad_(False).eval()


def described(found: Any) -> str:
    """What `pooling` does, in words."""
    if found is None:
        return "the mean over tokens"
    modules = [(type(module).__name__, getattr(module, "pooling_mode", None)) for module in list(found)[1:]]
    return ", ".join(f"{name} ({mode})" if mode else name for name, mode in modules)


def save(found: Any, tokenizer: Any, folder: Path) -> None:
    """Write all of a SentenceTransformer but its Transformers model and tokenizer, which are in the folder already."""
    twin, first = copy.copy(found), copy.copy(found[0])
    twin._modules = {**found._modules, next(iter(found._modules)): first}
    # As in hf_posenc.patch: without this key the length is cut down to config.max_position_embeddings on loading.
    first.config_keys = [*type(first).config_keys, "max_seq_length"]
    first.processor = tokenizer
    first.save = lambda path, **options: first.save_config(path)
    twin.save_pretrained(str(folder), create_model_card=False)
