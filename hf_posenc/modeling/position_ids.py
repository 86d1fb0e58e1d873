"""The positions of one forward pass, made from the arguments of a stack.

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
"""Rows of M-RoPE's position ids where positions in the text stand before those in time, height and width."""


@dataclass(frozen=True)
class OuterCall:
    """The arguments of a composite model, one stack of which reads its tokens.

    padding: its attention mask `[B, K]`, if it has two axes. It may pass another one on, which doesn't show padding.
    has_position_ids: whether it was given position_ids. Otherwise those that reach the stack are its own.
    """

    stack: Any
    padding: Tensor | None
    has_position_ids: bool


@contextlib.contextmanager
def recorded_outer_call(stack: Any, call: BoundCall) -> Iterator[None]:
    """Keep the arguments of the outermost model around a stack until its forward ends."""
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
    """What a patched stack knows of its encoding, as `posenc_state`.

    spec: of what acts in it. inputs: makes the positions of its forward passes.
    locations: method of the encoding -> paths of the modules in which it acts by that method.
    """

    spec: PositionSpec
    inputs: "PositionInputs"
    locations: Mapping[str, tuple[str, ...]]


def longest_input(stack: Any) -> int | None:
    """Maximum input length of a patched stack, in tokens. None: no limit."""
    spec = stack.posenc_state.spec
    return stack.posenc.geometry.max_length if spec.windows is None else spec.max_length


