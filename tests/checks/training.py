"""Gradients, and methods to compute them with less memory."""

import copy
import functools
import re
import tempfile

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

import models
from checks.conversion import layers
from checks.registry import TEXT, Subject, check
from closeness import assert_close
from cover import six
from models import tokens
from oracles import gradients


def loss(it, model):
    torch.manual_seed(0)
    return it.plain(model).square().mean()


IDLE = re.compile(r"bias_v$|\.experts\.")
"""Parameters that can lack a gradient in patched models: query biases for the original positions, which are zeros, and experts
that a router sends no tokens to."""


@check()
def gradients_reach_every_parameter(it):
    reached = reached_by(it, it.twin())
    assert {name for name, _ in it.model.named_parameters() if "posenc." in name} <= reached
    theirs = reached_in_the_original(it.name) & dict(it.model.named_parameters()).keys()
    assert {name for name in theirs if not IDLE.search(name)} <= reached


def reached_by(it, model):
    """The names of the parameters that have a gradient other than zero."""
    return {name for name, each in gradients(model, functools.partial(loss, it)).items() if each.any()}


@functools.cache
def reached_in_the_original(name):
    it = Subject(name, "none")
    return reached_by(it, copy.deepcopy(it.stock))


@functools.lru_cache(maxsize=1)
def without_dropout(it):
    """The patched model in training mode. It is shared and must not be changed."""
    return it.fresh(**it.host.no_dropout).train()


@check()
def gradient_checkpointing_changes_nothing(it):
    if not it.model.supports_gradient_checkpointing:
        pytest.skip("without gradient checkpointing")
    model = copy.deepcopy(without_dropout(it))
    expected = gradients(model, functools.partial(loss, it))
    for reentrant in (False, True):
        models.checkpointing(model, use_reentrant=reentrant)
        if reentrant and it.kind in TEXT:
            model.enable_input_require_grads()
        assert_close(gradients(model, functools.partial(loss, it)), expected)


@check("encoder", "decoder", on=six)
def layers_in_checkpoint_wrappers(it):
    """With FSDP's wrappers, the backward pass recomputes a layer from its arguments only, outside the model's forward pass."""
    ids, mask = tokens(), torch.ones(2, 11, dtype=torch.long)
    mask[0, 7:] = 0

    def loss(model):
        # A second forward pass precedes the backward pass. The layers must not use its positions.
        one, other = it.plain(model, ids, mask), it.plain(model, ids[:1, :5])
        return one[mask.bool()].square().mean() + other.square().mean()

    expected = gradients(copy.deepcopy(without_dropout(it)), loss)
    for implementation in wrappers.CheckpointImpl:
        model = copy.deepcopy(without_dropout(it))
        kinds = {type(layer) for layer in layers(model)}
        wrap = functools.partial(wrappers.checkpoint_wrapper, checkpoint_impl=implementation)
        wrappers.apply_activation_checkpointing(model, wrap, check_fn=lambda module, kinds=kinds: type(module) in kinds)
        if it.host.written_out or it.name == "stablelm":  # doesn't pass keyword arguments to its attentions
            with pytest.raises(RuntimeError, match="was called without positions"):
                gradients(model, loss)
            continue
        found = gradients(model, loss)
        assert_close({name.replace("_checkpoint_wrapped_module.", ""): each for name, each in found.items()}, expected)


@check(on=six)
@torch.no_grad()
def lora_is_saved_and_loaded(it):
    linear = {name.rpartition(".")[2] for name, each in it.model.named_modules() if type(each) is torch.nn.Linear}
    adapted = [name for name in ("q_proj", "query", "q_lin", "q", "c_attn", "v_proj", "value") if name in linear]
    if not adapted:
        pytest.skip("without linear layers of a usual name")
    with tempfile.TemporaryDirectory() as folder:
        model = get_peft_model(it.twin(), LoraConfig(r=2, lora_alpha=6, target_modules=adapted))
        for number, (name, value) in enumerate(model.named_parameters()):
            if "lora_" in name:
                value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(number)) / 5)
        model.eval().save_pretrained(folder)
        again = PeftModel.from_pretrained(it.twin(), folder).eval()
        found, merged = it.plain(again), model.merge_and_unload()
        assert_close(found, it.plain(merged))
        assert not torch.equal(found, it.plain(it.model))
