"""The encodings that a figure is asked for: built by name, or taken as they are from a model.

Shapes: L positions, D features, H heads, N distances.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from hf_posenc.encodings import Above, Geometry, PositionEncoding, build, canonical, checked_value, list_encodings, listed

Encoding = str | Mapping[str, Any] | PositionEncoding
"""A name, a dict `{"type": name, **options}`, or a module, such as a trained model's."""
MEANS = {
    "embed": "add vectors to the input",
    "distance_bias": "add a bias by distance to the scores",
    "rotate": "rotate queries and keys",
}


def size(name: str, value: int, least: int = 1) -> int:
    """A number that a figure was asked for. Raises ValueError for one below `least` or no integer."""
    return checked_value(name, value, Annotated[int, Above(least - 1)])


def made(encoding: Encoding, verbs: tuple[str, ...], geometry: Geometry) -> PositionEncoding:
    """The encoding as a module with fresh parameters; one that was given as a module as it is.

    Raises ValueError for one that acts by none of the verbs, and for one of the cells of a grid.
    """
    if isinstance(encoding, PositionEncoding):
        module, acts, name = encoding, encoding.acts_by(encoding._options), encoding.type
    else:
        given = canonical(encoding if isinstance(encoding, str) else dict(encoding))
        module, name = build(given, geometry), given["type"]
        acts = module.acts_by(module._options)
    kinds = {kind: cls for kind, cls in list_encodings().items() if {*verbs} & {*cls.acts_by()} and cls.axes == 1}
    if not {*verbs} & {*acts}:
        asked = " or ".join(MEANS[verb] for verb in verbs)
        raise ValueError(f"{name!r} doesn't {asked}, which this figure shows; these encodings do: {listed(kinds)}")
    if any(part.axes > 1 for part in module.named_parts().values()):
        raise ValueError(f"{name!r} is of the rows and columns of images, and this figure of positions in a text: {listed(kinds)}")
    return module


def label(encoding: Encoding) -> str:
    """An encoding's name with the options that aren't as by default."""
    if isinstance(encoding, PositionEncoding):
        options, kind = dict(encoding._options or {}), type(encoding)
    else:
        options = canonical(encoding if isinstance(encoding, str) else dict(encoding))
        kind = list_encodings().get(options.pop("type")) or PositionEncoding
    if kind.component_classes().keys() != {kind.type}:  # a composition
        return kind.type
    return ", ".join([kind.type, *(f"{name}={value}" for name, value in options.items() if value != getattr(kind, name, None))])


def vectors_of(encoding: Encoding, length: int, hidden_size: int) -> Tensor:
    """The vectors of positions 0 … length - 1: `[L, D]`, float64. Raises ValueError beyond a table's end."""
    module = made(encoding, ("embed",), Geometry(hidden_size=hidden_size, max_length=length))
    limit = module.geometry.max_length
    if limit is not None and length > limit:
        raise ValueError(f"length={length}: this {module.type!r} has vectors of {limit} positions; ask for no more")
    with torch.no_grad():
        return module("embed", torch.arange(length)).double()


def bias_of(encoding: Encoding, distances: Tensor, heads: int, causal: bool = False) -> Tensor:
    """The bias by signed distance `[N]`, key position - query position: `[H, N]`, float64."""
    module = made(encoding, ("distance_bias",), heads_of(heads, int(distances.abs().max()) + 1, causal))
    with torch.no_grad():
        return module("distance_bias", distances).double()


def heads_of(heads: int, length: int, causal: bool) -> Geometry:
    """The sizes of an attention of heads of 64 features."""
    return Geometry(
        hidden_size=64 * heads, num_attention_heads=heads, head_dim=64, max_length=length, is_causal=causal, trained_length=length
    )
