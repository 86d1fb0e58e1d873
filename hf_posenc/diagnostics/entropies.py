"""Measures the entropy of attention on texts, which shows on how many tokens a head spreads its weight."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.diagnostics.figures import NORMAL, WIDTH, Sheet, panels
from hf_posenc.diagnostics.model_input import Texts, prepare_model
from hf_posenc.diagnostics.registry import Dark, Path, TextLength, diagnostic, figure
from hf_posenc.diagnostics.result import Result, by_layer


@dataclass(frozen=True, eq=False)
class AttentionEntropy(Result):
    """The result of `attention_entropy`.

    model: name of its class.
    texts, tokens: number of texts and tokens.
    entropy: `[layers, H]`, in nats: -Σ_j a_ij log a_ij, averaged over queries i. 0: all weight is on one token.
    even: the entropy in nats if all tokens that a query sees had the same weight.
    """

    model: str
    texts: int
    tokens: int
    entropy: Tensor
    even: float

    def lines(self) -> Iterator[str]:
        yield f"{self.model}: entropy of attention, {self.texts} texts, {self.tokens} tokens; even attention: {self.even:.3g}"
        yield f"  nats, means over heads, by layer: {by_layer(self.entropy)}"
        yield f"  tokens, exp of it: {by_layer(self.entropy.mean(-1, keepdim=True).exp())}"


@diagnostic("texts", on_page=True)
def attention_entropy(model: Any, texts: Texts, *, tokenizer: Any = None, length: TextLength = 256) -> AttentionEntropy:
    """On how many tokens each head spreads its weight, as the entropy of its attention.

    A model that reads longer texts than it was trained on often attends to more tokens, each with less weight. Compare short
    and long texts, or a model before and after a conversion.

    Args:
        model, texts, tokenizer, length: as for `attention_by_distance`.

    Raises:
        ValueError: the model returns no attention weights, a text has fewer than two tokens, or an ID is unknown.
    """
    runner = prepare_model(model, tokenizer)
    rows = runner.read(texts, length)
    entropy: Any = 0
    even, queries = 0.0, 0
    for row in rows:
        weights = runner.attentions(row)
        entropy = entropy + torch.special.entr(weights).sum((-2, -1))
        even += float((weights > 0).any(0).any(0).sum(-1).double().log().sum())
        queries += weights.shape[-1]
    return AttentionEntropy(runner.name, len(rows), queries, entropy / queries, even / queries)


@figure(
    attention_entropy,
    example="bert-base-uncased bert-alibi --texts my.jsonl",
    caption="Entropy of attention, on the texts",
)
def draw_entropy(results: AttentionEntropy | Mapping[str, AttentionEntropy], *, dark: Dark = False, path: Path = None) -> Any:
    """Draw the entropy of attention on texts, a map of layer × head for each model.

    results: a result of `diagnostics.attention_entropy`, or results of several models by name.
    The scale ends at even attention.

    Raises ValueError for another result.
    """
    named = AttentionEntropy.named(results)
    columns = min(len(named), 2)
    rows = math.ceil(len(named) / columns)
    sheet = Sheet((WIDTH * max(0.6, columns / 2), 0.6 + 2.4 * rows), rows, columns, dark=dark, path=path)
    even = max(result.even for result in named.values())
    for axis, (name, result) in zip(panels(sheet.axes, len(named)), named.items(), strict=True):
        image = sheet.layers_by_heads(axis, result.entropy.numpy(), ".1f", even)
        axis.set_xlabel("head")
        sheet.title(axis, name, NORMAL)
    sheet.colorbar(image, list(sheet.axes.flat), "entropy, nats")
    return sheet.finish()
