"""The positions of one forward pass.

Shapes: B batch, L new tokens, Q queries, K keys.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class PositionContext:
    """The positions of one forward pass, made by the stack and passed to each of its attentions.

    encoding: the stack's `PositionEncoding`.
    positions: `[1 or B, L]`, the positions of the new tokens (the queries, and the keys that enter the cache). Empty in a stack
        that makes its tokens itself, of an image or a sound: `placed` fills it where their number is known.
    past: number of keys cached before them; an int, or a 0-dim tensor for static caches.
    start: `[1 or B, 1]`, the index of the key at position 0, from which the positions of keys rise by one.
    keys: `[1 or B, K]`, the positions of all keys where they don't; else None, and distances follow from indices alone.
    computed: results of `cached`.
    first_keys: by layer, the index of the first key that the cache still holds; empty if it holds all (above 0 behind a
        sliding window).
    scaling: the factor on QKᵀ in the current attention.
    first_key: of `first_keys`, the one of the current attention.
    """

    encoding: Any
    positions: Tensor
    past: int | Tensor
    start: Tensor
    keys: Tensor | None = None
    computed: dict[Any, Any] = field(default_factory=dict)
    first_keys: tuple[int, ...] = ()
    scaling: float = 1.0
    first_key: int = 0

    def placed(self, length: int, device: torch.device) -> "PositionContext":
        """This context; that of `length` tokens behind the cached ones if their number was unknown up to here.

        Raises ValueError for more of them than the encoding's max_length.
        """
        if self.positions.numel():
            return self
        limit = self.encoding.geometry.max_length
        if limit is not None and isinstance(self.past, int) and self.past + length > limit:
            raise ValueError(
                f"an input of {self.past + length} tokens, as the model makes them, is longer than max_length={limit} of its "
                "position encoding: give it a shorter one, or patch the stock model with a larger max_length"
            )

        def make() -> "PositionContext":
            index = torch.arange(length, device=device)[None]
            return replace(self, positions=index + self.past, start=index.new_zeros(1, 1), computed={})

        return self.cached(("placed", length, device), make)

    def for_attention(self, scaling: float, layer: int | None = None) -> "PositionContext":
        """The context of the same forward pass for the attention of one layer; all share `computed`."""
        if self.first_keys and layer is None:
            raise RuntimeError("a cache with sliding windows needs attentions that know their layer (layer_idx)")
        first_key = self.first_keys[layer] if layer is not None and layer < len(self.first_keys) else 0
        return replace(self, scaling=scaling, first_key=first_key)

    def cached(self, key: Any, compute: Callable[[], Any]) -> Any:
        """`compute()`, evaluated once per forward pass and `key`. Only for results that need no gradient."""
        if key not in self.computed:
            self.computed[key] = compute()
        return self.computed[key]

    @property
    def consecutive(self) -> bool:
        """Whether the distance of two tokens is that of their indices."""
        return self.keys is None

    def key_positions(self, length: int) -> Tensor:
        """`[1 or B, K]`; negative for keys before position 0, which are padding."""
        index = torch.arange(length, device=self.positions.device) + self.first_key
        if self.keys is None:
            return index - self.start
        # Behind the last key of a static cache there is nothing yet.
        return self.keys[:, index.clamp(max=self.keys.shape[1] - 1)]

    def for_keys(self, length: int) -> "PositionContext":
        """The context of all keys of an attention, those of a cache among them, as if they were the new tokens."""

        def make() -> "PositionContext":
            return replace(self, positions=self.key_positions(length).clamp(min=0), computed={})

        return self.cached(("keys", length, self.first_key), make)

    def distances(self, keys: int) -> Tensor:
        """`[1 or B, Q, K]`: key position - query position."""
        return self.key_positions(keys)[:, None, :] - self.positions[:, :, None]


def positions_of(length: int, past: int | Tensor, attention_mask: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """The positions `[1 or B, L]` of new tokens without explicit ids, and the index `[1 or B, 1]` of position 0.

    Position 0 is the first token that a 2-D attention mask `[B, K]` shows, and the last shown token has the last position,
    so that padding on either side changes nothing. Without a mask, or with a 4-D one, positions count from the start.
    """
    index = (torch.arange(length, device=device) + past)[None]
    if attention_mask is None or attention_mask.ndim != 2:
        return index, index.new_zeros(1, 1)
    shown = (attention_mask != 0).int()
    first = shown.argmax(dim=-1, keepdim=True)
    last = shown.shape[-1] - 1 - shown.flip(-1).argmax(dim=-1, keepdim=True)
    return torch.minimum(index.clamp(min=first), last) - first, first


def counted(attention_mask: Tensor) -> Tensor:
    """Positions that count only what a mask `[B, K]` shows: -1 before the first such token, then those of the last one.

    What is hidden between others is the padding of an earlier call: a right-padded prompt, a prefix before padding.
    """
    return (attention_mask != 0).long().cumsum(-1) - 1
