"""Any position encoding in any Transformers model."""

import importlib
from typing import TYPE_CHECKING, Any

from hf_posenc import requirements as _requirements

_requirements.check()

from hf_posenc import modeling as _modeling  # noqa: E402  (after the check: older libraries lack what is imported here)
from hf_posenc.encodings import PositionEncoding, list_encodings  # noqa: E402
from hf_posenc.modeling import patch, unpatch  # noqa: E402

if TYPE_CHECKING:
    from hf_posenc.diagnostics import inspect
    from hf_posenc.embedding import PositionEmbedding, TokenPositionEmbedding

__version__ = "0.1.0"
__all__ = [
    "PositionEmbedding",
    "PositionEncoding",
    "TokenPositionEmbedding",
    "inspect",
    "list_encodings",
    "patch",
    "unpatch",
]

_LAZY = {"PositionEmbedding": "embedding", "TokenPositionEmbedding": "embedding", "inspect": "diagnostics"}

_modeling.register_auto_classes()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"hf_posenc.{_LAZY[name]}"), name)
    if name.startswith(_modeling.PREFIX):
        return getattr(_modeling, name)
    raise AttributeError(f"module 'hf_posenc' has no attribute {name!r}")
