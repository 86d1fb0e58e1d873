"""Weights that Accelerate offloads and loads when a module is called, and replaced modules."""

import tempfile

import torch
from accelerate import cpu_offload, disk_offload
from torch import nn

from checks.registry import check
from closeness import assert_close, assert_equal
from cover import six


@check(on=six, where=lambda it: it.name != "llama4")  # its original model also fails
@torch.no_grad()
def offloaded_weights_change_nothing(it):
    expected = it.plain(it.model)
    for to_disk, buffers in ((False, True), (True, False)):
        model = it.twin()
        with tempfile.TemporaryDirectory() as folder:
            offload = disk_offload if to_disk else cpu_offload
            offload(model, *([folder] if to_disk else []), execution_device="cpu", offload_buffers=buffers)
            assert all(parameter.is_meta for parameter in model.parameters())
            for _ in range(2):
                assert_equal(it.plain(model), expected)


class EightBit(nn.Linear):
    """A linear layer whose weight is stored in 8 bits."""

    def __init__(self, original):
        super().__init__(original.in_features, original.out_features, original.bias is not None, device="meta")
        self.register_buffer("scale", original.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.weight = nn.Parameter((original.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = original.bias

    def forward(self, states):
        return nn.functional.linear(states, self.weight * self.scale, self.bias)


@check(on=six)
@torch.no_grad()
def linear_layers_are_quantised_after_patch(it):
    """Linear layers in 8 bits give the same output as plain ones with the rounded weights."""
    eight, rounded = it.twin(), it.twin()
    tied = eight.get_output_embeddings()
    for path, module in list(eight.named_modules()):
        if type(module) is nn.Linear and module is not tied:
            eight.set_submodule(path, EightBit(module))
            small = eight.get_submodule(path)
            rounded.get_submodule(path).weight.copy_(small.weight * small.scale)
    assert_close(it.plain(eight), it.plain(rounded))
