"""Retrieval over the standard library's documentation (stdlib_corpus): a one-line summary must find its module.

Embeddings are mean-pooled over non-padding tokens.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

import hf_posenc  # noqa: F401  (registers patched models with AutoModel)
from hf_posenc.evaluation.metrics import Score, score
from hf_posenc.evaluation.retrieval import cut, embed, lexical_similarity
from hf_posenc.evaluation.stdlib_corpus import Module, split


def evaluate(model: PreTrainedModel, tokenizer: Any, max_seq_length: int, title: str = "documents") -> Score:
    """The model's score on documents truncated at `max_seq_length` tokens."""
    asked, found = embedded(model, tokenizer, split()[0], max_seq_length, title)
    return score(asked @ found.T)


def embedded(
    model: PreTrainedModel, tokenizer: Any, modules: Sequence[Module], max_seq_length: int, title: str = "documents"
) -> tuple[Tensor, Tensor]:
    """The embeddings of the modules' summaries and of their documents, truncated at `max_seq_length` tokens."""
    asked = embed(model, tokenizer, [module.summary for module in modules], max_seq_length, f"{title}: queries")
    return asked, embed(model, tokenizer, [module.document for module in modules], max_seq_length, f"{title}: documents")


def bag_of_words(tokenizer: Any, max_seq_length: int) -> Score:
    """The score of TF-IDF on exactly the text that the models see: the same documents, truncated at the same token."""
    modules, _ = split()
    documents = [cut(tokenizer, module.document, max_seq_length) for module in modules]
    return score(lexical_similarity([module.summary for module in modules], documents))


def long_documents(tokenizer: Any, least: int, count: int, fewer: bool = False) -> list[tuple[str, str]]:
    """(summary, documentation) of `count` evaluation modules with at least `least` tokens.

    If there are too few, adjacent shorter modules are joined into one document with the summary of the first. A truncated
    document therefore still begins with the module of its summary. If that isn't enough either, `fewer` returns the available
    ones. Without it, a SystemExit is raised.
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
    if len(found) < count and not fewer:
        raise SystemExit(f"there are {len(found)} documents of at least {least} tokens, not --documents {count}")
    return found
