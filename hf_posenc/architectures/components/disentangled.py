"""The disentangled attention terms of DeBERTa and SEW-D: content-to-position and position-to-content, added to the scores."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from hf_posenc.architectures.components.component import Disabled, PositionComponent, replace

OWNERS = ("DebertaEncoder", "DebertaV2Encoder", "SEWDTransformerEncoder")
"""Classes of the encoders that contain the relative position embeddings and their LayerNorm."""
ATTENTIONS = ("DisentangledSelfAttention",)
FOLDERS = ("transformers.models.deberta", "transformers.models.sew_d")
OF_OWNERS, OF_ATTENTIONS = (
    ("rel_embeddings", "LayerNorm"),
    ("pos_dropout", "pos_proj", "pos_q_proj", "pos_key_proj", "pos_query_proj"),
)
"""The submodules of encoders and of attentions that are used only for these terms."""
TERMS = {
    **dict.fromkeys(OWNERS, ("get_rel_embedding", "get_rel_pos")),
    **dict.fromkeys(ATTENTIONS, ("disentangled_att_bias", "disentangled_attention_bias")),
}
"""The methods of each class that compute the terms. A class may have only one of them."""


class DisentangledTerm(PositionComponent):
    """A module that is used only for these terms: the embeddings, their norm, or an attention's projection of them."""

    encoding, verb = "deberta", "score_bias"

    def __init__(self, path: str, module: nn.Module, stack: Any) -> None:
        super().__init__(path, module)
        config = stack.config
        buckets, distances = getattr(config, "position_buckets", -1), getattr(config, "max_relative_positions", -1)
        self.as_long_as_inputs = isinstance(module, nn.Embedding) and max(buckets, distances) < 1

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        for path, module in modules.items():
            name = type(module).__name__
            if not type(module).__module__.startswith(FOLDERS):
                continue
            parts = OF_OWNERS if name in OWNERS else OF_ATTENTIONS if name in ATTENTIONS else ()
            if getattr(module, "relative_attention", False):
                yield from (cls(f"{path}.{part}", child, stack) for part, child in module.named_children() if part in parts)

    @classmethod
    def at(cls, path: str, stack: Any, modules: Mapping[str, nn.Module]) -> PositionComponent:
        TERMS[type(modules[path.rpartition(".")[0]]).__name__]
        return cls(path, modules[path], stack)

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        replace(stack, self.path, DisabledPart(stack, self.path, self.module))
        owner = stack.get_submodule(self.path.rpartition(".")[0])
        for method in TERMS[type(owner).__name__]:
            if hasattr(owner, method):
                setattr(owner, method, nothing)

    def saved_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        shapes = {f"{self.path}.{name}": tuple(parameter.shape) for name, parameter in self.module.named_parameters()}
        if self.as_long_as_inputs:
            shapes[f"{self.path}.weight"] = (2 * (rows or 0), self.module.embedding_dim)  # type: ignore[assignment, operator]
        return shapes


class DisabledPart(Disabled):
    """Returns its input, which is None, because the methods that compute it are replaced."""

    def forward(self, nothing: None) -> None:
        return nothing


def nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a method that computes a term."""
    return None
