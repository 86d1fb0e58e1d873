"""Model cards, generated from a model's config and its evaluation."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from hf_posenc._versions import INSTALL, REPOSITORY
from hf_posenc.architectures.structure import is_patched
from hf_posenc.configuration import HUB_ID
from hf_posenc.encodings import encoding_class, list_encodings
from hf_posenc.evaluation.metrics import UNCORRECTED
from hf_posenc.hub.eval_results import EVALUATION, checked_evaluation, metric_name, shown_length, table_key
from hf_posenc.inspection import Report, inspect
from hf_posenc.modeling import derived
from hf_posenc.serialization.saved_files import explained, load_config, read_json
from hf_posenc.serialization.user_code import is_ours

TASKS = {
    "AutoModel": ("MODEL_MAPPING", "feature-extraction"),
    "AutoModelForSeq2SeqLM": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "text2text-generation"),
    "AutoModelForMaskedLM": ("MODEL_FOR_MASKED_LM_MAPPING", "fill-mask"),
    "AutoModelForCausalLM": ("MODEL_FOR_CAUSAL_LM_MAPPING", "text-generation"),
    "AutoModelForSequenceClassification": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", "text-classification"),
    "AutoModelForTokenClassification": ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", "token-classification"),
    "AutoModelForQuestionAnswering": ("MODEL_FOR_QUESTION_ANSWERING_MAPPING", "question-answering"),
}
"""Auto class -> the name of its mapping in Transformers, and the Hub's task name for models with text input."""
INHERITED = ("language", "license", "license_name", "license_link")
"""Metadata copied from the base model's card."""
GENERATED = ("base_model", "base_model_relation", "datasets", "library_name", "metrics", "model-index", "pipeline_tag", "tags")
"""Metadata generated for every card. All other entries of an existing card are kept."""
MEASURED = ("datasets", "metrics", "model-index")
"""Metadata about the weights, which are removed if the new card lacks them."""
HEADLINE = ("mrr", "accuracy", "macro_f1", "f1", "exact_match", "perplexity", "loss")
"""Metrics by priority. Each table of a card shows the first one that was measured."""
LABELS = 20
"""Maximum number of labels listed in a card."""
NO_LENGTH = ("", 0)
"""The column of results without a length."""


def model_card(
    model: PreTrainedModel | str | os.PathLike[str],
    repo_id: str,
    *,
    evaluation: dict[str, Any] | None = None,
    figures: Sequence[str] = (),
    metadata: dict[str, Any] | None = None,
) -> str:
    """Generate the text of a model's README.md.

    Args:
        model: a patched or original model, a `PositionEmbedding`, or the local directory or Hub ID of one. From a directory or
            Hub ID, only the config is read, without weights.
        repo_id: "name" or "namespace/name" from which the model will be loaded.
        evaluation: the content of evaluation.json. Default: the file in the model's local directory, if it exists.
        figures: names of images in the same directory as the card.
        metadata: additional entries of the card's YAML header, such as license and language. `base_model` is the ID of the
            model that this one was made from. Its default is the original model in the config, if that name has the form
            "namespace/name".

    Raises:
        ValueError: repo_id, the evaluation, a figure, or the metadata is invalid, or the model has no known positional
            component.
    """
    validate_repo_id(repo_id)
    for figure in figures:
        if PurePosixPath(figure).is_absolute() or ".." in PurePosixPath(figure).parts:
            raise ValueError(
                f"The figure {figure!r} is outside the model's directory. Pass the name of an image next to the card."
            )
    if given := sorted(({*GENERATED, "model_name", "eval_results"} - {"base_model"}) & (metadata or {}).keys()):
        raise ValueError(f"metadata contains {', '.join(given)}, which the card determines itself. Omit it.")
    if not isinstance(model, PreTrainedModel):
        if not isinstance(model, (str, os.PathLike)):
            raise ValueError(f"model is a {type(model).__name__}. Pass a Transformers model, or the path or Hub ID of one.")
        file = Path(model, EVALUATION)
        if evaluation is None and file.is_file():
            evaluation = read_json(file)
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
        tags=["hf-posenc", *dict.fromkeys(name for each in _parts(report).values() for name in each.encoding.split("+"))],
        datasets=[dataset["id"] for dataset in measured["training"]["datasets"] if dataset["id"]] or None,
        metrics=list(dict.fromkeys(result["metric"] for result in own)) or None,
        model_name=name if own else None,
        eval_results=[_eval_result(result) for result in own] or None,
    )
    parts = [
        [f"# {name}", "", _purpose(model, report, name, metadata["base_model"])],
        _loading(model, report, auto, repo_id, metadata["base_model"]),
        [f"![{PurePosixPath(figure).stem}]({quote(figure)})" for figure in figures],
        _results(measured),
        _training(measured),
        _details(model, report, metadata),
        _citation(report),
    ]
    body = "\n\n".join("\n".join(part) for part in parts if part)
    return f"---\n{data.to_yaml()}\n---\n\n{body}\n"


