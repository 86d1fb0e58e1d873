"""Measures attention weights by distance on texts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_posenc.diagnostics.encoding_input import POSITIVE
from hf_posenc.diagnostics.figures import WIDTH, Sheet, selected
from hf_posenc.diagnostics.matrix_properties import distances
from hf_posenc.diagnostics.model_input import Texts, prepare_model
from hf_posenc.diagnostics.registry import Dark, Layers, Path, TextLength, diagnostic, figure
from hf_posenc.diagnostics.result import Result, by_layer
from hf_posenc.encodings import checked_value

LINES = 4
"""The default maximum number of layers in a figure. Each layer has a line."""


@dataclass(frozen=True, eq=False)
class AttentionByDistance(Result):
    """The result of `attention_by_distance`.

    model: name of its class.
    texts, tokens: number of texts and tokens.
    distances: N values of key index - query index, in tokens. Up to 0 if no query sees a later key.
    weights: `[layers, H, N]`, the mean attention weight of a pair at this distance.
    pairs: `[N]`, the number of pairs.
    mean_distance: `[layers, H]`, in tokens. Σ weight · |distance| over all distances, averaged over queries.
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


@diagnostic("texts", on_page=True)
def attention_by_distance(
    model: Any, texts: Texts, *, tokenizer: Any = None, max_distance: int = 64, length: TextLength = 256
) -> AttentionByDistance:
    """How much attention tokens pay to those 0, 1, 2, … tokens away, by layer and head.

    Special tokens count, so a head that attends to the last token of a text has a large mean distance.

    Args:
        model: a Transformers model, patched or original, or a SentenceTransformer.
        texts: strings, or a batch of input_ids with an optional attention_mask and token_type_ids.
        tokenizer: required for strings.
        max_distance: the largest distance in the result, in tokens.
        length: texts are truncated to this number of tokens, and to the model's maximum length.

    Raises:
        ValueError: the model returns no attention weights, a text has fewer than two tokens, or an ID is unknown.
    """
    checked_value("max_distance", max_distance, POSITIVE)
    runner = prepare_model(model, tokenizer)
    rows = runner.read(texts, length)
    weights: Any = 0
    total: Any = 0
    pairs, queries = torch.zeros(2 * max_distance + 1), 0
    for row in rows:
        given = runner.attentions(row)
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
        runner.name,
        len(rows),
        queries,
        tuple(range(-max_distance, last + 1)),
        tuple(int(count) for count in pairs[kept]),
        (weights / pairs)[..., kept],
        total / queries,
    )


@figure(
    attention_by_distance,
    example="bert-base-uncased bert-alibi --texts my.jsonl",
    caption="Attention by distance, on the texts",
)
def draw_attention(
    results: AttentionByDistance | Mapping[str, AttentionByDistance],
    *,
    layers: Layers = None,
    dark: Dark = False,
    path: Path = None,
) -> Any:
    """Draw attention by distance on texts.

    Each model has a row. On the left, each layer has a line with the mean weights over its heads. On the right is the mean
    distance of each head.

    results: a result of `diagnostics.attention_by_distance`, or results of several models by name.
    layers: layer indices, from 0. By default, up to 4 of them at equal steps.

    Raises ValueError for another result or layers that don't exist.
    """
    named = AttentionByDistance.named(results)
    sheet = Sheet((WIDTH, 0.6 + 2.4 * len(named)), len(named), 2, dark=dark, path=path, width_ratios=(1.5, 1))
    reach = [result.mean_distance.numpy() for result in named.values()]
    for (left, right), (name, result), distance in zip(sheet.axes, named.items(), reach, strict=True):
        weights = result.weights.numpy().mean(axis=1)
        for place, layer in enumerate(selected("layers", layers, len(weights), LINES)):
            left.plot(result.distances, weights[layer], label=f"layer {layer}", **sheet.line(place))
        left.set_yscale("log")
        left.set_ylabel("mean weight of a pair")
        sheet.title(left, name)
        image = sheet.layers_by_heads(right, distance, ".0f", max(float(np.nanmax(each)) for each in reach))
        sheet.colorbar(image, right, "mean distance, tokens")
    across, along = (
        [get() for get in gets] for gets in zip(*((a.get_xlim, a.get_ylim) for a in sheet.axes[:, 0]), strict=True)
    )
    for axis in sheet.axes[:, 0]:
        axis.set_xlim(min(low for low, _ in across), max(high for _, high in across))
        axis.set_ylim(min(low for low, _ in along), max(high for _, high in along))
    sheet.axes[-1, 0].set_xlabel("distance in tokens: key − query")
    sheet.axes[-1, 1].set_xlabel("head")
    sheet.legend(columns=LINES)
    return sheet.finish()
