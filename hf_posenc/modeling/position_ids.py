"""Computes the positions of a forward pass from the arguments of a stack.

Shapes: B batch, L tokens, D hidden_size.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_posenc import _compat
from hf_posenc.attention import dispatch
from hf_posenc.configuration import PositionSpec
from hf_posenc.encodings import CrossContext, PositionContext, length_of, position_ids_from_mask, positions_of
from hf_posenc.encodings.context import CURRENT
from hf_posenc.modeling import cache_positions
from hf_posenc.signatures import IS_CAUSAL, TOKEN_INPUTS, BoundCall

TEXT_AND_GRID = 4
"""The number of rows of M-RoPE's position IDs, if text positions precede those in time, height, and width."""


@dataclass(frozen=True)
class OuterCall:
    """The arguments of a composite model in which a stack reads the tokens.

    padding: its attention mask `[B, K]`, if that is 2-D. The model may pass another mask to the stack, without the padding.
    has_position_ids: whether it received position_ids. Otherwise, it created those that reach the stack.
    """

    stack: Any
    padding: Tensor | None
    has_position_ids: bool


@contextlib.contextmanager
def recorded_outer_call(stack: Any, call: BoundCall) -> Iterator[None]:
    """Record the arguments of the outermost model that contains a stack until its forward pass ends."""
    before, mask = CURRENT.outer_call, call["attention_mask"]
    if before is None or before.stack is not stack:
        padding = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        CURRENT.outer_call = OuterCall(stack, padding, call["position_ids"] is not None)
    try:
        yield
    finally:
        CURRENT.outer_call = before


@dataclass(frozen=True)
class StackState:
    """The encoding of a patched stack, as its `posenc_state`.

    spec: the spec of the encoding in this stack. inputs: computes the positions of its forward passes.
    locations: mechanism of the encoding -> paths of the modules in which it applies.
    """

    spec: PositionSpec
    inputs: "PositionInputs"
    locations: Mapping[str, tuple[str, ...]]


def longest_input(stack: Any) -> int | None:
    """The maximum input length of a patched stack in tokens. None for no limit."""
    spec = stack.posenc_state.spec
    return stack.posenc.geometry.max_length if spec.windows is None else spec.max_length


