"""Learned relative biases of attentions over an image or its windows (Swin, BEiT), and vectors of distances in text (VITS)."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from hf_posenc.architectures.components.component import PositionComponent
from hf_posenc.architectures.components.position_parameters import PositionParameter
from hf_posenc.signatures import reads_tokens

BIASES = ("relative_position_bias_table", "rel_pos_h", "rel_pos_w", "relative_coords_table")
"""Tensors of biases by distance in rows and columns, of vectors for rows and for columns, or of distances from which a network
computes biases. If they are zeros, all pairs of tokens get the same bias."""
BESIDE = ("relative_position_index", "continuous_position_bias_mlp")
"""Related tensors and modules that don't change: the index of the bias for each pair of tokens, and the network."""
VECTORS = ("emb_rel_k", "emb_rel_v")
"""Parameters `[1, distances, E]` that attentions multiply by queries, and by attention weights."""


class WindowBias(PositionParameter):
    """Biases by the distance of two patches in rows and columns."""

    encoding, verb = "t5", "distance_bias"

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        if reads_tokens(stack):
            return
        for path, module in modules.items():
            tables = {**module._parameters, **module._buffers}
            for key in (key for key in BIASES if isinstance(tables.get(key), Tensor)):
                yield cls(f"{path}.{key}".lstrip("."), module, (0, 0), (path, module))

    @classmethod
    def at(cls, path: str, stack: Any, modules: Mapping[str, nn.Module]) -> PositionComponent:
        owner = path.rpartition(".")[0]
        return cls(path, modules[owner], (0, 0), (owner, modules[owner]))

    @property
    def claimed(self) -> tuple[str, ...]:
        return self.path, *(f"{self.path.rpartition('.')[0]}.{name}".lstrip(".") for name in BESIDE)

    @property
    def output_module(self) -> None:
        return None

    @property
    def learned_table(self) -> None:
        return None

    @property
    def zeroed(self) -> str | None:
        return self.path if self.is_learned else None

    @property
    def width(self) -> None:  # type: ignore[override]
        return None

    def usable_length(self, config: Any) -> None:
        return None

    def table(self) -> None:
        return None


class DistanceVectors(WindowBias):
    """Vectors by the distance of two tokens, for keys or for values, as in Shaw et al."""

    encoding, verb = "shaw", "score_bias"

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        for path, module in modules.items():
            for key in (key for key in VECTORS if isinstance(module._parameters.get(key), Tensor)):
                yield cls(f"{path}.{key}".lstrip("."), module, (0, 0), (path, module))

    @property
    def claimed(self) -> tuple[str, ...]:
        return (self.path,)
