"""The encodings that a figure is asked for.

Shapes: L positions, D features.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hf_posenc.diagnostics.encoding_input import Subject, subject
from hf_posenc.encodings import PositionEncoding, canonical, encoding_class, options_of

Encoding = str | Mapping[str, Any] | PositionEncoding
"""A name, a dict `{"type": name, **options}`, or a module, such as a trained model's."""


def sizes_of(encoding: Any, **sizes: Any) -> Any:
    """The sizes with which an encoding is built: none for one that is a module and has sizes of its own."""
    return {} if not isinstance(encoding, str | Mapping) else {name: size for name, size in sizes.items() if size is not None}


def vectors_of(encoding: Encoding, length: int, hidden_size: int) -> np.ndarray:
    """The vectors of positions 0 … length - 1: `[L, D]`. Raises ValueError for an encoding that adds none, or ends before."""
    return embedding(encoding, length, hidden_size=hidden_size, num_attention_heads=1).vectors().numpy()


def embedding(encoding: Encoding, length: int, **sizes: int | bool | None) -> Subject:
    """The encoding in float64, built with those sizes that aren't None; a module is taken as it is, with its own.

    Raises ValueError for one that adds no vectors to the input, or has fewer positions.
    """
    found = subject(encoding, length, sizes_of(encoding, **sizes))
    found.quantity("vectors")
    return found


def label(encoding: Encoding) -> str:
    """An encoding's name with the options that aren't as by default; of a composition its name."""
    if isinstance(encoding, PositionEncoding):
        kind, options = type(encoding), dict(encoding._options or {})
    else:
        given = canonical(encoding if isinstance(encoding, str) else dict(encoding), in_code=True)
        kind, options = encoding_class(given["type"]), options_of(given)
    changed = {name: value for name, value in options.items() if value != getattr(kind, name, None)}
    return kind.type if "+" in kind.type else ", ".join([kind.type, *(f"{name}={value}" for name, value in changed.items())])


def chosen(what: str, given: Sequence[int] | None, count: int, most: int) -> list[int]:
    """The heads, layers or columns that are shown: as given, or up to `most` at equal steps from the first to the last.

    Raises ValueError for one that isn't there.
    """
    if given is None:
        steps = max(1, min(most, count) - 1)
        return sorted({round(place * (count - 1) / steps) for place in range(min(most, count))})
    if not given:
        raise ValueError(f"{what} is empty: name one or more of 0 to {count - 1}")
    if wrong := [each for each in given if not 0 <= each < count]:
        raise ValueError(f"{what}={wrong[0]}: there are {count}, 0 to {count - 1}")
    return list(given)
