"""What each encoding computes: against its paper's formula in slow float64 loops, and against other libraries' code.

Shapes: B batch, L tokens, H heads, D hidden_size, E head_dim, N distances.
"""

import math
from decimal import Decimal, localcontext
from types import SimpleNamespace

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention, RoFormerSinusoidalPositionalEmbedding
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

import hf_posenc
from hf_posenc.encodings import (
    Geometry,
    PositionContext,
    PositionEncoding,
    build,
    canonical,
    encoding_class,
    initialize_missing,
    positions_of,
)
from models import ENCODINGS

LAYOUTS = ["interleaved", "concatenated"]
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


def make(kind, hidden_size=16, heads=4, head_dim=8, max_length=None, is_causal=False, **options):
    """An encoding by name, for a host that was trained at a length of 7."""
    sizes = Geometry(hidden_size, heads, head_dim, max_length, is_causal, trained_length=7)
    return build(canonical({"type": kind, **options}), sizes)


def context_of(encoding, positions, past=0, start=None, consecutive=False):
    """The context of new tokens behind cached keys whose positions rise by one from `start`."""
    start = past - positions[:, :1] if start is None else start
    keys = None if consecutive else torch.cat([torch.arange(past) - start, positions], dim=1)
    return PositionContext(encoding, positions=positions, past=past, start=start, keys=keys)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# Sinusoidal.


def sinusoid(position, size, base=10000.0, layout="interleaved"):
    """PE(p) as a list of D floats, its angles computed with 60 digits and reduced before they become floats."""
    with localcontext() as decimals:
        decimals.prec = 60
        angles = [Decimal(position) / Decimal(base) ** (Decimal(column - column % 2) / size) for column in range(size)]
        angles = [float(angle % (2 * PI)) for angle in angles]
    row = [math.cos(angle) if column % 2 else math.sin(angle) for column, angle in enumerate(angles)]
    return row if layout == "interleaved" else row[0::2] + row[1::2]


def sinusoid_table(positions, *args):
    return torch.tensor([sinusoid(position, *args) for position in positions], dtype=torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 5, 16])
@pytest.mark.parametrize("base", [10000.0, 37.5])
def test_sinusoidal_formula(layout, size, base):
    positions = [0, 1, 2, 3, 17, 511, 4096]
    actual = make("sinusoidal", size, base=base, layout=layout).embed(torch.tensor(positions))
    torch.testing.assert_close(actual, sinusoid_table(positions, size, base, layout), atol=1e-11, rtol=0)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1, 3)])
def test_sinusoidal_follows_the_shape_of_its_positions(shape):
    positions = torch.arange(math.prod(shape)).reshape(shape) + 4
    expected = sinusoid_table(positions.flatten().tolist(), 6).reshape(*shape, 6)
    torch.testing.assert_close(make("sinusoidal", 6).embed(positions), expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sinusoidal_at_huge_positions(layout):
    """float32 angles are off by 0.7 here; what is left is the rounding of the result."""
    # The last has no float32 of its own.
    positions = [10**5, 10**6 + 1, 10**7, 2**24 + 1]
    actual = make("sinusoidal", 64, layout=layout).embed(torch.tensor(positions)).float()
    torch.testing.assert_close(actual.double(), sinusoid_table(positions, 64, 10000.0, layout), atol=1e-7, rtol=0)


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


@pytest.mark.parametrize("scale", [1.0, 0.25, -3.0, "learned"])
def test_sinusoidal_scale(scale):
    encoding = make("sinusoidal", 6, scale=scale)
    table, upstream = sinusoid_table(range(9), 6), random(9, 6)
    factor = 1.0 if scale == "learned" else scale
    torch.testing.assert_close(encoding.embed(torch.arange(9)).double(), table * factor, atol=1e-6, rtol=0)
    assert [name for name, _ in encoding.named_parameters()] == (["factor"] if scale == "learned" else [])
    if scale == "learned":
        with torch.no_grad():
            encoding.factor.fill_(0.7)
        output = encoding.embed(torch.arange(9))
        torch.testing.assert_close(output.double(), table * 0.7, atol=1e-6, rtol=0)
        output.backward(upstream.float())
        torch.testing.assert_close(encoding.factor.grad.double(), (upstream * table).sum(), atol=1e-5, rtol=1e-5)


# What the seed articles say of the sinusoidal encoding.


def test_sine_on_even_and_cosine_on_odd_columns():
    table = make("sinusoidal", 8).embed(torch.arange(20))
    for position in range(20):
        for pair in range(4):
            angle = position / 10000 ** (2 * pair / 8)
            assert table[position, 2 * pair].item() == pytest.approx(math.sin(angle), abs=1e-12)
            assert table[position, 2 * pair + 1].item() == pytest.approx(math.cos(angle), abs=1e-12)


def test_worked_example_of_width_4():
    expected = [[0.0, 1.0, 0.0, 1.0], [0.8415, 0.5403, 0.0100, 0.99995], [0.9093, -0.4161, 0.0200, 0.9998]]
    actual = make("sinusoidal", 4).embed(torch.arange(3))
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=5e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 8, 64])
@pytest.mark.parametrize("options", [{}, {"base": 50.0, "scale": 2.5}], ids=["plain", "base and scale"])
def test_shift_matrix_moves_every_position(layout, size, options):
    """PE(pos + k) = M_k · PE(pos) with one M_k for all positions."""
    encoding = make("sinusoidal", size, layout=layout, **options)
    base, scale = options.get("base", 10000.0), options.get("scale", 1.0)
    for offset in (0, 1, 13, -3, 700):
        matrix = encoding.shift_matrix(offset)
        assert matrix.shape == (size, size) and matrix.dtype == torch.float64
        for position in (3, 4, 99, 1234):
            here, there = scale * sinusoid_table([position, position + offset], size, base, layout)
            torch.testing.assert_close(matrix @ here, there, atol=1e-9, rtol=0)
            embedded = encoding.embed(torch.tensor([position, position + offset]))
            torch.testing.assert_close(matrix @ embedded[0], embedded[1], atol=1e-9, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shift_matrix_of_an_odd_width(layout):
    with pytest.raises(ValueError, match="hidden_size=5 is odd"):
        make("sinusoidal", 5, layout=layout).shift_matrix(1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [8, 64])
def test_values_are_bounded_and_positions_distinct(layout, size):
    table = make("sinusoidal", size, layout=layout).embed(torch.arange(8192)).float()
    assert table.abs().max() <= 1.0
    assert len(table.unique(dim=0)) == 8192


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [1, 5, 64])
def test_distance_of_two_vectors_depends_on_k_alone(layout, k):
    table = make("sinusoidal", 32, layout=layout).embed(torch.arange(3000))
    lengths = (table[k:] - table[:-k]).norm(dim=-1)
    expected = 2 * math.sqrt(sum(math.sin(k / 2 / 10000 ** (2 * i / 32)) ** 2 for i in range(16)))
    torch.testing.assert_close(lengths, torch.full_like(lengths, expected), atol=1e-10, rtol=0)


