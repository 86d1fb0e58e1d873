"""Additive encodings: sinusoidal with its options, learned, fourier, counter, and normalized.

The tests compare them with the papers' formulas, number by number, and with other libraries.

Shapes: B batch, L tokens, D hidden_size.
"""

import functools
import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
from transformers.models.gptj import modeling_gptj
from transformers.models.roformer.modeling_roformer import RoFormerSinusoidalPositionalEmbedding

import hf_posenc
import oracles
from closeness import assert_close, assert_equal
from hf_posenc import PositionEmbedding
from models import LENGTH, first, stock, tokens
from oracles import random

LAYOUTS = ["interleaved", "concatenated"]
make = functools.partial(oracles.make, trained=None)
FAR = [0, 1, 2, 17, 511, 4096, 10**5, 10**6 + 1, 10**7, 2**24 + 1]


# Sinusoidal.


@functools.cache
def angles(position, steps):
    """The angles of a position, computed with 60 digits and reduced before they are converted to floats."""
    with localcontext() as decimals:
        decimals.prec = 60
        pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
        return [float(Decimal(position) * step % (2 * pi)) for step in steps]


def sinusoids(positions, size, bases=(10000.0,), layout="interleaved", ratios=None, stretch=1.0):
    """The vectors `[L, D]`, number by number. ratios: the factor on each frequency. stretch: n / T."""
    pairs, steps, rows = math.ceil(size / 2), [], []
    with localcontext() as decimals:
        decimals.prec = 60
        for number, base in enumerate(bases):
            begin, end = (pairs * at // len(bases) for at in (number, number + 1))
            width = min(2 * end, size) - 2 * begin
            for i in range(end - begin):
                slower = stretch ** (i / (end - begin - 1)) if end - begin > 1 else 1.0
                ratio = 1.0 if ratios is None else ratios[begin + i]
                steps.append(Decimal(base) ** (Decimal(-2 * i) / width) / Decimal(slower) * Decimal(ratio))
    for position in positions:
        waves = [(math.sin(angle), math.cos(angle)) for angle in angles(position, tuple(steps))]
        parts = zip(*waves, strict=True) if layout == "concatenated" else waves
        rows.append([each for part in parts for each in part][:size])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 5, 12, 13, 16])
def test_sinusoidal_formula(layout, size):
    """The formula holds for one base and several. In float32, only results are rounded: float32 angles would be off by 0.7 at
    the last position.
    """
    for bases in ((10000.0,), (37.5,), (100.0, 10000.0), (50.0, 1000.0, 1e5)):
        if len(bases) > math.ceil(size / 2):
            continue
        expected = sinusoids(FAR, size, bases, layout)
        encoding = make("sinusoidal", size, bases=bases, layout=layout)
        actual = encoding.embed(torch.tensor(FAR))
        torch.testing.assert_close(actual, expected, atol=1e-8, rtol=0)
        assert torch.equal(encoding.embed(torch.tensor([[FAR]] * 2)), actual.expand(2, 1, -1, -1))
        assert encoding.embed(torch.tensor(3)).shape == (size,)
        if len(bases) == 1:
            assert torch.equal(make("sinusoidal", size, base=bases[0], layout=layout).embed(torch.tensor(FAR)), actual)


@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
@pytest.mark.parametrize("dtype", [torch.long, torch.int16])
def test_sinusoids_of_repeated_positions(layout, dtype):
    """Vectors of a batch, where positions are repeated, are those of each position alone. Fake tensors have no values."""
    encoding, positions = make("sinusoidal", 12, layout=layout), torch.tensor([[0, 1, 2, 3], [0, 0, 0, 5]], dtype=dtype)
    with torch.device("meta"):
        found = encoding("embed", positions)
    alone = [encoding("embed", position[None]) for position in positions.flatten()]
    assert torch.equal(found.flatten(0, 1), torch.cat(alone))
    with FakeTensorMode() as mode:
        assert encoding("embed", mode.from_tensor(positions)).shape == (2, 4, 12)


