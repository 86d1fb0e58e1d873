"""What eval_length.py measured, as tables and as figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from evaluation.lengths import METRICS, Found
from evaluation.needles import chance
from evaluation.perplexity import Perplexity

OURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Colours of Okabe and Ito's palette, which colour-blind readers can tell apart: one for each model but the first."""
TITLES = {
    "title": "a title finds its document, one of {documents}: MRR",
    "deep": "a sentence from behind the first 512 tokens, taken out, finds its document, one of {documents}: MRR",
    "needle": "a fact within the first 512 tokens, among {candidates} copies: R@1",
    "needle beyond": "a fact behind the first 512 tokens, among {candidates} copies: R@1",
}
SHORT = {
    "title": "by title: MRR",
    "deep": "by a sentence from behind 512: MRR",
    "needle": "a fact within 512: R@1",
    "needle beyond": "a fact behind 512: R@1",
}

ByLength = dict[int, dict[str, Perplexity]]


def level(task: str, settings: dict[str, Any]) -> float:
    """The metric of a task for a random order."""
    return chance(settings["candidates" if task.startswith("needle") else "documents"])[METRICS[task] == "mrr"]


def tables(found: Found, perplexities: ByLength, settings: dict[str, Any]) -> list[Table]:
    """One table for each task: the metric, and below it the difference to the baseline with its 95 % interval."""
    made = []
    baseline, scores = settings["baseline"], found.scores()
    differences = found.differences(baseline) if scores else {}
    for task in (task for task in TITLES if task in scores):
        title = f"{TITLES[task].format(**settings)}\nbelow it the difference to {baseline} [95 %]"
        table = Table("method", title=title)
        for length, by_name in scores[task].items():
            table.add_column(f"{length}\nN = {next(iter(by_name.values())).queries}", justify="right")
        for name in dict.fromkeys(name for by_name in scores[task].values() for name in by_name):
            cells = []
            for length, by_name in scores[task].items():
                difference = differences[task][length].get(name)
                cells.append(
                    f"{getattr(by_name[name], METRICS[task]):.3f}" + (f"\n{difference.shown()}" if difference else "\n")
                )
            table.add_row(name, *cells)
        table.add_row("chance", *[f"{level(task, settings):.3f}"] * len(scores[task]))
        made.append(table)
    if perplexities:
        count = next(iter(next(iter(perplexities.values())).values())).documents
        other = settings["perplexity_baseline"]
        title = f"perplexity of the same tokens of {count} documents [95 %]\nbelow it the ratio to {other}"
        table = Table("model", *(f"windows of\n{length}" for length in perplexities), title=title)
        for name in next(iter(perplexities.values())):
            cells = []
            for length, by_model in perplexities.items():
                each = by_model[name]
                limited = "" if each.window == length else f"\nits limit: windows of {each.window}"
                cells.append(f"{each.shown()}\n{each.shown_ratio()}{limited}")
            table.add_row(name, *cells)
        made.append(table)
    return made


def shown_methods(names: Sequence[str], models: Sequence[str], baseline: str) -> dict[str, dict[str, Any]]:
    """The methods that figures show, with the style of their lines, ours last: the baseline and the first model's mean of
    chunks in grey, and every other model as it is, or, where it is limited, truncated."""
    first = models[0]
    styles: dict[str, dict[str, Any]] = {}
    if baseline in names:
        styles[baseline] = {"color": "#777777", "linestyle": "--", "linewidth": 1.4}
    for name in names:
        if name == first or (name.startswith(f"{first}, chunked by ") and name.endswith(", mean")):
            styles.setdefault(name, {"color": "#777777", "linestyle": "-", "linewidth": 1.4})
    for number, model in enumerate(models[1:]):
        own = next((name for name in names if name == model), None)
        own = own or next((name for name in names if name.startswith(f"{model}, truncated at ")), None)
        if own:
            styles.setdefault(own, {"color": OURS[number % len(OURS)], "linestyle": "-", "linewidth": 2.4})
    return styles


