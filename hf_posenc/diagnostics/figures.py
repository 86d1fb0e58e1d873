"""The style of all figures: two themes, one palette, panels, labels, and files.

Diagnostics import this module to draw their results.

Figures are created without pyplot, because its state is shared by all threads and some backends need a display. They also
don't depend on rcParams, which are global. Each artist gets its color and size explicitly.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_posenc._versions import install
from hf_posenc.serialization.atomic import atomic_file

SUFFIXES = (".png", ".svg", ".pdf")
SMALL, NORMAL, LARGE = 7.5, 8.5, 9.5
"""Font sizes in points, readable in print at 100%. SMALL: ticks and line labels. NORMAL: axes and legends. LARGE: titles."""
WIDTH = 7.0
"""The width of a two-column page in inches."""
DPI = 150


@dataclass(frozen=True)
class Theme:
    """Colors of the background (paper), text and axes (ink), reference lines (quiet), grids (faint), and lines."""

    paper: str
    ink: str
    quiet: str
    faint: str
    lines: tuple[str, ...]


LIGHT = Theme(
    paper="#ffffff",
    ink="#1c1f24",
    quiet="#70757d",
    faint="#e3e5e8",
    lines=("#0072b2", "#c84e00", "#12a07a", "#c268a0", "#47204f", "#d99a00"),
)
DARK = Theme(
    paper="#14171c",
    ink="#e9ebee",
    quiet="#9aa0a8",
    faint="#2e333b",
    lines=("#4f9fe8", "#ee7f3c", "#35cfa0", "#d58bd0", "#f0e24a", "#e8ecff"),
)
"""Line colors are close to the palette of Okabe and Ito. Any two are distinguishable with each type of color blindness."""

MAP = "cividis"
"""The colormap of all maps. It goes from dark to light, so color-blind readers and grayscale prints show it correctly."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2, 2, 2)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def require_matplotlib() -> None:
    """Raises ImportError with the install command if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(f"Figures need matplotlib ({error}). Run: {install('plot')}") from None


def checked_path(path: str | os.PathLike[str]) -> Path:
    """The path of a figure. Raises ValueError for an unsupported suffix, or a directory that doesn't exist."""
    given = Path(path)
    if given.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{given} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}.")
    if not given.parent.is_dir():
        raise ValueError(f"{given}: the directory {given.parent} doesn't exist. Create it first.")
    if given.is_dir():
        raise ValueError(f"{given} is a directory. Pass the name of a file.")
    return given


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure as PNG, SVG, or PDF, depending on the suffix. The file appears only when it is complete.

    Raises ValueError for another suffix or a directory that doesn't exist.
    """
    file = checked_path(path)
    form = file.suffix.lower().removeprefix(".")
    # Without a date, equal figures are equal files.
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    from matplotlib import rc_context

    # Publishers reject PDF files with Type 3 fonts, matplotlib's default. There is no other way to choose TrueType fonts.
    with atomic_file(file, "wb") as opened, rc_context({"pdf.fonttype": 42}):
        figure.savefig(opened, format=form, dpi=DPI, metadata=undated)


class Sheet:
    """A figure and its panels, `axes[row, column]`, in one theme.

    size: width and height in inches. **subplots: options of `Figure.subplots`.

    Raises ImportError without matplotlib, and ValueError for an invalid path, before anything is drawn.
    """

    def __init__(
        self,
        size: tuple[float, float],
        rows: int = 1,
        columns: int = 1,
        *,
        dark: bool = False,
        path: str | os.PathLike[str] | None = None,
        **subplots: Any,
    ) -> None:
        require_matplotlib()
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        self.theme = DARK if dark else LIGHT
        self._path = None if path is None else checked_path(path)
        layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
        self.figure: Any = Figure(figsize=size, facecolor=self.theme.paper, edgecolor=self.theme.paper, layout=layout)
        self.axes: Any = self.figure.subplots(rows, columns, squeeze=False, **subplots)
        for axis in self.axes.flat:
            self.dress(axis)

    def dress(self, axis: Any) -> None:
        """Give a panel the theme's colors and sizes, with only the left and bottom axes."""
        axis.set_facecolor(self.theme.paper)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(self.theme.quiet)
        axis.tick_params(which="both", color=self.theme.quiet, labelcolor=self.theme.ink, labelsize=SMALL)
        for label in (axis.xaxis.label, axis.yaxis.label):
            label.set(color=self.theme.ink, fontsize=NORMAL)
        for offset in (axis.xaxis.get_offset_text(), axis.yaxis.get_offset_text()):
            offset.set(color=self.theme.ink, fontsize=SMALL)

    def title(self, axis: Any, text: str, size: float = LARGE) -> None:
        axis.set_title(text, fontsize=size, color=self.theme.ink)

    def line(self, place: int, markers: bool = False) -> dict[str, Any]:
        """The color and dashes, or color and marker, of line number `place`. No two lines differ only in color."""
        color = self.theme.lines[place % len(self.theme.lines)]
        if markers:
            return {"color": color, "linestyle": "-", "marker": MARKERS[place % len(MARKERS)], "markersize": 4.5}
        return {"color": color, "linestyle": DASHES[(place + place // len(self.theme.lines)) % len(DASHES)], "linewidth": 1.6}

    def reference(self, axis: Any, x: float | None = None, y: float | None = None, linestyle: Any = ":") -> Any:
        """A reference line, vertical at x or horizontal at y."""
        draw, at = (axis.axvline, x) if y is None else (axis.axhline, y)
        return draw(at, color=self.theme.quiet, linestyle=linestyle, linewidth=1, zorder=1)

    def grid(self, axis: Any, which: str = "both") -> None:
        axis.grid(axis=which, color=self.theme.faint, linewidth=0.8)
        axis.set_axisbelow(True)

    def heatmap(self, axis: Any, values: Any, low: float | None = None, high: float | None = None, **more: Any) -> Any:
        """A map of values `[rows, columns]`, the first row on top, from dark (low) to light (high). NaN is blank."""
        axis.spines[:].set_visible(False)
        ends = {} if "norm" in more else {"vmin": low, "vmax": high}
        options = {"cmap": MAP, "aspect": "auto", "interpolation": "nearest", **ends, **more}
        return axis.imshow(np.asarray(values), **options)

    def cells(self, axis: Any, image: Any, texts: Sequence[Sequence[str]], size: float = SMALL) -> None:
        """Write a text in each cell of a map, dark on light cells and light on dark cells."""
        shades = image.cmap(image.norm(image.get_array()))[..., :3] @ (0.299, 0.587, 0.114)
        for row, line in enumerate(texts):
            for column, text in enumerate(line):
                color = "#ffffff" if shades[row, column] < 0.45 else "#000000"
                axis.text(column, row, text, ha="center", va="center", fontsize=size, color=color, linespacing=1.1)

    def layers_by_heads(self, axis: Any, values: np.ndarray, form: str, high: float) -> Any:
        """A map of `[layers, H]` from 0 to `high`. Its cells show their numbers if there are at most 96 cells."""
        image = self.heatmap(axis, values, 0, high)
        if values.size <= 96:
            self.cells(axis, image, [[f"{value:{form}}" for value in row] for row in values], SMALL - 1.5)
        for ticks, count in ((axis.set_xticks, values.shape[1]), (axis.set_yticks, values.shape[0])):
            shown = range(0, count, max(1, count // 6))
            ticks(shown, [str(each) for each in shown])
        axis.set_ylabel("layer")
        axis.tick_params(length=0)
        return image

    def colorbar(self, image: Any, axes: Any, label: str, **more: Any) -> Any:
        """A color bar next to these panels."""
        bar = self.figure.colorbar(image, ax=axes, **more)
        self.dress(bar.ax)
        bar.outline.set_visible(False)
        bar.set_label(label, color=self.theme.ink, fontsize=NORMAL)
        return bar

    def annotate_colorbar(self, bar: Any, value: float, text: str) -> None:
        """Mark a value on the bar of `colorbar`."""
        bar.ax.axhline(value, color=self.theme.lines[1], linewidth=2)
        bar.ax.annotate(
            text,
            (0, value),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            rotation=90,
            fontsize=SMALL - 1,
            color=self.theme.ink,
        )

    def length_axis(self, axis: Any, lengths: Sequence[int], label: str = "tokens") -> None:
        """A logarithmic axis of lengths. Each has a label, but if two labels would overlap, only the longer length has one."""
        axis.set_xscale("log", base=2)
        shown = [
            length for length, after in zip(lengths, [*lengths[1:], None], strict=True) if not after or after > 1.2 * length
        ]
        axis.set_xticks(shown, [str(length) for length in shown])
        axis.minorticks_off()
        axis.set_xlabel(label)
        margin = max(2**0.18, (lengths[-1] / lengths[0]) ** 0.05)
        axis.set_xlim(lengths[0] / margin, lengths[-1] * margin)

    def legend(self, entries: dict[str, Any] | None = None, columns: int = 3, loc: str = "outside lower center") -> Any:
        """One legend below all panels. entries: label -> line. By default, all labeled lines, with each label once."""
        if entries is None:
            entries = {}
            for axis in self.axes.flat:
                for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                    entries.setdefault(label, handle)
        return self.figure.legend(
            list(entries.values()),
            list(entries),
            loc=loc,
            ncols=min(columns, len(entries)),
            frameon=False,
            fontsize=NORMAL,
            labelcolor=self.theme.ink,
            handlelength=3.2,
        )

    def name_lines(self, names: Sequence[str]) -> None:
        """A legend of the lines. If there is only one, its name becomes the title."""
        if len(names) == 1:
            self.heading(names[0])
        else:
            self.legend(columns=3)

    def heading(self, text: str, size: float = LARGE + 1) -> None:
        """The title of the whole figure."""
        self.figure.suptitle(text, fontsize=size, color=self.theme.ink)

    def finish(self) -> Any:
        """Save the figure if there is a path, and return it."""
        if self._path is not None:
            save(self.figure, self._path)
        return self.figure


def error_bars(values: Iterable[tuple[float, float, float]]) -> list[list[float]]:
    """The lower and upper lengths of error bars. values: triples of a value and the ends of its interval.

    Rounding can put a value outside an interval of length 0.
    """
    return [[max(0.0, value - low) for value, low, _ in values], [max(0.0, high - value) for value, _, high in values]]


def panels(axes: Any, count: int) -> Iterator[Any]:
    """The first `count` panels of a sheet, row by row. Hides the others."""
    for place, axis in enumerate(axes.flat):
        axis.set_visible(place < count)
        if place < count:
            yield axis


def selected(what: str, given: Sequence[int] | None, count: int, most: int) -> list[int]:
    """The indices of heads, layers, or columns to show: `given`, or up to `most` at equal steps from first to last.

    Raises ValueError for an index that doesn't exist.
    """
    if given is None:
        steps = max(1, min(most, count) - 1)
        return sorted({round(place * (count - 1) / steps) for place in range(min(most, count))})
    if not given:
        raise ValueError(f"{what} is empty. Choose one or more of 0 to {count - 1}.")
    if wrong := [each for each in given if not 0 <= each < count]:
        raise ValueError(f"{what}={wrong[0]} doesn't exist. Choose from 0 to {count - 1}.")
    return list(given)
