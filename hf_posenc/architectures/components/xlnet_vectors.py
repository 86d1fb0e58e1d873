"""Vectors of relative positions that a stack passes to its attentions, as in Transformer-XL: XLNet."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_posenc.architectures.components.component import PositionComponent, is_one_of
from hf_posenc.signatures import BoundCall, argument_names

ARGUMENTS = {"XLNetRelativeAttention": "r"}
"""Class of an attention -> its argument with the vectors."""


class RelativeVectors(PositionComponent):
    """An argument of an attention with one vector per distance, from which it computes keys. The argument is set to zeros.

    The parameters that compute these keys don't change, and are multiplied by zeros.
    """

    encoding, verb = "transformer_xl", "score_bias"

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        for path, module in modules.items():
            if is_one_of(ARGUMENTS, module):
                yield cls(path, module)

    def check(self, config: Any) -> None:
        ARGUMENTS[type(self.module).__name__]

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        names, argument = argument_names(self.module), ARGUMENTS[type(self.module).__name__]
        self.module.register_forward_pre_hook(partial(without_vectors, argument, names), with_kwargs=True)


def without_vectors(argument: str, names: list[str], module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Pre-hook of an attention. Sets the vectors to 0."""
    call = BoundCall(names, args, kwargs)
    return call.changed(**{argument: torch.zeros_like(call[argument])})
