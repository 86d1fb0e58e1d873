"""Sinusoidal position embeddings: https://arxiv.org/abs/1706.03762"""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import last_of_text
from hf_posenc.encodings.options import GreaterThan


class Sinusoidal(PositionEncoding, type="sinusoidal"):
    """PE(p, 2i) = sin(p / base^(2i/D)), PE(p, 2i+1) = cos(p / base^(2i/D)) (Vaswani et al., 2017, section 3.5).

    Computed in float64 for the given positions and cast last: no table, any length. An odd D has one cosine less.

    Options:
        base: the wavelengths grow from 2π to base^((D-2)/D)·2π.
        layout: "interleaved" (sine on even, cosine on odd columns) or "concatenated" (all sines, then all cosines).
        scale: a factor on the vectors, or "learned" for one trained factor, initially 1
            (https://arxiv.org/abs/1809.08895, section 3.2).
        bases: several in place of `base` (multi-scale). Each has an equal part of the width, with the formula for that width.
        frequencies: "fixed"; "learned", ω_i·exp(w_i) for the ω_i of the formula and trained w_i, initially 0; or "dynamic",
            ω_i·(T/n)^(i/(m-1)) in a text of n > T tokens: of a base's m frequencies the highest stays, and the lowest turns as
            far in n tokens as it did in T (dynamic NTK, https://arxiv.org/abs/2309.00071, section 3). n is the text's last
            position + 1, whatever padding; in a causal stack, where no vector may depend on later tokens, `max_length`.
        trained_length: T of "dynamic"; None takes the longest input that the host's own positions were made for.
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
            raise ValueError(f"sinusoidal.base={self.base:g} and sinusoidal.bases={self.bases} contradict each other: give one")
        if self.bases is not None and not 0 < len(self.bases) <= pairs:
            raise ValueError(f"sinusoidal.bases={self.bases}: hidden_size={geometry.hidden_size} has room for 1 to {pairs}")
        if self.trained_length and not dynamic:
            raise ValueError(
                f"sinusoidal.trained_length={self.trained_length} has no use with frequencies={self.frequencies!r}: leave it "
                "out, or take 'dynamic'"
            )
        self._trained = self.trained_length or geometry.trained_length or 0
        if dynamic and (self._trained < 2 or (geometry.is_causal and geometry.max_length is None)):
            missing = "max_length, by which it goes in a causal stack" if self._trained > 1 else "trained_length, above 1"
            raise ValueError(f"sinusoidal.frequencies='dynamic' needs {missing}: give it, or take 'fixed' frequencies")
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
        """Radians per position, `[D/2]` or, of these texts, `[..., 1, D/2]`, float64."""
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

        M consists of 2×2 rotations, one for each frequency. Raises ValueError for an odd D, whose last sine has no cosine
        to be rotated with, and for "dynamic" frequencies, which are others in each text.
        """
        if self.frequencies == "dynamic":
            raise ValueError(
                "frequencies='dynamic' has other frequencies, and so other shifts, for each length: only 'fixed' and 'learned' "
                "ones can be shifted by one matrix"
            )
        size = self.geometry.hidden_size
        if size % 2:
            raise ValueError(f"hidden_size={size} is odd, so its last sine has no cosine: only an even one can be shifted")
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
    """The same for these radians per position, `[..., 1 or L, ceil(size/2)]`."""
    angles = positions.to(torch.float64)[..., None] * steps
    sines, cosines = angles.sin(), angles.cos()
    if layout == "concatenated":
        return torch.cat([sines, cosines[..., : size // 2]], dim=-1)
    return torch.stack([sines, cosines], dim=-1).flatten(-2)[..., :size]