@dataclass(frozen=True)
class PositionInputs:
    """Makes the `PositionContext` of a patched stack before the original forward, and keeps what its cache needs afterwards.

    names: the arguments of that forward, in order.
    passes_keywords: whether it takes further keyword arguments.
    offset: the id of the first token.
    refused: arguments that would set the original positions explicitly.
    needs_token_types: whether the model cuts missing token types from a buffer as long as its old table (BERT).
    extra_tokens, windows: of the `PatchLayout` of a stack that makes its tokens itself.
    replaces: whether the host's own positions were taken out; else nothing that it is called with changes.
    flattens: whether a stack takes input ids of more dimensions, `[B, choices, L]`, as one text in each row of L.
    causal_flags: name -> value of the flags of the config by which the stack makes its masks, when the encoding was built.
    """

    names: list[str]
    passes_keywords: bool = False
    offset: int = 0
    refused: tuple[str, ...] = ()
    needs_token_types: bool = False
    extra_tokens: tuple[int, int] = (0, 0)
    windows: bool = False
    replaces: bool = True
    flattens: bool = False
    causal_flags: Mapping[str, bool] = field(default_factory=dict)

    def prepare(self, stack: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], PositionContext | None]:
        """The arguments with the `PositionContext` of this forward pass in them, if the host passes it on, and that context.

        Explicit `position_ids`, counted as the original model counts them, take precedence. Otherwise positions come from the
        attention mask. In decoders and after cached keys, they count what it shows (`position_ids_from_mask`). Elsewhere they
        are indices from the first token that it shows (`positions_of`).
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
            return args, kwargs, None  # the host says what is missing
        if ids is None and call["cu_seq_lens_q"] is not None:
            raise ValueError(
                "cu_seq_lens_q gives the ends of packed texts, but not the positions of their tokens. Pass position_ids that "
                "restart with each text, as DataCollatorWithFlattening does."
            )
        shape, device = torch.atleast_2d(known).shape, known.device
        length = shape[-1]
        # The mask of a sound counts its samples or features, not the tokens that are made of them.
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
        positions, start, keys = _positions(ids, padding, cache, past, shape, device, stack.posenc.geometry.is_causal)
        cross = stack.posenc._modules.get("cross")
        context = PositionContext(
            stack.posenc,
            positions=positions,
            past=past,
            start=start,
            keys=keys,
            first_keys=_first_keys(cache, length, getattr(stack.config, "layer_types", None)),
            cross=None if cross is None else CrossContext(cross, call["encoder_attention_mask"]),
        )
        if not self.replaces:
            return args, kwargs, context
        changes: dict[str, Any] = {}
        if "position_ids" in self.names:
            # One row for each text: XLM asserts its shape, and others see by the first of several whether texts are packed.
            rows = (shape[0], -1) if given is None or given.ndim < 3 else given.shape
            changes["position_ids"] = (positions + self.offset).expand(rows)
        if call["logits_to_keep"] is not None:
            # Gemma 4 would drop all other queries in its last layers. Its head takes what it needs of all outputs.
            changes["logits_to_keep"] = 0
        if self.needs_token_types and call["token_type_ids"] is None:
            changes["token_type_ids"] = torch.zeros(shape, dtype=torch.long, device=device)
        return self._changed(call, context, **changes)

    def _by_text(self, call: BoundCall) -> tuple[Tensor | None, BoundCall]:
        """One number for each token, `[B, L]`, or `[L]`, and the call with a mask and position_ids of as many rows. None where
        the stack makes its tokens itself.

        Raises ValueError for inputs of other shapes.
        """
        embeds = call["inputs_embeds"]
        tokens = call["input_ids"] if embeds is None else embeds
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
        return tokens[..., 0], call  # Vectors, or several ids for each place.

    def _check_causal_flags(self, stack: Any, call: BoundCall) -> None:
        """Raises ValueError if the stack would make other masks than those that its encoding was built for. It makes none where
        it is given one that is ready, as in continuous batching."""
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
        """Whether a stack that reads tokens was given none, nor anything else that it makes them of."""
        return not TOKEN_INPUTS.isdisjoint(self.names) and call[stack.main_input_name] is None

    def _of_unknown_number(self, stack: Any, call: BoundCall) -> PositionContext:
        """The context of a stack that makes its tokens itself, of an image or audio."""
        from hf_posenc.architectures import own_tokens

        unknown, cache = torch.empty(0, 0, dtype=torch.long), call.of_type(Cache)
        return PositionContext(
            stack.posenc,
            positions=unknown,
            past=_length_of(cache),
            start=unknown,
            # Where a sliding window begins doesn't depend on the number of new tokens.
            first_keys=_first_keys(cache, 1, getattr(stack.config, "layer_types", None)),
            patches=own_tokens.layout_of(call, self.extra_tokens, self.windows),
        )

    def _changed(
        self, call: BoundCall, context: PositionContext, **changes: Any
    ) -> tuple[tuple, dict[str, Any], PositionContext]:
        # Stacks that take position_ids pass further arguments on to their layers (see `dispatch.CONTEXT`).
        if "position_ids" in self.names and self.passes_keywords:
            changes[dispatch.CONTEXT] = context
        return *call.changed(**changes), context

    def _from_zero(self, stack: Any, ids: Tensor, length: int, mask: Any) -> Tensor | None:
        """Positions `[1 or B, L]` from ids in the host's own count, whose first token has the id `offset`, and padding the one
        before.

        Of M-RoPE's rows (time, height, width) a position in one dimension has no use. Where another row of positions in the
        text stands before them, as in `generate`, it is taken; else tokens are to be counted: None.
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
        # Worth reading values even on a GPU: ids from 0 would be silently wrong, and ids given by hand are rare here.
        if not torch.compiler.is_compiling() and ids.numel() and ids.min() < self.offset - 1:
            raise ValueError(
                f"position_ids starts at {int(ids.min())}, but {type(stack).__name__} counts its first token as {self.offset} "
                f"and padding as {self.offset - 1}, patched or not. Add {self.offset} to IDs that count from 0."
            )
        return (ids - self.offset).clamp(min=0)

    def store_in_cache(self, args: tuple, kwargs: dict[str, Any], context: PositionContext | None, output: Any) -> None:
        """Keep the positions of all keys with the cache that the host's forward has filled, where it wouldn't tell them."""
        call = BoundCall(self.names, args, kwargs)
        values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
        cache = call.of_type(Cache)
        if cache is None:
            cache = next((value for value in values if isinstance(value, Cache)), None)
        tokens, _ = self._by_text(call)
        if context is not None and cache is not None and tokens is not None and not _compat.is_exporting():
            cache_positions.store_positions(cache, len(tokens), context)


def _mask_of(call: BoundCall, length: int) -> Any:
    """The mask that a stack of tokens is called with, also as XLNet's `input_mask`, 1 for padding, or XLM's `lengths`."""
    if (mask := call["attention_mask"]) is not None:
        return mask
    if isinstance(padding := call["input_mask"], Tensor):
        return (padding == 0).long()
    if isinstance(lengths := call["lengths"], Tensor) and lengths.ndim == 1:
        return (torch.arange(length, device=lengths.device) < lengths[:, None]).long()
    return None


