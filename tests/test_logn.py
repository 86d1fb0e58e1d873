"""`logn`, compared with float64 loops and with original models whose query projections are scaled by hooks. Also the trained
length that it uses.

Shapes: B batch, L tokens, H heads, E head_dim.
"""

import functools
import math

import pytest
import torch
from transformers import AutoModel

import hf_posenc
import oracles
from closeness import assert_apart, assert_close, assert_equal
from models import HOSTS, LENGTH, backends, first, randomize_encoding, stock, tokens
from oracles import MASKS, context_of, padding_of, random

SHORT = 5
"""A trained length below that of most inputs here."""
make = functools.partial(oracles.make, "logn", heads=3, trained=SHORT)


def factor(length, trained=SHORT, part=1.0):
    """The factor of a query for this length."""
    return 1.0 if length <= trained else 1.0 + part * (math.log(length) / math.log(trained) - 1.0)


def lengths_of(positions, is_causal):
    """`[B][L]`: the length for each query."""
    return [[position + 1 if is_causal else max(row) + 1 for position in row] for row in positions]


# The encoding by itself.

POSITIONS = {
    "from 0": [[0, 1, 2, 3, 4, 5, 6, 70]],
    "per row": [[0, 1, 2, 3], [40, 41, 42, 43]],
    "left padding": [[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]],
    "right padding": [[0, 1, 2, 3, 3, 3], [0, 1, 2, 3, 4, 5]],
    "jumping": [[9, 2, 300, 4], [1, 7, 7, 2**24]],
    "up to the trained length": [[0, 1, 2, 3, 4]],
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("given", [None, 3, 700])
def test_formula(positions, is_causal, given):
    """Learned factors start as the fixed scale, and change nothing up to the trained length. Models that cache their keys first
    pass no query yet.
    """
    fixed, learned = (make(is_causal=is_causal, scale=scale, trained_length=given) for scale in ("fixed", "learned"))
    query, key, upstream = (
        random(2, 3, len(positions[0]), 8),
        random(2, 1, 4, 8, seed=1),
        random(2, 3, len(positions[0]), 8, seed=2),
    )
    assert learned.factor.tolist() == [1.0, 1.0, 1.0] and not list(fixed.parameters())
    for encoding, parts in ((fixed, [1.0] * 3), (learned, [1.0] * 3), (learned, [0.5, -2.0, 3.0])):
        with torch.no_grad():
            learned.factor.copy_(torch.tensor(parts))
        expected, gradient = query.clone(), [0.0, 0.0, 0.0]
        for b, row in enumerate((lengths_of(positions, is_causal) * 2)[:2]):
            for h, part in enumerate(parts):
                for i, length in enumerate(row):
                    expected[b, h, i] *= factor(length, given or SHORT, part)
                    gradient[h] += (upstream[b, h, i] @ query[b, h, i]).item() * (factor(length, given or SHORT) - 1)
        actual, same = encoding.rotate(query, key, context_of(encoding, positions))
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
        assert same is key and encoding.rotate(None, key, context_of(encoding, positions)) == (None, key)
    (found,) = torch.autograd.grad((actual * upstream).sum(), learned.factor)
    torch.testing.assert_close(found.tolist(), gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_factor_is_rounded_last(dtype):
    encoding = make(is_causal=True, trained=512)
    positions = [[511, 512, 600, 2**24]]
    expected = torch.tensor([factor(p + 1, 512) for p in positions[0]], dtype=torch.float64).to(dtype)
    actual, _ = encoding.rotate(torch.ones(1, 3, 4, 8, dtype=dtype), None, context_of(encoding, positions))
    assert actual.dtype == dtype and torch.equal(actual[0, 1, :, 0], expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_values_are_read(is_causal):
    """On a GPU, reading values would wait for it. The meta device has no values, and neither have empty inputs."""
    encoding = make(is_causal=is_causal)
    for device, length in (("meta", 9), ("cpu", 0)):
        positions, query = torch.zeros(2, length, dtype=torch.long, device=device), torch.zeros(2, 3, length, 8, device=device)
        scaled, _ = encoding.to(device).rotate(query, None, context_of(encoding, positions, start=positions.new_zeros(1, 1)))
        assert scaled.shape == query.shape and scaled.device.type == device


@pytest.mark.parametrize("length", [None, 0, 1])
def test_a_host_that_tells_no_length(length):
    with pytest.raises(ValueError, match=r"logn\.trained_length=None: .*trained_length=512.*logn__trained_length"):
        make(trained=length)
    assert make(trained=length, trained_length=9).trained_length == 9


# In models.

PROJECTIONS = {"attention.self.query": 4, "attention.attn.q": 4, "self_attn.q_proj": 4, "attn.c_attn": 12, "attention.q_lin": 4}
"""Path of the query projection in a layer -> its output size divided by head_dim: 4 heads, or 12 with keys and values."""


def multiplied(model, host, factors):
    """A model with hooks on its projections that multiply queries by `factors`, `[B or 1, L, H]`."""

    def times(module, args, output):
        heads = output.unflatten(-1, (-1, 8))
        return torch.cat([heads[:, :, :4] * factors[..., None], heads[:, :, 4:]], dim=2).flatten(-2)

    for layer in model.get_submodule(HOSTS[host].layers):
        path = next(path for path in PROJECTIONS if path in dict(layer.named_modules()))
        layer.get_submodule(path).register_forward_hook(times)
    return model


def factors_of(mask, host, parts):
    """`[B, L, H]`, counted from the visible tokens of a mask `[B][L]`."""
    rows = [[sum(row[: i + 1]) if HOSTS[host].causal else sum(row) for i in range(len(row))] for row in mask]
    return torch.tensor([[[factor(length, part=part) for part in parts] for length in row] for row in rows])


def scaled(host, encoding="none", scale="learned"):
    """A patched model without `logn`, one with it and the same other parameters, and the factors of its heads."""
    plain = randomize_encoding(hf_posenc.patch(stock(host), f"{encoding}+none"))
    model = hf_posenc.patch(stock(host), f"{encoding}+logn", logn__trained_length=SHORT, logn__scale=scale)
    model = randomize_encoding(model)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            model.get_parameter(name).copy_(parameter)
    return plain, model, model.posenc.logn.factor.tolist() if scale == "learned" else [1.0] * 4


@pytest.mark.parametrize(
    ("host", "encoding", "scale"),
    [
        ("bert", "relative", "learned"),
        ("bert", "shaw", "fixed"),
        ("distilbert", "rope", "fixed"),
        ("mpnet", "rope", "learned"),
        ("gpt2", "sinusoidal", "learned"),
        ("llama", "t5", "fixed"),
    ],
)
@torch.no_grad()
def test_queries_are_multiplied(host, encoding, scale):
    """The scale depends on the number of real tokens, wherever the padding is. In decoders, it depends on each query's
    position.
    """
    for mask in MASKS.values():
        plain, model, parts = scaled(host, encoding, scale)
        arguments, real = padding_of(mask)
        before = first(plain(tokens(), **arguments))[real]
        multiplied(plain, host, factors_of(real.long().tolist(), host, parts))
        for implementation in backends(model):
            model.set_attn_implementation(implementation)
            actual = first(model(tokens(), **arguments))[real]
            assert_close(actual, first(plain(tokens(), **arguments))[real])
            assert_apart(actual, before)


@torch.no_grad()
def test_a_stock_llama_with_scaled_queries():
    """The model is patched with its own rotation. The expected output uses no code of hf-posenc."""
    model = stock("llama")
    theta = model.config.rope_parameters["rope_theta"]
    new = hf_posenc.patch(model, "rope+logn", rope__theta=theta, logn__trained_length=SHORT)
    expected = first(multiplied(stock("llama"), "llama", factors_of([[1] * 11], "llama", [1.0] * 4))(tokens()))
    assert_close(first(new(tokens())), expected)
    assert_apart(expected, first(model(tokens())))


@torch.no_grad()
def test_only_in_its_layers():
    model = hf_posenc.patch(stock("bert"), "relative+logn", logn__trained_length=SHORT, logn__layers=[1])
    plain = hf_posenc.patch(stock("bert"), "relative")
    plain.posenc.weight.copy_(model.posenc.relative.weight)
    factors = factors_of([[1] * 11], "bert", [1.0] * 4)
    plain.encoder.layer[1].attention.self.query.register_forward_hook(
        lambda module, args, output: (output.unflatten(-1, (4, 8)) * factors[..., None]).flatten(-2)
    )
    assert_close(first(model(tokens())), first(plain(tokens())))


# The trained length.


def trained_length(model):
    return next(module for module in model.modules() if hasattr(module, "posenc")).posenc.geometry.trained_length


@pytest.mark.parametrize("host", ["roberta", "gpt2"])
@torch.no_grad()
def test_the_trained_length_is_the_stock_hosts(host, tmp_path):
    """It is that of the original model for any `max_length`, also after saving and loading. RoBERTa's table has
    two more rows.
    """
    model, ids = stock(host), tokens(1, 60)
    expected, other = (
        first(hf_posenc.patch(model, "rope+logn", logn__trained_length=length)(ids)) for length in (LENGTH, LENGTH + 2)
    )
    assert not torch.equal(expected, other)
    longer = hf_posenc.patch(model, "rope+logn", max_length=70, keep_original=False)
    longer.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    further = hf_posenc.extend(loaded, 200)
    further.save_pretrained(tmp_path / "further")
    kept = hf_posenc.patch(model, "rope+logn", max_length=70)
    for each in (
        hf_posenc.patch(model, "rope+logn"),
        loaded,
        AutoModel.from_pretrained(tmp_path / "further"),
        hf_posenc.extend(longer, None),
        hf_posenc.patch(hf_posenc.unpatch(hf_posenc.extend(kept, 90)), "rope+logn", max_length=80),
    ):
        assert trained_length(each) == LENGTH
        assert each.config.position_encoding["logn"]["trained_length"] is None
        assert_equal(first(each(ids)), expected)


@torch.no_grad()
def test_the_trained_length_of_a_model_from_scratch(tmp_path):
    """It is the length in the config. `extend` changes this length, so it saves the trained length."""
    sizes = {**HOSTS["bert"].sizes, "vocab_size": 61}
    config = hf_posenc.PosEncBertConfig(**sizes, position_encoding={"type": "rope+logn", "max_length": 40})
    model, ids = AutoModel.from_config(config).eval(), tokens(1, 40)
    assert trained_length(model) == LENGTH
    longer = hf_posenc.extend(model, 90)
    assert longer.config.max_position_embeddings == 90
    assert longer.config.position_encoding["logn"] == {"trained_length": LENGTH, "scale": "fixed"}
    assert model.config.position_encoding["logn"] == {"trained_length": None, "scale": "fixed"}
    longer.save_pretrained(tmp_path)
    for each in (longer, hf_posenc.extend(longer, 100), AutoModel.from_pretrained(tmp_path)):
        assert_equal(first(each(ids)), first(model(ids)))
    alone = AutoModel.from_config(hf_posenc.PosEncBertConfig(**sizes, position_encoding={"type": "logn", "max_length": 40}))
    assert hf_posenc.extend(alone, 90).config.position_encoding["trained_length"] == LENGTH
