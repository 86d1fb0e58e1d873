"""Paired comparison of the losses of masked language models on the same texts.

Shapes: N texts.
"""

from dataclasses import dataclass

import numpy as np

from hf_posenc.evaluation import metrics, verdicts
from hf_posenc.evaluation.metrics import Difference, Interval
from hf_posenc.evaluation.verdicts import Verdict


@dataclass(frozen=True)
class MaskedLoss:
    """The mean loss per masked token in nats, with its 95% interval over texts (Student's t).

    difference: from the first model on the same texts. None for the first model, or if it doesn't support the length.
    """

    loss: float
    interval: Interval
    difference: Difference | None
    texts: int


def compared(losses: dict[int, dict[str, np.ndarray]], baseline: str) -> dict[int, dict[str, MaskedLoss]]:
    """Length -> model -> loss. losses: length -> model -> losses of the texts, `[N]`."""

    def row(name: str, by_model: dict[str, np.ndarray]) -> MaskedLoss:
        own, paired = by_model[name], name != baseline and baseline in by_model
        gap = _difference(own, by_model[baseline]) if paired else None
        return MaskedLoss(*metrics.mean(own, np.arange(len(own))), gap, len(own))

    return {length: {name: row(name, by_model) for name in by_model} for length, by_model in losses.items()}


def verdict(losses: dict[int, dict[str, np.ndarray]]) -> Verdict | None:
    """The verdict at the longest length. None if only one model supports it."""
    length = max(losses)
    if len(losses[length]) < 2:
        return None

    def paired(name: str, other: str) -> tuple[str, bool]:
        gap = _difference(losses[length][name], losses[length][other])
        return f"loss {gap.shown(3)}", gap.significant

    means = {name: float(values.mean()) for name, values in losses[length].items()}
    shown = {name: f"{value:.3f}" for name, value in means.items()}
    return verdicts.verdict(f"At {length} tokens", "loss", shown, min(means, key=lambda name: means[name]), paired)


def _difference(values: np.ndarray, others: np.ndarray) -> Difference:
    return Difference(*metrics.mean(values - others, np.arange(len(values))), len(values))
