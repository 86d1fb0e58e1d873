"""A table of vectors which an encoding reads by row: trained, rounded to int8, or left in its file.

Shapes: N rows, D hidden_size.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_posenc.encodings.base import PositionEncoding
from hf_posenc.encodings.mapped_tables import StoredTensor, tensor_names, to_int8

MAPPED = "memory-mapped"


class Rows(PositionEncoding):
    """An encoding with one table `[N, D]`, in one of three storages.

    Options:
        storage: "float32": `weight`, trained. "int8": `values` and a step for each row, frozen. "memory-mapped": the rows of a
            file, frozen.
        file: of "memory-mapped", once, for a new model.
    """

    storage: Literal["float32", "int8", "memory-mapped"] = "float32"
    file: Path | None = None

    if TYPE_CHECKING:
        values: Tensor
        steps: Tensor

    def allocate(self, rows: int, size: int) -> None:
        """Make the table, without values; a file is opened."""
        self.shape = rows, size
        if self.file is not None and self.storage != MAPPED:
            raise ValueError(
                f"{self.type}.file={str(self.file)!r} with storage={self.storage!r}: a file is mapped, "
                "storage='memory-mapped'; leave file out for a table in memory"
            )
        if self.storage == "float32":
            self.weight = nn.Parameter(torch.empty(self.shape))
        elif self.storage == "int8":
            self.register_buffer("values", torch.empty(self.shape, dtype=torch.int8))
            self.register_buffer("steps", torch.empty(rows, 1, dtype=torch.float32))
        self.table = None if self.file is None else self._fitting(StoredTensor(self.file, self._only_name(self.file)))

    def write(self, start: int, rows: Tensor) -> None:
        """Put rows into the table, from row `start` on."""
        place = slice(start, start + len(rows))
        with torch.no_grad():
            if self.storage == "int8":
                for own, made in zip((self.values, self.steps), to_int8(rows), strict=True):
                    own[place].copy_(made)
            else:
                self.weight[place].copy_(rows)

    def at(self, indices: Tensor) -> Tensor:
        """Rows of the table, `[..., L] -> [..., L, D]`."""
        if self.storage == "int8":
            return self.values[indices].to(self.steps.dtype) * self.steps[indices]
        if self.storage == MAPPED:
            return self._stored().rows(indices)
        return F.embedding(indices, self.weight)

    def restore(self, find: Callable[[str], StoredTensor | None]) -> dict[str, Tensor]:
        """A memory-mapped table from the model's own file; rows of int8 from a table that was trained."""
        if self.storage == "float32" or (self.storage == "int8" and not self.values.is_meta):
            return {}
        stored = find("weight")
        if self.storage == MAPPED:
            if stored is None:
                raise ValueError(
                    f"{self.type}.storage={MAPPED!r}: this checkpoint has no 'posenc.weight' in its files, so its table is "
                    "missing: load it with the storage that it was saved with"
                )
            self.table = self._fitting(stored)
        if self.storage == MAPPED or stored is None:
            return {}
        table = self._fitting(stored)
        values, steps = zip(*(to_int8(rows) for _, rows in table.blocks()), strict=True)
        return {"values": torch.cat(values), "steps": torch.cat(steps)}

    def stored(self) -> dict[str, StoredTensor]:
        return {} if self.table is None else {"weight": self.table}

    def check_values(self) -> None:
        if self.storage == MAPPED:
            self._stored()

    def _stored(self) -> StoredTensor:
        if self.table is None:
            raise ValueError(
                f"{self.type}.storage='memory-mapped' needs the file of its table: give file='…', a safetensors file with one "
                f"tensor {[*self.shape]}; or load a model that was saved with one by from_pretrained"
            )
        return self.table

    def _only_name(self, file: Path) -> str:
        names = tensor_names(file)
        if len(names) != 1:
            raise ValueError(
                f"{self.type}.file={str(file)!r} has {len(names)} tensors: give a file with one, the table; "
                "safetensors.torch.save_file({'weight': table}, path) writes it"
            )
        return names[0]

    def _fitting(self, table: StoredTensor) -> StoredTensor:
        if table.shape != self.shape:
            raise ValueError(
                f"the table in {table.path} is {[*table.shape]}, and {[*self.shape]} is needed, max_length and hidden_size: "
                f"give max_length={table.shape[0]}, or another table"
            )
        return table

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Casts of a model leave the steps in float32."""
        steps = self._buffers.get("steps")
        super()._apply(fn, recurse)
        if steps is not None and self.steps.dtype != steps.dtype:
            self.steps = steps.to(self.steps.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.table is not None:
            self.table.check_length()
            destination[f"{prefix}weight"] = self.table.tensor

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A memory-mapped table is never written to: the one that is given has to be the same."""
        key = f"{prefix}weight"
        if self.table is None or key not in state_dict:
            return super()._load_from_state_dict(state_dict, prefix, *args)
        given, errors = state_dict[key], args[-1]
        same = given.shape == self.shape and all(given[place].equal(rows) for place, rows in self.table.blocks())
        if not same:
            errors.append(f"{key} is another table than the memory-mapped one, which is frozen: load it with from_pretrained")
        others = {name: value for name, value in state_dict.items() if name != key}
        return super()._load_from_state_dict(others, prefix, *args)
