"""The positions of one forward pass.

Shapes: B batch, L new tokens, Q queries, K keys.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_posenc._compat import checkpointing


@dataclass(frozen=True)
class PatchLayout:
    """The layout of tokens that a model computes from an image, a video, or audio. Hooks record it during the forward pass.

    extra_tokens: number of leading and trailing tokens without a position (class and register tokens). They are excluded from
        the context's positions, and have neither rotation nor bias.
    grid: number of patches by row and column of an image, or by frame, row, and column of a video. Positions are 0, 1, …, row
        by row. Empty if there are no patches or the grid is unknown.
    cells: `[1 or B, L, axes]`, the row and column of each token if its position in the grid doesn't determine them.
    images: number of tokens of each of several images that are packed in one row. Each image has separate positions.
    kept_patches: `[B, K]`, the positions of the patches that remain after random masking.
    num_images: number of images or video frames that were split into patches in this forward pass.
    frame_mask: `[B, L]`, which audio frames aren't padding, if the model computes that mask itself.
    windows: whether an attention may see only part of the tokens, such as a window, which then has separate positions.
    square: whether the tokens are those of a square window, row by row.
    queries: number of tokens without a position that some layers have before all other tokens.
    """

    extra_tokens: tuple[int, int] = (0, 0)
    grid: tuple[int, ...] = ()
    cells: Tensor | None = None
    images: tuple[int, ...] = ()
    kept_patches: Tensor | None = None
    num_images: int = 1
    frame_mask: Tensor | None = None
    windows: bool = False
    square: bool = False
    queries: int = 0

    def cells_of_one(self, length: int) -> Tensor | None:
        """The cells of the image with `length` tokens among those packed in one row. None if this is ambiguous."""
        if self.cells is None or self.cells.shape[1] != sum(self.images):
            return None
        first, *others = (each for each in self.cells.split(self.images, dim=1) if each.shape[1] == length)
        return first if all(torch.equal(first, other) for other in others) else None


@dataclass(frozen=True)
class CrossContext:
    """The encoding of a decoder's cross-attention, and a mask `[B, K]` of the visible encoder states (None: all)."""

    encoding: Any
    mask: Tensor | None = None


