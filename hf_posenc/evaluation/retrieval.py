"""Retrieval with sentence embeddings, and strategies for documents beyond a model's maximum length.

    original, converted = Embedder(teacher, tokenizer), Embedder(student, tokenizer)
    chosen = [*strategies("original", original, 2048), *strategies("converted", converted, 2048)]
    ranks = {each.name: metrics.ranked(each.similarity(queries, documents, each.name)) for each in chosen}
    print(metrics.paired(ranks["converted"], ranks["original, truncated at 512"]).shown())

Shapes: N queries, M documents, C chunks, B texts in a batch, L tokens, D hidden_size, E size of an embedding.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.inspection import inspect
from hf_posenc.progress import ProgressBar
from hf_posenc.serialization.tokenizer_files import check_ids, check_known

BATCH_TOKENS = 16 * 512
"""Maximum number of tokens in a batch, including padding. A longer text is a separate batch."""

Pool = Callable[[Tensor, dict[str, Tensor]], Tensor]
"""Hidden states `[B, L, D]` and the model's inputs -> embeddings `[B, E]`."""


def mean(hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all tokens except padding."""
    mask = batch["attention_mask"].to(hidden.dtype)
    return (hidden * (mask / mask.sum(1, keepdim=True))[..., None]).sum(1)


def pooling(sentences: Any, device: torch.device | None = None) -> Pool:
    """All modules of a SentenceTransformer except the first, moved to the device, as one function. For None, `mean`."""
    if sentences is None:
        return mean
    modules = [module if device is None else module.to(device) for module in list(sentences)[1:]]

    def pool(hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        features = {**batch, "token_embeddings": hidden}
        for module in modules:
            features = module(features)
        return features["sentence_embedding"]

    return pool


def embed(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Sequence[str],
    max_seq_length: int | None = None,
    title: str = "texts",
    pool: Pool = mean,
) -> Tensor:
    """Unit-length embeddings `[N, E]` of texts, truncated to `max_seq_length` tokens.

    Raises ValueError if there are no texts, or if a text has no tokens.
    """

    def embeddings(batch: dict[str, Tensor]) -> Tensor:
        return torch.nn.functional.normalize(pool(model(**batch).last_hidden_state, batch).float(), dim=-1)

    return by_text(model, tokenizer, texts, max_seq_length, title, embeddings)


@torch.no_grad()
def by_text(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Sequence[str],
    max_seq_length: int | None,
    title: str,
    output: Callable[[dict[str, Tensor]], Tensor],
) -> Tensor:
    """The output for each text, `[N, …]` on the CPU, with the model in eval mode. Batches contain texts of similar length.

    output: the model's inputs `[B, L]` -> `[B, …]`.

    Raises ValueError if there are no texts, or if a text has no tokens.
    """
    if isinstance(texts, str) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{title}: texts is {str(texts)[:60]!r}. Pass a list of one or more strings.")
    options = {"truncation": max_seq_length is not None, "max_length": max_seq_length, "verbose": False}
    rows = tokenizer(list(texts), **options)["input_ids"]
    sizes = [len(ids) for ids in rows]
    if not min(sizes):
        raise ValueError(f"{title}: texts[{sizes.index(0)}] has no tokens. Omit it.")
    check_known(tokenizer, rows)
    check_ids(torch.tensor([*itertools.chain(*rows)]), model.get_input_embeddings(), title)
    batches: list[list[int]] = [[]]
    for number in sorted(range(len(texts)), key=sizes.__getitem__):
        if batches[-1] and (len(batches[-1]) + 1) * sizes[number] > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(number)
    parts, training = [], model.training
    model.eval()
    try:
        with ProgressBar(total=sum(sizes), desc=title, unit="token", unit_scale=True, leave=False) as bar:
            for chosen in batches:
                padded = tokenizer([texts[i] for i in chosen], padding=True, return_tensors="pt", **options)
                parts.append(output(dict(padded.to(model.device))).cpu())
                bar.update(sum(sizes[i] for i in chosen))
    finally:
        model.train(training)
    return torch.cat(parts)[torch.tensor(list(itertools.chain(*batches))).argsort()]


class Embedder:
    """A model with its tokenizer and pooling. It caches embeddings, and truncates texts to the model's maximum length.

    limit: the model's maximum length in tokens. None for no limit.

    Raises ValueError for a slow tokenizer, which has no offsets.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, pool: Pool = mean) -> None:
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} doesn't return the offsets of tokens. Use a fast tokenizer.")
        self.model, self.tokenizer, self.pool = model, tokenizer, pool
        self.limit = inspect(model).max_length
        self.kept: dict[str, Tensor] = {}

    def __call__(self, texts: Sequence[str], title: str = "texts") -> Tensor:
        """Embeddings of the texts, `[N, E]`."""
        if isinstance(texts, str):
            raise ValueError(f"{title}: texts is the string {texts[:60]!r}. Pass a list of strings.")
        new = [text for text in dict.fromkeys(texts) if text not in self.kept]
        if new:
            embeddings = embed(self.model, self.tokenizer, new, self.limit, title, self.pool)
            self.kept.update(zip(new, embeddings, strict=True))
        return torch.stack([self.kept[text] for text in texts])


def _one(documents: Sequence[str]) -> float:
    return 1.0


