"""Perplexity of language models at several lengths, with sliding windows.

At every length, each token of a document except the first is scored once. It has at least half a window of context, or all the
text before it. If a model's maximum length is lower, its windows have that length.

Shapes: W windows, L tokens in a window, T tokens of a document, V vocabulary.
"""

import math
from collections.abc import Sequence
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
def losses(model: PreTrainedModel, ids: Tensor, window: int) -> Tensor:
    """Negative log-likelihoods, in nats, of tokens 1 … T - 1 of `[T]`, from windows that overlap by half."""
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
        logits = model(input_ids=rows).logits[:, :-1].float()  # [W, L - 1, V]
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").cpu()
        # Tokens that the previous window has scored are skipped.
        found += [row if start == 0 else row[window - stride - 1 :] for start, row in zip(batch, each, strict=True)]
    return torch.cat(found)


def read_ids(tokenizer: Any, documents: Sequence[str], longest: int | None) -> list[Tensor]:
    """The IDs of the first `longest` tokens of each document, `[T]`. longest: None for all."""
    options = {"truncation": longest is not None, "max_length": longest, "verbose": False}
    return [torch.tensor(tokenizer(text, **options)["input_ids"], dtype=torch.long) for text in documents]


def evaluate(
    models: dict[str, tuple[PreTrainedModel, Any]], documents: Sequence[str], lengths: Sequence[int], baseline: str
) -> dict[int, dict[str, Perplexity]]:
    """Length -> model -> perplexity on the first max(lengths) tokens of each document."""
    limits = {name: supported_length(model) for name, (model, _) in models.items()}
    windows = {(name, length): min(length, limits[name] or length) for name in models for length in lengths}
    sizes = {name: sorted({windows[name, length] for length in lengths}) for name in models}
    found = dict[tuple[str, int], np.ndarray]()
    with ProgressBar(total=sum(map(len, sizes.values())) * len(documents), desc="perplexity") as bar:
        for name, (model, tokenizer) in models.items():
            model.eval()
            read = read_ids(tokenizer, documents, max(lengths))
            check_known(tokenizer, read)
            check_ids(torch.cat(read), model.get_input_embeddings(), name)
            for size in sizes[name]:
                values = []
                for ids in read:
                    values.append(losses(model, ids, size).double().mean().item())
                    bar.update()
                found[name, size] = np.asarray(values)

    def row(name: str, length: int) -> Perplexity:
        own, base = found[name, windows[name, length]], found[baseline, windows[baseline, length]]
        return Perplexity(*_mean(own), *_mean(own - base), windows[name, length], len(own))

    return {length: {name: row(name, length) for name in models} for length in lengths}


def _mean(losses: np.ndarray) -> tuple[float, metrics.Interval]:
    """The geometric mean of perplexities or of their ratios, with its interval over documents."""
    value, (low, high) = metrics.mean(losses, np.arange(len(losses)))
    return math.exp(value), (math.exp(low), math.exp(high))
