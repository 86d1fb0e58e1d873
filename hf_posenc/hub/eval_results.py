"""The schema and validation of evaluation.json, which contains a model's evaluation, and the Hub's result files.

The training scripts write evaluation.json to the model's directory. The model card and push_to_hub read it.
docs/reference/hub.md has an example.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

EVALUATION = "evaluation.json"
LARGEST = 2**63 - 1
"""The largest 64-bit signed integer, because other programs can't read larger ones."""


class Entry(NamedTuple):
    """The schema of an entry: a description and a check of its allowed values, and its default if it is absent or null."""

    allowed: str
    accepts: Callable[[Any], bool]
    required: bool = False
    default: Any = None


def _is_number(value: Any) -> bool:
    # NaN fails the comparison. Integers are compared without a conversion to float, which could overflow.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_integer(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= LARGEST


def _is_list(value: Any, accepts: Callable[[Any], bool]) -> bool:
    return isinstance(value, (list, tuple)) and all(map(accepts, value))


def _is_interval(value: Any) -> bool:
    return _is_list(value, _is_number) and len(value) == 2 and value[0] <= value[1]


def _is_text(value: Any) -> bool:
    # JSON can contain lone surrogates, which UTF-8 can't represent.
    return isinstance(value, str) and bool(value.strip()) and value.encode(errors="ignore").decode() == value


TEXT = Entry("a text", _is_text)
REQUIRED_TEXT = TEXT._replace(required=True)
COUNT = Entry("an integer from 1 to 2^63 - 1", lambda value: _is_integer(value, 1))
OBJECT = Entry("an object", lambda value: isinstance(value, dict), default={})
LIST = Entry("a list", lambda value: isinstance(value, (list, tuple)), default=())
FILE = {
    "command": TEXT,
    "training": OBJECT,
    "results": LIST,
    "notes": Entry("a list of texts", lambda value: _is_list(value, _is_text), default=()),
}
TRAINING = {"datasets": LIST, "steps": COUNT}
DATASET = {"name": REQUIRED_TEXT, "id": TEXT, "url": TEXT, "config": TEXT, "split": TEXT, "revision": TEXT, "task_id": TEXT}
RESULT = {
    "model": REQUIRED_TEXT,
    "this": Entry("true or false", lambda value: isinstance(value, bool), default=False),
    "task": REQUIRED_TEXT,
    "dataset": OBJECT._replace(required=True),
    "metric": REQUIRED_TEXT,
    "value": Entry("a finite number", _is_number, required=True),
    "interval": Entry("two finite numbers [low, high], the lower one first", _is_interval),
    "length": COUNT,
    "unit": TEXT._replace(default="tokens"),
    "count": COUNT,
    "seeds": Entry("a list of integers from 0 to 2^63 - 1", lambda value: _is_list(value, lambda seed: _is_integer(seed, 0))),
}


def checked_evaluation(evaluation: Any) -> dict[str, Any]:
    """Validate the content of evaluation.json and fill in all missing entries.

    Values are rounded to 15 significant digits.

    - command: the command line that trained the model.
    - training: `steps`, and `datasets`, each with a `name` and, for a dataset on the Hub, its `id`.
    - results: one entry per measured value:
        - `model`: a name.
        - `this`: whether it is the model of the card. The tables show other models for comparison.
        - `task`, `dataset`, `metric`, `value`. The dataset may have a `task_id`, the name of the task in a benchmark on the Hub
          (see `result_files`).
        - `interval` (optional): the 95% interval, [low, high].
        - `length` (optional): input length in `unit`, by default "tokens".
        - `count` (optional): number of queries or examples.
        - `seeds` (optional): seeds of the runs whose mean the value is.
    - notes: sentences shown below the tables.

    Raises:
        ValueError: an entry is missing, unknown, of the wrong type, not finite, or duplicated. The message names it.
    """
    checked = _checked(evaluation, FILE, EVALUATION)
    training = checked["training"] = _checked(checked["training"], TRAINING, "training")
    training["datasets"] = [
        _checked(dataset, DATASET, f"training.datasets[{i}]") for i, dataset in enumerate(training["datasets"])
    ]
    checked["results"] = [_checked(result, RESULT, f"results[{i}]") for i, result in enumerate(checked["results"])]
    seen: dict[Any, int] = {}
    for i, result in enumerate(checked["results"]):
        result["value"] = _rounded(result["value"])
        result["interval"] = result["interval"] and [*map(_rounded, result["interval"])]
        dataset = result["dataset"] = _checked(result["dataset"], DATASET, f"results[{i}].dataset")
        key = (result["model"], *table_key(result), result["metric"], result["length"], result["unit"])
        if seen.setdefault(key, i) != i:
            same = "model, task, dataset, metric, and length"
            raise ValueError(f"{EVALUATION}: results[{i}] and results[{seen[key]}] have the same {same}. Omit one.")
        if dataset["task_id"] and not dataset["id"]:
            raise ValueError(
                f"{EVALUATION}: results[{i}].dataset has a task_id, but no ID of a benchmark on the Hub. Add the ID, or omit "
                "the task_id."
            )
    return checked


