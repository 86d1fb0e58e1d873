"""Gradients, outputs in training, gradient checkpointing."""

import functools

import pytest
import torch
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

from closeness import assert_close
from models import HOSTS, backends, pairs, patched, stock, tokens
from oracles import checkpointed, gradients

pairs_once = pytest.mark.parametrize(("host", "encoding"), pairs(once=True))


@pairs_once
def test_outputs_and_gradients(host, encoding):
    model = patched(host, encoding, HOSTS[host].head)
    ids, reference = tokens(), stock(host, HOSTS[host].head)
    for implementation in backends(model):
        for each in (model, reference):
            each.set_attn_implementation(implementation)
        ours, theirs = (
            m(ids, output_hidden_states=True, output_attentions=implementation == "eager") for m in (model, reference)
        )
        assert [h.shape for h in ours.hidden_states] == [h.shape for h in theirs.hidden_states]
        if implementation == "eager":
            assert [a.shape for a in ours.attentions] == [a.shape for a in theirs.attentions]
            assert_close(ours.attentions[0].sum(-1), torch.ones(2, 4, 11))
    model.train()
    model(ids, labels=ids).loss.backward()
    silent = {name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()}
    reference.train()(ids, labels=ids).loss.backward()
    theirs = {name for name, p in reference.named_parameters() if p.grad is None or not p.grad.any()}
    assert silent <= theirs


@pairs_once
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(host, encoding, reentrant):
    model = patched(host, encoding, HOSTS[host].head, **HOSTS[host].no_dropout).train()
    if not model.supports_gradient_checkpointing:
        pytest.skip(f"{host} has no gradient checkpointing")
    ids = tokens()

    def loss(model):
        return model(ids, labels=ids, **({"use_cache": False} if HOSTS[host].causal else {})).loss

    expected = gradients(model, loss)
    assert_close(checkpointed(model, loss, reentrant), expected)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("encoding", ["alibi", "rope"])
@pytest.mark.parametrize("implementation", wrappers.CheckpointImpl)
def test_layers_in_checkpoint_wrappers(host, encoding, implementation):
    """As FSDP wraps them: the backward pass runs a layer again with its arguments only, outside of the model's forward pass."""
    model = patched(host, encoding, HOSTS[host].head, **HOSTS[host].no_dropout).train()
    ids, mask = tokens(), torch.ones(2, 11, dtype=torch.long)
    mask[0, 7:] = 0

    def loss(model):
        # Another forward pass before the backward pass: the layers must not take its positions.
        first, second = (
            model(each, attention_mask=seen, use_cache=False).logits for each, seen in ((ids, mask), (ids[:1, :5], None))
        )
        return first[mask.bool()].square().mean() + second.square().mean()

    expected = gradients(model, loss)
    hands_on = not HOSTS[host].written_out  # the keyword arguments of the stack to its attentions
    layers = {type(layer) for layer in model.base_model.get_submodule(HOSTS[host].layers)}
    wrap = functools.partial(wrappers.checkpoint_wrapper, checkpoint_impl=implementation)
    wrappers.apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: type(module) in layers)
    if not hands_on:
        with pytest.raises(RuntimeError, match="SelfAttention was called without positions.*activation_checkpointing_enable"):
            gradients(model, loss)
        return
    found = {name.replace("_checkpoint_wrapped_module.", ""): gradient for name, gradient in gradients(model, loss).items()}
    assert_close(found, expected)