def test_bfloat16_rounds_the_result_and_nothing_before():
    """Angles in bfloat16 make most rows equal and turn signs."""
    positions = range(1024)
    rows = [[(math.cos if c % 2 else math.sin)(p / 10000 ** ((c - c % 2) / 64)) for c in range(64)] for p in positions]
    layer = hf_posenc.PositionEmbedding("sinusoidal", 64).to(torch.bfloat16)
    actual = layer(torch.zeros(1, 1024, 64, dtype=torch.bfloat16))[0]
    assert torch.equal(actual, torch.tensor(rows, dtype=torch.float64).to(torch.bfloat16))

    steps = torch.tensor([10000 ** (-c / 64) for c in range(0, 64, 2)]).bfloat16()
    angles = torch.arange(8192).bfloat16()[:, None] * steps
    naive = torch.cat([angles.sin(), angles.cos()], dim=-1)
    table = layer(torch.zeros(1, 8192, 64, dtype=torch.bfloat16))[0]
    assert len(naive.unique(dim=0)) < 1000 and len(table.unique(dim=0)) == 8192


# What is asked of a position encoding, and what the naive schemes answer.


def is_distinct(kind):
    return len(make(kind).embed(torch.arange(512)).float().unique(dim=0)) == 512


def has_equal_steps(kind):
    """From one token to the next it is as far everywhere, in short texts and in long ones."""
    tables = [make(kind).embed(torch.arange(length)) for length in (5, 60, 512)]
    steps = torch.cat([(table[1:] - table[:-1]).norm(dim=-1) for table in tables])
    return bool((steps - steps[0]).abs().max() < 1e-9)


def takes_any_length(kind):
    return bool(make(kind).embed(torch.arange(50_000)).isfinite().all())


def is_bounded(kind):
    return bool(make(kind).embed(torch.arange(512)).abs().max() <= 1.0)


def is_deterministic(kind):
    return torch.equal(make(kind).embed(torch.arange(60)), make(kind).embed(torch.arange(60)))


CRITERIA = {
    "distinct": is_distinct,
    "equal steps": has_equal_steps,
    "any length": takes_any_length,
    "bounded": is_bounded,
    "deterministic": is_deterministic,
}
FAILED = {"sinusoidal": set(), "normalized": {"equal steps"}, "counter": {"bounded"}}


@pytest.mark.parametrize("kind", FAILED)
@pytest.mark.parametrize("criterion", CRITERIA)
def test_criteria(kind, criterion):
    assert CRITERIA[criterion](kind) == (criterion not in FAILED[kind])


# The naive schemes.


