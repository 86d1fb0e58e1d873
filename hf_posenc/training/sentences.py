"""SentenceTransformers in training: the modules behind their Transformers model pool its states, and are saved as they were."""

import copy
from pathlib import Path
from typing import Any

import torch

from hf_posenc.modeling.sentence_transformers import is_sentence_transformer
from hf_posenc.serialization.sentence_models import load_sentence_model


def load(name: str) -> Any:
    """The SentenceTransformer in a folder or on the Hub, frozen; None for a plain Transformers model.

    Raises SystemExit where its modules would be lost.
    """
    try:
        found = load_sentence_model(name, ("SentenceTransformer",), model_kwargs={"dtype": torch.float32})
    except ImportError:
        raise SystemExit(f"{name} has modules of sentence-transformers: pip install sentence-transformers") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise SystemExit(f"{name}: {error}") from None
    if found is not None and not is_sentence_transformer(found):
        raise SystemExit(f"{name} begins with a {type(found[0]).__name__}: allowed is a Transformers model")
    return found and found.requires_grad_(False).eval()


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