@dataclass(frozen=True)
class PositionInputs:
    """Creates the `PositionContext` of a patched stack before the original forward, and updates its cache afterwards.

    names: the argument names of that forward, in order.
    passes_keywords: whether it accepts other keyword arguments.
    tokens: the argument for token IDs.
    offset: the position ID of the first token.
    `refused`: arguments that would set the original positions explicitly.
    needs_token_types: whether the model slices default token types from a buffer with the original length (BERT).
    extra_tokens, windows: fields of the `PatchLayout` of a stack that computes its tokens itself.
    replaces: whether the original positions were removed. Otherwise, the arguments don't change.
    flattens: whether a stack reads input IDs with more dimensions, `[B, choices, L]`, as one text per row of L.
    counts_shown: whether positions count the tokens that the mask shows, also where tokens see later ones (DETR).
    causal_flags: config flags that select the stack's masks, name -> value when the encoding was built.
    """

    names: list[str]
    passes_keywords: bool = False
    tokens: str = "input_ids"
    offset: int = 0
    refused: tuple[str, ...] = ()
    needs_token_types: bool = False
    extra_tokens: tuple[int, int] = (0, 0)
    windows: bool = False
    replaces: bool = True
    flattens: bool = False
    counts_shown: bool = False
    causal_flags: Mapping[str, bool] = field(default_factory=dict)

    def prepare(self, stack: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], PositionContext | None]:
        """The new arguments and the `PositionContext` of this forward pass. They contain it if the original model passes it on.

        Explicit `position_ids`, counted as the original model counts them, take precedence. Otherwise, positions come from the
        attention mask. In decoders, after cached keys, and in padded images, they count the tokens that the mask shows
        (`position_ids_from_mask`). Elsewhere, they are indices from the first token that the mask shows (`positions_of`).
        """
        call = BoundCall(self.names, args, kwargs)
        self._check_causal_flags(stack, call)
        for name in self.refused if self.replaces else ():
            if call[name] is not None:
                raise ValueError(
                    f"{name} sets the positions of the original {type(stack).original_class.__name__}, which this model "
                    "doesn't use. Omit it, or pass position_ids."
                )
        tokens, call = self._by_text(call)
        args, kwargs, ids = call.args, call.kwargs, call["position_ids"]
        if tokens is None and ids is None and not self._lacks_tokens(stack, call):
            return self._changed(call, self._of_unknown_number(stack, call))
        known = ids if tokens is None else tokens
        if known is None:
            return args, kwargs, None  # the original model reports what is missing
        if ids is None and call["cu_seq_lens_q"] is not None:
            raise ValueError(
                "cu_seq_lens_q gives the ends of packed texts, but not the positions of their tokens. Pass position_ids that "
                "restart with each text, as DataCollatorWithFlattening does."
            )
        shape, device = torch.atleast_2d(known).shape, known.device
        length = shape[-1]
        # An audio mask covers samples or features, not the tokens that are computed from them.
        cache, mask = call.of_type(Cache), None if tokens is None else _mask_of(call, length)
        past = _length_of(cache)
        cache_positions.check_cache_length(cache, past)
        padding = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        if (outer := CURRENT.outer_call) is not None and outer.stack is stack:
            padding = _padding_of(outer, shape, past) if padding is None else padding
            ids = ids if outer.has_position_ids or ids is None else _recomputed_position_ids(ids, padding, past, length)
        given = ids
        if ids is not None:
            ids = self._from_zero(stack, ids, length, mask)
        if self.replaces:
            _check_length(stack, length, past, cache, ids)
        counts_shown = self.counts_shown or stack.posenc.geometry.is_causal
        positions, start, keys, counted = _positions(ids, padding, cache, past, shape, device, counts_shown)
        cross = stack.posenc._modules.get("cross")
        context = PositionContext(
            stack.posenc,
            positions=positions,
            past=past,
            start=start,
            keys=keys,
            counted=counted,
            first_keys=_first_keys(cache, length, getattr(stack.config, "layer_types", None)),
            cross=None if cross is None else CrossContext(cross, call["encoder_attention_mask"]),
        )
        if not self.replaces:
            return args, kwargs, context
        changes: dict[str, Any] = {}
        if "position_ids" in self.names:
            # One row per text, because XLM asserts that shape. Other models detect packed texts in the first of several rows.
            rows = (shape[0], -1) if given is None or given.ndim < 3 else given.shape
            changes["position_ids"] = (positions + self.offset).expand(rows)
        if call["logits_to_keep"] is not None:
            # Otherwise, Gemma 4 drops all other queries in its last layers. Its head selects what it needs from all outputs.
            changes["logits_to_keep"] = 0
        if self.needs_token_types and call["token_type_ids"] is None:
            changes["token_type_ids"] = torch.zeros(shape, dtype=torch.long, device=device)
        return self._changed(call, context, **changes)

    def _by_text(self, call: BoundCall) -> tuple[Tensor | None, BoundCall]:
        """One number per token, `[B, L]` or `[L]`, and the call with as many rows in its mask and position_ids.

        The numbers are None if the stack computes its tokens itself.

        Raises ValueError for inputs of other shapes.
        """
        embeds = call["inputs_embeds"]
        tokens = call[self.tokens] if embeds is None else embeds
        if isinstance(tokens, list):  # feature maps of several sizes (RT-DETR)
            return None, call
        if tokens is None or tokens.ndim < 3:
            return tokens, call
        if embeds is None and self.flattens:
            by_row = {name: call[name] for name in ("attention_mask", "position_ids")}
            by_row = {name: given.flatten(0, -2) for name, given in by_row.items() if given is not None and given.ndim == 3}
            call = BoundCall(self.names, *call.changed(**by_row))
            tokens, mask = tokens.flatten(0, -2), call["attention_mask"]
            if mask is not None and len(mask) != len(tokens):
                raise ValueError(
                    f"attention_mask has {len(mask)} rows for {len(tokens)} texts. Give it the shape of input_ids, or one row "
                    "for each text."
                )
            return tokens, call
        if tokens.ndim > 3:
            raise ValueError(
                f"inputs_embeds has shape {tuple(tokens.shape)}. Pass [batch, length, hidden_size], with each choice as a row."
            )
        return tokens[..., 0], call  # embeddings, or several IDs per position

    def _check_causal_flags(self, stack: Any, call: BoundCall) -> None:
        """Raises ValueError if the stack would create other masks than those that its encoding was built for.

        It creates none if it receives a complete mask, as in continuous batching.
        """
        mask = call["attention_mask"]
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim < 4):
            return
        for name, before in self.causal_flags.items():
            now, given = getattr(stack.config, name, before), call[IS_CAUSAL] if name == IS_CAUSAL else None
            if bool(now if given is None else given) != before:
                raise ValueError(
                    f"{name}={now if given is None else given!r} changes which tokens see each other, but the "
                    f"{stack.posenc_state.spec.type!r} encoding of this model was built for {name}={before}. Set it in the "
                    "config before the model is built and patched. from_pretrained accepts a config."
                )

    def _lacks_tokens(self, stack: Any, call: BoundCall) -> bool:
        """Whether a stack that reads tokens received neither tokens nor another input to compute them from."""
        given = (call[name] for name in ("inputs_embeds", stack.main_input_name))
        return not TOKEN_INPUTS.isdisjoint(self.names) and all(each is None for each in given)

    def _of_unknown_number(self, stack: Any, call: BoundCall) -> PositionContext:
        """The context of a stack that computes its tokens itself from an image or audio."""
        from hf_posenc.architectures import own_tokens

        unknown, cache = torch.empty(0, 0, dtype=torch.long), call.of_type(Cache)
        return PositionContext(
            stack.posenc,
            positions=unknown,
            past=_length_of(cache),
            start=unknown,
            # The start of a sliding window doesn't depend on the number of new tokens.
            first_keys=_first_keys(cache, 1, getattr(stack.config, "layer_types", None)),
            patches=own_tokens.layout_of(call, self.extra_tokens, self.windows),
        )

    def _changed(
        self, call: BoundCall, context: PositionContext, **changes: Any
    ) -> tuple[tuple, dict[str, Any], PositionContext]:
        # Stacks that accept position_ids pass other arguments on to their layers (see `dispatch.CONTEXT`).
        if "position_ids" in self.names and self.passes_keywords:
            changes[dispatch.CONTEXT] = context
        return *call.changed(**changes), context

    def _from_zero(self, stack: Any, ids: Tensor, length: int, mask: Any) -> Tensor | None:
        """Positions `[1 or B, L]` from the original IDs, which are `offset` for the first token and `offset - 1` for padding.

        A one-dimensional encoding can't use M-RoPE's rows (time, height, width). If a row of text positions precedes them, as
        in `generate`, that row is used. Otherwise, the result is None, and tokens are counted.
        """
        if ids.shape[-1] != length:
            raise ValueError(
                f"position_ids has shape {tuple(ids.shape)}, but the input has {length} tokens. Pass one ID for each."
            )
        if ids.ndim == 3 and len(ids) == TEXT_AND_GRID:
            ids = ids[0]
        elif ids.ndim == 3 and len(ids) < TEXT_AND_GRID and not _is_packed(ids[0], mask):
            return None
        if ids.ndim > 2:
            raise ValueError(
                f"position_ids has shape {tuple(ids.shape)}, but the {stack.posenc_state.spec.type!r} encoding has one "
                "position for each token. Pass [batch, length]. For several texts in one row of a vision model, pass "
                "[4, batch, length], with the positions in each text before those in time, height, and width."
            )
        ids = ids.reshape(-1, length).long()
        if self.offset == 0:
            return ids
        # This reads values even on a GPU, because IDs from 0 would be silently wrong. Explicit position_ids are rare here.
        if not torch.compiler.is_compiling() and ids.numel() and ids.min() < self.offset - 1:
            raise ValueError(
                f"position_ids starts at {int(ids.min())}, but {type(stack).__name__} counts its first token as {self.offset} "
                f"and padding as {self.offset - 1}, patched or not. Add {self.offset} to IDs that count from 0."
            )
        return (ids - self.offset).clamp(min=0)

    def store_in_cache(self, args: tuple, kwargs: dict[str, Any], context: PositionContext | None, output: Any) -> None:
        """Store the positions of all keys with the cache that the original forward has filled, if it doesn't indicate them."""
        call = BoundCall(self.names, args, kwargs)
        values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
        cache = call.of_type(Cache)
        if cache is None:
            cache = next((value for value in values if isinstance(value, Cache)), None)
        tokens, _ = self._by_text(call)
        if context is not None and cache is not None and tokens is not None and not _compat.is_exporting():
            cache_positions.store_positions(cache, len(tokens), context)


