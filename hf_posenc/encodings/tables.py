"""A table of vectors that an encoding reads by row: trained, int8, or memory-mapped.

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
        storage: "float32": `weight`, trained. "int8": `values` and a step per row, frozen. "memory-mapped": the rows of a file,
            frozen.
        file: for "memory-mapped", once, in a new model.
    """

    storage: Literal["float32", "int8", "memory-mapped"] = "float32"
    file: Path | None = None

    if TYPE_CHECKING:
        values: Tensor
        steps: Tensor

    def allocate(self, rows: int, size: int) -> None:
        """Create the table without values, and open the file, if any."""
        self.shape = rows, size
        if self.file is not None and self.storage != MAPPED:
            raise ValueError(
                f"{self.type}.file={str(self.file)!r} requires storage='memory-mapped', but storage={self.storage!r}. Omit "
                "file to keep the position embeddings in memory."
            )
        if self.storage == "float32":
            self.weight = nn.Parameter(torch.empty(self.shape))
        elif self.storage == "int8":
            self.register_buffer("values", torch.empty(self.shape, dtype=torch.int8))
            self.register_buffer("steps", torch.empty(rows, 1, dtype=torch.float32))
        self.table = None if self.file is None else self._fitting(StoredTensor(self.file, self._only_name(self.file)))

    def write(self, start: int, rows: Tensor) -> None:
        """Write rows to the table, starting at row `start`."""
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
        """Opens a memory-mapped table in the model's own file, or returns int8 values from a trained table."""
        if self.storage == "float32" or (self.storage == "int8" and not self.values.is_meta):
            return {}
        stored = find("weight")
        if self.storage == MAPPED:
            if stored is None:
                raise ValueError(
                    f"{self.type}.storage={MAPPED!r} needs position embeddings in the checkpoint, but its files have no "
                    "'posenc.weight'. Load it with the storage that it was saved with."
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
                f"{self.type}.storage='memory-mapped' needs a file with its position embeddings. Set file='…', a safetensors "
                f"file with one tensor {[*self.shape]}, or load a saved model with from_pretrained."
            )
        return self.table

    def _only_name(self, file: Path) -> str:
        names = tensor_names(file)
        if len(names) != 1:
            raise ValueError(
                f"{self.type}.file={str(file)!r} has {len(names)} tensors, but must have only the position embeddings. Write "
                "it with safetensors.torch.save_file({'weight': table}, path)."
            )
        return names[0]

    def _fitting(self, table: StoredTensor) -> StoredTensor:
        if table.shape != self.shape:
            raise ValueError(
                f"The position embeddings in {table.path} are {[*table.shape]}, but must be {[*self.shape]} (max_length and "
                f"hidden_size). Set max_length={table.shape[0]}, or use another file."
            )
        return table

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keeps the steps in float32 when a model is cast."""
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
        """Reports an error if the given table differs from the memory-mapped table, which is never written."""
        key = f"{prefix}weight"
        if self.table is None or key not in state_dict:
            return super()._load_from_state_dict(state_dict, prefix, *args)
        given, errors = state_dict[key], args[-1]
        same = given.shape == self.shape and all(given[place].equal(rows) for place, rows in self.table.blocks())
        if not same:
            errors.append(f"{key} differs from the memory-mapped table, which is frozen. Load it with from_pretrained.")
        others = {name: value for name, value in state_dict.items() if name != key}
        return super()._load_from_state_dict(others, prefix, *args)
