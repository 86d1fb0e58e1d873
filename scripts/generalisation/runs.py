"""One run of a study: a model is trained on a task at lengths up to L, and tested at L and beyond.

`run` takes all that a result depends on. Runs that differ in the encoding alone have the same host weights and see the same
rows in the same order.
"""

import math
import time
import zlib
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_posenc
from generalisation import models
from generalisation.models import Encoding, Sizes
from generalisation.tasks import IGNORED, TASKS, Task

MULTIPLES = (1.0, 1.5, 2.0, 4.0, 8.0)
"""Test lengths in L; the last one is the room that limited encodings are given."""
MAX_NORM = 1.0
BETAS = (0.9, 0.99)
LOSSES = 20
"""Training losses that a record keeps."""
TEST_TOKENS = 8192
"""Tokens in a batch of test rows."""


@dataclass(frozen=True)
class Setup:
    """What the runs of a study have in common."""

    host: str = "llama"
    sizes: Sizes = Sizes()
    learning_rate: float = 5e-3
    weight_decay: float = 0.01
    warmup_steps: int = 30
    test_rows: int = 128
    multiples: tuple[float, ...] = MULTIPLES


@dataclass(frozen=True)
class Training:
    """What the runs of a task have in common; length is L."""

    length: int
    steps: int
    batch_size: int
    digest: str = ""


def training_of(task: str, length: int | None = None, steps: int | None = None, batch_size: int | None = None) -> Training:
    """A task's defaults, but for what is given."""
    own = TASKS[task]
    chosen = Training(length or own.length, steps or own.steps, batch_size or own.batch_size)
    return replace(chosen, digest=own.digest())


def test_lengths(training: Training, multiples: tuple[float, ...]) -> list[int]:
    return list(dict.fromkeys(int(training.length * Fraction(multiple)) for multiple in multiples))


def run(setup: Setup, training: Training, task: str, encoding: Encoding, seed: int) -> dict[str, Any]:
    """Train and test one model. The record has the scores by test length, see `measured`."""
    started, kind = time.process_time(), TASKS[task]
    lengths = test_lengths(training, setup.multiples)

    def host() -> PreTrainedModel:
        return models.stock(setup.host, setup.sizes, kind.vocabulary, kind.tokens(training.length), seed)

    model = models.fitting(host, encoding, seed, kind.tokens(max(lengths)))
    losses = trained(model, setup, training, kind, stream_seed(task, seed))
    return {
        "task": task,
        "encoding": encoding.label,
        "seed": seed,
        "max_length": hf_posenc.inspect(model).max_length,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "losses": losses,
        "scores": {str(length): measured(model, *kind.test(length, setup.test_rows)) for length in lengths},
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def stream_seed(task: str, seed: int) -> int:
    """The seed of a run's training rows: the same for all encodings."""
    return zlib.crc32(f"{task} {seed}".encode())


def trained(model: PreTrainedModel, setup: Setup, training: Training, task: Task, seed: int) -> list[float | None]:
    """Train with AdamW; the learning rate rises over the warm-up, then falls to zero. Returns losses along the way."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setup.learning_rate, betas=BETAS, weight_decay=setup.weight_decay, fused=True
    )
    warmup = min(setup.warmup_steps, training.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1, warmup), 1 - step / training.steps)
    )
    model.train()
    kept, every = [], max(1, training.steps // LOSSES)
    for step in range(training.steps):
        input_ids, labels = task.train(training.length, training.batch_size, generator)
        loss = losses_of(model, input_ids, labels)[labels[:, 1:] != IGNORED].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        if step % every == 0:
            kept.append(finite(loss.item()))
    return kept


def losses_of(model: PreTrainedModel, input_ids: Tensor, labels: Tensor) -> Tensor:
    """The negative log-likelihood of each token but the first, `[B, T - 1]`; zero where it isn't scored."""
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none")


@torch.no_grad()
def measured(model: PreTrainedModel, input_ids: Tensor, labels: Tensor) -> dict[str, float | None]:
    """Scores of the answers, each token predicted from the right ones before it.

    exact: the part of rows whose answer has no wrong token, which is what greedy decoding would get right, too.
    tokens: the part of right tokens. loss: in nats per token; None if it isn't finite.
    """
    model.eval()
    size = max(1, TEST_TOKENS // input_ids.shape[1])
    right, losses = [], []
    for rows, wanted in zip(input_ids.split(size), labels.split(size), strict=True):
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
        right.append(logits.argmax(-1) == wanted[:, 1:])
        losses.append(
            torch.nn.functional.cross_entropy(logits.transpose(1, 2), wanted[:, 1:], ignore_index=IGNORED, reduction="none")
        )
    scored, found, loss = labels[:, 1:] != IGNORED, torch.cat(right), torch.cat(losses)
    return {
        "exact": (found | ~scored).all(1).double().mean().item(),
        "tokens": found[scored].double().mean().item(),
        "loss": finite(loss[scored].double().mean().item()),
    }


def finite(value: float) -> float | None:
    """A number that JSON has, or None."""
    return value if math.isfinite(value) else None
