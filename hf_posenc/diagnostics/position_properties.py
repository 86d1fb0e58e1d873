"""Measures translation invariance, monotonicity, and symmetry of an encoding (Wang et al., 2021)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_posenc.diagnostics.encoding_input import POSITIVE, Quantity, Sizes
from hf_posenc.diagnostics.matrix_properties import monotonicity, symmetry, translation_invariance
from hf_posenc.diagnostics.registry import diagnostic
from hf_posenc.diagnostics.result import Result, heads, ranged
from hf_posenc.diagnostics.similarities import similarity
from hf_posenc.encodings import checked_value

if TYPE_CHECKING:
    from typing import Unpack


@dataclass(frozen=True, eq=False)
class Properties(Result):
    """The result of `properties`: the properties of Wang et al. (2021), each `[H]`, from 0 to 1.

    translation_invariance: the share of the variance between different positions that distance explains (R²). 1: only distance
        matters.
    monotonicity: the share of pairs of keys on one side of a query in which the farther key is less similar. Ties count half.
        1: similarity decreases everywhere. 0.5: chance.
    local_monotonicity: the same for distances up to `near` tokens.
    symmetry: the share of the variance that is unchanged when i and j are swapped. NaN in a causal stack.
    All are NaN if the encoding doesn't distinguish positions.
    """

    encoding: str
    quantity: Quantity
    length: int
    near: int
    translation_invariance: Tensor
    monotonicity: Tensor
    local_monotonicity: Tensor
    symmetry: Tensor

    def lines(self) -> Iterator[str]:
        yield f"{self.encoding}: {self.quantity} of {self.length} positions, {heads(self.symmetry)}"
        yield f"  translation invariance: {ranged(self.translation_invariance)}"
        yield f"  monotonicity: {ranged(self.monotonicity)}; up to {self.near} tokens: {ranged(self.local_monotonicity)}"
        yield f"  symmetry: {ranged(self.symmetry)}"


@diagnostic("encoding", on_page=True)
def properties(
    encoding: Any, length: int = 64, *, quantity: Quantity | None = None, near: int = 20, **sizes: "Unpack[Sizes]"
) -> Properties:
    """Translation invariance, monotonicity, and symmetry of `similarity` (Wang et al., 2021).

    Args, Raises: as for `similarity`. near: the maximum distance for `local_monotonicity`, in tokens.
    """
    checked_value("near", near, POSITIVE)
    found = similarity(encoding, length, quantity=quantity, **sizes)
    still = 1e-9 * float(found.matrix[found.matrix.isfinite()].abs().max())
    return Properties(
        found.encoding,
        found.quantity,
        length,
        near,
        translation_invariance(found.matrix, still),
        monotonicity(found.matrix, still),
        monotonicity(found.matrix, still, near),
        symmetry(found.matrix, still),
    )
