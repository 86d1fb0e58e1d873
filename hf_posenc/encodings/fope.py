"""Fourier position embeddings: https://arxiv.org/abs/2412.17739"""

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import PositionContext
from hf_posenc.encodings.options import GreaterThan
from hf_posenc.encodings.rotation import by_feature, rotated_by
from hf_posenc.encodings.sinusoidal import frequencies


class FoPE(PositionEncoding, type="fope"):
    """Each pair of features at position p is rotated as in rope, with a Fourier series instead of each wave: cos(p ω_m) becomes
    Σ_k a_hkm cos(p ω_k), and sin(p ω_m) Σ_k b_hkm sin(p ω_k), ω_k = theta^(-2k/E) (Hua et al., 2025, section 4).

    The sums are over the frequencies with at least one full turn in training, ω_k ≥ 2π/T, T the trained length. Pairs with
    lower frequencies aren't rotated. Each key-value head has separate coefficients: 1 for a pair's own wave, plus noise that
    models the mixing by linear layers and activations. Angles are computed in float64. There is no length limit. Because
    several waves are mixed, scores don't depend on distance only.

    Options:
        theta: the base of the frequencies.
        trained_length: T. None uses the maximum length of the model's original positions.
        coefficients: "fixed", drawn once and saved, or "learned".
        gain: the noise has a standard deviation of gain/√(number of waves). 0 for no noise.
    """

    title = "Fourier position embeddings"
    paper = ("https://arxiv.org/abs/2412.17739",)
    translation_invariant = False

    theta: Annotated[float, GreaterThan(1)] = 10000.0
    trained_length: Annotated[int, GreaterThan(1)] | None = None
    coefficients: Literal["fixed", "learned"] = "fixed"
    gain: float = 0.3

    if TYPE_CHECKING:
        cosines: Tensor
        sines: Tensor

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        length = self.trained_length or geometry.trained_length or 0
        if length < 2:
            raise ValueError(
                f"fope.trained_length={self.trained_length}: this model doesn't record the maximum length of its original "
                "positions. Set it explicitly, for example trained_length=512."
            )
        if geometry.head_dim % 2:
            raise ValueError(
                f"'fope' rotates pairs of features, but this model's head_dim is {geometry.head_dim}, an odd number. "
                "Choose an additive encoding or a bias."
            )
        if self.gain < 0:
            raise ValueError(f"fope.gain={self.gain} isn't valid. It must be 0 or more.")
        waves = (self.theta ** (-2 * k / geometry.head_dim) for k in range(geometry.head_dim // 2))
        self._turning = sum(wave >= 2 * math.pi / length for wave in waves)
        heads = geometry.num_key_value_heads or geometry.num_attention_heads
        for name in ("cosines", "sines"):
            values = torch.empty(heads, self._turning, self._turning)
            if self.coefficients == "learned":
                setattr(self, name, nn.Parameter(values))
            else:
                self.register_buffer(name, values)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for each in (self.cosines, self.sines):
                each.normal_(std=self.gain / max(self._turning, 1) ** 0.5).add_(torch.eye(self._turning, device=each.device))

    @classmethod
    def with_explicit_defaults(cls, geometry: Geometry, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "trained_length": options["trained_length"] or geometry.trained_length}

    def rotate(self, query: Tensor | None, key: Tensor | None, context: PositionContext) -> tuple[Tensor | None, Tensor | None]:
        def compute(heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            return self._cos_sin(context, heads, dtype)

        return rotated_by(self, compute, query, context, "half"), rotated_by(self, compute, key, context, "half")

    def angular_frequencies(self, length: int) -> Tensor:
        size = self.geometry.head_dim
        return F.pad(frequencies(size, self.theta)[: self._turning], (0, size // 2 - self._turning))

    def _cos_sin(self, context: PositionContext, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The sums instead of cosines `[1 or B, H, L, E]` and sines `[1 or B, H, L, E/2]`. Some heads may share a key head."""
        waves = context.cached((self, "waves"), lambda: self._waves(context.positions))
        still = self.geometry.head_dim // 2 - self._turning
        sums = (wave @ each.double() for wave, each in zip(waves, (self.cosines, self.sines), strict=True))
        cos, sin = (F.pad(each.to(dtype), (0, still), value=value) for each, value in zip(sums, (1.0, 0.0), strict=True))
        groups = heads // cos.shape[1]
        return by_feature(cos, "half").repeat_interleave(groups, dim=1), sin.repeat_interleave(groups, dim=1)

    def _waves(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, `[1 or B, 1, L, W]` each, float64, of the W frequencies in the sums."""
        steps = frequencies(self.geometry.head_dim, self.theta, positions.device)[: self._turning]
        angles = positions.double()[:, None, :, None] * steps
        return angles.cos(), angles.sin()
