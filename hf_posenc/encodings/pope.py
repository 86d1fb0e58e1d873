"""Polar coordinate position embeddings: https://arxiv.org/abs/2509.10534"""

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import PositionContext
from hf_posenc.encodings.options import GreaterThan


class PoPE(PositionEncoding, type="pope"):
    """scores[h, i, j] = scaling · Σ_c softplus(q_ic) softplus(k_jc) cos((i - j) θ_c - δ_hc), θ_c = theta^(-c/E), c = 0 … E - 1
    (Gopalakrishnan, Csordás, Schmidhuber and Mozer, 2025, equations 7 to 9).

    Magnitudes encode content, and phases encode positions. In contrast, rope's pairs of features mix both. Queries and keys
    become Cartesian coordinates of twice the width, so a cache holds keys of 2E features. Values don't change. The phase δ is
    learned per head, starts at 0, and rotates queries here. The paper rotates keys in the opposite direction, and bounds δ to
    one turn, after which the cosine repeats. Features of either sign become magnitudes, so a pretrained model needs further
    training. There is no length limit.

    Options:
        theta: the base of the frequencies.
        phase: whether δ is learned. If False, there are no parameters.
    """

    title = "Polar coordinate position embeddings"
    paper = ("https://arxiv.org/abs/2509.10534",)
    translation_invariant = True
    changes_head_dim = True

    theta: Annotated[float, GreaterThan(1)] = 10000.0
    phase: bool = True

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        if self.phase:
            self.weight = nn.Parameter(torch.empty(geometry.num_attention_heads, geometry.head_dim))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.phase:
            nn.init.zeros_(self.weight)

    @classmethod
    def conflict(cls, other: Any) -> str | None:
        if "rotate" in other.mechanisms():
            return f"{cls.type!r} uses the magnitudes of features, which {other.type!r} changes"
        if "score_bias" in other.mechanisms() and other.reads_content:
            return f"{cls.type!r} makes queries and keys twice as wide as the vectors of {other.type!r}"
        return None

    def rotate(self, query: Tensor | None, key: Tensor | None, context: PositionContext) -> tuple[Tensor | None, Tensor | None]:
        if query is not None:
            query = _cartesian(query, self._waves(query.dtype, context, self.phase))
        return query, None if key is None else _cartesian(key, self._waves(key.dtype, context, False))

    def angular_frequencies(self, length: int) -> Tensor:
        return self._frequencies(None)

    def _frequencies(self, device: torch.device | None) -> Tensor:
        size = self.geometry.head_dim
        return self.theta ** (-torch.arange(size, dtype=torch.float64, device=device) / size)

    def _waves(self, dtype: torch.dtype, context: PositionContext, shifted: bool) -> Tensor:
        """Cosines and sines of the angles, minus the phases if they are shifted, `[1 or B, 1 or H, L, 2, E]`."""

        def compute() -> Tensor:
            cos, sin = context.cached((self, "angles"), lambda: self._cos_sin(context.positions))
            if shifted:  # The angles of all heads would need H times as many cosines.
                cos, sin, phase = (each.to(torch.promote_types(dtype, torch.float32)) for each in (cos, sin, self.weight))
                by_cos, by_sin = phase.cos()[:, None], phase.sin()[:, None]
                cos, sin = cos * by_cos + sin * by_sin, sin * by_cos - cos * by_sin
            return torch.stack([cos, sin], dim=-2).to(dtype)

        return compute() if shifted and self.is_trained() else context.cached((self, dtype, shifted), compute)

    def _cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles, `[1 or B, 1, L, E]` each, float64."""
        angles = positions.double()[:, None, :, None] * self._frequencies(positions.device)
        return angles.cos(), angles.sin()


def _cartesian(states: Tensor, waves: Tensor) -> Tensor:
    """Cartesian coordinates, `[B, H, L, E]` -> `[B, H, L, 2E]`, of points with these angles and the radii softplus(states)."""
    return (F.softplus(states)[..., None, :] * waves).flatten(-2)
