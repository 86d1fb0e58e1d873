"""Compares retrieval by length before and after a conversion, on the user's texts.

Shapes: N queries and documents, in the same order.
"""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from hf_posenc.evaluation import cloze_queries, metrics
from hf_posenc.evaluation.metrics import Difference, Ranks, Score
from hf_posenc.evaluation.retrieval import Embedder, RetrievalStrategy, chunked, cut, offsets, strategies

SHORTEST = 128
REACH = "Lengths double as long as half of the documents are longer than the previous length."
FEWEST = 20
"""Minimum number of questions."""
ORIGINAL = "original"
Rows = dict[int, dict[str, "Row"]]
"""Length -> method -> row."""


@dataclass(frozen=True)
class Pair:
    """A query, and the document that it should retrieve."""

    query: str
    document: str


@dataclass(frozen=True)
class Row:
    """The score of a method at one length.

    difference: a difference of two methods over the same queries. The function that returns the row defines the two.
    vectors: mean number of vectors per document.
    """

    score: Score
    difference: Difference | None
    vectors: float = 1.0


def synthetic_pairs(embedder: Embedder, texts: Sequence[str], seed: int = 0) -> tuple[list[Pair], str]:
    """Queries made from the texts. A sentence is removed from each text and should retrieve this text.

    embedder: the original model's embedder. If at least FEWEST texts have a sentence beyond its maximum length, only such
    sentences are used.

    Returns the pairs and their description. Raises ValueError if fewer than FEWEST texts have a usable sentence.
    """
    limit, tokenizer = embedder.limit, embedder.tokenizer
    choose = random.Random(seed)
    for behind in ([] if limit is None else [limit]) + [0]:
        found = [cloze_queries.cloze_query(tokenizer, text, choose, behind=behind) for text in texts]
        pairs = [Pair(question.query, question.document) for question in found if question is not None]
        if len(pairs) >= FEWEST:
            where = f"from beyond its first {behind} tokens" if behind else "taken out of it"
            return pairs, f"{len(pairs)} questions: a sentence {where} finds its text"
    raise ValueError(
        f"Only {len(pairs)} of {len(texts)} texts have a sentence that can serve as a query, but the comparison needs "
        f"{FEWEST}. Pass more texts or your own queries."
    )


def lengths_of(embedder: Embedder, documents: Sequence[str], longest: int | None) -> list[int]:
    """Lengths that double from SHORTEST up to `longest`, as long as half of the documents exceed the previous length.

    Raises ValueError without documents.
    """
    if not documents:
        raise ValueError("There are no documents. Pass one or more.")
    return doubled([len(offsets(embedder.tokenizer, document)) for document in documents], longest)


def doubled(sizes: Sequence[int], longest: int | None) -> list[int]:
    """Lengths that double from SHORTEST up to `longest`, as long as half of the sizes exceed the previous length."""
    most, found = sorted(sizes)[len(sizes) // 2], [SHORTEST]
    while found[-1] < most and (longest is None or 2 * found[-1] <= longest):
        found.append(2 * found[-1])
    return found


def compare(original: Embedder, models: dict[str, Embedder], pairs: Sequence[Pair], lengths: Sequence[int]) -> Rows:
    """Evaluate retrieval with the documents cut at each length, and compare the last of the models with the original.

    If the original's maximum length is lower, its documents are truncated, and chunked with averaged chunk embeddings or the
    best-matching chunk. Only rows of the original have a difference. It is positive if the last of the models is better.
    """
    last = next(reversed(models), "")

    def strategies_at(length: int) -> list[RetrievalStrategy]:
        whole = [replace(strategies(name, model, length)[0], name=name) for name, model in models.items()]
        return [*strategies(ORIGINAL, original, length), *whole]

    return {
        length: {name: _row(ranks, name, None if name in models else (last, name)) for name in ranks}
        for length, ranks in _ranks(strategies_at, models, pairs, lengths).items()
    }


def compare_models(
    models: dict[str, Embedder], pairs: Sequence[Pair], lengths: Sequence[int], chunks: int | None = None
) -> Rows:
    """Evaluate retrieval with the documents cut at each length.

    A positive difference means that the method is better than the first method of the first model.

    chunks: beyond this number of tokens, documents are also divided into chunks of this size, for all models.

    Raises ValueError if `chunks` is above a model's maximum length.
    """

    def strategies_at(length: int) -> list[RetrievalStrategy]:
        named = dict[str, RetrievalStrategy]()
        for name, model in models.items():
            more = [] if chunks is None or chunks >= length else chunked(name, model, chunks)
            # Chunks of the maximum length are already among the strategies.
            new = {strategy.name: strategy for strategy in (*strategies(name, model, length), *more)}
            _check_names(named.keys() & new.keys())
            named |= new
        return [*named.values()]

    rows: Rows = {}
    for length, ranks in _ranks(strategies_at, models, pairs, lengths).items():
        first = next(iter(ranks))
        rows[length] = {name: _row(ranks, name, None if name == first else (name, first)) for name in ranks}
    return rows


@dataclass(frozen=True)
class _Ranked:
    """The ranks of a method, and its mean number of vectors per document."""

    ranks: Ranks
    vectors: float


def _ranks(
    strategies_at: Callable[[int], list[RetrievalStrategy]],
    models: dict[str, Embedder],
    pairs: Sequence[Pair],
    lengths: Sequence[int],
) -> dict[int, dict[str, _Ranked]]:
    """Length -> strategy -> ranks.

    Raises ValueError for two strategies with the same name, and for similarities that can't be ranked.
    """
    if not pairs or not models or not lengths:
        raise ValueError(f"{len(pairs)} pairs, {len(models)} models, {len(lengths)} lengths. Pass one or more of each.")
    tokenizer, found = next(iter(models.values())).tokenizer, dict[int, dict[str, _Ranked]]()
    queries = [pair.query for pair in pairs]
    whole = list(dict.fromkeys(pair.document for pair in pairs))  # several queries can have one document
    right = [whole.index(pair.document) for pair in pairs]
    for length in lengths:
        documents = [cut(tokenizer, document, length) for document in whole]
        by_name = found.setdefault(length, {})
        for strategy in strategies_at(length):
            title = f"{strategy.name} at {length}"
            _check_names(by_name.keys() & {strategy.name})
            try:
                ranks = metrics.ranked(strategy.similarity(queries, documents, title), right, groups=right)
            except ValueError as error:
                raise ValueError(f"{title}: {error}") from None
            by_name[strategy.name] = _Ranked(ranks, strategy.vectors(documents))
    return found


def _check_names(twice: Collection[str]) -> None:
    if twice:
        raise ValueError(f"Two methods are named {min(twice)!r}. Use different names for the models.")


def _row(found: dict[str, _Ranked], name: str, pair: tuple[str, str] | None) -> Row:
    """The row of a method. pair: the two methods whose difference it contains."""
    difference = pair and metrics.paired(found[pair[0]].ranks, found[pair[1]].ranks)
    return Row(metrics.score(found[name].ranks), difference, found[name].vectors)
