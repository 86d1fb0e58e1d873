"""Layers on several devices, replicas of nn.DataParallel, and reads of a device's memory, which wait for a GPU.

The meta device stands for a second device and for a GPU.
"""

import contextlib
import sys

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch.utils._python_dispatch import TorchDispatchMode

import hf_posenc
from closeness import assert_close
from hf_posenc import _compat
from models import CACHE, ENCODINGS, first, patched, stock, suits, tokens
from oracles import gradients, padded

LAST = {"bert": ("encoder.layer.1", "pooler"), "gpt2": ("h.1", "ln_f"), "llama": ("layers.1", "norm")}
"""The modules of a model with two layers that are on the second device."""


@pytest.mark.parametrize("side", [None, "right"])
@pytest.mark.parametrize(
    ("host", "encoding", "changes"),
    [
        *[("bert", kind, {}) for kind in ("alibi", "t5", "rope", "shaw")],
        *[("gpt2", kind, {}) for kind in ("alibi", "rope")],
        *[("llama", kind, {}) for kind in ("alibi", "t5", "rope", "xpos", "cope")],
        ("bert", "t5", {"per_layer": True}),
        ("bert", "learned", {"inject": "every_layer"}),
        ("gpt2", "sinusoidal", {"inject": "after_attention"}),
    ],
)
def test_layers_on_two_devices(host, encoding, changes, side):
    """The encoding of the stack is on the first device, as the embeddings are."""
    model = hf_posenc.patch(stock(host), encoding, max_length=24, **changes)
    for path in LAST[host]:
        module = model.get_submodule(path).to("meta")
        add_hook_to_module(module, AlignDevicesHook(execution_device="meta", place_submodules=True))
    ids, mask = (tokens(2), None) if side is None else padded(tokens(2), [11, 7], side)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        output = first(model(ids, attention_mask=mask, use_cache=False))
        assert output.is_meta and output.shape == (*ids.shape, 32)


@pytest.fixture
def replicate(monkeypatch):
    """nn.DataParallel's own replication, on one device."""

    def copies(tensors, devices, detach=False):
        return [[tensor.clone() for tensor in tensors] for _ in devices]

    monkeypatch.setattr(sys.modules["torch.nn.parallel.replicate"], "_broadcast_coalesced_reshape", copies)
    return lambda model: torch.nn.parallel.replicate(model, [0])[0]


@pytest.mark.parametrize(
    ("host", "encoding"),
    [
        *[("bert", kind) for kind in ("learned", "relative", "shaw")],
        ("bert", {"type": "sinusoidal", "scale": "learned"}),
        ("gpt2", "learned"),
        ("llama", {"type": "fope", "coefficients": "learned"}),
        ("megatron-bert", {"type": "alibi", "slopes": "learned"}),
    ],
)
def test_replicas_use_their_own_tensors(replicate, host, encoding):
    """Outputs and gradients of a replica equal those of the original, whose tensors the replica doesn't read."""
    model = patched(host, encoding)

    def outputs(model):
        return first(model(tokens()))

    expected = gradients(model, lambda _: outputs(model).square().sum())
    whole, replica = outputs(model).detach(), replicate(model)
    saved = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    output = outputs(replica)
    assert_close(output.detach(), whole)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved[name])
    assert_close(gradients(model, lambda _: output.square().sum()), expected)


class Reads(TorchDispatchMode):
    """Counts how often values of tensors on the meta device are read. All of them are 0."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default) and args[0].is_meta:
            self.number += 1
            return 0
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize(("host", "encoding"), [("bert", "alibi"), *[("llama", k) for k in ("alibi", "t5", "rope", "cope")]])
@torch.no_grad()
def test_nothing_is_read_but_what_the_original_reads(host, encoding, masked, ids):
    """In a forward pass, and in a decoding step. With a mask, a forward pass also reads whether it has holes."""
    found = []
    for model in (stock(host), patched(host, encoding)):
        model, cache, steps = model.to("meta"), None, []
        for length, new in ((11, 11), (12, 1))[: 1 if host == "bert" else 2]:
            inputs = {"use_cache": True, CACHE: cache} if host != "bert" else {}
            if masked:
                inputs["attention_mask"] = torch.ones(2, length, dtype=torch.long, device="meta")
            if ids and new == 1:
                inputs["position_ids"] = torch.zeros(1, 1, dtype=torch.long, device="meta")
            with Reads() as reads:
                output = model(torch.zeros(2, new, dtype=torch.long, device="meta"), **inputs)
            cache = output.get("past_key_values") if host != "bert" else None
            steps.append(reads.number)
        found.append(steps)
    original, ours = found
    assert ours[0] <= original[0] + (masked and host != "bert") and ours[1:] <= original[1:], found


@pytest.mark.parametrize("encoding", ENCODINGS)
@torch.no_grad()
def test_devices_without_float64(monkeypatch, encoding):
    """Apple's GPUs have no float64. Here, the meta device has none."""

    class Doubles(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            assert not any(each.is_meta and each.dtype == torch.float64 for each in [result] if isinstance(each, torch.Tensor))
            return result

    monkeypatch.setattr(_compat, "WITHOUT_FLOAT64", ("meta",))
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # The meta device has none, either.
    host = next(host for host in ("bert", "llama", "vit") if suits(host, encoding))
    model = patched(host, encoding).to("meta")
    inputs = torch.zeros(2, 11, dtype=torch.long) if host != "vit" else torch.zeros(2, 3, 16, 16)
    with Doubles():
        assert first(model(inputs.to("meta"))).is_meta


def test_fixed_slopes_are_not_copied_to_the_device():
    """Copying a list of numbers to a GPU waits for it, and isn't possible while a CUDA graph is captured."""

    class Lists(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            assert function is not torch.tensor
            return function(*args, **(kwargs or {}))

    model = patched("bert", "alibi").to("meta")
    with Lists():
        model.posenc("distance_bias", torch.arange(3, device="meta"))
