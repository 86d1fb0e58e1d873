"""Attention by distance, on texts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.diagnostics.encoding_input import POSITIVE
from hf_posenc.diagnostics.indicators import distances
from hf_posenc.diagnostics.model_input import Texts, reader
from hf_posenc.diagnostics.result import Result, by_layer
from hf_posenc.encodings import checked_value


@dataclass(frozen=True, eq=False)
class AttentionByDistance(Result):
    """The result of `attention_by_distance`.

    model: its class. texts, tokens: how many were read.
    distances: key index - query index, in tokens, N of them; up to 0 where no query sees a later key.
    weights: `[layers, H, N]`, the mean attention weight of a pair at this distance. pairs: `[N]`, how many such pairs there
        are.
    mean_distance: `[layers, H]`, in tokens: Σ weight · |distance|, the mean over queries. All distances count.
    """

    model: str
    texts: int
    tokens: int
    distances: tuple[int, ...]
    pairs: tuple[int, ...]
    weights: Tensor
    mean_distance: Tensor

    def lines(self) -> Iterator[str]:
        yield f"{self.model}: attention by distance, {self.texts} texts, {self.tokens} tokens; means over heads, by layer"
        yield f"  mean distance in tokens: {by_layer(self.mean_distance)}"
        for distance in (distance for distance in (-1, 0, 1) if distance in self.distances):
            yield f"  weight at distance {distance}: {by_layer(self.weights[..., self.distances.index(distance)])}"


def attention_by_distance(
    model: Any, texts: Texts, *, tokenizer: Any = None, max_distance: int = 64, length: int = 256
) -> AttentionByDistance:
    """How much attention tokens give to those 0, 1, 2, … tokens away, by layer and head.

    All tokens count, special ones among them: a head that rests on the last token of a text is one that looks far.

    Args:
        model: of Transformers, patched or stock, or a SentenceTransformer.
        texts: strings; or a batch, input_ids with attention_mask and token_type_ids if need be.
        tokenizer: for strings.
        max_distance: the greatest distance in the result, in tokens.
        length: texts are cut to so many tokens, and to what the model reads.

    Raises:
        ValueError: a model that gives out no attention weights, texts of fewer than two tokens, ids that the model doesn't
        know.
    """
    checked_value("max_distance", max_distance, POSITIVE)
    read = reader(model, tokenizer)
    rows = read.read(texts, length)
    weights: Any = 0
    total: Any = 0
    pairs, queries = torch.zeros(2 * max_distance + 1), 0
    for row in rows:
        given = read.attentions(row)
        size = given.shape[-1]
        distance = distances(size)
        near = distance.abs() <= max_distance
        column = (distance + max_distance)[near]
        summed = torch.zeros(*given.shape[:2], 2 * max_distance + 1, dtype=torch.float64)
        weights = weights + summed.index_add_(-1, column, given[..., near])
        pairs += torch.bincount(column, minlength=2 * max_distance + 1)
        total = total + (given * distance.abs()).sum((-2, -1))
        queries += size
    last = max_distance if (weights[..., max_distance + 1 :] > 0).any() else 0
    kept = slice(0, max_distance + last + 1)
    return AttentionByDistance(
        read.name,
        len(rows),
        queries,
        tuple(range(-max_distance, last + 1)),
        tuple(int(count) for count in pairs[kept]),
        (weights / pairs)[..., kept],
        total / queries,
    )
