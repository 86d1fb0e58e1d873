"""Forgetting Transformer: https://arxiv.org/abs/2503.02130"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import PositionContext

LASTING = 16.0, 1024.0
"""Number of tokens after which the first and the last head retain 1/e, before training."""


class FoX(PositionEncoding, type="fox"):
    """bias[h, i, j] = log f_(j+1) + … + log f_i, added to the scaled scores: each later token fades token j (Lin et al., 2025).

    In the paper, the forget gate f_t = sigmoid(w_h · x_t + b_h) depends on the layer's input x_t. Here it depends on the head's
    key, f_t = sigmoid(w_h · k_t + b_h), because every cache holds the keys. Encodings that rotate keys can't be combined with
    it in one layer. Each layer has its own w (`weight`, `[H, E]`) and b (`bias`, `[H]`). Initially the heads forget between
    1/16 and 1/1024 with each token. For decoders only. A token counts if its position is above that of the previous token:
    padding doesn't count, and explicit `position_ids` must increase within a text. There is no length limit.
    """

    title = "Forgetting Transformer"
    paper = ("https://arxiv.org/abs/2503.02130",)
    translation_invariant = True
    causal_only = True

    per_layer = True

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        self.weight = nn.Parameter(torch.empty(geometry.num_attention_heads, geometry.head_dim))
        self.bias = nn.Parameter(torch.empty(geometry.num_attention_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        rates = 1 / torch.logspace(*map(math.log2, LASTING), len(self.bias), base=2.0)  # type: ignore[call-overload]
        with torch.no_grad():
            self.bias.copy_(-rates.expm1().log())

    @classmethod
    def conflict(cls, other: Any) -> str | None:
        if "rotate" in other.mechanisms() and other.rotates_keys:
            return f"the gates of {cls.type!r} depend on keys, which {other.type!r} changes by position"
        return None

    def score_bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor:
        at_queries, at_keys = self._sums(query, key, context)
        return (at_queries[..., None] - at_keys[..., None, :]).to(torch.promote_types(query.dtype, torch.float32)).clamp(max=0)

    def _sums(self, query: Tensor, key: Tensor, context: PositionContext) -> tuple[Tensor, Tensor]:
        """The sum of log f up to each query, `[B, H, Q]`, and up to each key, `[B, H, K]`, in float64."""
        index, counts = context.counted_keys(query.shape[2], key.shape[2], self.type)
        precise = torch.promote_types(query.dtype, torch.float32)
        with torch.autocast(key.device.type, enabled=False):  # It would multiply in half precision.
            products = self.weight[:, None].to(precise) @ key.to(precise).transpose(2, 3)
        logits = products[:, :, 0] + self.bias[:, None].to(precise)
        # With 1e5 tokens, differences of float32 sums would be off by hundredths.
        sums = (F.logsigmoid(logits).double() * counts[:, None]).cumsum(-1)
        return sums[..., index], sums
