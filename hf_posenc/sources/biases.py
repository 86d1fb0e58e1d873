"""Learned relative biases of a host's own, which its attentions add to their scores: MPNet."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hf_posenc.sources.source import Silenced, Source, replace

MAKERS = {"MPNetEncoder": ("relative_attention_bias", "compute_position_bias")}
"""Class of the module that owns such a bias -> its table, and the method that makes the bias of the table."""


class RelativeBias(Source):
    """A table of biases by bucket of distance, as in T5."""

    encoding, verb = "t5", "distance_bias"
    module: nn.Embedding

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[Source]:
        for path, module in modules.items():
            if type(module).__name__ in MAKERS and type(module).__module__.startswith("transformers.models."):
                table, _ = MAKERS[type(module).__name__]
                yield cls(f"{path}.{table}".lstrip("."), getattr(module, table))

    def silence(self, stack: Any, adds_vectors: bool) -> None:
        silenced, owner = SilencedBias(stack, self.path, self.module), stack.get_submodule(self.path.rpartition(".")[0])
        replace(stack, self.path, silenced)
        _, method = MAKERS[type(owner).__name__]
        setattr(owner, method, partial(silenced.make, owner, method))

    def kept_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        return {f"{self.path}.weight": tuple(self.module.weight.shape)}


class SilencedBias(Silenced):
    """Makes no bias, except while the encoding's `blend` is below 1."""

    def forward(self, buckets: Tensor) -> Tensor:
        (stack,) = self._stack
        return (1.0 - stack.posenc.blend) * F.embedding(buckets, self.weight)

    def make(self, module: nn.Module, method: str, *args: Any, **kwargs: Any) -> Tensor | None:
        """The host's own method, called only where it would make something."""
        (stack,) = self._stack
        if stack.posenc.blend == 1.0 or self.kept is None:
            return None
        return getattr(type(module), method)(module, *args, **kwargs)
