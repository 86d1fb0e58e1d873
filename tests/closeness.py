"""Comparisons of tensors in tests."""

import torch

LOOSE = dict(rtol=1e-3, atol=1e-4)
"""The tolerances of `assert_close` between computations on a CPU and on another device."""


def assert_close(actual, expected, rtol=1e-4, atol=1e-5):
    """Check that values are equal up to float32 rounding, which depends on the CPU and on the order of sums.

    The values are tensors, or lists or dicts of tensors. The unit of `atol` is the largest finite expected value in any of
    them. This scale suits values that are zero except for rounding, such as the gradient of a key's bias.
    """
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol * scale(expected))


def assert_equal(actual, expected):
    """Check that the results of the same computation on the same machine are bit-identical."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def assert_apart(actual, expected, by=1e-3):
    """Check that some values differ by more than `by` times the largest value.

    The default is far above the tolerance of `assert_close`.
    """
    assert (actual - expected).abs().max() > by * scale(expected)


def scale(values):
    """The largest finite magnitude in a tensor, or in a list or dict of tensors."""
    if isinstance(values, torch.Tensor):
        return values.detach().where(values.isfinite(), 0.0).abs().max().item()
    return max(map(scale, values.values() if isinstance(values, dict) else values))
