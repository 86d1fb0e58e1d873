"""Learned position embeddings whose modules can compute in integers and also return a scaling factor: I-BERT."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from hf_posenc.architectures.components.component import PositionComponent, UnsupportedModelError, is_one_of, replace
from hf_posenc.architectures.components.position_tables import NAMES, DisabledTable, PositionTable

CLASSES = ("QuantEmbedding",)


class QuantizableTable(PositionTable):
    """Position embeddings in floating point. Quantized models aren't supported."""

    module: Any

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        for path, module in modules.items():
            if cls.claims(module) and path.rpartition(".")[2] in NAMES:
                if module.quant_mode:
                    raise UnsupportedModelError(
                        f"{type(stack).__name__} computes attention with integers, so its scores can't include an encoding",
                        reason="quantized model",
                        remedy="Load it with quant_mode=False.",
                    )
                yield cls(path, module)

    @classmethod
    def claims(cls, module: Any) -> bool:
        return is_one_of(CLASSES, module)

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        offset = self.offset if adds_vectors else None
        replace(stack, self.path, DisabledQuantizableTable(stack, self.path, self.module, offset))

    @property
    def width(self) -> int:
        return self.module.dim


class DisabledQuantizableTable(DisabledTable):
    """Also returns a scaling factor, which is None without quantization."""

    def forward(self, position_ids: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(position_ids), None
