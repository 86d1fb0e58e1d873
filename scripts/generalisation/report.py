"""A study's tables and its record."""

from typing import Any

from rich.table import Table

from generalisation import verdict
from generalisation.results import Results
from generalisation.study import Study
from generalisation.tasks import TASKS
from generalisation.verdict import Finding

ENDS = "†"
"""Marks encodings that end at a length: they were given that of the longest test."""
MEASURES = {"exact match": ("exact", "tokens"), "perplexity": ("perplexity",)}
NAMES = {"exact": "exact match of the whole answer", "tokens": "right tokens of the answer", "perplexity": "perplexity"}


def tables(results: Results) -> list[Table]:
    """For each task one table for each measure: the mean over seeds, and its 95 % interval."""
    return [_table(results, task, measure) for task in results.tasks for measure in MEASURES[TASKS[task].measure]]


def _table(results: Results, task: str, measure: str) -> Table:
    own, length = TASKS[task], results.trained_length(task)
    best_first = measure != "perplexity"
    title = f"{task}, trained to L = {length} {own.unit}: {NAMES[measure]}"
    ending = {label for label in results.encodings(task) if results.ends(task, label) is not None}
    counts = {len(results.seeds(task, label)) for label in results.encodings(task)}
    caption = f"mean over {shown_range(counts)} seeds ± half of Student's 95 % interval"
    if measure == "tokens":
        caption += f"; chance {own.chance:.2f}"
    if ending:
        caption += f"\n{ENDS} ends at a length: it was given that of the longest test; positions behind L are untrained"
    table = Table("encoding", title=title, caption=caption)
    lengths = results.lengths(task)
    for tested in lengths:
        table.add_column(f"{tested}\n{tested / length:g} L", justify="right")
    rows = {label: [results.mean(task, label, tested, measure) for tested in lengths] for label in results.encodings(task)}
    second = 2 * length
    order = lengths.index(second) if second in lengths else -1

    def rank(label: str) -> tuple[float, ...]:
        key = rows[label][order].mean, *(mean.mean for mean in rows[label])
        return tuple(-value for value in key) if best_first else key

    for label in sorted(rows, key=rank):
        few = "" if len(results.seeds(task, label)) == max(counts) else f" ({len(results.seeds(task, label))} seeds)"
        mark = f" {ENDS}" if label in ending else ""
        table.add_row(f"{label}{mark}{few}", *(mean.shown() for mean in rows[label]))
    return table


def shown_range(counts: set[int]) -> str:
    return " to ".join(str(count) for count in sorted({min(counts), max(counts)}))


def learned_table(results: Results) -> Table:
    """How many encodings have learned each task at L: what they do beyond says the more."""
    table = Table("task", f"exact match {verdict.LEARNED} or more at L", "others", title="learned at the trained length")
    for task in (task for task in results.tasks if TASKS[task].measure == "exact match"):
        done = verdict.learned(results, task)
        table.add_row(task, ", ".join(done) or "none of them", str(len(results.encodings(task)) - len(done)))
    return table


def verdict_table(found: list[Finding]) -> Table:
    table = Table("claim", "answer", "figures", title=verdict.summary(found), show_lines=True)
    for each in (each for each in found if each.answer != verdict.MISSING):
        table.add_row(f"{each.claim}\n({each.source})", each.answer, each.figures)
    table.caption = "; ".join(f"{answer}: {meant}" for answer, meant in verdict.ANSWERS.items())
    return table


def refused_table(refused: dict[str, str]) -> Table:
    table = Table("encoding", "reason", title="refused by the host, the rest runs on", show_lines=True)
    for label, reason in refused.items():
        table.add_row(label, reason)
    return table


def as_record(study: Study, results: Results, found: list[Finding], failed: dict[str, str]) -> dict[str, Any]:
    """All settings and figures. Scores are lists over the seeds."""
    scores = {
        task: {
            label: {
                "seeds": results.seeds(task, label),
                "max_length": results.ends(task, label),
                "parameters": results.records[task, label, results.seeds(task, label)[0]]["parameters"],
                "by_length": {
                    str(length): {
                        measure: _rounded(results, task, label, length, measure) for measure in MEASURES[TASKS[task].measure]
                    }
                    for length in results.lengths(task)
                },
            }
            for label in results.encodings(task)
        }
        for task in results.tasks
    }
    seconds = [record["cpu_seconds"] for record in results.records.values()]
    return {
        "setup": study.setup,
        "trainings": study.trainings,
        "encodings": {each.label: each.options for each in study.encodings},
        "refused": study.refused,
        "failed": failed,
        "runs": {"planned": len(study.runs()), "finished": len(results.records), "cpu_seconds": round(sum(seconds))},
        "verdict": verdict.as_record(found),
        "scores": scores,
    }


def _rounded(results: Results, task: str, label: str, length: int, measure: str) -> dict[str, Any]:
    mean = results.mean(task, label, length, measure)
    finite = [round(value, 4) if value < float("inf") else None for value in mean.values]
    shown = None if None in finite else round(mean.mean, 4)
    return {"values": finite, "mean": shown, "half_width": None if mean.half is None else round(mean.half, 4)}
