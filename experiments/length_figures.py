"""Figures of length.json, the record of scripts/eval_length.py: metrics by length, and needles by length and depth."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.needles import BOUNDARY
from hf_posenc.diagnostics.figures import NORMAL, SMALL, WIDTH, Sheet, error_bars
from hf_posenc.diagnostics.registry import Dark, Path

METRICS = {"title": "mrr", "deep": "mrr", "needle": "recall_at_1", "needle beyond": "recall_at_1"}
"""Task -> the metric in its figures."""
TITLES = {
    "title": "by title: MRR",
    "deep": "by a sentence from\nbeyond 512 tokens: MRR",
    "needle": "a fact within\n512 tokens: R@1",
    "needle beyond": "a fact beyond\n512 tokens: R@1",
    "perplexity": "perplexity,\nsliding windows",
}
PARTS = ("settings", "chance", "scores", "differences", "heat", "perplexity")
AVERAGED = re.compile(r"^chunked by \d+, mean$")
APART = 1.05
"""Horizontal offset between lines of the lower panels, as a factor, so that their error bars don't overlap."""


def lengths(record: Mapping[str, Any], *, dark: Dark = False, path: Path = None) -> Any:
    """Draw how well models do by length, as measured by scripts/eval_length.py.

    Each task has a column. Its upper panel shows the metric by length, and its lower panel the difference to the baseline (for
    perplexity, the ratio) with its 95% interval. Chance is the metric of a random order.

    The lines are the baseline, the first model with averaged chunk embeddings, and every other model. Models with a maximum
    length are truncated.

    Args:
        record: length.json of scripts/eval_length.py.

    Raises:
        ValueError: this isn't such a record, or it has no measured task.
    """
    settings = _checked(record)["settings"]
    tasks = [task for task in TITLES if record["scores"].get(task) or (task == "perplexity" and record[task])]
    if not tasks:
        raise ValueError("The record has no measured task. See --tasks of scripts/eval_length.py.")
    size = (max(0.62 * WIDTH, 0.5 + 2.1 * len(tasks)), 5.2)
    sheet = Sheet(size, 2, len(tasks), dark=dark, path=path, sharex="col")
    entries: dict[str, Any] = {}
    for (above, below), task in zip(sheet.axes.T, tasks, strict=True):
        of_models = task == "perplexity"
        by_length = record["perplexity"] if of_models else record["scores"][task]
        baseline = settings["perplexity_baseline" if of_models else "baseline"]
        columns = sorted(by_length, key=int)
        names = shown(list(by_length[columns[0]]), settings["models"], baseline)
        for place, name in enumerate(names):
            style = _style(sheet, place, name, baseline, settings["models"][0])
            points = [by_length[column][name][task if of_models else METRICS[task]] for column in columns]
            (line,) = above.plot([int(column) for column in columns], points, zorder=2 + place, **style)
            entries[name] = line
            if name != baseline:
                x = [int(column) * APART ** (place - (len(names) - 1) / 2) for column in columns]
                found = [_difference(record, task, column, name) for column in columns]
                below.errorbar(
                    x,
                    [value for value, *_ in found],
                    yerr=error_bars(found),
                    capsize=2.5,
                    elinewidth=1.2,
                    zorder=2 + place,
                    **style,
                )
        if not of_models:
            entries["chance"] = sheet.reference(above, y=chance(record, task))
            above.set_ylim(0, 1.04)
        below.axhline(1 if of_models else 0, color=sheet.theme.quiet, linestyle="--", linewidth=1.4)
        sheet.title(above, TITLES[task], NORMAL)
        sheet.title(below, "ratio to the dashed line" if of_models else "difference from the dashed line", NORMAL)
        sheet.length_axis(below, [int(column) for column in columns])
    sheet.legend(entries, 2 if len(tasks) < 3 else 3)
    return sheet.finish()


