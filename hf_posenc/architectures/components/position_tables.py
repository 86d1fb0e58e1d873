"""Learned position embeddings that a model adds to its inputs: BERT, RoBERTa, GPT-2."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.architectures.components.component import Disabled, PositionComponent, UnsupportedModelError, replace
from hf_posenc.configuration import LENGTH_FIELD
from hf_posenc.signatures import reads_tokens

NAMES = (
    *("position_embeddings", "position_embedding", "embed_positions", "positions_embed", "position_embeds_layer"),
    *("pos_sinusoidal_embed", "wpe"),
)
BESIDE = ("box_position_embeddings",)
IMAGES = "pixel_values"
"""The argument of stacks whose position embeddings belong to image patches and extra tokens."""


class PositionTable(PositionComponent):
    """An `nn.Embedding` with one of NAMES, which is called with position IDs.

    Its number of rows is the config's LENGTH_FIELD, or fixed if the config has no such field. RoBERTa's IDs start after its
    padding_idx, so 514 rows support 512 tokens.
    """

    encoding, verb, accepts_embeddings = "learned", "embed", True
    module: Any

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        from hf_posenc.architectures.components.distance_embeddings import is_relative
        from hf_posenc.architectures.components.unhandled import OTHER_INPUTS

        if not reads_tokens(stack):
            return  # position embeddings of patches or audio frames (position_parameters.py)
        for path, module in modules.items():
            if path.rpartition(".")[2] not in NAMES or OTHER_INPUTS.search(path) or is_relative(module):
                continue
            if any(kind.claims(module) for kind in PositionComponent.kinds):
                continue
            rows = getattr(stack.config, LENGTH_FIELD, None)
            if type(module) is not nn.Embedding or rows not in (None, module.num_embeddings):
                raise UnsupportedModelError(
                    f"hf-posenc can't tell how {type(stack).__name__}.{path} numbers positions: it is a "
                    f"{type(module).__name__} with {getattr(module, 'num_embeddings', '?')} rows, and {LENGTH_FIELD} is {rows}",
                    reason="unknown numbering of positions",
                )
            yield cls(path, module)

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        replace(stack, self.path, DisabledTable(stack, self.path, self.module, self.offset if adds_vectors else None))

    @property
    def offset(self) -> int:
        return 0 if self.module.padding_idx is None else self.module.padding_idx + 1

    @property
    def width(self) -> int:
        return self.module.embedding_dim

    def usable_length(self, config: Any) -> int | None:
        return getattr(config, LENGTH_FIELD, len(self.module.weight)) - self.offset

    def saved_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        return {f"{self.path}.weight": (len(self.module.weight) if rows is None else rows, self.width)}

    @property
    def learned_table(self) -> tuple[str, int] | None:
        return f"{self.path}.weight", self.offset

    def table(self) -> Tensor | None:
        return self.module.weight[self.offset :]


class SecondStreamTable(PositionTable):
    """Embeddings of the same positions for a second stream of hidden states, such as LiLT's boxes. They are only disabled."""

    accepts_embeddings = False

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        for path, module in modules.items():
            if path.rpartition(".")[2] in BESIDE and isinstance(module, nn.Embedding):
                yield cls(path, module)

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        super().disable(stack, adds_vectors=False)

    @property
    def width(self) -> None:  # type: ignore[override]
        return None

    def saved_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        return {f"{self.path}.weight": (rows or 0, self.module.embedding_dim)}

    def table(self) -> None:  # type: ignore[override]
        return None


class DisabledTable(Disabled):
    """Maps the original model's position IDs to the vectors of the encoding, or to zeros if they are added elsewhere.

    offset: ID of the first token. None if no vectors are added here.
    """

    def __init__(self, stack: Any, path: str, table: Any, offset: int | None) -> None:
        super().__init__(stack, path, table)
        self.offset = offset

    @property
    def num_embeddings(self) -> int:
        """The number of original position embeddings, which Whisper reads to number its frames."""
        return self.shape[0]

    @property
    def weight(self) -> Tensor:
        """In the stack's forward, the vectors that a model adds without a call (Qwen2-Audio). Otherwise as in `Disabled`."""
        context = self.context
        if context is None:
            return super().weight
        # At least the number of tokens, because CLIP compares both.
        rows = max(self.shape[0], int(context.past) + context.length + (self.offset or 0))
        return self.vectors(torch.arange(rows, device=context.positions.device) - (self.offset or 0))

    def forward(self, position_ids: Tensor) -> Tensor:
        (stack,), context = self._stack, self.context  # whose positions leave out padding on the left
        names = stack.posenc_state.inputs.names
        if context is not None and "position_ids" not in names and _as_many(context.positions, position_ids):
            return self.vectors(context.positions)
        if position_ids.ndim == 2 and position_ids.stride(0) == 0:  # equal positions in all rows are computed once
            position_ids = position_ids[:1]
        return self.vectors(position_ids - (self.offset or 0))

    def vectors(self, positions: Tensor) -> Tensor:
        """`[..., L] -> [..., L, D]`, in the dtype of the stack's inputs."""
        (stack,) = self._stack
        encoding, dtype = stack.posenc if self.context is None else self.context.encoding, _dtype(stack)
        vectors = None
        if self.offset is not None and "embed" in encoding.mechanisms():
            # Padding has the ID before the first token's (Longformer pads to whole windows).
            vectors = encoding("embed", positions.clamp(min=0))
        if vectors is None:
            # Not expanded, because Kosmos-2.5 adds to it in place.
            vectors = torch.zeros(*positions.shape, self.width, dtype=dtype, device=positions.device)
        return vectors.to(positions.device, dtype)

    @property
    def width(self) -> int:
        """The size of the original vectors."""
        return self.shape[1]


def _as_many(positions: Tensor, position_ids: Tensor) -> bool:
    return positions.shape[-1] == position_ids.shape[-1]


def _dtype(stack: Any) -> torch.dtype:
    try:
        return stack.get_input_embeddings().weight.dtype
    except (NotImplementedError, AttributeError):  # a stack that reads features
        return stack.dtype
