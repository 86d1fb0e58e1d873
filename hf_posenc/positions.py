"""The positions of one forward pass: made from the arguments of a stack, handed down in one keyword argument.

Shapes: B batch, L tokens, D hidden_size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc import attention
from hf_posenc.calls import Call
from hf_posenc.encodings import PositionContext, positions_of


@dataclass(frozen=True)
class Beginning:
    """Makes the `PositionContext` of a patched stack, before its host's forward.

    names: the arguments of that forward, in order.
    offset: the id of the first token.
    refused: arguments by which the host's own positions would be given by hand.
    needs_token_types: whether the host cuts missing token types from a buffer as long as its old table (BERT).
    """

    names: list[str]
    offset: int
    refused: tuple[str, ...]
    needs_token_types: bool

    def __call__(self, stack: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments with the `PositionContext` of this forward pass in them.

        Explicit `position_ids`, counted as the host counts them, win; else they come from the attention mask (see
        `positions_of`).
        """
        call = Call(self.names, args, kwargs)
        for name in self.refused:
            if call[name] is not None:
                raise ValueError(
                    f"{name} given by hand are the positions of the stock {type(stack).host_class.__name__}, which this model "
                    f"doesn't use: leave them out, or give position_ids"
                )
        cache, mask, ids, embeds = (
            call[name] for name in ("past_key_values", "attention_mask", "position_ids", "inputs_embeds")
        )
        if embeds is None and call["input_ids"] is None:
            return args, kwargs  # the host says what is missing
        shape, device = (
            (embeds.shape[:-1], embeds.device) if embeds is not None else (call["input_ids"].shape, call["input_ids"].device)
        )
        length = shape[-1]
        past = 0 if cache is None else cache.get_seq_length()
        # A static cache counts in place, and its first layer would change this number.
        past = past.clone() if isinstance(past, Tensor) else past
        _check_length(stack, length, past, cache)
        if ids is None:
            ids, start = positions_of(length, past, mask if isinstance(mask, Tensor) else None, device)
            consecutive = True
        else:
            if ids.shape[-1] != length:
                raise ValueError(
                    f"position_ids have shape {tuple(ids.shape)}, but the input has {length} tokens: give each one"
                )
            if ids.ndim > 2:
                raise ValueError(
                    f"position_ids have shape {tuple(ids.shape)}, but the {stack.config.position_spec.type!r} encoding has one "
                    "position for each token: give [batch, length]"
                )
            ids = _from_zero(stack, ids.reshape(-1, length).long(), self.offset)
            start, consecutive = past - ids[:, :1], _rises_by_one(ids)
        context = PositionContext(
            stack.posenc,
            positions=ids,
            past=past,
            start=start,
            consecutive=consecutive,
            first_keys=_first_keys(cache, length, getattr(stack.config, "layer_types", None)),
        )
        changes: dict[str, Any] = {"position_ids": ids + self.offset, attention.CONTEXT: context}
        if call["logits_to_keep"] is not None:
            # Gemma 4 would drop all other queries in its last layers. Its head takes what it needs of all outputs.
            changes["logits_to_keep"] = 0
        if self.needs_token_types and call["token_type_ids"] is None:
            changes["token_type_ids"] = torch.zeros(shape, dtype=torch.long, device=device)
        return call.changed(**changes)


def _first_keys(cache: Any, length: int, kinds: Any) -> tuple[int, ...]:
    """By layer, the index of the first key that a cache gives out next: above 0 where a sliding window has dropped keys.

    kinds: of the layers. One that the cache holds nothing of reuses the keys of the last one of its kind that it holds.
    """
    if cache is None or not any(cache.is_sliding):
        return ()
    first: list[int] = []
    by_kind: dict[Any, int] = {}
    for layer, is_empty in enumerate(cache.is_dummy):
        kind = kinds[layer] if kinds else None
        if not is_empty:
            by_kind[kind] = cache.get_mask_sizes(length, layer)[1]
        first.append(by_kind.get(kind, 0))
    return tuple(first)


def _from_zero(stack: Any, ids: Tensor, offset: int) -> Tensor:
    """Ids in the host's own count, whose first token has the id `offset`, and padding the one before -> positions."""
    if offset == 0:
        return ids
    # Worth reading values even on a GPU: ids from 0 would be silently wrong, and ids given by hand are rare here.
    if not torch.compiler.is_compiling() and ids.numel() and ids.min() < offset - 1:
        raise ValueError(
            f"position_ids begin at {int(ids.min())}, but {type(stack).__name__} counts its first token as {offset} and "
            f"padding as {offset - 1}, patched or not: add {offset} to ids that count from 0"
        )
    return (ids - offset).clamp(min=0)


def _rises_by_one(ids: Tensor) -> bool:
    """Whether all rows are consecutive. Not assumed where reading values would stall a GPU or break a trace."""
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return torch.equal(ids, ids[:, :1] + torch.arange(ids.shape[1]))


def _check_length(stack: Any, length: int, past: Any, cache: Any) -> None:
    limit = stack.posenc.geometry.max_length
    if limit is None:
        return
    if cache is not None and cache.is_compileable:
        # A static cache counts on its device; its size is known without asking.
        total, what = cache.get_max_length(), "a static cache of"
    else:
        total, what = past + length, "an input of" if cache is None else "an input with its cache of"
    if total > limit:
        spec = stack.config.position_spec
        if spec.encoding.needs_max_length(stack.posenc.geometry):
            longer = "; it has no positions beyond, and more of them would have to be trained"
        else:
            longer = ", or raise the promise: hf_posenc.extend(model, max_length=…)"
        raise ValueError(
            f"{what} {total} tokens is longer than max_length={limit} of this model's {spec.type!r} encoding: truncate the "
            f"input (tokenizer: truncation=True, max_length=…){longer}"
        )
