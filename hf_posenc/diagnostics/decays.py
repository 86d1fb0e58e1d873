"""Measures how similar an encoding's positions are, by distance.

Shapes: L positions, H heads, N distances.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from torch import Tensor

from hf_posenc.diagnostics.encoding_input import Quantity, Sizes, label, prepare_encoding, sizes_of
from hf_posenc.diagnostics.figures import WIDTH, Sheet, panels
from hf_posenc.diagnostics.matrix_properties import by_distance
from hf_posenc.diagnostics.registry import Causal, Dark, Encoding, Help, HiddenSize, Length, NumHeads, Path, diagnostic, figure
from hf_posenc.diagnostics.result import Result, heads, ranged
from hf_posenc.diagnostics.similarities import selected_heads, similarity, without_unseen
from hf_posenc.encodings.rope import RoPE

if TYPE_CHECKING:
    from typing import Unpack

LINES = 4
"""The default maximum number of heads in a figure. Each head has a line."""


@dataclass(frozen=True, eq=False)
class Decay(Result):
    """The result of `decay`: `Similarity.matrix` by distance.

    distances: key position - query position, in tokens, from the most negative.
    mean: `[H, N]`, the mean over all pairs at this distance.
    spread: `[H, N]`, their standard deviation. 0: only distance matters.
    bound: `[N]`, for `rope`, the bound of Su et al. (2021, section 3.4.3) relative to distance 0. This is the mean over pairs
        of features j of |Σ_{i ≤ j} exp(√-1 · distance · frequency_i)|. None for other encodings.
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


@diagnostic("encoding")
def decay(encoding: Any, length: int = 128, *, quantity: Quantity | None = None, **sizes: "Unpack[Sizes]") -> Decay:
    """`similarity` by distance and head. Args, Raises: as for `similarity`."""
    measured = prepare_encoding(encoding, length, sizes)
    found = similarity(encoding, length, quantity=quantity, **sizes)
    last = 0 if measured.is_causal else length - 1
    distance = range(1 - length, last + 1)
    mean, spread = (each[:, : len(distance)] for each in by_distance(found.matrix))
    bound = None
    if measured.verbs == ("rotate",) and isinstance(measured.encoding, RoPE):
        bound = rotation_bound(measured.encoding.angular_frequencies(length), torch.tensor(distance))
    return Decay(found.encoding, found.quantity, tuple(distance), mean, spread, bound)


@figure("scores", example="alibi kerple rope sinusoidal", caption="By distance")
def draw_decay(
    encodings: Sequence[Encoding | Decay],
    *,
    length: Length = 128,
    num_attention_heads: NumHeads = 8,
    hidden_size: HiddenSize = 512,
    causal: Causal = None,
    heads: Annotated[Sequence[int] | None, Help("A head, from 0. Can be repeated.", "up to 4")] = None,
    quantity: Quantity | None = None,
    dark: Dark = False,
    path: Path = None,
) -> Any:
    """Draw how similar positions are by distance, a panel for each encoding, a line for each head.

    Lines are means over all pairs at a distance, and bands are their standard deviations. Similarity is the dot product of
    vectors, the bias, or the score of rotated vectors. A dotted line shows the bound for `rope` (Su et al., 2021, section
    3.4.3), scaled to the score at distance 0.

    encodings: names, dicts `{"type": name, **options}`, modules, which keep their sizes, or results of `diagnostics.decay`.
    heads: head indices, from 0. By default, up to 4 of them at equal steps.
    quantity: "vectors" or "scores". Required for a composition that has both.

    Raises ValueError for an encoding that has neither, or heads that don't exist.
    """
    if isinstance(encodings, str) or not encodings:
        raise ValueError(f"encodings={encodings!r} must be a list of one or more encodings.")
    sizes = {"num_attention_heads": num_attention_heads, "hidden_size": hidden_size, "causal": causal}
    found = [
        (each, each.encoding)
        if isinstance(each, Decay)
        else (decay(each, length, quantity=quantity, **sizes_of(each, **sizes)), label(each))
        for each in encodings
    ]
    columns = min(len(found), 3)
    rows = -(-len(found) // columns)
    sheet = Sheet((max(3.6, WIDTH * columns / 3), 0.6 + 2.2 * rows), rows, columns, dark=dark, path=path)
    for axis, (result, name) in zip(panels(sheet.axes, len(found)), found, strict=True):
        mean, spread = without_unseen(result.mean), result.spread.numpy()
        for place, head in enumerate(selected_heads(heads, len(mean), LINES)):
            style = sheet.line(place) if len(mean) > 1 else {"color": sheet.theme.ink, "linewidth": 1.6}
            axis.plot(result.distances, mean[head], label=f"head {head}" if len(mean) > 1 else "all heads", **style)
            if np.nanmax(spread[head]) > 1e-6 * np.nanmax(np.abs(mean[head])):
                around = mean[head] - spread[head], mean[head] + spread[head]
                axis.fill_between(result.distances, *around, color=style["color"], alpha=0.2, linewidth=0)
        if result.bound is not None:
            bound = result.bound.numpy() * np.nanmax(mean)
            axis.plot(result.distances, bound, color=sheet.theme.quiet, linestyle=":", linewidth=1.4, label="bound")
        sheet.reference(axis, x=0)
        axis.set_xlim(result.distances[0], max(result.distances[-1], 0))
        axis.set(xlabel="distance, key − query", ylabel="dot product" if result.quantity == "vectors" else "score")
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, 0), max(high, 0))
        sheet.title(axis, name)
    if any(len(result.mean) > 1 or result.bound is not None for result, _ in found):
        sheet.legend(columns=2 * columns)
    return sheet.finish()


def rotation_bound(frequencies: Tensor, distance: Tensor) -> Tensor:
    """The mean over j of |Σ_{i ≤ j} exp(√-1 · distance · frequency_i)|, relative to distance 0: `[R]`, `[N]` -> `[N]`."""
    sums = torch.polar(torch.ones(()).double(), distance.double()[:, None] * frequencies).cumsum(-1).abs().mean(-1)
    return 2 * sums / (len(frequencies) + 1)