def _checked(given: Any, entries: dict[str, Entry], where: str) -> dict[str, Any]:
    place = where if where == EVALUATION else f"{EVALUATION}: {where}"
    if not isinstance(given, dict):
        raise ValueError(f"{place} is {_shown(given)}, but must be an object.")
    if unknown := sorted(map(str, given.keys() - entries.keys())):
        raise ValueError(f"{place} has unknown fields {', '.join(map(_shown, unknown))}. Known fields: {', '.join(entries)}.")
    found = {}
    for name, entry in entries.items():
        value = given.get(name)
        if value is None and entry.required:
            raise ValueError(f"{place} lacks {name!r}, which must be {entry.allowed}.")
        if value is not None and not entry.accepts(value):
            raise ValueError(f"{place} has {name} {_shown(value)}, but it must be {entry.allowed}.")
        value = entry.default if value is None else value
        found[name] = list(value) if isinstance(value, (list, tuple)) else value
    return found


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"
    except ValueError:  # Python doesn't convert integers of more than 4,300 digits to text
        return f"a {type(value).__name__} with too many digits"
    return text if len(text) <= 80 else f"{text[:79]}…"


def _rounded(value: float) -> float:
    """A value without rounding errors: 0.104 for 0.10400000000000001."""
    return value if isinstance(value, int) else float(f"{value:.15g}")


def table_key(result: dict[str, Any]) -> tuple[Any, ...]:
    """The task and dataset of a result. Results with the same key can be shown in one table."""
    return (result["task"], *(result["dataset"][name] for name in ("name", "id", "config", "split", "revision")))


def shown_length(result: dict[str, Any]) -> str:
    """The input length of a result with its unit, such as "512 tokens"."""
    return f"{result['length']} {result['unit']}"


def metric_name(result: dict[str, Any]) -> str:
    """The metric with the input length and the number of seeds, such as "mrr, 512 tokens, mean of 3 seeds"."""
    length = f", {shown_length(result)}" if result["length"] else ""
    return result["metric"] + length + (f", mean of {len(result['seeds'])} seeds" if result["seeds"] else "")


def result_files(evaluation: Any) -> dict[str, str]:
    """Path -> text of the Hub's evaluation-result files, which contain the model's results on benchmarks of the Hub.

    They include results with `this` whose dataset has an `id` and a `task_id`. The format can't represent other results, which
    the card shows in its tables and its model-index.

    Raises:
        ValueError: the evaluation is invalid (see `checked_evaluation`), or has two results for one task of a benchmark.
    """
    entries: dict[str, dict[str, EvalResultEntry]] = {}
    for i, result in enumerate(checked_evaluation(evaluation)["results"]):
        dataset = result["dataset"]
        if result["this"] and dataset["task_id"]:
            of_dataset = entries.setdefault(dataset["id"], {})
            if dataset["task_id"] in of_dataset:
                raise ValueError(
                    f"{EVALUATION}: results[{i}] is a second result for the task {dataset['task_id']!r} of {dataset['id']}, "
                    "which has one value. Omit the task_id of results with another metric or length."
                )
            of_dataset[dataset["task_id"]] = EvalResultEntry(
                dataset_id=dataset["id"],
                task_id=dataset["task_id"],
                dataset_revision=dataset["revision"],
                value=result["value"],
                notes=metric_name(result),
            )
    return {
        f".eval_results/{benchmark.replace('/', '--')}.yaml": yaml.safe_dump(
            eval_result_entries_to_yaml(list(found.values())), sort_keys=False, allow_unicode=True
        )
        for benchmark, found in entries.items()
    }