@pytest.mark.parametrize("size", [1, 2, 7])
def test_counter_formula(size):
    actual = make("counter", size).embed(torch.tensor([[0, 1, 2], [5, 3, 10**7]]))
    expected = [[[float(p)] + [0.0] * (size - 1) for p in row] for row in ([0, 1, 2], [5, 3, 10**7])]
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=0, rtol=0)


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize(("is_causal", "max_length"), [(False, None), (False, 50), (True, 50)])
def test_normalized_formula(size, is_causal, max_length):
    """By each text's own length; a causal stack doesn't know it and takes the longest."""
    rows = [[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 1, 1]]
    actual = make("normalized", size, max_length=max_length, is_causal=is_causal).embed(torch.tensor(rows))
    expected = [[[p / (49 if is_causal else max(row))] + [0.0] * (size - 1) for p in row] for row in rows]
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=1e-15, rtol=0)


def test_normalized_of_one_token():
    assert torch.equal(make("normalized", 3).embed(torch.zeros(2, 1, dtype=torch.long)), torch.zeros(2, 1, 3).double())


@pytest.mark.parametrize("kind", ["counter", "learned", "normalized", "sinusoidal"])
def test_no_positions_make_no_vectors(kind):
    assert make(kind, 3, max_length=5).embed(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 3)


@pytest.mark.parametrize(
    ("kind", "is_causal", "expected"),
    [("learned", False, True), ("learned", True, True), ("normalized", True, True), ("normalized", False, False)]
    + [(kind, True, False) for kind in ("alibi", "counter", "logn", "none", "relative", "rope", "sinusoidal")],
)
def test_what_needs_a_longest_length(kind, is_causal, expected):
    geometry = Geometry(16, 4, 8, 10, is_causal)
    assert make(kind, max_length=10, is_causal=is_causal).needs_max_length(geometry) is expected


# Learned.


@pytest.mark.parametrize("std", [0.02, 1.0])
def test_learned_normal_start(std):
    """With std 1.0, torch.randn."""
    torch.manual_seed(0)
    weight = make("learned", 64, max_length=512, std=std).weight.detach() / std
    assert weight.shape == (512, 64)
    assert abs(weight.mean()) < 4 / math.sqrt(weight.numel())
    assert abs(weight.std() - 1) < 4 / math.sqrt(2 * weight.numel())
    for bound in (1.0, 2.0, 3.0):
        share = (weight.abs() < bound).double().mean().item()
        assert share == pytest.approx(math.erf(bound / math.sqrt(2)), abs=0.01)


@pytest.mark.parametrize("size", [5, 16])
def test_learned_sinusoidal_start(size):
    weight = make("learned", size, max_length=40, init="sinusoidal").weight
    assert weight.requires_grad and weight.dtype == torch.float32
    torch.testing.assert_close(weight.detach().double(), sinusoid_table(range(40), size), atol=1e-7, rtol=0)


def test_refill_leaves_loaded_weights_alone():
    """Transformers marks what came from a checkpoint; the rest is filled anew."""
    encoding, expected = make("learned", 6, max_length=4, init="sinusoidal"), sinusoid_table(range(4), 6)
    for loaded in (True, False):
        torch.nn.init.zeros_(encoding.weight)
        encoding.weight._is_hf_initialized = loaded
        initialize_missing([encoding])
        assert bool(encoding.weight.any()) is not loaded
    torch.testing.assert_close(encoding.weight.detach().double(), expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("rows", [4, 10, 17])
@pytest.mark.parametrize("init", ["host", "normal", "sinusoidal"])
def test_learned_adopts_the_host_table(rows, init):
    """As many rows as both have; the others stay at their normal start."""
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


@pytest.mark.parametrize(("kind", "is_causal"), [("learned", False), ("tupe", False), ("normalized", True)])
def test_encodings_that_need_a_length_are_not_made_without_one(kind, is_causal):
    """In a causal stack `normalized` would divide by the length of the text, which is another one at each step."""
    with pytest.raises(ValueError, match=f"'{kind}' needs max_length, .*: give max_length"):
        make(kind, is_causal=is_causal)


# ALiBi.


@pytest.mark.parametrize("heads", range(1, 17))
def test_alibi_agrees_with_bloom_and_mpt(heads):
    """Both write what a causal row needs: m·j, and m·(j - last), equal in a softmax."""
    bias = make("alibi", heads=heads).distance_bias(torch.arange(-19, 1))
    torch.testing.assert_close(bias, build_mpt_alibi_tensor(heads, 20)[:, 0], atol=1e-6, rtol=1e-6)
    bloom = build_alibi_tensor(torch.ones(1, 20, dtype=torch.long), heads, torch.float32)[:, 0]
    torch.testing.assert_close(bias.softmax(-1), bloom.softmax(-1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),
        (16, [2 ** (-h / 2) for h in range(1, 17)]),
        # The authors' rule between two powers: those of 8, then every other one of 16.
        (12, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
        (1, [1 / 256]),
    ],
)
def test_alibi_slopes_of_the_paper(heads, slopes):
    distances = [-300, -7, -1, 0, 1, 7, 300]
    expected = [[-slope * abs(distance) for distance in distances] for slope in slopes]
    actual = make("alibi", heads=heads).distance_bias(torch.tensor(distances))
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), atol=0, rtol=1e-6)