@dataclass
class PositionContext:
    """The positions of one forward pass, shared by all attentions of an encoder or decoder.

    encoding: the `PositionEncoding` of the encoder or decoder.
    positions: `[1 or B, L]`, the positions of the new tokens (the queries, and the keys that enter the cache). Empty in models
        that compute their tokens from an image or audio, until `with_length` sets them.
    past: number of cached keys. An int, or a 0-dim tensor for static caches.
    start: `[1 or B, 1]`, or 0, the index of the key at position 0, from which the positions of keys increase by one.
    keys: `[1 or B, K]`, the positions of all keys if they don't increase by one. Otherwise None: indices give the distances.
    counted: whether `keys` count the tokens that a mask shows, so that no distance exceeds their number.
    computed: results of `cached`.
    first_keys: by layer, the index of the first key that the cache still holds. It is above 0 after a sliding window has
        dropped keys. Empty if the cache holds all keys.
    scaling: the factor on QKᵀ in the current attention, one for all heads or `[H, 1, 1]`.
    first_key: the entry of `first_keys` for the current attention.
    length_positions: `[1 or B, L]`, the positions that determine `lengths` if `positions` don't: those of the new tokens in
        a context of all keys (`for_keys`), and those of the encoder's states in cross-attention. Otherwise None.
    patches: the layout of tokens that the model computes from an image, a video, or audio.
    cross: the encoding of a decoder's cross-attentions.
    """

    encoding: Any
    positions: Tensor
    past: int | Tensor
    start: Tensor | int
    keys: Tensor | None = None
    counted: bool = False
    computed: dict[Any, Any] = field(default_factory=dict)
    first_keys: tuple[int, ...] = ()
    scaling: float | Tensor = 1.0
    first_key: int = 0
    length_positions: Tensor | None = None
    patches: PatchLayout | None = None
    cross: CrossContext | None = None

    @property
    def extra_tokens(self) -> tuple[int, int]:
        """Number of leading and trailing tokens without a position."""
        return (0, 0) if self.patches is None else self.patches.extra_tokens

    @property
    def has_extra_tokens(self) -> bool:
        return self.patches is not None and any(self.patches.extra_tokens)

    def on(self, device: torch.device) -> "PositionContext":
        """The same context with its tensors on a device. All calls on one device share `computed`."""
        if self.positions.device == device:
            return self
        computed = self.cached(("on", device), dict)
        changes = {name: _moved(value, device) for name, value in vars(self).items() if name != "encoding"}
        return replace(self, **{**changes, "computed": computed})

    def record(self, **changes: Any) -> None:
        """Change the layout of patches. Hooks call it during the forward pass."""
        self.patches = replace(self.patches or PatchLayout(), **changes)

    @property
    def in_cross_attention(self) -> bool:
        """Whether this is the context of a cross-attention (`for_cross_attention`)."""
        return self.cross is not None and self.encoding is self.cross.encoding

    def for_cross_attention(self, keys: int) -> "PositionContext":
        """The context of these queries and `keys` states of the encoder. Distances are key position - query position."""
        cross = self.cross
        assert cross is not None, "a stack without an encoding in its cross-attentions"

        def make() -> "PositionContext":
            positions, start = positions_of(keys, 0, cross.mask, self.positions.device)
            there = torch.arange(keys, device=positions.device)[None] - start
            changes: dict[str, Any] = {"encoding": cross.encoding, "past": 0, "start": start, "keys": there, "computed": {}}
            return replace(self, first_keys=(), patches=None, length_positions=positions, **changes)

        return self.cached(("across", keys), make)

    def with_length(self, length: int, device: torch.device, square: bool = False) -> "PositionContext":
        """This context, or the context of an input of `length` tokens if the number of new tokens was unknown.

        square: whether these are the tokens of a square window.

        Raises ValueError if `length` isn't the number of patches and extra tokens, unless the tokens are those of a window.
        """
        if self.positions.numel():
            return self
        layout = self.patches or PatchLayout()
        extra, patches = sum(layout.extra_tokens), math.prod(layout.grid) if layout.grid else None
        if layout.kept_patches is not None:
            patches = layout.kept_patches.shape[1]
        elif layout.images:
            patches = sum(layout.images)
        if layout.queries and patches is not None and length == patches + extra + layout.queries:
            before, after = layout.extra_tokens
            later = replace(layout, extra_tokens=(before + layout.queries, after), queries=0)
            return self.cached("with queries", lambda: replace(self, patches=later, computed={})).with_length(length, device)
        whole = not square and (patches is None or length == patches + extra)
        if not square and patches and layout.kept_patches is None and not layout.images and length > patches + extra:
            frames, rest = divmod(length - extra, patches)  # all frames of a video, each with this grid
            whole = rest == 0 and layout.num_images % frames == 0
        if not whole and not layout.windows and length not in layout.images:
            raise ValueError(
                f"An attention or layer received {length} tokens instead of {patches} patches and {extra} other tokens, so the "
                "positions of the patches are unknown. Pass all patches to the model."
            )

        def make() -> "PositionContext":
            index = torch.arange(length - extra if whole else length, device=device)[None]
            placed = replace(self, positions=index + self.past, start=index.new_zeros(1, 1), computed={})
            if not whole:
                window = PatchLayout(cells=layout.cells_of_one(length), num_images=layout.num_images, windows=layout.windows)
                return replace(placed, patches=replace(window, square=square))
            if layout.kept_patches is not None:
                return replace(placed, positions=layout.kept_patches, keys=layout.kept_patches)
            if len(layout.images) > 1:
                packed = torch.cat([torch.arange(count, device=device) for count in layout.images])[None]
                return replace(placed, positions=packed, keys=packed)
            if layout.frame_mask is None or layout.grid:
                return placed
            if (mask := _pooled(layout.frame_mask, length - extra)) is None:
                return placed
            positions, start = positions_of(length - extra, self.past, mask, device)
            return replace(placed, positions=positions, start=start)

        context = self.cached(("placed", length, device, square), make)
        geometry = self.encoding.geometry
        limit = geometry.max_length
        other_size = whole and patches and patches == length - extra and patches != limit == geometry.trained_length
        if other_size and self.encoding.needs_max_length(geometry):
            raise ValueError(
                f"The image has {patches} patches, but this model has position embeddings of {limit}, row by row. Resize it or "
                "call hf_posenc.extend(model, image_size=…)."
            )
        longest = max(layout.images) if whole and layout.images else context.positions.shape[1]
        longest += self.past if isinstance(self.past, int) else 0
        if limit is not None and longest > limit:
            raise ValueError(
                f"The input has {longest} positions, which exceeds max_length={limit} of this model's encoding. Pass a smaller "
                "input, or extend the model with hf_posenc.extend."
            )
        return context

    def coordinates(self, axes: int) -> Tensor:
        """The positions for an encoding with this number of `axes`: `[1 or B, L]` for one, `[1 or B, L, axes]` for more.

        Raises ValueError if the grid cells of the tokens are unknown.
        """
        if axes == 1:
            return self.positions
        length, layout = self.positions.shape[1], self.patches or PatchLayout()
        grid = (math.isqrt(length),) * 2 if layout.square else layout.grid
        patches, cells = math.prod(grid), layout.cells
        if cells is None and len(grid) == axes and length <= patches and layout.images in ((), (patches,)):
            return self.cached("cells", lambda: torch.stack(torch.unravel_index(self.positions, grid), dim=-1))
        if cells is None or cells.shape[1:] != (length, axes):
            raise ValueError(
                f"This encoding needs {axes} coordinates for each of {length} tokens, but their patch grid is unknown here. "
                "Frames, several images in one row, and some windows have no known grid. Use an encoding with one coordinate, "
                "such as 'sinusoidal' or 'rope'."
            )
        return cells

    def strip_extra(self, states: Tensor | None, dim: int = 2) -> Tensor | None:
        """States without the extra tokens in one dimension."""
        if states is None or not self.has_extra_tokens:
            return states
        before, after = self.extra_tokens
        return states.narrow(dim, before, states.shape[dim] - before - after)

    def restore_extra(self, changed: Tensor | None, states: Tensor | None) -> Tensor | None:
        """States `[B, H, L, E]` in which `changed` replaces the tokens with positions. Extra tokens have the same width."""
        if changed is None or states is None or not self.has_extra_tokens:
            return changed
        before, after = self.extra_tokens
        return torch.cat([states[:, :, :before], changed, states[:, :, states.shape[2] - after :]], dim=2)

    def pad_extra(self, values: Tensor, dims: int) -> Tensor:
        """Values padded with zeros for the extra tokens in the last dimensions, `[..., L]` or `[..., Q, K]`."""
        return F.pad(values, self.extra_tokens * dims) if self.has_extra_tokens else values

    def at_zero(self, length: int) -> "PositionContext":
        """The context of `length` tokens that are all at position 0."""
        return replace(self, positions=self.positions.new_zeros(1, length), patches=None, computed={})

    def for_attention(self, scaling: float | Tensor, layer: int | None = None) -> "PositionContext":
        """The context of the same forward pass for the attention of one layer. All layers share `computed`."""
        if self.first_keys and (layer is None or layer < 0):  # one attention may serve several layers
            raise RuntimeError("A cache with sliding windows needs attention modules with a layer index (layer_idx).")
        first_key = self.first_keys[layer] if layer is not None and 0 <= layer < len(self.first_keys) else 0
        return replace(self, scaling=scaling, first_key=first_key)

    def cached(self, key: Any, compute: Callable[[], Any]) -> Any:
        """The result of `compute()`, evaluated once per forward pass and `key`. Only for results without gradients."""
        if key not in self.computed:
            self.computed[key] = compute()
        return self.computed[key]

    @property
    def length(self) -> int:
        """The number of new tokens, extra tokens included."""
        return self.positions.shape[1] + sum(self.extra_tokens)

    @property
    def lengths(self) -> Tensor:
        """`[1 or B, 1]`, the number of tokens in each text so far: its last position + 1."""
        positions = self.positions if self.length_positions is None else self.length_positions
        return F.pad(positions + 1, (1, 0)).amax(dim=-1, keepdim=True)  # the leading 0 is for empty inputs

    @property
    def is_contiguous(self) -> bool:
        """Whether the distance between two tokens equals the distance between their indices."""
        return self.keys is None

    def key_positions(self, length: int) -> Tensor:
        """Positions of keys, `[1 or B, K]`. Keys at negative positions are padding."""
        index = torch.arange(length, device=self.positions.device) + self.first_key
        if self.keys is None:
            return index[None] - self.start
        # A static cache is still empty after the last key.
        return self.keys[:, index.clamp(max=self.keys.shape[1] - 1)]

    def for_keys(self, length: int) -> "PositionContext":
        """The context in which all keys of an attention, including cached keys, are the new tokens."""

        def make() -> "PositionContext":
            new = self.positions if self.length_positions is None else self.length_positions
            return replace(self, positions=self.key_positions(length).clamp(min=0), length_positions=new, computed={})

        return self.cached(("keys", length, self.first_key), make)

    def counted_keys(self, queries: int, keys: int, encoding: str) -> tuple[Tensor, Tensor]:
        """The index of each query among the keys, `[Q]`, and a mask of the keys that count, `[1 or B, K]`.

        They are for sums over the keys between two tokens of a text. A key counts if its position is above that of the previous
        key. Padding after a prompt doesn't count, nor does the first token of a text.

        Raises ValueError if the cache has dropped keys between those that it holds.
        """
        if isinstance(self.past, int) and keys < (there := self.past + queries - self.first_key):
            raise ValueError(
                f"{encoding!r} counts all keys between two tokens, but this cache holds only {keys} of {there}. Use a cache "
                "that keeps all keys, such as DynamicCache, or an encoding based on distance."
            )
        index = torch.arange(queries, device=self.positions.device) + (self.past - self.first_key)
        positions = self.key_positions(keys)
        # Prepended, not padded: a graph traced with K - 1 differences doesn't support K = 2.
        return index, positions.diff(prepend=positions[:, :1]) > 0

    def distances(self, keys: int) -> Tensor:
        """Key position - query position, `[1 or B, Q, K]`."""
        return self.key_positions(keys)[:, None, :] - self.positions[:, :, None]


