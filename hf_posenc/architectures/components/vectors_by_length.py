"""Modules that return the vectors of a given number of positions, which the stack adds to its inputs: TimesFM.

Shapes: L tokens, D hidden_size.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.architectures.components.component import PositionComponent
from hf_posenc.encodings.context import context_for
from hf_posenc.signatures import argument_names

NAMES = ("position_emb",)
LENGTH = "seq_length"
"""The first argument of such a module, an integer."""


class SinusoidsByLength(PositionComponent):
    """A module without parameters that returns `[1, L, D]` for L.

    If the stack shifts its output because of left padding, it also shifts the encoding's vectors.
    """

    encoding, verb, accepts_embeddings = "sinusoidal", "embed", True

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        yield from (cls(path, each) for path, each in modules.items() if path.rpartition(".")[2] in NAMES and cls.claims(each))

    @classmethod
    def claims(cls, module: nn.Module) -> bool:
        return argument_names(module)[:1] == [LENGTH] and not list(module.parameters())

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        self.module.register_forward_hook(partial(vectors_instead, adds_vectors))


def vectors_instead(adds_vectors: bool, module: nn.Module, args: tuple, answer: Tensor) -> Tensor:
    """Hook of such a module. Returns the vectors of the encoding, or zeros if they are added elsewhere."""
    encoding, vectors = context_for(module, None).encoding, None
    if adds_vectors and "embed" in encoding.mechanisms():
        vectors = encoding("embed", torch.arange(answer.shape[1], device=answer.device)[None])
    return torch.zeros_like(answer) if vectors is None else vectors.to(answer)
