"""Whether a user's encoding comes out the same each time that it is built, but for what is saved with it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_posenc._compat import non_persistent_buffers
from hf_posenc.encodings.base import PositionEncoding

Encodings = list[PositionEncoding | None]


def differing(built: Encodings, others: Encodings) -> str | None:
    """The name of a value that is not saved with its module, and that differs between two builds."""
    ours, theirs = dict(_unsaved(built)), dict(_unsaved(others))
    places = (place for place in {**ours, **theirs} if not _same(ours.get(place), theirs.get(place)))
    return next((place.partition(".")[2] for place in places), None)


def _unsaved(encodings: Encodings) -> Iterator[tuple[str, Any]]:
    """Attributes and buffers of modules that are not in their state_dict, by dotted path, which begins with a number."""
    for path, module in nn.ModuleList(encodings).named_modules():  # type: ignore[arg-type]
        values = {name: value for name, value in vars(module).items() if name not in vars(nn.Module())}
        values |= {name: module._buffers[name] for name in non_persistent_buffers(module)}
        yield from ((f"{path}.{name}", value) for name, value in values.items())


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal: tensors, arrays, numbers, strings, and collections of them. Others count as equal."""
    if isinstance(one, nn.Parameter):  # saved with a module of its own
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Tensor):
        alike = (one.shape, one.dtype, one.is_meta) == (other.shape, other.dtype, other.is_meta)
        hidden = one.is_meta or one.layout is not torch.strided
        return alike and (hidden or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
    if isinstance(one, np.ndarray):
        return one.dtype.hasobject or one.tobytes() == other.tobytes()
    return not isinstance(one, (bool, int, float, complex, str, bytes, np.generic)) or repr(one) == repr(other)
