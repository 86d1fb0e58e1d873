"""Positional components of custom classes with other names and forms, which the user registers."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from hf_posenc.architectures.components.component import OWN_PAGE, PositionComponent, UnsupportedModelError
from hf_posenc.architectures.components.position_parameters import PositionParameter
from hf_posenc.architectures.components.position_tables import PositionTable
from hf_posenc.architectures.components.vision import count_extra_tokens
from hf_posenc.configuration import LENGTH_FIELD


@dataclass(frozen=True)
class Declaration:
    """A registered component.

    cls: class of the stack.
    path: path of the module, parameter, or buffer in the stack.
    disabled_output: function that maps a module's output to the output without positions.
    """

    cls: type
    path: str
    disabled_output: Callable[[Any], Any] | None


DECLARED: dict[tuple[str, str], Declaration] = {}
"""Registered components by class name and path. A notebook cell can therefore be run again."""


def declare(cls: type, path: str, disabled_output: Callable[[Any], Any] | None) -> None:
    for key, other in [*DECLARED.items()]:  # a notebook cell has defined the class again
        if key[0] == f"{cls.__module__}.{cls.__qualname__}" and other.cls is not cls:
            del DECLARED[key]
    DECLARED[f"{cls.__module__}.{cls.__qualname__}", path] = Declaration(cls, path, disabled_output)


def declared_in(stack: Any, modules: Mapping[str, nn.Module]) -> dict[str, PositionComponent]:
    """Path -> component, for the components registered for a stack's class. Raises UnsupportedModelError for a missing one."""
    mine = [each for each in DECLARED.values() if isinstance(stack, each.cls)]
    return {each.path: _source(each, stack, modules) for each in mine}


def _source(each: Declaration, stack: Any, modules: Mapping[str, nn.Module]) -> PositionComponent:
    owner, _, key = each.path.rpartition(".")
    module, around = modules.get(each.path), modules.get(owner)
    if isinstance(module, nn.Embedding) and each.disabled_output is None:
        return RegisteredTable(each.path, module, around, stack.config)
    if module is not None and each.disabled_output is not None:
        return RegisteredModule(each.path, module, each.disabled_output)
    if around is not None and isinstance(getattr(around, key, None), Tensor) and each.disabled_output is None:
        found = RegisteredParameter(each.path, around, count_extra_tokens(modules), stack.config)
        return found if found.axis is not None else FixedParameter.at(each.path, stack, modules)
    what = "nothing" if module is None else f"a {type(module).__name__}"
    raise UnsupportedModelError(
        f"register_positions({each.cls.__name__}, {each.path!r}) refers to {what} in this {type(stack).__name__}. Register an "
        "nn.Embedding, a parameter, or a buffer without disabled_output, or another module with it",
        reason="registered positions not found",
        remedy=OWN_PAGE,
    )


def _at(cls: type[PositionComponent], path: str, stack: Any, modules: Mapping[str, nn.Module]) -> PositionComponent:
    """See `PositionComponent.at`. A custom class is registered wherever it is imported."""
    return declared_in(stack, modules)[path]


class RegisteredTable(PositionTable):
    """An `nn.Embedding` that is called with position IDs. Its number of rows is the config's LENGTH_FIELD, or another one."""

    def __init__(self, path: str, module: nn.Embedding, around: nn.Module | None, config: Any) -> None:
        super().__init__(path, module)
        self.follows = module.num_embeddings == getattr(config, LENGTH_FIELD, None)
        self.only_in = around is not None and all(each is module.weight for each in around.parameters())

    at = classmethod(_at)

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Any:
        return ()

    @property
    def claimed(self) -> tuple[str, ...]:
        """Its path, and that of a module around it without other parameters, which computes the IDs (x-transformers)."""
        return (self.path, self.path.rpartition(".")[0]) if self.only_in else (self.path,)

    def usable_length(self, config: Any) -> int:
        return (getattr(config, LENGTH_FIELD) if self.follows else self.module.num_embeddings) - self.offset

    def saved_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        return super().saved_shapes(rows if self.follows else None)


class RegisteredParameter(PositionParameter):
    """A parameter or buffer of vectors that the model adds. The size of one axis is the config's LENGTH_FIELD."""

    def __init__(self, path: str, around: nn.Module, extra_tokens: tuple[int, int], config: Any) -> None:
        super().__init__(path, around, extra_tokens, (path.rpartition(".")[0], around))
        self.axis = self._axis(getattr(config, LENGTH_FIELD, None))

    def _axis(self, length: int | None) -> int | None:
        return next((axis for axis, size in enumerate(self.shape[:-1]) if size == length), None)

    at = classmethod(_at)

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Any:
        return ()

    @property
    def output_module(self) -> None:
        # The output of its module can have any form, so vectors are added to the input of the first layer.
        return None

    def usable_length(self, config: Any) -> int | None:
        return super().usable_length(config) if self.axis is None else getattr(config, LENGTH_FIELD)

    def length_if_disabled(self, config: Any) -> int | None:
        # The model adds zeros of the same shape. Only the number of rows of one table is known to be a number of tokens.
        if self.axis is None and math.prod(self.shape[:-2]) > 1:
            return None
        return self.usable_length(config)

    def saved_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        kept = super().saved_shapes(rows)
        if self.axis is None or rows is None:
            return kept
        return {path: (*shape[: self.axis], rows, *shape[self.axis + 1 :]) for path, shape in kept.items()}


class FixedParameter(RegisteredParameter):
    """A parameter or buffer of vectors whose size doesn't depend on the config's LENGTH_FIELD, even if they are equal."""

    def _axis(self, length: int | None) -> None:
        return None

    @classmethod
    def at(cls, path: str, stack: Any, modules: Mapping[str, nn.Module]) -> PositionComponent:
        return cls(path, modules[path.rpartition(".")[0]], count_extra_tokens(modules), stack.config)


class RegisteredModule(PositionComponent):
    """A module that returns positions in a custom form."""

    encoding, verb = "rope", "rotate"

    def __init__(self, path: str, module: nn.Module, disabled_output: Callable[[Any], Any]) -> None:
        super().__init__(path, module)
        self.disabled_output = disabled_output

    at = classmethod(_at)

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Any:
        return ()

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        self.module.register_forward_hook(partial(without_positions, self.disabled_output))


def without_positions(disabled_output: Callable[[Any], Any], module: nn.Module, args: tuple, answer: Any) -> Any:
    """Hook of a registered module."""
    return disabled_output(answer)
