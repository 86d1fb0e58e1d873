"""Length curves: how well a model reads the same tokens behind more and more text."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from hf_posenc.diagnostics.result import Result


@dataclass(frozen=True, eq=False)
class LengthCurve(Result):
    """The result of `length_curve`.

    model: its class. texts: how many were read. targets: number of tokens scored in each, the same ones at all lengths.
    measure: "loss", of a causal language model, nats per token; "masked loss", of a masked one, nats per masked token; "cosine",
        of other models: the states of the targets with those at the shortest length.
    lengths: in tokens, of what the model reads, the targets at its end.
    mean: by length, over texts. error: the standard error of it; None with one text. by_text: `[texts, lengths]`.
    """

    model: str
    texts: int
    targets: int
    measure: Literal["loss", "masked loss", "cosine"]
    lengths: tuple[int, ...]
    mean: tuple[float, ...]
    error: tuple[float | None, ...]
    by_text: Tensor
