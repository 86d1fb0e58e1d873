"""The model card: made from a model's config and from what was measured of it, never by hand."""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote

import transformers
import yaml
from accelerate import init_empty_weights
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, AutoModel, PreTrainedModel

from hf_posenc import modeling
from hf_posenc.diagnostics import Report, inspect
from hf_posenc.encodings import encoding_class

EVALUATION = "evaluation.json"
"""Lies in a model's folder: what was measured, and how the model was trained (see `checked_evaluation`)."""
TASKS = {
    "AutoModel": ("MODEL_MAPPING", "feature-extraction"),
    "AutoModelForMaskedLM": ("MODEL_FOR_MASKED_LM_MAPPING", "fill-mask"),
    "AutoModelForCausalLM": ("MODEL_FOR_CAUSAL_LM_MAPPING", "text-generation"),
    "AutoModelForSequenceClassification": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", "text-classification"),
    "AutoModelForTokenClassification": ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", "token-classification"),
    "AutoModelForQuestionAnswering": ("MODEL_FOR_QUESTION_ANSWERING_MAPPING", "question-answering"),
}
"""Auto class -> the mapping of what it loads, and the Hub's name for its task where the input is text."""
SIGNATURE = "<!-- hf_posenc.push_to_hub {}: edit this card, and later pushes leave it as it is -->\n"
INHERITED = ("language", "license", "license_name", "license_link")
"""What a model's metadata takes over from its base model's."""
OURS = ("base_model", "base_model_relation", "datasets", "library_name", "metrics", "model-index", "pipeline_tag", "tags")
"""The metadata which each card is given anew."""


def model_card(
    model: PreTrainedModel | str | os.PathLike[str],
    repo_id: str,
    *,
    evaluation: dict[str, Any] | None = None,
    figures: Sequence[str] = (),
    metadata: dict[str, Any] | None = None,
) -> str:
    """The text of a model's README.md.

    Args:
        model: patched or not, a `PositionEmbedding`, or the folder or Hub id of one (its config is read, no weights).
        repo_id: "name" or "namespace/name" that the model is to be loaded by.
        evaluation: what evaluation.json holds; None: the file in the model's folder, if there is one.
        figures: names of images that lie beside the card.
        metadata: further entries of the card's head, such as license and language; and `base_model`, the id of the model
            that this one was made from. Without that entry it is the one in the config, where that is "namespace/name".

    Raises:
        ValueError: a malformed repo_id, evaluation or figure; a model in which no source of position was found.
    """
    validate_repo_id(repo_id)
    for figure in figures:
        if PurePosixPath(figure).is_absolute() or ".." in PurePosixPath(figure).parts:
            raise ValueError(f"the figure {figure!r} is outside the model's folder: give the name of an image beside the card")
    if given := sorted(({*OURS, "model_name", "eval_results"} - {"base_model"}) & (metadata or {}).keys()):
        raise ValueError(f"metadata has {', '.join(given)}, which the card finds for itself: leave that out")
    if not isinstance(model, PreTrainedModel):
        beside = Path(model, EVALUATION)
        if evaluation is None and beside.is_file():
            evaluation = _read(beside)
        model = _without_weights(model)
    measured, report = checked_evaluation(evaluation or {}), inspect(model)
    auto = _auto_class(model)
    name = repo_id.rpartition("/")[2]
    metadata = {"base_model": _base_model(model), **(metadata or {})}
    if metadata["base_model"]:
        metadata = {"base_model_relation": "finetune", **metadata}
    own = sorted((result for result in measured["results"] if result["this"]), key=lambda result: result["length"] or 0)
    data = ModelCardData(
        **metadata,
        library_name="transformers",
        pipeline_tag=TASKS[auto][1] if auto and model.main_input_name == "input_ids" else None,
        tags=["hf-posenc", *report.encoding.split("+")],
        datasets=[dataset["id"] for dataset in measured["training"]["datasets"] if dataset["id"]] or None,
        metrics=list(dict.fromkeys(result["metric"] for result in own)) or None,
        model_name=name if own else None,
        eval_results=[_eval_result(result) for result in own] or None,
    )
    parts = [
        [f"# {name}", "", f"`{report.model_class}` with", "", *_positions(model, report)],
        [f"![{PurePosixPath(figure).stem}]({quote(figure)})" for figure in figures],
        _measured(measured),
        _training(measured),
        _loading(model, report, auto, repo_id, metadata["base_model"]),
    ]
    body = "\n\n".join("\n".join(part) for part in parts if part)
    return _signed(f"---\n{data.to_yaml()}\n---\n\n{body}\n\n")


