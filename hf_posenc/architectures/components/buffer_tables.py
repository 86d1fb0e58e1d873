"""Computed position embeddings in a buffer that the stack indexes: CTRL."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from hf_posenc.architectures.components.component import PositionComponent
from hf_posenc.architectures.components.position_tables import DisabledTable
from hf_posenc.configuration import LENGTH_FIELD

BUFFERS = {"CTRLModel": "pos_encoding"}
"""Class of a stack -> name of its buffer."""


class IndexedBuffer(PositionComponent):
    """A buffer `[rows, D]` of sinusoidal vectors, which the stack indexes as `table[position_ids, :]`."""

    encoding, verb, accepts_embeddings = "sinusoidal", "embed", True

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        if (name := _buffer_of(stack)) is not None:
            yield cls(name, stack)

    @classmethod
    def at(cls, path: str, stack: Any, modules: Mapping[str, nn.Module]) -> PositionComponent:
        return cls(path, stack)

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        table = nn.Module()
        table.weight = stack._buffers.pop(self.path)  # type: ignore[assignment]
        setattr(stack, self.path, DisabledIndexedTable(stack, self.path, table, 0 if adds_vectors else None))

    @property
    def width(self) -> int:
        return self.module._buffers[self.path].shape[1]  # type: ignore[union-attr]

    def usable_length(self, config: Any) -> int | None:
        return getattr(config, LENGTH_FIELD, None)


def _buffer_of(stack: Any) -> str | None:
    names = (BUFFERS.get(cls.__name__) for cls in type(stack).__mro__)
    return next((name for name in names if name is not None and name in stack._buffers), None)


class DisabledIndexedTable(DisabledTable):
    """A `DisabledTable` that is indexed instead of called."""

    def __getitem__(self, index: Any) -> Tensor:
        position_ids, _ = index
        return self(position_ids)

    def to(self, *args: Any, **kwargs: Any) -> "DisabledIndexedTable":
        """Returns itself, because its vectors are on the device of the IDs."""
        return self
