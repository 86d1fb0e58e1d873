"""Encodings with parameters in each layer: Shaw's vectors."""

import pytest
import torch
from transformers import AutoModel

import hf_posenc
from conftest import LENGTH, assert_close, patched, randomize_encoding, stock, tokens
from oracles import alibi, future, gpt2_query_key, heads


def as_v4_did(query, key, table, terms, scaling):
    """Scores of Transformers v4's relative_key(_query), `[B, H, L, L]`. Its table is indexed by query - key, ours by
    key - query."""
    table = table.flip(0)
    length, rows = query.shape[2], (len(table) + 1) // 2
    index = torch.arange(length)[:, None] - torch.arange(length)[None, :] + rows - 1
    scores = query @ key.mT + torch.einsum("bhld,lrd->bhlr", query, table[index])
    if terms == "relative_key_query":
        scores = scores + torch.einsum("bhrd,lrd->bhlr", key, table[index])
    return scores * scaling


@pytest.mark.parametrize("terms", ["relative_key", "relative_key_query"])
@torch.no_grad()
def test_shaw_attends_as_v4_did(terms):
    model = randomize_encoding(hf_posenc.patch(stock("bert"), terms, max_distance=LENGTH - 1))
    model.set_attn_implementation("eager")
    output = model(tokens(), output_attentions=True, output_hidden_states=True)
    for layer, hidden, actual in zip(model.encoder.layer, output.hidden_states, output.attentions, strict=False):
        inner = layer.attention.self
        query, key = (heads(project(hidden)) for project in (inner.query, inner.key))
        scores = as_v4_did(query, key, inner.posenc.weight, terms, 8**-0.5)
        assert_close(actual, scores.softmax(-1))


@pytest.mark.parametrize("beside", ["alibi", "rope"])
@torch.no_grad()
def test_shaw_beside_what_the_layers_share(beside):
    """In every layer the stack's bias is added, and the stack's rotation applied before Shaw's products."""
    model = randomize_encoding(hf_posenc.patch(stock("bert"), f"{beside}+relative_key", shaw__max_distance=LENGTH - 1))
    model.set_attn_implementation("eager")
    output = model(tokens(), output_attentions=True, output_hidden_states=True)
    angles = torch.arange(11)[:, None] * torch.tensor([10000.0 ** (-i / 4) for i in range(4)])
    turn = torch.polar(torch.ones_like(angles), angles)
    for layer, hidden, actual in zip(model.encoder.layer, output.hidden_states, output.attentions, strict=False):
        inner = layer.attention.self
        query, key = (heads(project(hidden)) for project in (inner.query, inner.key))
        if beside == "rope":
            query, key = (torch.complex(*states.chunk(2, dim=-1)) * turn for states in (query, key))
            query, key = (torch.cat([states.real, states.imag], dim=-1) for states in (query, key))
        scores = as_v4_did(query, key, inner.posenc.shaw.weight, "relative_key", 8**-0.5)
        if beside == "alibi":
            scores = scores + alibi(11)
        assert_close(actual, scores.softmax(-1))


def test_shaw_computes_its_indices_once_in_a_forward(monkeypatch):
    """Layers of the same width share them."""
    model, calls = patched("bert", "shaw"), []
    kind = type(model.encoder.layer[0].attention.self.posenc)
    monkeypatch.setattr(kind, "_index", lambda self, *args, original=kind._index: calls.append(1) or original(self, *args))
    model(tokens())
    model(tokens())
    assert calls == [1, 1]


@pytest.mark.parametrize("terms", ["relative_key", "relative_key_query"])
@torch.no_grad()
def test_shaw_is_scaled_as_its_layer_scales(terms):
    model = hf_posenc.patch(stock("gpt2", scale_attn_by_inverse_layer_idx=True), terms, max_distance=LENGTH - 1)
    randomize_encoding(model).set_attn_implementation("eager")
    output = model(tokens(), output_attentions=True, output_hidden_states=True)
    for index, block in enumerate(model.h):
        query, key = gpt2_query_key(block, output.hidden_states[index])
        scores = as_v4_did(query, key, block.attn.posenc.weight, terms, 8**-0.5 / (index + 1))
        expected = scores.masked_fill(future(11), -torch.inf).softmax(-1)
        assert_close(output.attentions[index], expected)


@pytest.mark.parametrize(
    ("host", "paths"),
    [
        ("bert", ["encoder.layer.0.attention.self.", "encoder.layer.1.attention.self."]),
        ("gpt2", ["h.0.attn.", "h.1.attn."]),
        ("mpnet", ["encoder.layer.0.attention.attn.", "encoder.layer.1.attention.attn."]),
        # One layer, used twice.
        ("albert", ["encoder.albert_layer_groups.0.albert_layers.0.attention."]),
    ],
)
def test_each_layer_owns_its_vectors(host, paths):
    for kind, weight in (("shaw", "weight"), ("alibi+shaw", "shaw.weight")):
        model = hf_posenc.patch(stock(host), kind)
        again = AutoModel.from_config(model.config)
        for each in (model, again):
            own = {name: p for name, p in each.named_parameters() if "posenc" in name}
            assert list(own) == [f"{path}posenc.{weight}" for path in paths]
            weights = list(own.values())
            assert all(p.std().item() == pytest.approx(0.02, rel=0.1) for p in weights)
            assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])
        assert not any(name.startswith("posenc.") and "host" not in name for name in model.state_dict())
