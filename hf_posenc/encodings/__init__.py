"""Position encodings, one per file. Importing this package registers them all."""

import importlib
import pkgutil

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.construction import (
    build,
    build_within_limits,
    exclusively,
    is_marked,
    mark,
    marked_as_loaded,
    placed,
    refill,
    without_values,
)
from hf_posenc.encodings.context import PositionContext, counted, length_of, positions_of
from hf_posenc.encodings.mapped_tables import StoredTensor, names_in
from hf_posenc.encodings.options import (
    Above,
    at_most,
    check_size,
    checked_max_length,
    checked_value,
    described,
    listed,
    meant,
    refuse_oversized,
    shown,
    written_value,
)
from hf_posenc.encodings.registry import (
    canonical,
    encoding_class,
    list_encodings,
    options_of,
    overridden,
    portable,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "Above",
    "Geometry",
    "PositionContext",
    "PositionEncoding",
    "StoredTensor",
    "at_most",
    "build",
    "build_within_limits",
    "canonical",
    "check_size",
    "checked_max_length",
    "checked_value",
    "counted",
    "described",
    "encoding_class",
    "exclusively",
    "is_marked",
    "list_encodings",
    "length_of",
    "listed",
    "mark",
    "marked_as_loaded",
    "meant",
    "names_in",
    "options_of",
    "overridden",
    "placed",
    "portable",
    "positions_of",
    "refill",
    "refuse_oversized",
    "shown",
    "without_values",
    "written_value",
]