def _without_weights(folder: str | os.PathLike[str]) -> PreTrainedModel:
    """A model of the class that its config names, with its head, on the meta device."""
    config = AutoConfig.from_pretrained(folder)
    name = (config.architectures or [""])[0]
    kind = getattr(modeling if hasattr(config, "position_encoding") else transformers, name, None) if name else None
    with init_empty_weights():
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
            return kind._from_config(config)
        return AutoModel.from_config(config)


def own_kinds(encoding: str) -> list[Any]:
    """The classes of an encoding which are not part of this package."""
    return [
        kind for kind in encoding_class(encoding).component_classes().values() if not kind.__module__.startswith("hf_posenc.")
    ]


def _auto_class(model: PreTrainedModel) -> str | None:
    """The Auto class that loads a model, head and all."""
    name = type(model).__name__
    # A model which runs the code that came with it is of no class of ours, but there is one of its name.
    kind: Any = getattr(modeling, name) if name.startswith(modeling.PREFIX) else type(model)
    for auto, (mapping, _) in TASKS.items():
        if getattr(transformers, mapping).get(kind.config_class or type(model.config), None) is kind:
            return auto
    return None


def _remote_auto_class(model: PreTrainedModel) -> str | None:
    """The Auto class that loads a model by the code that travels with it."""
    ours = [auto for auto, name in _auto_map(model).items() if str(name).rpartition(".")[2] == type(model).__name__]
    return min(ours, key=lambda auto: auto not in TASKS) if ours else None


def _auto_map(model: PreTrainedModel) -> dict[str, str]:
    return getattr(model.config, "auto_map", None) or {}


def _base_model(model: PreTrainedModel) -> str | None:
    """The host's id, where it can't be the name of a local folder."""
    host = (getattr(model.config, "position_encoding", None) or {}).get("host") or {}
    name = host.get("name_or_path") or ""
    return name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else None


def _positions(model: PreTrainedModel, report: Report) -> list[str]:
    lines, encodings = [], {name: encoding_class(name) for name in report.encoding.split("+")}
    for name, encoding in encodings.items():
        options = report.options if len(encodings) == 1 else report.options.get(name, {})
        said = [f"`{key}={value!r}`" for key, value in options.items()] + [f"<{paper}>" for paper in encoding.paper]
        if own_kinds(name):
            there = " with the package; the code that comes with the model has it" if _remote_auto_class(model) else ""
            said.append(f"its class `{encoding.__name__}` is not part of hf-posenc: import or define it before loading{there}")
        lines.append(f"- position encoding `{name}`" + (f": {', '.join(said)}" if said else ""))
    for verb, paths in report.enters.items():
        lines.append(f"- `{verb}` at `{paths[0]}`" + (f" and {len(paths) - 1} more" if paths[1:] else ""))
    lines.append(f"- longest input: {'no limit' if report.max_length is None else f'{report.max_length} tokens'}")
    return lines + [f"- ignored: {note}" for note in report.ignored]


def _loading(model: PreTrainedModel, report: Report, auto: str | None, repo_id: str, base: str | None) -> list[str]:
    call = f'{auto or report.model_class}.from_pretrained("{repo_id}"'
    stock = f"from transformers import {auto or report.model_class}"
    if not hasattr(model.config, "position_encoding"):
        return ["## How to load it", "", *_fenced("python", stock, "", f"model = {call})")]
    lines = ["## How to load it", "", "With the package:", "", *_fenced("bash", "pip install hf-posenc"), ""]
    if auto:
        own = [kind.__name__ for kind in own_kinds(report.encoding)]
        also = f", beside what defines {', '.join(own)}" if own else ""
        lines += _fenced(
            "python", f"import hf_posenc  # Transformers then knows its models{also}", stock, "", f"model = {call})"
        )
    else:
        lines += _fenced("python", f"from hf_posenc import {report.model_class}", "", f"model = {call})")
    if remote := _remote_auto_class(model):
        lines += ["", "Without it: the code comes with the model, and needs torch and transformers alone.", ""]
        lines += _fenced(
            "python",
            f"from transformers import {remote}",
            "",
            f'model = {remote}.from_pretrained("{repo_id}", trust_remote_code=True)',
        )
    host = report.model_class.removeprefix(modeling.PREFIX)
    if report.host_kept:
        lines += ["", f"As a stock `{host}`: these weights, with the base model's own positions, which are kept.", ""]
        lines += _fenced("python", "import hf_posenc", "", "model = hf_posenc.unpatch(model)")
    elif base:
        lines += ["", "As the stock model: the base model's own positions are not kept here, so that is the base itself.", ""]
        lines += _fenced("python", stock, "", f'model = {auto or host}.from_pretrained("{base}")')
    return lines