def test_alibi_is_symmetric():
    distance = torch.arange(-50, 51)
    encoding = make("alibi", heads=6)
    assert torch.equal(encoding.distance_bias(distance), encoding.distance_bias(-distance))
    assert not list(encoding.parameters())


# Relative.


def attention_with_relative(query, key, value, weight, max_distance):
    """softmax((QKᵀ + R) / √E) V, entry by entry; `[H, L, E]`, weight `[H, 2 · max_distance + 1]`."""
    heads, length, size = query.shape
    rows = []
    for h in range(heads):
        for i in range(length):
            scores = []
            for j in range(length):
                clipped = max(-max_distance, min(max_distance, j - i))
                scores.append(((query[h, i] * key[h, j]).sum() + weight[h, clipped + max_distance]) / math.sqrt(size))
            shares = torch.stack(scores).exp()
            rows.append((shares[:, None] * value[h]).sum(0) / shares.sum())
    return torch.stack(rows).reshape(heads, length, size)


@pytest.mark.parametrize("max_distance", [1, 3, 20])
def test_relative_output_and_gradient(max_distance):
    encoding = make("relative", heads=2, head_dim=6, max_distance=max_distance).double()
    with torch.no_grad():
        encoding.weight.copy_(random(*encoding.weight.shape, seed=9))
    query, key, value, upstream = (random(2, 7, 6, seed=seed) for seed in range(4))

    distance = torch.arange(7)[None, :] - torch.arange(7)[:, None]
    bias = encoding.distance_bias(distance.flatten()).unflatten(-1, (7, 7))
    actual = (query @ key.mT / math.sqrt(6) + bias).softmax(-1) @ value
    actual.backward(upstream)

    weight = encoding.weight.detach().clone().requires_grad_()
    expected = attention_with_relative(query, key, value, weight, max_distance)
    expected.backward(upstream)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(encoding.weight.grad, weight.grad, atol=1e-12, rtol=0)
    assert encoding.weight.shape == (2, 2 * max_distance + 1)
    assert weight.grad.any(0).sum() == min(2 * max_distance + 1, 13)


def test_relative_start_shows_the_order():
    torch.manual_seed(0)
    weight = make("relative", max_distance=500).weight.detach()
    assert weight.std().item() == pytest.approx(0.02, rel=0.1) and abs(weight.mean()) < 0.002


# RoPE.


