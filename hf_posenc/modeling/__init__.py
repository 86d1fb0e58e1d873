"""Creates derived classes, installs encodings, and computes the positions of a forward pass."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return `PosEnc<Class>`. Pickles of version 0.1 refer to it in this module."""
    if not name.startswith("PosEnc"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_posenc.modeling import derived

    return getattr(derived, name)
