"""Diagnostics measure an encoding, or a model before and after patching. Results are frozen dataclasses with `to_dict`,
`to_json`, and a summary as `str`.

Each file contains one diagnostic: its result class, the function that measures it, and its figure. All files are imported."""

import importlib
import pkgutil
from typing import Any

from hf_posenc.diagnostics.registry import DIAGNOSTICS
from hf_posenc.diagnostics.result import Result
from hf_posenc.encodings import did_you_mean

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

_PUBLIC = {
    "Result": Result,
    **{cls.__name__: cls for cls in Result.__subclasses__()},
    **{name: each.measure for name, each in DIAGNOSTICS.items()},
}
globals().update(_PUBLIC)
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{did_you_mean(name, __all__)}")
