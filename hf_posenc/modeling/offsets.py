"""Constant vectors that calibration adds to replace the average contribution of the original positions.

Shapes: B batch, L tokens, D the width of what they are added to.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class MeanOffset(nn.Module):
    """Adds one learned vector, `[D]`, to hidden states `[..., D]`. It is zero until it is calibrated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.weight.to(hidden.dtype)

    def extra_repr(self) -> str:
        return str(len(self.weight))


def install(stack: nn.Module, widths: Iterable[tuple[str, int]]) -> None:
    """Give each module at these paths of a stack a MeanOffset as `posenc`, which is added to the module's output."""
    for path, width in widths:
        module = stack.get_submodule(path)
        module.posenc = MeanOffset(width)
        module.register_forward_hook(add)


def add(module: Any, args: tuple, output: Tensor) -> Tensor:
    """Hook of a module with a MeanOffset. It is a plain function, so that a patched model can be copied and pickled."""
    return module.posenc(output)
