"""Which positions an encoding tells apart: in float64, and in the dtypes of models."""

from dataclasses import dataclass

from hf_posenc.diagnostics.result import Result
from hf_posenc.diagnostics.similarities import Quantity


@dataclass(frozen=True, eq=False)
class Uniqueness(Result):
    """The result of `uniqueness`.

    quantity: "vectors": of each position the vector; "scores": of each key the scores that one query gives it in all heads, where
        all queries and keys have the same content.
    length: number of positions. distinct: how many of them differ from all before. least: the least distance (Euclidean) between
        two of them; nearest: which two. relative: `least` divided by the mean distance of neighbours.
    """

    encoding: str
    quantity: Quantity
    length: int
    distinct: int
    least: float
    nearest: tuple[int, int]
    relative: float


@dataclass(frozen=True, eq=False)
class Precision(Result):
    """The result of `precision`, by dtype.

    error: the largest difference from float64, relative to the largest value.
    told_apart: number of positions before the first that is the same as its neighbour, counted from 0 (from the query of
        "scores"); `length` where all neighbours differ.
    distinct: number of positions that differ from all before.
    """

    encoding: str
    quantity: Quantity
    length: int
    dtypes: tuple[str, ...]
    error: tuple[float, ...]
    told_apart: tuple[int, ...]
    distinct: tuple[int, ...]
