"""Position embeddings and sinusoids that compute the positions of their input: BART, OPT, Marian, M2M-100, Whisper's decoder.

Their arguments differ: IDs, a mask, embeddings, or a shape. They aren't needed, because the forward pass determines the
positions.

Shapes: B batch, L tokens, D hidden_size.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.architectures.components.component import PositionComponent, replace
from hf_posenc.architectures.components.position_tables import IMAGES, NAMES, DisabledTable, PositionTable
from hf_posenc.configuration import LENGTH_FIELD
from hf_posenc.encodings.context import context_for
from hf_posenc.signatures import argument_names


class SelfIndexedTable(PositionTable):
    """A module with one of NAMES that maps an input to vectors to add. It is a subclass of `nn.Embedding` with a custom
    forward, or a module that has `weights` in a buffer or computes the vectors.

    first: the row of the first token. It is determined by calling a copy of the module whose rows contain their indices, which
        also works on the meta device.
    """

    def __init__(self, path: str, module: Any, config: Any) -> None:
        super().__init__(path, module)
        table, said = _table(module), getattr(config, LENGTH_FIELD, None)
        self.first = _first_row(module) or 0
        self.rows = None if table is None else len(table)
        more = None if self.rows is None or said is None else self.rows - said
        # BART has two more rows than tokens.
        self.more = more if more in (0, self.first) else None

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        others = [kind for kind in PositionComponent.kinds if kind is not cls]
        for path, module in modules.items():
            if path.rpartition(".")[2] not in NAMES or IMAGES in argument_names(stack):
                continue
            if cls.claims(module) and not any(kind.claims(module) for kind in others):
                yield cls(path, module, stack.config)

    @classmethod
    def at(cls, path: str, stack: Any, modules: Mapping[str, nn.Module]) -> PositionComponent:
        return cls(path, modules[path], stack.config)

    @classmethod
    def claims(cls, module: nn.Module) -> bool:
        if type(module) is nn.Embedding or not argument_names(module) or _width(module) is None:
            return False
        return _computes(module) if _table(module) is None else _first_row(module) is not None

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        silenced = DisabledSelfIndexedTable(stack, self.path, self.module, 0 if adds_vectors else None)
        replace(stack, self.path, silenced)

    @property
    def offset(self) -> int:
        """0, because the module adds `first` to the stack's position IDs."""
        return 0

    @property
    def width(self) -> int:
        return _width(self.module) or 0

    def usable_length(self, config: Any) -> int | None:
        if self.rows is None:
            return getattr(config, LENGTH_FIELD, None)
        return (self.rows if self.more is None else getattr(config, LENGTH_FIELD) + self.more) - self.first

    def saved_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        if "weight" not in self.module._parameters or self.rows is None:
            return {}
        return {f"{self.path}.weight": (self.rows if self.more is None or rows is None else rows + self.more, self.width)}

    @property
    def learned_table(self) -> tuple[str, int] | None:
        computed = hasattr(self.module, "create_weight")  # unsaved sinusoids (Marian, Pegasus)
        return (f"{self.path}.weight", self.first) if "weight" in self.module._parameters and not computed else None

    def table(self) -> Tensor | None:
        table = _table(self.module)
        return None if table is None else table[self.first :]


class DisabledSelfIndexedTable(DisabledTable):
    """Returns the vectors of the encoding at the positions of the forward pass, `[1 or B, L, D]`, for any arguments."""

    def __init__(self, stack: Any, path: str, table: Any, offset: int | None) -> None:
        super().__init__(stack, path, table, offset)
        self.embedding_dim = _width(table) or 0
        self.by_shape = argument_names(table)[0].endswith("shape")

    @property
    def width(self) -> int:
        return self.embedding_dim

    def forward(self, given: Any = None, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        (stack,) = self._stack
        context = context_for(self)
        if not context.positions.numel():  # audio, for which the original model determines the number of frames
            given = next(iter(kwargs.values())) if given is None else given
            context = context.with_length(_length(given), stack.device)
        positions = context.positions
        if self.by_shape and (padding := _length(given) - positions.shape[1]) > 0:  # LED pads to whole windows
            positions = torch.cat([positions, positions[:, -1:].expand(-1, padding)], dim=1)
        return self.vectors(positions)


def _length(given: Any) -> int:
    """The number of tokens in IDs or a mask `[B, L]`, in embeddings `[B, L, D]`, or in the shape of one of these."""
    shape = given.shape if isinstance(given, Tensor) else given
    return shape[1]


def _width(module: Any) -> int | None:
    """The size of a module's output vectors according to its attributes."""
    return next((size for name in ("embedding_dim", "embed_dim") if isinstance(size := getattr(module, name, None), int)), None)


def _table(module: nn.Module) -> Tensor | None:
    """The position embeddings of a module, `[rows, D]`: a parameter, or an unsaved buffer."""
    found: Tensor | None = module._parameters.get("weight")
    found = module._buffers.get("weights") if found is None else found
    return found if found is not None and found.ndim == 2 else None


def _first_row(module: Any) -> int | None:
    """The row that a module returns for the first token, or None unless it returns the next row for the second token."""
    table = _table(module)
    if table is None:
        return None
    with torch.device("cpu"), torch.no_grad():
        twin = copy.copy(module)
        numbers = torch.arange(len(table), dtype=torch.float32)[:, None]
        key, tensors = ("weight", "_parameters") if "weight" in module._parameters else ("weights", "_buffers")
        held = {**vars(module)[tensors], key: nn.Parameter(numbers, requires_grad=False) if key == "weight" else numbers}
        vars(twin)[tensors] = held
        answer = _answer(twin, getattr(module, "padding_idx", None))
    if answer is None or answer.numel() != 2:
        return None
    first, second = (int(row) for row in answer.flatten())
    return first if second == first + 1 else None


def _computes(module: Any) -> bool:
    """Whether a module without tensors computes vectors of its width that differ by position, only from an input's shape."""
    width = _width(module)
    if width is None or any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
        return False
    with torch.device("cpu"), torch.no_grad():
        try:
            answer = type(module).forward(module, torch.zeros(1, 2, width))
        except Exception:  # another module may raise anything
            return False
    shaped = isinstance(answer, Tensor) and answer.shape[-2:] == (2, width)
    return bool(shaped and (answer[..., 0, :] != answer[..., 1, :]).any())


def _answer(table: Any, padding_idx: int | None) -> Tensor | None:
    """A module's output for two tokens, with the kind of argument that it accepts. None if it doesn't return a tensor."""
    token = 0 if padding_idx is None else padding_idx + 1
    names = argument_names(table)
    tokens = torch.arange(2)[None] if names[0] == "position_ids" else torch.full((1, 2), max(token, 1))
    for given in (tokens.shape if names[0].endswith("shape") else tokens, tokens[:, None]):
        try:
            answer = type(table).forward(table, given)
        except Exception:  # a module with other arguments may raise anything
            continue
        if isinstance(answer, Tensor):
            return answer
    return None
