"""Figures of encodings, models, and measurements, in one style for light and dark pages.

Each function returns a `matplotlib.figure.Figure`, made without pyplot. It needs no display and is thread-safe. `path=` also
saves the figure as PNG, SVG, or PDF, and `dark=True` draws it for a dark page. matplotlib is imported when the first figure is
drawn. If it is missing, an ImportError names the extra `plot`.

Figures of diagnostics are defined in `hf_posenc.diagnostics`, the others here. All files here are imported.
"""

import importlib
import pkgutil
from typing import Any

from hf_posenc import diagnostics  # noqa: F401  # registers its figures
from hf_posenc.diagnostics.registry import FIGURES
from hf_posenc.encodings import did_you_mean

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

globals().update({name: each.draw for name, each in FIGURES.items()})
__all__ = sorted(FIGURES)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{did_you_mean(name, __all__)}")
