"""Identical-word probing: one word is repeated, so attention shows only the effect of position (Wang et al., 2021,
https://openreview.net/forum?id=onxoVA9FxMw)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from hf_posenc.diagnostics.encoding_input import POSITIVE, SEVERAL
from hf_posenc.diagnostics.figures import NORMAL, SMALL, Sheet, require_matplotlib, selected
from hf_posenc.diagnostics.matrix_properties import monotonicity, strength, symmetry, translation_invariance
from hf_posenc.diagnostics.model_input import ModelRunner, prepare_model
from hf_posenc.diagnostics.registry import Dark, Help, Layers, Path, diagnostic, figure
from hf_posenc.diagnostics.result import Result, by_layer
from hf_posenc.encodings import checked_value

MAX_LAYERS, MAX_HEADS = 4, 6
"""The default maximum numbers of rows and columns of a figure."""


@dataclass(frozen=True, eq=False)
class Probing(Result):
    """The result of `probing`.

    model: name of its class.
    length: L, the number of repetitions of a word.
    words: number of words that are averaged.
    attention: `[layers, H, L, L]`, the mean attention weight of query i and key j.
    strength: `[layers, H]`, in nats, the standard deviation of the log-odds log(a_ij / a_ii) over all pairs. 0: attention
        doesn't depend on position. Pairs of weight 0 are omitted: masked ones, and those about 100 nats below the largest,
        which a softmax in float32 rounds to 0. If there are many, as with a steep bias, choose a smaller length.
    translation_invariance, monotonicity, local_monotonicity, symmetry: `[layers, H]`, of these log-odds as in `Properties`.
    earlier: `[layers, H]`, the share of the weight on other tokens that is on earlier ones. 0.5: balanced. 1: a decoder.
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
        """The share of pairs without log-odds, excluding the later keys of a decoder."""
        zero = self.attention == 0
        later = torch.ones(self.length, self.length, dtype=torch.bool).triu(1)
        return float(zero[..., ~later if zero[..., later].all() else later | True].double().mean())


@diagnostic("model", on_page=True)
def probing(
    model: Any,
    words: int | Sequence[str] | Sequence[int] = 8,
    length: Annotated[int, Help("How often a word is repeated.")] = 64,
    *,
    tokenizer: Any = None,
    near: int = 20,
    seed: int = 0,
) -> Probing:
    """The effect of only position on attention. Each word is repeated `length` times, without special tokens.

    Log-odds relative to a token's weight on itself cancel the sum of the softmax, which differs between queries. A model in
    which only distance matters is then exactly translation invariant, even near the ends of a text.

    Args:
        model: a Transformers model, patched or original, or a SentenceTransformer.
        words: the number of words to draw from the vocabulary, or words of one token each (with a tokenizer), or their IDs.
        length: L, in tokens.
        tokenizer: required if words are strings.
        near: the maximum distance for `local_monotonicity`, in tokens.
        seed: seed of the random words.

    Raises:
        ValueError: the model returns no attention weights, its maximum length is below `length`, or a word is unknown.
    """
    checked_value("length", length, SEVERAL)
    checked_value("near", near, POSITIVE)
    runner = prepare_model(model, tokenizer)
    if runner.usable is not None and length > runner.usable:
        raise ValueError(
            f"length={length} is above the maximum length of {runner.name}, {runner.usable} tokens. Choose a smaller length."
        )
    ids = _ids(runner, words, seed)
    weights: Any = 0
    odds: Any = 0
    for word in ids:
        (row,) = runner.read(torch.full((1, length), word), length)
        given = runner.attentions(row)
        weights = weights + given / len(ids)
        odds = odds + (given.log() - given.diagonal(dim1=-2, dim2=-1).log()[..., None]) / len(ids)
    earlier, later = weights.tril(-1).sum((-2, -1)), weights.triu(1).sum((-2, -1))
    return Probing(
        runner.name,
        length,
        len(ids),
        near,
        weights,
        strength(odds),
        translation_invariance(odds, runner.still),
        monotonicity(odds, runner.still),
        monotonicity(odds, runner.still, near),
        symmetry(odds, runner.still),
        earlier / (earlier + later),
    )


