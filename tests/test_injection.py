"""`inject`: vectors that are added in every layer."""

import json

import pytest
import torch
from transformers import DynamicCache

import hf_posenc
from closeness import assert_apart, assert_close
from hf_posenc.encodings import PositionContext
from hf_posenc.encodings.context import current
from hf_posenc.modeling import hooks
from models import CACHE, HOSTS, LENGTH, TABLED, by_structure, first, randomize_encoding, stock, tokens
from oracles import (
    INJECT,
    MASKS,
    adding,
    checkpointed,
    counted,
    gradients,
    make,
    padding_of,
    sinusoids,
    without_positions,
)
from reloading import keep, reload

every_inject = pytest.mark.parametrize("inject", INJECT)


@every_inject
@pytest.mark.parametrize("mask", [MASKS["none"], MASKS["left"]], ids=["none", "left"])
@pytest.mark.parametrize("host", by_structure(TABLED))
@torch.no_grad()
def test_vectors_are_added_in_every_layer(host, inject, mask):
    arguments, real = padding_of(mask)
    model = hf_posenc.patch(stock(host), "sinusoidal", inject=inject)
    expected = adding(without_positions(host), host, inject, {"now": sinusoids(counted(mask), 32)})
    outputs, theirs = (each(tokens(), output_hidden_states=True, **arguments) for each in (model, expected))
    for ours, other in zip(outputs.hidden_states, theirs.hidden_states, strict=True):
        assert_close(ours[real], other[real])
    assert_apart(first(outputs)[real], first(without_positions(host)(tokens(), **arguments))[real])
    assert model.config.position_encoding["inject"] == inject and not hasattr(model.posenc, "weight")


@every_inject
@pytest.mark.parametrize("host", ["albert", "electra"])
def test_injected_vectors_have_the_width_of_the_layers(host, inject):
    """This also holds if the layers are wider than the original table."""
    assert hf_posenc.patch(stock(host), "learned").posenc.weight.shape == (LENGTH, 16)
    assert hf_posenc.patch(stock(host), "learned", inject=inject).posenc.weight.shape == (LENGTH, 32)
    with pytest.raises(ValueError, match=r"size 16, .* size 32 .*init='normal'"):
        hf_posenc.patch(stock(host), "learned", inject=inject, init="host")
    hf_posenc.patch(stock("bert"), "learned", inject=inject, init="host")


@every_inject
@pytest.mark.parametrize("host", by_structure(TABLED))
def test_injected_vectors_are_trained(host, inject):
    model = randomize_encoding(hf_posenc.patch(stock(host), "learned", inject=inject))
    weight = model.posenc.weight.detach()[:11].clone().requires_grad_()
    first(adding(without_positions(host), host, inject, {"now": weight})(tokens())).square().mean().backward()
    first(model(tokens())).square().mean().backward()
    assert_close(model.posenc.weight.grad[:11], weight.grad)
    assert weight.grad.any(1).all() and not model.posenc.weight.grad[11:].any()


@every_inject
@pytest.mark.parametrize(("host", "reentrant"), [("bert", True), ("gpt2", False), ("distilbert", True)])
def test_injection_under_gradient_checkpointing(host, inject, reentrant):
    model = randomize_encoding(hf_posenc.patch(stock(host, **HOSTS[host].no_dropout), "learned+relative", inject=inject))

    def loss(model):
        return first(model(tokens(), **({"use_cache": False} if HOSTS[host].causal else {}))).square().mean()

    expected = gradients(model, loss)
    model.train().set_attn_implementation("eager")
    assert_close(checkpointed(model, loss, reentrant), expected)
    assert any("posenc" in name for name in expected)


