"""Figures of encodings, of models, and of what was measured, in one style, light and dark.

Each function returns a `matplotlib.figure.Figure`, made without pyplot: no display is needed, and threads may draw at the same
time. `path=` saves it, too, as PNG, SVG or PDF; `dark=True` draws it for a dark page. matplotlib is imported when the first
figure is drawn; where it is missing, an ImportError names the extra: `pip install "hf-posenc[plot]"`.
"""

from hf_posenc.plots.absolute import similarity, vectors, waves
from hf_posenc.plots.analogy import counter
from hf_posenc.plots.by_distance import bias, decay
from hf_posenc.plots.measured import lengths, needle
from hf_posenc.plots.models import attention, length_curve, probing, receptive_field
from hf_posenc.plots.naive import criteria
from hf_posenc.plots.ratios import bench

__all__ = [
    "attention",
    "bench",
    "bias",
    "counter",
    "criteria",
    "decay",
    "length_curve",
    "lengths",
    "needle",
    "probing",
    "receptive_field",
    "similarity",
    "vectors",
    "waves",
]
