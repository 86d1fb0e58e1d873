"""Sinusoidal position embeddings: https://arxiv.org/abs/1706.03762"""

from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_posenc._compat import is_readable
from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import last_of_text
from hf_posenc.encodings.options import GreaterThan


class Sinusoidal(PositionEncoding, type="sinusoidal"):
    """PE(p, 2i) = sin(p / base^(2i/D)), PE(p, 2i+1) = cos(p / base^(2i/D)) (Vaswani et al., 2017, section 3.5).

    Vectors are computed in float64 and cast last, without a table or a length limit. An odd D has one cosine less.

    Options:
        base: wavelengths increase from 2π to base^((D-2)/D)·2π.
        layout: "interleaved" (sine in even, cosine in odd columns) or "concatenated" (all sines, then all cosines).
        scale: a factor on the vectors, or "learned" for one trained factor, initially 1
            (https://arxiv.org/abs/1809.08895, section 3.2).
        bases: several bases instead of `base` (multi-scale). Each has an equal part of the width, with the formula for it.
        frequencies: "fixed"; "learned", ω_i·exp(w_i) with the ω_i of the formula and trained w_i, initially 0; or "dynamic",
            ω_i·(T/n)^(i/(m-1)) in a text of n > T tokens. Of a base's m frequencies, the highest doesn't change, and the lowest
            covers in n tokens the angle that it covered in T (dynamic NTK, https://arxiv.org/abs/2309.00071, section 3). n is
            the text's last position + 1, without padding. In decoders, where vectors can't depend on later tokens, n is
            `max_length`.
        trained_length: T for "dynamic". None uses the maximum length of the model's original positions.
    """

    title = "Sinusoidal position embeddings"
    paper = ("https://arxiv.org/abs/1706.03762",)

    base: Annotated[float, GreaterThan(1)] = 10000.0
    layout: Literal["interleaved", "concatenated"] = "interleaved"
    scale: float | Literal["learned"] = 1.0
    bases: tuple[Annotated[float, GreaterThan(1)], ...] | None = None
    frequencies: Literal["fixed", "learned", "dynamic"] = "fixed"
    trained_length: Annotated[int, GreaterThan(1)] | None = None

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        pairs, dynamic = (geometry.hidden_size + 1) // 2, self.frequencies == "dynamic"
        if self.bases and self.base != type(self).base:
            raise ValueError(f"sinusoidal.base={self.base:g} and sinusoidal.bases={self.bases} are both set. Set only one.")
        if self.bases is not None and not 0 < len(self.bases) <= pairs:
            raise ValueError(f"sinusoidal.bases={self.bases}: hidden_size={geometry.hidden_size} allows 1 to {pairs} bases.")
        if self.trained_length and not dynamic:
            raise ValueError(
                f"sinusoidal.trained_length={self.trained_length} has no effect with frequencies={self.frequencies!r}. Omit "
                "it, or use 'dynamic'."
            )
        self._trained = self.trained_length or geometry.trained_length or 0
        if dynamic and (self._trained < 2 or (geometry.is_causal and geometry.max_length is None)):
            missing = "max_length in a decoder" if self._trained > 1 else "trained_length, above 1"
            raise ValueError(f"sinusoidal.frequencies='dynamic' needs {missing}. Set it, or use 'fixed' frequencies.")
        if self.scale == "learned":
            self.factor = nn.Parameter(torch.empty(()))
        if self.frequencies == "learned":
            self.log_ratios = nn.Parameter(torch.empty(pairs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.scale == "learned":
            nn.init.ones_(self.factor)
        if self.frequencies == "learned":
            nn.init.zeros_(self.log_ratios)

    @classmethod
    def with_explicit_defaults(cls, geometry: Geometry, options: dict[str, Any]) -> dict[str, Any]:
        known = geometry.trained_length if options["frequencies"] == "dynamic" else None
        return {**options, "trained_length": options["trained_length"] or known}

    def embed(self, positions: Tensor) -> Tensor:
        table = waves(positions, self._frequencies(positions), self.geometry.hidden_size, self.layout)
        if self.scale == "learned":
            return table.to(self.factor.dtype) * self.factor
        return table if self.scale == 1 else table * self.scale

    def _frequencies(self, positions: Tensor) -> Tensor:
        """Radians per position, float64: `[D/2]`, or `[..., 1, D/2]` if they differ between texts."""
        bases, size, device = self.bases or (self.base,), self.geometry.hidden_size, positions.device
        ends = [*((size + 1) // 2 * part // len(bases) * 2 for part in range(len(bases))), size]
        steps = [frequencies(end - start, base, device) for base, start, end in zip(bases, ends, ends[1:], strict=False)]
        if self.frequencies == "learned":
            return torch.cat(steps) * self.log_ratios.double().exp()
        if self.frequencies == "fixed":
            return torch.cat(steps)
        if self.geometry.is_causal and self.geometry.max_length is not None:
            length = positions.new_tensor([self.geometry.max_length])
        else:
            length = last_of_text(positions) + 1
        powers = torch.cat([torch.linspace(0, 1, len(each), dtype=torch.float64, device=device) for each in steps])
        return torch.cat(steps) * (self._trained / length.clamp(min=self._trained).double())[..., None] ** powers

    def angular_frequencies(self, length: int) -> Tensor:
        return self._frequencies(torch.arange(length)).detach().flatten()

    def shift_matrix(self, offset: int) -> Tensor:
        """M of shape `[D, D]`, float64, with PE(p + offset) = M · PE(p) for every p and every `scale`.

        M consists of 2×2 rotations, one per frequency. Raises ValueError for an odd D, because the last sine has no cosine, and
        for "dynamic" frequencies, because they differ between texts.
        """
        if self.frequencies == "dynamic":
            raise ValueError(
                "frequencies='dynamic' has no shift matrix, because the frequencies depend on the length. Use 'fixed' or "
                "'learned' frequencies."
            )
        size = self.geometry.hidden_size
        if size % 2:
            raise ValueError(f"hidden_size={size} is odd, so the last sine has no cosine. It must be even for a shift matrix.")
        angles = offset * self._frequencies(torch.zeros(1)).detach()
        interleaved = self.layout == "interleaved"
        sines = torch.arange(0, size, 2) if interleaved else torch.arange(size // 2)
        cosines = sines + (1 if interleaved else size // 2)
        matrix = torch.zeros(size, size, dtype=torch.float64)
        matrix[sines, sines] = matrix[cosines, cosines] = angles.cos()
        matrix[sines, cosines] = angles.sin()
        matrix[cosines, sines] = -angles.sin()
        return matrix


def frequencies(size: int, base: float, device: torch.device | None = None) -> Tensor:
    """base^(-2i/size) for i = 0 … ceil(size/2) - 1, float64, radians per position."""
    return base ** (-torch.arange(0, size, 2, dtype=torch.float64, device=device) / size)


def sinusoids(positions: Tensor, size: int, base: float, layout: str = "interleaved") -> Tensor:
    """Integer positions `[..., L]` -> float64 sines and cosines `[..., L, size]`."""
    return waves(positions, frequencies(size, base, positions.device), size, layout)


def waves(positions: Tensor, steps: Tensor, size: int, layout: str) -> Tensor:
    """`sinusoids` for given radians per position, `[..., 1 or L, ceil(size/2)]`."""
    if steps.ndim == 1 and (rows := _rows_if_repeated(positions)):
        table = waves(torch.arange(rows, device=positions.device), steps, size, layout)
        return F.embedding(positions.long(), table)
    angles = positions.to(torch.float64)[..., None] * steps
    sines, cosines = angles.sin(), angles.cos()
    if layout == "concatenated":
        return torch.cat([sines, cosines[..., : size // 2]], dim=-1)
    return torch.stack([sines, cosines], dim=-1).flatten(-2)[..., :size]


def _rows_if_repeated(positions: Tensor) -> int:
    """1 + the greatest position if there are more positions, as in a batch or a grid. Otherwise 0, and if it can't be read."""
    if not is_readable(positions) or positions.is_floating_point() or not positions.numel():
        return 0
    least, most = positions.aminmax()
    return int(most) + 1 if least >= 0 and most + 1 < positions.numel() else 0
