"""Another position encoding in a Transformers model, with one call."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from hf_posenc import _versions

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

if Path(sys.argv[0]).stem != "hf-posenc":  # in the command, those subcommands import it that need torch and Transformers
    _versions.check()
    from hf_posenc.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """`hf_posenc.PosEnc<HostClass>`, made when it is first asked for; packages, and in the command all names, imported then."""
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
