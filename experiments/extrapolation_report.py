"""A study's tables, its record, and the part of a page that is generated from the record."""

from pathlib import Path
from typing import Any

from rich.table import Table

from experiments import extrapolation_verdict as verdict
from experiments.extrapolation_verdict import Finding
from hf_posenc.evaluation import records
from hf_posenc.studies.record import Part, runs_of
from hf_posenc.studies.results import Results
from hf_posenc.studies.tables import ENDS
from hf_posenc.studies.tasks import EXACT_MATCH, TASKS

UNITS = {"lm": "bytes"}
"""Task -> its unit, if the texts determine it."""
MARKERS = "<!-- tables by experiments/extrapolation.py: begin -->", "<!-- tables by experiments/extrapolation.py: end -->"
ON_PAGES = {"exact match": (2,), "accuracy": (2,), "perplexity": (1, 8)}
"""Metric -> lengths shown on the page, as multiples of L."""


def exact_tasks(results: Results) -> list[str]:
    return [task for task in results.tasks if TASKS[task].metric == EXACT_MATCH]


def learned_table(results: Results) -> Table:
    """The encodings that learned each task at L. The more encodings learned it, the more their scores beyond L mean."""
    table = Table("task", f"exact match {verdict.LEARNED} or more at L", "others", title="learned at the trained length")
    for task in exact_tasks(results):
        done = verdict.learned(results, task)
        table.add_row(task, ", ".join(done) or "none of them", str(len(results.encodings(task)) - len(done)))
    return table


def verdict_table(found: list[Finding]) -> Table:
    table = Table("claim", "answer", "figures", title=verdict.summary(found), show_lines=True)
    for each in (each for each in found if each.answer != verdict.MISSING):
        table.add_row(f"{each.claim}\n({each.source})", each.answer, each.figures)
    table.caption = "; ".join(f"{answer}: {meaning}" for answer, meaning in verdict.ANSWERS.items())
    return table


def as_record(part: Part, found: list[Finding], failed: dict[str, str]) -> dict[str, Any]:
    """All settings and results. Scores are lists over seeds."""
    study, results = part.study, part.results
    scores = {
        task: {
            label: {
                "seeds": results.seeds(task, label),
                "max_length": results.ends(task, label),
                "parameters": results.records[task, label, results.seeds(task, label)[0]]["parameters"],
                "by_length": {
                    str(length): {measure: _rounded(results, task, label, length, measure) for measure in TASKS[task].measures}
                    for length in results.lengths(task)
                },
            }
            for label in results.encodings(task)
        }
        for task in results.tasks
    }
    return {
        "setup": study.setup,
        "trainings": study.trainings,
        "encodings": {each.label: each.options for each in study.encodings},
        "unsupported": study.unsupported,
        "runs": runs_of(part),
        "scores": scores,
        "failed": failed,
        "verdict": verdict.as_record(found),
        "learned": {task: verdict.learned(results, task) for task in exact_tasks(results)},
    }


def _rounded(results: Results, task: str, label: str, length: int, measure: str) -> dict[str, Any]:
    mean = results.mean(task, label, length, measure)
    finite = [round(value, 4) if value < float("inf") else None for value in mean.values]
    shown = None if None in finite else round(mean.mean, 4)
    return {"values": finite, "mean": shown, "half_width": None if mean.half is None else round(mean.half, 4)}


def write_tables(page: Path, record: dict[str, Any]) -> None:
    """Replace the text between the markers of a page. Raises ValueError if the page has no markers."""
    records.fill(page, MARKERS, as_markdown(record))


def as_markdown(record: dict[str, Any]) -> str:
    """The means of a study by encoding, and the number of papers' claims that it reproduces."""
    tasks = list(record["scores"])
    columns = [(task, multiple) for task in tasks for multiple in ON_PAGES[str(TASKS[task].metric)]]
    headings = [f"{task}, {'L' if multiple == 1 else f'{multiple} L'}" for task, multiple in columns]
    lines = [_how(record), "", f"| encoding | {' | '.join(headings)} |", f"|{'---|' * (len(headings) + 1)}"]
    for label in record["encodings"]:
        cells = [_on_page(record, task, multiple, record["scores"][task].get(label)) for task, multiple in columns]
        ends = any(record["scores"][task].get(label, {}).get("max_length") for task in tasks)
        lines.append(f"| `{label}`{' ' + ENDS if ends else ''} | {' | '.join(cells)} |")
    unsupported = ", ".join(f"`{label}`" for label in record["unsupported"])
    lines += [
        "",
        f"{ENDS} has a maximum length, set to the longest test length."
        + (f" Not supported: {unsupported}." * bool(unsupported)),
    ]
    return "\n".join([*lines, "", f"{record['verdict']['summary']}"]) + "\n"


def _how(record: dict[str, Any]) -> str:
    """A sentence on how the models of a study were trained."""
    name, sizes, runs = record["setup"]["model"], record["setup"]["sizes"], record["runs"]
    trained = "; ".join(
        f"{task} {of['steps']} steps of {of['batch_size']} rows, L = {of['length']} {UNITS.get(task, TASKS[task].unit)}"
        for task, of in record["trainings"].items()
    )
    model = f"{sizes['num_hidden_layers']} layers, width {sizes['hidden_size']}, {sizes['num_attention_heads']} heads"
    part = "" if runs["finished"] == runs["planned"] else f" of {runs['planned']}"
    return f"{runs['finished']}{part} runs, {runs['cpu_seconds'] / 60:.0f} minutes of one core; {name}, {model}; {trained}."


def _on_page(record: dict[str, Any], task: str, multiple: int, found: dict[str, Any] | None) -> str:
    values = found["by_length"].get(str(multiple * record["trainings"][task]["length"])) if found else None
    measure = TASKS[task].measures[-1]
    mean = values[measure]["mean"] if values else None
    return "–" if mean is None else f"{mean:.1f}" if measure == "perplexity" else f"{mean:.2f}"