def _mask_of(call: BoundCall, length: int) -> Any:
    """The mask argument of a stack of tokens, also from XLNet's `input_mask` (1 for padding) or XLM's `lengths`."""
    if (mask := call["attention_mask"]) is not None:
        return mask
    if isinstance(padding := call["input_mask"], Tensor):
        return (padding == 0).long()
    if isinstance(lengths := call["lengths"], Tensor) and lengths.ndim == 1:
        return (torch.arange(length, device=lengths.device) < lengths[:, None]).long()
    return None


def _is_packed(times: Tensor, mask: Any) -> bool:
    """Whether positions in time `[B, L]` decrease anywhere, as for several texts in one row. Padding is ignored."""
    if torch.compiler.is_compiling() or times.shape[-1] < 2:
        return False
    falls = times.diff(dim=-1) < 0
    if isinstance(mask, Tensor) and mask.ndim == 2:
        shown = mask[:, -times.shape[-1] :] != 0
        falls = falls & shown[:, 1:] & shown[:, :-1]
    return bool(falls.any())


def _length_of(cache: Cache | None) -> int | Tensor:
    """The number of cached keys."""
    past = 0 if cache is None else cache.get_seq_length()
    # A static cache counts in place, so its first layer would change this number.
    return past.clone() if isinstance(past, Tensor) else past


