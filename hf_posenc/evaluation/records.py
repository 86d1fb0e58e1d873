"""JSON records of training runs and experiments, and evaluation.json, which model cards and hf_posenc.push_to_hub read.

`of_training` converts the record of a training run to results for evaluation.json.
"""

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_posenc.serialization.atomic import write_text

FILE = "evaluation.json"
LIBRARY = "Python standard library documentation"
"""The dataset name of `stdlib_corpus`."""
TASKS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
}
"""Suffix of a model class's name -> the Hub's name of its task."""
NO_METRICS = ("eval_samples", "eval_majority_share")

Record = dict[str, Any]


def as_text(record: Any) -> str:
    """A record as JSON. Dataclasses become objects."""
    return json.dumps(record, indent=2, default=asdict) + "\n"


def write(file: Path, record: Any) -> None:
    """Write a record to a file atomically."""
    write_text(file, as_text(record))


def fill(page: Path, markers: tuple[str, str], text: str) -> None:
    """Replace the text between two markers of a page. Raises ValueError if the page lacks a marker."""
    head, begin, rest = page.read_text(encoding="utf-8").partition(markers[0])
    _, end, tail = rest.partition(markers[1])
    if not begin or not end:
        raise ValueError(f"{page} has no lines {markers[0]} and {markers[1]} for the tables. Add them.")
    write_text(page, f"{head}{begin}\n\n{text}\n{end}{tail}")


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def command(*arguments: str) -> str:
    """A command line. Without arguments, the command line of this process."""
    main = sys.modules["__main__"]
    if not arguments and Path(sys.argv[0]).stem == "hf-posenc":
        return shlex.join(["hf-posenc", *sys.argv[1:]])
    if not arguments and main.__spec__ and main.__file__ == sys.argv[0]:  # python -m
        arguments = ("-m", main.__spec__.name, *sys.argv[1:])
    return shlex.join(["python", *(arguments or sys.argv)])


def of_training(record: Record, class_name: str) -> Record:
    """The content of evaluation.json for the model that a training run saved."""
    task = next((task for end, task in TASKS.items() if class_name.endswith(end)), "feature-extraction")
    trained, validated = _datasets(record["arguments"])
    about = {"task": task, "dataset": validated, "length": record.get("text_length"), "count": record.get("eval_samples")}
    results = [
        {"model": "this model", "this": True, **about, "metric": key.removeprefix("eval_"), "value": value}
        for key, value in record.items()
        if key.startswith("eval_") and key not in NO_METRICS
    ]
    if "eval_majority_share" in record:
        share = record["eval_majority_share"]
        results.append({"model": "the most frequent label", "this": False, **about, "metric": "accuracy", "value": share})
    return {"command": command(), "training": {"datasets": [trained], "steps": record["steps"]}, "results": results}


def _datasets(arguments: Record) -> tuple[Record, Record]:
    """The training and the validation dataset."""
    if name := arguments.get("dataset_name"):
        known = {} if Path(name).exists() else {"id": name}
        trained = {"name": Path(name).name, **known, "config": arguments.get("dataset_config_name")}
        return {**trained, "split": "train"}, {**trained, "split": "validation"}
    name = Path(arguments["train_file"]).name if arguments.get("train_file") else LIBRARY
    validated = arguments.get("validation_file")
    return {"name": name}, {"name": Path(validated).name if validated else name, "split": "validation"}
