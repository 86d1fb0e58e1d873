"""Encodings defined outside the library."""

from typing import Annotated

import pytest
import torch
from transformers import AutoModel

import hf_posenc
from conftest import HOSTS, assert_close, first, randomize_encoding, run_python, scale, stock, tokens
from hf_posenc.encodings import Above
from oracles import future, gpt2_query_key, in_pieces


class Window(hf_posenc.PositionEncoding, type="test-window"):
    """Hides tokens further than `width` away."""

    width: Annotated[int, Above(0)] = 2

    def distance_bias(self, distance):
        return torch.where(distance.abs() > self.width, -torch.inf, 0.0)[None]


class Recency(hf_posenc.PositionEncoding, type="test-recency"):
    """A bias by content and absolute position, which grows with the key's position."""

    def score_bias(self, query, key, context):
        keys = context.key_positions(key.shape[2]).to(query.dtype)
        return (query @ key.transpose(-1, -2)).tanh() * keys[:, None, None, :]


class Stretch(hf_posenc.PositionEncoding, type="test-stretch"):
    """A change of queries and keys with parameters in each layer."""

    per_layer = True

    def __init__(self, geometry, **options):
        super().__init__(geometry, **options)
        self.weight = torch.nn.Parameter(torch.empty(geometry.head_dim))
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.normal_(self.weight)

    def rotate(self, query, key, context):
        factor = 1 + context.positions[:, None, :, None] * self.weight
        return tuple(None if states is None else states * factor for states in (query, key))


class Liking(hf_posenc.PositionEncoding, type="test-liking"):
    """A bias by content and distance."""

    def score_bias(self, query, key, context):
        return (query @ key.mT).tanh() * context.distances(key.shape[2])[:, None]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_own_distance_bias(host, implementation):
    model = hf_posenc.patch(stock(host, **HOSTS[host].one_layer), "test-window", width=3)
    model.set_attn_implementation(implementation)
    ids = tokens(1, 20)
    before = first(model(ids))
    ids[0, 15] = (ids[0, 15] + 1) % 50 + 3
    changed = (first(model(ids)) - before).abs().amax(-1)[0] > 1e-5 * scale(before)
    expected = torch.zeros(20, dtype=torch.bool)
    expected[15 if HOSTS[host].causal else 12 : 19] = True
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_own_score_bias(side):
    model = hf_posenc.patch(stock("gpt2", "LMHeadModel"), "test-recency")
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    real = slice(3, 9) if side == "left" else slice(0, 6)
    mask[0] = 0
    mask[0, real] = 1
    batch = model(ids, attention_mask=mask).logits
    assert_close(batch[:1, real], model(ids[:1, real]).logits)
    assert_close(in_pieces(model, ids, (5, 6), mask)[mask.bool()], batch[mask.bool()])


def test_loading_an_own_encoding_needs_its_class(tmp_path):
    model = hf_posenc.patch(stock("bert"), "test-window", width=4)
    with pytest.warns(UserWarning, match="saved without its code"):  # this file imports its neighbours by their full names
        model.save_pretrained(tmp_path)
    assert torch.equal(first(AutoModel.from_pretrained(tmp_path)(tokens())), first(model(tokens())))
    code = (
        "import sys, hf_posenc\nfrom transformers import AutoModel\n"
        "try: AutoModel.from_pretrained(sys.argv[1])\n"
        "except ValueError as error: print(error)"
    )
    message = run_python(code, tmp_path)
    assert "test-window" in message and "import the module that defines its class" in message


@pytest.mark.parametrize("kind", ["test-stretch", "test-liking"])
@torch.no_grad()
def test_own_encodings_by_layer(kind):
    model = randomize_encoding(hf_posenc.patch(stock("gpt2"), kind))
    model.set_attn_implementation("eager")
    output = model(tokens(), output_attentions=True, output_hidden_states=True)
    positions = torch.arange(11)
    for block, hidden, actual in zip(model.h, output.hidden_states, output.attentions, strict=False):
        query, key = gpt2_query_key(block, hidden)
        if kind == "test-stretch":
            query, key = (states * (1 + positions[:, None] * block.attn.posenc.weight) for states in (query, key))
        scores = query @ key.mT * 8**-0.5
        if kind == "test-liking":
            scores = scores + (query @ key.mT).tanh() * (positions[None, :] - positions[:, None])
        assert_close(actual, scores.masked_fill(future(11), -torch.inf).softmax(-1))
    # The cache stores keys after `rotate`.
    assert_close(in_pieces(model, tokens(), (6, 7)), first(output))