def _padding_of(outer: OuterCall, shape: Sequence[int], past: int | Tensor) -> Tensor | None:
    """The mask of the composite model, if it has a column for each token of the stack. Some models prepend tokens."""
    mask = outer.padding
    if mask is None or len(mask) != shape[0]:
        return None
    fits = mask.shape[1] >= shape[1] if isinstance(past, Tensor) else mask.shape[1] == past + shape[1]
    return mask if fits else None


def _fill_padding_positions(keys: Tensor, shown: Tensor) -> Tensor:
    """Positions of keys `[B, K]`, in which padding between shown keys has the position of the shown key before it."""
    index = torch.arange(keys.shape[1], device=keys.device)
    last = torch.where(shown.to(keys.device), index, -1).cummax(-1).values
    return torch.where(last < 0, keys, keys.gather(1, last.clamp(min=0)))


def _recomputed_position_ids(ids: Tensor, padding: Tensor | None, past: int | Tensor, length: int) -> Tensor | None:
    """The position IDs that a composite model created for its stack, `[1 or B, L]`, changed to count what its mask shows.

    Models that continue counting after the cache, with or without padding, start at 0, or at 1 (PaliGemma). After an image,
    Qwen2-VL also creates IDs for all cached tokens. Then the result is None, and the new tokens are counted.
    """
    if ids.shape[-1] != length:
        return None
    if padding is None or ids.ndim > 2:
        return ids
    index = (torch.arange(length, device=ids.device) + past)[None]
    ids = ids.reshape(-1, length)
    first = ids[:, :1] - index[:, :1]
    counts_on = ((ids == index + first) & (first >= 0)).all()
    shown = position_ids_from_mask(padding).to(ids.device)[:, index[0].clamp(max=padding.shape[1] - 1)]
    return torch.where(counts_on, shown + first, ids)


