"""Untied positional encoding: https://arxiv.org/abs/2006.15595"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import PositionContext


class TUPE(PositionEncoding, type="tupe"):
    """bias[h, i, j] = (p_i U_Q[h]) · (p_j U_K[h]) / √(2E), added to the scaled scores: positions interact only with positions,
    through position embeddings p `[max_length, D]` and separate projections U, shared by all layers (Ke et al., 2021, eq. 7).

    The paper also divides the products of token content by √(2E) instead of √E. Here the model's scaling doesn't change. The
    authors' code normalizes p (LayerNorm) before the projection. Here, as in the paper, it doesn't. p starts from N(0, 1) and U
    from N(0, 1/4D), so that the initial biases have a standard deviation of about 0.2. TUPE-R, the paper's variant with
    relative positions, is the composition "tupe+t5".

    Options:
        untie_cls: treats position 0 as [CLS], which has no meaningful position. All scores of its query get theta[0, h] instead
            of the products, and the scores of other queries with its key get theta[1, h] (section 3.2). In a composition, the
            paper also replaces the bias of the other part, and here it stays. For models whose texts start with [CLS]. The
            class token of an image has no position here, and a bias of 0 without this option.
    """

    title = "Untied positional encoding"
    paper = ("https://arxiv.org/abs/2006.15595",)
    reads_content = False

    untie_cls: bool = False

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        assert geometry.max_length is not None  # see `needs_max_length`
        rows, size, heads = geometry.max_length, geometry.hidden_size, geometry.num_attention_heads
        self.weight = nn.Parameter(torch.empty(rows, size))
        self.query_weight, self.key_weight = (nn.Parameter(torch.empty(heads * geometry.head_dim, size)) for _ in range(2))
        if self.untie_cls:
            self.theta = nn.Parameter(torch.empty(2, heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        for projection in (self.query_weight, self.key_weight):
            nn.init.normal_(projection, std=0.5 * self.geometry.hidden_size**-0.5)
        if self.untie_cls:
            nn.init.zeros_(self.theta)

    @classmethod
    def needs_max_length(cls, geometry: Geometry) -> bool:
        return True

    def score_bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor:
        return self._once_per_pass("bias", lambda: self._bias(key.shape[2], context), key.shape[2], context)

    def _queries(self, keys: int, context: PositionContext) -> tuple[Tensor, Tensor]:
        """The vectors of queries, `[1 or B, H, Q, E]`, and the rows of keys in the table, `[1 or B, K]`."""
        here, there = context.positions, context.key_positions(keys)
        self._check(here, there, context)
        # Scaled here, because the products would be more to scale. Keys beyond the table are padding, hidden by the mask.
        queries = self._projected(here, self.query_weight) * (2 * self.geometry.head_dim) ** -0.5
        return queries, there.clamp(0, len(self.weight) - 1)

    def _bias(self, keys: int, context: PositionContext) -> Tensor:
        """The bias, `[1 or B, H, Q, K]`."""
        queries, places = self._queries(keys, context)
        if queries.shape[2] == 1:
            # With a cache, all keys would be projected for one query. Multiplying the query by the projection is cheaper.
            queries = queries @ self.key_weight.unflatten(0, (-1, self.geometry.head_dim))  # [1 or B, H, 1, D]
            bias = (queries[:, :, 0] @ F.embedding(places, self.weight).transpose(1, 2))[:, :, None]
        else:
            bias = queries @ self._projected(places, self.key_weight).transpose(2, 3)
        if self.untie_cls:
            of_cls, to_cls = self.theta[:, :, None, None].to(bias.dtype)
            bias = torch.where(context.key_positions(keys)[:, None, None, :] == 0, to_cls, bias)
            bias = torch.where(context.positions[:, None, :, None] == 0, of_cls, bias)
        return bias

    def _projected(self, positions: Tensor, projection: Tensor) -> Tensor:
        """The vectors of positions, `[1 or B, L] -> [1 or B, H, L, E]`."""
        # A traced graph must support all lengths.
        if torch.compiler.is_compiling() or positions.numel() < len(self.weight):
            vectors = F.linear(F.embedding(positions, self.weight), projection)
        else:
            vectors = F.embedding(positions, F.linear(self.weight, projection))
        return vectors.unflatten(-1, (-1, self.geometry.head_dim)).transpose(1, 2)

    def _check(self, here: Tensor, there: Tensor, context: PositionContext) -> None:
        """Raises ValueError for positions of queries, or of keys, beyond the table."""
        rows, high = len(self.weight), 0
        # Reading values would synchronize a GPU and break a traced graph. Only shapes are checked there.
        if here.device.type == "cpu" and not torch.compiler.is_compiling():
            high = max((int(each.max()) for each in (here, there) if each.numel()), default=0)
        elif context.is_contiguous or context.length_positions is not None:
            high = there.shape[1] - 1
        if high >= rows:
            raise ValueError(
                f"Positions up to {high} don't fit the {rows} position embeddings of 'tupe'. Pass shorter inputs or smaller "
                "position_ids, or patch the original model with a larger max_length and train it."
            )
