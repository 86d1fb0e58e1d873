"""Convolutions whose outputs are added to the hidden states as positions: wav2vec 2.0, HuBERT, WavLM, SEW, OmniASR.

Shapes: B batch, L tokens, D hidden_size.
"""

import copy
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
    """A module that maps hidden states, `[B, L, D]` or `[B, D, L]`, to vectors that are added to them.

    Some modules return the sum (OmniASR).
    A strided convolution returns fewer vectors, in models that also pool their hidden states (SEW).
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
                        f"{type(stack).__name__}.{path} is a {type(module).__name__}, which doesn't map hidden states to "
                        "vectors that are added to them",
                        reason="unknown format of convolutional positions",
                    )
                found.append(path)
                if path.rpartition(".")[2] in read:  # wav2vec2-conformer has one that it never calls
                    yield component

    @property
    def token_axis(self) -> int | None:
        """The token axis of the module's inputs and outputs, 1 or 2, determined by calling it. None if neither works."""
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

    @property
    def returns_sum(self) -> bool:
        """Whether the module returns its inputs plus the vectors, determined by a copy whose convolutions return zeros."""
        module = copy.deepcopy(self.module).to(torch.float32).to_empty(device="cpu")
        for layer in module.modules():
            if isinstance(layer, nn.Conv1d):
                layer.register_forward_hook(lambda module, args, answer: torch.zeros_like(answer))
        given = torch.linspace(-1, 1, 7 * self.width, dtype=torch.float32, device="cpu").view(1, 7, self.width)
        given = given if self.token_axis == 1 else given.transpose(1, 2)
        with torch.no_grad():
            return torch.equal(module(given), given)

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        replace(stack, self.path, DisabledConvolution(stack, self, adds_vectors))

    @property
    def width(self) -> int:
        return self.layers[0].in_channels

    def saved_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        return {f"{self.path}.{name}": tuple(value.shape) for name, value in self.module.named_parameters()}


def is_convolution(module: nn.Module) -> bool:
    """Whether a module is a positional convolution, by its class name."""
    return CLASS.search(type(module).__name__) is not None


class DisabledConvolution(Disabled):
    """Returns the vectors of the encoding, or zeros if they are added elsewhere.

    The vectors are added to the inputs if the original module does that.
    """

    def __init__(self, stack: Any, component: PositionalConvolution, adds_vectors: bool) -> None:
        super().__init__(stack, component.path, component.layers[0])
        axis = component.token_axis
        assert axis is not None, f"{component.path} was found without an axis of tokens"
        self.returns_sum = component.returns_sum
        self.adds_vectors, self.token_axis, self.width, self.sizes = adds_vectors, axis, component.width, component.sizes

    def forward(self, hidden_states: Tensor) -> Tensor:
        length = answered(self.sizes, hidden_states.shape[self.token_axis])
        vectors = None
        if self.adds_vectors and "embed" in (context := context_for(self)).encoding.mechanisms():
            vectors = context.encoding("embed", context.with_length(length, hidden_states.device).positions)
        if vectors is None:
            vectors = hidden_states.new_zeros(()).expand(1, length, self.width)
        vectors = vectors if self.token_axis == 1 else vectors.transpose(1, 2)
        vectors = vectors.to(hidden_states)
        return hidden_states + vectors if self.returns_sum else vectors


def answered(sizes: Sequence[tuple[int, int, int]], length: int) -> int:
    """The output length of consecutive convolutions.

    sizes: (kernel size, stride, padding) of each. With an even kernel, the modules remove the last output.
    """
    for kernel_size, stride, padding in sizes:
        length = (length + 2 * padding - kernel_size) // stride + kernel_size % 2
    return length
