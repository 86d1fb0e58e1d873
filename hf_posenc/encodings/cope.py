"""Contextual position encoding: https://arxiv.org/abs/2405.18719"""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import PositionContext
from hf_posenc.encodings.options import GreaterThan


class CoPE(PositionEncoding, type="cope"):
    """scores[h, i, j] = q_i · (k_j + e[p_ij]) · scaling, where p_ij = g_ij + g_i(j+1) + … + g_ii counts the tokens from j to i,
    weighted by their gates g_il = sigmoid(q_i · k_l · scaling) (Golovneva et al., 2024).

    Between integers, q_i · e[p] is interpolated. Each layer has its own vectors e (`weight`, `[max_position, E]`), shared by
    its heads. The authors' code doesn't scale q · e. Here the model's scaling applies, as in the paper's formula. For decoders
    only. A token counts if its position is above that of the previous token: padding doesn't count, and explicit
    `position_ids` must increase within a text. Positions are clipped, so there is no length limit.

    Options:
        max_position: number of vectors. Positions are clipped to max_position - 1.
    """

    title = "Contextual position encoding"
    paper = ("https://arxiv.org/abs/2405.18719",)
    translation_invariant = True
    causal_only = True

    max_position: Annotated[int, GreaterThan(1)] = 64
    per_layer = True

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        self.weight = nn.Parameter(torch.empty(self.max_position, geometry.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def score_bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor:
        keys = key.shape[2]
        index, counts = context.counted_keys(query.shape[2], keys, self.type)
        precise = torch.promote_types(query.dtype, torch.float32)  # half precision can't count above a few hundred
        gates = (query @ key.transpose(2, 3) * context.scaling).to(precise).sigmoid()
        gates = gates.masked_fill(torch.arange(keys, device=key.device) > index[:, None], 0.0)
        behind = F.pad(gates * counts[:, None, None], (0, 1))[..., 1:].flip(-1).cumsum(-1).flip(-1)
        position = (gates + behind).clamp(max=self.max_position - 1)
        products = (query @ self.weight.to(query.dtype).T * context.scaling).to(precise)
        below, above = (products.gather(-1, each.long()) for each in (position.floor(), position.ceil()))
        return torch.lerp(below, above, position.frac())
