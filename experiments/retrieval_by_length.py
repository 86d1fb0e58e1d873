"""Retrieval at several lengths by title, by a sentence from beyond the first 512 tokens, and by one fact."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from experiments.needles import BOUNDARY, grid, seen
from hf_posenc.evaluation.cloze_queries import Question, cloze_query, plain, sentence_spans
from hf_posenc.evaluation.metrics import Difference, Ranks, Score, joined, paired, ranked, score
from hf_posenc.evaluation.retrieval import Embedder, RetrievalStrategy, cut, lexical_similarity, strategies
from hf_posenc.progress import ProgressBar

BAG = "bag of words"
METRICS = {"title": "mrr", "deep": "mrr", "needle": "recall_at_1", "needle beyond": "recall_at_1"}
"""Task -> the metric in its tables and figures."""

T = TypeVar("T")
Texts = list[tuple[str, str]]
"""Titles, which are the queries, and their documents."""


@dataclass(frozen=True)
class Case:
    """A document with its title.

    deep: length -> question about a sentence beyond the first BOUNDARY tokens and within that length.
    """

    title: str
    document: str
    deep: dict[int, Question] = field(default_factory=dict)

    def at(self, tokenizer: Any, length: int) -> str:
        """The document that is embedded at a length, without the sentence of `question`."""
        question = self.question(length)
        return cut(tokenizer, question.document if question else self.document, length)

    def question(self, length: int) -> Question | None:
        """The question for a length. For lengths up to BOUNDARY, it is that of the longest length, and its sentence is in text
        that no method sees."""
        return self.deep.get(length) or (self.deep[max(self.deep)] if self.deep else None)


@dataclass
class Found:
    """Results: ranks by task, length, and method, and ranks for the heat map by method, length, and depth."""

    ranks: dict[str, dict[int, dict[str, Ranks]]] = field(default_factory=dict)
    cells: dict[str, dict[int, list[tuple[float, Ranks]]]] = field(default_factory=dict)
    """Method -> length -> the mean number of tokens before the fact, and the ranks, for each depth."""

    def add(self, task: str, length: int, method: str, ranks: Ranks) -> None:
        self.ranks.setdefault(task, {}).setdefault(length, {})[method] = ranks

    def scores(self) -> dict[str, dict[int, dict[str, Score]]]:
        return self._each(lambda task, ranks: {name: score(each) for name, each in ranks.items()})

    def differences(self, baseline: str) -> dict[str, dict[int, dict[str, Difference]]]:
        """The difference of each method to the baseline, in the metric of the task. It is positive if the method is better."""

        def of(task: str, ranks: dict[str, Ranks]) -> dict[str, Difference]:
            others = {name: each for name, each in ranks.items() if name != baseline}
            return {name: paired(each, ranks[baseline], METRICS[task]) for name, each in others.items()}

        return self._each(of)

    def _each(self, of: Callable[[str, dict[str, Ranks]], dict[str, T]]) -> dict[str, dict[int, dict[str, T]]]:
        return {
            task: {length: of(task, ranks) for length, ranks in by_length.items()} for task, by_length in self.ranks.items()
        }

    def heat(self) -> dict[str, dict[int, list[dict[str, Any]]]]:
        """Method -> length -> the mean number of tokens before the fact, and the score, for each depth."""
        return {
            name: {
                length: [{"tokens_before": depth, "score": score(ranks)} for depth, ranks in parts]
                for length, parts in by_length.items()
            }
            for name, by_length in self.cells.items()
        }


def cases(tokenizer: Any, texts: Texts, lengths: Sequence[int], count: int, seed: int, deep: bool = True) -> list[Case]:
    """Up to `count` random documents that have at least the longest of the lengths.

    With `deep`, each document has a question for every length beyond BOUNDARY. Sentences in several documents aren't questions.
    """
    drawn = random.Random(seed).sample(texts, len(texts))
    times = Counter(key for _, text in texts for key in {plain(text[start:end]) for start, end in sentence_spans(text)})
    shared = {key for key, number in times.items() if number > 1}
    found: list[Case] = []
    beyond = [length for length in lengths if length > BOUNDARY] if deep else []
    with ProgressBar(total=count, desc="choosing documents", unit="document", leave=False) as bar:
        for number, (title, text) in enumerate(drawn):
            if len(found) == count:
                break
            if len(tokenizer(text, verbose=False)["input_ids"]) < max(lengths):
                continue
            asked = {
                length: cloze_query(tokenizer, text, random.Random(f"{seed} {number} {length}"), BOUNDARY, length, shared)
                for length in beyond
            }
            questions = {length: question for length, question in asked.items() if question is not None}
            if len(questions) == len(beyond):
                found.append(Case(title, text, questions))
                bar.update()
    return found


def ways(embedders: dict[str, Embedder], longest: int, window: int | None = None) -> list[RetrievalStrategy]:
    """A bag of words, and all strategies of all models."""
    by_model = [way for name, embedder in embedders.items() for way in strategies(name, embedder, longest, window)]
    return [RetrievalStrategy(BAG, lexical_similarity), *by_model]


def baseline_of(found: Sequence[RetrievalStrategy], wanted: str | None) -> str:
    """The name of the baseline. Default: the first model, truncated if possible. Raises SystemExit for an unknown name."""
    names = [way.name for way in found]
    if wanted is None:
        first, second = [*names[1:], ""][:2]  # strategies of the first model, which follow the bag of words
        return second if second.startswith(f"{first}, truncated at ") else first
    if wanted not in names:
        raise SystemExit(f"--baseline {wanted!r} isn't one of the methods: {', '.join(map(repr, names))}.")
    return wanted


def evaluate(
    found: Found,
    compared: Sequence[RetrievalStrategy],
    tokenizer: Any,
    documents: Sequence[Case],
    lengths: Sequence[int],
    tasks: Sequence[str],
) -> None:
    """Add the ranks of the tasks "title" and "deep"."""
    with ProgressBar(total=len(lengths) * len(compared), desc="questions", unit="method") as bar:
        for length in lengths:
            texts = [case.at(tokenizer, length) for case in documents]
            asked = {"title": [case.title for case in documents]}
            if all(case.deep for case in documents):
                asked["deep"] = [question.query for case in documents if (question := case.question(length))]
            for way in compared:
                for task in asked.keys() & {*tasks}:
                    similarity = way.similarity(asked[task], texts, f"{way.name} at {length}")
                    found.add(task, length, way.name, ranked(similarity))
                bar.update()


def evaluate_needles(
    found: Found,
    compared: Sequence[RetrievalStrategy],
    tokenizer: Any,
    haystacks: Sequence[Case],
    lengths: Sequence[int],
    depths: int,
    candidates: int,
    seed: int,
) -> None:
    """Add the ranks of the tasks "needle" and "needle beyond" (facts beyond the first BOUNDARY tokens), and the heat map."""
    boundary = seen(tokenizer)
    with ProgressBar(total=len(lengths) * len(compared), desc="needles", unit="method") as bar:
        for length in lengths:
            parts = grid(tokenizer, [case.document for case in haystacks], length, depths, candidates, seed)
            flat = [needle for groups in parts for group in groups for needle in group]
            for way in compared:
                title = f"{way.name} at {length}"
                everything = way.similarity([each.question for each in flat], [each.document for each in flat], title)
                start, sides = 0, dict[str, list[Ranks]]({"needle": [], "needle beyond": []})
                for groups in parts:
                    here = []
                    for number, group in enumerate(groups):
                        block = everything[start : start + candidates, start : start + candidates]
                        here.append(ranked(block, groups=[number] * candidates))
                        sides["needle" if group[0].depth < boundary else "needle beyond"].append(here[-1])
                        start += candidates
                    before = sum(group[0].depth for group in groups) / len(groups)
                    found.cells.setdefault(way.name, {}).setdefault(length, []).append((before, joined(here)))
                for task, blocks in sides.items():
                    if blocks:
                        found.add(task, length, way.name, joined(blocks))
                bar.update()
