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
        init: "normal" (see std), "sinusoidal", or `"host"`, the model's original position embeddings. Positions beyond those,
            and all positions of a model without pretrained weights, start as "normal".
        std: standard deviation of "normal" (0.02 as in BERT; 1.0 is `torch.randn`).
        storage: "float32": trained, in the model's dtype. The other two are frozen, and can't be trained:
            "int8": PE(p) = step[p] · values[p], with values in -127 … 127 and a float32 step per position, D + 4 bytes each.
            It needs `init` `"host"` or "sinusoidal". The rounding error of a value is at most half a step.
            "memory-mapped": the position embeddings stay in a file and take memory only while they are read, so that gigabytes
            open immediately. The model doesn't move, cast, or count them. They stay on the CPU, and the vectors that are read
            move to the device of the positions. A saved model reads them from its own safetensors file.
        trained_rows: N, for encoders with fewer position embeddings than max_length. Texts of n ≤ N tokens use them unchanged.
            In longer texts, position p is interpolated linearly at p(N - 1)/(n - 1), as in `extend` with method="dynamic". n is
            the last position of the text + 1, also if a row holds several texts.
        file: for "memory-mapped", once, in a new model: a safetensors file with one tensor `[max_length, D]` in float32,
            float16, or bfloat16. A config.json never names it.

    To freeze trained position embeddings, load them with another storage:
    `from_pretrained(path, position_encoding={"type": "learned", "storage": "int8"})`, or "memory-mapped". To train
    memory-mapped ones in memory, load them with "float32".
    """

    title = "Learned absolute position embeddings"
    paper = ("https://arxiv.org/abs/1705.03122", "https://arxiv.org/abs/1810.04805")

    init: Literal["normal", "sinusoidal", "host"] = "normal"
    std: Annotated[float, GreaterThan(0)] = 0.02
    trained_rows: Annotated[int, GreaterThan(1)] | None = None

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        assert geometry.max_length is not None  # see `needs_max_length`
        self._check_rows(geometry.max_length)
        for name in ("init", "std") if self.file is not None else ():
            if (value := getattr(self, name)) != getattr(type(self), name):
                raise ValueError(
                    f"learned.{name}={value!r} has no effect, because file={str(self.file)!r} sets the values. Omit {name}."
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
                "learned.storage='int8' freezes the position embeddings, but init='normal' makes them random. Use init='host' "
                "or 'sinusoidal', or train in float32 and load the model with storage='int8'."
            )
        if self.init == "host" and self.storage != MAPPED:
            if table is None:
                raise ValueError("learned.init='host' needs a model with position embeddings. Use 'normal' or 'sinusoidal'.")
            if table.shape[1] != self.shape[1]:
                raise ValueError(
                    f"learned.init='host': the original position embeddings have size {table.shape[1]}, but vectors of size "
                    f"{self.shape[1]} are added here. Use init='normal' or 'sinusoidal'."
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
                f"learned.storage={self.storage!r} freezes the position embeddings. Load the model with storage='float32', "
                "extend it, and load the result with this storage. Or use method='dynamic', which doesn't change them."
            )

    def embed(self, positions: Tensor) -> Tensor:
        indices = positions.cpu() if self.storage == MAPPED else positions
        length, longer = self.geometry.max_length or 0, self.trained_rows is not None
        # Reading values would synchronize a GPU and break a traced graph. Only shapes are checked there.
        if indices.device.type == "cpu" and not torch.compiler.is_compiling() and indices.numel():
            low, high = indices.aminmax()
            if low < 0 or high >= length:
                raise ValueError(
                    f"position_ids from {int(low)} to {int(high)} don't fit {length} learned position embeddings. Pass smaller "
                    "position_ids, or call hf_posenc.extend(model, max_length, method=…)."
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
            raise ValueError(f"learned.trained_rows={rows} isn't valid. It must be at most max_length={length}, or be omitted.")
        if rows is not None and self.geometry.is_causal:
            raise ValueError(
                f"learned.trained_rows={rows} isn't supported in decoders, because cached keys keep the positions of a shorter "
                "input. Extend the model with a static method, such as 'linear'."
            )
