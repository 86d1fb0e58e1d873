"""Figures of encodings, of models, and of what was measured, in one style, light and dark.

Each function returns a `matplotlib.figure.Figure`, made without pyplot: no display is needed, and threads may draw at the same
time. `path=` also saves it as PNG, SVG or PDF; `dark=True` draws it for a dark page. matplotlib is imported when the first
figure is drawn. If it is missing, an ImportError names the extra `plot`.

Figures of diagnostics are in the files of `hf_posenc.diagnostics`, the others here. All files here are imported.
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
