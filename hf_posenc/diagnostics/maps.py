"""Attention by distance, on texts."""

from dataclasses import dataclass

from torch import Tensor

from hf_posenc.diagnostics.result import Result


@dataclass(frozen=True, eq=False)
class AttentionByDistance(Result):
    """The result of `attention_by_distance`.

    model: its class. texts, tokens: how many were read.
    distances: key index - query index, in tokens, N of them; up to 0 where no query sees a later key.
    weights: `[layers, H, N]`, the mean attention weight of a pair at this distance. pairs: `[N]`, how many such pairs there are.
    mean_distance: `[layers, H]`, in tokens: Σ weight · |distance|, the mean over queries. All distances count.
    """

    model: str
    texts: int
    tokens: int
    distances: tuple[int, ...]
    pairs: tuple[int, ...]
    weights: Tensor
    mean_distance: Tensor
