"""The interface between the loop and a task."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from hf_posenc.training.data import Rows


class Task:
    """Collation, loss, and metrics. A step's loss is the mean over its `items`, independent of their division into batches."""

    best_by = "eval_loss"
    greater_is_better = False
    dropout = True

    def collate(self, rows: Rows, step: int | None = None) -> Any:
        """The batch of numbered examples for a training step, or for an evaluation if `step` is None."""
        raise NotImplementedError

    def items(self, batch: Any) -> int:
        """The number of items in a batch. Its loss is their mean."""
        return int((batch["labels"] != -100).sum())

    def loss(self, model: torch.nn.Module, batch: Any, step: int) -> Tensor:
        return model(**batch).loss

    def tokens(self, batch: Any) -> int:
        return int(batch["attention_mask"].sum())

    def evaluate(self, accelerator: Accelerator, model: torch.nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """The metrics over the examples of all processes."""
        raise NotImplementedError

    def save_beside(self, folder: Path) -> None:
        """Write additional files next to the model and its tokenizer."""


def token_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of losses and the number of labels of each example. logits: `[B, L, V]`. labels: `[B, L]`, -100 for none."""
    losses = F.cross_entropy(logits.float().mT, labels, reduction="none", ignore_index=-100)
    return losses.sum(1), (labels != -100).sum(1)
