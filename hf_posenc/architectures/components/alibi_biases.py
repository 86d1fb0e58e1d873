"""ALiBi biases that a model computes once and passes to its attentions: Bloom, MPT, Falcon with `alibi=True`."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.architectures.components.component import PositionComponent, is_one_of
from hf_posenc.signatures import BoundCall, argument_names

ARGUMENTS = {"BloomAttention": "alibi", "FalconAttention": "alibi", "MptAttention": "position_bias"}
"""The bias argument of each attention class."""
LENGTHS = ("max_seq_len",)
"""Config fields that limit the length of the bias."""


class LinearBias(PositionComponent):
    """The ALiBi bias argument of an attention. It is replaced by zeros."""

    encoding, verb = "alibi", "distance_bias"

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        for path, module in modules.items():
            if is_one_of(ARGUMENTS, module) and getattr(stack.config, "alibi", True):
                yield cls(f"{path}.{ARGUMENTS[type(module).__name__]}", module)

    @classmethod
    def at(cls, path: str, stack: Any, modules: Mapping[str, nn.Module]) -> PositionComponent:
        return cls(path, modules[path.rpartition(".")[0]])

    def check(self, config: Any) -> None:
        ARGUMENTS[type(self.module).__name__]

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        names, argument = argument_names(self.module), ARGUMENTS[type(self.module).__name__]
        self.module.register_forward_pre_hook(partial(without_bias, argument, names), with_kwargs=True)

    def usable_length(self, config: Any) -> int | None:
        return next((value for name in LENGTHS if (value := getattr(config, name, None)) is not None), None)


def without_bias(argument: str, names: list[str], module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Pre-hook of an attention. Sets the bias to 0, even if the model has added it to the mask (Falcon)."""
    call = BoundCall(names, args, kwargs)
    bias, mask = call[argument], call["attention_mask"]
    changes = {} if bias is None else {argument: torch.zeros_like(bias[..., -1:])}
    if bias is not None and isinstance(mask, Tensor) and mask.is_floating_point() and bias.ndim == mask.ndim:
        lowest = torch.finfo(mask.dtype).min
        changes["attention_mask"] = torch.zeros_like(mask).masked_fill(mask == lowest, lowest)
    return call.changed(**changes)
