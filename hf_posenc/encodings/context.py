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
    scaling: the factor on QKᵀ in the current attention, one for all heads or `[H, 1, 1]`.
    first_key: of `first_keys`, the one of the current attention.
    aside: number of tokens before and behind the others which have no position (class and register tokens of an image): they
        are in no positions, and are neither rotated nor biased.
    grid: the patches of an image by row and column (of a video by frame, row and column); their positions are 0, 1, … in that
        order, row by row. Empty where the tokens are of something else, or nothing tells.
    cells: `[1 or B, L, axes]`, the row and column of each token where positions in the grid don't tell them.
    images: number of tokens of each of several images that are packed in one row. Each has positions of its own.
    chosen: `[B, K]`, the positions of the patches that are left, where others were taken out.
    cut: number of images, or frames of videos, that were cut into patches in this forward pass.
    shown: `[B, L]`, which frames of a batch of sounds aren't padding, where the host makes that mask of the sounds' own.
    windows: whether attentions may see a part of the tokens, as those of a window, which are then counted by themselves.
    newest: `[1 or B, L]`, the positions that tell the length of a text, where those of this context don't: of the new tokens in
        a context of all keys (`for_keys`), of the other stack's states in one of cross-attention; else None.
    other: the encoding of a decoder's cross-attention, if it has one. other_mask: `[B, K]`, which of the encoder's states are
        shown there; None for all.
    """

    encoding: Any
    positions: Tensor
    past: int | Tensor
    start: Tensor
    keys: Tensor | None = None
    computed: dict[Any, Any] = field(default_factory=dict)
    first_keys: tuple[int, ...] = ()
    scaling: float | Tensor = 1.0
    first_key: int = 0
    aside: tuple[int, int] = (0, 0)
    grid: tuple[int, ...] = ()
    cells: Tensor | None = None
    images: tuple[int, ...] = ()
    chosen: Tensor | None = None
    shown: Tensor | None = None
    windows: bool = False
    cut: int = 1
    newest: Tensor | None = None
    other: Any = None
    other_mask: Tensor | None = None

    def across(self, keys: int) -> "PositionContext":
        """The context of these queries for another stack's states, `keys` of them: the distance of the two is position -
        position."""

        def make() -> "PositionContext":
            positions, start = positions_of(keys, 0, self.other_mask, self.positions.device)
            there = torch.arange(keys, device=positions.device)[None] - start
            here = replace(self, first_keys=(), grid=(), cells=None)  # without what isn't the other stack's
            return replace(here, encoding=self.other, past=0, start=start, keys=there, newest=positions, computed={})

        return self.cached(("across", keys), make)

    def placed(self, length: int, device: torch.device) -> "PositionContext":
        """This context; that of an input of `length` tokens behind the cached ones if their number was unknown up to here.

        Raises ValueError for another number than the grid and the tokens aside have together, unless they are of a window.
        """
        if self.positions.numel():
            return self
        beside, patches = sum(self.aside), math.prod(self.grid) if self.grid else None
        if self.chosen is not None:
            patches = self.chosen.shape[1]
        elif self.images:
            patches = sum(self.images)
        whole = patches is None or length == patches + beside
        if patches and self.chosen is None and not self.images and length > patches + beside:
            frames, rest = divmod(length - beside, patches)  # all frames of a video, each with this grid
            whole = rest == 0 and self.cut % frames == 0
        if not whole and not self.windows and length not in self.images:
            raise ValueError(
                f"{length} tokens reach an attention or layer instead of {patches} patches and {beside} others: which patches "
                "were left out isn't known, nor the positions of those left; give the model all of them"
            )

        def make() -> "PositionContext":
            index = torch.arange(length - beside if whole else length, device=device)[None]
            placed = replace(self, positions=index + self.past, start=index.new_zeros(1, 1), computed={})
            if not whole:
                return replace(placed, aside=(0, 0), grid=(), cells=self._cells_of_one(length), images=(), chosen=None)
            if self.chosen is not None:
                return replace(placed, positions=self.chosen, keys=self.chosen)
            if len(self.images) > 1:
                packed = torch.cat([torch.arange(count, device=device) for count in self.images])[None]
                return replace(placed, positions=packed, keys=packed)
            if self.shown is not None and not self.grid and (shown := _pooled(self.shown, length - beside)) is not None:
                positions, start = positions_of(length - beside, self.past, shown, device)
                return replace(placed, positions=positions, start=start)
            return placed

        context = self.cached(("placed", length, device), make)
        limit = self.encoding.geometry.max_length
        longest = max(self.images) if whole and self.images else context.positions.shape[1]
        longest += self.past if isinstance(self.past, int) else 0
        if limit is not None and longest > limit:
            raise ValueError(
                f"an input of {longest} positions is longer than max_length={limit} of this model's encoding: give a smaller "
                "one, or raise the promise: hf_posenc.extend(model, max_length=…)"
            )
        return context

    def _cells_of_one(self, length: int) -> Tensor | None:
        """The cells of an image of `length` tokens among those packed in one row; None if several could be meant."""
        if self.cells is None or self.cells.shape[1] != sum(self.images):
            return None
        first, *others = (each for each in self.cells.split(self.images, dim=1) if each.shape[1] == length)
        return first if all(torch.equal(first, other) for other in others) else None

    def coordinates(self, axes: int) -> Tensor:
        """The positions for an encoding of so many `axes`: `[1 or B, L]` of one, `[1 or B, L, axes]` of more.

        Raises ValueError where it isn't known which cell of which grid each token is of.
        """
        if axes == 1:
            return self.positions
        length, patches, cells = self.positions.shape[1], math.prod(self.grid), self.cells
        if cells is None and len(self.grid) == axes and length <= patches and self.images in ((), (patches,)):
            return self.cached("cells", lambda: torch.stack(torch.unravel_index(self.positions, self.grid), dim=-1))
        if cells is None or cells.shape[1:] != (length, axes):
            raise ValueError(
                f"an encoding takes {axes} coordinates of each of {length} tokens, and the grid in which these lie isn't known "
                "here, as of windows, of frames, of several images in one row: take an encoding of one coordinate, as "
                "'sinusoidal' or 'rope'"
            )
        return cells

    def of_positions(self, states: Tensor | None, dim: int = 2) -> Tensor | None:
        """The part of states that has positions: all but the tokens aside."""
        if states is None or not any(self.aside):
            return states
        before, behind = self.aside
        return states.narrow(dim, before, states.shape[dim] - before - behind)

    def put_back(self, changed: Tensor | None, states: Tensor | None) -> Tensor | None:
        """States `[B, H, L, E]` with `changed` in place of those that have positions, behind and before others as wide."""
        if changed is None or states is None or not any(self.aside):
            return changed
        before, behind = self.aside
        return torch.cat([states[:, :, :before], changed, states[:, :, states.shape[2] - behind :]], dim=2)

    def at_zero(self, length: int) -> "PositionContext":
        """The context of `length` tokens which are all at position 0."""
        positions = self.positions.new_zeros(1, length)
        return replace(self, positions=positions, aside=(0, 0), grid=(), images=(), cells=None, chosen=None, computed={})

    def framed(self, values: Tensor, dims: int) -> Tensor:
        """Values of positions with zeros for the tokens aside, along the last dimensions `[..., L]` or `[..., Q, K]`."""
        return F.pad(values, self.aside * dims) if any(self.aside) else values

    def for_attention(self, scaling: float | Tensor, layer: int | None = None) -> "PositionContext":
        """The context of the same forward pass for the attention of one layer; all share `computed`."""
        if self.first_keys and (layer is None or layer < 0):  # one attention may serve several layers
            raise RuntimeError("a cache with sliding windows needs attentions that know their layer (layer_idx)")
        first_key = self.first_keys[layer] if layer is not None and 0 <= layer < len(self.first_keys) else 0
        return replace(self, scaling=scaling, first_key=first_key)

    def cached(self, key: Any, compute: Callable[[], Any]) -> Any:
        """`compute()`, evaluated once per forward pass and `key`. Only for results that need no gradient."""
        if key not in self.computed:
            self.computed[key] = compute()
        return self.computed[key]

    @property
    def length(self) -> int:
        """The number of new tokens, those aside among them."""
        return self.positions.shape[1] + sum(self.aside)

    @property
    def lengths(self) -> Tensor:
        """`[1 or B, 1]`, the number of tokens in each text up to the newest: its last position + 1."""
        newest = self.positions if self.newest is None else self.newest
        return F.pad(newest + 1, (1, 0)).amax(dim=-1, keepdim=True)  # the 0 in front is for empty inputs

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
            newest = self.positions if self.newest is None else self.newest
            return replace(self, positions=self.key_positions(length).clamp(min=0), newest=newest, computed={})

        return self.cached(("keys", length, self.first_key), make)

    def counted_keys(self, queries: int, keys: int, encoding: str) -> tuple[Tensor, Tensor]:
        """For sums over the keys between two tokens of a text: which index among the keys each query has, `[Q]`, and which keys
        to count, `[1 or B, K]`.

        A key counts where its position is above that of the key before it, unlike padding behind a prompt. The first token of
        a text doesn't: it is behind no other.

        Raises ValueError for a cache that has dropped keys from between those it holds.
        """
        if isinstance(self.past, int) and keys < (there := self.past + queries - self.first_key):
            raise ValueError(
                f"{encoding!r} counts all keys between two tokens, and of {there} this cache gives out {keys}: take one that "
                "keeps them all, such as DynamicCache, or an encoding by distance"
            )
        index = torch.arange(queries, device=self.positions.device) + (self.past - self.first_key)
        positions = self.key_positions(keys)
        # Prepended, not padded: a graph traced with a difference of K - 1 elements doesn't take K = 2.
        return index, positions.diff(prepend=positions[:, :1]) > 0

    def distances(self, keys: int) -> Tensor:
        """`[1 or B, Q, K]`: key position - query position."""
        return self.key_positions(keys)[:, None, :] - self.positions[:, :, None]


class _Current(threading.local):
    def __init__(self) -> None:
        # Of the instance in each thread: torch.compile guards on which attributes it has.
        self.context: PositionContext | None = None


CURRENT = _Current()
"""The context of the forward pass that this thread is in, for modules which a host calls without the keyword argument."""


@contextlib.contextmanager
def current(context: PositionContext | None) -> Iterator[None]:
    """Make a context the current one."""
    before, CURRENT.context = CURRENT.context, context
    try:
        yield
    finally:
        CURRENT.context = before


def context_for(module: nn.Module, given: PositionContext | None = None) -> PositionContext:
    """The context that a module was called with, or else the current one. Raises RuntimeError outside of a forward pass."""
    context = CURRENT.context if given is None else given
    if context is None:
        raise RuntimeError(f"{type(module).__name__} was called without positions: call the whole model, not a part of it")
    return context


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


def length_of(tokens: int, position_ids: Tensor | None, limit: int) -> int:
    """The number of positions that an input needs: 1 + the largest of its explicit positions, else one for each token.

    Explicit positions on a GPU are read only if there are more tokens than `limit`, as in a packed row, since reading waits for
    the GPU. In a traced graph none are read, and the answer is 0.
    """
    if position_ids is None or position_ids.is_meta:
        return tokens
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not position_ids.numel():
        return 0
    if position_ids.device.type != "cpu" and tokens <= limit:
        return tokens
    return int(position_ids.max()) + 1


def _pooled(shown: Tensor, length: int) -> Tensor | None:
    """A mask `[B, L]` of as many frames, or of tokens that are each made of several of them (SEW); None for another number."""
    frames = shown.shape[1] // length if length else 1
    return shown[:, frames - 1 :: frames][:, :length] if frames and shown.shape[1] // frames == length else None


def last_of(positions: Tensor) -> Tensor:
    """The last position of each text, `[..., L]` -> `[..., 1]`; 0 for an empty one."""
    return F.pad(positions, (1, 0)).amax(dim=-1, keepdim=True)


def last_of_text(positions: Tensor) -> Tensor:
    """The last position of the text that each token belongs to, `[..., L]` -> `[..., L]`.

    A row holds several texts if its positions start again and never jump otherwise.
    """
    starts = positions == positions[..., :1]
    steps = positions.diff(dim=-1)
    packed = (starts[..., 1:] | ((steps >= 0) & (steps <= 1))).all(dim=-1, keepdim=True)
    text = starts.long().cumsum(-1)
    room = positions.new_zeros(*positions.shape[:-1], positions.shape[-1] + 1)
    last = room.scatter_reduce(-1, text, positions, "amax").gather(-1, text)
    return torch.where(packed, last, last_of(positions))


def counted(attention_mask: Tensor) -> Tensor:
    """Positions that count only what a mask `[B, K]` shows: -1 before the first such token, then those of the last one.

    What is hidden between others is the padding of an earlier call: a right-padded prompt, a prefix before padding.
    """
    return (attention_mask != 0).long().cumsum(-1) - 1