def _fenced(language: str, *lines: str) -> list[str]:
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", "".join(lines)))])
    return [fence + language, *lines, fence]


# What was measured.


class Entry(NamedTuple):
    """An entry of evaluation.json: what it may be, in words and as a check; and what its absence (or null) means."""

    allowed: str
    holds: Callable[[Any], bool]
    needed: bool = False
    default: Any = None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_list(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, (list, tuple)) and all(map(holds, value))


def _is_interval(value: Any) -> bool:
    return _is_list(value, _is_number) and len(value) == 2 and value[0] <= value[1]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


TEXT = Entry("a text", _is_text)
NEEDED = TEXT._replace(needed=True)
COUNT = Entry("an integer from 1 on", lambda value: _is_integer(value, 1))
OBJECT = Entry("an object", lambda value: isinstance(value, dict), default={})
LIST = Entry("a list", lambda value: isinstance(value, (list, tuple)), default=())
FILE = {
    "command": TEXT,
    "training": OBJECT,
    "results": LIST,
    "notes": Entry("a list of texts", lambda value: _is_list(value, _is_text), default=()),
}
TRAINING = {"datasets": LIST, "steps": COUNT}
DATASET = {"name": NEEDED, "id": TEXT, "url": TEXT, "config": TEXT, "split": TEXT, "revision": TEXT, "task_id": TEXT}
RESULT = {
    "model": NEEDED,
    "this": Entry("true or false", lambda value: isinstance(value, bool), default=False),
    "task": NEEDED,
    "dataset": OBJECT._replace(needed=True),
    "metric": NEEDED,
    "value": Entry("a finite number", _is_number, needed=True),
    "interval": Entry("two finite numbers [low, high], the lower one first", _is_interval),
    "length": COUNT,
    "count": COUNT,
    "seeds": Entry("a list of integers", lambda value: _is_list(value, lambda seed: _is_integer(seed, 0))),
}


def checked_evaluation(evaluation: Any) -> dict[str, Any]:
    """What evaluation.json holds, checked, with all entries there are, and without tokens.

    command: the command line that trained the model. training: `steps`, and `datasets`, each with a `name` and, where it
    is on the Hub, its `id`. results: one for each number that was measured: `model` (a name), `this` (whether that is the
    model of the card; others stand in the tables to compare with), `task`, `dataset`, `metric`, `value`, and where it
    applies `interval` (95 %: low, high), `length` (tokens of an input), `count` (of what was asked) and `seeds` (of the
    runs that the value is the mean of). A result's dataset may have a `task_id`, which is what a benchmark on the Hub calls
    its task (see `result_files`). notes: sentences that stand below the tables.

    Raises:
        ValueError: names what is missing, unknown, of another kind, not finite, or there twice.
    """
    checked = _checked(evaluation, FILE, EVALUATION)
    checked["notes"] = [*map(_without_tokens, checked["notes"])]
    training = checked["training"] = _checked(checked["training"], TRAINING, "training")
    training["datasets"] = [
        _checked(dataset, DATASET, f"training.datasets[{i}]") for i, dataset in enumerate(training["datasets"])
    ]
    checked["results"] = [_checked(result, RESULT, f"results[{i}]") for i, result in enumerate(checked["results"])]
    seen: dict[Any, int] = {}
    for i, result in enumerate(checked["results"]):
        dataset = result["dataset"] = _checked(result["dataset"], DATASET, f"results[{i}].dataset")
        key = (result["model"], *_table(result), result["metric"], result["length"])
        if seen.setdefault(key, i) != i:
            same = "the model, task, dataset, metric and length"
            raise ValueError(f"{EVALUATION}: results[{i}] and results[{seen[key]}] have {same} in common: leave one out")
        if dataset["task_id"] and not dataset["id"]:
            raise ValueError(f"{EVALUATION}: results[{i}].dataset has a task_id, but no id of a benchmark on the Hub")
    return checked


