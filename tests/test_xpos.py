"""`xpos`: against float64 loops and the libraries that have it; what it refuses; how far it reaches in each dtype.

Shapes: B batch, H heads, L tokens, E head_dim.
"""

import math

import pytest
import torch
from transformers import DynamicCache, StaticCache

import hf_posenc
from closeness import assert_apart, assert_close
from hf_posenc.encodings import Geometry, PositionContext, build, canonical
from models import first, patched, stock, tokens
from oracles import in_pieces, padded

SIZE = 8
LAYOUTS = ["half", "interleaved"]


def make(head_dim=SIZE, **options):
    return build(canonical({"type": "xpos", **options}), Geometry(32, 4, head_dim, None, True))


def context_of(encoding, positions, past=0):
    positions = torch.as_tensor(positions)
    return PositionContext(encoding, positions=positions, past=past, start=positions[:, :1])


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def turned(states, positions, sign, layout="half", theta=10000.0, gamma=0.4, scale_base=512.0):
    """`[B, H, L, E]` in float64: each pair as a point of the complex plane, turned and stretched."""
    size, out = states.shape[-1], torch.zeros(states.shape, dtype=torch.float64)
    for b, row in enumerate(positions):
        for i, position in enumerate(row):
            for pair in range(size // 2):
                one, two = (pair, pair + size // 2) if layout == "half" else (2 * pair, 2 * pair + 1)
                zeta = (2 * pair / size + gamma) / (1 + gamma)
                angle, stretch = position * theta ** (-2 * pair / size), zeta ** (sign * position / scale_base)
                for h in range(states.shape[1]):
                    point = complex(states[b, h, i, one], states[b, h, i, two])
                    point *= stretch * complex(math.cos(angle), math.sin(angle))
                    out[b, h, i, one], out[b, h, i, two] = point.real, point.imag
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"theta": 77.0, "gamma": 1.5, "scale_base": 64.0}], ids=str)
def test_formula(layout, options):
    encoding, query, key = make(layout=layout, **options), random(2, 3, 4, SIZE), random(2, 2, 4, SIZE, seed=1)
    for positions in ([[0, 1, 2, 3], [0, 0, 1, 2]], [[9, 2, 300, 4], [1000, 7, 7, 4095]]):
        wanted = turned(query, positions, 1, layout, **options), turned(key, positions, -1, layout, **options)
        actual = encoding.rotate(query, key, context_of(encoding, positions))
        assert_close(list(actual), list(wanted), rtol=1e-9, atol=1e-12)
        single = encoding.rotate(query.float(), key.float(), context_of(encoding, positions))
        assert_close([each.double() for each in single], list(wanted), rtol=1e-5, atol=1e-6)


def scores(query, key):
    return query @ key.mT


def test_rotary_embedding_torch():
    library = pytest.importorskip("rotary_embedding_torch")
    query, key = random(1, 2, 512, 16, dtype=torch.float32), random(1, 2, 512, 16, seed=1, dtype=torch.float32)
    theirs = library.RotaryEmbedding(16, use_xpos=True, xpos_scale_base=512).rotate_queries_and_keys(query, key)
    encoding = make(16, layout="interleaved")
    ours = encoding.rotate(query, key, context_of(encoding, torch.arange(512)[None]))
    # They count from the middle; scores are the same.
    assert_close(scores(*ours).tril(), scores(*theirs).tril())
    assert_apart(scores(query, key).tril(), scores(*theirs).tril())


def test_x_transformers():
    library = pytest.importorskip("x_transformers.x_transformers")
    query, key = random(1, 2, 512, 16, dtype=torch.float32), random(1, 2, 512, 16, seed=1, dtype=torch.float32)
    angles, scale = library.RotaryEmbedding(16, use_xpos=True).forward_from_seq_len(512)
    theirs = library.apply_rotary_pos_emb(query, angles, scale), library.apply_rotary_pos_emb(key, angles, scale**-1)
    encoding = make(16, layout="interleaved")
    ours = encoding.rotate(query, key, context_of(encoding, torch.arange(512)[None]))
    assert_close(scores(*ours).tril(), scores(*theirs).tril())


def test_only_the_distance_counts_and_scores_shrink():
    encoding, query, key = make(), random(1, 1, 1, SIZE), random(1, 1, 1, SIZE, seed=1)

    def score(query_position, key_position):
        turned_query, _ = encoding.rotate(query, None, context_of(encoding, [[query_position]]))
        _, turned_key = encoding.rotate(None, key, context_of(encoding, [[key_position]]))
        return scores(turned_query, turned_key)

    for distance in (0, 3, 700):
        for start in (0, 17, 20_000):
            assert_close(score(start + distance, start), score(distance, 0), rtol=1e-9)
    same = random(1, 1, 1, SIZE).expand(1, 1, 1, SIZE)
    norms = [encoding.rotate(same, None, context_of(encoding, [[position]]))[0].norm() for position in (0, 100, 1000, 5000)]
    assert norms == sorted(norms, reverse=True) and norms[-1] < norms[0] / 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout):
    encoding, positions = make(layout=layout), [[0, 5, 900]]
    query, key = random(1, 2, 3, SIZE).requires_grad_(), random(1, 2, 3, SIZE, seed=1).requires_grad_()

    def turn(query, key):
        return encoding.rotate(query, key, context_of(encoding, positions))

    assert torch.autograd.gradcheck(turn, (query, key)) and torch.autograd.gradgradcheck(turn, (query, key))


# Range.


