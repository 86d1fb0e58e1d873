"""How alike positions are to an encoding, by pair and by distance, and the three properties of Wang et al. (2021).

Shapes: L positions, H heads, D hidden_size, N distances.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from hf_posenc.diagnostics.result import Result

Quantity = Literal["vectors", "scores"]


@dataclass(frozen=True, eq=False)
class Similarity(Result):
    """The result of `similarity`.

    encoding: its name. quantity: "vectors", what is added to the inputs; "scores", what it does in attention.
    matrix: `[H, L, L]`, of query position i and key position j. Of vectors (H = 1) dot products; of an encoding that rotates the
        scaled score of a query and a key whose features are all 1; of one that biases the bias; of both the sum. Where all heads
        are alike, H = 1. NaN for later keys in a causal stack.
    cosine: `[H, L, L]`, of vectors, or of turned queries and keys; None where a bias takes part.
    """

    encoding: str
    quantity: Quantity
    matrix: Tensor
    cosine: Tensor | None


@dataclass(frozen=True, eq=False)
class Decay(Result):
    """The result of `decay`: `Similarity.matrix` by distance.

    distances: key position - query position, in tokens, from the most negative.
    mean: `[H, N]`, over all pairs at this distance. spread: `[H, N]`, their standard deviation: 0 where distance alone counts.
    bound: `[N]`, of `rope` the bound of Su et al. (2021, section 3.4.3), relative to its value at distance 0: the mean over pairs
        of features j of |Σ_{i ≤ j} exp(√-1 · distance · frequency_i)|; None for others.
    """

    encoding: str
    quantity: Quantity
    distances: tuple[int, ...]
    mean: Tensor
    spread: Tensor
    bound: Tensor | None


@dataclass(frozen=True, eq=False)
class Properties(Result):
    """The result of `properties`: those of Wang et al. (2021), each of `[H]` heads, from 0 to 1.

    translation_invariance: the part of the matrix's variance that distance explains (R²); 1: distance alone counts.
    monotonicity: of all pairs of distances on one side of a query, the part in which the farther key is the less similar one
        (ties count half): 1 falls everywhere, 0.5 is as good as chance.
    local_monotonicity: the same of distances up to `near` tokens.
    symmetry: the part of the variance that stays when i and j change places; NaN in a causal stack.
    NaN where all positions are the same to the encoding.
    """

    encoding: str
    quantity: Quantity
    length: int
    near: int
    translation_invariance: Tensor
    monotonicity: Tensor
    local_monotonicity: Tensor
    symmetry: Tensor
