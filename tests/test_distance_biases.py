"""Biases that are a formula or a table of the distance: alibi, relative, t5, kerple, and sandwich.

The tests compare them with the papers' formulas in float64 loops, and with other libraries.

Shapes: H heads, N distances.
"""

import math
import re

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

import hf_posenc
from closeness import assert_close, assert_equal
from models import first, patched, randomize_encoding, tiny, tokens
from oracles import drawn, make

DISTANCES = [-(10**7), -4097, -511, -30, -2, -1, 0, 1, 2, 3, 30, 512, 4096, 2**24 + 1]
NEAR = list(range(-12, 13))
KERNELS = ["log", "power"]
SIDES = ["symmetric", "one_sided", "asymmetric"]


def assert_biases(encoding, oracle):
    """The bias equals `oracle(weight, head, distance)` in float64, and so does the gradient of `weight`."""
    weight = encoding.weight.detach().double().requires_grad_() if hasattr(encoding, "weight") else torch.zeros(())
    for distances in (DISTANCES, NEAR):
        actual = encoding.distance_bias(torch.tensor(distances))
        heads = range(encoding.geometry.num_attention_heads)
        expected = torch.stack([torch.as_tensor(oracle(weight, h, d)).double() for h in heads for d in distances])
        assert actual.dtype == torch.float32 and actual.shape == (len(heads), len(distances))
        torch.testing.assert_close(actual.flatten().double(), expected, atol=2e-5, rtol=1e-6)
    if weight.requires_grad:
        upstream = torch.randn(len(expected), generator=torch.manual_seed(3))
        (found,) = torch.autograd.grad(actual.flatten() @ upstream, encoding.weight)
        (right,) = torch.autograd.grad(expected @ upstream.double(), weight)
        assert_close(found.double(), right, rtol=1e-5)


# ALiBi.


