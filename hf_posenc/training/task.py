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
    """Collation, loss and metrics. A step's loss is the mean over its `items`, however they are divided into batches."""

    best_by = "eval_loss"
    greater_is_better = False
    dropout = True

    def collate(self, rows: Rows, step: int | None = None) -> Any:
        """The batch of numbered rows for a training step, or for an evaluation if `step` is None."""
        raise NotImplementedError

    def items(self, batch: Any) -> int:
        """The number of items of a batch; its loss is their mean."""
        return int((batch["labels"] != -100).sum())

    def loss(self, model: torch.nn.Module, batch: Any, step: int) -> Tensor:
        return model(**batch).loss

    def tokens(self, batch: Any) -> int:
        return int(batch["attention_mask"].sum())

    def evaluate(self, accelerator: Accelerator, model: torch.nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """The metrics over the rows of all processes."""
        raise NotImplementedError

    def save_beside(self, folder: Path) -> None:
        """Write what belongs beside the model and its tokenizer."""


def token_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """`[B, L, V]` and `[B, L]` with -100 where there is no label -> each row's sum of losses and its number of labels."""
    losses = F.cross_entropy(logits.float().mT, labels, reduction="none", ignore_index=-100)
    return losses.sum(1), (labels != -100).sum(1)
