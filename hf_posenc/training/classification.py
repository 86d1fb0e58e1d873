"""Classification of texts and words: tasks of finetune.py."""

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from datasets import ClassLabel
from seqeval.metrics.sequence_labeling import precision_recall_fscore_support
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
)

from hf_posenc.training.data import Cut, Row, Rows, check_columns
from hf_posenc.training.supervised import Supervised, check_fast
from hf_posenc.training.task import token_losses

Labels = list[list[int]]
"""The numbers of the labels of each example."""


def flat(labels: Labels) -> list[int]:
    return [label for row in labels for label in row]


class Labelled(Supervised):
    """A task whose examples have one label, or one label per word."""

    flags = ("text_column", "label_column")
    best_by = "eval_macro_f1"
    of_words = False

    def __init__(self, accelerator: Accelerator, arguments: argparse.Namespace, tokenizer: Any) -> None:
        super().__init__(accelerator, arguments, tokenizer)
        check_columns(self.splits, {"--text_column": arguments.text_column, "--label_column": arguments.label_column})
        self.ids = {label: i for i, label in enumerate(self._labels())}
        self.pad = (DataCollatorForTokenClassification if self.of_words else DataCollatorWithPadding)(tokenizer)

    def _labels(self) -> list[Any]:
        """All labels of the training data, sorted.

        Raises SystemExit if there are fewer than two, or if the validation data contain another label.
        """
        column, seen = self.arguments.label_column, {name: set[Any]() for name in self.splits}
        for name, split in self.splits.items():
            for row in split.select_columns([column]):
                for label in separated(row[column]) if self.of_words else [row[column]]:
                    if not isinstance(label, (str, int)) or label == "":
                        raise SystemExit(
                            f"The {name} data have the label {label!r} in the column `{column}`, which must contain strings or "
                            "integers."
                        )
                    seen[name].add(label)
        known = sorted(seen["train"], key=lambda label: (str(type(label)), label))
        if len(known) < 2:
            raise SystemExit(
                f"The training data contain only the label {known[0]!r}. Classification needs at least two labels."
            )
        if unknown := seen.get("validation", set()) - set(known):
            raise SystemExit(f"The validation data have the labels {sorted(unknown)}, and the training data only have {known}.")
        return known

    def _shown(self, label: Any) -> str:
        feature = (self.splits["train"].features or {}).get(self.arguments.label_column)
        feature = getattr(feature, "feature", feature)  # of the items of a list
        return feature.int2str(label) if isinstance(feature, ClassLabel) else str(label)

    def adapt(self, config: Any) -> None:
        """Name the labels in the config, in the order of a model trained on the same labels.

        Raises SystemExit if the model has another number of labels.
        """
        labels = {self._shown(label): label for label in self.ids}
        head = self.kind.__name__.removeprefix("AutoModel")
        if any(name.endswith(head) for name in config.architectures or ()):
            if config.num_labels != len(labels):
                raise SystemExit(
                    f"{self.arguments.model_name_or_path} distinguishes {config.num_labels} classes, and the data have "
                    f"{len(labels)} ({', '.join(labels)}). Start from the model that it was trained from."
                )
            if config.label2id.keys() == labels.keys():
                labels = {name: labels[name] for name in sorted(labels, key=config.label2id.get)}
        self.ids = {label: i for i, label in enumerate(labels.values())}
        config.id2label, config.label2id = dict(enumerate(labels)), {name: i for i, name in enumerate(labels)}
        config.problem_type = None if self.of_words else "single_label_classification"

    def prepare(self, accelerator: Accelerator, length: int) -> dict[str, Any]:
        accelerator.print(f"labels: {', '.join(map(self._shown, self.ids))}")
        return super().prepare(accelerator, length)

    def encoder(self, length: int) -> Callable[[Row], Row]:
        columns = (self.arguments.text_column, self.arguments.label_column)
        encode = encoded_words if self.of_words else encoded_texts
        return partial(encode, columns=columns, tokenizer=self.tokenizer, ids=self.ids, length=length)

    def collate(self, rows: Rows, step: int | None = None) -> Any:
        return self.pad([{"input_ids": row["input_ids"], "labels": row["labels"]} for _, row in rows])

    def evaluate(self, accelerator: Accelerator, model: torch.nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Accuracy, F1, the mean loss per label, and the share of the most frequent label for comparison."""
        predicted: Labels = []
        expected: Labels = []
        losses = 0.0
        for batch in batches:
            logits, labels = model(**batch).logits, batch["labels"]
            if not self.of_words:
                logits, labels = logits[:, None], labels[:, None]
            own, _ = token_losses(logits, labels)
            answers = accelerator.pad_across_processes(logits.argmax(-1), dim=1)
            labels = accelerator.pad_across_processes(labels, dim=1, pad_index=-100)
            answers, labels, own = accelerator.gather_for_metrics((answers, labels, own))
            for said, wanted in zip(answers.tolist(), labels.tolist(), strict=True):
                predicted.append([answer for answer, label in zip(said, wanted, strict=True) if label != -100])
                expected.append([label for label in wanted if label != -100])
            losses += own.cpu().double().sum().item()
        wanted = flat(expected)
        return {
            "eval_accuracy": float(accuracy_score(wanted, flat(predicted))),
            **self.f1(expected, predicted),
            "eval_loss": losses / len(wanted),
            "eval_majority_share": max(Counter(wanted).values()) / len(wanted),
            "eval_samples": len(wanted),
        }

    def f1(self, expected: Labels, predicted: Labels) -> dict[str, float]:
        return {"eval_macro_f1": float(f1_score(flat(expected), flat(predicted), average="macro"))}


class SequenceClassification(Labelled):
    kind = AutoModelForSequenceClassification


class TokenClassification(Labelled):
    """Predicts the label of a word at its first token. Words that are truncated or have no token are ignored."""

    kind = AutoModelForTokenClassification
    best_by = "eval_f1"
    of_words = True

    def __init__(self, accelerator: Accelerator, arguments: argparse.Namespace, tokenizer: Any) -> None:
        check_fast(tokenizer)
        super().__init__(accelerator, arguments, tokenizer)

    def f1(self, expected: Labels, predicted: Labels) -> dict[str, float]:
        """Precision, recall, and F1 over entities. A label without a prefix such as B- is an entity of one word."""
        names = [self._shown(label) for label in self.ids]
        names = [name if name == "O" or name[1:2] == "-" else f"B-{name}" for name in names]
        tags = ([[names[label] for label in row] for row in rows] for rows in (expected, predicted))
        precision, recall, f1, _ = precision_recall_fscore_support(*tags, average="micro", zero_division=0)
        return {"eval_precision": float(precision), "eval_recall": float(recall), "eval_f1": float(f1)}

    def prepare(self, accelerator: Accelerator, length: int) -> dict[str, Any]:
        made = super().prepare(accelerator, length)
        if "validation" in made and max(map(max, made["validation"]["labels"])) < 0:
            raise SystemExit("No word of the validation data has a token. Use other validation data.")
        return made


def encoded_texts(rows: Row, columns: tuple[str, str], tokenizer: Any, ids: dict[Any, int], length: int) -> Row:
    """Token IDs truncated to `length`, the lengths before truncation, and the numbers of the labels.

    columns: the columns of texts and labels.
    """
    texts, labels = (rows[column] for column in columns)
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{text!r} isn't a text.")
    whole, cut = tokenizer(texts, verbose=False).input_ids, Cut(tokenizer)
    return {
        "input_ids": [cut(each, length) for each in whole],
        "length": [len(each) for each in whole],
        "labels": [ids[label] for label in labels],
    }


def encoded_words(rows: Row, columns: tuple[str, str], tokenizer: Any, ids: dict[Any, int], length: int) -> Row:
    """`encoded_texts` for words. They are joined by spaces, as in texts for pretraining and inference."""
    words, labels = ([separated(each) for each in rows[column]] for column in columns)
    whole, cut = tokenizer([" ".join(each) for each in words], return_offsets_mapping=True, verbose=False), Cut(tokenizer)
    made: Row = {"input_ids": [], "length": [], "labels": []}
    for tokens, offsets, row_words, row_labels in zip(whole.input_ids, whole.offset_mapping, words, labels, strict=True):
        if len(row_words) != len(row_labels):
            raise ValueError(f"{row_words} are {len(row_words)} words and have {len(row_labels)} labels. Each word needs one.")
        wanted = [-100] * len(tokens)
        for token, label in zip(first_tokens(row_words, offsets), row_labels, strict=True):
            if token is not None:
                wanted[token] = ids[label]
        made["input_ids"].append(cut(tokens, length))
        made["length"].append(len(tokens))
        made["labels"].append(cut(wanted, length))
    return made


def separated(words: Any) -> list[Any]:
    """Words or labels as a list. A string is split at whitespace."""
    return words.split() if isinstance(words, str) else words if isinstance(words, list) else [words]


def first_tokens(words: list[str], offsets: list[tuple[int, int]]) -> Iterator[int | None]:
    """The first token of each word, or None for words without tokens. offsets: characters in the joined words."""
    begin = token = 0
    for word in words:
        while token < len(offsets) and offsets[token][1] <= begin:
            token += 1
        found = token < len(offsets) and offsets[token][0] < begin + len(word)
        yield token if found else None
        token += found
        begin += len(word) + 1
