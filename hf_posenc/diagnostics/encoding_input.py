"""Builds the encoding to measure, and computes its effect at all positions of a text.

Shapes: L positions, Q queries, H heads, D hidden_size, E head_dim, P probes (pairs of a query and a key).
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
import torch
from torch import Tensor

from hf_posenc.encodings import (
    Geometry,
    GreaterThan,
    PositionContext,
    PositionEncoding,
    build,
    canonical,
    checked_value,
    encoding_class,
    global_rng_lock,
    options_of,
    placed,
    quoted,
)
from hf_posenc.modeling.embedding import PositionEmbedding

Quantity = Literal["vectors", "scores"]
"""The measured quantity: vectors that are added to inputs, or the effect on attention scores."""
ON_SCORES = {"rotate", "distance_bias", "score_bias"}
EXACT = torch.float64
OF_ATTENTIONS = "With per_layer=True, pass the encoding of one attention module."
POSITIVE, SEVERAL = Annotated[int, GreaterThan(0)], Annotated[int, GreaterThan(1)]
POSITIVES = tuple[Annotated[int, GreaterThan(0)], ...]


class Sizes(TypedDict, total=False):
    """Keyword arguments with the sizes of an encoding that is built from its name.

    hidden_size: 768 by default.
    num_attention_heads: 12 by default.
    max_length: by default 512, or the measured length if that is larger.
    causal: whether queries see no later keys. By default, True only for encodings for decoders.
    seed: seed of random values, 0 by default.
    """

    hidden_size: int
    num_attention_heads: int
    max_length: int
    causal: bool
    seed: int


@dataclass(frozen=True)
class MeasuredEncoding:
    """An encoding in float64 on the CPU. Its first `length` positions are measured."""

    encoding: Any
    length: int

    @property
    def name(self) -> str:
        return self.encoding.type

    @property
    def verbs(self) -> tuple[str, ...]:
        return self.encoding.mechanisms(self.encoding._options)

    @property
    def is_causal(self) -> bool:
        return self.encoding.geometry.is_causal

    def quantity(self, asked: Quantity | None) -> Quantity:
        """The measured quantity of this encoding.

        Raises ValueError if the encoding doesn't have the `asked` quantity, or has both and `asked` is None. It also raises if
        a part with this quantity isn't in this module.
        """
        known = _quantities(self.verbs)
        if not self.encoding.type:
            raise ValueError(f"This module doesn't change positions. {OF_ATTENTIONS}")
        if asked is not None and asked not in known:
            acts = f"acts by {', '.join(self.verbs)}" if self.verbs else "does nothing to positions"
            raise ValueError(
                f"quantity={asked!r} isn't available for {self.name!r}, which {acts}. Measurable: {quoted(known) or 'nothing'}."
            )
        if not known:
            raise ValueError(
                f"{self.name!r} has no vectors or scores to measure (mechanisms: {', '.join(self.verbs) or 'none'}). "
                f"{OF_ATTENTIONS}"
            )
        if len(known) > 1 and asked is None:
            raise ValueError(f"{self.name!r} has both vectors and scores. Set quantity='vectors' or 'scores'.")
        quantity = asked or known[0]
        classes, here = type(self.encoding).component_classes(), list(self.encoding.named_parts())
        elsewhere = {name: cls for name, cls in classes.items() if name not in here} if len(classes) > 1 else {}
        by_part = {name: _quantities(cls.mechanisms(self.encoding._options[name])) for name, cls in elsewhere.items()}
        if lacking := [name for name, known in by_part.items() if quantity in known]:
            raise ValueError(
                f"This module contains the part {', '.join(here)} of {self.name!r}, but not {', '.join(lacking)}. Parts with "
                "parameters per layer are in the attention modules. Pass one part, such as "
                f"module.get_submodule({here[0]!r}), or the name of the encoding."
            )
        return quantity

    @torch.no_grad()
    def vectors(self, dtype: torch.dtype = EXACT) -> Tensor:
        """The vector of each position, `[L, D]`, rounded to `dtype`, as float64."""
        added = self._of(dtype)("embed", torch.arange(self.length))
        return added.to(dtype).to(EXACT)

    def ones(self) -> tuple[Tensor, Tensor]:
        """One query and one key, `[1, H, E]`, whose features are all 1. After the rotation, their product equals the mean
        product of a random query with itself, if its features have variance 1."""
        one = torch.ones(1, max(1, self.encoding.geometry.num_attention_heads), self._head_dim, dtype=EXACT)
        return one, one

    def random_probes(self, probes: int, seed: int) -> tuple[Tensor, Tensor]:
        """Queries and keys from N(0, 1), `[P, H, E]`."""
        generator = torch.Generator().manual_seed(seed)
        shape = (2, probes, max(1, self.encoding.geometry.num_attention_heads), self._head_dim)
        query, key = torch.randn(shape, generator=generator, dtype=EXACT)
        return query, key

    @torch.no_grad()
    def rotated(self, query: Tensor, key: Tensor, dtype: torch.dtype = EXACT) -> tuple[Tensor, Tensor]:
        """The same query and key `[P, H, E]`, rotated at every position, `[P, H, L, E]`, in `dtype`."""
        states = [each.to(dtype)[:, :, None].expand(-1, -1, self.length, -1) for each in (query, key)]
        return self._of(dtype)("rotate", *states, self._context())

    @torch.no_grad()
    def scores(self, query: Tensor, key: Tensor, rows: Sequence[int] | None = None, dtype: torch.dtype = EXACT) -> Tensor:
        """The biases plus, if the encoding rotates, the scaled scores of the same query and key `[P, H, E]` at every position.

        `[P, H, Q, L]`, computed in `dtype`, returned as float64. Q: the positions in `rows`, by default all. NaN for keys that
        a query doesn't see.
        """
        encoding, context, index = self._of(dtype), self._context(), torch.arange(self.length)
        queries = index if rows is None else torch.tensor(rows)
        distance = index - queries[:, None]
        query, key = self.rotated(query, key, dtype)
        total = torch.zeros(len(query), query.shape[1], len(queries), self.length, dtype=dtype)
        if "rotate" in self.verbs:
            total = query[:, :, queries] @ key.mT * context.scaling
        if (bias := encoding("distance_bias", torch.arange(1 - self.length, self.length))) is not None:
            total = total + bias.to(dtype)[:, distance + (self.length - 1)]
        if "score_bias" in self.verbs and (bias := encoding("score_bias", query, key, context)) is not None:
            total = total + bias.to(dtype).expand(*query.shape[:3], -1)[:, :, queries]
        return total.to(EXACT).masked_fill(distance > 0, torch.nan) if self.is_causal else total.to(EXACT)

    @property
    def _head_dim(self) -> int:
        return self.encoding.geometry.head_dim or 1

    def _context(self) -> PositionContext:
        positions = torch.arange(self.length)[None]
        return PositionContext(self.encoding, positions, 0, torch.zeros(1, 1, dtype=torch.long), scaling=self._head_dim**-0.5)

    def _of(self, dtype: torch.dtype) -> Any:
        """The encoding with its parameters in this dtype."""
        if dtype == EXACT:
            return self.encoding
        return placed(copy.deepcopy(self.encoding), torch.device("cpu"), dtype)


def _quantities(verbs: Sequence[str]) -> list[Quantity]:
    """The quantities of an encoding with these mechanisms."""
    found: dict[Quantity, bool] = {"vectors": "embed" in verbs, "scores": not ON_SCORES.isdisjoint(verbs)}
    return [quantity for quantity, acts in found.items() if acts]


def prepare_encoding(encoding: Any, length: int, sizes: Sizes) -> MeasuredEncoding:
    """Prepare an encoding from its name, a dict, a `PositionEmbedding`, or a module, which is copied.

    Raises ValueError for anything else, an invalid size, sizes for a module, or a length above the encoding's max_length.
    """
    checked_value("length", length, SEVERAL)
    if unknown := sorted({*sizes} - {*Sizes.__annotations__}):
        names = ", ".join(Sizes.__annotations__)
        raise ValueError(f"{unknown[0]} isn't a size. Sizes: {names}. Pass options in a dict, {{'type': name, …}}.")
    module = encoding.posenc if isinstance(encoding, PositionEmbedding) else encoding
    if not isinstance(module, PositionEncoding):
        if isinstance(module, torch.nn.Module):
            raise ValueError(
                f"{type(module).__name__} isn't an encoding. Pass a name, a dict, or the module, such as model.posenc."
            )
        built = _built(canonical(module, in_code=True), length, **sizes)
    else:
        if sizes:
            raise ValueError(f"{next(iter(sizes))} doesn't apply to a module, which already has its sizes. Omit it.")
        built = copy.deepcopy(module)
    limit = built.geometry.max_length
    if limit is not None and length > limit:
        raise ValueError(
            f"length={length} is above the maximum length of this {built.type!r} encoding, {limit} positions. Choose a smaller "
            "length."
        )
    return MeasuredEncoding(placed(built.requires_grad_(False).eval(), torch.device("cpu"), EXACT), length)


def _built(
    encoding: dict[str, Any],
    length: int,
    hidden_size: int = 768,
    num_attention_heads: int = 12,
    max_length: int | None = None,
    causal: bool | None = None,
    seed: int = 0,
) -> PositionEncoding:
    for name, value in (("hidden_size", hidden_size), ("num_attention_heads", num_attention_heads)):
        checked_value(name, value, POSITIVE)
    if hidden_size % num_attention_heads:
        raise ValueError(f"hidden_size={hidden_size} isn't a multiple of num_attention_heads={num_attention_heads}.")
    parts = encoding_class(encoding["type"]).component_classes().values()
    geometry = Geometry(
        hidden_size=hidden_size,
        num_attention_heads=num_attention_heads,
        head_dim=hidden_size // num_attention_heads,
        max_length=max(512, length) if max_length is None else max_length,
        is_causal=any(part.causal_only for part in parts) if causal is None else causal,
    )
    with global_rng_lock(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build(encoding, geometry)


def quantities(encoding: Any) -> list[Quantity]:
    """The quantities of an encoding, given by its name or a dict. The dict must not contain file paths."""
    given = canonical(encoding)
    return _quantities(encoding_class(given["type"]).mechanisms(options_of(given)))


def sizes_of(encoding: Any, **sizes: Any) -> Any:
    """The sizes with which to build an encoding: those that aren't None. Empty for a module, which has its sizes."""
    return {name: size for name, size in sizes.items() if size is not None} if isinstance(encoding, str | Mapping) else {}


def embedding(encoding: Any, length: int, **sizes: int | bool | None) -> MeasuredEncoding:
    """`prepare_encoding` with `sizes_of`. Raises ValueError for an encoding that adds no vectors or has fewer positions."""
    found = prepare_encoding(encoding, length, sizes_of(encoding, **sizes))
    found.quantity("vectors")
    return found


def vectors_of(encoding: Any, length: int, hidden_size: int) -> np.ndarray:
    """The vectors of positions 0 … length - 1, `[L, D]`. Raises: as for `embedding`."""
    return embedding(encoding, length, hidden_size=hidden_size, num_attention_heads=1).vectors().numpy()


def label(encoding: Any) -> str:
    """An encoding's name with the options that differ from their defaults. For a composition, only its name."""
    if isinstance(encoding, PositionEncoding):
        kind, options = type(encoding), dict(encoding._options or {})
    else:
        given = canonical(encoding if isinstance(encoding, str) else dict(encoding), in_code=True)
        kind, options = encoding_class(given["type"]), options_of(given)
    changed = {name: value for name, value in options.items() if value != getattr(kind, name, None)}
    return kind.type if "+" in kind.type else ", ".join([kind.type, *(f"{name}={value}" for name, value in changed.items())])