@pytest.mark.parametrize(("dtype", "last"), [(torch.float16, 1699), (torch.bfloat16, 33427), (torch.float32, 33427)])
def test_the_last_position_of_each_dtype(dtype, last):
    """Up to it keys of 64 are finite and queries of 1/256 keep all digits; the score is right. Beyond it is refused."""
    encoding, positions = make(), [[last - 9, last]]
    states = torch.full((1, 1, 2, SIZE), 64.0, dtype=dtype)
    small = torch.full((1, 1, 2, SIZE), 1 / 256, dtype=dtype)
    query, key = encoding.rotate(small, states, context_of(encoding, positions))
    assert query.dtype == key.dtype == dtype and key.isfinite().all()
    assert scores(torch.full_like(states, 11.0), key / 64 * 11).isfinite().all()  # of queries at 0, which a mask hides: 968
    exact = scores(turned(small, positions, 1), turned(states, positions, -1))
    precision = {torch.float16: 3e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(scores(query.double(), key.double()), exact, atol=precision * exact.max().item(), rtol=0)
    for given in ((states, None), (None, states)):
        with pytest.raises(
            ValueError, match=f"position {last + 1} is beyond {last}, .* in {dtype} .*larger scale_base"
        ) as error:
            encoding.rotate(*given, context_of(encoding, [[0, last + 1]]))
        assert ("bfloat16 or float32" in str(error.value)) == (dtype == torch.float16)


def test_elsewhere_the_number_of_tokens_counts():
    """Where values can't be read without waiting: those cached before them, too, but not twice."""
    encoding = make()

    def turn(new, past=0):
        states = torch.zeros(1, 1, new, SIZE, dtype=torch.float16, device="meta")
        context = context_of(encoding, torch.arange(new, device="meta")[None], past)
        encoding.rotate(states, None, context)
        keys = torch.zeros(1, 1, new + past, SIZE, dtype=torch.float16, device="meta")
        return encoding.rotate(None, keys, context.for_keys(new + past))[1]

    assert turn(1700).shape == (1, 1, 1700, SIZE) and turn(100, past=1600).shape == (1, 1, 1700, SIZE)
    for new, past in ((1701, 0), (1, 1700)):
        with pytest.raises(ValueError, match="position 1700 is beyond 1699"):
            turn(new, past)


def test_range_grows_with_its_options():
    assert make(scale_base=5120.0)._last(torch.float16) >= 16_990 and make(gamma=10.0)._last(torch.float16) > 20_000


def test_half_precision_is_rounded_once():
    """The scaling in float32: bfloat16 factors would be off by 0.4 %, twice."""
    encoding, positions = make(), [[1000, 1001, 1500]]
    states = random(1, 4, 3, SIZE).bfloat16()
    actual, _ = encoding.rotate(states, None, context_of(encoding, positions))
    assert torch.equal(actual, turned(states.double(), positions, 1).float().bfloat16())


# In a model.


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_and_caches(side):
    model, ids = patched("llama", "xpos", "ForCausalLM"), tokens(2, 17)
    given, mask = padded(ids, (17, 9), side)
    output = first(model(given, attention_mask=mask))
    for row, length in enumerate((17, 9)):
        assert_close(output[row][mask[row].bool()][None], first(model(ids[row : row + 1, :length])))
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=20)):
        assert_close(in_pieces(model, ids, (8, 9, 12), cache=cache), first(model(ids)))


@torch.no_grad()
def test_it_is_not_rope():
    """By as much as scores shrink over a short text: a small scale_base shows it; without limit it is rope."""
    model, ids = stock("llama"), tokens()
    rope = first(hf_posenc.patch(model, "rope")(ids))
    assert_apart(first(hf_posenc.patch(model, "xpos", scale_base=4.0)(ids)), rope)
    assert_close(first(hf_posenc.patch(model, "xpos", scale_base=1e9)(ids)), rope)


@torch.no_grad()
def test_an_input_beyond_its_range():
    model = patched("gpt2", "xpos").half()
    with pytest.raises(ValueError, match=r"position 1700 is beyond 1699.*torch.float16.*bfloat16 or float32"):
        model(tokens(1, 1701))
    with pytest.raises(ValueError, match="position 5000 is beyond 1699"):
        model(tokens(1, 2), position_ids=torch.tensor([[4999, 5000]]))


# Errors.


def test_encoders_are_refused():
    with pytest.raises(ValueError, match="'xpos' is defined for attention to earlier tokens alone"):
        hf_posenc.patch(stock("bert"), "xpos")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gamma": 0.0}, "xpos.gamma=0.0: .*above 0"),
        ({"scale_base": -1.0}, "xpos.scale_base=-1.0: .*above 0"),
        ({"theta": 1.0}, "xpos.theta=1.0: .*above 1"),
        ({"layout": "halves"}, "'half' or 'interleaved'"),
        ({"base": 5.0}, "'xpos' has no option 'base'"),
    ],
    ids=str,
)
def test_bad_options(options, said):
    with pytest.raises(ValueError, match=said):
        make(**options)


def test_odd_head_dim():
    with pytest.raises(ValueError, match="head_dim is 7, an odd number: choose an encoding which embeds or biases, or rope"):
        make(7)


def test_a_promise_beyond_what_factors_can_say():
    with pytest.raises(
        ValueError, match="max_length=50000: 'xpos' with scale_base=512.0 and gamma=0.4 goes up to position 33427"
    ):
        hf_posenc.patch(stock("gpt2"), "xpos", max_length=50000)
    assert (
        hf_posenc.patch(stock("gpt2"), "xpos", max_length=50000, scale_base=1024.0).config.position_encoding["max_length"]
        == 50000
    )
