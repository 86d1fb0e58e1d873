"""Functional interpolation for relative positions: https://arxiv.org/abs/2310.04418"""

import functools
import math
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_posenc._compat import is_readable
from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import PositionContext, last_of, last_of_text, positions_of
from hf_posenc.encodings.options import GreaterThan

CHUNK = 2**20
"""Maximum number of hidden values of the MLP at once: 4 MB in float32. All pairs of 2,048 tokens would take 512 MB."""


class FIRE(PositionEncoding, type="fire"):
    """bias[h, i, j] = f_h(ψ(i - j) / ψ(max(L, n_i))), ψ(x) = log(c x + 1), added to the scaled scores (Li et al., 2023,
    equation 8). f is an MLP with ReLU, 1 -> width -> H, evaluated in float32 or better. c, L, and f are learned. There is no
    length limit.

    In decoders, n_i is the query's position i, as in the paper, and the inputs of f are in [0, 1]. In encoders, n_i is the last
    position of the text, without padding. There, keys after the query have negative inputs, f(-ψ(j - i) / …), in [-1, 1]. In
    cross-attention, n_i is the greater of i and the encoder's last position. Explicit `position_ids` are used unchanged: if
    texts are packed in one row of an encoder, n_i is that of the query's text. Distances above n_i are clipped to n_i.

    All layers share the parameters (the paper's FIRE-S). The paper's FIRE is per_layer=True. The logarithms of c and L are
    learned, so that both are always positive. They are clamped to -60 … 60.

    Options:
        c: the initial value of c. ψ is linear up to distances of about 1/c.
        threshold: the initial value of L. Up to L, a bias depends only on the distance.
        width: number of hidden values of f.
    """

    title = "Functional interpolation for relative positions"
    paper = ("https://arxiv.org/abs/2310.04418",)
    reads_content = False

    c: Annotated[float, GreaterThan(0)] = 0.1
    threshold: Annotated[float, GreaterThan(0)] = 512.0
    width: Annotated[int, GreaterThan(0)] = 32

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        self.logarithms = nn.Parameter(torch.empty(2))
        self.hidden_weight, self.hidden_bias = (nn.Parameter(torch.empty(self.width)) for _ in range(2))
        self.weight = nn.Parameter(torch.empty(geometry.num_attention_heads, self.width))
        self.bias = nn.Parameter(torch.empty(geometry.num_attention_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for place, start in enumerate((self.c, self.threshold)):
                self.logarithms[place] = math.log(start)
        # The initialization of torch.nn.Linear. The last bias shifts all scores of a head equally.
        for parameter in (self.hidden_weight, self.hidden_bias):
            nn.init.uniform_(parameter, -1.0, 1.0)
        nn.init.uniform_(self.weight, -(self.width**-0.5), self.width**-0.5)
        nn.init.zeros_(self.bias)

    def score_bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor:
        keys = key.shape[2]
        return self._once_per_pass("bias", lambda: self._bias(query.shape[2], keys, context), keys, context)

    def _depends_on_distance(self, keys: int, context: PositionContext) -> bool:
        """Whether tokens are consecutive, and all queries of a text have one normalizer."""
        longest = self._longest(keys, context)
        if not context.is_contiguous or longest.shape[1] == 1:
            return context.is_contiguous
        return is_readable(longest) and bool((longest <= self._constants()[1]).all())

    def _constants(self) -> tuple[Tensor, Tensor]:
        """c and L."""
        c, length = self.logarithms.double().clamp(-60, 60).exp()
        return c, length

    def _bias(self, queries: int, keys: int, context: PositionContext) -> Tensor:
        """`[1 or B, H, Q, K]`, in float32 or better."""
        if not self._depends_on_distance(keys, context):
            return self._mlp(self._ratio(context.distances(keys), self._longest(keys, context)))
        device = context.positions.device
        index = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
        return self._values(queries, keys, context)[:, :, index + (queries - 1)]

    def _values(self, queries: int, keys: int, context: PositionContext) -> Tensor:
        """`[1 or B, H, Q + K - 1]`, the biases by distance, from the smallest, if all queries of a text have one normalizer."""
        distance = torch.arange(1 - queries, keys, device=context.positions.device) + context.first_key - context.past
        return self._mlp(self._ratio(distance, last_of(self._longest(keys, context))))[:, :, 0]

    def _ratio(self, distance: Tensor, longest: Tensor) -> Tensor:
        """The inputs of f, from distances `[1 or B, 1 or Q, ...]` or `[N]`, and n_i, `[1 or B, 1 or Q]`."""
        c, length = self._constants()
        whole = torch.log1p(c * torch.maximum(length, longest.double()))
        return (-distance.sign() * torch.log1p(c * distance.abs().double()) / whole[..., None]).clamp(-1, 1)

    def _longest(self, keys: int, context: PositionContext) -> Tensor:
        """n_i, `[1 or B, 1 or Q]`."""
        positions = context.positions
        if self.geometry.is_causal:
            return positions
        if context.in_cross_attention:  # a cached decoder has only its new queries here
            there, _ = positions_of(keys, 0, context.cross.mask, positions.device)
            return torch.maximum(positions, there.amax(dim=-1, keepdim=True))
        return last_of(positions) if context.is_contiguous else last_of_text(positions)

    def _mlp(self, ratio: Tensor) -> Tensor:
        """f, `[R, Q, K] -> [R, H, Q, K]`, in chunks of queries. Hidden values aren't kept for the backward pass."""
        rows = max(1, CHUNK // max(1, ratio.shape[0] * ratio.shape[2] * self.width))
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or ratio.shape[1] <= rows:
            return self._layers(ratio)
        parts = ratio.split(rows, dim=1)
        if torch.is_grad_enabled():
            again = functools.partial(checkpoint, self._layers, use_reentrant=False, preserve_rng_state=False)
            return torch.cat([again(part) for part in parts], dim=2)
        size = (ratio.shape[0], len(self.bias), *ratio.shape[1:])
        whole = torch.empty(size, dtype=self._kind, device=ratio.device)
        for part, place in zip(parts, whole.split(rows, dim=2), strict=True):
            place.copy_(self._layers(part))
        return whole

    def _layers(self, ratio: Tensor) -> Tensor:
        each: list[Tensor] = [self.hidden_weight, self.hidden_bias, self.weight, self.bias]
        hidden_weight, hidden_bias, weight, bias = (parameter.to(self._kind)[..., None] for parameter in each)
        with torch.autocast(ratio.device.type, enabled=False):
            hidden = torch.addcmul(hidden_bias, ratio.to(self._kind).flatten(1)[:, None], hidden_weight).relu_()
            return (weight[..., 0] @ hidden + bias).unflatten(-1, ratio.shape[1:])

    @property
    def _kind(self) -> torch.dtype:
        return torch.promote_types(self.weight.dtype, torch.float32)
