"""Learned absolute position embeddings: https://arxiv.org/abs/1705.03122, https://arxiv.org/abs/1810.04805"""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry
from hf_posenc.encodings.context import last_of_text
from hf_posenc.encodings.mapped_tables import BLOCK
from hf_posenc.encodings.options import GreaterThan
from hf_posenc.encodings.sinusoidal import sinusoids
from hf_posenc.encodings.table_interpolation import DYNAMIC, STATIC, Extension, fractions
from hf_posenc.encodings.tables import MAPPED, Rows


class Learned(Rows, type="learned", aliases=("absolute", "learnable")):
    """One trained vector for each position: PE(p) = weight[p], `[max_length, D]`
    (Gehring et al., 2017; Devlin et al., 2019).

    Options:
        init: "normal" (std below), "sinusoidal", or "host": the rows of the host's own table; rows beyond it, and all
            rows of a model without pretrained weights, start as "normal".
        std: standard deviation of "normal" (0.02 as in BERT; 1.0 is `torch.randn`).
        storage: "float32": trained, in the model's dtype. The two others are frozen, and trained with nothing else:
            "int8": PE(p) = step[p] · values[p], values in -127 … 127 and a float32 step for each row, D + 4 bytes a row. Made
            from `init`, "host" or "sinusoidal"; a value is off by half a step at most.
            "memory-mapped": the rows stay in a file and take memory while they are read, so that a table of gigabytes opens at
            once. It is no part of what a model moves, casts or counts; it stays on the CPU, and what is read goes to the device
            of the positions. Saved with the model, it is read from the model's own safetensors file when that is loaded.
        trained_rows: N, of a table with fewer rows than max_length; for encoders. A text of n tokens up to N takes its rows as
            they are. In a longer one position p is at p(N - 1)/(n - 1), between two rows their mean by distance: `extend` with
            method="dynamic". n is the last position of a row + 1; of several texts in one row that of the longest.
        file: of "memory-mapped", once, for a new model: a safetensors file with one tensor `[max_length, D]`, of float32,
            float16 or bfloat16. A config.json never names it.

    A trained table becomes a frozen one when it is loaded:
    `from_pretrained(folder, position_encoding={"type": "learned", "storage": "int8"})`, or "memory-mapped". The latter
    becomes a trained one, in memory, by "float32".
    """

    title = "Learned absolute position embeddings"
    paper = ("https://arxiv.org/abs/1705.03122", "https://arxiv.org/abs/1810.04805")

    init: Literal["normal", "sinusoidal", "host"] = "normal"
    std: Annotated[float, GreaterThan(0)] = 0.02
    trained_rows: Annotated[int, GreaterThan(1)] | None = None

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        assert geometry.max_length is not None  # as `needs_max_length` says
        self._check_rows(geometry.max_length)
        for name in ("init", "std") if self.file is not None else ():
            if (value := getattr(self, name)) != getattr(type(self), name):
                raise ValueError(
                    f"learned.{name}={value!r} with file={str(self.file)!r}: the values are the file's; leave {name} out"
                )
        self.allocate(self.trained_rows or geometry.max_length, geometry.hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.storage == "float32" and self.init != "sinusoidal":
            nn.init.normal_(self.weight, std=self.std)
        elif self.storage != MAPPED:
            for start in range(0, self.shape[0], BLOCK):
                self.write(start, self._initial(start, min(start + BLOCK, self.shape[0])))

    def _initial(self, start: int, stop: int) -> Tensor:
        device = next(iter((*self.parameters(), *self.buffers()))).device
        if self.init == "sinusoidal":
            return sinusoids(torch.arange(start, stop, device=device), self.shape[1], base=10000.0)
        return torch.randn(stop - start, self.shape[1], device=device) * self.std

    def init_from_original_table(self, table: Tensor | None) -> None:
        if self.storage == "int8" and self.init == "normal":
            raise ValueError(
                "learned.storage='int8' freezes its rows, and init='normal' draws them at random: give init='host' or "
                "'sinusoidal', or train a table in float32 and load it with storage='int8'"
            )
        if self.init == "host" and self.storage != MAPPED:
            if table is None:
                raise ValueError("learned.init='host': this host has no position table: choose init='normal' or 'sinusoidal'")
            if table.shape[1] != self.shape[1]:
                raise ValueError(
                    f"learned.init='host': the host's table has {table.shape[1]} columns, but vectors of "
                    f"{self.shape[1]} are added here: choose init='normal' or 'sinusoidal'"
                )
            for start in range(0, min(len(table), self.shape[0]), BLOCK):
                self.write(start, table[start : min(start + BLOCK, self.shape[0])].detach())

    @classmethod
    def needs_max_length(cls, geometry: Geometry) -> bool:
        return True

    @classmethod
    def extended(cls, options: dict[str, Any], asked: Extension, geometry: Geometry) -> dict[str, Any] | None:
        if asked.method == DYNAMIC:
            asked.refuse_other_settings()
            return {**options, "trained_rows": options["trained_rows"] or asked.before}
        return options if asked.method in STATIC and options["trained_rows"] is None else None

    def load_from_shorter(self, shorter: Any, asked: Extension) -> None:
        if self.shape == shorter.shape:
            self.table = shorter.table
        elif self.storage == "float32":
            table = asked.interpolate_table(shorter.weight.detach())
            self.weight = nn.Parameter(table, requires_grad=shorter.weight.requires_grad)
        else:
            raise ValueError(
                f"learned.storage={self.storage!r}: these rows are frozen: load the model with storage='float32', extend it, "
                "and load the result with this storage; or take method='dynamic', which leaves them as they are"
            )

    def embed(self, positions: Tensor) -> Tensor:
        indices = positions.cpu() if self.storage == MAPPED else positions
        length, longer = self.geometry.max_length or 0, self.trained_rows is not None
        # Reading values would synchronize a GPU and break a traced graph, where only the shapes are checked.
        if indices.device.type == "cpu" and not torch.compiler.is_compiling() and indices.numel():
            low, high = indices.aminmax()
            if low < 0 or high >= length:
                raise ValueError(
                    f"position_ids from {int(low)} to {int(high)} don't fit a learned table of {length} rows: "
                    "pass ids below that, or hf_posenc.extend(model, max_length, method=…)"
                )
            longer = longer and bool(high >= self.shape[0])
        if longer:
            below, part = fractions(indices, self.shape[0], (last_of_text(indices) + 1).clamp(min=self.shape[0]))
            here, above = self.at(below), self.at((below + 1).clamp(max=self.shape[0] - 1))
            vectors = torch.lerp(here, above, part[..., None].to(here))
        else:
            vectors = self.at(indices)
        return vectors.to(positions.device)

    def _check_rows(self, length: int) -> None:
        rows = self.trained_rows
        if rows is not None and rows > length:
            raise ValueError(f"learned.trained_rows={rows}: allowed are rows up to max_length={length}; or leave it out")
        if rows is not None and self.geometry.is_causal:
            raise ValueError(
                f"learned.trained_rows={rows}: a decoder's cache keeps vectors of positions before the text has its length, so "
                "none can be stretched by that: extend with a static method, such as 'linear'"
            )
