"""Vectors of an image's rows and columns that each layer of an encoder adds to its queries and keys: DETR, RT-DETR.

Shapes: B batch, L patches of a feature map, D hidden_size.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.architectures.components.component import PositionComponent, is_one_of
from hf_posenc.signatures import BoundCall, argument_names

ARGUMENT, LAYER = "spatial_position_embeddings", "EncoderLayer"
"""The argument with the vectors `[B, L, D]`, and the end of the class name of the layers of encoders."""
OTHER_ARGUMENTS = {"DabDetrEncoderLayer": "object_queries", "TableTransformerEncoderLayer": "object_queries"}
"""Class of a layer -> its argument, if it has another name."""
SOURCE = "position_embedding"
"""The module that computes the vectors, if it belongs to the module with the list of layers (RT-DETR)."""


class SpatialVectors(PositionComponent):
    """The argument of a layer with vectors of positions. It is set to zeros."""

    encoding, verb = "sinusoidal", "embed"
    pads_rows = True

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        for path, module in modules.items():
            if (argument := argument_of(module)) is not None:
                yield cls(f"{path}.{argument}", module)

    @classmethod
    def at(cls, path: str, stack: Any, modules: Mapping[str, nn.Module]) -> PositionComponent:
        return cls(path, modules[path.rpartition(".")[0]])

    def check(self, config: Any) -> None:
        if argument_of(self.module) is None:
            raise TypeError

    @property
    def claimed(self) -> tuple[str, ...]:
        owner = ".".join(self.path.split(".")[:-3])
        return (self.path, f"{owner}.{SOURCE}") if owner else (self.path,)

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        hook = partial(without_vectors, self.path.rpartition(".")[2], argument_names(self.module))
        self.module.register_forward_pre_hook(hook, with_kwargs=True)


def argument_of(module: nn.Module) -> str | None:
    """The argument of a layer with vectors of positions, or None."""
    if is_one_of(OTHER_ARGUMENTS, module):
        return OTHER_ARGUMENTS[type(module).__name__]
    return ARGUMENT if type(module).__name__.endswith(LAYER) and ARGUMENT in argument_names(module) else None


def without_vectors(argument: str, names: list[str], module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Pre-hook of a layer. Sets the vectors to 0."""
    call = BoundCall(names, args, kwargs)
    vectors = call[argument]
    return call.changed(**{argument: torch.zeros_like(vectors)}) if isinstance(vectors, Tensor) else None
