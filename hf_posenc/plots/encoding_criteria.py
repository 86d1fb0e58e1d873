"""Three criteria of position encodings, measured on their vectors at several lengths.

The criteria are from https://kazemnejad.com/blog/transformer_architecture_positional_encoding/.

Shapes: L positions, D features.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_posenc.diagnostics.encoding_input import embedding, label
from hf_posenc.diagnostics.figures import LARGE, NORMAL, WIDTH, Sheet
from hf_posenc.diagnostics.registry import Dark, Encoding, HiddenSize, Path, figure
from hf_posenc.encodings import Geometry, PositionEncoding, canonical, encoding_class

LENGTHS = (8, 16, 32, 64, 128, 256, 512)
TABLE = LENGTHS[3]
"""Number of positions of learned position embeddings."""
HOLDS, FAILS = "✓", "✗"


@dataclass(frozen=True)
class Criterion:
    """A criterion of position encodings.

    label: axis label for the result of `measure`.
    measure: the vectors of a text, `[L, D]` -> a number.
    holds: whether the criterion holds, from these numbers at all LENGTHS for which the encoding has vectors.
    """

    name: str
    label: str
    measure: Callable[[Tensor], float]
    holds: Callable[[Sequence[float]], bool]


CRITERIA = (
    Criterion(
        "Each position is unique",
        "distance of the nearest two vectors",
        lambda vectors: torch.pdist(vectors).min().item(),
        lambda values: min(values) > 0,
    ),
    Criterion(
        "A step is one in all texts",
        "distance of the first two vectors",
        lambda vectors: (vectors[1] - vectors[0]).norm().item(),
        lambda values: min(values) > 0 and math.isclose(min(values), max(values), rel_tol=1e-6),
    ),
    Criterion(
        "Values stay bounded",
        "largest value",
        lambda vectors: vectors.abs().max().item(),
        lambda values: len(values) == len(LENGTHS) and values[-1] <= 2 * max(values[: len(values) // 2 + 1]),
    ),
)


def measured(encoding: Encoding, hidden_size: int) -> list[tuple[list[float], bool]]:
    """For each of CRITERIA, its numbers at LENGTHS (NaN beyond the maximum length), and whether it holds."""
    free = Geometry(hidden_size=hidden_size)
    built = isinstance(encoding, PositionEncoding)
    limited = not built and encoding_class(canonical(encoding, in_code=True)["type"]).needs_max_length(free)
    limit = TABLE if limited else getattr(encoding, "geometry", free).max_length
    known = [length for length in LENGTHS if limit is None or length <= limit]
    if not known:
        raise ValueError(f"This {label(encoding)!r} has only {limit} positions, but the figure needs {LENGTHS[0]}.")
    sizes = {"hidden_size": hidden_size, "num_attention_heads": 1, "max_length": limit}
    whole = embedding(encoding, known[-1], **sizes)
    vectors = [replace(whole, length=length).vectors() for length in known]
    missing = [math.nan] * (len(LENGTHS) - len(known))
    found = [[each.measure(of_text) for of_text in vectors] for each in CRITERIA]
    return [(values + missing, each.holds(values)) for each, values in zip(CRITERIA, found, strict=True)]


@figure("vectors", example="counter normalized learned")
def criteria(
    encodings: Sequence[Encoding] = ("counter", "normalized", "sinusoidal"),
    *,
    hidden_size: HiddenSize = 64,
    dark: Dark = False,
    path: Path = None,
) -> Any:
    """Draw three criteria of an encoding that adds vectors, and which of these encodings fails which.

    The criteria are measured for texts of 8 to 512 tokens. Learned position embeddings have 64 positions.

    - Each position has a unique vector.
    - A step from one position to the next is the same in texts of any length.
    - Values stay bounded in longer texts. They at most double for eight times the length.

    Args:
        encodings: one to six encodings, each a name, a dict `{"type": name, **options}`, or a module.

    Raises:
        ValueError: an encoding adds no vectors, or has fewer than 8 positions.
    """
    if not 1 <= len(encodings) <= 6:
        raise ValueError(f"This figure compares 1 to 6 encodings, not {len(encodings)}.")
    found = [measured(encoding, hidden_size) for encoding in encodings]
    height = 0.22 * len(encodings)
    sheet = Sheet((WIDTH, 3.0 + height), 2, 3, dark=dark, path=path, height_ratios=(2.2, height + 0.15))
    for number, (each, (above, below)) in enumerate(zip(CRITERIA, sheet.axes.T, strict=True)):
        for place, (encoding, by_criterion) in enumerate(zip(encodings, found, strict=True)):
            values, holds = by_criterion[number]
            style = sheet.line(place, markers=True) | {"linestyle": sheet.line(place)["linestyle"]}
            # Lower lines have larger, hollow markers, so that they stay visible under others.
            wide = len(encodings) - place
            style |= {"markerfacecolor": "none", "markersize": 3 + 2 * wide, "linewidth": 1 + 0.5 * wide}
            above.plot(LENGTHS, values, **style)
            y = 1 - (place + 0.5) / len(encodings)
            mark, color = (HOLDS, sheet.theme.lines[2]) if holds else (FAILS, sheet.theme.lines[1])
            below.text(0.08, y, mark, ha="center", va="center", fontsize=LARGE + 2, color=color)
            below.text(0.16, y, label(encoding), va="center", fontsize=NORMAL, color=sheet.theme.ink)
            below.plot([0.8, 0.98], [y, y], markevery=[0], **{**style, "markersize": 6})
        above.set_yscale("log")
        sheet.length_axis(above, LENGTHS)
        above.set_ylabel(each.label)
        sheet.title(above, each.name)
        below.set(xlim=(0, 1), ylim=(0, 1))
        below.set_axis_off()
    return sheet.finish()
