"""Position encodings, one per module. Importing this package registers all of them."""

import importlib
import pkgutil

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.construction import (
    build,
    build_within_limits,
    global_rng_lock,
    initialize_missing,
    is_marked,
    mark,
    marked_as_loaded,
    placed,
    without_values,
)
from hf_posenc.encodings.context import (
    CrossContext,
    PatchLayout,
    PositionContext,
    length_of,
    position_ids_from_mask,
    positions_of,
)
from hf_posenc.encodings.mapped_tables import StoredTensor, tensor_names
from hf_posenc.encodings.options import (
    GreaterThan,
    at_most,
    check_size,
    checked_max_length,
    checked_value,
    described,
    did_you_mean,
    parse_value,
    quoted,
    short_repr,
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
    "GreaterThan",
    "Geometry",
    "CrossContext",
    "PatchLayout",
    "PositionContext",
    "position_ids_from_mask",
    "PositionEncoding",
    "StoredTensor",
    "at_most",
    "build",
    "build_within_limits",
    "canonical",
    "check_size",
    "checked_max_length",
    "checked_value",
    "described",
    "encoding_class",
    "global_rng_lock",
    "is_marked",
    "list_encodings",
    "length_of",
    "quoted",
    "mark",
    "marked_as_loaded",
    "did_you_mean",
    "tensor_names",
    "options_of",
    "overridden",
    "placed",
    "portable",
    "positions_of",
    "initialize_missing",
    "short_repr",
    "without_values",
    "parse_value",
]
