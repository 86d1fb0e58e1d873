"""Paired comparison of the losses of masked language models on the same texts.

Shapes: N texts.
"""

from dataclasses import dataclass

import numpy as np

from hf_posenc.evaluation import metrics
from hf_posenc.evaluation.metrics import Difference, Interval


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
        gap = Difference(*metrics.mean(own - by_model[baseline], np.arange(len(own))), len(own)) if paired else None
        return MaskedLoss(*metrics.mean(own, np.arange(len(own))), gap, len(own))

    return {length: {name: row(name, by_model) for name in by_model} for length, by_model in losses.items()}
