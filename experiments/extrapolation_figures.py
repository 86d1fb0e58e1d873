"""Plot a study as curves by length, in panels by task and by mechanism of the encodings."""

from pathlib import Path
from typing import Any

import hf_posenc
from hf_posenc.plots.study_curves import LARGEST, NAMES, scale_perplexity
from hf_posenc.serialization.atomic import atomic_file
from hf_posenc.studies.results import Results
from hf_posenc.studies.study import Study
from hf_posenc.studies.tasks import TASKS

FAMILIES = {
    "embed": "additive",
    "rotate": "rotation, scaling",
    "distance_bias": "distance bias",
    "score_bias": "content-dependent or absolute bias",
    "several": "compositions",
}
"""Mechanism -> heading of a column of panels."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#555500", "#000000")
BASELINE = "none"
GREY: dict[str, Any] = {"color": "#888888", "linestyle": "--"}
"""The line style of the baseline."""


def family(label: str, options: dict[str, Any]) -> str:
    """The key of an encoding in FAMILIES. Empty for the baseline, which is in all panels."""
    if label == BASELINE:
        return ""
    kind = hf_posenc.list_encodings().get(options["type"])
    return next((verb for verb in FAMILIES if kind and verb in kind.mechanisms()), "several")


def pyplot_for_files() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_curves(study: Study, results: Results, path: Path) -> None:
    """Plot a row per task and a column per family, with the mean and the range over seeds."""
    pyplot = pyplot_for_files()
    of = {each.label: family(each.label, each.options) for each in study.encodings}
    present = {of[label] for task in results.tasks for label in results.encodings(task) if label in of}
    families = [name for name in FAMILIES if name in present] or ["several"]
    size = (1.2 + 3.3 * len(families), 0.6 + 2.5 * len(results.tasks))
    figure, axes = pyplot.subplots(
        len(results.tasks), len(families), figsize=size, squeeze=False, sharey="row", layout="constrained"
    )
    for row, task in zip(axes, results.tasks, strict=True):
        labels = [label for label in results.encodings(task) if label in of]
        for axis, name in zip(row, families, strict=True):
            draw_lines(axis, results, task, _styles([label for label in labels if of[label] == name], BASELINE in labels))
        scale(row[0], results, task, labels)
        about = f"{task}: {TASKS[task].unit}, L = {results.trained_length(task)}"
        row[0].set_ylabel(f"{about}\n{NAMES.get(TASKS[task].measures[-1], 'perplexity')}", fontsize=9)
    figure.suptitle("Lines: mean over seeds; shaded: range over seeds; vertical line: training length L", fontsize=9)
    for column, name in zip(axes.T, families, strict=True):
        column[0].set_title(FAMILIES[name], fontsize=10)
        column[-1].set_xlabel("test length", fontsize=9)
        entries: dict[str, Any] = {}
        for axis in column:
            entries |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.28), "ncols": 2}
        column[-1].legend(list(entries.values()), list(entries), frameon=False, fontsize=8, **place)
    with atomic_file(path, "wb") as file:
        figure.savefig(file, format=path.suffix.removeprefix("."), dpi=110)
    pyplot.close(figure)


def _styles(labels: list[str], baseline: bool) -> dict[str, dict[str, Any]]:
    """The line styles of a family and of the baseline."""
    styles = {label: {"color": COLOURS[place % len(COLOURS)]} for place, label in enumerate(labels)}
    return styles | ({BASELINE: GREY} if baseline else {})


def draw_lines(axis: Any, results: Results, task: str, styles: dict[str, dict[str, Any]]) -> None:
    """Plot a line per label: the mean over seeds, and the range over seeds as shading, except for the gray baseline."""
    measure, lengths = TASKS[task].measures[-1], results.lengths(task)
    for label, style in styles.items():
        means = [results.mean(task, label, length, measure) for length in lengths]
        own = style is not GREY
        values = [min(mean.mean, LARGEST) for mean in means]
        line = {"marker": "o", "markersize": 3, "linewidth": 1.6, **style}
        axis.plot(lengths, values, label=label, zorder=3 if own else 2, **line)
        if own:
            low, high = ([min(pick(mean.values), LARGEST) for mean in means] for pick in (min, max))
            axis.fill_between(lengths, low, high, color=style["color"], alpha=0.12, linewidth=0)
    axis.axvline(results.trained_length(task), color="#bbbbbb", linewidth=1, zorder=1)
    if measure != "perplexity" and TASKS[task].chance is not None:
        axis.axhline(TASKS[task].chance, color="#bbbbbb", linestyle=":", linewidth=1, zorder=1)
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def scale(axis: Any, results: Results, task: str, labels: list[str]) -> None:
    """Scale a row of panels. Accuracies range from 0 to 1. Perplexities are logarithmic."""
    measure = TASKS[task].measures[-1]
    if measure != "perplexity":
        axis.set_ylim(0, 1.03)
        return
    means = [results.mean(task, label, length, measure).mean for label in labels for length in results.lengths(task)]
    trained = [results.mean(task, label, results.trained_length(task), measure).mean for label in labels]
    scale_perplexity(axis, means, trained)
