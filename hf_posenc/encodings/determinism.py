"""Checks that the unsaved values of a custom encoding are the same each time that it is built."""

import hashlib
import io
import pickle
import types
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc._compat import non_persistent_buffers
from hf_posenc.encodings.base import PositionEncoding


def differing(built: list[PositionEncoding | None], others: list[PositionEncoding | None]) -> str | None:
    """The name of a value that isn't saved with its module and differs between two builds, or None."""
    if len(built) != len(others):
        return "a value"
    for one, other in zip(built, others, strict=True):
        ours, theirs = _unsaved(one), _unsaved(other)
        for name in ours.keys() | theirs.keys():
            if comparable(ours.get(name)) != comparable(theirs.get(name)):
                return name
    return None


def _unsaved(encoding: nn.Module | None) -> dict[str, Any]:
    """Attributes and buffers of an encoding's modules that aren't in its state_dict, by dotted path."""
    values: dict[str, Any] = {}
    for path, module in encoding.named_modules() if encoding is not None else ():
        buffers = {name: module._buffers[name] for name in non_persistent_buffers(module)}
        attributes = {name: value for name, value in vars(module).items() if name not in vars(nn.Module())}
        values |= {f"{path}.{name}".lstrip("."): value for name, value in {**attributes, **buffers}.items()}
    return values


class _Comparable(pickle.Pickler):
    """Pickles equal values to equal bytes. Tensors, generators, and closures are compared by content."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter):  # saved with its module
            return str, ("parameter",)
        if isinstance(value, Tensor):
            bits = b"" if value.is_meta else value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return tuple, ((str(value.dtype), tuple(value.shape), value.is_meta, hashlib.sha256(bits).digest()),)
        if isinstance(value, torch.Generator):
            return bytes, (value.get_state().numpy().tobytes(),)
        if isinstance(value, types.FunctionType) and "<" in value.__qualname__:
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return tuple, ((value.__code__.co_code, cells, value.__defaults__, value.__kwdefaults__),)
        return NotImplemented


def comparable(value: Any) -> bytes | None:
    """Bytes that are equal for equal values. None if the value can't be compared."""
    file = io.BytesIO()
    try:
        _Comparable(file).dump(value)
    except Exception:  # an attribute's __reduce__ can raise any exception
        return None
    return file.getvalue()
