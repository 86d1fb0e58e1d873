"""Precomputed sines and cosines (GPT-J, CodeGen, RoFormer) or angles (CLVP) by which attentions rotate queries and keys,
and rotations that attentions compute (V-JEPA 2).

In each row, the sines come first, then the cosines. Row 0 is the identity rotation.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.architectures.components.component import Disabled, PositionComponent, is_one_of, replace
from hf_posenc.architectures.components.rotary import without_positions
from hf_posenc.configuration import LENGTH_FIELD
from hf_posenc.signatures import argument_names


class KnownRotation(PositionComponent):
    """A rotation by a module that is identified by its class."""

    encoding, verb = "rope", "rotate"
    classes: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        yield from (cls(path, module) for path, module in modules.items() if cls.claims(module))

    @classmethod
    def claims(cls, module: nn.Module) -> bool:
        return is_one_of(cls.classes, module)

    def usable_length(self, config: Any) -> int | None:
        return getattr(config, LENGTH_FIELD, None)


class SinusoidBuffer(KnownRotation):
    """The buffer `embed_positions` of an attention, whose position IDs are set to 0."""

    classes = ("GPTJAttention", "CodeGenAttention")

    @classmethod
    def claims(cls, module: nn.Module) -> bool:
        # Since Transformers 5.24, the buffer belongs to a module of the stack, a RotaryEmbedding.
        return super().claims(module) and hasattr(module, "embed_positions")

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__(f"{path}.embed_positions", module)

    @classmethod
    def at(cls, path: str, stack: Any, modules: Mapping[str, nn.Module]) -> PositionComponent:
        owner = path.removesuffix(".embed_positions")
        return cls(owner, modules[owner])

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        self.module.register_forward_pre_hook(partial(without_positions, argument_names(self.module)), with_kwargs=True)


class SharedSinusoids(KnownRotation):
    """Sines and cosines that a stack has once, as parameters that are never trained."""

    classes = ("RoFormerSinusoidalPositionalEmbedding",)
    module: nn.Embedding

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        replace(stack, self.path, DisabledSines(stack, self.path, self.module))

    def saved_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        return {f"{self.path}.weight": (rows or 0, self.module.embedding_dim)}


class RotaryAngles(KnownRotation):
    """A module that returns the angles of all positions, which are set to 0."""

    classes = ("ClvpRotaryPositionalEmbedding",)

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        self.module.register_forward_hook(without_angles)


class PatchRotation(KnownRotation):
    """An attention that computes the frame, row, and column of each patch. They are set to 0, for which nothing is rotated."""

    classes = ("VJEPA2RopeAttention",)

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        self.module.get_position_ids = cells_at_zero  # type: ignore[assignment]

    def usable_length(self, config: Any) -> None:
        return None


def cells_at_zero(hidden: Tensor, masks: Tensor | None = None) -> tuple[Tensor, ...]:
    """The frame, row, and column of each patch `[B, L, D]`, all of them 0."""
    return tuple(torch.zeros(3, hidden.shape[1], dtype=torch.long, device=hidden.device))


def without_angles(module: nn.Module, args: tuple, answer: Tensor) -> Tensor:
    """Hook of a module that returns angles. Sets all of them to 0."""
    return torch.zeros_like(answer)


class DisabledSines(Disabled):
    """Returns sines of 0 and cosines of 1."""

    def forward(self, input_ids_shape: Any, past_key_values_length: int = 0, position_ids: Tensor | None = None) -> Tensor:
        (stack,) = self._stack
        like, width = stack.get_input_embeddings().weight, self.shape[1]
        row = torch.cat([like.new_zeros((width + 1) // 2), like.new_ones(width // 2)])
        return row.expand(input_ids_shape[1], width)
