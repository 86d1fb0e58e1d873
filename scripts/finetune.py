"""Fine-tune a model on labelled text: a stock one, one that is patched now, or one that was patched before.

    python scripts/finetune.py --model_name_or_path bert-base-uncased --position_encoding alibi \\
       --train_file train.csv --validation_file validation.csv --output_dir bert-alibi-classifier
    python scripts/finetune.py --task question-answering --train_file train.json …
    accelerate launch --config_file scripts/accelerate/multi_gpu.yaml scripts/finetune.py …

What a row has, by task, and what is measured:
    sequence-classification   a text, and a label: string or integer; accuracy and macro-F1
    token-classification      words, and as many labels: lists, or strings with blanks between; the same, over words
    question-answering        `question`, `context` and `answers` as in SQuAD, {"text": […], "answer_start": […]}, empty
                              where there is no answer; exact match and F1
The model, its tokenizer and all_results.json are written to --output_dir.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from datasets import ClassLabel
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
)

import hf_posenc
from training import flags, loop, models
from training.data import Cut, Row, Rows, check_columns, load_splits, mapped, warn_of_length


class Supervised(loop.Task):
    """A task with a head of its own; rows are checked where it is made."""

    kind: Any
    """The Auto class."""
    greater_is_better = True

    def __init__(self, accelerator: Accelerator, arguments: argparse.Namespace, tokenizer: Any) -> None:
        self.accelerator, self.arguments, self.tokenizer = accelerator, arguments, tokenizer
        self.splits = load_splits(accelerator, arguments)

    def adapt(self, config: Any) -> None:
        """Tell the model's config what the rows have."""

    def prepare(self, length: int, usable: int | None) -> dict[str, Any]:
        """The splits as rows that collate takes."""
        made = {name: self._mapped(name, split, length) for name, split in self.splits.items()}
        warn_of_length(self.accelerator, made["train"], length, usable)
        return made

    def _mapped(self, name: str, split: Any, length: int) -> Any:
        return mapped(self.accelerator, split, lambda rows: self.encode(rows, length), name)

    def encode(self, rows: Row, length: int) -> Row:
        raise NotImplementedError

    def _checked(self) -> Iterator[tuple[str, str, Row]]:
        """All rows, with the name of their split and words for where they are."""
        for name, split in self.splits.items():
            bar = tqdm(split, desc=f"reading the {name} rows", leave=False, disable=not self.accelerator.is_main_process)
            for number, row in enumerate(bar, start=1):
                yield name, f"row {number} of the {name} data", row


