"""Language modeling: the code that train_mlm.py and train_clm.py share."""

import argparse
import math
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator

import hf_posenc
from hf_posenc.training.data import check_texts, load_splits, tokenized
from hf_posenc.training.flags import TEXT_LENGTH_HELP, argument_parser, at_least
from hf_posenc.training.loop import train
from hf_posenc.training.models import load_model, text_length, warn_of_length
from hf_posenc.training.task import Task, token_losses


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of train_mlm.py and train_clm.py."""
    parser = argument_parser(description)
    parser.add_argument("--text_length", type=at_least(1), help=TEXT_LENGTH_HELP)
    parser.add_argument(
        "--packing", action="store_true", help="pack texts into blocks of --text_length without masks between them"
    )
    parser.add_argument("--from_scratch", action="store_true", help="use the model's config and tokenizer, but not its weights")
    return parser


class LanguageModeling(Task):
    """The prediction of tokens. `labels` are -100 for tokens that aren't predicted."""

    shift = 0
    """1 if logits predict the next token."""

    def items(self, batch: Any) -> int:
        return int((batch["labels"][:, self.shift :] != -100).sum())

    def evaluate(self, accelerator: Accelerator, model: torch.nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """The mean loss per token, the perplexity, and the token accuracy."""
        sums = torch.zeros(3, dtype=torch.float64)
        for batch in batches:
            logits = model(**batch).logits[:, : batch["labels"].shape[1] - self.shift]
            labels = batch["labels"][:, self.shift :]
            losses, counts = token_losses(logits, labels)
            right = ((logits.argmax(-1) == labels) & (labels != -100)).sum(1)
            gathered = accelerator.gather_for_metrics((losses, right, counts))
            sums += torch.stack([each.cpu().double().sum() for each in gathered])  # MPS has no float64
        loss, right, count = sums.tolist()
        if not count:
            raise SystemExit("The validation data contain no token to predict. Use longer texts.")
        return {
            "eval_loss": loss / count,
            "eval_perplexity": math.exp(min(loss / count, 700)),
            "eval_accuracy": right / count,
        }


def run(accelerator: Accelerator, arguments: argparse.Namespace, task: LanguageModeling, kind: Any, tokenizer: Any) -> None:
    """Load the model and the data, tokenize, and train."""
    splits = check_texts(accelerator, load_splits(accelerator, arguments), arguments.text_column)
    model = load_model(arguments, kind, tokenizer)
    length = text_length(arguments, arguments.text_length, model, tokenizer)
    report = hf_posenc.inspect(model)
    accelerator.print(f"{report}\n  texts are {'packed' if arguments.packing else 'truncated'} to {length} tokens")
    splits = tokenized(accelerator, splits, tokenizer, arguments.text_column, length, packing=arguments.packing)
    warn_of_length(accelerator, arguments, model, splits["train"], length)
    train(accelerator, arguments, task, model, tokenizer, splits, "all_results", lambda: {"text_length": length})