def _checked(given: Any, entries: dict[str, Entry], where: str) -> dict[str, Any]:
    place = where if where == EVALUATION else f"{EVALUATION}: {where}"
    if not isinstance(given, dict):
        raise ValueError(f"{place} is {_shown(given)}: allowed is an object")
    if unknown := sorted(map(str, given.keys() - entries.keys())):
        raise ValueError(f"{place} has {', '.join(map(_shown, unknown))}: known are {', '.join(entries)}")
    found = {}
    for name, entry in entries.items():
        value = given.get(name)
        if value is None and entry.needed:
            raise ValueError(f"{place} lacks {name!r}: {entry.allowed}")
        if value is not None and not entry.holds(value):
            raise ValueError(f"{place} has {name} {_shown(value)}: allowed is {entry.allowed}")
        value = entry.default if value is None else value
        value = _without_tokens(value) if isinstance(value, str) else value
        found[name] = list(value) if isinstance(value, (list, tuple)) else value
    return found


def _shown(value: Any) -> str:
    return _without_tokens(repr(value))[:80]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None


SECRETS = (
    # Flags, --hub_token but not --pad_token; variables set before the command; the Hub's tokens anywhere.
    r"""\s--?(?:(?:(?:hub|hf|api|auth|access)[_-])?token|[\w-]*(?:api[_-]?key|password|secret))[ =]+('[^']*'|"[^"]*"|\S+)""",
    r"""\b\w*(?:TOKEN|KEY|PASSWORD|SECRET)=('[^']*'|"[^"]*"|\S+)\s*""",
    r"\b(?:hf|api_org)_\w*[A-Za-z0-9]{16,}\w*",
)


def _without_tokens(text: str) -> str:
    """A text, such as a command line, without what gives access."""
    for secret in SECRETS:
        text = re.sub(secret, "", text)
    return text


def _table(result: dict[str, Any]) -> tuple[Any, ...]:
    """What the results of a table have in common, but for the metric."""
    return (result["task"], *(result["dataset"][name] for name in ("name", "id", "config", "split", "revision")))


def _measured(evaluation: dict[str, Any]) -> list[str]:
    """A table for each task, data set and metric: models by length."""
    groups: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    for result in evaluation["results"]:
        groups.setdefault(_table(result), {}).setdefault(result["metric"], []).append(result)
    lines = ["## Measured"] if groups else []
    for by_metric in groups.values():
        first = next(iter(by_metric.values()))[0]
        lines += ["", f"### {_named(first['dataset'])}"]
        for metric, results in by_metric.items():
            lines += ["", f"{_cell(first['task'])}, {_cell(metric)}{_over(results)}:", "", *_rows(results)]
    said = {"interval": "In brackets: 95 % intervals.", "this": "In bold: the model of this card."}
    legend = " ".join(words for key, words in said.items() if any(result[key] for result in evaluation["results"]))
    return lines + [line for note in (legend, *evaluation["notes"]) if note for line in ("", _cell(note))]


def _named(dataset: dict[str, Any]) -> str:
    url = dataset["url"] or (f"https://huggingface.co/datasets/{dataset['id']}" if dataset["id"] else None)
    name = f"[{_cell(dataset['name'])}]({quote(url, safe=':/?&=#%')})" if url else _cell(dataset["name"])
    part = ", ".join(_cell(dataset[key]) for key in ("config", "split") if dataset[key])
    return f"{name} ({part})" if part else name


def _over(results: list[dict[str, Any]]) -> str:
    counts = sorted({result["count"] for result in results if result["count"]})
    return f", n = {' to '.join(f'{count:,}' for count in (counts[0], counts[-1])[: len(counts)])}" if counts else ""


