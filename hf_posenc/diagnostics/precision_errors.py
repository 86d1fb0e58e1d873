"""Measures which positions an encoding distinguishes, in float64 and in lower precision."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posenc.diagnostics.encoding_input import MeasuredEncoding, Quantity, Sizes, prepare_encoding
from hf_posenc.diagnostics.registry import diagnostic
from hf_posenc.diagnostics.result import Result

if TYPE_CHECKING:
    from typing import Unpack

PROBES = 8
"""Number of random pairs of a query and a key."""


@dataclass(frozen=True, eq=False)
class Uniqueness(Result):
    """The result of `uniqueness`.

    quantity: "vectors" compares the vectors of positions. "scores" compares the scores of one query with each key in all heads.
    length: number of positions.
    distinct: number of positions that differ from all earlier ones.
    least: the smallest Euclidean distance between two positions, `nearest`.
    relative: `least` divided by the mean distance between adjacent positions.
    """

    encoding: str
    quantity: Quantity
    length: int
    distinct: int
    least: float
    nearest: tuple[int, int]
    relative: float

    def lines(self) -> Iterator[str]:
        first, second = self.nearest
        yield f"{self.encoding}: {self.quantity} of {self.length} positions, {self.distinct} distinct"
        yield f"  nearest: {first} and {second}, {self.least:.3g} apart, {self.relative:.3g} of a step"


@dataclass(frozen=True, eq=False)
class Precision(Result):
    """The result of `precision`, by dtype.

    error: the largest difference from float64, relative to the largest value.
    told_apart: number of positions before the first that equals its neighbor. It counts from 0, or from the query of "scores".
        `length` if all neighbors differ.
    distinct: number of positions that differ from all earlier ones.
    """

    encoding: str
    quantity: Quantity
    length: int
    dtypes: tuple[str, ...]
    error: tuple[float, ...]
    told_apart: tuple[int, ...]
    distinct: tuple[int, ...]

    def lines(self) -> Iterator[str]:
        yield f"{self.encoding}: {self.quantity} of {self.length} positions"
        for dtype, error, apart, distinct in zip(self.dtypes, self.error, self.told_apart, self.distinct, strict=True):
            yield f"  {dtype}: error {error:.2g}; neighbors differ for {apart} positions, {distinct} distinct"


@diagnostic("encoding", on_page=True)
def uniqueness(encoding: Any, length: int = 512, *, quantity: Quantity | None = None, **sizes: "Unpack[Sizes]") -> Uniqueness:
    """Whether the encoding distinguishes all positions.

    `uniqueness` compares all vectors. For scores, it compares the keys of one query, with PROBES random queries and keys. The
    query is in the middle, or at the end in a causal stack. A symmetric bias gives keys on its two sides equal scores.

    Args, Raises: as for `similarity`.
    """
    measured = prepare_encoding(encoding, length, sizes)
    kind = measured.quantity(quantity)
    middle = length - 1 if measured.is_causal else length // 2
    found = _features(measured, kind, middle, torch.float64, sizes.get("seed", 0))
    apart = _apart(found)
    steps = apart.diagonal(1)
    apart = apart.masked_fill(apart <= _still(found), 0.0).fill_diagonal_(torch.inf)
    least, place = apart.flatten().min(0)
    step = float(steps[steps.isfinite()].mean())
    nearest = divmod(int(place), length)
    relative = float(least) / step if step else 0.0
    return Uniqueness(measured.name, kind, length, _distinct(_same(found)), float(least), nearest, relative)


@diagnostic("encoding")
def precision(
    encoding: Any,
    length: int = 512,
    *,
    quantity: Quantity | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    **sizes: "Unpack[Sizes]",
) -> Precision:
    """The effect of rounding on an encoding: its error, and the first neighbors that become equal.

    Parameters, vectors, queries, keys, their products, and biases are in the dtype, as in a model without autocast. For scores,
    the query is at position 0, or at the last position in a causal stack. Keys are compared in order of distance.

    Args, Raises: as for `similarity`. dtypes: floating-point dtypes of torch.
    """
    if odd := [dtype for dtype in dtypes if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point)]:
        raise ValueError(f"dtypes contains {odd[0]!r}. Pass floating-point dtypes, such as torch.bfloat16.")
    measured = prepare_encoding(encoding, length, sizes)
    kind = measured.quantity(quantity)
    query = length - 1 if measured.is_causal else 0

    def features(dtype: torch.dtype) -> Tensor:
        found = _features(measured, kind, query, dtype, sizes.get("seed", 0))
        return found.flip(0) if measured.is_causal and kind == "scores" else found

    exact = features(torch.float64)
    largest = exact[exact.isfinite()].abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    rounded = [features(dtype) for dtype in dtypes]
    # Positions that are equal in float64 must not count as distinct because of rounding.
    same = [_same(each) | _same(exact) for each in rounded]
    return Precision(
        measured.name,
        kind,
        length,
        tuple(str(dtype).removeprefix("torch.") for dtype in dtypes),
        tuple(float((each - exact).where(each != exact, 0.0).abs().max() / largest) for each in rounded),
        tuple(map(_told_apart, same)),
        tuple(map(_distinct, same)),
    )


def _features(measured: MeasuredEncoding, kind: Quantity, query: int, dtype: torch.dtype, seed: int) -> Tensor:
    """The features of each position, `[L, F]`: its vector, or its scores in all heads for all probes."""
    if kind == "vectors":
        return measured.vectors(dtype)
    return measured.scores(*measured.random_probes(PROBES, seed), rows=[query], dtype=dtype)[:, :, 0].flatten(0, 1).T


def _same(features: Tensor) -> Tensor:
    """Whether two positions are equal, up to rounding in float64, `[L, L]`."""
    return _apart(features) <= _still(features)


def _apart(features: Tensor) -> Tensor:
    """The Euclidean distances between all positions, `[L, L]`. Infinite if a feature is infinite in only one of them. Features
    that are infinite in both don't count."""
    finite = features.isfinite()
    # -inf minus -inf is NaN, so non-finite features are compared by kind.
    kinds = torch.where(finite, 0.0, torch.where(features.isnan(), 2.0, features.sign())).to(features)
    apart, other = (
        torch.cdist(each, each, compute_mode="donot_use_mm_for_euclid_dist") for each in (features.where(finite, 0.0), kinds)
    )
    return apart.masked_fill(other > 0, torch.inf)


def _still(features: Tensor) -> float:
    """The Euclidean distance up to which two positions are equal."""
    return 1e-13 * float(features[features.isfinite()].abs().max()) * features.shape[1] ** 0.5


def _distinct(same: Tensor) -> int:
    """Number of positions that differ from all earlier ones."""
    return int((same.tril(-1).sum(1) == 0).sum())


def _told_apart(same: Tensor) -> int:
    """Number of positions before the first that equals its neighbor."""
    found = same.diagonal(1).nonzero()
    return int(found[0]) + 1 if len(found) else len(same)
