"""Measures order sensitivity: how much a model's hidden states change when the tokens of a text are reordered."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean as mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_posenc.diagnostics.model_input import Texts, prepare_model
from hf_posenc.diagnostics.registry import diagnostic
from hf_posenc.diagnostics.result import Result


@dataclass(frozen=True, eq=False)
class OrderSensitivity(Result):
    """The result of `order_sensitivity`.

    model: name of its class.
    texts: number of texts.
    changes: "shuffled" (a random order of all tokens), `"neighbours"` (each pair of adjacent tokens is swapped), "halves" (the
        text's two halves are swapped).
    tokens: for each change, 1 - the cosine of a token's last hidden state before and after it, averaged over tokens.
    text: for each change, 1 - the cosine of the mean state. 0: order doesn't matter.
    """

    model: str
    texts: int
    changes: tuple[str, ...]
    tokens: tuple[float, ...]
    text: tuple[float, ...]

    def lines(self) -> Iterator[str]:
        yield f"{self.model}: change of states (1 - cosine) when tokens change places, {self.texts} texts"
        for change, tokens, text in zip(self.changes, self.tokens, self.text, strict=True):
            yield f"  {change}: {tokens:.3g} of a token, {text:.3g} of the text"


@diagnostic("texts", on_page=True)
@torch.no_grad()
def order_sensitivity(model: Any, texts: Texts, *, tokenizer: Any = None, length: int = 256, seed: int = 0) -> OrderSensitivity:
    """How much the last hidden states change when the tokens of a text are reordered. In a bag-of-words model, they don't.

    Special tokens keep their places if a tokenizer lists them. In a decoder, states depend on the order of earlier tokens even
    without a position encoding.

    Args:
        model, texts, tokenizer, length: as for `attention_by_distance`.
        seed: seed of the random order.

    Raises:
        ValueError: a text has fewer than four tokens that can be permuted, or an ID is unknown.
    """
    runner = prepare_model(model, tokenizer)
    rows, generator = runner.read(texts, length), torch.Generator().manual_seed(seed)
    special = torch.tensor(sorted({*getattr(runner.tokenizer, "all_special_ids", ())}), dtype=torch.long)
    tokens: dict[str, list[float]] = {name: [] for name in CHANGES}
    text: dict[str, list[float]] = {name: [] for name in CHANGES}
    for place, row in enumerate(rows):
        ids = row["input_ids"]
        free = (~torch.isin(ids[0].cpu(), special)).nonzero()[:, 0]
        if len(free) < 4:
            raise ValueError(
                f"Text {place} has only {len(free)} tokens that can be permuted, but 4 are needed. Pass longer texts."
            )
        before = runner.states(row).double()
        for name, change in CHANGES.items():
            order = torch.arange(ids.shape[1])
            order[free] = free[change(len(free), generator)]  # index of the token at each place
            after = runner.states({**row, "input_ids": ids[:, order.to(ids.device)]}).double()
            tokens[name].append(float(1 - F.cosine_similarity(after, before[order.to(ids.device)], dim=-1).mean()))
            text[name].append(float(1 - F.cosine_similarity(after.mean(0), before.mean(0), dim=0)))
    return OrderSensitivity(
        runner.name, len(rows), tuple(CHANGES), tuple(map(mean, tokens.values())), tuple(map(mean, text.values()))
    )


def _shuffled(size: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(size, generator=generator)


def _neighbours(size: int, generator: torch.Generator) -> Tensor:
    order = torch.arange(size)
    even = size - size % 2
    order[:even] = order[:even].unflatten(0, (-1, 2)).flip(1).flatten()
    return order


def _halves(size: int, generator: torch.Generator) -> Tensor:
    return torch.arange(size).roll(size // 2)


CHANGES: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "shuffled": _shuffled,
    "neighbours": _neighbours,
    "halves": _halves,
}
"""Name -> the new order of `size` tokens, `[size]`."""
