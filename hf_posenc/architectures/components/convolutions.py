"""Convolutions over hidden states, whose answer the host adds to them as positions: wav2vec 2.0, HuBERT, WavLM, SEW.

Shapes: B batch, L tokens, D hidden_size.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.architectures.components.component import Disabled, PositionComponent, UnsupportedModelError, replace
from hf_posenc.encodings.context import context_for
from hf_posenc.signatures import attributes_read

CLASS = re.compile(r"positional_?conv", re.IGNORECASE)


class PositionalConvolution(PositionComponent):
    """A module that convolves the hidden states, `[B, L, D]` or `[B, D, L]`, into vectors to add to them.

    One with a stride answers fewer of them, for hosts that pool their hidden states as well (SEW).
    """

    encoding, verb, accepts_embeddings = "convolution", "embed", True

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__(path, module)
        self.layers = [layer for layer in module.modules() if isinstance(layer, nn.Conv1d)]
        self.sizes = [(layer.kernel_size[0], layer.stride[0], int(layer.padding[0])) for layer in self.layers]

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        found: list[str] = []
        convolutions = {path: module for path, module in modules.items() if is_convolution(module)}
        read = attributes_read(modules.values()) if convolutions else set()
        for path, module in convolutions.items():
            if not path.startswith(tuple(f"{outer}." for outer in found)):
                component = cls(path, module)
                if not component.layers or component.token_axis is None:
                    raise UnsupportedModelError(
                        f"hf-posenc can't replace {type(stack).__name__}.{path}: this {type(module).__name__} doesn't map "
                        "hidden states to vectors that can be added to them",
                        reason="convolutional positions in a format of their own",
                    )
                found.append(path)
                if path.rpartition(".")[2] in read:  # wav2vec2-conformer makes one and never calls it
                    yield component

    @property
    def token_axis(self) -> int | None:
        """The axis of tokens in what the module is given and answers; None where it is neither of the two."""
        length = next(length for length in (5, 7) if length != self.width)
        like = next(self.module.parameters())
        expected = answered(self.sizes, length)
        for axis, shape in ((1, (length, self.width)), (2, (self.width, length))):
            try:
                with torch.no_grad():
                    answer = self.module(torch.zeros(1, *shape, dtype=like.dtype, device=like.device))
            except RuntimeError:
                continue
            if answer.shape[axis] == expected and answer.shape[3 - axis] == self.width:
                return axis
        return None

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        replace(stack, self.path, DisabledConvolution(stack, self, adds_vectors))

    @property
    def width(self) -> int:
        return self.layers[0].in_channels

    def saved_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        return {f"{self.path}.{name}": tuple(value.shape) for name, value in self.module.named_parameters()}


def is_convolution(module: nn.Module) -> bool:
    """Whether a module is one of positions."""
    return CLASS.search(type(module).__name__) is not None


class DisabledConvolution(Disabled):
    """Answers hidden states with the vectors of the encoding, or with zeros where those are added elsewhere."""

    def __init__(self, stack: Any, component: PositionalConvolution, adds_vectors: bool) -> None:
        super().__init__(stack, component.path, component.layers[0])
        axis = component.token_axis
        assert axis is not None, f"{component.path} was found without an axis of tokens"
        self.adds_vectors, self.token_axis, self.width, self.sizes = adds_vectors, axis, component.width, component.sizes

    def forward(self, hidden_states: Tensor) -> Tensor:
        (stack,) = self._stack
        length = answered(self.sizes, hidden_states.shape[self.token_axis])
        vectors = None
        if self.adds_vectors and "embed" in stack.posenc.mechanisms():
            vectors = stack.posenc("embed", context_for(self).with_length(length, hidden_states.device).positions)
        if vectors is None:
            vectors = hidden_states.new_zeros(()).expand(1, length, self.width)
        vectors = vectors if self.token_axis == 1 else vectors.transpose(1, 2)
        return vectors.to(hidden_states.dtype)


def answered(sizes: Sequence[tuple[int, int, int]], length: int) -> int:
    """The number of vectors that convolutions of these kernel sizes, strides and paddings answer in turn.

    An even kernel answers one too many, which these modules cut off.
    """
    for kernel_size, stride, padding in sizes:
        length = (length + 2 * padding - kernel_size) // stride + kernel_size % 2
    return length
