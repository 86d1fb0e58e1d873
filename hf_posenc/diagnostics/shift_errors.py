"""Measures how well a linear map shifts an encoding's vectors: p(t + k) = M_k p(t)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posenc.diagnostics.encoding_input import POSITIVES, SEVERAL, Sizes, prepare_encoding
from hf_posenc.diagnostics.registry import diagnostic
from hf_posenc.diagnostics.result import Result
from hf_posenc.encodings import checked_value

if TYPE_CHECKING:
    from typing import Unpack


@dataclass(frozen=True, eq=False)
class ShiftError(Result):
    """The result of `shift_error`.

    offsets: k, in tokens.
    error: for each k, ‖p(t + k) - M_k p(t)‖ at positions t to which M_k was not fitted, divided by the distance of these
        p(t + k) from their mean. 0: exact. 1: as good as the mean.
    length: number of positions.
    """

    encoding: str
    length: int
    offsets: tuple[int, ...]
    error: tuple[float, ...]

    def lines(self) -> Iterator[str]:
        yield f"{self.encoding}: error of the best linear map p(t) -> p(t + k), {self.length} positions"
        for offset, error in zip(self.offsets, self.error, strict=True):
            yield f"  k = {offset}: {error:.3g}"


@diagnostic("vectors", on_page=True)
def shift_error(
    encoding: Any, length: int = 256, *, offsets: Sequence[int] | None = None, **sizes: "Unpack[Sizes]"
) -> ShiftError:
    """How well one linear map M_k maps the vector of each position to that of k positions later (Vaswani et al., 2017,
    section 3.5).

    It is exact for `sinusoidal`, whose map is its `shift_matrix`, but not for learned vectors. M_k is fitted by least squares
    to the even positions, and measured at the odd ones, because a map with as many features as positions fits anything.

    Args:
        encoding, length, **sizes: as for `similarity`. The encoding must add vectors.
        offsets: k, in tokens, above 0 and up to half of `length`. By default 1, 2, 4, … up to a quarter.

    Raises:
        ValueError: the encoding adds no vectors, or an offset or size is invalid.
    """
    checked_value("length", length, SEVERAL)
    if offsets is None:
        offsets = [2**power for power in range(max(1, (length // 4).bit_length()))]
    for offset in checked_value("offsets", offsets, POSITIVES):
        if offset > length // 2:
            raise ValueError(f"offsets={offset} must be at most half of length={length}.")
        if offset > length - 4:  # fitting and measuring need two positions each
            raise ValueError(f"offsets={offset} needs a length of at least {offset + 4} positions, not {length}.")
    measured = prepare_encoding(encoding, length, sizes)
    measured.quantity("vectors")
    vectors = measured.vectors()
    return ShiftError(measured.name, length, tuple(offsets), tuple(_residual(vectors, offset) for offset in offsets))


def _residual(vectors: Tensor, offset: int) -> float:
    before, after = vectors[:-offset], vectors[offset:]
    mapping = torch.linalg.lstsq(before[::2], after[::2], rcond=1e-10, driver="gelsd").solution
    wanted = after[1::2]
    spread = (wanted - wanted.mean(0)).norm()
    return float((wanted - before[1::2] @ mapping).norm() / spread)
