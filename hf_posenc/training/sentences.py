"""SentenceTransformers in training. Their modules pool the hidden states and are saved unchanged."""

import copy
from pathlib import Path
from typing import Any

import torch

from hf_posenc.modeling.sentence_transformers import is_sentence_transformer
from hf_posenc.serialization.sentence_models import load_sentence_model


def load(name: str) -> Any:
    """The SentenceTransformer in a directory or on the Hub, frozen, or None for a Transformers model.

    Raises SystemExit if its modules can't be loaded.
    """
    try:
        found = load_sentence_model(name, ("SentenceTransformer",), model_kwargs={"dtype": torch.float32})
    except ImportError:
        raise SystemExit(f"{name} has modules of sentence-transformers. Run: pip install sentence-transformers") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise SystemExit(f"{name}: {error}") from None
    if found is not None and not is_sentence_transformer(found):
        raise SystemExit(f"{name} begins with a {type(found[0]).__name__}. Its first module must be a Transformers model.")
    return found and found.requires_grad_(False).eval()


def described(found: Any) -> str:
    """A description of the pooling."""
    if found is None:
        return "the mean over tokens"
    modules = [(type(module).__name__, getattr(module, "pooling_mode", None)) for module in list(found)[1:]]
    return ", ".join(f"{name} ({mode})" if mode else name for name, mode in modules)


def save(found: Any, tokenizer: Any, folder: Path) -> None:
    """Write a SentenceTransformer without its Transformers model and tokenizer, which are already in the directory."""
    twin, first = copy.copy(found), copy.copy(found[0])
    twin._modules = {**found._modules, next(iter(found._modules)): first}
    # As in hf_posenc.patch. Without this key, loading reduces the length to config.max_position_embeddings.
    first.config_keys = [*type(first).config_keys, "max_seq_length"]
    first.processor = tokenizer
    first.save = lambda path, **options: first.save_config(path)
    twin.save_pretrained(str(folder), create_model_card=False)