def _moved(value: Any, device: torch.device) -> Any:
    """A field of a context with its tensors on a device."""
    if isinstance(value, (PatchLayout, CrossContext)):
        moved: dict[str, Any] = {name: each.to(device) for name, each in vars(value).items() if isinstance(each, Tensor)}
        return replace(value, **moved)
    return value.to(device) if isinstance(value, Tensor) else value


class _Current(threading.local):
    def __init__(self) -> None:
        # Set per thread, because torch.compile guards on the attributes of the instance.
        self.context: PositionContext | None = None
        self.outer_call: Any = None


CURRENT = _Current()
"""The current forward pass of this thread: its context, and the arguments of the composite model. It isn't a ContextVar,
because torch.compile doesn't trace `ContextVar.set`."""


@contextlib.contextmanager
def current(context: PositionContext | None) -> Iterator[None]:
    """Make a context the current one."""
    before, CURRENT.context = CURRENT.context, context
    try:
        yield
    finally:
        CURRENT.context = before


def context_for(module: nn.Module, given: PositionContext | None = None) -> PositionContext:
    """The context that a module was called with, or the current one. Raises RuntimeError outside of a forward pass."""
    context = CURRENT.context if given is None else given
    if context is None:
        raise RuntimeError(
            f"{type(module).__name__} was called without positions, outside of its model's forward pass. Call the whole model, "
            f"not a submodule. To checkpoint its layers, call model.{checkpointing()}() instead of wrapping them."
        )
    return context


