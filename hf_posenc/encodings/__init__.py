"""Position encodings, one per file. Importing this package registers them all."""

import importlib
import pkgutil

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import PositionContext, positions_of
from hf_posenc.encodings.options import (
    Above,
    check_size,
    checked_max_length,
    checked_value,
    described,
    listed,
    meant,
    refuse_oversized,
    shown,
)
from hf_posenc.encodings.registry import (
    build,
    build_within_limits,
    canonical,
    encoding_class,
    list_encodings,
    options_of,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "Above",
    "Geometry",
    "PositionContext",
    "PositionEncoding",
    "build",
    "build_within_limits",
    "canonical",
    "check_size",
    "checked_max_length",
    "checked_value",
    "described",
    "encoding_class",
    "list_encodings",
    "listed",
    "meant",
    "options_of",
    "positions_of",
    "refuse_oversized",
    "shown",
]
