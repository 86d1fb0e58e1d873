"""Self-attention with relative position representations: https://arxiv.org/abs/1803.02155"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import PositionContext
from hf_posenc.encodings.options import GreaterThan

FAR = 4096
"""Above this max_distance, rows are selected by distance before the product. Multiplying all rows would make short inputs as
slow as long inputs."""


class Shaw(
    PositionEncoding,
    type="shaw",
    aliases={"relative_key": {"terms": "keys"}, "relative_key_query": {"terms": "keys+queries"}},
):
    """scores[h, i, j] = q_i · (k_j + a_ij) · scaling, a_ij = weight[clip(j - i, -max_distance, max_distance)]
    (Shaw et al., 2018, equation 4). Each layer has its own vectors, shared by its heads.

    The term "queries" also adds k_j · a_ij · scaling (https://arxiv.org/abs/2009.13658, method 4; BERT's relative_key_query in
    Transformers v4). With "values", the attention output is z_i = sum_j alpha_ij (v_j + b_ij), with the weights alpha and
    b_ij = value_weight[clip(j - i, …)] (equation 3). Every attention implementation then computes all weights. Distances are
    clipped, so there is no length limit.

    Options:
        max_distance: larger distances are clipped to it.
        terms: where vectors are added: "keys", "keys+queries", "keys+values" (the paper's), or "keys+queries+values".

    Shapes: weight [2 · max_distance + 1, E], E head_dim; value_weight the same, E the size of a head's values.
    """

    title = "Self-attention with relative position representations"
    paper = ("https://arxiv.org/abs/1803.02155",)
    translation_invariant = True

    max_distance: Annotated[int, GreaterThan(0)] = 128
    terms: Literal["keys", "keys+queries", "keys+values", "keys+queries+values"] = "keys"
    per_layer = True

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        rows = 2 * self.max_distance + 1
        self.weight = nn.Parameter(torch.empty(rows, geometry.head_dim))
        if "values" in self.terms:
            self.value_weight = nn.Parameter(torch.empty(rows, geometry.value_head_dim or geometry.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in self.parameters():
            nn.init.normal_(table, std=0.02)

    @classmethod
    def mechanisms(cls, options: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        verbs = super().mechanisms(options)
        return verbs if options is None or "values" in options["terms"] else tuple(v for v in verbs if v != "value_bias")

    def score_bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor:
        index = self._shared_index(key.shape[2], context)
        bias = self._products(query, index)
        if "queries" in self.terms:
            bias = bias + self._products(key, index.transpose(1, 2)).transpose(2, 3)
        return bias * context.scaling

    def distance_vectors(self, distance: Tensor) -> tuple[Tensor | None, Tensor | None]:
        vectors = self.weight[self.rows(distance)][None]
        return vectors, vectors if "queries" in self.terms else None

    def value_bias(self, weights: Tensor, context: PositionContext) -> Tensor | None:
        if "values" not in self.terms:
            return None
        queries, keys = weights.shape[2:]
        table: Tensor = self.value_weight
        if context.is_contiguous and queries + keys < len(table):  # there are fewer distances than rows
            places = torch.arange(queries + keys - 1, device=weights.device)
            table = table[self.rows(places + (context.first_key - context.past - queries + 1))]
            index = (places[:keys] - places[:queries, None] + (queries - 1))[None]
        else:
            index = self._shared_index(keys, context)
        # Weights are summed by row before the product, to avoid a [Q, K, E] tensor. In half precision, a sum of thousands of
        # small weights would stop growing.
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        pairs = index[:, None].expand(weights.shape)
        summed = weights.new_zeros(*weights.shape[:3], len(table)).scatter_add(-1, pairs, weights)
        return summed @ table.to(summed.dtype)

    def _shared_index(self, keys: int, context: PositionContext) -> Tensor:
        """The row of the table for each query and key, `[1 or B, Q, K]`, computed once for all layers."""
        if context.first_keys:  # layers may hold different keys
            return self._index(keys, context)
        return context.cached((self.type, self.max_distance, "index"), lambda: self._index(keys, context))

    def _index(self, keys: int, context: PositionContext) -> Tensor:
        return self.rows(context.distances(keys))

    def rows(self, distance: Tensor) -> Tensor:
        return distance.clamp(-self.max_distance, self.max_distance) + self.max_distance

    def _products(self, states: Tensor, index: Tensor) -> Tensor:
        """Products of states `[B, H, L, E]` and the rows of `weight` given by `index` `[1 or B, L, M]`: `[B, H, L, M]`."""
        weight, pairs = self.weight.to(states.dtype), index[:, None].expand(*states.shape[:3], -1)
        if self.max_distance <= FAR:
            # One product per row of weight, then a gather by distance, to avoid an [L, M, E] tensor.
            return (states @ weight.T).gather(-1, pairs)
        return torch.einsum("bhle,blme->bhlm", states, weight[index].expand(len(states), -1, -1, -1))
