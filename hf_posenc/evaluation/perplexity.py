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
from hf_posenc.inspection import inspect
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


def evaluate(
    models: dict[str, tuple[PreTrainedModel, Any]], documents: Sequence[str], lengths: Sequence[int], baseline: str
) -> dict[int, dict[str, Perplexity]]:
    """Length -> model -> perplexity on the first max(lengths) tokens of each document."""
    means: dict[tuple[str, int], np.ndarray] = {}
    limits = {name: inspect(model).max_length for name, (model, _) in models.items()}
    windows = {(name, length): min(length, limits[name] or length) for name in models for length in lengths}
    measured = dict.fromkeys((name, size) for (name, _), size in windows.items())
    with ProgressBar(total=len(measured) * len(documents), desc="perplexity") as bar:
        for name, size in measured:
            model, tokenizer = models[name]
            model.eval()
            options = {"truncation": True, "max_length": max(lengths), "verbose": False, "return_tensors": "pt"}
            read = [tokenizer(text, **options)["input_ids"][0] for text in documents]
            check_known(tokenizer, read)
            check_ids(torch.cat(read), model.get_input_embeddings(), name)
            found = []
            for ids in read:
                found.append(losses(model, ids, size).double().mean().item())
                bar.update()
            means[name, size] = np.asarray(found)
    groups, results = np.arange(len(documents)), dict[int, dict[str, Perplexity]]()
    for (name, length), size in windows.items():
        own = means[name, size]
        value, (low, high) = metrics.mean(own, groups)
        ratio, (least, most) = metrics.mean(own - means[baseline, windows[baseline, length]], groups)
        figures = (math.exp(value), (math.exp(low), math.exp(high)), math.exp(ratio), (math.exp(least), math.exp(most)))
        results.setdefault(length, {})[name] = Perplexity(*figures, size, len(documents))
    return {length: results[length] for length in lengths}
