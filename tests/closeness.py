"""How closely tensors of tests must agree."""

import torch

LOOSE = dict(rtol=1e-3, atol=1e-4)
"""For `assert_close`, between computations on a CPU and elsewhere."""


def assert_close(actual, expected, rtol=1e-4, atol=1e-5):
    """Equal but for the rounding of float32, which depends on the CPU and on the order of sums.

    Takes tensors, or lists or dicts of them. `atol` counts in units of the largest finite value expected in any of
    them, so that a value which is zero but for rounding, as the gradient of a key's bias, is compared with the others.
    """
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol * scale(expected))


def assert_equal(actual, expected):
    """Equal to the last bit: the same computation on the same machine."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def assert_apart(actual, expected, by=1e-3):
    """Somewhere different by more than this part of the largest value: far above what `assert_close` lets pass."""
    assert (actual - expected).abs().max() > by * scale(expected)


def scale(values):
    """The largest finite magnitude in a tensor, or in a list or dict of tensors."""
    if isinstance(values, torch.Tensor):
        return values.detach().where(values.isfinite(), 0.0).abs().max().item()
    return max(map(scale, values.values() if isinstance(values, dict) else values))
