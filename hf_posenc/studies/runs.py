"""One run of a study: a model is trained on a task at lengths up to L, and tested at L and beyond.

A result depends only on the arguments of `run`. Runs that differ only in the encoding start from the same model weights and see
the same examples in the same order. The digests in their records are equal.
"""

import hashlib
import math
import time
import zlib
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedModel

import hf_posenc
from hf_posenc.studies import models, tasks, texts, trained_models
from hf_posenc.studies.models import Encoding, Sizes
from hf_posenc.studies.tasks import CAUSAL, IGNORED, LABELS, Task, aligned

MULTIPLES = (1.0, 1.5, 2.0, 4.0, 8.0)
"""Test lengths as multiples of L. Encodings with a length limit get the last one as their maximum length."""
MAX_NORM = 1.0
BETAS = (0.9, 0.99)
LOSSES = 20
"""Number of training losses in a record."""
TEST_TOKENS = 8192
"""Tokens per batch of test examples."""
LONG = timedelta(days=30)


@dataclass(frozen=True)
class Setup:
    """The common settings of a study's runs.

    sizes: sizes of a tiny model, otherwise None.
    model_options: other config options of a tiny model.
    files: digest of a checkpoint or a config file.
    texts: file with the texts. None: Python's help.
    """

    model: str = "llama"
    sizes: Sizes | None = Sizes()
    learning_rate: float = 5e-3
    weight_decay: float = 0.01
    warmup_steps: int = 30
    test_rows: int = 128
    multiples: tuple[float, ...] = MULTIPLES
    model_options: dict[str, Any] | None = None
    files: str | None = None
    texts: str | None = None

    def task(self, name: str) -> Task:
        """A task for this model and these texts. Raises ValueError if a checkpoint's tokenizer lacks tokens for it."""
        return texts.task(tasks.get_task(name), models.directory_of(self.model), self.texts)


@dataclass(frozen=True)
class Training:
    """The common settings of a task's runs. `length` is L."""

    length: int
    steps: int
    batch_size: int
    digest: str = ""


def training_of(task: Task, length: int | None = None, steps: int | None = None, batch_size: int | None = None) -> Training:
    """The training settings of a task. Arguments override its defaults."""
    steps = task.steps if steps is None else steps
    return Training(length or task.length, steps, batch_size or task.batch_size, task.digest())


def test_lengths(training: Training, multiples: tuple[float, ...]) -> list[int]:
    return list(dict.fromkeys(times(training.length, multiple) for multiple in multiples))


def times(length: int, multiple: float) -> int:
    """A multiple of a length, rounded down. 1.4 times 10 is 14, although the float 1.4 is slightly less than 1.4."""
    return int(length * Fraction(str(multiple)))


def process_state() -> PartialState:
    """The state of this process among those of Accelerate's launcher, if any. Processes wait up to LONG for each other."""
    return PartialState(cpu=not torch.cuda.is_available(), timeout=LONG)


def run(
    setup: Setup, training: Training, name: str, encoding: Encoding, seed: int, save_to: Path | None = None
) -> dict[str, Any]:
    """Train and test one model. The record contains the scores by test length (see `measured`).

    save_to: directory for the trained model, with the tokenizer of a checkpoint.
    """
    started, task = time.process_time(), setup.task(name)
    lengths = test_lengths(training, setup.multiples)
    digests = {}

    def original() -> PreTrainedModel:
        own = task.vocabulary, task.tokens(training.length), seed, task.head, setup.model_options, task.classes
        made = models.stock(setup.model, setup.sizes, *own)
        digests["model"] = digest(*made.state_dict().values())
        return made

    model = models.fitting(original, encoding, seed, task.tokens(max(lengths))).to(process_state().device)
    losses, digests["train"] = trained(model, setup, training, task, stream_seed(name, seed))
    rows = {length: task.test(length, setup.test_rows) for length in lengths}
    digests["test"] = digest(*(each for pair in rows.values() for each in pair))
    record = {
        "task": name,
        "encoding": encoding.label,
        "seed": seed,
        "max_length": hf_posenc.inspect(model).max_length,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "losses": losses,
        "scores": {str(length): measured(model, *of, task) for length, of in rows.items()},
        "digests": digests,
        "device": model.device.type,
        "cpu_seconds": round(time.process_time() - started, 1),
    }
    if save_to:
        trained_models.save_trained(model, setup.model, task, save_to)
    return record


