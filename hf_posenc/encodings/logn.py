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

    The more keys a softmax is over, the flatter it gets; scores that grow with log n keep its entropy about the same (Su,
    2021; Chiang and Cholak, 2022; Nakanishi, 2025). Up to T nothing changes. Made to be composed ("relative+logn",
    "rope+logn"): a bias that another part adds isn't scaled. By itself it tells no order.

    n_i is the number of tokens in the text of query i: its last position + 1, so that padding counts for nothing. In a causal
    stack n_i is the query's own position + 1, the number of tokens that it sees. Position ids given by hand count as they
    are, and a 4-D mask doesn't tell padding.

    Options:
        trained_length: T; None takes the longest input that the host's own positions were made for.
        scale: "fixed" (s_h = 1) or "learned", one factor per head, which starts at 1.
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
                f"logn.trained_length={self.trained_length}: this host's own positions tell no length above 1 that they were "
                "made for, so give one: trained_length=512, or logn__trained_length=512 in a composition"
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
        """T, or 0 where nothing tells it."""
        return self.trained_length or self.geometry.trained_length or 0