@figure(
    probing,
    example="bert-base-uncased",
    caption="Attention among identical words, where position alone decides",
    length=32,
)
def draw_probing(
    result: Probing,
    *,
    layers: Layers = None,
    heads: Annotated[Sequence[int] | None, Help("A head, from 0. Can be repeated.", "up to 6")] = None,
    dark: Dark = False,
    path: Path = None,
) -> Any:
    """Draw attention among identical words, where position alone decides.

    Each layer has a row with a map of query × key for each head. The number above a map is the strength of position, in nats.

    result: a result of `diagnostics.probing`.
    layers, heads: indices, from 0. By default, up to 4 layers and 6 heads at equal steps.

    Colors are logarithmic, from 1/50 of the weight without effect of position ("even") to 1.
    Raises ValueError for another result, or layers or heads that don't exist.
    """
    require_matplotlib()
    from matplotlib.colors import LogNorm

    values = Probing.checked(result).attention.numpy()
    rows = selected("layers", layers, values.shape[0], MAX_LAYERS)
    columns = selected("heads", heads, values.shape[1], MAX_HEADS)
    size = (1.2 + 1.05 * len(columns), 0.8 + 1.3 * len(rows))
    sheet = Sheet(size, len(rows), len(columns), dark=dark, path=path, sharex=True, sharey=True)
    even = 1 / result.length
    norm = LogNorm(even / 50, 1)
    for line, (layer, row) in enumerate(zip(rows, sheet.axes, strict=True)):
        for head, axis in zip(columns, row, strict=True):
            image = sheet.heatmap(axis, values[layer, head], norm=norm, aspect="equal")
            axis.tick_params(length=2)
            strength = f"{result.strength[layer, head]:.2f}"
            sheet.title(axis, f"head {head}\n{strength}" if line == 0 else strength, SMALL)
        row[0].set_ylabel(f"layer {layer}")
    sheet.heading(f"{result.model}: attention among {result.length} identical words")
    label = "key (above each map: the strength of position, in nats)"
    sheet.figure.supxlabel(label, fontsize=NORMAL, color=sheet.theme.ink)
    bar = sheet.colorbar(image, list(sheet.axes.flat), "attention weight", extend="min", aspect=12 * len(rows))
    sheet.annotate_colorbar(bar, even, "even")
    return sheet.finish()


def _ids(runner: ModelRunner, words: Any, seed: int) -> list[int]:
    if isinstance(words, int):
        checked_value("words", words, POSITIVE)
        special = {*getattr(runner.tokenizer, "all_special_ids", ()), *_special_ids(runner.model.config)}
        order = torch.randperm(runner.vocabulary, generator=torch.Generator().manual_seed(seed)).tolist()
        return [word for word in order if word not in special][:words]
    if isinstance(words, str) or not isinstance(words, Sequence) or not words:
        raise ValueError(f"words={words!r} must be a number, or a list of words or token IDs.")
    if odd := [word for word in words if isinstance(word, bool) or not isinstance(word, int | str)]:
        raise ValueError(f"words contains {odd[0]!r}. Pass words or token IDs.")
    return [word if isinstance(word, int) else _id(runner, word) for word in words]


def _special_ids(config: Any) -> set[int]:
    """The IDs of special tokens in a config. In some models (RoBERTa), padding has no position."""
    told = [value for name, value in vars(config).items() if name.endswith("_token_id")]
    return {each for value in told for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)}


def _id(runner: ModelRunner, word: str) -> int:
    ids = runner.required_tokenizer()(word, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(f"words contains {word!r}, which has {len(ids)} tokens. Pass words of one token each.")
    return ids[0]