def draw(found: Found, perplexities: ByLength, settings: dict[str, Any], path: Path) -> None:
    """A column for each task: above the metric, below the difference to the baseline with its 95 % interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scores = found.scores()
    differences = found.differences(settings["baseline"]) if scores else {}
    columns = [*(task for task in TITLES if task in scores), *(["perplexity"] if perplexities else [])]
    figure, axes = pyplot.subplots(
        2, len(columns), figsize=(max(5.0, 3.4 * len(columns)), 5.6), squeeze=False, sharex="col", layout="constrained"
    )
    for (above, below), task in zip(axes.T, columns, strict=True):
        baseline = settings["perplexity_baseline" if task == "perplexity" else "baseline"]
        if task == "perplexity":
            names = list(next(iter(perplexities.values())))
            points = {name: [(length, by[name].perplexity) for length, by in perplexities.items()] for name in names}
            gaps = {
                name: [(length, by[name].ratio, by[name].ratio_interval) for length, by in perplexities.items()]
                for name in names
                if name != baseline
            }
            zero, title, lower = 1.0, "perplexity, sliding windows", f"ratio to {baseline}"
        else:
            by_length = scores[task]
            names = list(next(iter(by_length.values())))
            points = {name: [(length, getattr(by[name], METRICS[task])) for length, by in by_length.items()] for name in names}
            gaps = {
                name: [(length, by[name].value, by[name].interval) for length, by in differences[task].items()]
                for name in names
                if name != baseline
            }
            zero, title, lower = 0.0, SHORT[task], "difference to the dashed line"
            above.axhline(level(task, settings), color="#bbbbbb", linestyle=":", linewidth=1)
            above.set_ylim(0, 1.04)
        styles = shown_methods(names, settings["models"], baseline)
        for place, (name, style) in enumerate(styles.items()):
            above.plot(*zip(*points[name], strict=True), marker="o", markersize=3.5, label=name, zorder=2 + place, **style)
            if name in gaps:
                x = [length * 1.04 ** (place - len(styles) / 2) for length, _, _ in gaps[name]]
                y = [value for _, value, _ in gaps[name]]
                # Where all questions have one answer, the interval is a point, which rounding may put beside the value.
                errors = [
                    [max(0.0, value - low) for _, value, (low, _) in gaps[name]],
                    [max(0.0, high - value) for _, value, (_, high) in gaps[name]],
                ]
                below.errorbar(
                    x, y, yerr=errors, marker="o", markersize=3.5, capsize=2.5, elinewidth=1.2, zorder=2 + place, **style
                )
        below.axhline(zero, color="#777777", linestyle="--", linewidth=1.4)
        above.set_title(title, fontsize=9)
        below.set_title(lower, fontsize=9)
        below.set_xscale("log", base=2)
        ticks = [length for length, _ in next(iter(points.values()))]
        below.set_xticks(ticks, [str(length) for length in ticks])
        below.minorticks_off()
        below.set(xlabel="tokens", xlim=(ticks[0] * 0.85, ticks[-1] * 1.18))
        for axis in (above, below):
            axis.spines[["top", "right"]].set_visible(False)
    entries = {label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_heat(found: Found, settings: dict[str, Any], path: Path) -> None:
    """A heat map for each of the methods that `draw` shows: R@1 by length and depth, with the number of questions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heat = found.heat()
    names = list(shown_methods(list(heat), settings["models"], settings["baseline"]))
    lengths, depths = list(next(iter(heat.values()))), settings["depths"]
    figure, axes = pyplot.subplots(
        1,
        len(names),
        figsize=(1.2 + len(names) * (1.1 + 0.65 * len(lengths)), 1.6 + 0.5 * depths),
        squeeze=False,
        layout="constrained",
    )
    for axis, name in zip(axes[0], names, strict=True):
        values = [[heat[name][length][part]["score"].recall_at_1 for length in lengths] for part in range(depths)]
        image = axis.imshow(values, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        for part in range(depths):
            for column, length in enumerate(lengths):
                value, count = values[part][column], heat[name][length][part]["score"].queries
                colour = "white" if value < 0.6 else "black"
                axis.text(column, part, f"{value:.2f}\nn={count}", ha="center", va="center", fontsize=7, color=colour)
        axis.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        edges = [f"{100 * part // depths}–{100 * (part + 1) // depths} %" for part in range(depths)]
        axis.set_yticks(range(depths), edges if axis is axes[0][0] else [""] * depths)
        axis.set_xlabel("tokens")
        axis.set_title(name, fontsize=9)
    axes[0][0].set_ylabel("depth of the fact")
    figure.colorbar(image, ax=axes[0], label=f"R@1; chance {chance(settings['candidates'])[0]:.2f}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
