"""The kinds of positional components of original models, one file each. Importing this package registers all of them."""

import importlib
import pkgutil

from hf_posenc.architectures.components.component import Disabled, PositionComponent, UnsupportedModelError
from hf_posenc.architectures.components.position_parameters import disabled_names
from hf_posenc.architectures.components.unhandled import is_order_sensitive, unhandled_position_modules
from hf_posenc.architectures.components.vision import count_extra_tokens, has_windows, patch_projection

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "UnsupportedModelError",
    "Disabled",
    "PositionComponent",
    "has_windows",
    "patch_projection",
    "is_order_sensitive",
    "unhandled_position_modules",
    "disabled_names",
    "count_extra_tokens",
]
