"""Uninitialised memory is NaN, so that whoever reads it fails."""

import torch


def poison_empty(setter=setattr):
    """Make torch.empty and torch.empty_like return NaN."""
    for name in ("empty", "empty_like"):
        setter(torch, name, _poisoned(getattr(torch, name)))


def _poisoned(function):
    def poisoned(*args, **kwargs):
        tensor = function(*args, **kwargs)
        if tensor.is_floating_point() and tensor.device.type != "meta":
            with torch.no_grad():
                tensor.fill_(torch.nan)
        return tensor

    return poisoned
