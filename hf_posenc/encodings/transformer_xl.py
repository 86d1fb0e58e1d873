"""Transformer-XL's relative positions: https://arxiv.org/abs/1901.02860"""

from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import PositionContext
from hf_posenc.encodings.options import GreaterThan

STEP = 128
"""The number of keys whose distances to one query are computed from those to another query."""


class TransformerXL(PositionEncoding, type="transformer_xl"):
    """scores[h, i, j] = ((q_i + u_h) · k_j + (q_i + v_h) · W_h R_(i-j)) · scaling (Dai et al., 2019, section 3.3).

    R_p = [sin(p ω_0), sin(p ω_1), …, cos(p ω_0), cos(p ω_1), …] with ω_n = base^(-2n / D), D the hidden size, minus one if it
    is odd. Each layer has its own W (`weight`, `[H, E, D]`), u, and v (`content` and `position`, `[H, E]`). The paper's model
    is causal. In encoders, i - j is negative for keys after the query. There is no length limit.

    Options:
        base: the base of the frequencies.
    """

    title = "Transformer-XL's relative positions"
    paper = ("https://arxiv.org/abs/1901.02860",)
    translation_invariant = True

    base: Annotated[float, GreaterThan(1)] = 10000.0
    per_layer = True

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        heads, size = geometry.num_attention_heads, geometry.head_dim
        self.weight = nn.Parameter(torch.empty(heads, size, geometry.hidden_size // 2 * 2))
        self.content = nn.Parameter(torch.empty(heads, size))
        self.position = nn.Parameter(torch.empty(heads, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def score_bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor:
        content, position = (each.to(query.dtype) for each in self.query_offsets())
        query = (query + position[:, None]) * context.scaling
        if not context.is_contiguous:
            by_distance = self._by_position(
                query, "positions", lambda: (context.positions, context.key_positions(key.shape[2])), context
            )
        else:
            by_distance = (self._by_distance if query.shape[2] > 1 else self._of_one_query)(query, key.shape[2], context)
        return by_distance + (content[:, None] @ key.transpose(2, 3)) * context.scaling

    def distance_vectors(self, distance: Tensor) -> tuple[Tensor, None]:
        farthest = int(distance.abs().max())
        return self._vectors(distance, self._waves(torch.arange(farthest + 1, device=distance.device))), None

    def query_offsets(self) -> tuple[Tensor, Tensor]:
        return self.content.clone(), self.position.clone()  # FSDP frees the parameters after the call.

    def _vectors(self, distance: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
        """W R, `[N]` -> `[H, N, E]`, from the waves of distances 0, 1, …, up to the farthest."""
        heads, size, _ = self.weight.shape
        # Sines are odd and cosines even, so the products for negative distances are sums or differences, too.
        odd, even = (
            F.linear(each.to(half.dtype), half.flatten(0, 1))
            for each, half in zip(waves, self.weight.chunk(2, dim=-1), strict=True)
        )
        table = torch.cat([(even + odd).flip(0), (even - odd)[1:]])
        return F.embedding(distance + (len(even) - 1), table).unflatten(-1, (heads, size)).transpose(0, 1)

    def _by_distance(self, query: Tensor, keys: int, context: PositionContext) -> Tensor:
        """q · W R, `[B, H, Q, K]`, from one vector W R per distance of contiguous tokens."""
        queries = query.shape[2]
        # No distance is greater than K. There is one column more than there are keys, for the shape below.
        distance = torch.arange(1 - queries, keys + 1, device=query.device) + (context.first_key - context.past)
        waves = self._once("distances", lambda: self._waves(torch.arange(keys + 1, device=query.device)), context)
        # [B, H, Q, Q + K]: the keys of query i start at column Q - 1 - i
        products = query @ self._vectors(distance, waves).to(query.dtype).transpose(1, 2)
        width = queries + keys - 1
        rows = products.flatten(2)[..., queries - 1 : queries - 1 + queries * width].unflatten(2, (queries, width))
        return rows[..., :keys]

    def _of_one_query(self, query: Tensor, keys: int, context: PositionContext) -> Tensor:
        """q · W R, `[B, H, 1, K]`, for contiguous tokens.

        Key STEP · a + b is as far from the query as key b is from a query STEP · a positions earlier. Only the waves of those
        queries and of STEP keys are computed.
        """

        def compute() -> tuple[Tensor, Tensor]:
            earlier = STEP * torch.arange((keys + STEP - 1) // STEP, device=query.device)
            return (context.past - context.first_key - earlier)[None], torch.arange(STEP, device=query.device)[None]

        return self._by_position(query, "steps", compute, context).flatten(2)[:, :, None, :keys]

    def _by_position(
        self, query: Tensor, what: str, positions: Callable[[], tuple[Tensor, Tensor]], context: PositionContext
    ) -> Tensor:
        """q · W R for any positions of queries and keys: Wᵀq rotated by the query's angles, times waves of the key's angles."""

        def compute() -> tuple[Tensor, ...]:
            here, there = positions()
            sines, cosines = self._waves(here)
            return tuple(
                each.to(query.dtype) for each in (sines[:, None], cosines[:, None], torch.cat(self._waves(there), dim=-1))
            )

        sines, cosines, waves = self._once((what, query.dtype), compute, context)
        of_sines, of_cosines = (query @ self.weight.to(query.dtype)).chunk(2, dim=-1)
        turned = torch.cat([of_cosines * sines - of_sines * cosines, of_sines * sines + of_cosines * cosines], dim=-1)
        # One product for all heads, because they share the waves.
        return (turned.flatten(1, 2) @ waves.transpose(1, 2)).unflatten(1, turned.shape[1:3])

    def _once(self, what: Any, compute: Callable[[], Any], context: PositionContext) -> Any:
        """The result of `compute`, evaluated once for all layers unless they may hold different keys."""
        return compute() if context.first_keys else context.cached((self.type, self.base, what), compute)

    def _waves(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Sines and cosines of integers `[...]`, `[..., D / 2]` each, in float64."""
        size = self.geometry.hidden_size // 2 * 2
        exponents = torch.arange(0, size, 2, dtype=torch.float64, device=positions.device) / size
        angles = positions.double()[..., None] / self.base**exponents
        return angles.sin(), angles.cos()
