"""Self-attention with relative position representations: https://arxiv.org/abs/1803.02155"""

from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import PositionContext
from hf_posenc.encodings.options import Above

FAR = 4096
"""Above this max_distance, rows are selected by distance before the product: multiplying all rows would cost a short input
as much as a long one."""


class Shaw(
    PositionEncoding,
    type="shaw",
    aliases={"relative_key": {"terms": "keys"}, "relative_key_query": {"terms": "keys+queries"}},
):
    """scores[h, i, j] = q_i · (k_j + a_ij) · scaling, a_ij = weight[clip(j - i, -max_distance, max_distance)]
    (Shaw et al., 2018, equations 3 and 4). Each layer has its own vectors, shared by its heads.

    With terms="keys+queries", k_j · a_ij · scaling is added, too (https://arxiv.org/abs/2009.13658, method 4; BERT's
    relative_key_query in Transformers v4). Distances are clipped, so any length works.

    Options:
        max_distance: distances beyond it are clipped to it.
        terms: "keys" (a_ij is added to the keys) or "keys+queries".
    """

    title = "Self-attention with relative position representations"
    paper = ("https://arxiv.org/abs/1803.02155",)
    translation_invariant = True

    max_distance: Annotated[int, Above(0)] = 128
    terms: Literal["keys", "keys+queries"] = "keys"
    per_layer = True

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        self.weight = nn.Parameter(torch.empty(2 * self.max_distance + 1, geometry.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def score_bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor:
        if context.first_keys:  # layers may hold different keys
            index = self._index(key.shape[2], context)
        else:
            index = context.cached((self.type, self.max_distance, "index"), lambda: self._index(key.shape[2], context))
        bias = self._products(query, index)
        if self.terms == "keys+queries":
            bias = bias + self._products(key, index.transpose(1, 2)).transpose(2, 3)
        return bias * context.scaling

    def distance_vectors(self, distance: Tensor) -> tuple[Tensor | None, Tensor | None]:
        vectors = self.weight[self.rows(distance)][None]
        return vectors, vectors if self.terms == "keys+queries" else None

    def _index(self, keys: int, context: PositionContext) -> Tensor:
        """The row of `weight` for each query and key, `[1 or B, Q, K]`."""
        return self.rows(context.distances(keys))

    def rows(self, distance: Tensor) -> Tensor:
        return distance.clamp(-self.max_distance, self.max_distance) + self.max_distance

    def _products(self, states: Tensor, index: Tensor) -> Tensor:
        """Products of states `[B, H, L, E]` and the rows of `weight` given by `index` `[1 or B, L, M]`: `[B, H, L, M]`."""
        weight, pairs = self.weight.to(states.dtype), index[:, None].expand(*states.shape[:3], -1)
        if self.max_distance <= FAR:
            # One product per row of weight, then a gather by distance: no [L, M, E] tensor.
            return (states @ weight.T).gather(-1, pairs)
        return torch.einsum("bhle,blme->bhlm", states, weight[index].expand(len(states), -1, -1, -1))
