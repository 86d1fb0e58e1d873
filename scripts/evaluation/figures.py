"""The scores of eval_length.py as tables and as a figure."""

import itertools
from pathlib import Path
from typing import Any

from rich.table import Table

from evaluation.lengths import Scores
from evaluation.needles import chance

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""
TASKS = {
    "retrieval": ("mrr", "retrieval of {documents} documents by their summary: MRR", "documents"),
    "needle": ("recall_at_1", "a fact within the first 512 tokens, among {candidates}: R@1", "candidates"),
    "needle beyond": ("recall_at_1", "a fact behind the first 512 tokens, among {candidates}: R@1", "candidates"),
}
"""Task -> the metric shown, the title, and the setting that says among how many."""


def tables(results: Scores, settings: dict[str, Any]) -> list[Table]:
    """One table for each task; the last row is the level of chance."""
    made = []
    for task, (metric, title, among) in TASKS.items():
        if not results[task]:
            continue
        table = Table("method", title=title.format(**settings))
        names = list(dict.fromkeys(name for by_name in results[task].values() for name in by_name))
        for length, by_name in results[task].items():
            table.add_column(f"{length} [95 %]\nN = {next(iter(by_name.values())).queries}", justify="right")
        for name in names:
            found = (by_name.get(name) for by_name in results[task].values())
            table.add_row(name, *(each.shown(metric) if each else "" for each in found))
        level = chance(settings[among])[metric == "mrr"]
        table.add_row("chance", *[f"{level:.3f}"] * len(results[task]))
        made.append(table)
    return made


def draw(results: Scores, settings: dict[str, Any], path: Path) -> None:
    """One panel for each task; bands are 95 % intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(TASKS), figsize=(13, 4.2), sharey=True, constrained_layout=True)
    names = list(dict.fromkeys(name for task in TASKS for by_name in results[task].values() for name in by_name))
    styles = dict(zip(names, itertools.product(("-", "--", ":", "-."), PALETTE), strict=False))
    for axis, (task, (metric, title, among)) in zip(axes, TASKS.items(), strict=True):
        for name in names:
            points = [(length, by_name[name]) for length, by_name in results[task].items() if name in by_name]
            if points:
                x = [length for length, _ in points]
                (line, colour) = styles[name]
                low, high = zip(*(getattr(found, f"{metric}_interval") for _, found in points), strict=True)
                axis.plot(x, [getattr(found, metric) for _, found in points], line, marker="o", color=colour, label=name)
                axis.fill_between(x, low, high, color=colour, alpha=0.12)
        level = chance(settings[among])[metric == "mrr"]
        axis.axhline(level, color="grey", linestyle=":", linewidth=1)
        axis.annotate("chance", (1, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="grey")
        axis.set_xscale("log", base=2)
        axis.set_xticks(settings["lengths"], [str(length) for length in settings["lengths"]])
        axis.set(
            title=title.format(**settings),
            xlabel="tokens",
            ylim=(0, 1.04),
            xlim=(settings["lengths"][0] * 0.85, settings["lengths"][-1] * 1.18),
        )
        axis.title.set_fontsize(9)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*_legend(axes), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _legend(axes) -> tuple[list, list]:
    entries = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    return list(entries.values()), list(entries)
