"""Another position encoding in a Transformers model, with one call."""

import importlib.util
from typing import TYPE_CHECKING, Any

from hf_posenc import _versions
from hf_posenc.modeling import auto as _auto

if TYPE_CHECKING:
    from hf_posenc.api import *  # noqa: F403

__version__ = "0.1.0"
__all__ = [
    "UnsupportedModelError",
    "PositionEmbedding",
    "PositionEncoding",
    "TokenPositionEmbedding",
    "convert",
    "diagnostics",
    "extend",
    "from_v4",
    "inspect",
    "list_encodings",
    "model_card",
    "patch",
    "plots",
    "push_to_hub",
    "register_attention",
    "register_positions",
    "to_stock",
    "unpatch",
]

_versions.check()
_auto.register()


def __getattr__(name: str) -> Any:
    """A public name, or `PosEnc<OriginalClass>`. Both are imported on first access."""
    if name in ("diagnostics", "plots"):
        return importlib.import_module(f"hf_posenc.{name}")
    if name in __all__:
        return getattr(importlib.import_module("hf_posenc.api"), name)
    if importlib.util.find_spec(f"hf_posenc.{name}"):  # `from hf_posenc import module` asks for it before it imports it
        raise AttributeError(name)
    from hf_posenc.encodings import did_you_mean
    from hf_posenc.modeling import derived

    if name.startswith(derived.PREFIX):
        return getattr(derived, name)
    raise AttributeError(f"module 'hf_posenc' has no attribute {name!r}{did_you_mean(name, __all__)}")


def __dir__() -> list[str]:
    """The public names, without the modules that hold them."""
    return [*__all__, "__version__"]