class Labelled(Supervised):
    """A task whose rows have a label, or as many as words."""

    best_by = "eval_macro_f1"

    of_words = False

    def __init__(self, accelerator: Accelerator, arguments: argparse.Namespace, tokenizer: Any) -> None:
        super().__init__(accelerator, arguments, tokenizer)
        check_columns(self.splits, {"--text_column": arguments.text_column, "--label_column": arguments.label_column})
        self.ids = {name: i for i, name in enumerate(self._names())}
        self.pad = (DataCollatorForTokenClassification if self.of_words else DataCollatorWithPadding)(tokenizer)

    def check(self, text: Any, label: Any, where: str) -> list[Any]:
        """The row's labels. Raises SystemExit for what is no text or no label."""
        if text is None or label is None or text == "" or label == "":
            raise SystemExit(f"{where} has no {'text' if text in (None, '') else 'label'}: leave it out")
        if not isinstance(text, str):
            raise SystemExit(f"`{self.arguments.text_column}` is to hold strings, but {where} has {text!r}")
        if not isinstance(label, (str, int)):
            raise SystemExit(f"`{self.arguments.label_column}` is to hold strings or integers, but {where} has {label!r}")
        return [label]

    def _names(self) -> list[Any]:
        """All labels of the training rows, sorted: the order of the ids.

        Raises SystemExit for less than two of them, and for validation labels that the training rows don't have.
        """
        text_column, label_column = self.arguments.text_column, self.arguments.label_column
        seen: dict[str, set[Any]] = {name: set() for name in self.splits}
        for name, where, row in self._checked():
            seen[name] |= set(self.check(row[text_column], row[label_column], where))
        known = sorted(seen["train"], key=lambda label: (str(type(label)), label))
        if len(known) < 2:
            raise SystemExit(f"the only label in the train data is {known[0]!r}: to classify takes two")
        if unknown := seen.get("validation", set()) - set(known):
            raise SystemExit(f"the validation data have the labels {sorted(unknown)}, the train data {known} alone")
        return known

    def _shown(self, label: Any) -> str:
        feature = (self.splits["train"].features or {}).get(self.arguments.label_column)
        feature = getattr(feature, "feature", feature)  # a list's own
        return feature.int2str(label) if isinstance(feature, ClassLabel) else str(label)

    def adapt(self, config: Any) -> None:
        """Raises SystemExit for a model that was trained on other labels."""
        names = [self._shown(label) for label in self.ids]
        trained = any(name.endswith(self.kind.__name__.removeprefix("AutoModel")) for name in config.architectures or ())
        if trained and config.num_labels != len(names):
            raise SystemExit(
                f"{self.arguments.model_name_or_path} tells {config.num_labels} classes apart, and the data have {len(names)} "
                f"({', '.join(names)}): start from the model it was trained from"
            )
        config.id2label, config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
        config.problem_type = None if self.of_words else "single_label_classification"
        self.accelerator.print(f"labels: {', '.join(names)}")

    def encode(self, rows: Row, length: int) -> Row:
        ids = self.tokenizer(rows[self.arguments.text_column], verbose=False).input_ids
        cut = Cut(self.tokenizer)
        return {
            "input_ids": [cut(each, length) for each in ids],
            "length": [len(each) for each in ids],
            "labels": [self.ids[label] for label in rows[self.arguments.label_column]],
        }

    def collate(self, rows: Rows, step: int | None = None) -> Any:
        return self.pad([{"input_ids": row["input_ids"], "labels": row["labels"]} for _, row in rows])

    def evaluate(self, accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> dict[str, float]:
        """Accuracy and macro-F1, with the share of the most frequent label beside them, and the mean loss of a label."""
        predicted: list[int] = []
        expected: list[int] = []
        losses = 0.0
        for batch in tqdm(loader, desc="evaluating", leave=False, disable=not accelerator.is_main_process):
            logits, labels = model(**batch).logits, batch["labels"]
            if not self.of_words:
                logits, labels = logits[:, None], labels[:, None]
            own, _ = loop.token_losses(logits, labels)
            answers = accelerator.pad_across_processes(logits.argmax(-1), dim=1)
            labels = accelerator.pad_across_processes(labels, dim=1, pad_index=-100)
            answers, labels, own = accelerator.gather_for_metrics((answers, labels, own))
            predicted += answers[labels != -100].tolist()
            expected += labels[labels != -100].tolist()
            losses += own.double().sum().item()
        return {
            "eval_accuracy": float(accuracy_score(expected, predicted)),
            "eval_macro_f1": float(f1_score(expected, predicted, average="macro")),
            "eval_loss": losses / len(expected),
            "eval_majority_share": max(Counter(expected).values()) / len(expected),
            "eval_samples": len(expected),
        }


class SequenceClassification(Labelled):
    kind = AutoModelForSequenceClassification


class TokenClassification(Labelled):
    """A word's label is asked for at its first token."""

    kind = AutoModelForTokenClassification
    of_words = True

    def __init__(self, accelerator: Accelerator, arguments: argparse.Namespace, tokenizer: Any) -> None:
        if not tokenizer.is_fast:
            raise SystemExit(f"{type(tokenizer).__name__} can't tell which token belongs to which word: take a fast tokenizer")
        if getattr(tokenizer, "add_prefix_space", True) is False:
            tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path, add_prefix_space=True)
        super().__init__(accelerator, arguments, tokenizer)

    def check(self, text: Any, label: Any, where: str) -> list[Any]:
        words, labels = separated(text), separated(label)
        if not words:
            raise SystemExit(f"{where} has no text: leave it out")
        if len(words) != len(labels):
            raise SystemExit(f"{where} has {len(words)} words and {len(labels)} labels: each word has one")
        for each in labels:
            super().check(words[0], each, where)
        return labels

    def encode(self, rows: Row, length: int) -> Row:
        words = [separated(text) for text in rows[self.arguments.text_column]]
        labels = [separated(label) for label in rows[self.arguments.label_column]]
        whole = self.tokenizer(words, is_split_into_words=True, verbose=False)
        lengths = [len(ids) for ids in whole.input_ids]
        encoded = self.tokenizer(words, is_split_into_words=True, truncation=True, max_length=length)
        made = []
        for row, names in enumerate(labels):
            places = encoded.word_ids(row)
            first = [place is not None and place not in places[:i] for i, place in enumerate(places)]
            made.append([self.ids[names[place]] if new else -100 for place, new in zip(places, first, strict=True)])
        return {"input_ids": encoded.input_ids, "length": lengths, "labels": made}


def separated(words: Any) -> list[Any]:
    """Words or labels as a list; of a string, what blanks separate."""
    return words.split() if isinstance(words, str) else list(words or [])


