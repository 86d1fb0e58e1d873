"""Extractive question answering: a task of finetune.py."""

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor
from transformers import AutoModelForQuestionAnswering, DataCollatorWithPadding

from hf_posenc.training.data import Row, Rows, check_columns
from hf_posenc.training.supervised import Supervised, check_fast


class QuestionAnswering(Supervised):
    """Finds the first and last token of the answer in the context. Long contexts are divided into overlapping pieces.

    A piece that doesn't contain the whole answer is trained to predict its first token, which means "no answer". If there are
    several answers, training uses the first one, and evaluation the best match.
    """

    kind = AutoModelForQuestionAnswering
    flags = ("doc_stride", "max_question_length", "max_answer_length")
    best_by = "eval_f1"

    def __init__(self, accelerator: Accelerator, arguments: argparse.Namespace, tokenizer: Any) -> None:
        try:
            from torchmetrics.functional.text import squad
        except ImportError:
            raise SystemExit("Question answering is evaluated with torchmetrics. Run: pip install torchmetrics") from None
        self.measure = squad
        check_fast(tokenizer)
        super().__init__(accelerator, arguments, tokenizer)
        for column in ("question", "context", "answers"):
            check_columns(self.splits, {"--help": column})
        self.pad = DataCollatorWithPadding(tokenizer)

    def prepare(self, accelerator: Accelerator, length: int) -> dict[str, Any]:
        special, asked = self.tokenizer.num_special_tokens_to_add(pair=True), self.arguments.max_question_length
        if length - special - asked - self.arguments.doc_stride < 1:
            raise SystemExit(
                f"--text_length {length} leaves no room for a context, given {special} special tokens, --max_question_length "
                f"{asked}, and --doc_stride {self.arguments.doc_stride}. Lower these, or raise --text_length."
            )
        if "validation" in self.splits:
            self.examples = self.splits["validation"].select_columns(["question", "context", "answers"])
            self.unanswerable = not all(answers["text"] for answers in self.examples["answers"])
            self.splits["validation"] = self.examples.add_column("example", list(range(len(self.examples))))
        return super().prepare(accelerator, length)

    def encoder(self, length: int) -> Callable[[Row], Row]:
        asked, stride = self.arguments.max_question_length, self.arguments.doc_stride
        return partial(encoded, tokenizer=self.tokenizer, length=length, asked=asked, stride=stride)

    def collate(self, rows: Rows, step: int | None = None) -> Any:
        named = ("input_ids", "token_type_ids", "labels")
        batch = self.pad([{key: row[key] for key in named if key in row} for _, row in rows])
        length, left = batch["input_ids"].shape[1], self.tokenizer.padding_side == "left"
        if left:
            batch["labels"] += length - batch["attention_mask"].sum(1, keepdim=True)
        if step is None:
            batch["example"] = torch.tensor([row["example"] for _, row in rows])
            batch["context"] = torch.full((len(rows), length, 2), -1)
            for own, (_, row) in zip(batch["context"], rows, strict=True):
                place = slice(-len(row["context"]), None) if left else slice(len(row["context"]))
                own[place] = torch.tensor(row["context"])
        return batch

    def scores(self, model: torch.nn.Module, batch: Any) -> Tensor:
        """The scores `[B, L, 2]` of each token as the first and as the last token of the answer.

        Padding has -inf, so that the loss doesn't depend on the other examples of a batch.
        """
        named = ("input_ids", "attention_mask", "token_type_ids")
        output = model(**{key: batch[key] for key in named if key in batch})
        scores = torch.stack((output.start_logits, output.end_logits), dim=2).float()
        return scores.masked_fill(batch["attention_mask"][:, :, None] == 0, -torch.inf)

    def loss(self, model: torch.nn.Module, batch: Any, step: int) -> Tensor:
        return F.cross_entropy(self.scores(model, batch), batch["labels"])

    def evaluate(self, accelerator: Accelerator, model: torch.nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """SQuAD's exact match and F1, from 0 to 1, and the mean loss per piece."""
        pieces: dict[int, list[Any]] = {}
        losses: list[float] = []
        for batch in batches:
            scores = self.scores(model, batch)
            loss = F.cross_entropy(scores, batch["labels"], reduction="none").mean(1)
            first = batch["attention_mask"].argmax(1)
            none = scores[torch.arange(len(first)), first].sum(1)
            found = best_spans(scores, batch["context"], self.arguments.max_answer_length)
            own, numbers, *found = accelerator.gather_for_metrics((loss, batch["example"], *found, none))
            losses += own.tolist()
            for number, *answer in zip(numbers.tolist(), *(each.tolist() for each in found), strict=True):
                pieces.setdefault(number, []).append(answer)
        said = [{"prediction_text": self._answer(number, pieces[number]), "id": str(number)} for number in pieces]
        wanted: list[Any] = []
        for number, answers in enumerate(self.examples["answers"]):
            wanted.append({"answers": answers if answers["text"] else {"text": [""], "answer_start": [0]}, "id": str(number)})
        measured = self.measure(said, wanted)
        return {
            "eval_exact_match": measured["exact_match"].item() / 100,
            "eval_f1": measured["f1"].item() / 100,
            "eval_loss": sum(losses) / len(losses),
            "eval_samples": len(wanted),
        }

    def _answer(self, number: int, pieces: list[Any]) -> str:
        """The best answer of an example's pieces. It is empty if every piece scores "no answer" higher."""
        score, begin, end, _ = max(pieces)
        if self.unanswerable and min(none for *_, none in pieces) > score:
            return ""
        return self.examples[number]["context"][begin:end]


def encoded(rows: Row, tokenizer: Any, length: int, asked: int, stride: int) -> Row:
    """Questions, truncated to `asked` tokens, with pieces of their contexts that overlap by `stride` tokens."""
    for context, answers in zip(rows["context"], rows["answers"], strict=True):
        for text, start in zip(answers["text"], answers["answer_start"], strict=True):
            if not text or start < 0 or context[start : start + len(text)] != text:
                raise ValueError(f"The answer {text!r} isn't at character {start} of the context {context!r}.")
    questions = tokenizer(rows["question"], add_special_tokens=False, verbose=False, return_offsets_mapping=True)
    ends = [max((end for _, end in offsets[:asked]), default=0) for offsets in questions.offset_mapping]
    pairs = tokenizer(
        [question[:end] for question, end in zip(rows["question"], ends, strict=True)],
        rows["context"],
        truncation="only_second",
        max_length=length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    examples = pairs["overflow_to_sample_mapping"]
    # The characters of each token of the context.
    places = [
        [list(place) if part == 1 else [-1, -1] for place, part in zip(offsets, pairs.sequence_ids(piece), strict=True)]
        for piece, offsets in enumerate(pairs.offset_mapping)
    ]
    made: Row = {key: pairs[key] for key in ("input_ids", "token_type_ids") if key in pairs}
    made["labels"] = [answer_tokens(rows["answers"][example], each) for example, each in zip(examples, places, strict=True)]
    if "example" in rows:
        made |= {"context": places, "example": [rows["example"][example] for example in examples]}
    return made


def answer_tokens(answers: Row, places: list[list[int]]) -> list[int]:
    """The first and last token of the first answer, or [0, 0] if the piece doesn't contain all of it."""
    if not answers["text"]:
        return [0, 0]
    begin = answers["answer_start"][0]
    end = begin + len(answers["text"][0])
    inside = [i for i, (first, last) in enumerate(places) if first < end and last > begin]
    whole = inside and places[inside[0]][0] <= begin and places[inside[-1]][1] >= end
    return [inside[0], inside[-1]] if whole else [0, 0]


def best_spans(scores: Tensor, context: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best score of each example, and the first character and the end of its span.

    A span has at most `longest` tokens. Its score is the sum of the scores of its first and last token.

    scores: `[B, L, 2]`. context: the characters of each token, `[B, L, 2]`, -1 outside the context.
    """
    starts, ends = scores.masked_fill(context < 0, -torch.inf).unbind(2)
    within_reach = F.pad(ends, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)  # [B, L, longest]
    best, place = (starts[:, :, None] + within_reach).flatten(1).max(1)
    rows, first = torch.arange(len(best)), place // longest
    return best, context[rows, first, 0], context[rows, first + place % longest, 1]
