"""Biases by token distance in a module of their own, in addition to biases by the boxes of tokens: UDOP."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from hf_posenc.architectures.components.component import PositionComponent, is_one_of, replace
from hf_posenc.architectures.components.distance_embeddings import DisabledDistances

CLASSES = ("RelativePositionBias1D",)
TABLE = "relative_attention_bias"


class TokenDistanceBias(PositionComponent):
    """A module whose embeddings `[buckets, H]` are biases by bucket of token distance, as in T5."""

    encoding, verb = "t5", "distance_bias"
    module: nn.Embedding

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        for path, module in modules.items():
            if is_one_of(CLASSES, module):
                yield cls(f"{path}.{TABLE}", module.get_submodule(TABLE))

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        replace(stack, self.path, DisabledBuckets(stack, self.path, self.module))

    @property
    def claimed(self) -> tuple[str, ...]:
        return self.path, self.path.rpartition(".")[0]

    def saved_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        return {f"{self.path}.weight": tuple(self.module.weight.shape)}

    @property
    def zeroed(self) -> str:
        return f"{self.path}.weight"


class DisabledBuckets(DisabledDistances):
    """Returns a bias of 0 for each bucket. The module that contains it reads the number of buckets."""

    @property
    def num_embeddings(self) -> int:
        return self.shape[0]
