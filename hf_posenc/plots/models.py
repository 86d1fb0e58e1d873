"""What `hf_posenc.diagnostics` measured of models.

Shapes: L tokens, H heads, N distances.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from hf_posenc.diagnostics import AttentionByDistance, LengthCurve, Probing, ReceptiveField, Result
from hf_posenc.plots.absolute import Path
from hf_posenc.plots.drawn import chosen
from hf_posenc.plots.style import NORMAL, SMALL, WIDTH, Sheet, require_matplotlib

MOST_LAYERS, MOST_HEADS = 4, 6
MEASURES = {
    "loss": "loss, nats per token",
    "masked loss": "loss, nats per masked token",
    "cosine": "cosine with states at the shortest length",
}
R = TypeVar("R", bound=Result)


def probing(
    result: Probing,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    dark: bool = False,
    path: Path | None = None,
) -> Any:
    """Attention where all words are the same, so that position alone decides: a row for each layer, a map of query × key for
    each head, and beneath it the strength of position there, in nats.

    result: of `diagnostics.probing`. layers, heads: which are shown, from 0; without, up to 4 and 6 at equal steps.

    Colours are logarithmic, from a fiftieth of the weight that all pairs would have if position didn't count ("even") to 1.
    Returns a matplotlib Figure. Raises ValueError for another
    result, or layers or heads that aren't there; ImportError without matplotlib.
    """
    require_matplotlib()
    from matplotlib.colors import LogNorm

    values = _checked(result, Probing).attention.numpy()
    rows = chosen("layers", layers, values.shape[0], MOST_LAYERS)
    columns = chosen("heads", heads, values.shape[1], MOST_HEADS)
    size = (1.2 + 1.05 * len(columns), 0.8 + 1.3 * len(rows))
    sheet = Sheet(size, len(rows), len(columns), dark=dark, path=path, sharex=True, sharey=True)
    even = 1 / result.length
    norm = LogNorm(even / 50, 1)
    for line, (layer, row) in enumerate(zip(rows, sheet.axes, strict=True)):
        for head, axis in zip(columns, row, strict=True):
            image = sheet.heat(axis, values[layer, head], norm=norm, aspect="equal")
            axis.tick_params(length=2)
            strength = f"{result.strength[layer, head]:.2f}"
            sheet.title(axis, f"head {head}\n{strength}" if line == 0 else strength, SMALL)
        row[0].set_ylabel(f"layer {layer}")
    sheet.heading(f"{result.model}: attention among {result.length} identical words")
    sheet.below("key (above each map: the strength of position, in nats)")
    bar = sheet.scale(image, list(sheet.axes.flat), "attention weight", extend="min", aspect=12 * len(rows))
    sheet.mark(bar, even, "even")
    return sheet.done()


def attention(
    results: AttentionByDistance | Mapping[str, AttentionByDistance],
    *,
    layers: Sequence[int] | None = None,
    dark: bool = False,
    path: Path | None = None,
) -> Any:
    """Attention by distance on texts: to the left the mean weight of a pair over the heads of a layer, a line for each; to the
    right the mean distance of what each head attends to. A row for each model.

    results: of `diagnostics.attention_by_distance`; of several models, such as before and after a conversion, by name.
    layers: which have a line, from 0; without, up to 4 at equal steps.

    Returns a matplotlib Figure. Raises ValueError for another result or layers that aren't there; ImportError
    without matplotlib.
    """
    named = _named(results, AttentionByDistance)
    sheet = Sheet((WIDTH, 0.6 + 2.4 * len(named)), len(named), 2, dark=dark, path=path, width_ratios=(1.5, 1))
    reach = [result.mean_distance.numpy() for result in named.values()]
    for (left, right), (name, result), distance in zip(sheet.axes, named.items(), reach, strict=True):
        weights = result.weights.numpy().mean(axis=1)
        for place, layer in enumerate(chosen("layers", layers, len(weights), MOST_LAYERS)):
            left.plot(result.distances, weights[layer], label=f"layer {layer}", **sheet.line(place))
        left.set_yscale("log")
        left.set_ylabel("mean weight of a pair")
        sheet.title(left, name)
        image = sheet.heat(right, distance, 0, max(float(np.nanmax(each)) for each in reach))
        if distance.size <= 96:
            sheet.cells(right, image, [[f"{value:.0f}" for value in row] for row in distance], SMALL - 1.5)
        for ticks, count in ((right.set_xticks, distance.shape[1]), (right.set_yticks, distance.shape[0])):
            shown = range(0, count, max(1, count // 6))
            ticks(shown, [str(each) for each in shown])
        right.set(ylabel="layer")
        right.tick_params(length=0)
        sheet.scale(image, right, "mean distance, tokens")
    across, along = (
        [get() for get in gets] for gets in zip(*((a.get_xlim, a.get_ylim) for a in sheet.axes[:, 0]), strict=True)
    )
    for axis in sheet.axes[:, 0]:
        axis.set_xlim(min(low for low, _ in across), max(high for _, high in across))
        axis.set_ylim(min(low for low, _ in along), max(high for _, high in along))
    sheet.axes[-1, 0].set_xlabel("distance in tokens: key − query")
    sheet.axes[-1, 1].set_xlabel("head")
    sheet.legend(columns=MOST_LAYERS)
    return sheet.done()


def receptive_field(
    results: ReceptiveField | Mapping[str, ReceptiveField], *, dark: bool = False, path: Path | None = None
) -> Any:
    """How far away the tokens are on which a state depends: the share of the gradient by distance, and that of all tokens up
    to a distance, with the radius of each share that was asked for.

    results: of `diagnostics.receptive_field`; of several models by name, a line for each.

    Returns a matplotlib Figure. Raises ValueError for another result, ImportError without matplotlib.
    """
    named = _named(results, ReceptiveField)
    sheet = Sheet((WIDTH, 3.2), 1, 2, dark=dark, path=path)
    left, right = sheet.axes[0]
    for place, (name, result) in enumerate(named.items()):
        style = sheet.line(place)
        left.plot(result.distances, result.share.numpy(), label=name, **style)
        cumulative = result.cumulative.numpy()
        right.plot(range(len(cumulative)), cumulative, **style)
        marker = sheet.line(place, markers=True)["marker"]
        right.plot(result.radius, result.shares, color=style["color"], linestyle="none", marker=marker, markersize=5)
        for radius, share in zip(result.radius, result.shares, strict=True) if len(named) == 1 else ():
            right.annotate(
                f"{share:.0%} within {radius}",
                (radius, share),
                xytext=(7, -3),
                textcoords="offset points",
                va="top",
                fontsize=SMALL,
                color=sheet.theme.ink,
            )
    left.set_yscale("log")
    left.set(xlabel="distance in tokens: input − state", ylabel="share of the gradient")
    right.set(xlabel="tokens up to this distance", ylabel="share of the gradient", ylim=(0, 1.03), xlim=(0, None))
    sheet.grid(right, "y")
    sheet.title(left, "by distance", NORMAL)
    sheet.title(right, "all up to a distance", NORMAL)
    _tell(sheet, named)
    return sheet.done()


def length_curve(results: LengthCurve | Mapping[str, LengthCurve], *, dark: bool = False, path: Path | None = None) -> Any:
    """How well a model reads the same tokens behind more and more text: the mean over texts with its standard error.

    results: of `diagnostics.length_curve`; of several models by name, a line for each, all in the same measure.

    Returns a matplotlib Figure. Raises ValueError for other results or several measures, ImportError without matplotlib.
    """
    named = _named(results, LengthCurve)
    measures = {result.measure for result in named.values()}
    if len(measures) > 1:
        raise ValueError(
            f"the models were measured by {' and '.join(sorted(measures))}: draw each measure in a figure of its own"
        )
    sheet = Sheet((WIDTH * 0.7, 3.3), dark=dark, path=path)
    axis = sheet.axes[0, 0]
    for place, (name, result) in enumerate(named.items()):
        style = sheet.line(place, markers=True) | {"linestyle": sheet.line(place)["linestyle"]}
        errors = [error or 0.0 for error in result.error]
        axis.errorbar(result.lengths, result.mean, yerr=errors, capsize=2.5, elinewidth=1.2, label=name, **style)
    sheet.lengths(axis, sorted({length for result in named.values() for length in result.lengths}))
    axis.set_ylabel(MEASURES[measures.pop()])
    _tell(sheet, named)
    return sheet.done()


def _named(results: R | Mapping[str, R], kind: type[R]) -> dict[str, R]:
    if isinstance(results, Mapping):
        if not results:
            raise ValueError(f"no results: give one {kind.__name__} or more")
        return {name: _checked(result, kind) for name, result in results.items()}
    return {getattr(_checked(results, kind), "model", ""): results}


def _tell(sheet: Sheet, named: Mapping[str, Result]) -> None:
    """Which line is which model's; of one model its name above."""
    if len(named) == 1:
        sheet.heading(next(iter(named)))
    else:
        sheet.legend(columns=3)


def _checked(result: Any, kind: type[R]) -> R:
    if not isinstance(result, kind):
        raise ValueError(f"this figure is of a {kind.__name__} of hf_posenc.diagnostics, not of a {type(result).__name__}")
    return result