@dataclass(frozen=True)
class RetrievalStrategy:
    """A way to compare queries with documents.

    similarity: N queries, M documents, and the title of a progress bar -> similarities `[N, M]`.
    vectors: M documents -> the mean number of vectors that an index stores for a document.
    """

    name: str
    similarity: Callable[[Sequence[str], Sequence[str], str], Tensor]
    vectors: Callable[[Sequence[str]], float] = _one


def strategies(name: str, embedder: Embedder, longest: int, window: int | None = None) -> list[RetrievalStrategy]:
    """The ways to use a model on documents of up to `longest` tokens.

    A model that supports this length embeds whole documents. If it doesn't, or if `window` is set, documents are also truncated
    to the window, or divided into chunks (see `chunked`). The default window is the model's maximum length.

    Raises ValueError if `window` is above the model's maximum length.
    """
    limit, tokenizer = embedder.limit, embedder.tokenizer
    whole = limit is None or limit >= longest
    _check_window(name, embedder, window)
    size = window or (None if whole else limit)

    found = [RetrievalStrategy(name, functools.partial(_similarity, embedder))] if whole else []
    if size is None:
        return found

    def truncated(queries: Sequence[str], documents: Sequence[str], title: str) -> Tensor:
        return _similarity(embedder, queries, [cut(tokenizer, text, size) for text in documents], title)

    return [*found, RetrievalStrategy(f"{name}, truncated at {size}", truncated), *chunked(name, embedder, size)]


def chunked(name: str, embedder: Embedder, window: int) -> list[RetrievalStrategy]:
    """Documents divided into even chunks of at most `window` tokens.

    Chunk embeddings are averaged ("mean"), or the best-matching chunk counts ("max").

    Raises ValueError if `window` is above the model's maximum length.
    """
    _check_window(name, embedder, window)

    def embedded(documents: Sequence[str], title: str) -> list[Tensor]:
        """The embeddings of each document's chunks, `[C, E]`."""
        chunks = [chunk(embedder.tokenizer, text, window) for text in documents]
        return list(embedder([piece for pieces in chunks for piece in pieces], title).split([len(pieces) for pieces in chunks]))

    def average(queries: Sequence[str], documents: Sequence[str], title: str) -> Tensor:
        means = torch.stack([part.mean(0) for part in embedded(documents, title)])
        return embedder(queries, title) @ torch.nn.functional.normalize(means, dim=-1).T

    def best(queries: Sequence[str], documents: Sequence[str], title: str) -> Tensor:
        asked = embedder(queries, title)
        return torch.stack([(asked @ part.T).amax(1) for part in embedded(documents, title)], dim=1)

    def count(documents: Sequence[str]) -> float:
        return fmean(len(chunk(embedder.tokenizer, text, window)) for text in documents)

    return [
        RetrievalStrategy(f"{name}, chunked by {window}, mean", average),
        RetrievalStrategy(f"{name}, chunked by {window}, max", best, count),
    ]


def _similarity(embedder: Embedder, queries: Sequence[str], documents: Sequence[str], title: str) -> Tensor:
    return embedder(queries, title) @ embedder(documents, title).T


def _check_window(name: str, embedder: Embedder, window: int | None) -> None:
    if window is not None and embedder.limit is not None and window > embedder.limit:
        raise ValueError(f"window={window} is above the maximum length of {name}. Choose at most {embedder.limit}.")


def lexical_similarity(queries: Sequence[str], documents: Sequence[str], title: str = "") -> Tensor:
    """Cosine similarity of TF-IDF vectors, `[N, M]`, with 1 + log tf. It needs scikit-learn, from the extra `train`."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(sublinear_tf=True)
    found = vectorizer.fit_transform(documents)
    return torch.from_numpy((vectorizer.transform(queries) @ found.T).toarray()).float()


def offsets(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    """The start and end of each token of a text, in characters."""
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]


def max_content_tokens(tokenizer: Any, length: int) -> int:
    """The number of tokens, without special tokens, that fit into `length`. Raises ValueError if none fits."""
    special = tokenizer.num_special_tokens_to_add()
    if length <= special:
        raise ValueError(f"{length} tokens leave no room for text besides {special} special ones. Use {special + 1} or more.")
    return length - special


def cut(tokenizer: Any, text: str, length: int) -> str:
    """The beginning of a text that fits into `length` tokens, including special tokens."""
    places, size = offsets(tokenizer, text), max_content_tokens(tokenizer, length)
    return text if len(places) <= size else text[: places[size - 1][1]]


def chunk(tokenizer: Any, text: str, window: int) -> list[str]:
    """Divide a text into pieces that fit into `window` tokens each, including special tokens.

    The number of pieces is the smallest possible, and their lengths are about equal. Each begins with a word, unless the word
    is longer than a quarter of the window. Concatenated, the pieces equal the text.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    places, words, size = encoded["offset_mapping"], encoded.word_ids(), max_content_tokens(tokenizer, window)
    for pieces in itertools.count(max(1, math.ceil(len(places) / size))):
        edges = [0]
        for i in range(1, pieces):
            wanted = round(i * len(places) / pieces)
            nearest = (j for j in range(wanted, max(0, wanted - size // 4) - 1, -1) if j == 0 or words[j] != words[j - 1])
            edges.append(next(nearest, wanted))
        if max(high - low for low, high in itertools.pairwise([*edges, len(places)])) <= size:
            break
    starts = [0, *(places[edge - 1][1] for edge in sorted({*edges} - {0}))]
    return [text[low:high] for low, high in itertools.pairwise([*starts, len(text)])]
