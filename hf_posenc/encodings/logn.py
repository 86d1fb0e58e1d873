"""Scores scaled by log n: https://kexue.fm/archives/8823, https://arxiv.org/abs/2202.12172, https://arxiv.org/abs/2501.19399"""

import math
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import PositionContext
from hf_posenc.encodings.options import GreaterThan


class LogN(PositionEncoding, type="logn"):
    """q_i · (1 + s_h · max(0, log n_i / log T - 1)) for queries, T the trained length: with s_h = 1, max(1, log n / log T).

    A softmax over more keys is flatter. Scores that grow with log n keep its entropy approximately constant (Su, 2021; Chiang
    and Cholak, 2022; Nakanishi, 2025). Up to T, nothing changes. Use it in compositions ("relative+logn", "rope+logn"): the
    bias of another part isn't scaled. It doesn't encode word order.

    n_i is the number of tokens in the text of query i: its last position + 1, without padding. In a decoder, n_i is the query's
    own position + 1, the number of tokens that it sees. Explicit `position_ids` are used unchanged, and a 4-D mask doesn't
    indicate padding.

    Options:
        trained_length: T. None uses the maximum length of the model's original positions.
        scale: "fixed" (s_h = 1) or "learned", one factor per head, initially 1.
    """

    title = "Scores scaled by log n"
    paper = ("https://kexue.fm/archives/8823", "https://arxiv.org/abs/2202.12172", "https://arxiv.org/abs/2501.19399")
    rotates_keys = False

    trained_length: Annotated[int, GreaterThan(1)] | None = None
    scale: Literal["fixed", "learned"] = "fixed"

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        if self._length < 2:
            raise ValueError(
                f"logn.trained_length={self.trained_length}: this model doesn't record the maximum length of its original "
                "positions. Set it explicitly, for example trained_length=512, or logn__trained_length=512 in a composition."
            )
        if self.scale == "learned":
            self.factor = nn.Parameter(torch.empty(geometry.num_attention_heads))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.scale == "learned":
            nn.init.ones_(self.factor)

    @classmethod
    def with_explicit_defaults(cls, geometry: Geometry, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "trained_length": options["trained_length"] or geometry.trained_length}

    def rotate(self, query: Tensor | None, key: Tensor | None, context: PositionContext) -> tuple[Tensor | None, Tensor | None]:
        if query is None:
            return None, key
        growth = context.cached((self, "growth"), lambda: self._growth(context))
        if self.scale == "learned":
            growth = growth * self.factor[:, None, None]
        return query * (1 + growth).to(query.dtype), key

    def _growth(self, context: PositionContext) -> Tensor:
        """max(0, log n / log T - 1), `[1 or B, 1, L or 1, 1]`, float64."""
        lengths = (context.positions + 1 if self.geometry.is_causal else context.lengths).double()[:, None, :, None]
        return (lengths.log() / math.log(self._length) - 1).clamp(min=0)

    @property
    def _length(self) -> int:
        """T, or 0 if it is unknown."""
        return self.trained_length or self.geometry.trained_length or 0
