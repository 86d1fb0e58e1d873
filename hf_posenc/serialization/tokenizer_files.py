"""Loads the tokenizer saved with a model, and checks that it fits the model and its inputs. No other module loads one."""

import copy
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import has_file

from hf_posenc.serialization.saved_files import check_there

logger = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    # Older models have only these files.
    *("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "spm.model", "source.spm"),
)
INVENTED = {"▁", "."}
"""Ordinary tokens, besides the special ones, of the tokenizers that Transformers creates without a vocabulary."""
UNKNOWN = 0.9
"""Minimum share of unknown tokens for which inputs are rejected."""


def load_tokenizer(name: str, gguf_file: str | None = None) -> Any:
    """The tokenizer of a model (a directory or a Hub ID), or None if it has no tokenizer files.

    Raises ValueError for files that can't be loaded or have no vocabulary. Without a vocabulary, Transformers would create a
    tokenizer for which every token is unknown.
    """
    check_there(name)
    if gguf_file is None and not any(has_file(name, file) for file in TOKENIZER_FILES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, gguf_file=gguf_file)
    except (OSError, ImportError):
        raise
    except Exception as error:  # `tokenizers` raises Exception, not a subclass.
        raise ValueError(f"{name} has a tokenizer that can't be loaded: {error}") from error
    check_tokenizer(tokenizer, name)
    return tokenizer


def copied(tokenizer: Any) -> Any:
    """A copy of a tokenizer or processor to save with another model, without references to code elsewhere. None for None.

    With `trust_remote_code=True`, code that an `auto_map` names would run. Saving a class that isn't part of Transformers
    writes such a reference.
    """
    twin = copy.deepcopy(tokenizer)
    for part in (twin, *(getattr(twin, name, None) for name in getattr(type(twin), "get_attributes", list)())):
        drop_foreign_code(part, "tokenizer")
    return twin


def drop_foreign_code(saved: Any, what: str) -> None:
    """Remove the `auto_map` of a tokenizer, a part of a processor, or a model's config. Logs a warning if it names code.

    what: the object's name in the warning.
    """
    dropped: dict[str, None] = {}
    for place in (getattr(saved, "__dict__", {}), getattr(saved, "init_kwargs", None) or {}):
        for name in ("auto_map", "_auto_map"):
            dropped |= dict.fromkeys(_references(place.pop(name, None)))
    if dropped:
        logger.warning(
            "The %s's auto_map refers to code that isn't saved with it (%s). The copy doesn't refer to it.",
            what,
            ", ".join(dropped),
        )


def _references(auto_map: Any) -> list[str]:
    """The classes that an `auto_map` names."""
    if isinstance(auto_map, dict):
        return [name for value in auto_map.values() for name in _references(value)]
    if isinstance(auto_map, (list, tuple)):
        return [name for value in auto_map for name in _references(value)]
    return [str(auto_map)] if auto_map else []


def required_tokenizer(name: str, gguf_file: str | None = None) -> Any:
    """The tokenizer of a model. Raises ValueError if it has no tokenizer files, and in the cases of `load_tokenizer`."""
    tokenizer = load_tokenizer(name, gguf_file)
    if tokenizer is None:
        raise ValueError(f"{name} has no tokenizer. {_remedy(name)}")
    return tokenizer


def check_tokenizer(tokenizer: Any, name: str) -> None:
    """Raises ValueError for a Transformers tokenizer that has only special tokens."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    special = {*tokenizer.all_special_tokens}
    if len(tokenizer) <= len(special) + len(INVENTED) and {*tokenizer.get_vocab()} <= special | INVENTED:
        raise ValueError(f"{name} has a tokenizer without a vocabulary: it has only special tokens. {_remedy(name)}")


def _remedy(name: str) -> str:
    return f"Save the original model's tokenizer there: AutoTokenizer.from_pretrained(ORIGINAL).save_pretrained({name!r})."


def check_ids(ids: Tensor, embedding: Any, where: str) -> None:
    """Raises ValueError for IDs that are outside a model's token `embedding`. (On a GPU, they would end the process.)

    where: the source of the IDs, for the message.
    """
    vocabulary = len(embedding.weight)
    if ids.numel() and (ids.min() < 0 or ids.max() >= vocabulary):
        raise ValueError(
            f"{where} has input_ids from {int(ids.min())} to {int(ids.max())}, but the model's vocabulary has the ids 0 to "
            f"{vocabulary - 1}. Use the tokenizer that the model was trained with."
        )


def check_known(tokenizer: Any, rows: Iterable[Any]) -> None:
    """Raises ValueError if nearly all tokens of the inputs are unknown to the tokenizer.

    tokenizer: a tokenizer, or a method of one.
    rows: the input_ids of the inputs, as tensors or lists.
    """
    tokenizer = getattr(tokenizer, "__self__", tokenizer)
    unknown = getattr(tokenizer, "unk_token_id", None)
    ids = torch.cat([torch.tensor([], dtype=torch.long), *(torch.as_tensor(row).flatten().cpu() for row in rows)])
    if unknown is None or not len(ids):
        return
    special = torch.tensor([number for number in tokenizer.all_special_ids if number != unknown], dtype=torch.long)
    ordinary = ids[~torch.isin(ids, special)]
    count = int((ordinary == unknown).sum())
    if count and count >= UNKNOWN * len(ordinary):
        raise ValueError(
            f"The tokenizer doesn't know the texts: {count} of their {len(ordinary)} tokens are {tokenizer.unk_token!r}. Use "
            "the tokenizer that the model was trained with, and texts in a language that it supports."
        )
