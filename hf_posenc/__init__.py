"""Another position encoding in a Transformers model, with one call."""

import importlib
from typing import Any

from hf_posenc import _versions

_versions.check()

# After the check: older libraries lack what is imported here.
from hf_posenc.architectures.components import UnsupportedModelError  # noqa: E402
from hf_posenc.architectures.registration import register_attention, register_positions  # noqa: E402
from hf_posenc.conversion.converting import convert  # noqa: E402
from hf_posenc.conversion.extension import extend  # noqa: E402
from hf_posenc.conversion.legacy_v4 import from_v4  # noqa: E402
from hf_posenc.conversion.patching import patch, unpatch  # noqa: E402
from hf_posenc.encodings import PositionEncoding, list_encodings  # noqa: E402
from hf_posenc.encodings import did_you_mean as _meant  # noqa: E402
from hf_posenc.hub.cards import model_card  # noqa: E402
from hf_posenc.hub.push import push_to_hub  # noqa: E402
from hf_posenc.inspection import inspect  # noqa: E402
from hf_posenc.modeling import auto as _auto  # noqa: E402
from hf_posenc.modeling import derived as _derived  # noqa: E402
from hf_posenc.modeling.embedding import PositionEmbedding, TokenPositionEmbedding  # noqa: E402

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
    "unpatch",
]

_auto.register_auto_classes()


def __getattr__(name: str) -> Any:
    """`hf_posenc.PosEnc<HostClass>`, made when it is first asked for; packages, which are imported then."""
    if name in ("diagnostics", "plots"):
        return importlib.import_module(f"hf_posenc.{name}")
    if name.startswith(_derived.PREFIX):
        return getattr(_derived, name)
    raise AttributeError(f"module 'hf_posenc' has no attribute {name!r}{_meant(name, __all__)}")


def __dir__() -> list[str]:
    """The public names, without the modules that hold them."""
    return [*__all__, "__version__"]