def test_worked_example_of_width_4():
    expected = [[0.0, 1.0, 0.0, 1.0], [0.8415, 0.5403, 0.0100, 0.99995], [0.9093, -0.4161, 0.0200, 0.9998]]
    actual = make("sinusoidal", 4).embed(torch.arange(3))
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=5e-5, rtol=0)


def test_sinusoidal_agrees_with_transformers():
    positions = torch.arange(128)
    for size in (7, 32):
        interleaved = create_sinusoidal_embeddings(128, size, torch.empty(128, size))
        torch.testing.assert_close(make("sinusoidal", size).embed(positions).float(), interleaved, atol=1e-6, rtol=0)
        concatenated = RoFormerSinusoidalPositionalEmbedding(128, size).create_weight()
        actual = make("sinusoidal", size, layout="concatenated").embed(positions).float()
        torch.testing.assert_close(actual, concatenated, atol=1e-6, rtol=0)
    # GPT-J's angles are float32.
    actual = make("sinusoidal", 32, layout="concatenated").embed(positions).float()
    torch.testing.assert_close(actual, modeling_gptj.create_sinusoidal_positions(128, 32), atol=2e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options", [{}, {"base": 50.0, "scale": 2.5}, {"bases": (100.0, 10000.0)}, {"frequencies": "learned"}], ids=str
)
def test_shift_matrix_moves_every_position(layout, options):
    """PE(pos + k) = M_k · PE(pos) with one M_k for all positions."""
    for size in (4, 32):
        encoding = make("sinusoidal", size, layout=layout, seed=0 if "frequencies" in options else None, **options)
        for offset in (0, 1, 13, -3, 700):
            matrix = encoding.shift_matrix(offset)
            assert matrix.shape == (size, size) and matrix.dtype == torch.float64
            positions = torch.tensor([3, 4, 99, 1234])
            assert_close(encoding.embed(positions) @ matrix.T, encoding.embed(positions + offset), rtol=1e-8, atol=1e-8)
    with pytest.raises(ValueError, match="hidden_size=5 is odd"):
        make("sinusoidal", 5, layout=layout).shift_matrix(1)
    with pytest.raises(ValueError, match="frequencies='dynamic'"):
        make("sinusoidal", 4, frequencies="dynamic", trained_length=5).shift_matrix(5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_seed_articles_say(layout):
    """Values are bounded, positions are distinct, and the distance of two vectors depends only on k."""
    table = make("sinusoidal", 32, layout=layout).embed(torch.arange(8192))
    assert table.abs().max() <= 1.0 and len(table.float().unique(dim=0)) == 8192
    for k in (1, 5, 64):
        lengths = (table[k:] - table[:-k]).norm(dim=-1)
        expected = 2 * math.sqrt(sum(math.sin(k / 2 / 10000 ** (2 * i / 32)) ** 2 for i in range(16)))
        torch.testing.assert_close(lengths, torch.full_like(lengths, expected), atol=1e-10, rtol=0)


def test_bfloat16_rounds_the_result_and_nothing_before():
    """With bfloat16 angles, most rows would be equal, and signs would change."""
    layer = PositionEmbedding("sinusoidal", 64).to(torch.bfloat16)
    table = layer(torch.zeros(1, 8192, 64, dtype=torch.bfloat16))[0]
    assert torch.equal(table[:1024], sinusoids(range(1024), 64).bfloat16()) and len(table.unique(dim=0)) == 8192


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"bases": (100.0, 10000.0)}], ids=str)
def test_learned_frequencies_start_as_the_fixed_ones(dtype, options):
    fixed, learned = (PositionEmbedding("sinusoidal", 8, frequencies=f, **options).to(dtype) for f in ("fixed", "learned"))
    hidden, given = torch.zeros(1, 9, 8, dtype=dtype), {"position_ids": torch.arange(9) * 10**5}
    assert_equal(learned(hidden, **given), fixed(hidden, **given))


