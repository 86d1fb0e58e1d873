"""The figure of compare.json, the record of `hf-posenc compare`: scores by length."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from hf_posenc.diagnostics.figures import NORMAL, SMALL, WIDTH, Sheet, panels
from hf_posenc.diagnostics.registry import Dark, Help, Path, figure

BASELINE = "none"
"""The encoding whose line is gray and dashed."""
PANELS = {"one": 1, "two": 3}
"""Columns of a page -> panels per row."""
AXIS, CHARACTER = 0.6, 0.075
"""The width of a panel's vertical axis, and of a character of its title, in inches."""
ONE_COLUMN = 3.4
"""The width of one column of a two-column page in inches."""
NAMES = {"exact": "exact match", "tokens": "token accuracy"}
WORST, LARGEST = 4.0, 1e6
"""Perplexities are drawn up to WORST times the minimum, or up to the largest at L. Infinite ones count as LARGEST."""
PARTS = ("models", "rows", "table")


@figure("record", example="scripts/results/alibi.json")
def study(
    record: Mapping[str, Any],
    *,
    metric: Annotated[
        str | None, Help("Metric of all panels: exact, tokens, accuracy, perplexity, or a custom one.", "the last of each task")
    ] = None,
    width: Annotated[Literal["one", "two"], Help("Width of the figure in columns of a two-column page.")] = "two",
    dark: Dark = False,
    path: Path = None,
) -> Any:
    """Draw the scores of a study by length, as measured by `hf-posenc compare`.

    Each model and task has a panel. Lines are means over seeds, and shaded areas are ranges over seeds. A vertical line marks
    the training length L. A dotted line marks chance. An encoding has the same line in all panels.

    Args:
        record: compare.json of `hf-posenc compare`.
        metric: the metric of all panels, or None for the last metric of each task. Tasks without it are omitted.
        width: "one" or "two" columns, 3.4 or 7 inches.

    Raises:
        ValueError: this isn't such a record, no task has the metric, or the width isn't available.
    """
    _check(record, width)
    found = _panels(record, metric)
    labels = list(dict.fromkeys(row["encoding"] for panel in found for row in panel.rows))
    columns = min(PANELS[width], len(found))
    rows = math.ceil(len(found) / columns)
    inches = ONE_COLUMN if width == "one" else WIDTH
    in_legend = max(1, int(inches / 1.7))
    size = (inches, 0.55 + 2.1 * rows + 0.2 * math.ceil(len(labels) / in_legend))
    sheet = Sheet(size, rows, columns, dark=dark, path=path)
    styles = styles_of(sheet, labels)
    for axis, panel in zip(panels(sheet.axes, len(found)), found, strict=True):
        panel.draw(sheet, axis, styles, int((inches / columns - AXIS) / CHARACTER))
    sheet.legend(columns=in_legend)
    return sheet.finish()


class Panel:
    """The scores of one model, task, and metric."""

    def __init__(self, record: Mapping[str, Any], model: str, task: str, metric: str) -> None:
        where = {"model": model, "task": task, "metric": metric}
        self.model, self.task, self.metric = model, task, metric
        self.about = record["models"][model]["tasks"][task]
        self.rows = [row for row in record["table"] if where.items() <= row.items()]
        self.values = [row for row in record["rows"] if where.items() <= row.items()]

    def draw(self, sheet: Sheet, axis: Any, styles: dict[str, dict[str, Any]], characters: int) -> None:
        """Draw the panel. characters: the length of a line of its title."""
        lengths = sorted({row["length"] for row in self.rows})
        means = {label: [self._mean(label, length) for length in lengths] for label in styles if self._has(label)}
        for label, line in means.items():
            axis.plot(lengths, line, label=label, zorder=2 if label == BASELINE else 3, **styles[label])
            seeds = [self._seeds(label, length) for length in lengths]
            if label != BASELINE and len(seeds[0]) > 1:
                low, high = [min(each) for each in seeds], [max(each) for each in seeds]
                axis.fill_between(lengths, low, high, color=styles[label]["color"], alpha=0.12, linewidth=0)
        trained = self.about["length"]
        sheet.reference(axis, x=trained, linestyle="-")
        if self.about["chance"] is not None and self.metric != "perplexity":
            sheet.reference(axis, y=self.about["chance"])
        sheet.length_axis(axis, lengths, f"test length in {self.about['unit']}")
        if self.metric == "perplexity":
            at_trained = [line[lengths.index(trained)] for line in means.values()] if trained in lengths else []
            scale_perplexity(axis, [value for line in means.values() for value in line], at_trained)
        elif self.metric in ("exact", "tokens", "accuracy"):
            axis.set_ylim(0, 1.03)
        axis.set_ylabel(NAMES.get(self.metric, self.metric))
        sheet.title(axis, _wrapped(", ".join(filter(None, (self.model, self.task))), characters), NORMAL)

    def _has(self, label: str) -> bool:
        return any(row["encoding"] == label for row in self.rows)

    def _mean(self, label: str, length: int) -> float:
        row = next(row for row in self.rows if (row["encoding"], row["length"]) == (label, length))
        return LARGEST if row["mean"] is None else min(row["mean"], LARGEST)

    def _seeds(self, label: str, length: int) -> list[float]:
        rows = (row for row in self.values if (row["encoding"], row["length"]) == (label, length))
        return [LARGEST if row["value"] is None else min(row["value"], LARGEST) for row in rows]


