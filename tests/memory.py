"""Sets uninitialized memory to NaN, so that code that reads it fails."""

import torch
from torch.utils._device import _device_constructors


def poison_empty(setter=setattr):
    """Make torch.empty and torch.empty_like return NaN."""
    # torch caches these constructors for `with torch.device("meta")`, so it must see the original ones first.
    _device_constructors()
    for name in ("empty", "empty_like"):
        setter(torch, name, _poisoned(getattr(torch, name)))


def _poisoned(function):
    def poisoned(*args, **kwargs):
        tensor = function(*args, **kwargs)
        if tensor.is_meta or not tensor.is_floating_point():
            return tensor
        with torch.no_grad():
            return tensor.fill_(torch.nan)

    return poisoned