@pytest.mark.parametrize("size", [7, 8])
def test_learned_frequencies_and_their_gradients(size):
    made = make("sinusoidal", size, frequencies="learned", bases=(100.0, 10000.0), scale="learned", seed=1)
    assert make("sinusoidal", size, scale="learned").factor.item() == 1.0
    steps, factor, weights = made.log_ratios, made.factor, random(9, size, seed=3)
    assert steps.shape == (4,)

    def expected(moved=None, by=0.0):
        ratios = [math.exp(value + by * (i == moved)) for i, value in enumerate(steps.tolist())]
        return sinusoids(range(9), size, (100.0, 10000.0), ratios=ratios)

    got = made.embed(torch.arange(9))
    assert_close(got.double(), expected() * factor.item())
    (got * weights).sum().backward()
    for i in range(4):  # by central differences
        slope = ((expected(i, 1e-5) - expected(i, -1e-5)) * weights).sum().item() / 2e-5
        assert steps.grad[i].item() == pytest.approx(slope * factor.item(), rel=1e-4, abs=1e-4)
    assert factor.grad.item() == pytest.approx((expected() * weights).sum().item(), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("size", [5, 8])
@pytest.mark.parametrize("bases", [(10000.0,), (100.0, 10000.0)])
def test_dynamic_frequencies(size, bases):
    made = make("sinusoidal", size, frequencies="dynamic", trained_length=8, bases=bases)
    for length in (1, 8, 9, 40):
        expected = sinusoids(range(length), size, bases, stretch=max(1, length / 8))
        assert_close(made.embed(torch.arange(length)).double(), expected)


def test_dynamic_frequencies_are_transformers():
    """The frequencies equal those of the dynamic NTK rule in Transformers, in float32, with the factor 1."""
    parameters = {"rope_type": "dynamic", "factor": 1.0, "rope_theta": 10000.0}
    config = LlamaConfig(hidden_size=32, num_attention_heads=1, max_position_embeddings=64, rope_parameters=parameters)
    steps, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=500)
    made = make("sinusoidal", 32, frequencies="dynamic", trained_length=64, layout="concatenated")
    angles = torch.arange(500)[:, None] * steps
    assert_close(made.embed(torch.arange(500)).float(), torch.cat([angles.sin(), angles.cos()], dim=-1), atol=1e-4)


@torch.no_grad()
def test_the_dynamic_length_is_that_of_each_text():
    made = PositionEmbedding("sinusoidal", 8, frequencies="dynamic", trained_length=4)
    for mask in ([1] * 7 + [0] * 5, [0] * 5 + [1] * 7):
        rows = torch.tensor([mask, [1] * 12])
        got = made(torch.zeros(2, 12, 8), attention_mask=rows)
        assert_equal(got[:1, rows[0].bool()], made(torch.zeros(1, 7, 8)))
        assert_equal(got[1:], made(torch.zeros(1, 12, 8)))
    model = hf_posenc.patch(stock("bert"), "sinusoidal", frequencies="dynamic")
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[0, 30:] = 0
    assert_close(first(model(ids, attention_mask=mask))[:1, :30], first(model(ids[:1, :30])))
    assert_close(model.posenc("embed", torch.arange(40)), sinusoids(range(40), 32, stretch=40 / LENGTH))
    plain = hf_posenc.patch(stock("bert"), "sinusoidal")
    assert_equal(first(model(ids[:, :LENGTH])), first(plain(ids[:, :LENGTH])))


@torch.no_grad()
def test_dynamic_in_a_decoder_goes_by_max_length():
    with pytest.raises(ValueError, match="needs max_length in a decoder"):
        hf_posenc.patch(stock("gpt2"), "sinusoidal", frequencies="dynamic")
    model = hf_posenc.patch(stock("gpt2"), "sinusoidal", frequencies="dynamic", trained_length=5, max_length=LENGTH)
    assert_close(model.posenc("embed", torch.arange(3)), sinusoids(range(3), 32, stretch=LENGTH / 5))


