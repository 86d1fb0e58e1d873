"""Identical-word probing: one word repeated, so that attention shows what position alone does (Wang et al., 2021,
https://openreview.net/forum?id=onxoVA9FxMw)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.diagnostics.encoding_input import POSITIVE, SEVERAL
from hf_posenc.diagnostics.indicators import monotonicity, strength, symmetry, translation_invariance
from hf_posenc.diagnostics.model_input import Reader, reader
from hf_posenc.diagnostics.result import Result, by_layer
from hf_posenc.encodings import checked_value


@dataclass(frozen=True, eq=False)
class Probing(Result):
    """The result of `probing`.

    model: its class. length: L, how often a word is repeated. words: number of words that are averaged over.
    attention: `[layers, H, L, L]`, the mean attention weight of query i and key j.
    strength: `[layers, H]`, in nats: the standard deviation of the log-odds log(a_ij / a_ii) over all pairs. 0: attention
        doesn't depend on position. Pairs of weight 0 have none and are left out, here and below: those that a mask hides, and
        those about 100 nats behind the largest, which a softmax in float32 rounds to 0. A steep bias in a long text then seems
        weaker than it is: take a smaller length.
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

    def lines(self) -> Iterator[str]:
        yield f"{self.model}: one word {self.length} times, {self.words} words; means over heads, by layer"
        if (lost := self._unweighted()) > 0:
            yield f"  {lost:.0%} of the pairs have the weight 0, and are left out"
        names = ("strength", "translation_invariance", "monotonicity", "local_monotonicity", "symmetry", "earlier")
        for name in names:
            yield f"  {name.replace('_', ' ')}: {by_layer(getattr(self, name))}"

    def _unweighted(self) -> float:
        """The part of the pairs that have no log-odds, beside the later keys of a decoder."""
        zero = self.attention == 0
        later = torch.ones(self.length, self.length, dtype=torch.bool).triu(1)
        return float(zero[..., ~later if zero[..., later].all() else later | True].double().mean())


def probing(
    model: Any,
    words: int | Sequence[str] | Sequence[int] = 8,
    length: int = 64,
    *,
    tokenizer: Any = None,
    near: int = 20,
    seed: int = 0,
) -> Probing:
    """What position alone does to attention: each of some words is read `length` times in a row, without special tokens.

    Log-odds against a token's weight on itself leave out the softmax's sum, which differs from query to query. A model in which
    distance alone counts is then translation invariant to the last digit, near the ends of a text, too.

    Args:
        model: of Transformers, patched or stock, or a SentenceTransformer.
        words: how many to draw from the vocabulary; or words of one token each (with a tokenizer), or their ids.
        length: L, in tokens.
        tokenizer: needed for words as strings.
        near: the distance in tokens up to which `local_monotonicity` counts.
        seed: of the drawn words.

    Raises:
        ValueError: a model that gives out no attention weights or is too short, words that it doesn't know.
    """
    checked_value("length", length, SEVERAL)
    checked_value("near", near, POSITIVE)
    read = reader(model, tokenizer)
    if read.usable is not None and length > read.usable:
        raise ValueError(f"length={length}: {read.name} reads up to {read.usable} tokens: give a smaller length")
    ids = _ids(read, words, seed)
    weights: Any = 0
    odds: Any = 0
    for word in ids:
        (row,) = read.read(torch.full((1, length), word), length)
        given = read.attentions(row)
        weights = weights + given / len(ids)
        odds = odds + (given.log() - given.diagonal(dim1=-2, dim2=-1).log()[..., None]) / len(ids)
    earlier, later = weights.tril(-1).sum((-2, -1)), weights.triu(1).sum((-2, -1))
    return Probing(
        read.name,
        length,
        len(ids),
        near,
        weights,
        strength(odds),
        translation_invariance(odds, read.still),
        monotonicity(odds, read.still),
        monotonicity(odds, read.still, near),
        symmetry(odds, read.still),
        earlier / (earlier + later),
    )


def _ids(read: Reader, words: Any, seed: int) -> list[int]:
    if isinstance(words, int):
        checked_value("words", words, POSITIVE)
        special = {*getattr(read.tokenizer, "all_special_ids", ()), *_special_ids(read.model.config)}
        order = torch.randperm(read.vocabulary, generator=torch.Generator().manual_seed(seed)).tolist()
        return [word for word in order if word not in special][:words]
    if isinstance(words, str) or not isinstance(words, Sequence) or not words:
        raise ValueError(f"words={words!r}: allowed are a number, or a list of words or of ids")
    if odd := [word for word in words if isinstance(word, bool) or not isinstance(word, int | str)]:
        raise ValueError(f"words has {odd[0]!r}: allowed are words or ids")
    return [word if isinstance(word, int) else _id(read, word) for word in words]


def _special_ids(config: Any) -> set[int]:
    """Those that a config tells: some hosts (RoBERTa) count positions without padding."""
    told = [value for name, value in vars(config).items() if name.endswith("_token_id")]
    return {each for value in told for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)}


def _id(read: Reader, word: str) -> int:
    ids = read.asked_tokenizer()(word, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(f"words has {word!r}, of {len(ids)} tokens: give words of one token each")
    return ids[0]
