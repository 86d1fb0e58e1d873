"""Tables that take less memory than float32: memory-mapped tensors in safetensors files, and int8 rows.

Shapes: N any number of rows, D hidden_size.
"""

import json
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK = 256
"""Number of rows that are read from a file or rounded to int8 at a time."""


def tensor_names(path: str | os.PathLike[str]) -> list[str]:
    """The names of the tensors in a safetensors file. Raises ValueError for a file that can't be read."""
    with _opened(path) as file:
        return [*file.keys()]


class StoredTensor:
    """A matrix of floats in a safetensors file, `[rows, D]`, memory-mapped. Reading rows takes memory for one block.

    safetensors also maps files, but keeps everything that was read in memory, up to the whole table.

    Copies share the mapping. A pickle refers to the file, which must exist when the pickle is loaded. A file that is replaced
    or deleted stays readable while it is open. A truncated file raises an error at the next read. If it is truncated during a
    read, the process ends (SIGBUS), as with all weights that Transformers maps.

    Raises ValueError if the file can't be read or has no such matrix.
    """

    def __init__(self, path: str | os.PathLike[str], name: str, shape: tuple[int, ...] | None = None) -> None:
        self.path, self.name = os.path.abspath(path), name
        with _opened(path) as tensors:
            dtype, self.shape = tensors.get_slice(name).get_dtype(), tuple(tensors.get_slice(name).get_shape())
            if dtype not in DTYPES or len(self.shape) != 2 or min(self.shape) < 1:
                raise ValueError(f"{name!r} is {dtype} {[*self.shape]}, but it must be a matrix of {', '.join(DTYPES)}")
            if shape is not None and self.shape != shape:
                raise ValueError(f"{name!r} is {[*self.shape]}, but it was {[*shape]} when this model was created")
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                begin = 8 + length + json.loads(file.read(length))[name]["data_offsets"][0]
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        matrix = torch.frombuffer(self._map, dtype=DTYPES[dtype], count=math.prod(self.shape), offset=begin)
        self.tensor, self._end = matrix.view(self.shape), begin + matrix.nbytes

    def __reduce__(self) -> Any:
        return StoredTensor, (self.path, self.name, self.shape)

    def __deepcopy__(self, memo: Any) -> "StoredTensor":
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, shape={self.shape}, dtype={self.tensor.dtype})"

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """All rows in blocks, with their slices."""
        for start in range(0, len(self.tensor), BLOCK):
            self.check_length()
            place = slice(start, start + BLOCK)
            yield place, self.tensor[place]
            self._forget()

    def rows(self, indices: Tensor) -> Tensor:
        """The rows at these indices, on the CPU, `[...] -> [..., D]`."""
        if torch.compiler.is_compiling():
            return F.embedding(indices, self.tensor)
        flat = indices.flatten()
        found = self.tensor.new_empty(len(flat), self.shape[1])
        for start in range(0, len(flat), BLOCK):
            self.check_length()
            torch.index_select(self.tensor, 0, flat[start : start + BLOCK], out=found[start : start + BLOCK])
            self._forget()
        return found.view(*indices.shape, self.shape[1])

    def check_length(self) -> None:
        """Raises ValueError if the file was truncated. Reading beyond its end would end the process."""
        if self._map.size() < self._end:
            reason = f"it has {self._map.size()} bytes, but {self.name!r} ends at {self._end}"
            raise ValueError(UNREADABLE.format(path=self.path, reason=reason))

    def _forget(self) -> None:
        """Release the memory that was read. Each access to a row reads up to 64 KiB around it, which would add up."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)


def to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows `[N, D]` rounded to int8, `[N, D]`, with a float32 step size per row, `[N, 1]`.

    The error of a value is at most half a step, that is, 1/254 of the largest absolute value of its row.
    """
    rows = rows.float()
    steps = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / steps.where(steps > 0, 1.0)).round().clamp(-127, 127).to(torch.int8), steps


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """An open safetensors file. Raises a ValueError with the file and the remedy if it can't be read."""
    try:
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            raise ValueError("it isn't a regular file")  # opening a FIFO would wait for a writer
        with open(path, "rb"), safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError, ValueError) as error:
        reason = "it isn't in the safetensors format" if isinstance(error, SafetensorError) else str(error)
        reason = getattr(error, "strerror", None) or reason
        raise ValueError(UNREADABLE.format(path=os.fspath(path), reason=reason)) from None


UNREADABLE = "The position embeddings can't be read from {path}: {reason}. Restore the file."
