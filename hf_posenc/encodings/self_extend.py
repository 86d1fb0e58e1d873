"""SelfExtend: rotary positions, grouped beyond a window: https://arxiv.org/abs/2401.01325

Shapes: B batch, H heads, Q queries, K keys, E head_dim.
"""

from typing import Annotated, Any

import torch
from torch import Tensor

from hf_posenc.encodings.base import Geometry
from hf_posenc.encodings.context import PositionContext
from hf_posenc.encodings.frequency_rules import BY_LENGTH
from hf_posenc.encodings.options import Above
from hf_posenc.encodings.rope import RoPE
from hf_posenc.encodings.rotation import rotated
from hf_posenc.encodings.stretching import Extension


class SelfExtend(RoPE, type="self_extend"):
    """`rope` in which tokens far from each other are told apart by groups of G positions, so that no distance is longer than
    those of training (Jin et al., 2024). In texts up to T tokens, the trained length, it is `rope`. In longer ones the score of
    query i and key j is that of the distance i - j up to w, and beyond of floor(i/G) + w - floor(w/G) - floor(j/G).

    In the paper short texts are grouped beyond w, too. In encoders later tokens are grouped in the same way, mirrored. The
    second score is computed from queries and keys turned on, for all pairs: time and memory of `[B, H, Q, K]`. In decoders what
    later layers cached of a text keeps the positions of then, before the text grew over T, or its group changed. Of several
    texts in one row the longest counts.

    Options, and those of `rope`:
        window: w; None takes a quarter of T.
        group: G; None takes the least by which the distances of a text of n tokens are less than T, n its last position + 1.
        trained_length: T; None takes the longest input that the host's own positions were made for.
    """

    title = "SelfExtend: rotary positions, grouped beyond a window"
    paper = ("https://arxiv.org/abs/2401.01325",)
    translation_invariant = False
    corrects_scores = True

    window: Annotated[int, Above(0)] | None = None
    group: Annotated[int, Above(0)] | None = None
    trained_length: Annotated[int, Above(1)] | None = None

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        self._length = self.trained_length or geometry.trained_length or 0
        self._window = self.window or max(1, self._length // 4)
        if self.rope_type in BY_LENGTH:
            raise ValueError(
                f"{self.type}.rope_type={self.rope_type!r} turns by the length of a text, and so do groups: take another "
                "rule, or 'rope'"
            )
        if self._length < 2:
            raise ValueError(
                f"{self.type}.trained_length=None: this host's own positions tell no length that they were made for: give one"
            )
        if self._window >= self._length:
            raise ValueError(f"{self.type}.window={self._window}: allowed is a number below trained_length={self._length}")

    @classmethod
    def settled(cls, geometry: Geometry, options: dict[str, Any]) -> dict[str, Any]:
        given = super().settled(geometry, options)
        return {**given, "trained_length": given.get("trained_length") or geometry.trained_length}

    @classmethod
    def extended(cls, options: dict[str, Any], asked: Extension, geometry: Geometry) -> None:
        return None

    def score_bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor | None:
        keys, window, length = key.shape[2], self._window, context.lengths
        if context.consecutive and isinstance(context.past, int) and context.past + query.shape[2] <= self._length:
            return None
        here, there = context.positions, context.key_positions(keys).clamp(min=0)
        group: Any = self._least_group(length) if self.group is None else self.group
        precise = torch.promote_types(query.dtype, torch.float32)
        query, key = query.to(precise), key.to(precise)
        scores, grouped_keys = query @ key.mT, self._turned(key, there // group - there, context)
        distance = here[:, None, :, None] - there[:, None, None, :]
        longer = (length > self._length)[:, :, None, None]
        bias = torch.zeros_like(scores)
        for sign in (1,) if self.geometry.is_causal else (1, -1):
            shift = sign * (window - window // group)
            grouped = self._turned(query, here // group + shift - here, context) @ grouped_keys.mT
            bias = torch.where(longer & (sign * distance >= window), grouped - scores, bias)
        return bias * context.scaling

    def _least_group(self, length: Tensor) -> Tensor:
        """The least G by which no distance in texts of these lengths is T or more."""
        trained, window = self._length, self._window
        group = -((window - length) // (trained - window)).clamp(max=-1)
        return group + ((length - 1) // group + window - window // group >= trained)

    def _turned(self, states: Tensor, by: Tensor, context: PositionContext) -> Tensor:
        """States `[B, H, L, E]` rotated on by so many positions, `[1 or B, L]`."""
        angles = by.double()[:, None, :, None] * self._frequencies(context)
        return rotated(states, angles.cos().to(states.dtype), angles.sin().to(states.dtype), self.layout)
