"""Compares retrieval by length before and after a conversion, on the user's texts.

Shapes: N queries and documents, in the same order.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hf_posenc.evaluation import cloze_queries, metrics
from hf_posenc.evaluation.metrics import Difference, Ranks, Score
from hf_posenc.evaluation.retrieval import Embedder, RetrievalStrategy, cut, offsets, strategies

SHORTEST = 128
REACH = "Lengths double as far as half of the documents reach beyond the one before."
FEWEST = 20
"""Minimum number of questions."""
ORIGINAL = "original"


@dataclass(frozen=True)
class Pair:
    """A query, and the document that it should retrieve."""

    query: str
    document: str


@dataclass(frozen=True)
class Row:
    """The score of a method at one length.

    difference: a difference of two methods over the same queries. The function that returns the row defines the two.
    """

    score: Score
    difference: Difference | None


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    rows: length -> method -> row. Only rows of the original model have a difference.
    verdict: a summary in one sentence.
    """

    rows: dict[int, dict[str, Row]]
    verdict: str


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
            where = f"from behind its first {behind} tokens" if behind else "taken out of it"
            return pairs, f"{len(pairs)} questions: a sentence {where} finds its text"
    raise ValueError(
        f"Only {len(pairs)} of {len(texts)} texts have a sentence that can serve as a query, but the comparison needs "
        f"{FEWEST}. Pass more texts or --queries, or omit the comparison (--no-compare)."
    )


def lengths_of(embedder: Embedder, documents: Sequence[str], longest: int | None) -> list[int]:
    """Lengths that double from SHORTEST up to `longest`, as long as half of the documents exceed the previous length.

    Raises ValueError without documents.
    """
    if not documents:
        raise ValueError("There are no documents. Pass one or more.")
    sizes = sorted(len(offsets(embedder.tokenizer, document)) for document in documents)
    most, found = sizes[len(sizes) // 2], [SHORTEST]
    while found[-1] < most and (longest is None or 2 * found[-1] <= longest):
        found.append(2 * found[-1])
    return found


def compare(original: Embedder, models: dict[str, Embedder], pairs: Sequence[Pair], lengths: Sequence[int]) -> Comparison:
    """Evaluate retrieval with the documents cut at each length, and compare the last of the models with the original.

    If the original's maximum length is lower, its documents are truncated, and chunked with averaged chunk embeddings or the
    best-matching chunk. A positive difference means that the last of the models is better.
    """
    last = next(reversed(models), "")

    def strategies_at(length: int) -> list[RetrievalStrategy]:
        whole = [replace(strategies(name, model, length)[0], name=name) for name, model in models.items()]
        return [*strategies(ORIGINAL, original, length), *whole]

    rows = _rows(strategies_at, lambda names, name: None if name in models else (last, name), models, pairs, lengths)
    return Comparison(rows, _verdict(rows, last, original.limit))


def compare_models(models: dict[str, Embedder], pairs: Sequence[Pair], lengths: Sequence[int]) -> dict[int, dict[str, Row]]:
    """Evaluate retrieval with the documents cut at each length. Returns length -> strategy -> row.

    A positive difference means that the strategy is better than the first strategy of the first model.
    """

    def strategies_at(length: int) -> list[RetrievalStrategy]:
        return [strategy for name, model in models.items() for strategy in strategies(name, model, length)]

    return _rows(strategies_at, lambda names, name: None if name == names[0] else (name, names[0]), models, pairs, lengths)


def _rows(
    strategies_at: Callable[[int], list[RetrievalStrategy]],
    compared: Callable[[list[str], str], tuple[str, str] | None],
    models: dict[str, Embedder],
    pairs: Sequence[Pair],
    lengths: Sequence[int],
) -> dict[int, dict[str, Row]]:
    """Length -> strategy -> row. `compared` returns the two strategies whose difference a row contains.

    Raises ValueError for two strategies with the same name, and for similarities that can't be ranked.
    """
    if not pairs or not models or not lengths:
        raise ValueError(f"{len(pairs)} pairs, {len(models)} models, {len(lengths)} lengths. Pass one or more of each.")
    tokenizer, rows = next(iter(models.values())).tokenizer, dict[int, dict[str, Row]]()
    for length in lengths:
        queries, documents = [pair.query for pair in pairs], [cut(tokenizer, pair.document, length) for pair in pairs]
        ranks = dict[str, Ranks]()
        for strategy in strategies_at(length):
            title = f"{strategy.name} at {length}"
            if strategy.name in ranks:
                raise ValueError(f"Two methods are named {strategy.name!r}. Use different names for the models.")
            try:
                ranks[strategy.name] = metrics.ranked(strategy.similarity(queries, documents, title))
            except ValueError as error:
                raise ValueError(f"{title}: {error}") from None
        both = {name: compared([*ranks], name) for name in ranks}
        rows[length] = {
            name: Row(metrics.score(ranks[name]), pair and metrics.paired(ranks[pair[0]], ranks[pair[1]]))
            for name, pair in both.items()
        }
    return rows


def _verdict(rows: dict[int, dict[str, Row]], name: str, limit: int | None) -> str:
    said = []
    within = [length for length in rows if ORIGINAL in rows[length]]
    if within:
        length = within[-1]
        ours, theirs = rows[length][name].score.mrr, rows[length][ORIGINAL].score.mrr
        said.append(f"at {length} tokens the {name} model has {ours / max(theirs, 1e-9):.1%} of the original's MRR")
    beyond = [length for length in rows if ORIGINAL not in rows[length]]
    if beyond:
        length = beyond[-1]
        rivals = {way: row for way, row in rows[length].items() if row.difference is not None}
        best, row = max(rivals.items(), key=lambda each: each[1].score.mrr)
        assert row.difference is not None
        if not row.difference.significant:
            what = f"no difference to the best use of the original ({best}) can be seen with {row.difference.queries} questions"
            if all(each.difference.value < 0 for each in rivals.values() if each.difference is not None):
                what += ", though it is below every use of it"
        elif row.difference.value > 0:
            what = f"it is better than the original in every use; the best is {best}"
        else:
            what = f"the original does better ({best}): keep it for texts of this length"
        said.append(f"at {length} {what} (MRR {row.difference.shown()})")
    sentence = "; ".join(said)
    return sentence[:1].upper() + sentence[1:] + "."