def digest(*tensors: Tensor) -> str:
    """A digest of tensors in this order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def stream_seed(task: str, seed: int) -> int:
    """The seed of a run's training examples, which is the same for all encodings."""
    return zlib.crc32(f"{task} {seed}".encode())


def trained(model: PreTrainedModel, setup: Setup, training: Training, task: Task, seed: int) -> tuple[list[float | None], str]:
    """Train with AdamW. The learning rate increases linearly during warm-up and decays linearly to zero.

    Returns a sample of the losses, and a digest of the examples.
    """
    generator, seen = torch.Generator().manual_seed(seed), hashlib.sha256()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setup.learning_rate, betas=BETAS, weight_decay=setup.weight_decay, fused=True
    )
    warmup = min(setup.warmup_steps, training.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1, warmup), 1 - step / max(1, training.steps))
    )
    model.train()
    kept, every = [], max(1, training.steps // LOSSES)
    for step in range(training.steps):
        rows = task.train(training.length, training.batch_size, generator)
        seen.update(digest(*rows).encode())
        input_ids, labels = (each.to(model.device) for each in rows)
        losses = losses_of(model, input_ids, labels, task.head)
        loss = losses[aligned(labels, task.head) != IGNORED].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        if step % every == 0:
            kept.append(finite(loss.item()))
    return kept, seen.hexdigest()[:16]


def logits_of(model: PreTrainedModel, input_ids: Tensor, head: str) -> Tensor:
    """The logits for `aligned` labels, `[B, P, V]`."""
    if head == CAUSAL:
        return model(input_ids=input_ids, use_cache=False).logits[:, :-1]
    logits = model(input_ids=input_ids).logits
    return logits[:, None] if head == LABELS else logits


def losses_of(model: PreTrainedModel, input_ids: Tensor, labels: Tensor, head: str = CAUSAL) -> Tensor:
    """The negative log-likelihood of each `aligned` label, or zero if the label isn't scored."""
    return negative_log_likelihood(logits_of(model, input_ids, head), aligned(labels, head))


def negative_log_likelihood(logits: Tensor, wanted: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), wanted, ignore_index=IGNORED, reduction="none")


@torch.no_grad()
def measured(model: PreTrainedModel, input_ids: Tensor, labels: Tensor, task: Task) -> dict[str, float | None]:
    """The scores of the answers. A decoder predicts each token from the correct tokens before it.

    NaN logits count as wrong. Custom metrics get the prediction -1 for them.

    exact: share of rows whose answer has no wrong token. Greedy decoding would get the same answers right.
    tokens: token accuracy. loss: in nats per token, or None if it isn't finite. A custom metric has its own name.
    """
    model.eval()
    size = max(1, TEST_TOKENS // input_ids.shape[1])
    right, losses, scores = [], [], []
    for rows, answers in zip(input_ids.split(size), labels.split(size), strict=True):
        logits = logits_of(model, rows.to(process_state().device), task.head).cpu()
        wanted = aligned(answers, task.head)
        # argmax returns the first NaN, which may be the correct token.
        predictions = logits.argmax(-1).masked_fill(logits.isnan().any(-1), -1)
        right.append(predictions == wanted)
        losses.append(negative_log_likelihood(logits, wanted))
        if callable(task.metric):
            scores.append(task.metric(predictions, wanted))
            tasks.check_scores("The test rows", task, scores[-1], len(wanted))
    scored, found, loss = aligned(labels, task.head) != IGNORED, torch.cat(right), torch.cat(losses)
    own = {task.measures[0]: torch.cat(scores).double().mean().item()} if scores else {}
    return {
        "exact": (found | ~scored).all(1)[scored.any(1)].double().mean().item(),
        "tokens": found[scored].double().mean().item(),
        "loss": finite(loss[scored].double().mean().item()),
        **own,
    }


def finite(value: float) -> float | None:
    """The value, or None if JSON can't represent it."""
    return value if math.isfinite(value) else None
