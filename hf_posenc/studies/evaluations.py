"""The evaluation.json of a study's saved models (--keep), from which their model cards are generated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_posenc.evaluation import records
from hf_posenc.studies import models, study
from hf_posenc.studies.record import Part
from hf_posenc.studies.tasks import CAUSAL, LABELS, MASKED, Task

HUB_TASKS = {CAUSAL: "text-generation", MASKED: "fill-mask", LABELS: "text-classification"}
"""Head -> the Hub's name of its task."""


def describe(record: Mapping[str, Any], parts: Mapping[str, Part], output: Path) -> None:
    """Write evaluation.json to each saved model: its scores, and the study's means for all encodings.

    Removes models that --keep doesn't keep.
    """
    for label, part in parts.items():
        directory = output / models.file_name(label)
        for path, run in study.prune(directory, part.study, part.results.records).items():
            records.write(path / records.FILE, _evaluation(record, part, label, run))


def _evaluation(record: Mapping[str, Any], part: Part, label: str, run: Mapping[str, Any]) -> dict[str, Any]:
    name, task = run["task"], part.task(run["task"])
    dataset = {"name": f"hf-posenc compare, task {name}"}
    common = {"task": HUB_TASKS[task.head], "dataset": dataset}
    where = {"model": label, "task": name}
    results = [
        {"model": f"{run['encoding']}, this model", "this": True, **common, **_place(row, task), "value": row["value"]}
        for row in record["rows"]
        if {**where, "encoding": run["encoding"], "seed": run["seed"]}.items() <= row.items() and row["value"] is not None
    ]
    results += [
        {
            "model": row["encoding"],
            "this": False,
            **common,
            **_place(row, task),
            "value": row["mean"],
            "interval": None
            if row["half_width"] is None
            else [row["mean"] - row["half_width"], row["mean"] + row["half_width"]],
            "seeds": part.results.seeds(name, row["encoding"]),
        }
        for row in record["table"]
        if where.items() <= row.items() and row["mean"] is not None
    ]
    training = part.study.trainings[name]
    notes = [f"Trained at lengths up to {training.length} {task.unit}, with seed {run['seed']}."]
    best = study.kept(part.study, part.results.records, name, run["encoding"])
    if part.study.keep == "best" and run["seed"] in best:
        notes.append("Of all seeds, it has the best score at the longest test length.")
    notes.append("Scores of other models are means over seeds. All had the same initial weights and data within a seed.")
    return {
        "command": records.command(),
        "training": {"datasets": [dataset], "steps": training.steps or None},
        "results": results,
        "notes": notes,
    }


def _place(row: Mapping[str, Any], task: Task) -> dict[str, Any]:
    metric = {"exact": "exact_match", "tokens": "token_accuracy"}.get(row["metric"], row["metric"])
    return {"metric": metric, "length": row["length"], "unit": task.unit}
