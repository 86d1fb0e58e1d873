"""The positions of one forward pass: made from the arguments of a stack, handed down in one keyword argument.

Shapes: B batch, L tokens, D hidden_size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_posenc import attention, remembering
from hf_posenc.calls import Call
from hf_posenc.encodings import PositionContext, counted, positions_of


@dataclass(frozen=True)
class ForwardPass:
    """Makes the `PositionContext` of a patched stack before its host's forward, and keeps what its cache needs after it.

    names: the arguments of that forward, in order.
    hands_down: whether it takes further keyword arguments.
    offset: the id of the first token.
    refused: arguments by which the host's own positions would be given by hand.
    needs_token_types: whether the host cuts missing token types from a buffer as long as its old table (BERT).
    aside, windows: of the context of a stack that makes its tokens itself.
    """

    names: list[str]
    hands_down: bool
    offset: int
    refused: tuple[str, ...]
    needs_token_types: bool
    aside: tuple[int, int] = (0, 0)
    windows: bool = False

    def begin(self, stack: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], PositionContext | None]:
        """The arguments with the `PositionContext` of this forward pass in them, if the host passes it on, and that context.

        Explicit `position_ids`, counted as the host counts them, win; else they come from the attention mask: in decoders,
        and behind cached keys, by counting what it shows (`counted`), elsewhere by index from the first that it shows
        (`positions_of`).
        """
        call = Call(self.names, args, kwargs)
        for name in self.refused:
            if call[name] is not None:
                raise ValueError(
                    f"{name} given by hand are the positions of the stock {type(stack).host_class.__name__}, which this model "
                    f"doesn't use: leave them out, or give position_ids"
                )
        ids, embeds = call["position_ids"], call["inputs_embeds"]
        if not {"input_ids", "inputs_embeds"} & {*self.names}:
            unknown = torch.empty(0, 0, dtype=torch.long)
            context = PositionContext(stack.posenc, unknown, 0, unknown, aside=self.aside, windows=self.windows)
            return self._changed(call, context)
        if embeds is None and call["input_ids"] is None:
            return args, kwargs, None  # the host says what is missing
        if ids is None and call["cu_seq_lens_q"] is not None:
            raise ValueError(
                "cu_seq_lens_q says where packed texts end, but not where their tokens are: give position_ids which begin anew "
                "with each text, as DataCollatorWithFlattening does"
            )
        shape, device = (
            (embeds.shape[:-1], embeds.device) if embeds is not None else (call["input_ids"].shape, call["input_ids"].device)
        )
        length = shape[-1]
        cache, mask = call.of_type(Cache), call["attention_mask"]
        past = 0 if cache is None else cache.get_seq_length()
        # A static cache counts in place, and its first layer would change this number.
        past = past.clone() if isinstance(past, Tensor) else past
        _check_length(stack, length, past, cache)
        if ids is not None:
            ids = self._from_zero(stack, ids, length)
        padding = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        positions, start, keys = _positions(ids, padding, cache, past, shape, device, stack.posenc.geometry.is_causal)
        context = PositionContext(
            stack.posenc,
            positions=positions,
            past=past,
            start=start,
            keys=keys,
            first_keys=_first_keys(cache, length, getattr(stack.config, "layer_types", None)),
        )
        changes: dict[str, Any] = {}
        if "position_ids" in self.names:
            changes["position_ids"] = positions + self.offset
        if call["logits_to_keep"] is not None:
            # Gemma 4 would drop all other queries in its last layers. Its head takes what it needs of all outputs.
            changes["logits_to_keep"] = 0
        if self.needs_token_types and call["token_type_ids"] is None:
            changes["token_type_ids"] = torch.zeros(shape, dtype=torch.long, device=device)
        return self._changed(call, context, **changes)

    def _changed(self, call: Call, context: PositionContext, **changes: Any) -> tuple[tuple, dict[str, Any], PositionContext]:
        # Hosts which take position_ids hand further arguments down to their layers. For the others the context is the current
        # one of the thread.
        if "position_ids" in self.names and self.hands_down:
            changes[attention.CONTEXT] = context
        return *call.changed(**changes), context

    def _from_zero(self, stack: Any, ids: Tensor, length: int) -> Tensor:
        """Positions `[1 or B, L]` from ids in the host's own count, whose first token has the id `offset`, and padding the one
        before."""
        if ids.shape[-1] != length:
            raise ValueError(f"position_ids have shape {tuple(ids.shape)}, but the input has {length} tokens: give each one")
        if ids.ndim > 2:
            raise ValueError(
                f"position_ids have shape {tuple(ids.shape)}, but the {stack.config.position_spec.type!r} encoding has one "
                "position for each token: give [batch, length]"
            )
        ids = ids.reshape(-1, length).long()
        if self.offset == 0:
            return ids
        # Worth reading values even on a GPU: ids from 0 would be silently wrong, and ids given by hand are rare here.
        if not torch.compiler.is_compiling() and ids.numel() and ids.min() < self.offset - 1:
            raise ValueError(
                f"position_ids begin at {int(ids.min())}, but {type(stack).__name__} counts its first token as {self.offset} "
                f"and padding as {self.offset - 1}, patched or not: add {self.offset} to ids that count from 0"
            )
        return (ids - self.offset).clamp(min=0)

    def end(self, args: tuple, kwargs: dict[str, Any], context: PositionContext | None, output: Any) -> None:
        """Keep the positions of all keys with the cache that the host's forward has filled, where it wouldn't tell them."""
        call = Call(self.names, args, kwargs)
        values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
        cache = call.of_type(Cache)
        if cache is None:
            cache = next((value for value in values if isinstance(value, Cache)), None)
        if context is not None and cache is not None and not torch.compiler.is_exporting():
            tokens = call["input_ids"] if call["inputs_embeds"] is None else call["inputs_embeds"]
            remembering.remember(cache, len(tokens), context)


def see_patches(module: torch.nn.Module, args: tuple, output: Tensor) -> None:
    """Hook of the convolution that cuts an image into patches: tells the context of this forward pass how they lie.

    Where each patch comes as an input by itself, the output has one place, and tells nothing.
    """
    grid = tuple(output.shape[2:])
    if attention.CURRENT.context is not None and math.prod(grid) > 1:
        attention.CURRENT.context.grid = grid


def _first_keys(cache: Any, length: int, kinds: Any) -> tuple[int, ...]:
    """By layer, the index of the first key that a cache gives out next: above 0 where a sliding window has dropped keys.

    kinds: of the layers. One that the cache holds nothing of reuses the keys of the last one of its kind that it holds.
    """
    if cache is None or not any(cache.is_sliding):
        return ()
    first: list[int] = []
    by_kind: dict[Any, int] = {}
    for layer, holds_keys in enumerate(remembering.holds_keys(cache)):
        kind = kinds[layer] if kinds else None
        if holds_keys:
            by_kind[kind] = cache.get_mask_sizes(length, layer)[1]
        first.append(by_kind.get(kind, 0))
    return tuple(first)


def _positions(
    ids: Tensor | None,
    mask: Tensor | None,
    cache: Cache | None,
    past: int | Tensor,
    shape: Sequence[int],
    device: torch.device,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a `PositionContext` has as positions, start and keys.

    ids: positions given by hand, `[1 or B, L]`. mask: `[B, K]`. shape: B and L.
    """
    batch, length = shape
    if cache is None and ids is None and not is_causal:
        return *positions_of(length, 0, mask, device), None
    remembered = None if cache is None else remembering.recall(cache, batch, past)
    index = (torch.arange(length, device=device) + past)[None]
    room = remembering.room(cache)
    if ids is None and mask is None and remembered is None and room is None:
        return index, index.new_zeros(1, 1), None
    seen = None if mask is None else counted(mask)
    if seen is not None and room is None and seen.shape[1] < past + length:
        raise ValueError(
            f"attention_mask has {seen.shape[1]} columns for {past} cached and {length} new tokens: give one for each of them"
        )
    new = index if seen is None else seen[:, index[0].clamp(max=seen.shape[1] - 1)]
    new = new if ids is None else ids
    if cache is None:
        keys = new
    elif room is not None:
        there = torch.arange(room, device=device)[None] if remembered is None else remembered.to(device)
        keys = there.expand(batch, -1).index_copy(1, index[0], new.expand(batch, -1))
        return new.clamp(min=0), index.new_zeros(1, 1), keys
    else:
        there = torch.arange(int(past), device=device)[None] if seen is None else seen[:, :past]
        there = there if remembered is None else remembered.to(device)
        keys = torch.cat([there.expand(batch, -1), new.expand(batch, -1)], dim=1)
    # Ids given by hand hold for padding, too: `generate` begins behind the padding of a right-padded prompt.
    start, rises = _rising(keys, None if mask is None or ids is not None else mask[:, : keys.shape[1]] != 0)
    return new.clamp(min=0), start, None if rises else keys


def _rising(keys: Tensor, shown: Tensor | None) -> tuple[Tensor, bool]:
    """The index at which position 0 would be, `[1 or B, 1]`, and whether the positions of all shown keys rise by one from
    there. In a traced graph, where values can't be read, they are taken to jump."""
    offset = torch.arange(keys.shape[1], device=keys.device) - keys
    if torch.compiler.is_compiling():
        return offset[:, -1:], False
    if shown is None:
        start = offset[:, -1:]
        return start, bool((offset == start).all())
    offset = offset.expand(len(shown), -1)
    last = shown.shape[1] - 1 - shown.int().flip(-1).argmax(dim=-1, keepdim=True)
    start = offset.gather(1, last)
    return start, bool(((offset == start) | ~shown).all())


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
