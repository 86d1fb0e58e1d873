"""Records as JSON, and evaluation.json, which a model's card and hf_posenc.push_to_hub read.

The scripts write records; the functions `of_…` rearrange their figures as results of evaluation.json.
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
"""The name of the texts of `stdlib_corpus`."""
DEEP = "a sentence from behind the first 512 tokens, taken out, finds its document"
TASKS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
}
"""End of a model class's name -> the Hub's name of its task."""
NO_METRICS = ("eval_samples", "eval_majority_share")

Record = dict[str, Any]


def as_text(record: Any) -> str:
    """A record as JSON; dataclasses become objects."""
    return json.dumps(record, indent=2, default=asdict) + "\n"


def write(file: Path, record: Any) -> None:
    """Replace a file by a record, completely or not at all."""
    write_text(file, as_text(record))


def fill(page: Path, markers: tuple[str, str], text: str) -> None:
    """Replace what lies between two markers of a page. Raises ValueError for a page without them."""
    head, begin, rest = page.read_text(encoding="utf-8").partition(markers[0])
    _, end, tail = rest.partition(markers[1])
    if not begin or not end:
        raise ValueError(f"{page} has no lines {markers[0]} and {markers[1]}, between which the tables would lie: add them")
    write_text(page, f"{head}{begin}\n\n{text}\n{end}{tail}")


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def add(folder: Path, results: list[Record]) -> None:
    """Add results to evaluation.json in a model's folder. A result with the same key is replaced."""
    file = folder / FILE
    before = read(file) if file.exists() else {}
    together = {key(result): result for result in [*before.get("results", []), *results]}
    write(file, {**before, "results": list(together.values())})


def key(result: Record) -> tuple[Any, ...]:
    """The values that identify a result."""
    return (*(result[name] for name in ("model", "task", "metric", "length")), *sorted(result["dataset"].items()))


def command(*arguments: str) -> str:
    """A command line; without arguments, that of this process."""
    main = sys.modules["__main__"]
    if not arguments and main.__spec__ and main.__file__ == sys.argv[0]:  # python -m
        arguments = ("-m", main.__spec__.name, *sys.argv[1:])
    return shlex.join(["python", *(arguments or sys.argv)])


def of_training(record: Record, class_name: str) -> Record:
    """The evaluation.json of the model that a training run finished with."""
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
    """The training and the validation data, by name."""
    if name := arguments.get("dataset_name"):
        known = {} if Path(name).exists() else {"id": name}
        trained = {"name": Path(name).name, **known, "config": arguments.get("dataset_config_name")}
        return {**trained, "split": "train"}, {**trained, "split": "validation"}
    name = Path(arguments["train_file"]).name if arguments.get("train_file") else LIBRARY
    validated = arguments.get("validation_file")
    return {"name": name}, {"name": Path(validated).name if validated else name, "split": "validation"}


def of_demo(record: Record) -> list[Record]:
    """The results of demo.py: retrieval over all modules, and what lies behind the first 512 tokens."""
    return [
        *_retrieval("a summary finds its module", {record["max_seq_length"]: record["scores"]}, "trained"),
        *_retrieval(DEEP, {record["long_length"]: record["deep"]}, "trained"),
    ]


def of_conversions(record: Record, this: str) -> list[Record]:
    """The results of conversions.py over the standard library; `this` is the model whose evaluation.json they go to."""
    beside = ("bag of words", "minilm", f"{this}, calibrated", this)
    shown = {name: score for name, score in record["scores"].items() if name in beside}
    return _retrieval("a summary finds its module", {record["text_length"]: shown}, this)


def of_lengths(record: Record, this: str) -> list[Record]:
    """The results of eval_length.py; `this` is the model whose evaluation.json they go to."""
    settings = record["settings"]
    size = f"one of {settings['documents']} of {max(settings['lengths'])} tokens or more, cut at a length"
    kinds = {
        "title": f"a title finds its document, {size}",
        "deep": f"{DEEP}, {size}",
        "needle": f"a fact within the first 512 tokens, among {settings['candidates']} copies",
        "needle beyond": f"a fact behind the first 512 tokens, among {settings['candidates']} copies",
    }
    texts = settings.get("texts", LIBRARY)
    results = [
        result for task, by_length in record["scores"].items() for result in _retrieval(kinds[task], by_length, this, texts)
    ]
    return results + [
        {
            "model": model,
            "this": model == this,
            "task": "text-generation",
            "dataset": {"name": texts, "config": f"windows of {found['window']} tokens"},
            "metric": "perplexity",
            "value": found["perplexity"],
            "interval": found["perplexity_interval"],
            "length": int(length),
            "count": found["documents"],
        }
        for length, by_model in record.get("perplexity", {}).items()
        for model, found in by_model.items()
    ]


def _retrieval(kind: str, by_length: Record, this: str, texts: str = LIBRARY) -> list[Record]:
    return [
        {
            "model": model,
            # A model whose length is limited is used with truncation.
            "this": model == this or model.startswith(f"{this}, truncated at "),
            "task": "text-retrieval",
            "dataset": {"name": texts, "config": kind},
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
    """The results of seeds.py, means over seeds with Student's intervals; `this` is the model they go to."""
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
