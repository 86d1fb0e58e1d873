"""Sinusoidal embeddings with several bases, learned and dynamic frequencies.

Shapes: B batch, L tokens, D hidden_size.
"""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_posenc
from closeness import assert_close, assert_equal
from hf_posenc import PositionEmbedding
from hf_posenc.encodings import Geometry, encoding_class
from models import LENGTH, first, randomize_encoding, stock, tokens


def layer(size, **options):
    return PositionEmbedding("sinusoidal", size, **options)


def vectors(made, length, **inputs):
    """`[1, L, D]`, what a layer adds."""
    return made(torch.zeros(1, length, made.config.hidden_size), **inputs)


def expected(positions, size, bases=(10000.0,), layout="interleaved", ratios=None, stretch=1.0):
    """`[L, D]`, number by number. ratios: the factor on each frequency. stretch: n / T."""
    pairs, rows = math.ceil(size / 2), []
    steps = []
    for number in range(len(bases)):
        begin, end = (pairs * at // len(bases) for at in (number, number + 1))
        width = min(2 * end, size) - 2 * begin
        for i in range(end - begin):
            slower = stretch ** (i / (end - begin - 1)) if end - begin > 1 else 1.0
            steps.append(bases[number] ** (-2 * i / width) / slower)
    steps = [step * ratio for step, ratio in zip(steps, ratios or [1.0] * pairs, strict=True)]
    for position in positions:
        sines, cosines = [math.sin(position * s) for s in steps], [math.cos(position * s) for s in steps]
        if layout == "concatenated":
            rows.append((sines + cosines)[:size])
        else:
            rows.append([each for pair in zip(sines, cosines, strict=True) for each in pair][:size])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("size", [5, 6, 12, 13])
@pytest.mark.parametrize("bases", [(100.0,), (100.0, 10000.0), (50.0, 1000.0, 1e5)])
@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
def test_several_bases(size, bases, layout):
    far = torch.tensor([[0, 1, 511, 10**6]])
    got = vectors(layer(size, bases=bases, layout=layout), 4, position_ids=far)
    assert_close(got[0].double(), expected(far[0].tolist(), size, bases, layout))
    if len(bases) == 1:
        assert_equal(got, vectors(layer(size, base=bases[0], layout=layout), 4, position_ids=far))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learned_frequencies_start_as_the_fixed_ones(dtype):
    for options in ({}, {"bases": (100.0, 10000.0)}):
        fixed, learned = (layer(8, frequencies=each, **options).to(dtype) for each in ("fixed", "learned"))
        hidden = torch.zeros(1, 9, 8, dtype=dtype)
        assert_equal(learned(hidden, position_ids=torch.arange(9) * 10**5), fixed(hidden, position_ids=torch.arange(9) * 10**5))


@pytest.mark.parametrize("size", [7, 8])
def test_learned_frequencies_and_their_gradients(size):
    made = randomize_encoding(layer(size, frequencies="learned", bases=(100.0, 10000.0), scale="learned"))
    steps, factor = made.posenc.log_ratios, made.posenc.factor
    assert steps.shape == (4,)
    ratios = [math.exp(value) for value in steps.tolist()]
    weights = torch.randn(9, size, generator=torch.Generator().manual_seed(3))
    got = vectors(made, 9)[0]
    assert_close(got.double(), expected(range(9), size, (100.0, 10000.0), ratios=ratios) * factor.item())
    (got * weights).sum().backward()
    for i in range(4):  # by central differences
        loss = [
            (
                expected(range(9), size, (100.0, 10000.0), ratios=[*ratios[:i], ratios[i] * math.exp(by), *ratios[i + 1 :]])
                * weights
            )
            for by in (1e-5, -1e-5)
        ]
        assert steps.grad[i].item() == pytest.approx(
            (loss[0] - loss[1]).sum().item() / 2e-5 * factor.item(), rel=1e-4, abs=1e-4
        )
    plain = expected(range(9), size, (100.0, 10000.0), ratios=ratios)
    assert factor.grad.item() == pytest.approx((plain * weights).sum().item(), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("size", [5, 8])
@pytest.mark.parametrize("bases", [(10000.0,), (100.0, 10000.0)])
def test_dynamic_frequencies(size, bases):
    made = layer(size, frequencies="dynamic", trained_length=8, bases=bases)
    for length in (1, 8, 9, 40):
        assert_close(vectors(made, length)[0].double(), expected(range(length), size, bases, stretch=max(1, length / 8)))
    assert vectors(made, 0).shape == (1, 0, size)


def test_dynamic_frequencies_are_transformers():
    """Its dynamic NTK rule, in float32, with the factor 1."""
    parameters = {"rope_type": "dynamic", "factor": 1.0, "rope_theta": 10000.0}
    config = LlamaConfig(hidden_size=32, num_attention_heads=1, max_position_embeddings=64, rope_parameters=parameters)
    steps, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=500)
    got = vectors(layer(32, frequencies="dynamic", trained_length=64, layout="concatenated"), 500)
    angles = torch.arange(500)[:, None] * steps
    assert_close(got[0], torch.cat([angles.sin(), angles.cos()], dim=-1), atol=1e-4)


def test_the_dynamic_length_is_that_of_each_text():
    made = layer(8, frequencies="dynamic", trained_length=4)
    alone = vectors(made, 7)
    for mask in ([1] * 7 + [0] * 5, [0] * 5 + [1] * 7):
        rows = torch.tensor([mask, [1] * 12])
        got = made(torch.zeros(2, 12, 8), attention_mask=rows)
        assert_equal(got[:1, rows[0].bool()], alone)
        assert_equal(got[1:], vectors(made, 12))


def test_dynamic_in_an_encoder():
    """Beyond the length that the host was made for, and in a batch with padding."""
    model = hf_posenc.patch(stock("bert"), "sinusoidal", frequencies="dynamic")
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[0, 30:] = 0
    with torch.no_grad():
        together = first(model(ids, attention_mask=mask))
        assert_close(together[:1, :30], first(model(ids[:1, :30])))
        plain = hf_posenc.patch(stock("bert"), "sinusoidal")
        assert_equal(first(model(ids[:, :LENGTH])), first(plain(ids[:, :LENGTH])))
    vectors_of_40 = model.posenc("embed", torch.arange(40))
    assert_close(vectors_of_40, expected(range(40), 32, stretch=40 / LENGTH))


def test_the_trained_length_that_is_written_out():
    kind, geometry = encoding_class("sinusoidal"), Geometry(8, trained_length=24)
    for options, length in (({"frequencies": "dynamic"}, 24), ({"frequencies": "dynamic", "trained_length": 7}, 7), ({}, None)):
        assert kind.with_explicit_defaults(geometry, kind.checked_options(options))["trained_length"] == length


@torch.no_grad()
def test_dynamic_in_a_decoder_goes_by_max_length():
    model = hf_posenc.patch(stock("gpt2"), "sinusoidal", frequencies="dynamic", trained_length=5, max_length=LENGTH)
    vector = model.posenc("embed", torch.arange(3))
    assert_close(vector, expected(range(3), 32, stretch=LENGTH / 5))
    ids = tokens(1, 12)
    whole = first(model(ids))
    assert_close(first(model(ids[:, :4])), whole[:, :4])
    cache = model(ids[:, :7], use_cache=True).past_key_values
    assert_close(first(model(ids[:, 7:], past_key_values=cache)), whole[:, 7:])


def test_shifts():
    for options in ({"bases": (100.0, 10000.0)}, {"frequencies": "learned", "layout": "concatenated"}):
        made = randomize_encoding(layer(12, **options))
        matrix = made.posenc.shift_matrix(5)
        table = made.posenc("embed", torch.arange(20)).detach()
        assert_close(table[:15] @ matrix.T, table[5:])
    with pytest.raises(ValueError, match="other shifts, for each length"):
        layer(12, frequencies="dynamic", trained_length=5).posenc.shift_matrix(5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": 100.0, "bases": (10.0, 20.0)}, r"base=100 and sinusoidal.bases=\(10.0, 20.0\) contradict"),
        ({"bases": (10.0,) * 5}, "hidden_size=8 has room for 1 to 4"),
        ({"bases": ()}, "has room for 1 to 4"),
        ({"bases": (1.0, 10.0)}, r"bases=\(1.0, 10.0\): allowed is None or a list in which each value is a finite number"),
        ({"bases": 10.0}, "sinusoidal.bases=10.0: allowed is None or a list"),
        ({"frequencies": "trained"}, "allowed is 'fixed' or 'learned' or 'dynamic'"),
        ({"trained_length": 8}, "trained_length=8 has no use with frequencies='fixed'"),
        ({"trained_length": 8, "frequencies": "learned"}, "has no use with frequencies='learned'"),
        ({"frequencies": "dynamic"}, "needs trained_length, above 1: give it"),
    ],
)
def test_contradictions(options, message):
    with pytest.raises(ValueError, match=message):
        layer(8, **options)


def test_dynamic_without_a_length_in_a_decoder():
    with pytest.raises(ValueError, match="needs max_length, by which it goes in a causal stack"):
        hf_posenc.patch(stock("gpt2"), "sinusoidal", frequencies="dynamic")
    kind = encoding_class("sinusoidal")
    assert kind(Geometry(8, max_length=9, is_causal=True, trained_length=4), frequencies="dynamic") is not None
