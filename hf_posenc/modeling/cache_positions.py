"""Stores the positions of cached keys with the cache.

Keys don't have the positions 0, 1, 2, … if the prompt is right-padded, follows a prefix, or has position_ids with gaps. No
later call passes these positions again. They are therefore stored in the cache's first layer, and every operation that changes
the cache (beam search, cropping, selecting rows) also changes them. A cache whose keys have the positions 0, 1, 2, … doesn't
change.

Shapes: B batch, K cached keys.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache, StaticLayer

from hf_posenc._compat import is_readable
from hf_posenc.encodings import PositionContext

PREFIX, POSITIONS = "Remembering", "key_positions"
KEYS = "keys_of_key_positions"
"""The attribute with the keys of a layer that a compiled model filled, because that model can't change the layer's class.

If the layer has other keys later, the cache was changed in between. Their positions then come from the attention mask.
"""
CHANGES: dict[str, Callable[..., Tensor | None]] = {
    # Before Transformers 5.18, a positive argument is the number of keys to keep.
    "crop": lambda layer, positions, count: positions[:, : layer.get_seq_length()],
    "reorder_cache": lambda layer, positions, rows: positions.index_select(0, rows.to(positions.device)),
    "batch_repeat_interleave": lambda layer, positions, repeats: positions.repeat_interleave(repeats, dim=0),
    "batch_select_indices": lambda layer, positions, rows: positions[rows],
    "reset": lambda layer, positions: None,
}
"""Method of a cache's layer -> its effect on the positions `[B, K]`, computed after the method has run."""


def __getattr__(name: str) -> Any:
    """Return `Remembering<Layer>` for a layer class of Transformers. Pickles of caches refer to these classes by name."""
    base = getattr(cache_utils, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if base is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _remembering(base)


_CLASSES: dict[type, type] = {}


def _remembering(base: type) -> type:
    """A subclass of a layer class whose methods also change the positions. Such a subclass is returned unchanged."""
    if base in _CLASSES.values():
        return base
    if base not in _CLASSES:
        there = {method: change for method, change in CHANGES.items() if hasattr(base, method)}
        body: dict[str, Any] = {method: _followed(getattr(base, method), change) for method, change in there.items()}
        # With a _layer_type, Transformers would register the subclass as the layer class of that type.
        body |= {"__module__": __name__, "_layer_type": None}
        _CLASSES[base] = type(PREFIX + base.__name__, (base,), body)
        if getattr(cache_utils, base.__name__, None) is base:
            globals()[PREFIX + base.__name__] = _CLASSES[base]
    return _CLASSES[base]


def _followed(method: Callable[..., None], change: Callable[..., Tensor | None]) -> Callable[..., None]:
    @functools.wraps(method)
    def changed(self: Any, *args: Any) -> None:
        method(self, *args)
        if getattr(self, POSITIONS) is not None:
            setattr(self, POSITIONS, change(self, getattr(self, POSITIONS), *args))

    return changed


def static_capacity(cache: Cache | None) -> int | None:
    """The number of keys that a static cache has room for. None for a cache that grows."""
    layer = None if cache is None else _first_layer(cache)
    # A static layer with a sliding window returns only the keys that it has received, until it is full.
    return layer.max_cache_len if isinstance(layer, StaticLayer) and not layer.is_sliding else None


def check_cache_length(cache: Cache | None, past: int | Tensor) -> None:
    """Raises ValueError if a cache counts no tokens while one of its layers holds keys.

    Its first layer then isn't an attention layer (MiniMax's uses linear attention). Neither the original model nor hf-posenc
    would know where new tokens continue.
    """
    if cache is None or isinstance(past, Tensor) or past != 0 or isinstance(cache, EncoderDecoderCache):
        return
    lengths = [layer.get_seq_length() for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    if any(not isinstance(length, Tensor) and length > 0 for length in lengths):
        raise ValueError(
            f"This {type(cache).__name__} counts 0 tokens, but holds keys of {max(lengths)}. It counts in its first layer, "
            "which has no keys here, so the original model would also continue from 0. Pass use_cache=False."
        )


def load_positions(cache: Cache, batch: int, past: int | Tensor) -> Tensor | None:
    """The positions of a cache's keys, `[B, K]`, or None if it stores none. For a static cache, K is its whole length.

    Raises ValueError if the number of positions differs from the number of keys.
    """
    layer = _first_layer(cache)
    positions = getattr(layer, POSITIONS, None)
    if positions is None or (not isinstance(past, Tensor) and past == 0) or getattr(layer, KEYS, layer.keys) is not layer.keys:
        return None
    if positions.shape[0] != batch or positions.shape[1] != (
        past if static_capacity(cache) is None else static_capacity(cache)
    ):
        raise ValueError(
            f"This cache holds {past} keys for a batch of {batch}, but has positions of shape {tuple(positions.shape)}, "
            "because its tensors were changed directly. Change it only with its methods (crop, reorder_cache, "
            "batch_select_indices, batch_repeat_interleave), or start with a new cache."
        )
    return positions


def store_positions(cache: Cache, batch: int, context: PositionContext) -> None:
    """Store the positions of all keys with the cache that a forward pass has filled, unless they are 0, 1, 2, …"""
    layer, keys = _first_layer(cache), context.keys
    if layer is None:
        return
    if keys is None:
        start, readable = context.start, not isinstance(context.start, int) and is_readable(context.start)
        if getattr(layer, POSITIONS, None) is None and (
            isinstance(start, int) or torch.compiler.is_compiling() or (readable and not start.any())
        ):
            return
        # Padding after a row's last token has the position of that token, as in positions counted from a mask.
        keys = torch.minimum(context.key_positions(cache.get_seq_length()), context.positions[:, -1:])
    setattr(layer, POSITIONS, keys.expand(batch, -1))
    if not torch.compiler.is_compiling():
        layer.__class__ = _remembering(type(layer))
        vars(layer).pop(KEYS, None)
    elif not type(layer).__name__.startswith(PREFIX):
        setattr(layer, KEYS, layer.keys)


def holds_keys(cache: Cache) -> list[bool]:
    """Whether a cache holds keys of each layer. It holds none of linear attention or of a layer that reuses another's keys."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    return [isinstance(layer, CacheLayerMixin) for layer in cache.layers]


def _first_layer(cache: Cache) -> Any:
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    return next((layer for layer, holds in zip(cache.layers, holds_keys(cache), strict=True) if holds), None)