# Counter and normalized.


@pytest.mark.parametrize("size", [1, 2, 7])
def test_counter_formula(size):
    actual = make("counter", size).embed(torch.tensor([[0, 1, 2], [5, 3, 10**7]]))
    expected = [[[float(p)] + [0.0] * (size - 1) for p in row] for row in ([0, 1, 2], [5, 3, 10**7])]
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=0, rtol=0)


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize(("is_causal", "max_length"), [(False, None), (False, 50), (True, 50)])
def test_normalized_formula(size, is_causal, max_length):
    """Positions are divided by each text's length. A causal layer stack doesn't know this length, and uses the
    maximum length.
    """
    rows, encoding = (
        [[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 1, 1]],
        make("normalized", size, max_length=max_length, is_causal=is_causal),
    )
    expected = [[[p / (49 if is_causal else max(row))] + [0.0] * (size - 1) for p in row] for row in rows]
    torch.testing.assert_close(encoding.embed(torch.tensor(rows)), torch.tensor(expected).double(), atol=1e-7, rtol=0)
    assert not encoding.embed(torch.zeros(2, 1, dtype=torch.long)).any()


@pytest.mark.parametrize("kind", ["counter", "learned", "normalized", "sinusoidal"])
def test_no_positions_make_no_vectors(kind):
    assert make(kind, 3, max_length=5).embed(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 3)


@pytest.mark.parametrize(("kind", "failed"), [("sinusoidal", ()), ("normalized", ("equal steps",)), ("counter", ("bounded",))])
def test_what_is_asked_of_a_position_encoding(kind, failed):
    """Criteria for position encodings, which naive schemes fail in part.

    Equal steps: the distance from one token to the next is the same everywhere, in short and long texts.
    """
    encoding = make(kind)
    table, tables = encoding.embed(torch.arange(512)), [encoding.embed(torch.arange(length)) for length in (5, 60, 512)]
    steps = torch.cat([(each[1:] - each[:-1]).norm(dim=-1) for each in tables])
    criteria = {
        "distinct": len(table.float().unique(dim=0)) == 512,
        "equal steps": (steps - steps[0]).abs().max() < 1e-9,
        "any length": encoding.embed(torch.arange(50_000)).isfinite().all(),
        "bounded": table.abs().max() <= 1.0,
        "deterministic": torch.equal(table, make(kind).embed(torch.arange(512))),
    }
    assert {name for name, answer in criteria.items() if not answer} == {*failed}


# Learned.


@pytest.mark.parametrize("std", [0.02, 1.0])
def test_learned_normal_start(std):
    """With std 1.0, the initial values are those of torch.randn."""
    torch.manual_seed(0)
    weight = make("learned", 64, max_length=512, std=std).weight.detach() / std
    assert weight.shape == (512, 64)
    assert abs(weight.mean()) < 4 / math.sqrt(weight.numel())
    assert abs(weight.std() - 1) < 4 / math.sqrt(2 * weight.numel())
    for bound in (1.0, 2.0, 3.0):
        assert (weight.abs() < bound).double().mean().item() == pytest.approx(math.erf(bound / math.sqrt(2)), abs=0.01)