class QuestionAnswering(Supervised):
    """Find the answer's first and last token in the context, which is cut to overlapping pieces where it is long."""

    best_by = "eval_f1"
    kind = AutoModelForQuestionAnswering
    columns = {"question": "question", "context": "context", "answers": "answers"}

    def __init__(self, accelerator: Accelerator, arguments: argparse.Namespace, tokenizer: Any) -> None:
        if not tokenizer.is_fast:
            raise SystemExit(f"{type(tokenizer).__name__} can't tell where a token lies in the text: take a fast tokenizer")
        super().__init__(accelerator, arguments, tokenizer)
        check_columns(self.splits, self.columns)
        for _, where, row in self._checked():
            self._check(row, where)
        self.pad = DataCollatorWithPadding(tokenizer)

    def _check(self, row: Row, where: str) -> None:
        answers = row["answers"]
        if not all(isinstance(row[key], str) and row[key].strip() for key in ("question", "context")):
            raise SystemExit(f"{where} has no question, or no context: leave it out")
        if not isinstance(answers, dict) or {"text", "answer_start"} - answers.keys():
            raise SystemExit(f'{where} has the answers {answers!r}: give {{"text": […], "answer_start": […]}}')
        for text, start in zip(answers["text"], answers["answer_start"], strict=True):
            if row["context"][start : start + len(text)] != text or not text:
                raise SystemExit(f"{where}: the answer {text!r} isn't in the context at character {start}")

    def prepare(self, length: int, usable: int | None) -> dict[str, Any]:
        special, asked = self.tokenizer.num_special_tokens_to_add(pair=True), self.arguments.max_question_length
        if length - special - asked - self.arguments.doc_stride < 1:
            raise SystemExit(
                f"--max_length {length} leaves no room for a context beside {special} special tokens, "
                f"--max_question_length {asked} and --doc_stride {self.arguments.doc_stride}: lower these"
            )
        if "validation" in self.splits:
            # The rows themselves are kept, to be answered.
            self.examples = list(self.splits["validation"])
            self.unanswerable = not all(row["answers"]["text"] for row in self.examples)
            numbers = list(range(len(self.examples)))
            self.splits["validation"] = self.splits["validation"].add_column("example", numbers)
        return {name: self._mapped(name, split, length) for name, split in self.splits.items()}

    def encode(self, rows: Row, length: int) -> Row:
        asked = self.tokenizer(rows["question"], add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        ends = [offsets[: self.arguments.max_question_length][-1][1] for offsets in asked.offset_mapping]
        questions = [question[:end] for question, end in zip(rows["question"], ends, strict=True)]
        encoded = self.tokenizer(
            questions,
            rows["context"],
            truncation="only_second",
            max_length=length,
            stride=self.arguments.doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        made: Row = {key: encoded[key] for key in ("input_ids", "token_type_ids") if key in encoded}
        made |= {"start_positions": [], "end_positions": [], "context": []}
        for piece, example in enumerate(encoded["overflow_to_sample_mapping"]):
            inside = [place == 1 for place in encoded.sequence_ids(piece)]
            # Characters of each token of the context; nothing elsewhere.
            places = [
                list(place) if kept else [-1, -1] for place, kept in zip(encoded.offset_mapping[piece], inside, strict=True)
            ]
            start, end = self._answer(rows["answers"][example], places)
            made["start_positions"].append(start)
            made["end_positions"].append(end)
            made["context"].append(places)
        if "example" in rows:
            made["example"] = [rows["example"][i] for i in encoded["overflow_to_sample_mapping"]]
        return made

    def _answer(self, answers: dict[str, Any], places: list[list[int]]) -> tuple[int, int]:
        """The first and last token of the answer; 0, 0 where this piece doesn't have all of it."""
        if not answers["text"]:
            return 0, 0
        first, last = answers["answer_start"][0], answers["answer_start"][0] + len(answers["text"][0])
        inside = [i for i, (start, end) in enumerate(places) if start < last and end > first]
        whole = inside and places[inside[0]][0] <= first and places[inside[-1]][1] >= last
        return (inside[0], inside[-1]) if whole else (0, 0)

    def collate(self, rows: Rows, step: int | None = None) -> Any:
        named = ("input_ids", "token_type_ids", "start_positions", "end_positions")
        batch = self.pad([{key: row[key] for key in named if key in row} for _, row in rows])
        if step is None:
            length = batch["input_ids"].shape[1]
            before = self.tokenizer.padding_side == "left"
            spaces = [[[-1, -1]] * (length - len(row["context"])) for _, row in rows]
            context = [s + row["context"] if before else row["context"] + s for s, (_, row) in zip(spaces, rows, strict=True)]
            batch["context"], batch["example"] = torch.tensor(context), torch.tensor([row["example"] for _, row in rows])
        if self.tokenizer.padding_side == "left":
            shift = batch["attention_mask"].shape[1] - batch["attention_mask"].sum(1)
            for key in ("start_positions", "end_positions"):
                batch[key] = batch[key] + shift
        return batch

    def items(self, batch: Any) -> int:
        return len(batch["input_ids"])

    def evaluate(self, accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> dict[str, float]:
        """Exact match and F1 of the answers, as SQuAD has them, out of 1, and the mean loss of a piece."""
        from torchmetrics.functional.text import squad

        found: dict[int, list[tuple[float, float, int, int]]] = {}
        losses = []
        for batch in tqdm(loader, desc="evaluating", leave=False, disable=not accelerator.is_main_process):
            context, example = batch.pop("context"), batch.pop("example")
            output = model(**batch)
            starts, ends = output.start_logits.float(), output.end_logits.float()
            nothing = batch["attention_mask"].argmax(1, keepdim=True)  # the first token stands for no answer
            none = (starts.gather(1, nothing) + ends.gather(1, nothing))[:, 0]
            span = self._spans(starts, ends, context)
            loss = (
                F.cross_entropy(starts, batch["start_positions"], reduction="none")
                + F.cross_entropy(ends, batch["end_positions"], reduction="none")
            ) / 2
            gathered = accelerator.gather_for_metrics((example, span[0], none, span[1], span[2], loss))
            losses += gathered[-1].tolist()
            for number, *answer in zip(*(each.tolist() for each in gathered[:-1]), strict=True):
                found.setdefault(number, []).append(tuple(answer))
        answered = [{"prediction_text": self._said(number, found[number]), "id": str(number)} for number in sorted(found)]
        wanted: list[Any] = [
            {
                "answers": {"text": row["answers"]["text"] or [""], "answer_start": row["answers"]["answer_start"] or [0]},
                "id": str(i),
            }
            for i, row in enumerate(self.examples)
        ]
        scores = squad(answered, wanted)
        return {
            "eval_exact_match": scores["exact_match"].item() / 100,
            "eval_f1": scores["f1"].item() / 100,
            "eval_loss": sum(losses) / len(losses),
            "eval_samples": len(wanted),
        }

    def _spans(self, starts: Tensor, ends: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[B, L]` scores twice and `[B, L, 2]` characters -> score, first and last character of each piece's best answer."""
        scores = starts[:, :, None] + ends[:, None, :]
        inside = context[..., 0] >= 0
        longest = self.arguments.max_answer_length
        allowed = torch.ones_like(scores, dtype=torch.bool).triu().tril(longest - 1) & inside[:, :, None] & inside[:, None, :]
        best, place = scores.masked_fill(~allowed, -torch.inf).flatten(1).max(1)
        rows = torch.arange(len(best), device=best.device)
        return best, context[rows, place // starts.shape[1], 0], context[rows, place % starts.shape[1], 1]

    def _said(self, number: int, pieces: list[tuple[float, float, int, int]]) -> str:
        """The best answer of an example's pieces; none where all of them rather have none."""
        score, _, first, last = max(pieces)
        if self.unanswerable and min(none for _, none, _, _ in pieces) > score:
            return ""
        return self.examples[number]["context"][first:last]


TASKS: dict[str, type[Supervised]] = {
    "sequence-classification": SequenceClassification,
    "token-classification": TokenClassification,
    "question-answering": QuestionAnswering,
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = flags.argument_parser(__doc__)
    add = parser.add_argument_group("fine-tuning").add_argument
    add("--task", choices=TASKS, default="sequence-classification")
    add("--label_column", default="label")
    add("--max_length", "--max_seq_length", type=flags.at_least(1), help=flags.MAX_LENGTH_HELP)
    add("--doc_stride", type=flags.at_least(0), default=128, help="tokens that the pieces of a context share")
    add("--max_question_length", type=flags.at_least(1), default=64, help="tokens that questions are cut to")
    add("--max_answer_length", type=flags.at_least(1), default=30, help="tokens of the longest answer given")
    return flags.parse(parser, argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    accelerator = flags.start(arguments)
    tokenizer = models.load_tokenizer(arguments.model_name_or_path)
    task = TASKS[arguments.task](accelerator, arguments, tokenizer)
    model = models.load_model(arguments, task.kind, tokenizer, task.adapt)
    length = models.text_length(arguments.max_length, model, tokenizer)
    report = hf_posenc.inspect(model)
    accelerator.print(f"{report}\n  texts are cut to {length} tokens")
    splits = task.prepare(length, report.max_length)
    about = {"max_length": length, "train_samples": None if arguments.streaming else len(splits["train"])}
    loop.train(accelerator, arguments, task, model, task.tokenizer, splits, "all_results", lambda: about)


if __name__ == "__main__":
    main()
