"""Measures how similar an encoding's positions are, for each pair.

Shapes: L positions, H heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from torch import Tensor

from hf_posenc.diagnostics.encoding_input import Quantity, Sizes, label, prepare_encoding, sizes_of
from hf_posenc.diagnostics.figures import NORMAL, SMALL, Sheet, panels, selected
from hf_posenc.diagnostics.matrix_properties import distances
from hf_posenc.diagnostics.registry import Causal, Dark, Encoding, Help, HiddenSize, Length, NumHeads, Path, diagnostic, figure
from hf_posenc.diagnostics.result import Result, heads, ranged
from hf_posenc.encodings import encoding_class
from hf_posenc.encodings.alibi import UNSEEN

if TYPE_CHECKING:
    from typing import Unpack

MAPS = 8
"""The default maximum number of heads in a figure. Each head has a map."""


@dataclass(frozen=True, eq=False)
class Similarity(Result):
    """The result of `similarity`.

    encoding: name of the encoding.
    quantity: "vectors" that are added to inputs, or "scores" in attention.
    matrix: `[H, L, L]`, for query position i and key position j, the dot product of vectors (H = 1), or the bias. If the
        encoding rotates, the scaled score of a query and a key whose features are all 1 is added to the bias. If all heads are
        equal, H = 1. NaN for later keys in a causal stack.
    cosine: `[H, L, L]`, cosines of vectors, or of rotated queries and keys. None if there is a bias.
    """

    encoding: str
    quantity: Quantity
    matrix: Tensor
    cosine: Tensor | None

    def lines(self) -> Iterator[str]:
        yield f"{self.encoding}: {self.quantity} of {self.matrix.shape[-1]} positions, {heads(self.matrix)}"
        yield f"  {'dot products' if self.quantity == 'vectors' else 'scores'}: {ranged(self.matrix)}"
        if self.cosine is not None:
            yield f"  cosines: {ranged(self.cosine)}"


@diagnostic("encoding")
def similarity(encoding: Any, length: int = 128, *, quantity: Quantity | None = None, **sizes: "Unpack[Sizes]") -> Similarity:
    """How similar two positions are: dot products and cosines of vectors, scores of a fixed query and key, or biases.

    Args:
        encoding: a name or dict as for `patch`, a `PositionEncoding`, or a `PositionEmbedding`.
        length: L, the number of positions.
        quantity: "vectors" or "scores". Required for a composition that has both.
        **sizes: `Sizes` of an encoding given by name: hidden_size, num_attention_heads, max_length, causal, seed.

    Raises:
        ValueError: the encoding is unknown or doesn't have this quantity, or a size is invalid.
    """
    measured = prepare_encoding(encoding, length, sizes)
    kind = measured.quantity(quantity)
    if kind == "vectors":
        vectors = measured.vectors()
        matrix = vectors @ vectors.T
        size = vectors.norm(dim=1)
        cosine = (matrix / (size[:, None] * size)).where(matrix.isfinite(), torch.nan)
        if measured.is_causal:
            later = distances(length) > 0
            matrix, cosine = (each.masked_fill(later, torch.nan) for each in (matrix, cosine))
        return Similarity(measured.name, kind, matrix[None], cosine[None])
    matrix = measured.scores(*measured.ones())[0]
    among: Tensor | None = None
    if not {"distance_bias", "score_bias"} & {*measured.verbs}:
        query, key = (each[0] for each in measured.rotated(*measured.ones()))
        among = query @ key.mT / (query.norm(dim=-1)[..., None] * key.norm(dim=-1)[..., None, :])
        among = _of_heads(among.where(matrix.isfinite(), torch.nan))
    return Similarity(measured.name, kind, _of_heads(matrix), among)


@figure("scores", example="alibi --causal", caption="Scores by query and key")
def draw_bias(
    encoding: Encoding | Similarity,
    *,
    length: Length = 48,
    num_attention_heads: NumHeads = 8,
    hidden_size: HiddenSize = 768,
    causal: Causal = None,
    heads: Annotated[Sequence[int] | None, Help("A head, from 0. Can be repeated.", "up to 8")] = None,
    dark: Dark = False,
    path: Path = None,
) -> Any:
    """Draw what an encoding adds to scores, a map of query × key for each head.

    If the encoding rotates, a map shows the score of a query and a key whose features are all 1, plus the bias. Keys that a
    query doesn't see are blank.

    encoding: a name, a dict `{"type": name, **options}`, a module, which keeps its sizes, or a result of
        `diagnostics.similarity`.
    heads: head indices, from 0. By default, up to 8 of them at equal steps.

    Raises ValueError for an encoding that doesn't change scores, or heads that don't exist.
    """
    if isinstance(encoding, Similarity):
        found, name = encoding, encoding.encoding
    else:
        sizes = sizes_of(encoding, num_attention_heads=num_attention_heads, hidden_size=hidden_size, causal=causal)
        found, name = similarity(encoding, length, quantity="scores", **sizes), label(encoding)
    values = without_unseen(found.matrix)
    shown = selected_heads(heads, len(values), MAPS)
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    size = (1.2 + 1.5 * columns, 0.7 + 1.75 * rows) if len(shown) > 1 else (3.6, 3.2)
    sheet = Sheet(size, rows, columns, dark=dark, path=path, sharex=True, sharey=True)
    low, high = np.nanmin(values[shown]), np.nanmax(values[shown])
    for axis, head in zip(panels(sheet.axes, len(shown)), shown, strict=True):
        image = sheet.heatmap(axis, values[head], low, high, aspect="equal")
        name_of_map = "all heads" if len(values) == 1 else f"head {head}"
        ends = f"{np.nanmin(values[head]):.3g} to {np.nanmax(values[head]):.3g}".replace("-", "−")
        sheet.title(axis, f"{name_of_map}\n{ends}", SMALL)
        axis.tick_params(length=2)
    for axis in sheet.axes[:, 0]:
        axis.set_ylabel("query")
    sheet.figure.supxlabel("key", fontsize=NORMAL, color=sheet.theme.ink)
    rotates = _rotates(found)
    sheet.heading(f"{name}: {'score' if rotates else 'bias'}")
    sheet.colorbar(image, list(sheet.axes.flat), "score" if rotates else "added to the score", aspect=15 * rows)
    return sheet.finish()


def without_unseen(values: Tensor) -> np.ndarray:
    """The values, with NaN for infinite biases and for finite biases that mask a key."""
    numbers = values.numpy()
    return np.where(np.isfinite(numbers) & (numbers > UNSEEN / 2), numbers, np.nan)


def selected_heads(given: Sequence[int] | None, count: int, most: int) -> list[int]:
    """The indices of heads to show. If all heads are equal, there is only one."""
    return [0] if count == 1 else selected("heads", given, count, most)


def _rotates(found: Similarity) -> bool:
    """Whether the matrix contains scores of rotated queries and keys, possibly with biases added."""
    try:
        return "rotate" in encoding_class(found.encoding).mechanisms()
    except ValueError:  # the encoding of a loaded result may not be registered
        return found.cosine is not None


def _of_heads(values: Tensor) -> Tensor:
    """Values of heads `[H, ...]`. If all heads are equal, only the first, `[1, ...]`."""
    alike = torch.allclose(values, values[:1].expand_as(values), rtol=0, atol=1e-12, equal_nan=True)
    return values[:1] if alike else values
