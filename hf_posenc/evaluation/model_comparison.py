"""What a conversion costs and gains on texts of one's own: retrieval by length, original against converted.

Shapes: N queries and documents, in the same order.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.evaluation import cloze_queries, metrics
from hf_posenc.evaluation.metrics import Difference, Ranks, Score
from hf_posenc.evaluation.retrieval import Embedder, RetrievalStrategy, cut, offsets, strategies

SHORTEST = 128
REACH = "Lengths double as far as half of the documents reach beyond the one before."
FEWEST = 20
"""Least number of questions."""
ORIGINAL = "original"


@dataclass(frozen=True)
class Pair:
    """A query, and the document that it should find."""

    query: str
    document: str


@dataclass(frozen=True)
class Row:
    """A method at one length. difference: from what the function says, over the same queries."""

    score: Score
    difference: Difference | None


@dataclass(frozen=True)
class Comparison:
    """rows: length -> method -> row; the compared models' own rows have no difference. verdict: one sentence."""

    rows: dict[int, dict[str, Row]]
    verdict: str


def synthetic_pairs(embedder: Embedder, texts: Sequence[str], seed: int = 0) -> tuple[list[Pair], str]:
    """Questions made of the texts: a sentence is taken out of each, and is to find it again.

    embedder: the original's. Where enough texts are longer than it reads, only these count, and the sentence comes from behind
    that length.

    Returns the pairs, and what they are in words. Raises ValueError where the texts have too few sentences.
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
        f"of {len(texts)} texts {len(pairs)} have a sentence that could be a question, and {FEWEST} are needed to compare: "
        "give more texts, or questions of your own (--queries), or leave the comparison out (--no-compare)"
    )


def lengths_of(embedder: Embedder, documents: Sequence[str], longest: int | None) -> list[int]:
    """Doubling from SHORTEST up to `longest`, as far as at least half of the documents reach beyond the length before.

    Raises ValueError without documents.
    """
    if not documents:
        raise ValueError("there are no documents. Pass one or more.")
    sizes = sorted(len(offsets(embedder.tokenizer, document)) for document in documents)
    most, found = sizes[len(sizes) // 2], [SHORTEST]
    while found[-1] < most and (longest is None or 2 * found[-1] <= longest):
        found.append(2 * found[-1])
    return found


def compare(original: Embedder, models: dict[str, Embedder], pairs: Sequence[Pair], lengths: Sequence[int]) -> Comparison:
    """Retrieval among the documents, cut at each length. The last of the models is what the original is compared with.

    Where the original reads less, it is truncated, and chunked with the mean and the best of the chunks. A difference tells how
    much better (above 0) the last of the models is.
    """
    last = next(reversed(models), "")

    def ways(length: int) -> list[RetrievalStrategy]:
        new = [RetrievalStrategy(name, strategies(name, model, length)[0].similarity) for name, model in models.items()]
        return [*strategies(ORIGINAL, original, length), *new]

    def gain(ranks: dict[str, Ranks], name: str) -> Difference | None:
        return None if name in models else metrics.paired(ranks[last], ranks[name])

    rows = _rows(ways, gain, models, pairs, lengths)
    return Comparison(rows, _verdict(rows, last, original.limit))


def compare_models(models: dict[str, Embedder], pairs: Sequence[Pair], lengths: Sequence[int]) -> dict[int, dict[str, Row]]:
    """Length -> way to use a model -> its row, of retrieval among the documents, cut at each length. A difference is from the
    first way of the first model: above 0, better than that."""

    def ways(length: int) -> list[RetrievalStrategy]:
        return [way for name, model in models.items() for way in strategies(name, model, length)]

    def gain(ranks: dict[str, Ranks], name: str) -> Difference | None:
        first = next(iter(ranks))
        return None if name == first else metrics.paired(ranks[name], ranks[first])

    return _rows(ways, gain, models, pairs, lengths)


def _rows(
    ways: Callable[[int], list[RetrievalStrategy]],
    gain: Callable[[dict[str, Ranks], str], Difference | None],
    models: dict[str, Embedder],
    pairs: Sequence[Pair],
    lengths: Sequence[int],
) -> dict[int, dict[str, Row]]:
    """Length -> way -> its row: `ways` are those of a length, `gain` is the difference of one to another."""
    if not pairs or not models or not lengths:
        raise ValueError(f"{len(pairs)} pairs, {len(models)} models, {len(lengths)} lengths. Pass one or more of each.")
    tokenizer, rows = next(iter(models.values())).tokenizer, dict[int, dict[str, Row]]()
    for length in lengths:
        ranks = _ranks(ways(length), pairs, length, tokenizer)
        rows[length] = {name: Row(metrics.score(found), gain(ranks, name)) for name, found in ranks.items()}
    return rows


def _ranks(ways: Sequence[RetrievalStrategy], pairs: Sequence[Pair], length: int, tokenizer: Any) -> dict[str, Ranks]:
    """The ranks by each way. Raises ValueError for two ways of one name, and for similarities that can't be ranked."""
    if twice := [name for name, times in Counter(way.name for way in ways).items() if times > 1]:
        raise ValueError(f"two ways are named {twice[0]!r}. Give the models names that differ.")
    queries, documents = [pair.query for pair in pairs], [cut(tokenizer, pair.document, length) for pair in pairs]
    ranks = {}
    for way in ways:
        title = f"{way.name} at {length}"
        try:
            ranks[way.name] = metrics.ranked(way.similarity(queries, documents, title))
        except ValueError as error:
            raise ValueError(f"{title}: {error}") from None
    return ranks


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
