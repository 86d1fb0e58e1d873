"""Derived classes, the installation of an encoding, and the positions of one forward pass."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`PosEnc<Class>`, as pickles of version 0.1 name it."""
    if not name.startswith("PosEnc"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_posenc.modeling import derived

    return getattr(derived, name)
