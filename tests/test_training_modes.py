"""Gradients, outputs in training, gradient checkpointing."""

import pytest
import torch

from conftest import HOSTS, assert_close, backends, pairs, patched, stock, tokens
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
