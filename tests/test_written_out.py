"""Hosts that compute their attention beside Transformers' interface."""

import copy

import pytest
import torch
from transformers import AutoModel

import hf_posenc
from conftest import HOSTS, WRITTEN_OUT, as_itself, assert_apart, assert_close, first, stock, tokens
from oracles import every_mask, gradients, ids_of, padding_of

every_host = pytest.mark.parametrize("host", WRITTEN_OUT)


@every_host
@every_mask
@torch.no_grad()
def test_written_out_attention_is_the_hosts(host, mask):
    """Attentions and hidden states are those of the stock host, padded or not."""
    arguments, real = padding_of(mask)
    arguments |= {"output_attentions": True, "output_hidden_states": True}
    model = stock(host)
    new = as_itself(model, host)
    theirs, ours = model(tokens(), position_ids=ids_of(host, mask), **arguments), new(tokens(), **arguments)
    for one, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        assert_close(one[real], other[real])
    for one, other in zip(ours.attentions, theirs.attentions, strict=True):
        assert_close(one.transpose(1, 2)[real], other.transpose(1, 2)[real])


@every_host
def test_written_out_attention_drops_out_and_learns_as_the_hosts(host):
    """The same random numbers drop the same attention weights."""
    model = stock(host, attention_probs_dropout_prob=0.4, hidden_dropout_prob=0.2).train()
    new = as_itself(model, host)
    own = {*HOSTS[host].tables, *HOSTS[host].biases}

    def outputs(each, seed=3):
        torch.manual_seed(seed)
        return first(each(tokens()))

    def shared_gradients(each):
        found = gradients(each, lambda each: outputs(each).square().mean())
        return {name: gradient for name, gradient in found.items() if "posenc" not in name and name not in own}

    assert_close(outputs(new), outputs(model))
    assert_apart(outputs(new, seed=4), outputs(new))
    assert_close(shared_gradients(new), shared_gradients(model), rtol=1e-3)
    assert torch.equal(first(new.eval()(tokens())), first(new(tokens())))


@pytest.mark.parametrize("encoding", ["none", "alibi"])
def test_mpnets_own_biases_are_gone_and_kept(encoding, tmp_path):
    model = stock("mpnet")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.encoder.relative_attention_bias.weight.add_(torch.arange(32)[:, None] % 3)
    assert_apart(first(other(tokens())), first(model(tokens())))
    new = hf_posenc.patch(other, encoding)
    assert torch.equal(first(new(tokens())), first(hf_posenc.patch(model, encoding)(tokens())))
    key = "posenc.host.encoder.relative_attention_bias.weight"
    assert torch.equal(new.state_dict()[key], other.encoder.relative_attention_bias.weight)
    assert key in dict(new.named_buffers()) and not any("relative_attention_bias" in name for name, _ in new.named_parameters())
    new.save_pretrained(tmp_path)
    again = hf_posenc.unpatch(AutoModel.from_pretrained(tmp_path))
    assert torch.equal(again.encoder.relative_attention_bias.weight, other.encoder.relative_attention_bias.weight)
    assert torch.equal(first(again(tokens())), first(other(tokens())))
    assert not any("relative_attention_bias" in name for name in hf_posenc.patch(model, encoding, keep_host=False).state_dict())
    gone = hf_posenc.patch(model, encoding, keep_host=False)
    assert torch.equal(first(gone(tokens())), first(hf_posenc.patch(model, encoding)(tokens())))


def test_a_written_out_attention_is_an_encoders():
    for host in ("megatron-bert", "rembert"):
        with pytest.raises(ValueError, match="served as an encoder only: load it with is_decoder=False"):
            hf_posenc.patch(stock(host, is_decoder=True), "alibi")
