"""Learned relative biases of a host's own, which its attentions add to their scores: MPNet, LayoutLMv3."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from hf_posenc.sources.source import Silenced, Source, replace

MAKERS = {
    "LayoutLMv3Encoder": ("rel_pos_bias", "_cal_1d_pos_emb"),
    "MPNetEncoder": ("relative_attention_bias", "compute_position_bias"),
}
"""Class of the module that owns such a bias -> its table, and the method that makes the bias of the table."""


class RelativeBias(Source):
    """A table of biases by bucket of distance, as in T5."""

    encoding, verb = "t5", "distance_bias"
    module: Any

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[Source]:
        for path, module in modules.items():
            if type(module).__name__ in MAKERS and type(module).__module__.startswith("transformers.models."):
                table, _ = MAKERS[type(module).__name__]
                if not hasattr(module, table):
                    continue
                yield cls(f"{path}.{table}".lstrip("."), getattr(module, table))

    def silence(self, stack: Any, adds_vectors: bool) -> None:
        silenced, owner = SilencedBias(stack, self.path, self.module), stack.get_submodule(self.path.rpartition(".")[0])
        replace(stack, self.path, silenced)
        _, method = MAKERS[type(owner).__name__]
        setattr(owner, method, silenced.make)

    def kept_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        return {f"{self.path}.weight": tuple(self.module.weight.shape)}


class SilencedBias(Silenced):
    """Makes a bias of 0."""

    def make(self, *args: Any, **kwargs: Any) -> float:
        """In place of the host's own method."""
        return 0.0