def _is_packed(times: Tensor, mask: Any) -> bool:
    """Whether positions in time `[B, L]` fall behind one another, as those of several texts in one row; padding aside."""
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
    # A static cache counts in place, and its first layer would change this number.
    return past.clone() if isinstance(past, Tensor) else past


def _padding_of(outer: OuterCall, shape: Sequence[int], past: int | Tensor) -> Tensor | None:
    """The mask of the model around a stack, where it has a column for each token of the stack: some put tokens before."""
    mask = outer.padding
    if mask is None or len(mask) != shape[0]:
        return None
    fits = mask.shape[1] >= shape[1] if isinstance(past, Tensor) else mask.shape[1] == past + shape[1]
    return mask if fits else None


def _fill_padding_positions(keys: Tensor, shown: Tensor) -> Tensor:
    """Positions of keys `[B, K]`, those of padding between shown keys being that of the shown one before it."""
    index = torch.arange(keys.shape[1], device=keys.device)
    last = torch.where(shown.to(keys.device), index, -1).cummax(-1).values
    return torch.where(last < 0, keys, keys.gather(1, last.clamp(min=0)))


def _recomputed_position_ids(ids: Tensor, padding: Tensor | None, past: int | Tensor, length: int) -> Tensor | None:
    """Ids that a model has made for the stack in it, `[1 or B, L]`, such that they count what its mask shows.

    Models that count on from the cache, padding or not, begin at 0, or at 1 (PaliGemma). Qwen2-VL makes ids of all cached
    tokens, too, behind an image: None, and the new ones are counted.
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
    """By layer, the index of the first key that a cache gives out next: above 0 where a sliding window has dropped keys.

    kinds: of the layers. One that the cache holds nothing of reuses the keys of the last one of its kind that it holds. Below
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
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a `PositionContext` has as positions, start and keys.

    ids: positions given by hand, `[1 or B, L]`. mask: `[B, K]`. shape: B and L.
    """
    batch, length = shape
    if cache is None and ids is None and not is_causal:
        return *positions_of(length, 0, mask, device), None
    remembered = None if cache is None else cache_positions.load_positions(cache, batch, past)
    index = (torch.arange(length, device=device) + past)[None]
    room = cache_positions.static_capacity(cache)
    if ids is None and mask is None and remembered is None and room is None:
        return index, index.new_zeros(1, 1), None
    seen = None if mask is None else position_ids_from_mask(mask)
    if seen is not None and room is None and seen.shape[1] < past + length:
        raise ValueError(
            f"attention_mask has {seen.shape[1]} columns for {past} cached and {length} new tokens. Pass one for each token."
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
        if ids is not None and mask is not None and mask.shape[1] >= keys.shape[1]:
            keys = _fill_padding_positions(keys, mask[:, : keys.shape[1]] != 0)
    # Ids given by hand hold for padding, too: `generate` begins behind the padding of a right-padded prompt.
    start, rises = _contiguous_start(keys, None if mask is None or ids is not None else mask[:, : keys.shape[1]] != 0)
    return new.clamp(min=0), start, None if rises else keys


def _contiguous_start(keys: Tensor, shown: Tensor | None) -> tuple[Tensor, bool]:
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


def _check_length(stack: Any, length: int, past: Any, cache: Any, ids: Tensor | None) -> None:
    """Raises ValueError for positions from max_length on. Explicit ones count, not tokens: several texts may be in one row."""
    limit = stack.posenc.geometry.max_length
    if limit is None:
        return
    if cache is not None and cache.is_compileable:
        # A static cache counts on its device; its size is known without asking.
        total = cache.get_max_length()
        what = f"A static cache of {total} tokens is longer than"
    else:
        total = length_of(past + length, ids, limit)
        what = f"An input {'' if cache is None else 'with its cache '}of {past + length} tokens is longer than"
        if ids is not None and total != past + length:
            what = f"position_ids up to {total - 1 + stack.posenc_state.inputs.offset} don't fit"
    if total > limit:
        spec = stack.posenc_state.spec
        if spec.encoding.needs_max_length(stack.posenc.geometry):
            longer = ", or make a position table longer with hf_posenc.extend(model, max_length, method=…)"
        else:
            longer = ", or raise the limit with hf_posenc.extend(model, max_length=…)"
        raise ValueError(
            f"{what} max_length={limit} of this model's {spec.type!r} encoding. Truncate the "
            f"input (tokenizer: truncation=True, max_length=…){longer}."
        )