def _rows(results: list[dict[str, Any]]) -> list[str]:
    lengths = sorted({result["length"] or 0 for result in results})
    found: dict[str, dict[int, str]] = {}
    for result in results:
        seeds = f" (mean of seeds {', '.join(map(str, result['seeds']))})" if result["seeds"] else ""
        name = f"**{_cell(result['model'])}**{seeds}" if result["this"] else _cell(result["model"]) + seeds
        interval = f" [{', '.join(map(_number, result['interval']))}]" if result["interval"] else ""
        found.setdefault(name, {})[result["length"] or 0] = _number(result["value"]) + interval
    head = ["model", *(f"{length} tokens" if length else "value" for length in lengths)]
    rows = [[name, *(row.get(length, "") for length in lengths)] for name, row in found.items()]
    return [f"| {' | '.join(row)} |" for row in (head, ["---", *["--:"] * len(lengths)], *rows)]


def _number(value: float) -> str:
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.001 else f"{value:.2e}"


def _cell(text: str) -> str:
    return re.sub(r"([|<])", r"\\\1", " ".join(text.split()))


def _training(evaluation: dict[str, Any]) -> list[str]:
    datasets, steps = map(evaluation["training"].get, ("datasets", "steps"))
    said = [f"on {', '.join(map(_named, datasets))}"] if datasets else []
    said += [f"for {steps:,} steps"] if steps else []
    lines = [f"Trained {' '.join(said)}." if said else ""] + (
        ["", *_fenced("bash", *evaluation["command"].splitlines())] if evaluation["command"] else []
    )
    return ["## Training", *([""] if said else []), *lines] if any(lines) else []


def _eval_result(result: dict[str, Any]) -> EvalResult:
    dataset, about = result["dataset"], ("length", "interval", "count", "seeds")
    return EvalResult(
        task_type=result["task"],
        # As sentence-transformers does where a data set has no id: the format needs one.
        dataset_type=dataset["id"] or re.sub(r"\W+", "-", dataset["name"].lower()).strip("-"),
        dataset_name=dataset["name"],
        dataset_config=dataset["config"],
        dataset_split=dataset["split"],
        dataset_revision=dataset["revision"],
        metric_type=result["metric"],
        metric_name=_metric_name(result),
        metric_value=result["value"],
        metric_args={key: result[key] for key in about if result[key] is not None} or None,
    )


def _metric_name(result: dict[str, Any]) -> str:
    length = f", {result['length']} tokens" if result["length"] else ""
    return result["metric"] + length + (f", mean of {len(result['seeds'])} seeds" if result["seeds"] else "")


def result_files(evaluation: Any) -> dict[str, str]:
    """The Hub's evaluation-result files, path -> text: the model's own results on benchmarks there.

    These are the results with `this`, whose dataset has an `id` and a `task_id`. Others have no place in that format; they
    stand in the card, in its tables and in its model-index.

    Raises:
        ValueError: as `checked_evaluation`; and two results for one task of a benchmark.
    """
    entries: dict[str, dict[str, EvalResultEntry]] = {}
    for i, result in enumerate(checked_evaluation(evaluation)["results"]):
        dataset = result["dataset"]
        if result["this"] and dataset["task_id"]:
            of_dataset = entries.setdefault(dataset["id"], {})
            if dataset["task_id"] in of_dataset:
                raise ValueError(
                    f"{EVALUATION}: results[{i}] is a second one for the task {dataset['task_id']!r} of {dataset['id']}, which "
                    "has one value: leave the task_id out where the benchmark takes another metric or length"
                )
            of_dataset[dataset["task_id"]] = EvalResultEntry(
                dataset_id=dataset["id"],
                task_id=dataset["task_id"],
                dataset_revision=dataset["revision"],
                value=result["value"],
                notes=_metric_name(result),
            )
    return {
        f".eval_results/{benchmark.replace('/', '--')}.yaml": yaml.safe_dump(
            eval_result_entries_to_yaml(list(found.values())), sort_keys=False, allow_unicode=True
        )
        for benchmark, found in entries.items()
    }


# Cards that nobody wrote by hand.


def replaceable(card: str) -> dict[str, Any] | None:
    """The metadata to keep of a card in which nobody's words are: no card, ours as it was made, a licence and the like
    alone. None for a card that was written by hand."""
    own = card == _signed(card.rpartition("<!--")[0])
    if not own and REGEX_YAML_BLOCK.sub("", card, count=1).strip():
        return None
    metadata = ModelCard(card).data.to_dict() if card else {}
    kept = {key: value for key, value in metadata.items() if key not in OURS}
    return kept if own or kept == metadata else None


def _signed(card: str) -> str:
    return card + SIGNATURE.format(hashlib.sha256(card.encode()).hexdigest()[:16])