@pytest.mark.parametrize("size", [5, 16])
def test_learned_sinusoidal_start(size):
    encoding, expected = make("learned", size, max_length=40, init="sinusoidal"), sinusoids(range(40), size)
    assert encoding.weight.requires_grad and encoding.weight.dtype == torch.float32
    torch.testing.assert_close(encoding.weight.detach().double(), expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("rows", [4, 10, 17])
@pytest.mark.parametrize("init", ["host", "normal", "sinusoidal"])
def test_learned_adopts_the_host_table(rows, init):
    """Rows that both tables have are copied. The others keep their normal initialization."""
    encoding = make("learned", max_length=10, init=init)
    before, table = encoding.weight.detach().clone(), random(rows, 16, dtype=torch.bfloat16)
    encoding.init_from_original_table(table)
    taken = min(rows, 10) if init == "host" else 0
    assert torch.equal(encoding.weight[:taken], table[:taken].float())
    assert torch.equal(encoding.weight[taken:], before[taken:])
    assert encoding.weight.is_leaf and encoding.weight.requires_grad


def test_learned_output_and_gradient():
    encoding, positions = make("learned", 5, max_length=6), torch.tensor([[0, 3, 3], [5, 0, 3]])
    upstream = random(2, 3, 5)
    output = encoding.embed(positions)
    output.backward(upstream.float())
    expected = torch.zeros(6, 5, dtype=torch.float64)
    for b in range(2):
        for i in range(3):
            assert torch.equal(output[b, i], encoding.weight[positions[b, i]])
            expected[positions[b, i]] += upstream[b, i]
    torch.testing.assert_close(encoding.weight.grad.double(), expected, atol=1e-6, rtol=1e-6)


# Fourier features.


@pytest.mark.parametrize("scale", [1.0, 0.01])
@pytest.mark.parametrize("positions", [[0, 1, 2, 17], [511, 4096, 10**5, 10**7]])
def test_fourier_formula(positions, scale):
    """The formula and its gradients hold, also under autocast and with bfloat16 parameters."""
    encoding = make("fourier", 12, features=6, width=4, scale=scale, seed=0)
    own = {name: value.detach().double().requires_grad_() for name, value in encoding.named_parameters()}
    rows = []
    for position in positions:
        angles = [frequency * position * scale for (frequency,) in own["frequencies"]]
        features = torch.stack([*(a.cos() for a in angles), *(a.sin() for a in angles)]) / math.sqrt(6)
        z = own["hidden_weight"] @ features + own["hidden_bias"]
        rows.append(own["weight"] @ (z * (1 + torch.erf(z / math.sqrt(2))) / 2) + own["bias"])
    expected, upstream = torch.stack(rows), random(4, 12, seed=9)
    actual = encoding("embed", torch.tensor(positions))
    assert_close(actual.double(), expected, rtol=1e-5)
    found = torch.autograd.grad((actual * upstream).sum(), list(encoding.parameters()))
    right = torch.autograd.grad((expected * upstream).sum(), list(own.values()))
    for one, other in zip(found, right, strict=True):
        assert other.any()
        assert_close(one.double(), other)
    half = encoding.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = half("embed", torch.tensor(positions))
    assert_close(rounded.double(), half.double()("embed", torch.tensor(positions)).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gamma", [3.0, 10.0, 100.0])
def test_fourier_start(gamma):
    """Features of positions at distance d have products of exp(-d²/2γ²) / 2.

    The vectors' entries have the requested standard deviation, and adjacent vectors differ.
    """
    torch.manual_seed(0)
    encoding = make("fourier", 128, gamma=gamma, features=1024, std=0.5)
    angles = encoding.frequencies.detach()[:, 0] * torch.arange(100)[:, None]
    features = torch.cat([angles.cos(), angles.sin()], dim=-1) / 32
    for d in (0, 1, 5, 50):
        assert (features[0] @ features[d]).item() == pytest.approx(math.exp(-(d**2) / (2 * gamma**2)) / 2, abs=0.05)
    vectors = encoding("embed", torch.arange(1024)).float()
    assert vectors.std().item() == pytest.approx(0.5, rel=0.25)
    assert len(vectors.bfloat16().unique(dim=0)) == 1024
    steps = (vectors[1:] - vectors[:-1]).norm(dim=-1) / vectors.norm(dim=-1)[1:]
    assert steps.mean().item() == pytest.approx(math.sqrt(2 - 2 * math.exp(-1 / (2 * gamma**2))), rel=0.5)
