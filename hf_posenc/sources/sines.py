"""Tables of sines and cosines by which attentions rotate their queries and keys themselves: GPT-J, CodeGen,
RoFormer; or of angles: CLVP.

In each row the sines come first, then the cosines, so that row 0 is the rotation by nothing.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.calls import argument_names
from hf_posenc.sources.rotary import without_positions
from hf_posenc.sources.source import Silenced, Source, replace
from hf_posenc.spec import LENGTH_FIELD

BUFFERS = ("GPTJAttention", "CodeGenAttention")
"""Classes of attentions with such a table as their buffer `embed_positions`."""
ANGLES = ("ClvpRotaryPositionalEmbedding",)
"""Classes of modules which answer angles."""
MODULES = ("RoFormerSinusoidalPositionalEmbedding",)
"""Classes of such tables which a stack has once for all attentions."""


class Sines(Source):
    """A table that an attention has as a buffer: it gets zeros for position ids."""

    encoding, verb = "rope", "rotate"

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[Source]:
        for path, module in modules.items():
            if type(module).__name__ in BUFFERS and type(module).__module__.startswith("transformers.models."):
                yield cls(f"{path}.embed_positions", module)

    def silence(self, stack: Any, adds_vectors: bool) -> None:
        self.module.register_forward_pre_hook(partial(without_positions, argument_names(self.module)), with_kwargs=True)

    def usable_length(self, config: Any) -> int | None:
        return getattr(config, LENGTH_FIELD, None)


class SharedSines(Source):
    """A table that a stack has once, as parameters which are never trained."""

    encoding, verb = "rope", "rotate"
    module: nn.Embedding

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[Source]:
        yield from (cls(path, module) for path, module in modules.items() if cls.claims(module))

    @classmethod
    def claims(cls, module: nn.Module) -> bool:
        return type(module).__name__ in MODULES and type(module).__module__.startswith("transformers.models.")

    def usable_length(self, config: Any) -> int | None:
        return getattr(config, LENGTH_FIELD, None)

    def silence(self, stack: Any, adds_vectors: bool) -> None:
        replace(stack, self.path, SilencedSines(stack, self.path, self.module))

    def kept_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        return {f"{self.path}.weight": (rows or 0, self.module.embedding_dim)}


class Angles(Source):
    """A module that answers the angles of all positions: they become 0."""

    encoding, verb = "rope", "rotate"

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[Source]:
        yield from (cls(path, module) for path, module in modules.items() if cls.claims(module))

    @classmethod
    def claims(cls, module: nn.Module) -> bool:
        return type(module).__name__ in ANGLES and type(module).__module__.startswith("transformers.models.")

    def silence(self, stack: Any, adds_vectors: bool) -> None:
        self.module.register_forward_hook(without_angles)

    def usable_length(self, config: Any) -> int | None:
        return getattr(config, LENGTH_FIELD, None)


def without_angles(module: nn.Module, args: tuple, answer: Tensor) -> Tensor:
    """Hook of a module that answers angles: all are 0."""
    return torch.zeros_like(answer)


class SilencedSines(Silenced):
    """Answers sines of 0 and cosines of 1."""

    def forward(self, input_ids_shape: Any, past_key_values_length: int = 0, position_ids: Tensor | None = None) -> Tensor:
        (stack,) = self._stack
        like, width = stack.get_input_embeddings().weight, self.shape[1]
        row = torch.cat([like.new_zeros((width + 1) // 2), like.new_ones(width // 2)])
        return row.expand(input_ids_shape[1], width)
