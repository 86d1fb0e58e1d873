"""What encodings do to the scores of attention: maps of heads, and curves by distance.

Shapes: L positions, H heads, N distances.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from hf_posenc import diagnostics
from hf_posenc.diagnostics import Decay, Similarity
from hf_posenc.encodings import encoding_class
from hf_posenc.encodings.alibi import UNSEEN
from hf_posenc.plots.absolute import Path
from hf_posenc.plots.drawn import Encoding, chosen, label, sizes_of
from hf_posenc.plots.style import SMALL, WIDTH, Sheet, panels

MAPS, LINES = 8, 4
"""How many heads are shown by default at most: each has a map, or a line."""
YLABELS = {"vectors": "dot product", "scores": "score"}


def bias(
    encoding: Encoding | Similarity,
    *,
    length: int = 48,
    num_attention_heads: int = 8,
    causal: bool | None = None,
    heads: Sequence[int] | None = None,
    dark: bool = False,
    path: Path | None = None,
) -> Any:
    """What an encoding adds to the scores, a map of query × key for each head; of one that rotates, the score of a query and a
    key whose features are all 1, with the bias of one that does both. What a query doesn't see is blank.

    encoding: a name, a dict `{"type": name, **options}`, a module, which keeps its own sizes, or what `diagnostics.similarity`
        gave.
    causal: whether queries see no later keys; by default for encodings of decoders.
    heads: which are shown, from 0; without, up to 8 of them at equal steps.

    Returns a matplotlib Figure. Raises ValueError for an encoding that does nothing to scores, or heads that aren't there;
    ImportError without matplotlib.
    """
    if isinstance(encoding, Similarity):
        found, name = encoding, encoding.encoding
    else:
        sizes = sizes_of(encoding, **_sizes(num_attention_heads, causal))
        found, name = diagnostics.similarity(encoding, length, quantity="scores", **sizes), label(encoding)
    values = _seen(found.matrix)
    shown = _heads(heads, len(values), MAPS)
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    size = (1.2 + 1.5 * columns, 0.7 + 1.75 * rows) if len(shown) > 1 else (3.6, 3.2)
    sheet = Sheet(size, rows, columns, dark=dark, path=path, sharex=True, sharey=True)
    low, high = np.nanmin(values[shown]), np.nanmax(values[shown])
    for axis, head in zip(panels(sheet.axes, len(shown)), shown, strict=True):
        image = sheet.heat(axis, values[head], low, high, aspect="equal")
        name_of_map = "all heads" if len(values) == 1 else f"head {head}"
        ends = f"{np.nanmin(values[head]):.3g} to {np.nanmax(values[head]):.3g}".replace("-", "−")
        sheet.title(axis, f"{name_of_map}\n{ends}", SMALL)
        axis.tick_params(length=2)
    for axis in sheet.axes[:, 0]:
        axis.set_ylabel("query")
    sheet.below("key")
    turns = _turns(found)
    sheet.heading(f"{name}: {'score' if turns else 'bias'}")
    sheet.scale(image, list(sheet.axes.flat), "score" if turns else "added to the score", aspect=15 * rows)
    return sheet.done()


def decay(
    encodings: Sequence[Encoding | Decay],
    *,
    length: int = 128,
    num_attention_heads: int = 8,
    hidden_size: int = 512,
    causal: bool | None = None,
    heads: Sequence[int] | None = None,
    quantity: Literal["vectors", "scores"] | None = None,
    dark: bool = False,
    path: Path | None = None,
) -> Any:
    """How alike positions are by their distance, a panel for each encoding, a line for each head.

    Shown is the mean over all pairs at a distance, with one standard deviation on either side where pairs differ: of vectors
    that are added to the input their dot product, of a bias itself, of a rotation the score of a query and a key whose features
    are all 1, and, dotted, rope's bound (Su et al., 2021, section 3.4.3), scaled to the score at distance 0.

    encodings: each a name, a dict `{"type": name, **options}`, a module, which keeps its own sizes, or what `diagnostics.decay`
        gave.
    causal: whether queries see no later keys; by default for encodings of decoders.
    heads: which are shown, from 0; without, up to 4 of them at equal steps.
    quantity: "vectors" or "scores", needed of a composition that acts in both ways.

    Returns a matplotlib Figure. Raises ValueError for an encoding that has neither, or heads that aren't there; ImportError
    without matplotlib.
    """
    if isinstance(encodings, str) or not encodings:
        raise ValueError(f"encodings={encodings!r}: give a list of one encoding or more")
    sizes = {"hidden_size": hidden_size, **_sizes(num_attention_heads, causal)}
    found = [
        (each, each.encoding)
        if isinstance(each, Decay)
        else (diagnostics.decay(each, length, quantity=quantity, **sizes_of(each, **sizes)), label(each))
        for each in encodings
    ]
    columns = min(len(found), 3)
    rows = -(-len(found) // columns)
    sheet = Sheet((max(3.6, WIDTH * columns / 3), 0.6 + 2.2 * rows), rows, columns, dark=dark, path=path)
    for axis, (result, name) in zip(panels(sheet.axes, len(found)), found, strict=True):
        mean, spread = _seen(result.mean), result.spread.numpy()
        for place, head in enumerate(_heads(heads, len(mean), LINES)):
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
        axis.set(xlabel="distance, key − query", ylabel=YLABELS[result.quantity])
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, 0), max(high, 0))
        sheet.title(axis, name)
    if any(len(result.mean) > 1 or result.bound is not None for result, _ in found):
        sheet.legend(columns=2 * columns)
    return sheet.done()


def _sizes(num_attention_heads: int, causal: bool | None) -> dict[str, Any]:
    return {"num_attention_heads": num_attention_heads, "causal": causal}


def _seen(values: Any) -> np.ndarray:
    """Without the biases that mean a key isn't seen: NaN."""
    numbers = values.numpy()
    return np.where(np.isfinite(numbers) & (numbers > UNSEEN / 2), numbers, np.nan)


def _turns(found: Similarity) -> bool:
    """Whether the matrix holds scores of turned queries and keys, to which biases may have been added."""
    try:
        return "rotate" in encoding_class(found.encoding).mechanisms()
    except ValueError:  # a result of an encoding that isn't registered here
        return found.cosine is not None


def _heads(given: Sequence[int] | None, count: int, most: int) -> list[int]:
    """The heads that are shown; of an encoding whose heads are alike the one that stands for all."""
    return [0] if count == 1 else chosen("heads", given, count, most)
