"""Perplexity of language models at several lengths, with sliding windows.

At every length, each token of a document except the first is scored once. It has at least half a window of context, or all the
text before it. If a model's maximum length is lower, its windows have that length.

Shapes: W windows, L tokens in a window, T tokens of a document, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.evaluation import metrics
from hf_posenc.inspection import supported_length
from hf_posenc.progress import ProgressBar
from hf_posenc.serialization.tokenizer_files import check_ids, check_known

BATCH_TOKENS = 2048
"""Maximum number of tokens in a batch of windows. Logits are as wide as the vocabulary. A longer window is a separate batch."""
CHUNK = 512
"""Number of tokens whose logits are computed at a time."""


@dataclass(frozen=True)
class Perplexity:
    """Perplexity with its 95% interval over documents (Student's t).

    ratio: perplexity divided by the baseline's on the same documents.
    window: size of the windows in tokens.
    documents: number of documents.
    """

    perplexity: float
    perplexity_interval: tuple[float, float]
    ratio: float
    ratio_interval: tuple[float, float]
    window: int
    documents: int

    def shown(self) -> str:
        low, high = self.perplexity_interval
        return f"{self.perplexity:.2f} [{low:.1f}, {high:.1f}]"

    def shown_ratio(self) -> str:
        low, high = self.ratio_interval
        return f"×{self.ratio:.3f} [{low:.3f}, {high:.3f}]"


@torch.no_grad()
def losses(
    model: PreTrainedModel, ids: Tensor, window: int, of_rows: Callable[[PreTrainedModel, Tensor], Tensor] | None = None
) -> Tensor:
    """Negative log-likelihoods, in nats, of tokens 1 … T - 1 of `[T]`, from windows that overlap by half.

    of_rows: a function of the model and rows `[W, L]`, which returns their losses `[W, L - 1]`, if they aren't computed in one
        forward pass.
    """
    if window < 2:
        raise ValueError(f"window={window} must be at least 2 tokens.")
    stride, found = window // 2, []
    starts = range(0, max(1, len(ids) - window + stride), stride)
    whole = [start for start in starts if start + window <= len(ids)]
    size = max(1, BATCH_TOKENS // window)
    batches = [whole[i : i + size] for i in range(0, len(whole), size)]
    batches += [[start] for start in starts if start + window > len(ids)]
    for batch in batches:
        rows = torch.stack([ids[start : start + window] for start in batch]).to(model.device)  # [W, L]
        each = (of_rows or _of_rows)(model, rows).cpu()
        # Tokens that the previous window has scored are skipped.
        found += [row if start == 0 else row[window - stride - 1 :] for start, row in zip(batch, each, strict=True)]
    return torch.cat(found)


def _of_rows(model: PreTrainedModel, rows: Tensor) -> Tensor:
    logits = model(input_ids=rows).logits[:, :-1].float()  # [W, L - 1, V]
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")


@torch.no_grad()
def of_states(head: torch.nn.Module, states: Tensor, ids: Tensor) -> Tensor:
    """The losses of tokens `[T]` by the hidden states `[T, D]` that predict them.

    Logits are computed for CHUNK tokens at a time, because they are as wide as the vocabulary.
    """
    chunks = zip(states.split(CHUNK), ids.split(CHUNK), strict=True)
    return torch.cat([torch.nn.functional.cross_entropy(head(each).float(), own, reduction="none") for each, own in chunks])


def mean_loss(model: PreTrainedModel, ids: Tensor, window: int) -> float:
    """The mean negative log-likelihood of a document's tokens, in nats."""
    return losses(model, ids, window).double().mean().item()


@dataclass(frozen=True)
class DocumentLosses:
    """The mean negative log-likelihood of each document's tokens in nats, `[N]`, in windows of `window` tokens."""

    window: int
    values: np.ndarray


def document_losses(
    models: dict[str, tuple[PreTrainedModel, Any]], documents: Sequence[str], lengths: Sequence[int]
) -> dict[int, dict[str, DocumentLosses]]:
    """Length -> model -> losses of the first max(lengths) tokens of each document."""
    found = dict[tuple[str, int], DocumentLosses]()
    limits = {name: supported_length(model) for name, (model, _) in models.items()}
    windows = {(name, length): min(length, limits[name] or length) for length in lengths for name in models}
    measured = sorted(
        {(name, size) for (name, _), size in windows.items()}, key=lambda each: ([*models].index(each[0]), each[1])
    )
    with ProgressBar(total=len(measured) * len(documents), desc="perplexity") as bar:
        for name, size in measured:
            model, tokenizer = models[name]
            model.eval()
            read = read_ids(tokenizer, documents, max(lengths))
            check_known(tokenizer, read)
            check_ids(torch.cat(read), model.get_input_embeddings(), name)
            values = []
            for ids in read:
                values.append(mean_loss(model, ids, size))
                bar.update()
            found[name, size] = DocumentLosses(size, np.asarray(values))
    return {length: {name: found[name, windows[name, length]] for name in models} for length in lengths}


def read_ids(tokenizer: Any, documents: Sequence[str], longest: int | None) -> list[Tensor]:
    """The IDs of the first `longest` tokens of each document, `[T]`. longest: None for all."""
    options = {"truncation": longest is not None, "max_length": longest, "verbose": False}
    return [torch.tensor(tokenizer(text, **options)["input_ids"], dtype=torch.long) for text in documents]


def perplexity(losses: DocumentLosses) -> tuple[float, metrics.Interval]:
    """The perplexity, with its 95% interval over documents."""
    value, (low, high) = metrics.mean(losses.values, np.arange(len(losses.values)))
    return math.exp(value), (math.exp(low), math.exp(high))


def ratio(losses: DocumentLosses, others: DocumentLosses) -> tuple[float, metrics.Interval]:
    """The ratio of two perplexities on the same documents, with its 95% interval."""
    value, (low, high) = metrics.mean(losses.values - others.values, np.arange(len(losses.values)))
    return math.exp(value), (math.exp(low), math.exp(high))


def compared(found: dict[int, dict[str, DocumentLosses]], baseline: str) -> dict[int, dict[str, Perplexity]]:
    """Length -> model -> perplexity, with its ratio to the baseline's."""
    return {
        length: {
            name: Perplexity(*perplexity(own), *ratio(own, row[baseline]), own.window, len(own.values))
            for name, own in row.items()
        }
        for length, row in found.items()
    }


def evaluate(
    models: dict[str, tuple[PreTrainedModel, Any]], documents: Sequence[str], lengths: Sequence[int], baseline: str
) -> dict[int, dict[str, Perplexity]]:
    """Length -> model -> perplexity on the first max(lengths) tokens of each document."""
    return compared(document_losses(models, documents, lengths), baseline)