def positions_of(length: int, past: int | Tensor, attention_mask: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """The positions `[1 or B, L]` of new tokens without explicit IDs, and the index `[1 or B, 1]` of position 0.

    Position 0 is the first visible token of a 2-D attention mask `[B, K]`, and the last visible token has the last position.
    Padding on either side therefore changes nothing. Without a mask, or with a 4-D mask, positions count from the start.
    """
    index = (torch.arange(length, device=device) + past)[None]
    if attention_mask is None or attention_mask.ndim != 2:
        return index, index.new_zeros(1, 1)
    shown = (attention_mask != 0).int()
    first = shown.argmax(dim=-1, keepdim=True)
    last = shown.shape[-1] - 1 - shown.flip(-1).argmax(dim=-1, keepdim=True)
    return torch.minimum(index.clamp(min=first), last) - first, first


def length_of(tokens: int, position_ids: Tensor | None, limit: int) -> int:
    """The number of positions that an input needs: 1 + its largest explicit position, or its number of tokens.

    Explicit positions on a GPU are read only if there are more tokens than `limit`, as in a packed row, because reading waits
    for the GPU. In a traced graph no positions are read, and the result is 0.
    """
    if position_ids is None or position_ids.is_meta:
        return tokens
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not position_ids.numel():
        return 0
    if position_ids.device.type != "cpu" and tokens <= limit:
        return tokens
    return int(position_ids.max()) + 1


def _pooled(shown: Tensor, length: int) -> Tensor | None:
    """The mask `[B, L]` for tokens that each cover one or more frames (SEW). None if the numbers don't match."""
    frames = shown.shape[1] // length if length else 1
    return shown[:, frames - 1 :: frames][:, :length] if frames and shown.shape[1] // frames == length else None


def last_of(positions: Tensor) -> Tensor:
    """The last position of each text, `[..., L]` -> `[..., 1]`. It is 0 for an empty text."""
    return F.pad(positions, (1, 0)).amax(dim=-1, keepdim=True)


def last_of_text(positions: Tensor) -> Tensor:
    """The last position of the text that each token belongs to, `[..., L]` -> `[..., L]`.

    A row holds several texts if its positions restart and never jump otherwise.
    """
    starts = positions == positions[..., :1]
    steps = positions.diff(dim=-1)
    packed = (starts[..., 1:] | ((steps >= 0) & (steps <= 1))).all(dim=-1, keepdim=True)
    text = starts.long().cumsum(-1)
    room = positions.new_zeros(*positions.shape[:-1], positions.shape[-1] + 1)
    last = room.scatter_reduce(-1, text, positions, "amax").gather(-1, text)
    return torch.where(packed, last, last_of(positions))


def position_ids_from_mask(attention_mask: Tensor) -> Tensor:
    """Positions that count only the visible tokens of a mask `[B, K]`, starting at 0. They are -1 before the first one.

    A hidden token has the position of the previous visible token. Hidden tokens between visible ones are padding of an earlier
    call, for example after a prompt.
    """
    return (attention_mask != 0).long().cumsum(-1) - 1
