"""Learned vectors and biases of distances that attentions look up or project themselves: Conformers, WavLM.

Shapes: B batch, Q queries, K keys, E head_dim.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.architectures.components.component import Disabled, PositionComponent, replace
from hf_posenc.configuration import LENGTH_FIELD

NAMES = {
    "linear_pos": "transformer_xl",
    "relative_k_proj": "transformer_xl",
    "distance_embedding": "shaw",
    "rel_pos_emb": "shaw",
    "pe_k": "shaw",
    "rel_attn_embed": "t5",
    "bias_values": "relative",
}
"""Name of a module -> the equivalent encoding. The modules are linear projections of sinusoids of distances, embeddings of
distances that are multiplied with queries, and biases. Zeros in their place add nothing to scores."""
SINES = re.compile(r"Rel(ative)?(Position(al)?(Embedding|Encoding)|AttentionBias)")
"""Matches class names of modules that compute the sinusoids of all distances, or contain embeddings of distances."""
BESIDE = {
    "linear_pos": ("pos_bias_u", "pos_bias_v"),
    "rel_attn_embed": ("gru_rel_pos_const", "gru_rel_pos_linear"),
}
"""Name of a module -> names of related parameters and modules, which aren't disabled. These are biases added to queries before
the products with keys and with sinusoids, and gates of biases. The last two are then multiplied by zeros."""


class RelativeTable(PositionComponent):
    """Embeddings of distances, or a projection of sinusoids of distances, with one of NAMES."""

    verb = "score_bias"
    module: nn.Embedding | nn.Linear

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        length = getattr(stack.config, LENGTH_FIELD, None)
        for path, module in modules.items():
            name = path.rpartition(".")[2]
            if name in NAMES and isinstance(module, (nn.Embedding, nn.Linear)):
                beside = [
                    f"{owner}.{other}".lstrip(".")
                    for other in BESIDE.get(name, ())
                    for owner, each in modules.items()
                    if other in each._parameters or other in each._modules
                ]
                yield cls(path, module, (path, *beside), length)

    def __init__(self, path: str, module: nn.Module, claimed: tuple[str, ...], length: int | None) -> None:
        super().__init__(path, module)
        self._claimed, self.length = claimed, length

    @classmethod
    def at(cls, path: str, stack: Any, modules: Mapping[str, nn.Module]) -> PositionComponent:
        return cls(path, modules[path], (path,), getattr(stack.config, LENGTH_FIELD, None))

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return NAMES[self.path.rpartition(".")[2]]

    @property
    def claimed(self) -> tuple[str, ...]:
        return self._claimed

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        replace(stack, self.path, DisabledDistances(stack, self.path, self.module))

    def saved_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        shapes = {f"{self.path}.{name}": tuple(value.shape) for name, value in self.module.named_parameters()}
        if rows is not None and self.length is not None and self.module.weight.shape[0] == 2 * self.length + 1:
            # One row for each distance up to the config's length, which can differ in a patched model's config.
            shapes[f"{self.path}.weight"] = (2 * rows + 1, self.module.weight.shape[1])
        return shapes


class RelativeSinusoids(PositionComponent):
    """The module that contains a `RelativeTable`, or computes the input of its projections. It doesn't change, because its
    output is multiplied by zeros."""

    encoding, verb = "transformer_xl", "score_bias"

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        if any(RelativeTable.find(stack, modules)):
            for path, module in modules.items():
                if is_relative(module) and not _own_parameters(module):
                    yield cls(path, module)

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        return


def is_relative(module: nn.Module) -> bool:
    """Whether a module has outputs by distance, not by position, according to its class name."""
    return SINES.search(type(module).__name__) is not None


def _own_parameters(module: nn.Module) -> list[str]:
    """The names of a module's parameters, except those that `RelativeTable` claims."""
    return [name for name, _ in module.named_parameters() if name.partition(".")[0] not in NAMES]


class DisabledDistances(Disabled):
    """Returns zeros for distances, or for sinusoids of distances."""

    def __init__(self, stack: Any, path: str, table: nn.Embedding | nn.Linear) -> None:
        super().__init__(stack, path, table)
        self.width = table.embedding_dim if isinstance(table, nn.Embedding) else table.out_features

    @property
    def weight(self) -> Tensor:
        """As in `Disabled`, but on the stack's device, which a model may read from it."""
        kept = super().weight
        (stack,) = self._stack
        return kept if self.kept is not None else kept.to(next(stack.parameters()).device)

    def forward(self, given: Tensor) -> Tensor:
        """Integers `[...]`, or sinusoids `[..., D]` -> `[..., width]`."""
        (stack,) = self._stack
        shape = given.shape[:-1] if given.is_floating_point() else given.shape
        dtype = next(parameter.dtype for parameter in stack.parameters() if parameter.is_floating_point())
        return torch.zeros((), dtype=dtype, device=given.device).expand(*shape, self.width)
