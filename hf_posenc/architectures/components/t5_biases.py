"""Learned relative biases that attentions add to their scores: T5, MPNet, LayoutLMv3."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from hf_posenc.architectures.components.component import Disabled, PositionComponent, is_transformers, replace

TABLE, METHODS = "relative_attention_bias", ("compute_bias", "compute_position_bias")
"""The usual names of the parameters' module and of its parent's method that computes the bias."""
MAKERS = {"LayoutLMv3Encoder": ("rel_pos_bias", "_cal_1d_pos_emb")}
"""The names of the module and method in parent classes with other names."""


class RelativeBias(PositionComponent):
    """Biases by distance bucket, as in T5, in one module of a stack or in each attention."""

    encoding, verb = "t5", "distance_bias"
    holds_t5_biases = True
    module: Any

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        for path, module in modules.items():
            if (maker := _maker(module)) is not None:
                yield cls(f"{path}.{maker[0]}".lstrip("."), getattr(module, maker[0]))

    @classmethod
    def at(cls, path: str, stack: Any, modules: Mapping[str, nn.Module]) -> PositionComponent:
        if _maker(modules[path.rpartition(".")[0]]) is None:
            raise KeyError(path)
        return super().at(path, stack, modules)

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        owner = stack.get_submodule(self.path.rpartition(".")[0])
        maker = _maker(owner)
        assert maker is not None
        silenced = (DisabledTensorBias if type(owner).__name__ in MAKERS else DisabledBias)(stack, self.path, self.module)
        replace(stack, self.path, silenced)
        setattr(owner, maker[1], silenced.make)

    def saved_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        return {f"{self.path}.weight": tuple(self.module.weight.shape)}

    @property
    def zeroed(self) -> str | None:
        return f"{self.path}.weight" if isinstance(self.module, nn.Embedding) else None


def _maker(module: Any) -> tuple[str, str] | None:
    """The names of the bias parameters' module and of the method that computes the bias, if this module has both."""
    if not is_transformers(type(module)):
        return None
    table, *methods = MAKERS.get(type(module).__name__, (TABLE, *METHODS))
    if table not in module._modules:
        return None
    method = next((name for name in methods if hasattr(module, name)), None)
    return None if method is None else (table, method)


class DisabledBias(Disabled):
    """Computes a bias of 0."""

    def make(self, *args: Any, **kwargs: Any) -> float:
        """Replaces the method that computes the bias."""
        return 0.0


class DisabledTensorBias(Disabled):
    """Computes a bias of 0 as a tensor, which the model adds to others in place."""

    def make(self, *args: Any, **kwargs: Any) -> Tensor:
        """Replaces the method that computes the bias."""
        return self._stack[0].get_input_embeddings().weight.new_zeros(1, 1, 1, 1)