def needle(record: Mapping[str, Any], *, dark: Dark = False, path: Path = None) -> Any:
    """Draw how often a fact was found, by length and depth, as measured by scripts/eval_length.py.

    Each method that `lengths` shows has a heat map of R@1 by length and depth in the text. n is the number of questions per
    cell. A dashed line separates lengths up to 512 tokens from longer ones.

    Args:
        record: length.json of scripts/eval_length.py, with the task "needle".

    Raises:
        ValueError: this isn't such a record, or it has no needles.
    """
    settings, heat = _checked(record)["settings"], record["heat"]
    if not heat:
        raise ValueError("The record has no needles. Run scripts/eval_length.py with --tasks needle.")
    names = shown(list(heat), settings["models"], settings["baseline"])
    columns, depths = sorted(next(iter(heat.values())), key=int), settings["depths"]
    size = (1.3 + len(names) * (0.35 + 0.42 * len(columns)), 1.2 + 0.42 * depths)
    sheet = Sheet(size, 1, len(names), dark=dark, path=path, sharey=True)
    for axis, name in zip(sheet.axes[0], names, strict=True):
        cells = [[heat[name][column][part]["score"] for column in columns] for part in range(depths)]
        image = sheet.heatmap(axis, [[cell["recall_at_1"] for cell in row] for row in cells], 0, 1)
        sheet.cells(axis, image, [[f"{cell['recall_at_1']:.2f}" for cell in row] for row in cells], SMALL)
        axis.set_xticks(range(len(columns)), columns)
        axis.set_xlabel("length in tokens")
        axis.tick_params(length=0)
        model, _, method = name.partition(", ")
        sheet.title(axis, f"{model}\n{AVERAGED.sub('averaged chunk embeddings', method)}".strip(), NORMAL)
        within = sum(int(column) <= BOUNDARY for column in columns)
        if 0 < within < len(columns):
            sheet.reference(axis, x=within - 0.5, linestyle="--")
    first = sheet.axes[0, 0]
    first.set_yticks(range(depths), [f"{100 * part // depths}–{100 * (part + 1) // depths} %" for part in range(depths)])
    first.set_ylabel("depth of the fact")
    counts = sorted({part["score"]["queries"] for column in heat.values() for parts in column.values() for part in parts})
    questions = "–".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    bar = sheet.colorbar(image, list(sheet.axes[0]), f"R@1, n = {questions} per cell", aspect=14)
    sheet.annotate_colorbar(bar, chance(record, "needle"), "chance")
    return sheet.finish()


def chance(record: Mapping[str, Any], task: str) -> float:
    """The metric of a task for a random order."""
    return record["chance"]["candidates" if task.startswith("needle") else "documents"][METRICS[task] == "mrr"]


def shown(names: Sequence[str], models: Sequence[str], baseline: str) -> list[str]:
    """The methods in figures: the baseline, the first model with whole texts and averaged chunk embeddings, and every other
    model, truncated if it has no results for whole texts."""
    first = models[0]
    found = [baseline] if baseline in names else []
    found += [name for name in names if name == first or (name.startswith(f"{first}, chunked by ") and name.endswith(", mean"))]
    for model in models[1:]:
        limited = [name for name in names if name.startswith(f"{model}, truncated at ")]
        found += [model] if model in names else limited[:1]
    return list(dict.fromkeys(found))


def _style(sheet: Sheet, place: int, name: str, baseline: str, first: str) -> dict[str, Any]:
    """The line style of a method. The baseline is dashed and gray, the first model is gray, and other models have colors."""
    if name == baseline:
        return {"color": sheet.theme.quiet, "linestyle": "--", "marker": "o", "markersize": 3.5, "linewidth": 1.4}
    if name == first or name.startswith(f"{first}, "):
        return {"color": sheet.theme.quiet, "linestyle": "-", "marker": "x", "markersize": 4.5, "linewidth": 1.4}
    return sheet.line(place - 2 if place > 1 else place, markers=True) | {"linewidth": 1.8}


def _difference(record: Mapping[str, Any], task: str, column: str, name: str) -> tuple[float, float, float]:
    if task == "perplexity":
        found = record["perplexity"][column][name]
        return found["ratio"], *found["ratio_interval"]
    found = record["differences"][task][column][name]
    return found["value"], *found["interval"]


def _checked(record: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(record, Mapping) or (missing := [part for part in PARTS if part not in record]):
        lacks = f"it has no {missing[0]!r}" if isinstance(record, Mapping) else f"it is a {type(record).__name__}"
        raise ValueError(f"This isn't a record of scripts/eval_length.py: {lacks}. Pass the length.json that it wrote.")
    return record
