"""SelfExtend: rotary positions, grouped beyond a window: https://arxiv.org/abs/2401.01325

Shapes: B batch, H heads, Q queries, K keys, E head_dim.
"""

from typing import Annotated, Any

import torch
from torch import Tensor

from hf_posenc.encodings.base import Geometry
from hf_posenc.encodings.context import PositionContext
from hf_posenc.encodings.frequency_rules import BY_LENGTH
from hf_posenc.encodings.options import GreaterThan
from hf_posenc.encodings.rope import RoPE
from hf_posenc.encodings.rotation import cos_sin, rotated
from hf_posenc.encodings.table_interpolation import GROUPED, Extension


class SelfExtend(RoPE, type="self_extend"):
    """`rope` with distant tokens in groups of G positions, so that no distance exceeds those of training (Jin et al., 2024).

    In texts of up to T tokens, the trained length, it is `rope`. In longer texts, the score of query i and key j is that of the
    distance i - j up to w, and that of floor(i/G) + w - floor(w/G) - floor(j/G) above.

    The paper also groups short texts above w. In encoders, later tokens are grouped in the same way, mirrored. The second score
    is computed for all pairs, with time and memory of `[B, H, Q, K]`. In decoders, the cached states of later layers keep the
    positions from before the text exceeded T or its group changed. If a row holds several texts, the longest one counts.

    Options, in addition to those of `rope`:
        window: w. None uses a quarter of T.
        group: G. None uses the smallest group with which the distances of a text of n tokens are below T, n its last
            position + 1. For decoders, `extend` sets the smallest group for the new length.
        trained_length: T. None uses the maximum length of the model's original positions.
    """

    title = "SelfExtend: rotary positions, grouped beyond a window"
    paper = ("https://arxiv.org/abs/2401.01325",)
    translation_invariant = False
    corrects_scores = True

    window: Annotated[int, GreaterThan(0)] | None = None
    group: Annotated[int, GreaterThan(0)] | None = None
    trained_length: Annotated[int, GreaterThan(1)] | None = None

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        self._length = self.trained_length or geometry.trained_length or 0
        self._window = self.window or max(1, self._length // 4)
        if self.rope_type in BY_LENGTH:
            raise ValueError(
                f"{self.type}.rope_type={self.rope_type!r} isn't supported, because both the rule and the groups depend on the "
                "length of the input. Use another rule, or 'rope'."
            )
        if self._length < 2:
            raise ValueError(
                f"{self.type}.trained_length=None: this model doesn't record the maximum length of its original positions. Set "
                "it explicitly, for example trained_length=512."
            )
        self._check_window(self._window, self._length)

    @classmethod
    def with_explicit_defaults(cls, geometry: Geometry, options: dict[str, Any]) -> dict[str, Any]:
        given = super().with_explicit_defaults(geometry, options)
        return {**given, "trained_length": given.get("trained_length") or geometry.trained_length}

    @classmethod
    def extended(cls, options: dict[str, Any], asked: Extension, geometry: Geometry) -> dict[str, Any] | None:
        """Options for longer inputs. A decoder has one group for all lengths, so that cached states keep the same group."""
        if asked.method != GROUPED:
            return None
        asked.refuse_other_settings("window", "group")
        given = {name: value for name, value in asked.settings.items() if value is not None}
        options = {**options, **given, **({} if "group" in given else {"group": None})}
        cls.checked_options(options)
        trained = options.get("trained_length") or geometry.trained_length or asked.before
        window = options.get("window") or max(1, trained // 4)
        cls._check_window(window, trained)
        least = int(least_group(torch.tensor(asked.after), trained, window))
        group = given.get("group", least if geometry.is_causal else None)
        if group is not None and group < least:
            raise ValueError(
                f"group={group} is too small for window={window} and max_length={asked.after}, because the model was trained "
                f"with {trained} tokens. It must be at least {least}. Set a larger group, or omit it."
            )
        return {**options, "trained_length": trained, "window": window, "group": group}

    @classmethod
    def _check_window(cls, window: int, trained: int) -> None:
        if window >= trained:
            raise ValueError(f"{cls.type}.window={window} isn't valid. It must be below trained_length={trained}.")

    def score_bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor | None:
        keys, window, length = key.shape[2], self._window, context.lengths
        if context.is_contiguous and isinstance(context.past, int) and context.past + query.shape[2] <= self._length:
            return None
        here, there = context.positions, context.key_positions(keys).clamp(min=0)
        group: Any = least_group(length, self._length, self._window) if self.group is None else self.group
        precise = torch.promote_types(query.dtype, torch.float32)
        query, key = query.to(precise), key.to(precise)
        scores, grouped_keys = query @ key.mT, self._rotated(key, there // group - there, context)
        distance = here[:, None, :, None] - there[:, None, None, :]
        longer = (length > self._length)[:, :, None, None]
        bias = torch.zeros_like(scores)
        for sign in (1,) if self.geometry.is_causal else (1, -1):
            shift = sign * (window - window // group)
            grouped = self._rotated(query, here // group + shift - here, context) @ grouped_keys.mT
            bias = torch.where(longer & (sign * distance >= window), grouped - scores, bias)
        return bias * context.scaling

    def _rotated(self, states: Tensor, by: Tensor, context: PositionContext) -> Tensor:
        """States `[B, H, L, E]` rotated by further positions, `[1 or B, L]`."""
        angles = by.double()[:, None, :, None] * self._frequencies(context)
        return rotated(states, *cos_sin(angles, states.dtype, self.layout), self.layout)


def least_group(length: Tensor, trained: int, window: int) -> Tensor:
    """The smallest group with which no distance in texts of these lengths is `trained` or more."""
    group = -((window - length) // (trained - window)).clamp(max=-1)
    return group + ((length - 1) // group + window - window // group >= trained)
