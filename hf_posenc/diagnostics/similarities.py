"""How alike positions are to an encoding, by pair and by distance, and the three properties of Wang et al. (2021).

Shapes: L positions, H heads, D hidden_size, N distances.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posenc.diagnostics.encoding_input import POSITIVE, Quantity, Sizes, subject
from hf_posenc.diagnostics.indicators import by_distance, distances, monotonicity, symmetry, translation_invariance
from hf_posenc.diagnostics.result import Result, heads, ranged
from hf_posenc.encodings import checked_value
from hf_posenc.encodings.rope import RoPE

if TYPE_CHECKING:
    from typing import Unpack


@dataclass(frozen=True, eq=False)
class Similarity(Result):
    """The result of `similarity`.

    encoding: its name. quantity: "vectors", what is added to the inputs; "scores", what it does in attention.
    matrix: `[H, L, L]`, of query position i and key position j. Of vectors (H = 1) dot products; of an encoding that rotates
        the scaled score of a query and a key whose features are all 1; of one that biases the bias; of both the sum. Where all
        heads are alike, H = 1. NaN for later keys in a causal stack.
    cosine: `[H, L, L]`, of vectors, or of turned queries and keys; None where a bias takes part.
    """

    encoding: str
    quantity: Quantity
    matrix: Tensor
    cosine: Tensor | None

    def lines(self) -> Iterator[str]:
        yield f"{self.encoding}: {self.quantity} of {self.matrix.shape[-1]} positions, {heads(self.matrix)}"
        yield f"  {'dot products' if self.quantity == 'vectors' else 'scores'}: {ranged(self.matrix)}"
        if self.cosine is not None:
            yield f"  cosines: {ranged(self.cosine)}"


@dataclass(frozen=True, eq=False)
class Decay(Result):
    """The result of `decay`: `Similarity.matrix` by distance.

    distances: key position - query position, in tokens, from the most negative.
    mean: `[H, N]`, over all pairs at this distance. spread: `[H, N]`, their standard deviation: 0 where distance alone counts.
    bound: `[N]`, of `rope` the bound of Su et al. (2021, section 3.4.3), relative to its value at distance 0: the mean over
        pairs of features j of |Σ_{i ≤ j} exp(√-1 · distance · frequency_i)|; None for others.
    """

    encoding: str
    quantity: Quantity
    distances: tuple[int, ...]
    mean: Tensor
    spread: Tensor
    bound: Tensor | None

    def lines(self) -> Iterator[str]:
        yield f"{self.encoding}: {self.quantity} by distance, {heads(self.mean)}"
        by_place = {distance: place for place, distance in enumerate(self.distances)}
        for distance in dict.fromkeys((0, -1, -2, -4, -8, -16, -32, -64, self.distances[0])):
            if distance in by_place:
                place = by_place[distance]
                spread = f", spread up to {self.spread[:, place].max():.3g}" if (self.spread[:, place] > 1e-9).any() else ""
                yield f"  {-distance} tokens before: {ranged(self.mean[:, place])}{spread}"


@dataclass(frozen=True, eq=False)
class Properties(Result):
    """The result of `properties`: those of Wang et al. (2021), each of `[H]` heads, from 0 to 1.

    translation_invariance: the part of the variance between different positions that distance explains (R²); 1: distance
        alone counts.
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

    def lines(self) -> Iterator[str]:
        yield f"{self.encoding}: {self.quantity} of {self.length} positions, {heads(self.symmetry)}"
        yield f"  translation invariance: {ranged(self.translation_invariance)}"
        yield f"  monotonicity: {ranged(self.monotonicity)}; up to {self.near} tokens: {ranged(self.local_monotonicity)}"
        yield f"  symmetry: {ranged(self.symmetry)}"


def similarity(encoding: Any, length: int = 128, *, quantity: Quantity | None = None, **sizes: "Unpack[Sizes]") -> Similarity:
    """How alike each two positions are: dot products and cosines of vectors, scores of a fixed query and key, biases.

    Args:
        encoding: a name or dict as for `patch`, a `PositionEncoding`, or a `PositionEmbedding`.
        length: L, the number of positions.
        quantity: "vectors" or "scores"; needed of a composition that gives both.
        **sizes: `Sizes`, of an encoding given by name: hidden_size, num_attention_heads, max_length, causal, seed.

    Raises:
        ValueError: an unknown encoding, one that doesn't act in the way asked for, or a wrong size.
    """
    measured = subject(encoding, length, sizes)
    kind = measured.quantity(quantity)
    if kind == "vectors":
        vectors = measured.vectors()
        matrix = vectors @ vectors.T
        size = vectors.norm(dim=1)
        cosine = (matrix / (size[:, None] * size)).where(matrix.isfinite(), torch.nan)
        if measured.is_causal:
            later = distances(length) > 0
            matrix, cosine = (each.masked_fill(later, torch.nan) for each in (matrix, cosine))
        return Similarity(measured.name, kind, matrix[None], cosine[None])
    matrix = measured.scores(*measured.ones())[0]
    among: Tensor | None = None
    if not {"distance_bias", "score_bias"} & {*measured.verbs}:
        query, key = (each[0] for each in measured.turned(*measured.ones()))
        among = query @ key.mT / (query.norm(dim=-1)[..., None] * key.norm(dim=-1)[..., None, :])
        among = _of_heads(among.where(matrix.isfinite(), torch.nan))
    return Similarity(measured.name, kind, _of_heads(matrix), among)


def decay(encoding: Any, length: int = 128, *, quantity: Quantity | None = None, **sizes: "Unpack[Sizes]") -> Decay:
    """`similarity` by distance and head. Args and errors: as there."""
    measured = subject(encoding, length, sizes)
    found = similarity(encoding, length, quantity=quantity, **sizes)
    last = 0 if measured.is_causal else length - 1
    distance = range(1 - length, last + 1)
    mean, spread = (each[:, : len(distance)] for each in by_distance(found.matrix))
    bound = None
    if measured.verbs == ("rotate",) and isinstance(measured.encoding, RoPE):
        bound = rotation_bound(measured.encoding.angular_frequencies(length), torch.tensor(distance))
    return Decay(found.encoding, found.quantity, tuple(distance), mean, spread, bound)


def properties(
    encoding: Any, length: int = 64, *, quantity: Quantity | None = None, near: int = 20, **sizes: "Unpack[Sizes]"
) -> Properties:
    """Translation invariance, monotonicity and symmetry of what `similarity` gives (Wang et al., 2021).

    Args: as of `similarity`; near: the distance in tokens up to which `local_monotonicity` counts.

    Raises: as `similarity`.
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


def rotation_bound(frequencies: Tensor, distance: Tensor) -> Tensor:
    """The mean over j of |Σ_{i ≤ j} exp(√-1 · distance · frequency_i)|, relative to distance 0: `[R]`, `[N]` -> `[N]`."""
    sums = torch.polar(torch.ones(()).double(), distance.double()[:, None] * frequencies).cumsum(-1).abs().mean(-1)
    return 2 * sums / (len(frequencies) + 1)


def _of_heads(values: Tensor) -> Tensor:
    """Values of heads `[H, ...]`; of one where all are alike."""
    alike = torch.allclose(values, values[:1].expand_as(values), rtol=0, atol=1e-12, equal_nan=True)
    return values[:1] if alike else values