@every_inject
@torch.no_grad()
def test_injection_in_cached_decoding(inject):
    """New tokens get the vectors of their positions, also after a left-padded prompt."""
    model, vectors = hf_posenc.patch(stock("gpt2"), "sinusoidal", inject=inject), {}
    expected = adding(without_positions("gpt2"), "gpt2", inject, vectors)
    mask = torch.tensor(MASKS["left"])
    whole, caches, real = sinusoids(counted(MASKS["left"]), 32), (DynamicCache(), DynamicCache()), mask.bool()
    for start, stop in ((0, 6), (6, 7), (7, 11)):
        vectors["now"] = whole[:, start:stop]
        ours, theirs = (
            first(each(tokens()[:, start:stop], attention_mask=mask[:, :stop], **{CACHE: cache}))
            for each, cache in zip((model, expected), caches, strict=True)
        )
        assert_close(ours[real[:, start:stop]], theirs[real[:, start:stop]])


def test_injection_is_saved(tmp_path):
    """A new process loads the model, and unpatches it to the original model."""
    for host, inject in (("bert", "every_layer"), ("gpt2", "after_attention"), ("distilbert", "after_attention")):
        model = randomize_encoding(hf_posenc.patch(stock(host), "learned+alibi", inject=inject, learned__std=0.5))
        keep(tmp_path / host, model, stock(host), tokens())
        saved = json.loads((tmp_path / host / "config.json").read_text())["position_encoding"]
        assert saved["inject"] == inject and saved["learned"]["std"] == 0.5
    reload(tmp_path)


@pytest.mark.parametrize(
    ("encoding", "inject", "words"),
    [
        ("alibi", "every_layer", "inject='every_layer' .* but 'alibi' adds no vectors"),
        ("rope+shaw", "after_attention", r"inject='after_attention' .* but 'rope\+shaw' adds no vectors"),
        (
            "sinusoidal",
            "each_layer",
            r"inject='each_layer' \(did you mean 'every_layer'\?\) .*'input', 'every_layer'",
        ),
        ("sinusoidal", None, "inject=None .*'input'"),
        ("alibi", "output", "inject='output' .*'input'"),
    ],
)
def test_wrong_inject(encoding, inject, words):
    with pytest.raises(ValueError, match=words):
        hf_posenc.patch(stock("bert"), encoding, inject=inject)
    with pytest.raises(ValueError, match=words):
        hf_posenc.PosEncBertConfig(position_encoding={"type": encoding, "inject": inject})


def test_inject_in_the_dict():
    model = hf_posenc.patch(stock("bert"), {"type": "sinusoidal", "inject": "after_attention", "base": 50})
    other = hf_posenc.patch(stock("bert"), "sinusoidal", inject="after_attention", base=50.0)
    assert torch.equal(first(model(tokens())), first(other(tokens())))
    assert hf_posenc.inspect(model).locations == {"embed": ("encoder.layer.0.attention", "encoder.layer.1.attention")}
    every = hf_posenc.patch(stock("albert"), "sinusoidal", inject="every_layer")
    assert hf_posenc.inspect(every).locations == {"embed": ("encoder.albert_layer_groups.0.albert_layers.0",)}
    at_input = hf_posenc.patch(stock("bert"), "sinusoidal+t5")
    attentions = ("encoder.layer.0.attention.self", "encoder.layer.1.attention.self")
    assert hf_posenc.inspect(at_input).locations == {"embed": ("embeddings.position_embeddings",), "distance_bias": attentions}


@every_inject
@pytest.mark.parametrize("shape", [(2, 3, 5, 16), (6, 5, 16)], ids=["layer", "attention"])
def test_all_channels_have_the_same_positions(inject, shape):
    """In a time series, layers have the shape `[B, channels, L, D]`. Attentions take each channel as a row."""
    encoding = make("sinusoidal")
    module, hidden, unknown = torch.nn.Identity(), torch.randn(shape), torch.empty(0, 0, dtype=torch.long)
    add = hooks.before if inject == "every_layer" else hooks.after
    add(module, tuple(encoding.named_parts()), token_axis=-2)
    with current(PositionContext(encoding, unknown, 0, unknown)):
        assert_close(module(hidden), hidden + sinusoids([range(5)], 16))
