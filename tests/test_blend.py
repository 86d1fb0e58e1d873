"""`blend`: from the positions of the host to those of the encoding."""

import pytest
import torch

import hf_posenc
from conftest import WRITTEN_OUT, assert_apart, assert_close, first, patched, stock, tokens
from oracles import INJECT, MASKS, adding, alibi, counted, every_mask, ids_of, padding_of, sinusoids, without_positions


@pytest.mark.parametrize("encoding", ["alibi", "sinusoidal", "rope"])
def test_blend_fades_from_the_hosts_positions(encoding, tmp_path):
    model = stock("bert")
    new = hf_posenc.patch(model, encoding)
    full = first(new(tokens()))
    new.posenc.blend = 0.0
    assert_close(first(new(tokens())), first(model(tokens())))
    with pytest.raises(ValueError, match=r"blend 0\.0"):
        new.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    new.posenc.blend = 0.5
    assert_apart(first(new(tokens())), full)
    new.posenc.blend = 1.0
    assert torch.equal(first(new(tokens())), full)


@pytest.mark.parametrize("inject", INJECT)
@pytest.mark.parametrize("host", ["bert", "mpnet"])
def test_blend_of_injected_vectors(host, inject):
    """At blend 0.5, half of the vectors in every layer and half of the host's own positions in their place."""
    model = hf_posenc.patch(stock(host), "sinusoidal", inject=inject)
    model.posenc.blend = 0.5
    expected = adding(without_positions(host, part=0.5), host, inject, {"now": 0.5 * sinusoids(counted(None), 32)})
    assert_close(first(model(tokens())), first(expected(tokens())))


@pytest.mark.parametrize("host", ["bert", "gpt2", "albert", "mpnet"])
def test_blend_of_what_layers_own(host):
    """Each instance has its own blend; with all at 0 the model computes what the stock host does."""
    model, expected = patched(host, "sinusoidal+shaw"), stock(host)
    for module in model.modules():
        if isinstance(module, hf_posenc.PositionEncoding):
            module.blend = 0.0
    assert_close(first(model(tokens())), first(expected(tokens())))
    next(m for m in model.modules() if getattr(m, "type", "") == "shaw").blend = 1.0
    next(
        m for name, m in model.named_modules() if name.endswith(("self.posenc", "attn.posenc", "attention.posenc"))
    ).blend = 1.0
    assert_apart(first(model(tokens())), first(expected(tokens())))


class Within2(hf_posenc.PositionEncoding, type="test-within-2"):
    """Hides all but the nearest two tokens on each side, by a bias of -inf, which can't be multiplied by a part of 1."""

    def distance_bias(self, distance):
        return torch.where(distance.abs() > 2, -torch.inf, 0.0)[None]


@pytest.mark.parametrize("host", ["bert", "mpnet"])
def test_no_part_of_minus_infinity(host):
    model = hf_posenc.patch(stock(host), "test-within-2")
    model.posenc.blend = 0.0
    assert_close(first(model(tokens())), first(stock(host)(tokens())))


@pytest.mark.parametrize("host", WRITTEN_OUT)
@pytest.mark.parametrize("encoding", ["alibi", "sinusoidal", "rope", "sinusoidal+alibi", "none"])
@every_mask
@torch.no_grad()
def test_written_out_hosts_fade(host, encoding, mask):
    model = stock(host)
    arguments, real = padding_of(mask)
    new = hf_posenc.patch(model, encoding)
    full = first(new(tokens(), **arguments))
    new.posenc.blend = 0.0
    expected = first(model(tokens(), position_ids=ids_of(host, mask), **arguments))
    assert_close(first(new(tokens(), **arguments))[real], expected[real])
    new.posenc.blend = 1.0
    assert torch.equal(first(new(tokens(), **arguments)), full)


@torch.no_grad()
def test_mpnet_half_way():
    """At blend 0.5: half of its table, half of its relative biases, half of ALiBi."""
    new, expected = hf_posenc.patch(stock("mpnet"), "alibi"), without_positions("mpnet", part=0.5)
    new.posenc.blend = 0.5
    own = expected.encoder.compute_position_bias
    expected.encoder.compute_position_bias = lambda hidden: own(hidden) + 0.5 * alibi(11)
    for mask in MASKS.values():
        arguments, real = padding_of(mask)
        theirs = first(expected(tokens(), position_ids=ids_of("mpnet", mask), **arguments))
        assert_close(first(new(tokens(), **arguments))[real], theirs[real])
