"""The results of eval_length.py as tables."""

from typing import Any

import rich.table

from experiments.needles import chance
from experiments.retrieval_by_length import METRICS, Found
from hf_posenc.evaluation.metrics import UNCORRECTED
from hf_posenc.evaluation.perplexity import Perplexity

TITLES = {
    "title": "a title finds its document, one of {documents}: MRR",
    "deep": "a sentence from beyond the first 512 tokens, taken out, finds its document, one of {documents}: MRR",
    "needle": "a fact within the first 512 tokens, among {candidates} copies: R@1",
    "needle beyond": "a fact beyond the first 512 tokens, among {candidates} copies: R@1",
}
ByLength = dict[int, dict[str, Perplexity]]


def level(task: str, settings: dict[str, Any]) -> float:
    """The metric of a task for a random ranking."""
    return chance(settings["candidates" if task.startswith("needle") else "documents"])[METRICS[task] == "mrr"]


def tables(found: Found, perplexities: ByLength, settings: dict[str, Any]) -> list[rich.table.Table]:
    """One table per task: the metric, and below it the difference from the baseline with its 95% interval."""
    made = []
    baseline, scores = settings["baseline"], found.scores()
    differences = found.differences(baseline) if scores else {}
    for task in (task for task in TITLES if task in scores):
        title = f"{TITLES[task].format(**settings)}\nbelow it the difference to {baseline}"
        table = rich.table.Table("method", title=title, caption=UNCORRECTED)
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
        title = f"perplexity of the same tokens of {count} documents\nbelow it the ratio to {other}"
        table = rich.table.Table(
            "model", *(f"windows of\n{length}" for length in perplexities), title=title, caption=UNCORRECTED
        )
        for name in next(iter(perplexities.values())):
            cells = []
            for length, by_model in perplexities.items():
                each = by_model[name]
                limited = "" if each.window == length else f"\nits limit: windows of {each.window}"
                cells.append(f"{each.shown()}\n{each.shown_ratio()}{limited}")
            table.add_row(name, *cells)
        made.append(table)
    return made
