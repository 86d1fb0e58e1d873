"""Vectors that calibration adds to replace the average contribution of the original positions.

Position embeddings are replaced by one vector for each range of positions: 0, 1, 2 to 3, 4 to 7, and so on. The last range has
no end. Each other contribution is replaced by one vector for all positions.

Shapes: B batch, L tokens, D the width of what they are added to, K ranges.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.encodings.context import context_for


class MeanOffset(nn.Module):
    """Adds one learned vector, `[D]`, or one for each range of positions, `[K, D]`, to hidden states `[1 or B, L, D]`.

    It is zero until it is calibrated.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.added(hidden, self.weight)

    def added(self, hidden: Tensor, vectors: Tensor) -> Tensor:
        """Hidden states with vectors of the weight's shape."""
        vectors = vectors.to(hidden.dtype)
        if vectors.ndim == 1:
            return hidden + vectors
        positions = context_for(self).positions
        if (more := hidden.shape[-2] - positions.shape[-1]) > 0:  # padded up to whole windows (LED)
            positions = torch.cat([positions, positions[:, -1:].expand(-1, more)], dim=1)
        return hidden + vectors[range_of(positions, len(vectors)).to(vectors.device)]

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.weight.shape))


def range_count(length: int | None) -> int:
    """The number of ranges of positions up to a length in tokens."""
    return 1 if length is None else 1 + (length - 1).bit_length()


def range_of(positions: Tensor, count: int) -> Tensor:
    """The index of the range of each position, of `count` ranges."""
    starts = 2 ** torch.arange(count - 1, device=positions.device)
    return (positions[..., None] >= starts).sum(-1)


def install(stack: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Give each module at these paths of a stack a MeanOffset as `posenc`, which is added to the module's output."""
    for path, shape in shapes.items():
        module = stack.get_submodule(path)
        module.posenc = MeanOffset(*shape)
        module.register_forward_hook(add)


def add(module: Any, args: tuple, output: Any) -> Any:
    """Hook of a module with a MeanOffset. It is a plain function, so that a patched model can be copied and pickled."""
    return module.posenc(output) if isinstance(output, Tensor) else output