def _panels(record: Mapping[str, Any], metric: str | None) -> list[Panel]:
    found, known = [], dict[str, None]()
    for model, task in dict.fromkeys((row["model"], row["task"]) for row in record["table"]):
        metrics = record["models"][model]["tasks"][task]["metrics"]
        known |= dict.fromkeys(metrics)
        if metric is None or metric in metrics:
            found.append(Panel(record, model, task, metric or metrics[-1]))
    if not found:
        raise ValueError(f"No task of the record has the metric {metric!r}. It has {', '.join(known)}.")
    return found


def _check(record: Mapping[str, Any], width: str) -> None:
    if width not in PANELS:
        raise ValueError(f"width={width!r} isn't available. Use 'one' or 'two'.")
    if not isinstance(record, Mapping) or any(part not in record for part in PARTS):
        raise ValueError("This isn't a record of hf-posenc compare. Pass the compare.json that it wrote.")
    if not record["table"]:
        raise ValueError("The record has no finished run. Run hf-posenc compare again to resume the study.")


def _wrapped(text: str, width: int) -> str:
    """A title in lines of at most `width` characters, divided at spaces and slashes, so that nothing is clipped."""
    lines = [""]
    for word in text.replace("/", "/\0").replace(" ", " \0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)


def styles_of(sheet: Sheet, labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The line of each encoding. The baseline is gray."""
    others = [label for label in labels if label != BASELINE]
    styles = {
        label: {**sheet.line(place, markers=True), "linewidth": 1.4, "markersize": 3.5} for place, label in enumerate(others)
    }
    gray = {"color": sheet.theme.quiet, "linestyle": "--", "linewidth": 1.4}
    return styles | ({BASELINE: gray} if BASELINE in labels else {})


def scale_perplexity(axis: Any, means: Sequence[float], at_trained: Sequence[float]) -> None:
    """A logarithmic axis up to WORST times the minimum. Every line starts within the panel, but can leave it."""
    finite = [mean for mean in means if mean < LARGEST] or [1.0]
    axis.set_yscale("log")
    most = max([WORST * min(finite), *(1.1 * mean for mean in at_trained if mean < LARGEST)])
    axis.set_ylim(0.97 * min(finite), min(most, 1.1 * max(finite)))
    axis.minorticks_off()
    ticks = _ticks(*axis.get_ylim())
    axis.set_yticks(ticks, [f"{tick:.4g}" for tick in ticks], fontsize=SMALL)


def _ticks(low: float, high: float) -> list[float]:
    """At most six round numbers within an axis of perplexities."""
    from matplotlib.ticker import MaxNLocator

    rounds = [base * 10.0**power for power in range(0, 7) for base in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)]
    inside = [tick for tick in rounds if low <= tick <= high]
    if len(inside) < 2:  # the axis is short
        return [tick for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high]
    return inside[:: math.ceil(len(inside) / 6)]
