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


class Features(dict[str, Tensor]):
    """A batch of images or audio without padding, as the one argument of a stack, `[N, …]`.

    tokens: the number of tokens that the stack computes from each.
    """

    tokens: int


def read_features(inputs: Any, name: str, count: int) -> Tensor:
    """The first `count` images or audio inputs, `[N, …]`, on the CPU.

    inputs: batches as a processor returns them, one batch, or its tensor. name: the argument of the model.

    Raises ValueError for anything else, and for padding.
    """
    given = [inputs] if isinstance(inputs, (Tensor, Mapping)) else inputs
    allowed = f"Pass batches as a processor returns them, all of one shape: {{{name!r}: tensor [N, …]}}."
    if isinstance(given, str) or not (hasattr(given, "__iter__") or hasattr(given, "__getitem__")):
        raise ValueError(f"inputs={short_repr(inputs)[:100]} isn't a sequence of batches. {allowed}")
    found: list[Tensor] = []
    for batch in given:
        batch = {name: batch} if isinstance(batch, Tensor) else batch
        values = batch.get(name) if isinstance(batch, Mapping) else None
        if not isinstance(values, Tensor) or values.ndim < 2 or not values.is_floating_point():
            raise ValueError(f"inputs contains {short_repr(batch)[:100]}, which isn't supported. {allowed}")
        for mask in (batch.get(key) for key in (MASK, "pixel_mask")):
            if mask is not None and not bool(torch.as_tensor(mask).all()):
                raise ValueError(f"inputs contains padding, which calibration doesn't support. Crop the inputs. {allowed}")
        if found and found[0].shape[1:] != values.shape[1:]:
            raise ValueError(f"inputs contains the shapes {[*found[0].shape]} and {[*values.shape]}. {allowed}")
        found.append(values.detach().cpu())
        if sum(map(len, found)) >= count:
            break
    if not sum(map(len, found)):
        raise ValueError(f"inputs is empty. Pass about 32 inputs of your domain. {allowed}")
    return torch.cat(found)[:count]


def real_tokens(batch: Batch) -> Tensor:
    """A mask of the tokens in a batch that aren't padding, `[N, L]`."""
    if isinstance(batch, Features):
        (values,) = batch.values()
        return torch.ones(len(values), batch.tokens, dtype=torch.bool, device=values.device)
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
