"""Accuracy of text classifiers by input length.

Shapes: N texts, L classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from hf_posenc.evaluation import metrics
from hf_posenc.evaluation.metrics import Difference, Interval
from hf_posenc.evaluation.retrieval import by_text
from hf_posenc.inspection import inspect

Label = str | int
"""The name of a class in config.label2id, or its ID."""


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of a classifier with its 95% interval, and its macro-F1.

    difference: of the accuracy from the first model's on the same texts. None for the first model.
    """

    accuracy: float
    interval: Interval
    macro_f1: float
    difference: Difference | None


@dataclass(frozen=True)
class Bucket:
    """The texts of more than `above` and at most `up_to` tokens. up_to: None for no limit. rows: model -> accuracy."""

    above: int
    up_to: int | None
    texts: int
    rows: dict[str, Accuracy]


@dataclass(frozen=True)
class Classification:
    """The buckets that have texts, and all texts."""

    buckets: tuple[Bucket, ...]
    all: Bucket


def compare_classifiers(
    models: dict[str, tuple[PreTrainedModel, Any]], texts: Sequence[str], labels: Sequence[Label], lengths: Sequence[int]
) -> Classification:
    """Evaluate classifiers on labeled texts, truncated to each model's maximum length.

    models: name -> (model, tokenizer). The first model's tokenizer determines the lengths of the texts.
    lengths: upper limits of the buckets in tokens, including special tokens. Longer texts are in another bucket.

    Raises ValueError for a model without two or more exclusive classes, and for a label that isn't a class of a model.
    """
    for name, (model, _) in models.items():
        check_classes(name, model.config)
    check_ids_agree({name: model.config for name, (model, _) in models.items()}, labels)
    expected = {name: label_ids(name, labels, model.config) for name, (model, _) in models.items()}
    predicted = {name: predict(model, tokenizer, texts, name) for name, (model, tokenizer) in models.items()}
    sizes = np.asarray(token_counts(next(iter(models.values()))[1], texts))

    def bucket(above: int, up_to: int | None) -> Bucket:
        chosen = (sizes > above) & (sizes <= (sizes.max() if up_to is None else up_to))
        rows = _rows({name: (expected[name][chosen], predicted[name][chosen]) for name in models}) if chosen.any() else {}
        return Bucket(above, up_to, int(chosen.sum()), rows)

    edges = [0, *sorted({*lengths})]
    buckets = [bucket(above, up_to) for above, up_to in zip(edges, [*edges[1:], None], strict=True)]
    return Classification(tuple(each for each in buckets if each.texts), bucket(-1, None))


def is_classifier(model: PreTrainedModel) -> bool:
    """Whether a model, patched or not, classifies texts."""
    return getattr(type(model), "original_class", type(model)).__name__.endswith("ForSequenceClassification")


def check_classes(name: str, config: Any) -> None:
    """Raises ValueError for a model that isn't a classifier with two or more exclusive classes."""
    if config.num_labels < 2 or config.problem_type in ("regression", "multi_label_classification"):
        raise ValueError(
            f"{name} has num_labels={config.num_labels} and problem_type={config.problem_type!r}. Accuracy needs two or more "
            "classes of which each text has one."
        )


def check_ids_agree(configs: dict[str, Any], labels: Sequence[Label]) -> None:
    """Raises ValueError if labels are IDs, and two models give the same class names different IDs."""
    (first, baseline), *others = ((name, config.label2id) for name, config in configs.items())
    numbers = [label for label in labels if str(label) not in baseline]
    for name, ids in others:
        if numbers and ids.keys() == baseline.keys() and ids != baseline:
            raise ValueError(
                f"The label {numbers[0]!r} is an ID, but {first} and {name} number their classes differently. Use class names: "
                f"{', '.join(baseline)}."
            )


def label_ids(name: str, labels: Sequence[Label], config: Any) -> np.ndarray:
    """The IDs of labels in a model, `[N]`. Labels are names if all of them are in config.label2id, and IDs otherwise.

    Raises ValueError for a label that is neither, and for a mixture of both.
    """
    ids = {str(key): int(number) for key, number in config.label2id.items()}
    numbers = {str(number): number for number in range(config.num_labels)}
    known = ids if all(str(label) in ids for label in labels) else numbers
    if unknown := [label for label in labels if str(label) not in known]:
        raise ValueError(
            f"The label {unknown[0]!r} isn't a class of {name}. Its classes are {', '.join(ids)}, or the IDs 0 to "
            f"{config.num_labels - 1}. Correct the labels, or choose another --label-column."
        )
    return np.asarray([known[str(label)] for label in labels])


def predict(model: PreTrainedModel, tokenizer: Any, texts: Sequence[str], title: str) -> np.ndarray:
    """The most probable class of each text, `[N]`. Texts are truncated to the model's maximum length."""
    limit = inspect(model).max_length
    logits = by_text(model, tokenizer, texts, limit, title, lambda batch: model(**batch).logits.float())
    return logits.argmax(-1).numpy()


def macro_f1(expected: np.ndarray, predicted: np.ndarray) -> float:
    """The mean F1 over the classes that occur in either array, `[N]` each."""
    scores = []
    for number in np.union1d(expected, predicted):
        ours, theirs = predicted == number, expected == number
        scores.append(2 * (ours & theirs).sum() / (ours.sum() + theirs.sum()))
    return float(np.mean(scores))


def token_counts(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """The number of tokens of each text, including special tokens."""
    return [len(ids) for ids in tokenizer(list(texts), verbose=False)["input_ids"]]


def _rows(answers: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, Accuracy]:
    """Model -> accuracy. answers: model -> (expected, predicted)."""
    right = {name: (expected == predicted).astype(float) for name, (expected, predicted) in answers.items()}
    first, base = next(iter(right.items()))
    groups = np.arange(len(base))
    return {
        name: Accuracy(
            *metrics.share(own, groups),
            macro_f1(*answers[name]),
            None if name == first else Difference(*metrics.difference(own, base, groups), len(own)),
        )
        for name, own in right.items()
    }
