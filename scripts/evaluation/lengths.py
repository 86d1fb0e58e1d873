"""Retrieval, and the retrieval of one fact, at several lengths."""

import random
from collections.abc import Sequence
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel

from evaluation.corpus import split
from evaluation.needles import needles, score_needles, seen
from evaluation.retrieval import Score, lexical_similarity, score
from evaluation.windows import Method, cut, methods

Scores = dict[str, dict[int, dict[str, Score]]]
"""Task -> length -> method -> score, for "retrieval", "needle" and, behind the boundary, "needle beyond"."""


def long_documents(tokenizer: Any, least: int, count: int) -> list[tuple[str, str]]:
    """(summary, documentation) of `count` evaluation modules with at least this many tokens.

    Where there are too few, neighbouring shorter modules are joined into one document with the summary of the first, so that
    a cut document still begins with the module of its summary. Raises SystemExit where that isn't enough.
    """
    modules, _ = split()
    sizes = [len(tokenizer(module.document, verbose=False)["input_ids"]) for module in modules]
    found = [(module.summary, module.document) for module, size in zip(modules, sizes, strict=True) if size >= least]
    if len(found) >= count:
        step = len(found) / count
        return [found[int(i * step)] for i in range(count)]
    group, total = [], 0
    for module, size in zip(modules, sizes, strict=True):
        if size < least and len(found) < count:
            group.append(module)
            total += size - tokenizer.num_special_tokens_to_add()
            if total >= least:
                found.append((group[0].summary, "\n\n".join(member.document for member in group)))
                group, total = [], 0
    if len(found) < count:
        raise SystemExit(f"there are {len(found)} documents of at least {least} tokens, not --documents {count}")
    return found


def evaluate(
    models: dict[str, tuple[PreTrainedModel, Any]],
    lengths: Sequence[int],
    documents: int,
    haystacks: int,
    candidates: int,
    seed: int,
) -> Scores:
    """The scores of models with their tokenizers, by name.

    Raises SystemExit for models whose tokenizers differ: the same text would be within a length for one of them alone.
    """
    (first, (_, tokenizer)), *others = models.items()
    if not tokenizer.is_fast:
        raise SystemExit(f"{first} has a slow tokenizer, which doesn't tell where a token begins: a fast one is needed")
    for name, (_, other) in others:
        if other.get_vocab() != tokenizer.get_vocab():
            raise SystemExit(f"{name} has another vocabulary than {first}: evaluate it in a run of its own")
    longest = max(lengths)
    pairs = long_documents(tokenizer, longest, max(documents, haystacks))
    results: Scores = {"retrieval": {}, "needle": {}, "needle beyond": {}}
    for length in tqdm(lengths, desc="lengths", unit="length"):
        ways = [way for name, (model, own) in models.items() for way in methods(name, model, own, length, longest)]
        ways.insert(0, Method("bag of words", lexical_similarity))
        queries = [query for query, _ in pairs[:documents]]
        texts = [cut(tokenizer, document, length) for _, document in pairs[:documents]]
        choose = random.Random(f"{seed} {length}")
        # Depths are spread evenly, so that both sides of the boundary get about their share of documents.
        groups = [
            needles(tokenizer, document, length, candidates, choose, part=(i, haystacks))
            for i, (_, document) in enumerate(pairs[:haystacks])
        ]
        for way in ways:
            title = f"{way.name} at {length}"
            results["retrieval"].setdefault(length, {})[way.name] = score(way.similarity(queries, texts, title))
            questions = [needle.question for group in groups for needle in group]
            everything = way.similarity(questions, [needle.document for group in groups for needle in group], title)
            blocks = [everything[i : i + candidates, i : i + candidates] for i in range(0, len(questions), candidates)]
            for task, here in (("needle", lambda d: d < seen(tokenizer)), ("needle beyond", lambda d: d >= seen(tokenizer))):
                chosen = [block for block, group in zip(blocks, groups, strict=True) if here(group[0].depth)]
                if chosen:
                    results[task].setdefault(length, {})[way.name] = score_needles(chosen)
    return results
