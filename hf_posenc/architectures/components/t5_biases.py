"""Learned relative biases of a host's own, which its attentions add to their scores: T5, MPNet, LayoutLMv3."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from hf_posenc.architectures.components.component import Disabled, PositionComponent, is_transformers, replace

TABLE, METHODS = "relative_attention_bias", ("compute_bias", "compute_position_bias")
"""The name of such a table in most hosts, and of the method of its owner which makes the bias of it."""
MAKERS = {"LayoutLMv3Encoder": ("rel_pos_bias", "_cal_1d_pos_emb")}
"""Class of an owner with other names -> its table and method."""


class RelativeBias(PositionComponent):
    """A table of biases by bucket of distance, as in T5: of a stack's first attention, or of each."""

    encoding, verb = "t5", "distance_bias"
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


def _maker(module: Any) -> tuple[str, str] | None:
    """The names of a module's table and of the method that makes the bias of it, if it owns one."""
    if not is_transformers(type(module)):
        return None
    table, *methods = MAKERS.get(type(module).__name__, (TABLE, *METHODS))
    method = next((name for name in methods if hasattr(module, name)), None)
    return None if method is None or table not in module._modules else (table, method)


class DisabledBias(Disabled):
    """Makes a bias of 0."""

    def make(self, *args: Any, **kwargs: Any) -> float:
        """In place of the host's own method."""
        return 0.0


class DisabledTensorBias(Disabled):
    """Makes a bias of 0, which the host adds to others in place."""

    def make(self, *args: Any, **kwargs: Any) -> Tensor:
        """In place of the host's own method."""
        return self._stack[0].get_input_embeddings().weight.new_zeros(1, 1, 1, 1)
