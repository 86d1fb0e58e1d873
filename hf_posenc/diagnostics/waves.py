"""The wavelengths of an encoding made of sines: `sinusoidal`, `rope` and their rules."""

from dataclasses import dataclass

from torch import Tensor

from hf_posenc.diagnostics.result import Result


@dataclass(frozen=True, eq=False)
class Wavelengths(Result):
    """The result of `wavelengths`; by pair of features, R pairs.

    length: of the text, in tokens; some rules turn slower in longer ones.
    frequencies: `[R]`, radians per token. wavelengths: `[R]`, tokens per turn, 2π / frequency; infinite for pairs that don't turn.
    turns: `[R]`, length / wavelength.
    """

    encoding: str
    length: int
    frequencies: Tensor
    wavelengths: Tensor
    turns: Tensor
