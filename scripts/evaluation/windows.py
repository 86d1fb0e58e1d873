"""Long texts for models of limited length: cut, or divided into chunks that fit.

Shapes: N queries, M documents, C chunks, D hidden_size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_posenc
from evaluation.retrieval import embed, similarity


@dataclass(frozen=True)
class Method:
    """A way to compare queries with documents: texts `[N]`, texts `[M]`, title -> similarities `[N, M]`."""

    name: str
    similarity: Callable[[Sequence[str], Sequence[str], str], Tensor]


def offsets(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    """The characters at which each token of a text begins and ends."""
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]


def cut(tokenizer: Any, text: str, length: int) -> str:
    """The beginning of a text that fits `length` tokens, special ones included."""
    places = offsets(tokenizer, text)
    room = length - tokenizer.num_special_tokens_to_add()
    if room < 1:
        raise SystemExit(f"{length} tokens leave no room for text beside {tokenizer.num_special_tokens_to_add()} special ones")
    return text if len(places) <= room else text[: places[room - 1][1]]


def chunk(tokenizer: Any, text: str, window: int) -> list[str]:
    """A text divided into as few pieces as fit `window` tokens each, special ones included; their lengths are about equal."""
    places = offsets(tokenizer, text)
    pieces = max(1, math.ceil(len(places) / (window - tokenizer.num_special_tokens_to_add())))
    edges = [round(i * len(places) / pieces) for i in range(pieces + 1)]
    return [text[places[low][0] : places[high - 1][1]] for low, high in zip(edges, edges[1:], strict=False) if low < high]


def embed_chunks(model: PreTrainedModel, tokenizer: Any, texts: Sequence[str], window: int, title: str) -> list[Tensor]:
    """For each text the embeddings of its chunks of at most `window` tokens, `[C, D]`, in order."""
    chunks = [chunk(tokenizer, text, window) for text in texts]
    embeddings = embed(model, tokenizer, [piece for pieces in chunks for piece in pieces], window, title)
    return list(embeddings.split([len(pieces) for pieces in chunks]))


def methods(name: str, model: PreTrainedModel, tokenizer: Any, length: int, longest: int) -> list[Method]:
    """The methods for a model at a length: as it is, or truncated and chunked if its limit is below the longest length."""
    limit = hf_posenc.inspect(model).max_length
    if limit is None or limit >= longest:
        return [Method(name, partial(similarity, model, tokenizer, length))]
    kept: dict[tuple, tuple[Tensor, list[Tensor]]] = {}

    def chunks(queries: Sequence[str], documents: Sequence[str], title: str) -> tuple[Tensor, list[Tensor]]:
        key = (*queries, *documents)
        if key not in kept:
            asked = embed(model, tokenizer, queries, limit, f"{title}: queries")
            kept[key] = asked, embed_chunks(model, tokenizer, documents, limit, f"{title}: chunks")
        return kept[key]

    def mean(queries: Sequence[str], documents: Sequence[str], title: str) -> Tensor:
        asked, parts = chunks(queries, documents, title)
        means = torch.stack([torch.nn.functional.normalize(part.mean(0), dim=-1) for part in parts])
        return asked @ means.T

    def best(queries: Sequence[str], documents: Sequence[str], title: str) -> Tensor:
        asked, parts = chunks(queries, documents, title)
        return torch.stack([(asked @ part.T).amax(1) for part in parts], dim=1)

    return [
        Method(f"{name}, truncated at {limit}", partial(similarity, model, tokenizer, limit)),
        Method(f"{name}, chunked by {limit}, mean", mean),
        Method(f"{name}, chunked by {limit}, max", best),
    ]