def _without_weights(folder: str | os.PathLike[str]) -> PreTrainedModel:
    """Build a model on the meta device, with the head that its config names."""
    config = load_config(folder)
    cls: Any = architecture(config)
    with torch.device("meta"), explained(f"the model of {folder}"):
        return cls._from_config(config) if cls else AutoModel.from_config(config)


def architecture(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class that a config names in `architectures`, from this package if the model is patched. None if it doesn't exist."""
    name = (config.architectures or [""])[0]
    cls = getattr(derived if hasattr(config, "position_encoding") else transformers, name, None) if name else None
    return cls if isinstance(cls, type) and issubclass(cls, PreTrainedModel) else None


def user_classes(encoding: str) -> list[type]:
    """The classes of an encoding that are defined outside this package."""
    return [cls for cls in encoding_class(encoding).component_classes().values() if not is_ours(cls.__module__)]


def host_name(model: PreTrainedModel) -> str | None:
    """The name from which a patched model's original was loaded. None if it isn't known."""
    spec = getattr(model.config, "position_spec", None)
    return (spec and spec.original and spec.original.name_or_path) or None


def _base_model(model: PreTrainedModel) -> str | None:
    """The name of the original model if it has the form of a Hub ID with a namespace. Other names may be local directories."""
    name = host_name(model)
    return name if name and HUB_ID.fullmatch(name) else None


def _auto_class(model: PreTrainedModel) -> str | None:
    """The Auto class that loads a model with its head."""
    name = type(model).__name__
    # A model loaded with trust_remote_code has another class than `derived`, with the same name.
    cls: Any = getattr(derived, name) if name.startswith(derived.PREFIX) else type(model)
    for auto, (mapping, _) in TASKS.items():
        if getattr(transformers, mapping).get(cls.config_class or type(model.config), None) is cls:
            return auto
    return None


def _remote_auto_class(model: PreTrainedModel) -> str | None:
    """The Auto class that loads a model with trust_remote_code. None if its code isn't saved with it."""
    auto_map = getattr(model.config, "auto_map", None) or {}
    found = [auto for auto, name in auto_map.items() if str(name).rpartition(".")[2] == type(model).__name__]
    return min(found, key=lambda auto: auto not in TASKS, default=None)


def _parts(report: Report) -> dict[str, Report]:
    """The report on each patched submodel, or the report on the model."""
    return report.submodels or {"": report}


def _unit(model: PreTrainedModel) -> str:
    """What the patched encoder or decoder counts as positions: "tokens", "patches", or "positions"."""
    stacks: Any = filter(is_patched, model.modules())
    stack = min(stacks, key=lambda each: each.main_input_name != "input_ids", default=model)
    names = {"input_ids": "tokens", "inputs_embeds": "tokens", "pixel_values": "patches"}
    return names.get(stack.main_input_name, "positions")


def _purpose(model: PreTrainedModel, report: Report, name: str, base: str | None) -> str:
    """One sentence with the model, its encoding, and its maximum length."""
    made = f"a `{report.model_class}`" if base is None else f"[{base}](https://huggingface.co/{quote(base)})"
    encodings = " and ".join(f"`{each}`" for each in dict.fromkeys(report.encoding.split("+")))
    limit = "no limit on the length of its input" if report.max_length is None else _length(model, report)
    return f"{_cell(name)} is {made} with {encodings} position encoding and {limit}."


def _length(model: PreTrainedModel, report: Report) -> str:
    return f"a maximum length of {report.max_length:,} {_unit(model)}"


def _encoding(model: PreTrainedModel, report: Report) -> list[str]:
    """The list items about an encoding."""
    lines, encodings = list[str](), encoding_class(report.encoding).component_classes()
    for name, encoding in encodings.items():
        options = report.options if len(encodings) == 1 else report.options.get(name, {})
        said = [f"`{key}={value!r}`" for key, value in options.items()]
        if user_classes(encoding.type):
            there = " with hf-posenc; the code saved with the model includes it" if _remote_auto_class(model) else ""
            said.append(f"its class `{encoding.__name__}` is not part of hf-posenc: import or define it before loading{there}")
        if name in report.layers:
            said.append(f"in layer{'s' * (len(report.layers[name]) > 1)} {', '.join(map(str, report.layers[name]))}")
        lines.append(f"- position encoding `{name}`" + (f": {', '.join(said)}" if said else ""))
    for mechanism, paths in report.locations.items():
        lines.append(f"- `{mechanism}` in `{paths[0]}`" + (f" and {len(paths) - 1} more" if paths[1:] else ""))
    if report.where:
        lines.append(f"- applied in: {', '.join(f'`{name}` (`{kind}`)' for name, kind in report.where.items())}")
    return lines


def _details(model: PreTrainedModel, report: Report, metadata: dict[str, Any]) -> list[str]:
    lines = [f"- class: `{report.model_class}`"]
    for path, each in _parts(report).items():
        lines += [f"- submodel `{path}` (`{each.encoding}`)"] * bool(path) + _encoding(model, each)
    spec = getattr(model.config, "position_spec", None)
    if spec is not None and spec.submodel and not report.submodels:
        lines.append(f"- only in the submodel `{spec.submodel}`")
    lines.append("- maximum length: " + ("no limit" if report.max_length is None else f"{report.max_length} {_unit(model)}"))
    lines += [f"- ignored: {note}" for note in report.ignored]
    if found := report.calibration:
        lines.append(f"- calibrated on {found.texts} inputs of up to {found.length} tokens")
    lines.append(f"- parameters: {sum(each.numel() for each in model.parameters()):,}")
    if report.model_class.endswith(("ForSequenceClassification", "ForTokenClassification")):
        names = [str(label) for _, label in sorted(model.config.id2label.items())]
        shown = ", ".join(f"`{_cell(label)}`" for label in names[:LABELS])
        lines.append(f"- labels: {shown}" + (f" and {len(names) - LABELS} more" if names[LABELS:] else ""))
    for key in ("license", "language"):
        value = metadata.get(key) or "not stated"
        lines.append(f"- {key}: {_cell(value if isinstance(value, str) else ', '.join(map(str, value)))}")
    return ["## Details", "", *lines]


def _citation(report: Report) -> list[str]:
    known = [encoding_class(each.encoding).component_classes() for each in _parts(report).values()]
    papers = dict.fromkeys(paper for classes in known for encoding in classes.values() for paper in encoding.paper)
    papers_of = [f"The encoding is from {', '.join(f'<{paper}>' for paper in papers)}."] if papers else []
    return ["## Citation", "", " ".join([*papers_of, f"The model was made with [hf-posenc]({REPOSITORY})."])]


def _loading(model: PreTrainedModel, report: Report, auto: str | None, repo_id: str, base: str | None) -> list[str]:
    load = f'model = {auto or report.model_class}.from_pretrained("{repo_id}")'
    ways = [("", "python", [f"from transformers import {auto or report.model_class}", "", load])]
    if hasattr(model.config, "position_encoding"):
        users = [cls.__name__ for each in _parts(report).values() for cls in user_classes(each.encoding)]
        also = f"  # also import {', '.join(users)}" if users else ""
        package = [f"import hf_posenc{also}", f"from transformers import {auto}"]
        package = package if auto else [f"from hf_posenc import {report.model_class}"]
        ways = [("", "python", [*package, "", load]), ("To install hf-posenc:", "bash", [INSTALL])]
        if remote := _remote_auto_class(model):
            words = "Without hf-posenc, use the code saved with the model. It needs only torch and Transformers:"
            load = f'model = {remote}.from_pretrained("{repo_id}", trust_remote_code=True)'
            ways.append((words, "python", [f"from transformers import {remote}", "", load]))
        original, spec = report.model_class.removeprefix(derived.PREFIX), getattr(model.config, "position_spec", None)
        if report.can_unpatch:
            words = f"To restore the original positions and get a `{original}`:"
            ways.append((words, "python", ["import hf_posenc", "", "model = hf_posenc.unpatch(model)"]))
        elif base and spec is not None and spec.original is not None:
            words = "The original positions are not saved with this model. Load the base model instead:"
            load = f'model = {auto or original}.from_pretrained("{base}")'
            ways.append((words, "python", [f"from transformers import {auto or original}", "", load]))
    lines = ["## Load the model"]
    for words, language, code in ways:
        lines += ["", words] * bool(words) + ["", *_fenced(language, *code)]
    return lines


def _fenced(language: str, *lines: str) -> list[str]:
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", "".join(lines)))])
    return [fence + language, *lines, fence]


def _results(evaluation: dict[str, Any]) -> list[str]:
    """The results section. It has one table per task and dataset, with one metric of each model by input length."""
    groups: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    for result in evaluation["results"]:
        groups.setdefault(table_key(result), {}).setdefault(result["metric"], []).append(result)
    lines, left_out = ["## Results"] if groups or evaluation["notes"] else [], False
    for by_metric in groups.values():
        metric = next((each for each in HEADLINE if each in by_metric), next(iter(by_metric)))
        results = by_metric[metric]
        left_out |= len(by_metric) > 1 or any(result["interval"] for result in results)
        lines += ["", f"### {_dataset_link(results[0]['dataset'])}", ""]
        lines += [f"{_cell(results[0]['task'])}, {_cell(metric)}{_counts(results)}:", "", *_rows(results)]
    legend = "The model of this card is in bold." if any(result["this"] for result in evaluation["results"]) else ""
    others = f"[{EVALUATION}]({EVALUATION}) has all metrics, with {UNCORRECTED}." if left_out else ""
    notes = [" ".join(filter(None, (legend, others))), *map(_cell, evaluation["notes"])]
    return lines + [line for note in notes if note for line in ("", note)]


def _dataset_link(dataset: dict[str, Any]) -> str:
    url = dataset["url"] or (f"https://huggingface.co/datasets/{dataset['id']}" if dataset["id"] else None)
    name = f"[{_cell(dataset['name'])}]({quote(url, safe=':/?&=#%')})" if url else _cell(dataset["name"])
    part = ", ".join(_cell(dataset[key]) for key in ("config", "split") if dataset[key])
    return f"{name} ({part})" if part else name


def _counts(results: list[dict[str, Any]]) -> str:
    counts = sorted({result["count"] for result in results if result["count"]})
    return f", n = {' to '.join(f'{count:,}' for count in (counts[0], counts[-1])[: len(counts)])}" if counts else ""


def _rows(results: list[dict[str, Any]]) -> list[str]:
    lengths = {(result["unit"], result["length"]): shown_length(result) for result in results if result["length"]}
    lengths = {NO_LENGTH: "value"} | lengths if any(not result["length"] for result in results) else lengths
    found: dict[str, dict[tuple[str, int], str]] = {}
    for result in results:
        seeds = f" (mean of seeds {', '.join(map(str, result['seeds']))})" if result["seeds"] else ""
        name = f"**{_cell(result['model'])}**{seeds}" if result["this"] else _cell(result["model"]) + seeds
        key = (result["unit"], result["length"]) if result["length"] else NO_LENGTH
        found.setdefault(name, {})[key] = _number(result["value"])
    head = ["model", *(lengths[key] for key in sorted(lengths))]
    rows = [[name, *(row.get(key, "") for key in sorted(lengths))] for name, row in found.items()]
    return [f"| {' | '.join(row)} |" for row in (head, ["---", *["--:"] * len(lengths)], *rows)]


def _number(value: float) -> str:
    value = value or 0  # -0.0
    return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1e9 else f"{value:.2e}"


def _cell(text: str) -> str:
    return re.sub(r"([|<])", r"\\\1", " ".join(text.split()))


def _training(evaluation: dict[str, Any]) -> list[str]:
    datasets, steps = map(evaluation["training"].get, ("datasets", "steps"))
    details = [f"on {', '.join(map(_dataset_link, datasets))}"] if datasets else []
    details += [f"for {steps:,} steps"] if steps else []
    lines = [f"Trained {' '.join(details)}." if details else ""] + (
        ["", *_fenced("bash", *evaluation["command"].splitlines())] if evaluation["command"] else []
    )
    return ["## Training", *([""] if details else []), *lines] if any(lines) else []


def _eval_result(result: dict[str, Any]) -> EvalResult:
    dataset, about = result["dataset"], {key: result[key] for key in ("length", "interval", "count", "seeds")}
    return EvalResult(
        task_type=result["task"],
        # model-index requires an ID. sentence-transformers also derives a missing one from the name.
        dataset_type=dataset["id"] or re.sub(r"\W+", "-", dataset["name"].lower()).strip("-"),
        dataset_name=dataset["name"],
        dataset_config=dataset["config"],
        dataset_split=dataset["split"],
        dataset_revision=dataset["revision"],
        metric_type=result["metric"],
        metric_name=metric_name(result),
        metric_value=result["value"],
        metric_args={key: value for key, value in about.items() if value is not None} or None,
    )


def updated_card(existing: str, make: Callable[[dict[str, Any]], str]) -> str:
    """An existing card with new metadata. Its text is kept, unless it is empty, and so are its other metadata and tags.

    make: the new card for additional metadata, such as the license of the existing card.
    """
    if not existing.strip():
        return make({})
    old = ModelCard(existing)
    metadata = old.data.to_dict()
    new = ModelCard(make({key: value for key, value in metadata.items() if key not in GENERATED}))
    changed, own = new.data.to_dict(), {"hf-posenc", *list_encodings()}
    changed["tags"] = [*changed["tags"], *(tag for tag in metadata.get("tags") or () if tag not in own)]
    metadata = {key: value for key, value in metadata.items() if key not in MEASURED} | changed
    return f"---\n{ModelCardData(**metadata).to_yaml()}\n---\n{old.text if old.text.strip() else new.text}"
