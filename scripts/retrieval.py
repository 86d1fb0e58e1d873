"""Retrieval with sentence embeddings: does a query find its own document among all others?

    python scripts/retrieval.py MODEL [MODEL …] --max_seq_length 256

scores models (folders or Hub ids, patched or not) on the standard library's documentation (corpus.py), with a
bag-of-words row beside them. Embeddings are mean-pooled over real tokens and normalised, as all-MiniLM's are.

Shapes: N queries and documents, in the same order; D hidden_size.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import hf_posenc  # noqa: F401  (AutoModel knows patched models from here on)
from corpus import split


@dataclass(frozen=True)
class Score:
    """Recall at 1 and mean reciprocal rank over all queries, each with its 95 % bootstrap interval."""

    recall_at_1: float
    recall_at_1_interval: tuple[float, float]
    mrr: float
    mrr_interval: tuple[float, float]
    queries: int


def pooled(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Mean of the real tokens' last hidden states, of length 1: `[B, D]`."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@torch.no_grad()
def embed(model: PreTrainedModel, tokenizer, texts: Sequence[str], max_seq_length: int, title: str) -> Tensor:
    """`[N, D]`, in the order of the texts; long texts are cut at max_seq_length tokens."""
    model.eval()
    # By length, so that batches hold little padding.
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    parts = []
    for start in tqdm(range(0, len(order), 16), desc=title, unit="batch", leave=False):
        chosen = [texts[i] for i in order[start : start + 16]]
        batch = tokenizer(chosen, padding=True, truncation=True, max_length=max_seq_length, return_tensors="pt")
        parts.append(pooled(model, batch.to(model.device)).float().cpu())
    return torch.cat(parts)[torch.tensor(order).argsort()]


def score(similarity: Tensor, seed: int = 0, samples: int = 10_000) -> Score:
    """`[N, N]` similarities, queries by documents, whose diagonal is right. Ties count against the query."""
    right = similarity.diagonal()[:, None]
    ranks = (similarity >= right).sum(1).numpy()
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, len(ranks), (samples, len(ranks)))

    def interval(values: np.ndarray) -> tuple[float, float]:
        low, high = np.percentile(values[drawn].mean(1), [2.5, 97.5])
        return float(low), float(high)

    hits, reciprocals = (ranks == 1).astype(float), 1.0 / ranks
    return Score(float(hits.mean()), interval(hits), float(reciprocals.mean()), interval(reciprocals), len(ranks))


def evaluate(model: PreTrainedModel, tokenizer, max_seq_length: int, title: str = "documents") -> Score:
    """The model's score on the standard library's documentation."""
    modules, _ = split()
    queries = embed(model, tokenizer, [m.summary for m in modules], max_seq_length, f"{title}: queries")
    documents = embed(model, tokenizer, [m.document for m in modules], max_seq_length, f"{title}: documents")
    return score(queries @ documents.T)


def bag_of_words(tokenizer, max_seq_length: int) -> Score:
    """TF-IDF on the very text that the models see: the same documents, cut at the same token."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    modules, _ = split()
    encoded = tokenizer([m.document for m in modules], truncation=True, max_length=max_seq_length)["input_ids"]
    documents = tokenizer.batch_decode(encoded, skip_special_tokens=True)
    vectorizer = TfidfVectorizer(sublinear_tf=True).fit(documents)
    queries = vectorizer.transform([m.summary for m in modules])
    return score(torch.from_numpy((queries @ vectorizer.transform(documents).T).toarray()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders or Hub ids")
    parser.add_argument("--max_seq_length", type=int, default=256, help="documents are cut at this many tokens")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.models:
        tokenizer = AutoTokenizer.from_pretrained(name)
        results[name] = asdict(evaluate(AutoModel.from_pretrained(name), tokenizer, arguments.max_seq_length, name))
    results["bag of words"] = asdict(bag_of_words(tokenizer, arguments.max_seq_length))
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
