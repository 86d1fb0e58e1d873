"""What was measured of a model, as evaluation.json beside it, which its card and hf_posenc.push_to_hub read.

The figures come from the records that the scripts write; here they are only put in that order.
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

FILE = "evaluation.json"
LIBRARY = "Python standard library documentation"
"""What corpus.py finds."""
TASKS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
}
"""What the name of a model's class ends with -> the Hub's name of its task."""
NO_METRICS = ("eval_samples", "eval_majority_share")

Record = dict[str, Any]


def write(folder: Path, evaluation: Record) -> None:
    (folder / FILE).write_text(json.dumps(evaluation, indent=2) + "\n", encoding="utf-8")


def read(folder: Path) -> Record:
    """What is there of a model, if anything."""
    file = folder / FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def add(folder: Path, results: list[Record]) -> None:
    """Put results among those of a model's folder; one that was there for the same is replaced."""
    before = read(folder)
    together = {key(result): result for result in [*before.get("results", []), *results]}
    write(folder, {**before, "results": list(together.values())})


def key(result: Record) -> tuple[Any, ...]:
    """What tells a result from the others."""
    return (*(result[name] for name in ("model", "task", "metric", "length")), *sorted(result["dataset"].items()))


def command(*arguments: str) -> str:
    """A command line; without arguments, that of this process."""
    return shlex.join(["python", *(arguments or sys.argv)])


def of_training(record: Record, class_name: str) -> Record:
    """What a training script's record tells of the model that it finished with."""
    task = next((task for end, task in TASKS.items() if class_name.endswith(end)), "feature-extraction")
    trained, validated = _datasets(record["arguments"])
    about = {"task": task, "dataset": validated, "length": record.get("max_length"), "count": record.get("eval_samples")}
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
    """The data trained on and validated with, by name."""
    if name := arguments.get("dataset_name"):
        known = {} if Path(name).exists() else {"id": name}
        trained = {"name": Path(name).name, **known, "config": arguments.get("dataset_config_name")}
        return {**trained, "split": "train"}, {**trained, "split": "validation"}
    name = Path(arguments["train_file"]).name if arguments.get("train_file") else LIBRARY
    validated = arguments.get("validation_file")
    return {"name": name}, {"name": Path(validated).name if validated else name, "split": "validation"}


def of_demo(record: Record) -> list[Record]:
    """demo.py's record: retrieval over all modules, and over long documents by length."""
    short = {record["max_seq_length"]: record["scores"]}
    return [*_retrieval("a summary finds its module", short, "distilled"), *_long_documents(record["long"], "distilled")]


def of_lengths(record: Record, this: str) -> list[Record]:
    """eval_length.py's record, for one of the models in it."""
    scores, candidates = record["scores"], record["settings"]["candidates"]
    return [
        *_long_documents(scores["retrieval"], this),
        *_retrieval(f"a fact within the first 512 tokens, among {candidates} copies", scores["needle"], this),
        *_retrieval(f"a fact behind the first 512 tokens, among {candidates} copies", scores["needle beyond"], this),
    ]


def _long_documents(by_length: Record, this: str) -> list[Record]:
    return _retrieval("a summary finds its long document, cut at a length", by_length, this)


def _retrieval(kind: str, by_length: Record, this: str) -> list[Record]:
    return [
        {
            "model": model,
            # A model that ends before a text does is used so.
            "this": model == this or model.startswith(f"{this}, truncated at "),
            "task": "text-retrieval",
            "dataset": {"name": LIBRARY, "config": kind},
            "metric": metric,
            "value": score[metric],
            "interval": score[f"{metric}_interval"],
            "length": int(length),
            "count": score["queries"],
        }
        for length, scores in by_length.items()
        for model, score in scores.items()
        for metric in ("recall_at_1", "mrr")
    ]


def of_seeds(record: Record, this: str, dataset: Record, length: int | None) -> list[Record]:
    """seeds.py's record, for one of the models in it: means over seeds with Student's intervals."""
    return [
        {
            "model": model,
            "this": model == this,
            "task": "text-classification",
            "dataset": {**dataset, "split": "validation"},
            "metric": metric.removeprefix("eval_"),
            "value": mean,
            "interval": [mean - half, mean + half],
            "length": length,
            "seeds": found["seeds"],
        }
        for model, found in record["models"].items()
        for metric, (mean, half) in found["mean_and_half_width"].items()
    ]
