"""Tables that take less memory than float32: tensors in safetensors files, of which the system reads what is touched, and rows
of int8. The format of the files: https://huggingface.co/docs/safetensors

Shapes: N any number of rows, D hidden_size.
"""

import json
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LONGEST_HEADER = 100_000_000
"""Bytes of the header of a safetensors file, by its specification."""
BLOCK = 256
"""Rows that are read from a file, or rounded to int8, at a time."""

PIECE = 2**24
"""Bytes that are copied at a time."""


def names_in_code(path: str | os.PathLike[str]) -> list[str]:
    """The names of the tensors in a safetensors file. Raises ValueError for a file that can't be read."""
    with _explained(path):
        return [*_header(path)[0]]


class StoredTensor:
    """A matrix of floats in a safetensors file, `[rows, D]`, memory-mapped. It takes memory for the rows of one block.

    Copies share it. A pickle of it names the file, which has to be there when it is read again. A file that is replaced or
    deleted stays readable to those who have it open. One that is cut short is an error at the next read; cut during a read, it
    ends the process (SIGBUS), as it does with all weights that Transformers has mapped.

    Raises ValueError for a file that can't be read or has no such matrix.
    """

    def __init__(self, path: str | os.PathLike[str], name: str, shape: tuple[int, ...] | None = None) -> None:
        self.path, self.name = os.path.abspath(path), name
        with _explained(path):
            header, start = _header(path)
            entry = header[name]
            dtype, self.shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if dtype not in DTYPES or len(self.shape) != 2 or min(self.shape) < 1:
                raise ValueError(f"{name!r} is {dtype} {[*self.shape]}, and a table is a matrix of {', '.join(DTYPES)}")
            if shape is not None and self.shape != shape:
                raise ValueError(f"{name!r} is {[*self.shape]}, and was {[*shape]} when this model was made")
            self.dtype, self._begin, self._end = dtype, start + begin, start + end
            if begin < 0 or end - begin != math.prod(self.shape) * DTYPES[dtype].itemsize:
                raise ValueError(f"its header gives {name!r} another size than its shape has")
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._check_length()
            matrix = torch.frombuffer(self._map, dtype=DTYPES[dtype], count=math.prod(self.shape), offset=start + begin)
            self.tensor = matrix.view(self.shape)

    def __reduce__(self) -> Any:
        return StoredTensor, (self.path, self.name, self.shape)

    def __deepcopy__(self, memo: Any) -> "StoredTensor":
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, shape={self.shape}, dtype={self.tensor.dtype})"

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """All rows, a block at a time, with their places."""
        with _explained(self.path):
            for start in range(0, len(self.tensor), BLOCK):
                self._check_length()
                place = slice(start, start + BLOCK)
                yield place, self.tensor[place]
                self._forget()

    def rows(self, indices: Tensor) -> Tensor:
        """The rows of these indices on the CPU, `[...] -> [..., D]`."""
        if torch.compiler.is_compiling():
            return F.embedding(indices, self.tensor)
        flat = indices.flatten()
        found = self.tensor.new_empty(len(flat), self.shape[1])
        with _explained(self.path):
            for start in range(0, len(flat), BLOCK):
                self._check_length()
                torch.index_select(self.tensor, 0, flat[start : start + BLOCK], out=found[start : start + BLOCK])
                self._forget()
        return found.view(*indices.shape, self.shape[1])

    @property
    def size(self) -> int:
        """Its bytes."""
        return self._end - self._begin

    def copy_to(self, file: BinaryIO) -> None:
        """Write its bytes, a piece at a time."""
        view = memoryview(self._map)
        for start in range(self._begin, self._end, PIECE):
            self._check_length()
            file.write(view[start : min(start + PIECE, self._end)])
            self._forget()

    def _check_length(self) -> None:
        if self._map.size() < self._end:
            raise ValueError(f"it has {self._map.size()} bytes, and {self.name!r} ends at {self._end}")

    def _forget(self) -> None:
        """Give the memory of what was read back: touching a row brings up to 64 KiB around it, and all of it would add up."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)


def to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows rounded to 255 steps of a size of their own, `[N, D] -> [N, D]` int8 and the float32 steps, `[N, 1]`.

    A value is off by half a step at most: 1/254 of the largest of its row.
    """
    rows = rows.float()
    steps = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / steps.where(steps > 0, 1.0)).round().clamp(-127, 127).to(torch.int8), steps


def _header(path: str | os.PathLike[str]) -> tuple[dict[str, Any], int]:
    """What a file says of its tensors, and where their data begin."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise ValueError("it isn't a regular file")  # opening a FIFO would wait for a writer
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(LONGEST_HEADER, os.fstat(file.fileno()).st_size):
            raise ValueError("it isn't in the format of safetensors")
        header = json.loads(file.read(length))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + length


@contextmanager
def _explained(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises a ValueError that names the file, and what to do, for whatever is wrong with it."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
    except (AttributeError, KeyError, TypeError, RecursionError):
        reason = "it isn't in the format of safetensors"
    except ValueError as error:  # also of JSON and Unicode
        reason = "it isn't in the format of safetensors" if type(error) is not ValueError else str(error)
    else:
        return
    raise ValueError(f"the table of positions can't be read from {os.fspath(path)}: {reason}; put the right file there again")
