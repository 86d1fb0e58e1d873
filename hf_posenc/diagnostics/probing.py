"""Identical-word probing: one word repeated, so that attention shows what position alone does (Wang et al., 2021,
https://openreview.net/forum?id=onxoVA9FxMw)."""

from dataclasses import dataclass

from torch import Tensor

from hf_posenc.diagnostics.result import Result


@dataclass(frozen=True, eq=False)
class Probing(Result):
    """The result of `probing`.

    model: its class. length: L, how often a word is repeated. words: number of words that are averaged over.
    attention: `[layers, H, L, L]`, the mean attention weight of query i and key j.
    strength: `[layers, H]`, in nats: the standard deviation of the log-odds log(a_ij / a_ii) over all pairs. 0: attention doesn't
        depend on position.
    translation_invariance, monotonicity, local_monotonicity, symmetry: `[layers, H]`, of these log-odds as in `Properties`.
    earlier: `[layers, H]`, the part of the weight on other tokens which is on earlier ones: 0.5 is balanced, 1 a decoder.
    """

    model: str
    length: int
    words: int
    near: int
    attention: Tensor
    strength: Tensor
    translation_invariance: Tensor
    monotonicity: Tensor
    local_monotonicity: Tensor
    symmetry: Tensor
    earlier: Tensor
