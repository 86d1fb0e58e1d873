"""Texts as token IDs: strings that a tokenizer encodes, or tokenized batches.

Shapes: N texts, L tokens.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_posenc.encodings import short_repr

INPUTS, MASK = ("input_ids", "token_type_ids"), "attention_mask"
INTEGERS = (torch.int64, torch.int32)
"""The dtypes of IDs that embeddings accept."""
Batch = Mapping[str, Tensor]
"""Tensors `[N, L]`: input_ids, with an optional attention_mask and token_type_ids."""
Texts = Iterable[str] | Iterable[Batch] | Batch | Tensor
"""Strings, batches, one batch, or its input_ids."""
ALLOWED = (
    "Pass strings (for a dataset, (row['text'] for row in dataset)), or batches of integer tensors of one shape [N, L]: "
    "input_ids with an optional attention_mask and token_type_ids (tokenizer(texts, padding=True, return_tensors='pt'))."
)


def read_rows(texts: Any, tokenizer: Any, length: int | None = None, special: bool = True) -> Iterator[dict[str, Tensor]]:
    """Yield each text as name -> `[L]`, on the CPU, without padding, truncated to `length` tokens. Texts are read lazily.

    tokenizer: a tokenizer, or a function with the same arguments. None if all texts are batches.
    special: whether strings get special tokens. Without them, a string has only input_ids.

    Raises ValueError for anything but texts, and for strings without a tokenizer.
    """
    if isinstance(texts, (Tensor, Mapping)):
        texts = [{INPUTS[0]: texts} if isinstance(texts, Tensor) else texts]
    if isinstance(texts, str) or not (hasattr(texts, "__iter__") or hasattr(texts, "__getitem__")):
        raise ValueError(f"texts={short_repr(texts)[:100]} isn't a sequence of texts. {ALLOWED}")
    for given in texts:
        if isinstance(given, str):
            if tokenizer is None:
                raise ValueError(
                    "texts contains strings, but no tokenizer with a vocabulary was found. Pass tokenizer=…, or batches."
                )
            settings: dict[str, Any] = {"verbose": False} if length is None else {"truncation": True, "max_length": length}
            encoded = tokenizer(given, **settings, **({} if special else {"add_special_tokens": False}))
            yield {name: torch.tensor(encoded[name], dtype=torch.long) for name in INPUTS[: 1 + special] if name in encoded}
        elif _is_batch(given):
            names = [name for name in INPUTS if given.get(name) is not None]
            for row, real in enumerate(real_tokens(given)):
                yield {name: given[name][row][real][:length].cpu() for name in names}
        else:
            raise ValueError(f"texts contains {short_repr(given)[:100]}, which isn't supported. {ALLOWED}")


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The IDs of the special tokens that a tokenizer adds before a text, and after it."""
    whole, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    start = next(place for place in range(len(whole)) if whole[place : place + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]


def real_tokens(batch: Batch) -> Tensor:
    """A mask of the tokens in a batch that aren't padding, `[N, L]`."""
    mask = batch.get(MASK)
    return torch.ones_like(batch[INPUTS[0]], dtype=torch.bool) if mask is None else mask.bool()


def padded(rows: list[dict[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    """Combine rows into a batch, which is empty without rows. If only some rows have token types, the others get type 0."""
    batch = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name, torch.zeros_like(row[INPUTS[0]])) for row in rows]
        batch[name] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True).to(device)
    sizes = torch.tensor([len(row[INPUTS[0]]) for row in rows])
    if len({*sizes.tolist()}) > 1:
        batch[MASK] = (torch.arange(int(sizes.max())) < sizes[:, None]).long().to(device)
    return batch


def _is_batch(given: Any) -> bool:
    if not isinstance(given, Mapping):
        return False
    ids, *others = [given.get(name) for name in (*INPUTS, MASK)]
    return (
        isinstance(ids, Tensor)
        and ids.ndim == 2
        and ids.dtype in INTEGERS
        and all(other is None or (isinstance(other, Tensor) and other.shape == ids.shape) for other in others)
    )