def _first_keys(cache: Any, length: int, kinds: Any) -> tuple[int, ...]:
    """The index of the first key that a cache returns next, by layer. It is above 0 if a sliding window has dropped keys.

    kinds: types of the layers. A layer without cached keys reuses those of the last cached layer of its type. Before
        Transformers 5.23, the cache has no entry for it.
    """
    if cache is None or not any(cache.is_sliding):
        return ()
    first: list[int] = []
    by_kind: dict[Any, int] = {}
    held = cache_positions.holds_keys(cache)
    for layer in range(max(len(held), len(kinds or ()))):
        kind = kinds[layer] if kinds else None
        if layer < len(held) and held[layer]:
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
    counts_shown: bool,
) -> tuple[Tensor, Tensor | int, Tensor | None, bool]:
    """The fields positions, start, keys, and counted of a `PositionContext`.

    ids: explicit positions, `[1 or B, L]`. mask: `[B, K]`. shape: B and L. counts_shown: whether only shown tokens count.
    """
    batch, length = shape
    if cache is None and ids is None and not counts_shown:
        return *positions_of(length, 0, mask, device), None, False
    remembered = None if cache is None else cache_positions.load_positions(cache, batch, past)
    index = (torch.arange(length, device=device) + past)[None]
    room = cache_positions.static_capacity(cache)
    if ids is None and remembered is None and room is None and (mask is None or _shows_all(mask, past, length)):
        return index, 0, None, False
    seen = None if mask is None else position_ids_from_mask(mask)
    if seen is not None and room is None and seen.shape[1] < past + length:
        raise ValueError(
            f"attention_mask has {seen.shape[1]} columns for {past} cached and {length} new tokens. Pass one for each token."
        )
    new = index if seen is None else seen[:, index[0].clamp(max=seen.shape[1] - 1)]
    new = new if ids is None else ids
    counted = ids is None and remembered is None
    if cache is None:
        keys = new
    elif room is not None:
        there = torch.arange(room, device=device)[None] if remembered is None else remembered.to(device)
        keys = there.expand(batch, -1).index_copy(1, index[0], new.expand(batch, -1))
        return new.clamp(min=0), 0, keys, counted
    else:
        there = torch.arange(int(past), device=device)[None] if seen is None else seen[:, :past]
        there = there if remembered is None else remembered.to(device)
        keys = torch.cat([there.expand(batch, -1), new.expand(batch, -1)], dim=1)
        if ids is not None and mask is not None and mask.shape[1] >= keys.shape[1]:
            keys = _fill_padding_positions(keys, mask[:, : keys.shape[1]] != 0)
    # Explicit position_ids also apply to padding. `generate` starts after the padding of a right-padded prompt.
    shown = None if mask is None or ids is not None else mask[:, : keys.shape[1]] != 0
    start, rises = _contiguous_start(keys, shown, length)
    return new.clamp(min=0), start, None if rises else keys, counted and not rises


def _shows_all(mask: Tensor, past: int | Tensor, length: int) -> bool:
    """Whether a mask `[B, K]` shows all cached and new keys. False if it can't be read."""
    return _compat.is_readable(mask) and mask.shape[1] >= int(past) + length and bool((mask != 0).all())


def _contiguous_start(keys: Tensor, shown: Tensor | None, length: int) -> tuple[Tensor, bool]:
    """The index at which position 0 would be, `[1 or B, 1]`, and whether all shown keys' positions rise by one from there.

    A traced graph can't read values, and a decoding step shouldn't wait for a GPU, so the second result is False there.
    """
    offset = torch.arange(keys.shape[1], device=keys.device) - keys
    if torch.compiler.is_compiling() or (length == 1 and not _compat.is_readable(keys)):
        return offset[:, -1:], False
    if shown is None:
        start = offset[:, -1:]
        return start, bool((offset == start).all())
    offset = offset.expand(len(shown), -1)
    last = shown.shape[1] - 1 - shown.int().flip(-1).argmax(dim=-1, keepdim=True)
    start = offset.gather(1, last)
    return start, bool(((offset == start) | ~shown).all())


def _check_length(stack: Any, length: int, past: Any, cache: Any, ids: Tensor | None) -> None:
    """Raises ValueError for positions of max_length or more.

    Explicit positions count instead of tokens, because a row can contain several texts.
    """
    limit = stack.posenc.geometry.max_length
    if limit is None:
        return
    # A static cache counts on its device, but its size is known without reading the count.
    is_static = cache is not None and cache.is_compileable
    total = cache.get_max_length() if is_static else length_of(past + length, ids, limit)
    if total <= limit:
        return  # before a message formats the length, for which torch.compile would compile each length separately
    if is_static:
        what = f"A static cache of {total} tokens is longer than"
    elif ids is not None and total != past + length:
        what = f"position_ids up to {total - 1 + stack.posenc_state.inputs.offset} don't fit"
    else:
        what = f"An input {'' if cache is None else 'with its cache '}of {past + length} tokens is longer than"
    spec = stack.posenc_state.spec
    if spec.encoding.needs_max_length(stack.posenc.geometry):
        longer = ", or extend the model with hf_posenc.extend(model, max_length, method=…)"
    else:
        longer = ", or raise the limit with hf_posenc.extend(model, max_length=…)"
    raise ValueError(
        f"{what} max_length={limit} of this model's {spec.type!r} encoding. Truncate the "
        f"input (tokenizer: truncation=True, max_length=…){longer}."
    )
