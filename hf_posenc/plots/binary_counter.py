"""The binary counter: the bits of a number flip at different rates, as the columns of a sinusoidal encoding do."""

import math
from typing import Annotated, Any

import numpy as np

from hf_posenc.diagnostics.encoding_input import vectors_of
from hf_posenc.diagnostics.figures import WIDTH, Sheet
from hf_posenc.diagnostics.registry import Dark, Help, Path, figure
from hf_posenc.encodings import checked_value


@figure(None, example="--bits 4")
def counter(*, bits: Annotated[int, Help("Number of bits, 2 to 7.")] = 5, dark: Dark = False, path: Path = None) -> Any:
    """Draw a binary counter next to sines: bits flip at different rates.

    The figure shows the positions 0 … 2^bits - 1 as binary numbers, and sines of "sinusoidal" whose wavelengths double from
    column to column.

    A bit flips half as often as the bit to its right, and so does the sign of a sine. The encoding has 2·bits features and the
    base 2^bits, so its wavelengths are 2π·2^i.

    Args:
        bits: number of bits, 2 to 7.

    Raises:
        ValueError: `bits` isn't from 2 to 7.
    """
    if not 2 <= checked_value("bits", bits, int) <= 7:
        raise ValueError(f"bits={bits} must be from 2 to 7, because more rows aren't legible.")
    count = 2**bits
    positions = np.arange(count)
    places = np.arange(bits - 1, -1, -1)  # the highest bit first
    numbers = positions[:, None] >> places & 1
    encoding = {"type": "sinusoidal", "base": float(count), "layout": "concatenated"}
    sines = vectors_of(encoding, count, 2 * bits)[:, places]
    sheet = Sheet((WIDTH * 0.85, 1.4 + 0.155 * count), 1, 2, dark=dark, path=path, sharey=True)
    left, right = sheet.axes[0]
    image = sheet.heatmap(left, numbers, 0, 1)
    sheet.cells(left, image, [[str(bit) for bit in row] for row in numbers.tolist()])
    left.set_xticks(range(bits), [f"{2**place}" for place in places.tolist()])
    left.set(xlabel="bit, by what it counts", ylabel="position")
    sheet.title(left, "binary numbers")
    image = sheet.heatmap(right, sines, -1, 1)
    right.set_xticks(range(bits), [f"{2 * math.pi * 2**place:.0f}" for place in places.tolist()])
    right.set_xlabel("column, by its wavelength in positions")
    sheet.title(right, "sines")
    for axis in (left, right):
        axis.tick_params(length=0)
        axis.set_yticks(range(0, count, max(1, count // 8)))
        for edge in range(1, bits):
            axis.axvline(edge - 0.5, color=sheet.theme.paper, linewidth=4)
    sheet.colorbar(image, [left, right], "value", aspect=40)
    return sheet.finish()
