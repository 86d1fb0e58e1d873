"""Decoders: caches, generation, packed sequences, cross-attention."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from conftest import CAUSAL, ENCODINGS, HOSTS, assert_close, first, pairs, patched, tokens
from oracles import in_pieces

every_pair = pytest.mark.parametrize(("host", "encoding"), pairs(hosts=CAUSAL))
every_encoding = pytest.mark.parametrize(("host", "encoding"), pairs(hosts=CAUSAL, encodings=ENCODINGS))


@every_pair
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_cached_decoding(host, encoding, side, static):
    """In chunks and token by token it gives the logits of one forward pass."""
    model = patched(host, encoding, HOSTS[host].head)
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :4] = 0
    full = model(ids, attention_mask=mask).logits
    cache = StaticCache(config=model.config, max_cache_len=16) if static else DynamicCache(config=model.config)
    real = mask.bool()
    assert_close(in_pieces(model, ids, (7, 8, 9), mask, cache)[real], full[real])


def test_a_decode_step_rotates_one_key(monkeypatch):
    model = patched("gpt2", "rope", "LMHeadModel", n_positions=1200)
    rotated = []
    turn = type(model.transformer.posenc)._turn

    def counted(self, states, cos, sin):
        if states is not None:
            rotated.append(states.shape[2])
        return turn(self, states, cos, sin)

    monkeypatch.setattr(type(model.transformer.posenc), "_turn", counted)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 1024), past_key_values=cache)
        rotated.clear()
        model(tokens(1, 1), past_key_values=cache)
    assert rotated == [1] * (2 * model.config.n_layer)  # one key and one query in each layer


@every_encoding
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_generate(host, encoding, implementation):
    """Greedy generation of a left-padded batch equals that of each row alone, and of forward passes without a cache."""
    model = patched(host, encoding, HOSTS[host].head)
    prompt, mask = tokens(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    settings = dict(max_new_tokens=6, do_sample=False, cache_implementation=implementation, eos_token_id=None)
    both = model.generate(prompt, attention_mask=mask, **settings)
    alone = model.generate(prompt[:1, 3:], attention_mask=mask[:1, 3:], **settings)
    assert torch.equal(both[0, 8:], alone[0, 5:])
    expected = prompt[1:]
    for _ in range(6):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(both[1:], expected)


@pytest.mark.slow
@every_encoding
def test_a_static_cache_compiles_as_one_graph(host, encoding):
    model = patched(host, encoding, HOSTS[host].head)
    ids = tokens(2, 10)
    with torch.no_grad():
        full = model(ids).logits
        torch._dynamo.reset()
        cache = StaticCache(config=model.config, max_cache_len=16)
        model(ids[:, :8], past_key_values=cache)
        step = torch.compile(model, fullgraph=True, backend="eager")
        for index in (8, 9):
            logits = step(ids[:, index : index + 1], past_key_values=cache).logits
            assert_close(logits[:, 0], full[:, index])


def test_a_static_cache_keeps_the_promise():
    """Its size is checked against max_length; reading how full it is would wait for a GPU."""
    model = patched("gpt2", "alibi", "LMHeadModel", max_length=12)
    with pytest.raises(ValueError, match="a static cache of 16 tokens is longer than max_length=12"):
        model(tokens(1, 5), past_key_values=StaticCache(config=model.config, max_cache_len=16))
    model(tokens(1, 5), past_key_values=StaticCache(config=model.config, max_cache_len=12))


@pytest.mark.parametrize("encoding", ["rope", "relative"])
def test_cross_attention_is_left_alone(encoding):
    """Of a decoder with cross-attention, cached or not, only the self-attention gets positions."""
    model = patched("gpt2", encoding, "LMHeadModel", add_cross_attention=True)
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    full = model(tokens(2, 9), encoder_hidden_states=states).logits
    turned = model(tokens(2, 9), encoder_hidden_states=states.flip(1)).logits
    assert_close(turned, full)
    start = model(tokens(2, 9)[:, :6], encoder_hidden_states=states, use_cache=True)
    rest = model(tokens(2, 9)[:, 6:], encoder_hidden_states=states, past_key_values=start.past_key_values, use_cache=True)
    assert_close(torch.cat([start.logits, rest.logits], 1), full)


@every_encoding
def test_packed_sequences(host, encoding):
    """Ids that start again from 0 within a row mean two texts, of which neither sees the other (as in stock models,
    without a cache)."""
    model, ids = patched(host, encoding), tokens(1, 12)
    packed = first(model(ids, position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]]), use_cache=False))
    apart = torch.cat([first(model(ids[:, :5])), first(model(ids[:, 5:]))], dim=1)
    assert_close(packed, apart)
