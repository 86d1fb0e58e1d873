"""xPos, rotary positions with exponential decay: https://arxiv.org/abs/2212.10554

Shapes: B batch, L tokens, E head_dim.
"""

import math
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import PositionContext
from hf_posenc.encodings.options import GreaterThan
from hf_posenc.encodings.rotation import cos_sin, rotated
from hf_posenc.encodings.sinusoidal import frequencies

HEADROOM = 256.0
"""Remaining range of a dtype at the last position. Query features down to 1/256 keep full precision, and products of queries
with later, masked keys are finite up to about 1,000."""


class XPos(PositionEncoding, type="xpos"):
    """Pair i of E/2 features at position p is rotated by p·theta^(-2i/E), and scaled by zeta_i^(p/scale_base) in queries and by
    the inverse in keys, with zeta_i = (2i/E + gamma)/(1 + gamma). Its part of a score decays by zeta_i^(distance/scale_base),
    fastest for high frequencies (Sun et al., 2022, section 3).

    For decoders only, where no key is after its query. The paper counts positions from the middle of a text, which gives the
    same scores. Here they count from its start, so that cached keys are valid at any length.

    Factors grow with positions. Positions raise a ValueError if the factors would exceed the range of the states' dtype: by
    default above 33,427 in float32 and bfloat16, and above 1,699 in float16. On a GPU, where reading positions would wait for
    it, the number of tokens counts, including padding. Larger explicit `position_ids` give NaN there. In half precision, the
    scaling is computed in float32. Angles and factors are computed in float64 and cast last.

    Options:
        theta: the base of the frequencies.
        layout: which features form a pair, "half" (i and i + E/2) or "interleaved" (2i and 2i + 1, as in the authors' code).
        gamma: larger values give less decay.
        scale_base: the distance over which pair i of a score decays by zeta_i.
    """

    title = "xPos, rotary positions with exponential decay"
    paper = ("https://arxiv.org/abs/2212.10554",)
    translation_invariant = True
    causal_only = True

    theta: Annotated[float, GreaterThan(1)] = 10000.0
    layout: Literal["half", "interleaved"] = "half"
    gamma: Annotated[float, GreaterThan(0)] = 0.4
    scale_base: Annotated[float, GreaterThan(0)] = 512.0

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        if geometry.head_dim % 2:
            raise ValueError(
                f"{self.type!r} rotates pairs of features, but this model's head_dim is {geometry.head_dim}, an odd number. "
                "Choose an additive encoding, a bias, or rope, which can rotate a fraction of the features."
            )

        if geometry.max_length is not None and geometry.max_length - 1 > (last := self._last(torch.float32)):
            raise ValueError(
                f"max_length={geometry.max_length} is too large: {self.type!r} with scale_base={self.scale_base} and "
                f"gamma={self.gamma} supports positions up to {last} in float32 and bfloat16. Use a smaller max_length or a "
                "larger scale_base."
            )

    @classmethod
    def conflict(cls, other: Any) -> str | None:
        if "score_bias" in other.mechanisms() and other.reads_content:
            return f"{cls.type!r} scales queries and keys by their positions, which would change the bias of {other.type!r}"
        return None

    def rotate(self, query: Tensor | None, key: Tensor | None, context: PositionContext) -> tuple[Tensor | None, Tensor | None]:
        return self._rotated(query, context, 1), self._rotated(key, context, -1)

    def angular_frequencies(self, length: int) -> Tensor:
        return frequencies(self.geometry.head_dim, self.theta)

    def _rotated(self, states: Tensor | None, context: PositionContext, sign: int) -> Tensor | None:
        """States rotated and scaled by zeta^(sign·p/scale_base)."""
        if states is None:
            return None
        dtype = torch.promote_types(states.dtype, torch.float32)

        def factors() -> tuple[Tensor, Tensor]:
            self._refuse_overflow(context, states.dtype)
            return self._factors(context.positions, sign, dtype)

        cos, sin = context.cached((self, sign, states.dtype), factors)
        return rotated(states.to(dtype), cos, sin, self.layout).to(states.dtype)

    def _factors(self, positions: Tensor, sign: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Scaled cosines `[1 or B, 1, L, E]` and sines `[1 or B, 1, L, E/2]`."""
        size, places = self.geometry.head_dim, positions.double()[:, None, :, None]
        angles = places * frequencies(size, self.theta, positions.device)
        zeta = (torch.arange(0, size, 2, dtype=torch.float64, device=positions.device) / size + self.gamma) / (1 + self.gamma)
        scale = zeta ** (sign * places / self.scale_base)
        return cos_sin(angles, dtype, self.layout, scale)

    def _last(self, dtype: torch.dtype) -> int:
        """The last position whose factors fit a dtype."""
        range_of = torch.finfo(dtype)
        room = min(math.log(range_of.max), -math.log(range_of.tiny)) - math.log(HEADROOM)
        return int(room * self.scale_base / math.log1p(1 / self.gamma))

    def _refuse_overflow(self, context: PositionContext, dtype: torch.dtype) -> None:
        """Raises ValueError for positions whose factors don't fit the dtype."""
        positions = context.positions
        if torch.compiler.is_compiling() or not positions.numel():
            return
        past = context.past if isinstance(context.past, int) and context.length_positions is None else 0
        # Reading values would synchronize a GPU.
        farthest = int(positions.max()) if positions.device.type == "cpu" else past + positions.shape[1] - 1
        if farthest > (last := self._last(dtype)):
            raise ValueError(
                f"Position {farthest} is beyond {last}, the last position that {self.type!r} can represent in {dtype} with "
                f"scale_base={self.scale_base} and gamma={self.gamma}. Pass shorter inputs"
                + (", run the model in bfloat16 or float32" if dtype == torch.float16 else "")
                + ", or train with a larger scale_base."
            )
