"""Figures of additive encodings: heat maps of the vectors, single columns, and dot products by distance.

Shapes: L positions, D features.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from hf_posenc.diagnostics.encoding_input import label, vectors_of
from hf_posenc.diagnostics.figures import NORMAL, SMALL, WIDTH, Sheet, selected
from hf_posenc.diagnostics.registry import Dark, Encoding, Help, HiddenSize, Length, Path, figure


@figure("vectors", example="sinusoidal --option base=100", caption="Vectors")
def vectors(
    encoding: Encoding, *, length: Length = 128, hidden_size: HiddenSize = 128, dark: Dark = False, path: Path = None
) -> Any:
    """Draw the vectors that an encoding adds, position × feature.

    Args:
        encoding: an additive encoding, as a name, a dict `{"type": name, **options}`, or a module. A module keeps its own
            `hidden_size`.

    Raises:
        ValueError: the encoding adds no vectors.
    """
    values = vectors_of(encoding, length, hidden_size)
    sheet = Sheet((WIDTH * 0.72, 3.6), dark=dark, path=path)
    axis = sheet.axes[0, 0]
    image = sheet.heatmap(axis, values)
    axis.set(xlabel="feature", ylabel="position")
    sheet.title(axis, f"{label(encoding)}: the vectors of {length} positions")
    sheet.colorbar(image, axis, "value")
    return sheet.finish()


@figure("vectors", example="--column 0 --column 8", caption="Some columns of the vectors")
def waves(
    encoding: Encoding = "sinusoidal",
    *,
    columns: Annotated[Sequence[int] | None, Help("A feature, from 0. Can be repeated.", "six of them")] = None,
    length: Length = 64,
    hidden_size: HiddenSize = 32,
    dark: Dark = False,
    path: Path = None,
) -> Any:
    """Draw single columns of the vectors over the positions: waves whose frequency falls from column to column.

    Args:
        encoding: as for `vectors`.
        columns: features, from 0. Default: six features at equal steps, the last at five eighths of the width.

    Raises:
        ValueError: the encoding adds no vectors, or has no such column.
    """
    values = vectors_of(encoding, length, hidden_size)
    width = values.shape[1]
    columns = selected("columns", range(0, width, max(1, width // 8))[:6] if columns is None else columns, width, 6)
    sheet = Sheet((WIDTH * 0.85, 0.8 + 0.62 * len(columns)), len(columns), dark=dark, path=path, sharex=True, sharey=True)
    low, high = values[:, columns].min(), values[:, columns].max()
    room = 0.12 * (high - low or 1)
    for place, (axis, column) in enumerate(zip(sheet.axes[:, 0], columns, strict=True)):
        is_last = place == len(columns) - 1
        sheet.reference(axis, y=0)
        axis.plot(values[:, column], color=sheet.theme.lines[0], linewidth=1.4, marker="o", markersize=2)
        axis.set(xlim=(0, length - 1), ylim=(low - room, high + room))
        style = {"transform": axis.transAxes, "va": "center", "color": sheet.theme.ink, "fontsize": SMALL}
        axis.text(1.01, 0.5, f"column {column}", **style)
        axis.spines["bottom"].set_visible(is_last)
        axis.tick_params(axis="x", length=3 if is_last else 0)
    sheet.axes[-1, 0].set_xlabel("position")
    sheet.title(sheet.axes[0, 0], f"{label(encoding)}: some of its {width} columns")
    return sheet.finish()


@figure("vectors", example="sinusoidal", caption="Dot products of the vectors")
def similarity(
    encoding: Encoding, *, length: Length = 128, hidden_size: HiddenSize = 128, dark: Dark = False, path: Path = None
) -> Any:
    """Draw the dot products of an encoding's vectors, of all pairs of positions and by distance.

    The right panel shows the mean over all pairs at each distance, with a band from the minimum to the maximum. Where there is
    no band, the product depends only on the distance.

    Args:
        encoding: as for `vectors`.

    Raises:
        ValueError: the encoding adds no vectors.
    """
    values = vectors_of(encoding, length, hidden_size)
    products = values @ values.T
    distances = range(1 - length, length)
    found = [products.diagonal(distance) for distance in distances]
    sheet = Sheet((WIDTH, 3.2), 1, 2, dark=dark, path=path, width_ratios=(1, 1.15))
    left, right = sheet.axes[0]
    image = sheet.heatmap(left, products, aspect="equal")
    left.set(xlabel="position", ylabel="position")
    sheet.title(left, "of all pairs")
    sheet.colorbar(image, left, "dot product", shrink=0.85)
    color = sheet.theme.lines[0]
    band = [each.min() for each in found], [each.max() for each in found]
    right.fill_between(distances, *band, color=color, alpha=0.25, linewidth=0, label="all pairs")
    right.plot(distances, [each.mean() for each in found], color=color, linewidth=1.6, label="mean")
    right.set(xlabel="distance", ylabel="dot product", xlim=(1 - length, length - 1))
    right.set_ylim(bottom=min(0.0, right.get_ylim()[0]))
    sheet.reference(right, x=0)
    right.legend(frameon=False, labelcolor=sheet.theme.ink, fontsize=NORMAL, loc="upper right")
    sheet.title(right, "by distance")
    sheet.heading(f"{label(encoding)}: dot products of positions")
    return sheet.finish()
