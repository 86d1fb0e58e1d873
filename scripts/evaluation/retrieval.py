"""Retrieval with sentence embeddings: does a query find its own document among all others?

From scripts/, `python -m evaluation.retrieval MODEL [MODEL …] --text_length 256` scores models (folders or Hub ids,
patched or not) on the standard library's documentation (corpus.py), beside a bag of words. Embeddings are mean-pooled over
real tokens and normalised, as all-MiniLM's are.

Shapes: N queries, M documents (in `score` N, in the same order), G groups, D hidden_size.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import hf_posenc  # noqa: F401  (registers patched models with AutoModel)
from evaluation import records
from evaluation.corpus import split


@dataclass(frozen=True)
class Score:
    """Recall at 1 and mean reciprocal rank over all queries, each with its 95 % bootstrap interval."""

    recall_at_1: float
    recall_at_1_interval: tuple[float, float]
    mrr: float
    mrr_interval: tuple[float, float]
    queries: int

    def shown(self, metric: str, digits: int = 2) -> str:
        """A metric with its interval, which has as many decimal places as `digits` says."""
        low, high = getattr(self, f"{metric}_interval")
        return f"{getattr(self, metric):.3f} [{low:.{digits}f}, {high:.{digits}f}]"


def pooled(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """The mean of the real tokens' last hidden states, scaled to length 1: `[B, D]`."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@torch.no_grad()
def embed(model: PreTrainedModel, tokenizer: Any, texts: Sequence[str], max_seq_length: int, title: str) -> Tensor:
    """`[N, D]`, in the order of the texts; long texts are cut at max_seq_length tokens."""
    model.eval()
    # Sorted by length, so that batches have little padding.
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    parts = []
    for start in tqdm(range(0, len(order), 16), desc=title, unit="batch", leave=False):
        chosen = [texts[i] for i in order[start : start + 16]]
        batch = tokenizer(chosen, padding=True, truncation=True, max_length=max_seq_length, return_tensors="pt")
        parts.append(pooled(model, batch.to(model.device)).float().cpu())
    return torch.cat(parts)[torch.tensor(order).argsort()]


def similarity(
    model: PreTrainedModel,
    tokenizer: Any,
    max_seq_length: int,
    queries: Sequence[str],
    documents: Sequence[str],
    title: str,
) -> Tensor:
    """The cosine of each query with each document: `[N, M]`."""
    asked = embed(model, tokenizer, queries, max_seq_length, f"{title}: queries")
    return asked @ embed(model, tokenizer, documents, max_seq_length, f"{title}: documents").T


def lexical_similarity(queries: Sequence[str], documents: Sequence[str], title: str = "") -> Tensor:
    """TF-IDF similarities, `[N, M]`."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(sublinear_tf=True).fit(documents)
    return torch.from_numpy((vectorizer.transform(queries) @ vectorizer.transform(documents).T).toarray()).float()


def bootstrapped(hits: np.ndarray, reciprocals: np.ndarray, seed: int, samples: int) -> Score:
    """The score of queries in groups, `[G, N]`. Groups are resampled, since the queries of a group may be dependent."""
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, len(hits), (samples, len(hits)))

    def interval(values: np.ndarray) -> tuple[float, float]:
        low, high = np.percentile(values.mean(1)[drawn].mean(1), [2.5, 97.5])
        return float(low), float(high)

    return Score(float(hits.mean()), interval(hits), float(reciprocals.mean()), interval(reciprocals), hits.size)


def score(similarity: Tensor, seed: int = 0, samples: int = 10_000) -> Score:
    """The score of similarities `[N, N]`, queries by documents; the right document is on the diagonal.

    Ties count against the query.
    """
    right = similarity.diagonal()[:, None]
    ranks = (similarity >= right).sum(1, keepdim=True).numpy()
    return bootstrapped((ranks == 1).astype(float), 1.0 / ranks, seed, samples)


def evaluate(model: PreTrainedModel, tokenizer: Any, max_seq_length: int, title: str = "documents") -> Score:
    """The model's score on the standard library's documentation."""
    modules, _ = split()
    summaries, documents = zip(*((module.summary, module.document) for module in modules), strict=True)
    return score(similarity(model, tokenizer, max_seq_length, summaries, documents, title))


def bag_of_words(tokenizer: Any, max_seq_length: int) -> Score:
    """The score of TF-IDF on exactly the text that the models see: the same documents, cut at the same token."""
    modules, _ = split()
    encoded = tokenizer([module.document for module in modules], truncation=True, max_length=max_seq_length)["input_ids"]
    documents = tokenizer.batch_decode(encoded, skip_special_tokens=True)
    return score(lexical_similarity([module.summary for module in modules], documents))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders or Hub ids")
    parser.add_argument("--text_length", type=int, default=256, help="documents are cut at this many tokens")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.models:
        tokenizer = AutoTokenizer.from_pretrained(name)
        results[name] = evaluate(AutoModel.from_pretrained(name), tokenizer, arguments.text_length, name)
    results["bag of words"] = bag_of_words(tokenizer, arguments.text_length)
    print(records.as_text(results))


if __name__ == "__main__":
    main()