def slopes_of(heads):
    """The authors' rule, recursive as in their code."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 * (h + 1) / heads) for h in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return slopes_of(below) + slopes_of(2 * below)[0::2][: heads - below]


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("heads", [1, 2, 5, 8, 12])
def test_alibi(heads, sides):
    """The biases follow the authors' rule. `one_sided` is the authors' "nonsymmetric with mask". Half of the heads act on
    earlier keys, and each half has the slopes of its number of heads.

    Learned slopes start as the fixed ones.
    """
    if (heads, sides) == (1, "one_sided"):
        with pytest.raises(ValueError, match=r"alibi\.sides='one_sided' needs.*two heads.*'symmetric' or 'asymmetric'"):
            make("alibi", heads=1, sides=sides)
        return
    left = (heads + 1) // 2
    fixed = slopes_of(left) + slopes_of(heads - left) if sides == "one_sided" else slopes_of(heads)

    def oracle(weight, head, distance):
        if sides == "one_sided" and (distance > 0 if head < left else distance < 0):
            return -1e4
        later = sides == "asymmetric" and distance > 0
        if weight.dim():
            return -weight.reshape(-1)[head + heads * later] * abs(distance)
        return -fixed[head] * abs(distance) * (math.sqrt(2) if later else 1)

    encoding, learned = make("alibi", heads=heads, sides=sides), make("alibi", heads=heads, sides=sides, slopes="learned")
    assert not list(encoding.parameters())
    assert learned.weight.shape == ((2, heads) if sides == "asymmetric" else (heads,))
    assert_biases(encoding, oracle)
    assert_close(learned.distance_bias(torch.tensor(NEAR)), encoding.distance_bias(torch.tensor(NEAR)))
    assert_biases(drawn(learned), oracle)
    if sides == "asymmetric":  # no two nearby tokens have the same bias, on either side
        for row in encoding.distance_bias(torch.arange(-64, 65)):
            assert row.sort().values.diff().min() > 1e-3 * row.abs().max() / 64


@pytest.mark.parametrize("heads", range(1, 17))
def test_alibi_agrees_with_bloom_and_mpt(heads):
    """Both libraries compute the row of a causal mask: m·j, and m·(j - last). A softmax makes them equal."""
    bias = make("alibi", heads=heads).distance_bias(torch.arange(-19, 1))
    torch.testing.assert_close(bias, build_mpt_alibi_tensor(heads, 20)[:, 0], atol=1e-6, rtol=1e-6)
    bloom = build_alibi_tensor(torch.ones(1, 20, dtype=torch.long), heads, torch.float32)[:, 0]
    torch.testing.assert_close(bias.softmax(-1), bloom.softmax(-1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("heads", [3, 8])
def test_alibi_agrees_with_x_transformers(heads):
    """The bias of x-transformers is always symmetric. It accepts given slopes also."""
    theirs = pytest.importorskip("x_transformers.x_transformers").AlibiPositionalBias
    index = torch.arange(50) - torch.arange(50)[:, None] + 49
    every = torch.arange(-49, 50)
    assert_close(make("alibi", heads=heads).distance_bias(every)[:, index], theirs(heads)(50, 50))
    learned = make("alibi", heads=heads, slopes="learned", seed=0)
    own = theirs(heads, slopes=learned.weight.tolist())(50, 50)
    assert_close(learned.distance_bias(every)[:, index].detach(), own)
    # Each side of an asymmetric bias equals the triangle of a symmetric bias.
    asymmetric = make("alibi", heads=heads, sides="asymmetric", slopes="learned", seed=0)
    lower, upper = (theirs(heads, slopes=row.tolist())(50, 50) for row in asymmetric.weight)
    assert_close(asymmetric.distance_bias(every)[:, index].detach(), lower.tril() + upper.triu())


def test_sides_are_refused_where_there_is_one():
    """The error recommends a setting for encoder-decoder models, which works."""
    bart = tiny("BartModel")
    for sides in SIDES[1:]:
        with pytest.raises(ValueError, match=rf"alibi\.sides='{sides}' .*causal attention") as error:
            hf_posenc.patch(bart, "alibi", sides=sides)
    where = re.search(r"where=(\{.*\})\.$", str(error.value)).group(1).replace("…", "'asymmetric'")
    model = hf_posenc.patch(bart, "alibi", where=eval(where))
    assert model.encoder.posenc.sides == "asymmetric" and model.decoder.posenc.sides == "symmetric"


ONE_SIDED = {"type": "alibi", "sides": "one_sided", "slopes": "learned", "per_layer": True}


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_one_sided_heads_see_one_side(backend):
    """If only the first half of the heads is active, no token depends on later tokens. With the other half, none depends on
    earlier tokens.

    Tokens that see only themselves don't see padding.
    """
    ids = tokens(1, 9)
    other = ids.clone()
    other[:, 5] = 3 + (other[:, 5] - 2) % 50
    for half, same in ((slice(0, 16), slice(0, 5)), (slice(16, 32), slice(6, 9))):
        model = patched("bert", ONE_SIDED, attn_implementation=backend)
        for layer in model.encoder.layer:
            kept = layer.attention.output.dense.weight[:, half].clone()
            layer.attention.output.dense.weight.zero_()[:, half] = kept
        before, after = first(model(ids)), first(model(other))
        assert_equal(after[:, same], before[:, same])
        moved = (after - before).abs().amax(-1)[0] > 1e-6
        assert moved.sum() == 9 - (same.stop - same.start)
        padded = torch.nn.functional.pad(ids, (3, 2), value=7)
        found = first(model(padded, attention_mask=torch.tensor([[0] * 3 + [1] * 9 + [0] * 2])))
        assert found.isfinite().all()
        assert_close(found[:, 3:12], before)


@torch.no_grad()
def test_cross_attention_of_one_sided_heads_sees_no_padding():
    """Queries after the last key have no keys on one side. Their heads see all keys."""
    model = hf_posenc.patch(tiny("BartModel"), "alibi", where={"cross": ONE_SIDED, "encoder": "none", "decoder": "none"})
    randomize_encoding(model)
    states, target = model.encoder(tokens(1, 5))[0], tokens(1, 12)
    expected = model.decoder(target, encoder_hidden_states=states)[0]
    padded = torch.nn.functional.pad(states, (0, 0, 0, 3), value=5.0)
    mask = torch.tensor([[1] * 5 + [0] * 3])
    found = model.decoder(target, encoder_hidden_states=padded, encoder_attention_mask=mask)[0]
    assert_close(found, expected)


# Tables.


@pytest.mark.parametrize("max_distance", [1, 3, 20])
def test_relative(max_distance):
    """The bias is R in softmax((QKᵀ + R) / √E)."""
    torch.manual_seed(0)
    encoding = make("relative", heads=300, max_distance=max_distance)
    weight = encoding.weight.detach()
    assert weight.std().item() == pytest.approx(0.02, rel=0.1) and abs(weight.mean()) < 0.002
    encoding = make("relative", heads=3, max_distance=max_distance, seed=0)
    assert encoding.weight.shape == (3, 2 * max_distance + 1)
    assert_biases(encoding, lambda weight, h, d: weight[h, max(-max_distance, min(max_distance, d)) + max_distance] / 8**0.5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (4, 5), (8, 200), (12, 13), (64, 1000)])
def test_t5_agrees_with_transformers(num_buckets, max_distance, is_causal):
    """The buckets are equal at any distance. So are the bias of new queries after cached keys, and the gradient
    of each bucket.
    """
    encoding = make("t5", is_causal=is_causal, num_buckets=num_buckets, max_distance=max_distance, seed=0)
    distance = torch.cat([torch.arange(-3000, 3001), torch.tensor([-(10**9), 10**9])])
    expected = T5Attention._relative_position_bucket(distance, not is_causal, num_buckets, max_distance)
    assert torch.equal(encoding.rows(distance), expected) and not encoding.rows(distance).is_floating_point()
    assert set(expected.tolist()) == set(range(num_buckets)) - ({num_buckets // 2} if not is_causal else set())

    sizes = dict(relative_attention_num_buckets=num_buckets, relative_attention_max_distance=max_distance)
    config = T5Config(d_model=16, num_heads=4, is_decoder=is_causal, **sizes)
    theirs = T5Attention(config, has_relative_attention_bias=True)
    with torch.no_grad():
        theirs.relative_attention_bias.weight.copy_(encoding.weight)
    bias = theirs.compute_bias(5, 40, torch.device("cpu"), past_seen_tokens=35)[0]
    index = torch.arange(40)[None, :] - torch.arange(35, 40)[:, None]
    ours = encoding.distance_bias(index.flatten()).unflatten(-1, (5, 40))
    assert torch.equal(ours, bias)
    upstream = torch.randn(bias.shape, generator=torch.manual_seed(3))
    (found,) = torch.autograd.grad((ours * upstream).sum(), encoding.weight)
    assert_close(found, torch.autograd.grad((bias * upstream).sum(), theirs.relative_attention_bias.weight)[0])


def test_t5_agrees_with_mpnet_and_starts_as_t5_does():
    distance = torch.arange(-600, 601)
    assert torch.equal(make("t5").rows(distance), MPNetEncoder.relative_position_bucket(distance))
    torch.manual_seed(0)
    weight = make("t5", hidden_size=64, heads=100).weight.detach()
    assert weight.shape == (32, 100) and weight.std().item() == pytest.approx(64**-0.5, rel=0.05)


# Kerple.


def kerple(kernel):
    """-r1 · log(1 + r2 |d|) or -r1 · |d|^r2, from the raw values in `weight`."""

    def bias(weight, head, distance):
        r1, far = (1 + weight[0, head].exp()).log(), torch.tensor(float(abs(distance)), dtype=torch.float64)
        if kernel == "log":
            return -r1 * (1 + (1 + weight[1, head].exp()).log() * far).log()
        return -r1 * (2 / (1 + (-weight[1, head]).exp()) * far.log()).exp() if distance else 0 * r1

    return bias


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_kerple(kernel, heads):
    """With half-precision parameters, the bias is still float32, so that the caller can cast it."""
    encoding = make("kerple", heads=heads, kernel=kernel, seed=0)
    assert_biases(encoding, kerple(kernel))
    with torch.no_grad():
        double, distance = encoding.double(), torch.tensor(DISTANCES)
        expected = [[kerple(kernel)(double.weight, h, d).item() for d in DISTANCES] for h in range(heads)]
        torch.testing.assert_close(double.distance_bias(distance), torch.tensor(expected).double(), atol=1e-4, rtol=1e-6)
        half = encoding.bfloat16().distance_bias(distance)
        assert torch.equal(half, encoding.float().distance_bias(distance)) and half.dtype == torch.float32


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("value", [-1e4, -60.0, -1.0, 0.0, 1.0, 60.0, 1e4])
def test_kerple_takes_any_parameters(kernel, value):
    """For any parameters, the bias is 0 at distance 0, never positive, and finite. Its gradients are finite."""
    encoding = make("kerple", kernel=kernel)
    with torch.no_grad():
        encoding.weight.fill_(value)
    bias = encoding.distance_bias(torch.tensor(DISTANCES))
    bias.sum().backward()
    assert bias.isfinite().all() and (bias <= 0).all() and (bias[:, DISTANCES.index(0)] == 0).all()
    assert encoding.weight.grad.isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_kerple_starts_as_its_authors_do(kernel):
    """r1 and r2 are uniformly distributed, so that heads differ. Their upper bounds are 2 and 1, or 1 and 2."""
    encoding = make("kerple", heads=4096, kernel=kernel)
    bias = encoding.distance_bias(torch.tensor([1, 2])).detach().double()
    if kernel == "log":
        first, second = torch.nn.functional.softplus(encoding.weight.detach().double())
    else:
        first, second = -bias[:, 0], (bias[:, 1] / bias[:, 0]).log2()
    for values, limit in ((first, 2 if kernel == "log" else 1), (second, 1 if kernel == "log" else 2)):
        assert 0 < values.min() < 0.02 * limit and 0.98 * limit < values.max() <= limit
        assert values.mean() == pytest.approx(limit / 2, rel=0.05) and len(values.unique()) > 4000
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.1


def test_kerple_with_exponent_one_is_alibi():
    encoding, slopes = make("kerple", kernel="power"), torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])
    with torch.no_grad():
        encoding.weight[0] = slopes.expm1().log()
        encoding.weight[1] = 0.0
    distance = torch.tensor(NEAR)
    assert_close(encoding.distance_bias(distance), make("alibi").distance_bias(distance))


# Sandwich.


def sinusoid(position, size, base):
    angles = [position / base ** (2 * k / size) for k in range(size // 2)]
    return [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]


@pytest.mark.parametrize(("heads", "size", "base"), [(1, 2, 10000.0), (3, 6, 50.0), (8, 64, 10000.0), (12, 128, 10000.0)])
def test_sandwich(heads, size, base):
    """The bias is the inner product of two positions' vectors, minus that of a position with itself, divided by 8h/H."""

    def oracle(_, head, distance):
        ours, theirs = sinusoid(max(-distance, 0), size, base), sinusoid(max(distance, 0), size, base)
        product = sum(one * other for one, other in zip(ours, theirs, strict=True))
        return (product - size / 2) / (8 * (head + 1) / heads)

    encoding = make("sandwich", heads=heads, size=size, base=base)
    assert_biases(encoding, oracle)
    assert not list(encoding.parameters())


def test_sandwich_of_the_paper_in_a_softmax():
    """The paper doesn't subtract the constant, which softmax ignores. Its bias decreases with the distance, and least in the
    last head.
    """
    heads, size, length = 12, 128, 40
    table = torch.tensor([sinusoid(position, size, 10000.0) for position in range(length)], dtype=torch.float64)
    paper = (table @ table.T) / (torch.arange(1, heads + 1) * 8 / heads)[:, None, None]
    scores = torch.randn(heads, length, length, generator=torch.manual_seed(0), dtype=torch.float64)
    index = torch.arange(length) - torch.arange(length)[:, None]
    bias = make("sandwich", heads=heads).distance_bias(torch.arange(1 - length, length))[:, index + length - 1]
    assert_close((scores + bias).softmax(-1), (scores + paper).softmax(-1))
    falls = bias[:, 0, 0] - bias[:, 0, -1]
    assert (falls.diff() < 0).all() and falls[-1] > 1
