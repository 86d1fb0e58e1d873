"""Computes the wavelengths of a sinusoidal encoding, such as `sinusoidal` or `rope` with any rule."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_posenc.diagnostics.encoding_input import Sizes, prepare_encoding
from hf_posenc.diagnostics.registry import diagnostic
from hf_posenc.diagnostics.result import Result, ranged

if TYPE_CHECKING:
    from typing import Unpack


@dataclass(frozen=True, eq=False)
class Wavelengths(Result):
    """The result of `wavelengths`, for R pairs of features.

    length: text length in tokens. Some rules have lower frequencies in longer texts.
    frequencies: `[R]`, radians per token.
    wavelengths: `[R]`, tokens per full rotation, 2π / frequency. Infinite if the frequency is 0.
    turns: `[R]`, length / wavelength.
    """

    encoding: str
    length: int
    frequencies: Tensor
    wavelengths: Tensor
    turns: Tensor

    def lines(self) -> Iterator[str]:
        yield f"{self.encoding}: {len(self.turns)} pairs of features, wavelengths of {ranged(self.wavelengths)} tokens"
        yield f"  {int((self.turns >= 1).sum())} of them turn once or more in {self.length} tokens"


@diagnostic("encoding")
def wavelengths(encoding: Any, length: int = 512, **sizes: "Unpack[Sizes]") -> Wavelengths:
    """The wavelengths of a sinusoidal encoding, by pair of features.

    Args:
        encoding, **sizes: as for `similarity`. The encoding must have `angular_frequencies`: `sinusoidal`, `fourier`, `rope`
            with any rule, `xpos`, `fope`, `pope`, or a custom one.
        length: text length in tokens.

    Raises:
        ValueError: the encoding isn't sinusoidal, a composition has several sinusoidal parts, or a size is invalid.
    """
    measured = prepare_encoding(encoding, length, sizes)
    parts = {name: part.angular_frequencies(length) for name, part in measured.encoding.named_parts().items()}
    found = {name: frequencies.detach() for name, frequencies in parts.items() if frequencies is not None}
    if len(found) != 1:
        why = f"has several sinusoidal parts, {', '.join(found)}. Pass one of them." if found else "isn't sinusoidal."
        raise ValueError(f"{measured.name!r} {why}")
    ((name, frequencies),) = found.items()
    turns = frequencies.abs() * length / math.tau
    return Wavelengths(name, length, frequencies, math.tau / frequencies.abs(), turns)