def turned(states, positions, theta, layout):
    """Each pair of one vector after the other as a point of the complex plane; states `[B, H, L, E]`, positions `[B, L]`."""
    batch, heads, length, size = states.shape
    out = torch.zeros(states.shape, dtype=torch.float64)
    for b in range(batch):
        for i in range(length):
            for pair in range(size // 2):
                first, second = (pair, pair + size // 2) if layout == "half" else (2 * pair, 2 * pair + 1)
                angle = positions[b][i] * theta ** (-2 * pair / size)
                for h in range(heads):
                    point = complex(states[b, h, i, first], states[b, h, i, second])
                    point *= complex(math.cos(angle), math.sin(angle))
                    out[b, h, i, first], out[b, h, i, second] = point.real, point.imag
    return out


POSITIONS = {
    "from 0": [[0, 1, 2, 3], [0, 1, 2, 3]],
    "per row": [[5, 6, 7, 8], [0, 0, 1, 2]],
    "jumping": [[9, 2, 300, 4], [1, 7, 7, 100_000]],
}


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("theta", [10000.0, 77.0])
def test_rope_formula(layout, positions, theta):
    encoding = make("rope", head_dim=6, theta=theta, layout=layout)
    query, key = random(2, 3, 4, 6), random(2, 2, 4, 6, seed=1)
    actual = encoding.rotate(query, key, context_of(encoding, torch.tensor(positions)))
    torch.testing.assert_close(actual[0], turned(query, positions, theta, layout), atol=1e-9, rtol=0)
    torch.testing.assert_close(actual[1], turned(key, positions, theta, layout), atol=1e-9, rtol=0)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_angles_are_not_in_the_dtype_of_the_states(layout):
    encoding, positions = make("rope", head_dim=6, layout=layout), [[2001, 100_000, 10**7, 2**24 + 1]]
    states = random(1, 1, 4, 6)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.03)):
        rotated, _ = encoding.rotate(states.to(dtype), None, context_of(encoding, torch.tensor(positions)))
        assert rotated.dtype == dtype
        expected = turned(states.to(dtype).double(), positions, 10000.0, layout)
        torch.testing.assert_close(rotated.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("modeling", [modeling_llama, modeling_gpt_neox], ids=["llama", "gpt_neox"])
def test_rope_half_agrees_with_transformers(modeling):
    config = SimpleNamespace(
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        head_dim=16,
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    rotary = getattr(modeling, "LlamaRotaryEmbedding" if modeling is modeling_llama else "GPTNeoXRotaryEmbedding")(config)
    positions = torch.stack([torch.arange(64), torch.arange(448, 512)])
    query, key = random(2, 4, 64, 16, dtype=torch.float32), random(2, 4, 64, 16, seed=1, dtype=torch.float32)
    expected = modeling.apply_rotary_pos_emb(query, key, *rotary(query, positions))
    encoding = make("rope", head_dim=16)
    actual = encoding.rotate(query, key, context_of(encoding, positions))
    for ours, theirs in zip(actual, expected, strict=True):
        # Their angles are float32.
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_rope_interleaved_agrees_with_gptj_and_roformer():
    query, key = random(1, 4, 64, 16, dtype=torch.float32), random(1, 4, 64, 16, seed=1, dtype=torch.float32)
    encoding = make("rope", head_dim=16, layout="interleaved")
    actual = encoding.rotate(query, key, context_of(encoding, torch.arange(64)[None]))

    sin, cos = modeling_gptj.create_sinusoidal_positions(64, 16)[None].chunk(2, dim=-1)
    for ours, states in zip(actual, (query, key), strict=True):
        theirs = modeling_gptj.apply_rotary_pos_emb(states.transpose(1, 2), sin, cos).transpose(1, 2)
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)

    table = RoFormerSinusoidalPositionalEmbedding(64, 16).create_weight()[None, None]
    expected = RoFormerSelfAttention.apply_rotary_position_embeddings(table, query, key)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_properties(layout):
    encoding = make("rope", head_dim=8, layout=layout)
    query, key = random(1, 2, 1, 8), random(1, 2, 1, 8, seed=1)

    def at(query_position, key_position):
        rotated, _ = encoding.rotate(query, None, context_of(encoding, torch.tensor([[query_position]])))
        _, other = encoding.rotate(None, key, context_of(encoding, torch.tensor([[key_position]])))
        return rotated, other, (rotated * other).sum(-1)

    assert torch.equal(at(0, 0)[0], query) and torch.equal(at(0, 0)[1], key)
    for position in (0, 17, 5000):
        torch.testing.assert_close(at(position, 0)[0].norm(dim=-1), query.norm(dim=-1))
        for distance in (0, -4, 9):
            expected = at(10, 10 + distance)[2]
            torch.testing.assert_close(at(position + 10, position + 10 + distance)[2], expected, atol=1e-9, rtol=0)
    assert not torch.allclose(at(10, 6)[2], at(10, 14)[2], atol=1e-3)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_rotates_queries_and_keys_apart(layout):
    encoding, positions = make("rope", layout=layout), torch.tensor([[3, 4, 9]])
    query, key = random(2, 4, 3, 8), random(2, 4, 3, 8, seed=1)
    both = encoding.rotate(query, key, context_of(encoding, positions))
    context = context_of(encoding, positions)
    rotated, nothing = encoding.rotate(query, None, context)
    assert nothing is None and torch.equal(rotated, both[0])
    nothing, rotated = encoding.rotate(None, key, context)
    assert nothing is None and torch.equal(rotated, both[1])


def test_rope_needs_pairs():
    with pytest.raises(ValueError, match="head_dim is 7"):
        make("rope", head_dim=7)


# Whatever the default dtype.


@pytest.mark.parametrize("kind", ["alibi", "counter", "logn", "normalized", "rope", "sinusoidal"])
def test_the_default_dtype_does_not_matter(kind):
    """Integers above 256 and most angles have no bfloat16 of their own."""
    encoding, positions = make(kind), torch.arange(250, 400)[None]
    states, context = random(1, 4, 150, 8), context_of(encoding, positions)

    def results():
        context.computed.clear()
        found = [encoding.embed(positions), encoding.distance_bias(positions[0]), encoding.rotate(states, None, context)[0]]
        return [result.double() for result in found if result is not None]

    expected, before = results(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        actual = results()
    finally:
        torch.set_default_dtype(before)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=1e-6)


# What an encoding doesn't do.


@pytest.mark.parametrize("kind", [*ENCODINGS, "relative_key_query", "learned+shaw", "sinusoidal+rope+t5"])
def test_verbs_an_encoding_lacks_do_nothing(kind):
    encoding = make(kind, max_length=40, is_causal=True)
    query, key, context = random(1, 4, 40, 8), random(1, 4, 40, 8), context_of(encoding, torch.arange(40)[None])
    verbs = {*encoding.mechanisms()} - (set() if encoding.needs_attention_weights() else {"value_bias"})
    results = {
        "embed": encoding.embed(torch.arange(3)),
        "distance_bias": encoding.distance_bias(torch.arange(3)),
        "score_bias": encoding.score_bias(query, key, context),
        "value_bias": encoding.value_bias((query @ key.mT).softmax(-1), context),
    }
    assert {verb for verb, result in results.items() if result is not None} == verbs - {"rotate"}
    rotated = encoding.rotate(query, key, context)
    assert (rotated[0] is query and rotated[1] is key) == ("rotate" not in verbs)


# Positions of one forward pass.


def test_once_computes_once_in_each_pass():
    calls = []

    def compute(value):
        calls.append(value)
        return value

    context, other = (context_of(PositionEncoding(Geometry(4)), torch.arange(3)[None]) for _ in range(2))
    assert [context.cached("a", lambda: compute(1)) for _ in range(3)] == [1, 1, 1]
    assert context.cached("b", lambda: compute(None)) is None
    assert context.cached("b", lambda: compute(2)) is None
    assert other.cached("a", lambda: compute(3)) == 3
    assert calls == [1, None, 3]


@pytest.mark.parametrize(
    ("start", "keys", "first_key", "expected"),
    [
        pytest.param([[0]], None, 0, [[0, 1, 2]], id="consecutive"),
        pytest.param([[-4]], None, 0, [[4, 5, 6, 7, 8]], id="offset"),
        pytest.param([[1], [3]], None, 0, [[-1, 0, 1, 2, 3], [-3, -2, -1, 0, 1]], id="left padding"),
        pytest.param([[1], [3]], None, 2, [[1, 2, 3], [-1, 0, 1]], id="left padding behind a window"),
        pytest.param([[0]], [[9, 4, 4]], 0, [[9, 4, 4]], id="jumping"),
        pytest.param([[0]], [[9, 4, 4], [1, 2, 7]], 1, [[4, 4], [2, 7]], id="jumping behind a window"),
        pytest.param([[0]], [[4, 5, 2]], 0, [[4, 5, 2, 2, 2]], id="more keys than positions"),
    ],
)
def test_key_positions(start, keys, first_key, expected):
    context = PositionContext(
        PositionEncoding(Geometry(4)),
        positions=torch.arange(1)[None],
        past=0,
        start=torch.tensor(start),
        keys=None if keys is None else torch.tensor(keys),
        first_key=first_key,
    )
    actual = context.key_positions(len(expected[0]))
    assert not actual.is_floating_point() and actual.tolist() == expected
    assert context.is_contiguous is (keys is None)


MASKS = {
    "full": [1, 1, 1, 1, 1, 1],
    "right": [1, 1, 1, 1, 0, 0],
    "left": [0, 0, 1, 1, 1, 1],
    "both": [0, 1, 1, 1, 1, 0],
    "hole": [0, 1, 0, 1, 1, 1],
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_positions_count_from_the_first_shown_token(mask, past, dtype):
    shown = [index for index, value in enumerate(mask) if value]
    batch = torch.tensor([mask, MASKS["full"]]).to(dtype)
    positions, start = positions_of(6 - past, past, batch, batch.device)
    assert start.tolist() == [[shown[0]], [0]]
    assert positions[1].tolist() == list(range(past, 6))
    for index, position in zip(range(past, 6), positions[0].tolist(), strict=True):
        assert 0 <= position <= shown[-1] - shown[0]
        if index in shown:
            assert position == index - shown[0]


@pytest.mark.parametrize("mask", [None, torch.zeros(2, 1, 4, 7)], ids=["no mask", "4-D mask"])
@pytest.mark.parametrize("past", [3, torch.tensor(3)], ids=["int", "tensor"])
def test_positions_without_a_2d_mask_are_those_of_the_keys(mask, past):
    positions, start = positions_of(4, past, mask, torch.device("cpu"))
    assert positions.tolist() == [[3, 4, 5, 6]] and start.tolist() == [[0]]


# T5.

BUCKETS = [(32, 128), (4, 5), (8, 200), (12, 13), (64, 1000)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), BUCKETS)
def test_t5_agrees_with_transformers(num_buckets, max_distance, is_causal):
    """Its buckets at any distance, and its bias of new queries after cached keys."""
    encoding = make("t5", is_causal=is_causal, num_buckets=num_buckets, max_distance=max_distance)
    distance = torch.cat([torch.arange(-3000, 3001), torch.tensor([-(10**9), 10**9])])
    expected = T5Attention._relative_position_bucket(distance, not is_causal, num_buckets, max_distance)
    assert torch.equal(encoding.rows(distance), expected) and not encoding.rows(distance).is_floating_point()
    assert set(expected.tolist()) == set(range(num_buckets)) - ({num_buckets // 2} if not is_causal else set())

    config = T5Config(
        d_model=16,
        num_heads=4,
        is_decoder=is_causal,
        relative_attention_num_buckets=num_buckets,
        relative_attention_max_distance=max_distance,
    )
    theirs = T5Attention(config, has_relative_attention_bias=True)
    with torch.no_grad():
        encoding.weight.copy_(theirs.relative_attention_bias.weight.normal_())
    bias = theirs.compute_bias(5, 40, torch.device("cpu"), past_seen_tokens=35)[0]
    index = torch.arange(40)[None, :] - torch.arange(35, 40)[:, None]
    assert torch.equal(encoding.distance_bias(index.flatten()).unflatten(-1, (5, 40)), bias)


def test_t5_agrees_with_mpnet():
    distance = torch.arange(-600, 601)
    assert torch.equal(make("t5").rows(distance), MPNetEncoder.relative_position_bucket(distance))


@pytest.mark.parametrize("is_causal", [False, True])
def test_t5_gradient_reaches_each_used_bucket(is_causal):
    encoding = make("t5", heads=3, num_buckets=8, max_distance=20, is_causal=is_causal).double()
    distance, upstream = torch.arange(-30, 31), random(3, 61)
    encoding.distance_bias(distance).backward(upstream)
    expected = torch.zeros(8, 3, dtype=torch.float64)
    for column, bucket in enumerate(encoding.rows(distance).tolist()):
        expected[bucket] += upstream[:, column]
    torch.testing.assert_close(encoding.weight.grad, expected, atol=1e-12, rtol=0)
    assert encoding.weight.grad.any(1).sum() == (8 if is_causal else 7)


def test_t5_start_shows_the_order():
    torch.manual_seed(0)
    weight = make("t5", hidden_size=64, heads=100).weight.detach()
    assert weight.shape == (32, 100) and weight.std().item() == pytest.approx(64**-0.5, rel=0.05)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(2, 128), (30, 128), (33, 128), (32, 32), (32, 20), (4, 4)])
def test_t5_of_wrong_sizes(num_buckets, max_distance):
    words = rf"t5\.num_buckets={num_buckets}, t5\.max_distance={max_distance}: allowed is a multiple of 4, and a distance above"
    with pytest.raises(ValueError, match=words):
        make("t5", num_buckets=num_buckets, max_distance=max_distance)


# Shaw.


def shaw_scores(query, key, weight, max_distance, terms, scaling, queries_at, keys_at):
    """e_ij of equation 4, entry by entry: query `[B, H, Q, E]`, key `[B, H, K, E]`, positions as lists `[B][Q]`, `[B][K]`."""
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    entries = []
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                for j in range(keys):
                    distance = keys_at[b][j] - queries_at[b][i]
                    vector = weight[max(-max_distance, min(max_distance, distance)) + max_distance]
                    entry = (query[b, h, i] * (key[b, h, j] + vector)).sum()
                    if terms == "keys+queries":
                        entry = entry + (key[b, h, j] * vector).sum()
                    entries.append(entry * scaling)
    return torch.stack(entries).reshape(batch, heads, queries, keys)


# Positions of new tokens, how many keys are cached before them, whether they rise by one; and the positions of all keys.
SHAW_POSITIONS = {
    "from 0": ([[0, 1, 2, 3]] * 2, 0, True, [[0, 1, 2, 3]] * 2),
    "one row for all": ([[0, 1, 2, 3]], 0, True, [[0, 1, 2, 3]] * 2),
    "left padding": ([[0, 0, 1, 2], [0, 1, 2, 3]], 0, True, [[-1, 0, 1, 2], [0, 1, 2, 3]]),
    "cached": ([[5, 6, 7], [3, 4, 5]], 5, True, [[0, 1, 2, 3, 4, 5, 6, 7], [-2, -1, 0, 1, 2, 3, 4, 5]]),
    "jumping": ([[9, 2, 2, 30]], 0, False, [[9, 2, 2, 30]] * 2),
    "jumping by row": ([[9, 2, 2, 30], [3, 2, 1, 0]], 0, False, [[9, 2, 2, 30], [3, 2, 1, 0]]),
    "jumping after a cache": ([[7, 3], [2, 20]], 3, False, [[4, 5, 6, 7, 3], [-1, 0, 1, 2, 20]]),
}


@pytest.mark.parametrize("terms", ["keys", "keys+queries"])
@pytest.mark.parametrize("max_distance", [1, 3, 40])
@pytest.mark.parametrize(("positions", "past", "consecutive", "keys_at"), SHAW_POSITIONS.values(), ids=SHAW_POSITIONS)
def test_shaw_scores_and_gradients(terms, max_distance, positions, past, consecutive, keys_at):
    encoding = make("shaw", head_dim=6, max_distance=max_distance, terms=terms).double()
    with torch.no_grad():
        encoding.weight.copy_(random(2 * max_distance + 1, 6, seed=9))
    query = random(2, 3, len(positions[0]), 6).requires_grad_()
    key = random(2, 3, len(keys_at[0]), 6, seed=1).requires_grad_()
    # Padding before position 0 is at position 0 itself as a query, so a row's start comes from its keys.
    start = torch.tensor([[-row[0]] for row in keys_at[: len(positions)]])
    context = context_of(encoding, torch.tensor(positions), past, start, consecutive).for_attention(0.7)
    upstream = random(2, 3, len(positions[0]), len(keys_at[0]), seed=2)
    results = []
    for scores in (
        lambda: query @ key.mT * 0.7 + encoding.score_bias(query, key, context),
        lambda: shaw_scores(query, key, encoding.weight, max_distance, terms, 0.7, positions * 2, keys_at),
    ):
        leaves = (query, key, encoding.weight)
        for leaf in leaves:
            leaf.grad = None
        result = scores()
        result.backward(upstream)
        results.append([result, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_shaw_start_shows_the_order():
    torch.manual_seed(0)
    weight = make("shaw", head_dim=64).weight.detach()
    assert weight.shape == (257, 64) and weight.std().item() == pytest.approx(0.02, rel=0.05)


# Compositions.


def test_a_composition_sums_what_its_parts_add():
    kind = "counter+t5+relative+shaw+sinusoidal"
    torch.manual_seed(0)
    whole, positions = make(kind), torch.tensor([[4, 5, 9]])
    parts = {name: make(name) for name in kind.split("+")}
    for name, part in parts.items():
        part.load_state_dict(getattr(whole, name).state_dict())
    torch.testing.assert_close(whole.embed(positions), parts["counter"].embed(positions) + parts["sinusoidal"].embed(positions))
    distance = torch.arange(-9, 10)
    expected = parts["t5"].distance_bias(distance) + parts["relative"].distance_bias(distance)
    torch.testing.assert_close(whole.distance_bias(distance), expected)
    states, context = random(1, 4, 3, 8, dtype=torch.float32), context_of(whole, positions).for_attention(0.3)
    assert torch.equal(whole.score_bias(states, states, context), parts["shaw"].score_bias(states, states, context))
    assert {name.partition(".")[0] for name, _ in whole.named_parameters()} == {"t5", "relative", "shaw"}


def test_a_composition_rotates_in_the_order_of_its_name():
    class Swap(PositionEncoding, type="test-swap"):
        """Doesn't commute with rotations."""

        def rotate(self, query, key, context):
            return tuple(None if states is None else states.flip(-1) * 2 for states in (query, key))

    query, key, positions = random(1, 4, 3, 8), random(1, 4, 3, 8, seed=1), torch.tensor([[1, 2, 30]])
    rope, swap = make("rope"), make("test-swap")
    for kind, parts in (("rope+test-swap", (rope, swap)), ("test-swap+none+rope", (swap, rope))):
        whole = make(kind)
        context = context_of(whole, positions)
        expected = query, key
        for part in parts:
            expected = part.rotate(*expected, context_of(part, positions))
        assert all(map(torch.equal, whole.rotate(query, key, context), expected))
        assert torch.equal(whole.rotate(query, None, context)[0], expected[0])
        assert torch.equal(whole.rotate(None, key, context)[1], expected[1])
    assert not torch.equal(make("rope+test-swap").rotate(query, key, context)[0], expected[0])


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_composition_needs_a_longest_length_if_a_part_does(is_causal):
    geometry = Geometry(16, 4, 8, None, is_causal)
    assert encoding_class("alibi+learned").needs_max_length(geometry)
    assert not encoding_class("alibi+rope").needs_max_length(geometry)
    assert encoding_class("alibi+normalized").needs_max_length(geometry) == is_causal


def test_a_composition_adopts_the_host_table():
    whole, table = make("alibi+learned", max_length=7, learned__init="host"), random(5, 16, dtype=torch.float32)
    whole.init_from_original_table(table)
    assert torch.equal(whole.learned.weight[:5], table)


@pytest.mark.parametrize(
    ("kind", "stack", "attention"),
    [
        ("shaw", set(), {"weight"}),
        ("t5", {"weight"}, None),
        ("learned+shaw", {"learned.weight"}, {"shaw.weight"}),
        ("shaw+t5+alibi", {"t5.weight"}, {"shaw.weight"}),
        ("alibi+sinusoidal", set(), None),
        ("learned+t5", {"learned.weight", "t5.weight"}, None),
    ],
)
def test_who_owns_what(kind, stack, attention):
    """What all layers share is the stack's, what each has of its own the attention's; nothing is in both."""
    geometry = Geometry(16, 4, 8, 10)
    options = {key: value for key, value in canonical(kind).items() if key != "type"}
    assert set(encoding_class(kind).for_stack(geometry, **options).state_dict()) == stack
    own = encoding_class(kind).for_attention(geometry, kind.split("+"), **options)
    assert (own if own is None else set(own.state_dict())) == attention
    assert encoding_class(kind).for_attention(geometry, (), **options) is None  # none of it acts in this layer


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which torch's own jvp calls
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotation_is_differentiable(layout):
    """Once and twice by finite differences; mapped over a dimension as in a loop."""
    encoding = make("rope", layout=layout)
    positions = torch.tensor([[0, 3, 1, 7]])
    context = PositionContext(encoding, positions, 0, torch.zeros(1, 1, dtype=torch.long))
    states = torch.randn(3, 1, 2, 4, encoding.geometry.head_dim, dtype=torch.float64, requires_grad=True)

    def rotate(states):
        return encoding.rotate(states, None, context)[0]

    assert torch.autograd.gradcheck(rotate, states[0]) and torch.autograd.gradgradcheck(rotate, states[0])
    looped = torch.stack([rotate(each) for each in states])
    torch.testing.assert_close(torch.func.vmap(rotate)(states), looped)
    weights = torch.randn(looped.shape, dtype=torch.float64)
    gradients = torch.func.vmap(torch.func.grad(lambda each, weight: (rotate(each) * weight).sum()))(states, weights)
    torch.testing.assert_close(gradients, torch.autograd.grad((looped * weights).sum(), states)[0])
    tangent = torch.func.jvp(rotate, (states[0],), (states[1],))[1]
    torch.testing.assert_close(tangent, looped[1])  # it is linear
