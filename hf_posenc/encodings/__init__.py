"""What a position is worth. One encoding, one file; importing this package registers them all."""

import importlib
import pkgutil

from hf_posenc.encodings.base import (
    Above,
    Geometry,
    PositionContext,
    PositionEncoding,
    build,
    build_within_limits,
    canonical,
    checked_max_length,
    checked_value,
    checked_values,
    encoding_class,
    list_encodings,
    merged,
    options_of,
    positions_of,
    refuse_oversized,
    shown,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "Above",
    "Geometry",
    "PositionContext",
    "PositionEncoding",
    "build_within_limits",
    "build",
    "canonical",
    "checked_max_length",
    "checked_value",
    "checked_values",
    "encoding_class",
    "list_encodings",
    "merged",
    "options_of",
    "positions_of",
    "refuse_oversized",
    "shown",
]
