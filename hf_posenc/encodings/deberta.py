"""Disentangled attention: https://arxiv.org/abs/2006.03654, https://arxiv.org/abs/2111.09543"""

import functools
import math
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import PositionContext
from hf_posenc.encodings.options import GreaterThan


class DeBERTa(PositionEncoding, type="deberta"):
    """scores[h, i, j] = (q_i · k_j + q_i · kr[h, δ(i, j)] + k_j · qr[h, δ(j, i)]) · scaling (He et al., 2021, equation 4), with
    δ(i, j) = clip(i - j, -s, s - 1) + s for a span of s distances on either side.

    In the paper, kr = P W_k,r and qr = P W_q,r, with one table P for all layers and two matrices for each layer. Here each
    layer has the products themselves, `relative_keys` and `relative_queries`, `[H, 2s, E]`. The authors' code uses qr[δ(i, j)],
    the same rows in reverse. The paper divides all three terms by √(3E). Here the model's scaling applies, mostly 1/√E, so
    that the q · k of a trained model don't change. A model trained from scratch starts with scores √3 times as large as the
    paper's. Distances are clipped, so there is no length limit.

    Options:
        terms: "c2p" (content to position, q · kr), "p2c" (position to content, k · qr), or both.
        max_distance: s, if there are no buckets. With buckets, all distances from this one on share the last bucket.
        buckets: s of DeBERTa-v2 and v3 (position_buckets, https://arxiv.org/abs/2111.09543), or 0 for none. Distances up to
            buckets/2 have separate vectors, and greater ones share vectors on a logarithmic scale. Even, below max_distance.
    """

    title = "Disentangled attention"
    paper = ("https://arxiv.org/abs/2006.03654", "https://arxiv.org/abs/2111.09543")
    translation_invariant = True

    terms: Literal["c2p", "p2c", "c2p+p2c"] = "c2p+p2c"
    max_distance: Annotated[int, GreaterThan(0)] = 512
    buckets: Annotated[int, GreaterThan(-1)] = 0
    per_layer = True

    if TYPE_CHECKING:
        relative_keys: nn.Parameter | None
        relative_queries: nn.Parameter | None

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        if self.buckets and (self.buckets % 2 or not 2 < self.buckets < self.max_distance):
            raise ValueError(
                f"deberta.buckets={self.buckets}, deberta.max_distance={self.max_distance} isn't valid. buckets must be 0, or "
                "even, at least 4, and below max_distance."
            )
        self.span = self.buckets or self.max_distance
        shape = geometry.num_attention_heads, 2 * self.span, geometry.head_dim
        self.relative_keys = nn.Parameter(torch.empty(shape)) if "c2p" in self.terms else None
        self.relative_queries = nn.Parameter(torch.empty(shape)) if "p2c" in self.terms else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for rows in self.parameters():
            nn.init.normal_(rows, std=0.02)

    def score_bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor:
        keys = key.shape[2]
        # Distances of contiguous tokens are below the number of keys, which a traced graph must not depend on. The number of a
        # bucket can exceed the distances in it.
        short = context.is_contiguous and not self.buckets and not torch.compiler.is_compiling()
        reach = min(self.span, keys) if short else self.span
        if context.first_keys:  # layers may hold different keys
            steps = self._bucket(context.distances(keys))
        else:
            options = self.buckets, self.max_distance
            steps = context.cached((self.type, *options), lambda: self._bucket(context.distances(keys)))
        terms = []
        if self.relative_keys is not None:
            terms.append(_products(query, self.relative_keys, -steps, reach))
        if self.relative_queries is not None and query.shape[2] == 1:
            terms.append(self._of_one_query(key, steps, context))
        elif self.relative_queries is not None:
            terms.append(_products(key, self.relative_queries, steps.transpose(1, 2), reach).transpose(2, 3))
        return functools.reduce(torch.add, terms) * context.scaling

    def _of_one_query(self, key: Tensor, steps: Tensor, context: PositionContext) -> Tensor:
        """The products of keys with the vectors of their distances to a single query, `[B, H, 1, K]`."""
        assert self.relative_queries is not None
        table, far = self.relative_queries.to(key.dtype), 0
        if context.is_contiguous and isinstance(context.past, int) and not torch.compiler.is_compiling():
            # The first keys share the vector of the greatest distance.
            far = min(max(context.past - context.first_key - self.max_distance + 1, 0), key.shape[2])
        vectors = table[:, _clipped(steps[:, 0, far:], self.span)].transpose(0, 1)  # [1 or B, H, K - far, E]
        near = (key[:, :, far:] * vectors).sum(-1)
        return torch.cat([table[:, :1] @ key[:, :, :far].transpose(2, 3), near[:, :, None]], dim=-1)

    def distance_vectors(self, distance: Tensor) -> tuple[Tensor | None, Tensor | None]:
        steps = self._bucket(distance)
        rows = ((self.relative_keys, -steps), (self.relative_queries, steps))
        return tuple(None if table is None else table[:, _clipped(each, self.span)] for table, each in rows)  # type: ignore[return-value]

    def rows(self, distance: Tensor) -> Tensor:
        return self._bucket(distance).clamp(-self.span, self.span) + self.span

    def _bucket(self, distance: Tensor) -> Tensor:
        """Signed distances. Those above half of the buckets are on a logarithmic scale."""
        if not self.buckets:
            return distance
        half, steps = self.buckets // 2, distance.abs()
        # float32, rounded up, gives the same buckets as in DeBERTa-v2.
        ratio = (steps.clamp(min=half).float() / half).log() / torch.tensor(
            math.log((self.max_distance - 1) / half), dtype=torch.float32, device=distance.device
        )
        far = (ratio * (half - 1)).ceil().long() + half
        return torch.where(steps <= half, distance, far * distance.sign())


def _clipped(steps: Tensor, span: int) -> Tensor:
    """The row of each distance in a table of 2 · span rows."""
    return steps.clamp(-span, span - 1) + span


def _products(states: Tensor, table: Tensor, steps: Tensor, reach: int) -> Tensor:
    """Products of states `[B, H, L, E]` and the rows of `table` given by `steps` `[1 or B, L, M]`: `[B, H, L, M]`.

    reach: the maximum distance. Only the rows up to it are multiplied.
    """
    span = table.shape[1] // 2
    products = states @ table[:, span - reach : span + reach].to(states.dtype).transpose(1, 2)
    return products.gather(-1, _clipped(steps, reach)[:, None].expand(*states.shape[:3], -1))
