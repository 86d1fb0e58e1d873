"""ALiBi that hosts compute themselves and hand to their attentions: Bloom, MPT, Falcon with `alibi=True`."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.architectures.components.component import PositionComponent, is_one_of
from hf_posenc.signatures import BoundCall, argument_names

ARGUMENTS = {"BloomAttention": "alibi", "FalconAttention": "alibi", "MptAttention": "position_bias"}
"""Class of an attention -> its argument that is the bias."""
LENGTHS = ("max_seq_len",)
"""Fields of configs that limit such a bias."""


class LinearBias(PositionComponent):
    """An argument of an attention's which is a tensor of ALiBi's biases: it becomes zeros."""

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
    """Pre-hook of an attention: the bias is 0, also where the host has put it into the mask (Falcon)."""
    call = BoundCall(names, args, kwargs)
    bias, mask = call[argument], call["attention_mask"]
    changes = {} if bias is None else {argument: torch.zeros_like(bias[..., -1:])}
    if bias is not None and isinstance(mask, Tensor) and mask.is_floating_point() and bias.ndim == mask.ndim:
        lowest = torch.finfo(mask.dtype).min
        changes["attention_mask"] = torch.zeros_like(mask).masked_fill(mask == lowest, lowest)
    return call.changed(**changes)
