"""Biases that are a formula of the distance: kerple, sandwich, and the sides of alibi. Against the papers' formulas in float64
loops, and against other libraries' code.

Shapes: B batch, L tokens, H heads, N distances.
"""

import math
import re

import pytest
import torch
import transformers

import hf_posenc
from closeness import assert_close, assert_equal
from hf_posenc.encodings import Geometry, build, canonical
from models import first, patched, randomize_encoding, stock, tokens

DISTANCES = [-(10**7), -4097, -511, -30, -2, -1, 0, 1, 2, 3, 30, 512, 4096, 2**24 + 1]
NEAR = list(range(-12, 13))
KERNELS = ["log", "power"]
SIDES = ["symmetric", "one_sided", "asymmetric"]


def make(kind, heads=4, is_causal=False, **options):
    return build(canonical({"type": kind, **options}), Geometry(16, heads, 4, is_causal=is_causal))


def assert_biases(encoding, oracle, distances=DISTANCES, atol=1e-5):
    """Its bias is the oracle's number for each head and distance."""
    actual = encoding.distance_bias(torch.tensor(distances))
    heads = range(encoding.geometry.num_attention_heads)
    expected = torch.tensor([[oracle(head, distance) for distance in distances] for head in heads], dtype=torch.float64)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.detach().double(), expected, atol=atol, rtol=1e-6)


def assert_gradients(encoding, oracle, distances=NEAR):
    """The gradient of `weight` is that of finite differences, oracle(weights, head, distance) with weights a list of floats."""
    upstream = torch.randn(encoding.geometry.num_attention_heads, len(distances), generator=torch.manual_seed(3))
    encoding.distance_bias(torch.tensor(distances)).backward(upstream)
    flat = encoding.weight.detach().double().flatten().tolist()

    def total(weights):
        return sum(
            upstream[head, place].item() * oracle(weights, head, distance)
            for head in range(len(upstream))
            for place, distance in enumerate(distances)
        )

    step = 1e-5
    for index, found in enumerate(encoding.weight.grad.flatten().tolist()):
        above, below = (total([value + sign * step * (other == index) for other, value in enumerate(flat)]) for sign in (1, -1))
        assert found == pytest.approx((above - below) / (2 * step), rel=1e-5, abs=1e-5)


# Kerple.


def kerple(weights, heads, kernel, head, distance):
    """-r1 · log(1 + r2 |d|) or -r1 · |d|^r2 of one head, from the flat `weight`."""
    raw1, raw2 = weights[head], weights[heads + head]
    r1 = math.log(1 + math.exp(raw1))
    if kernel == "log":
        r2 = math.log(1 + math.exp(raw2))
        return -r1 * math.log(1 + r2 * abs(distance))
    r2 = 2 / (1 + math.exp(-raw2))
    return -r1 * abs(distance) ** r2


def drawn(encoding, seed=0):
    with torch.no_grad():
        encoding.weight.copy_(torch.randn(encoding.weight.shape, generator=torch.Generator().manual_seed(seed)))
    return encoding


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_kerple_formula_and_gradients(kernel, heads):
    encoding = drawn(make("kerple", heads, kernel=kernel))
    weights = encoding.weight.detach().double().flatten().tolist()
    assert_biases(encoding, lambda head, distance: kerple(weights, heads, kernel, head, distance))
    assert_gradients(encoding, lambda weights, head, distance: kerple(weights, heads, kernel, head, distance))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("value", [-1e4, -60.0, -1.0, 0.0, 1.0, 60.0, 1e4])
def test_kerple_takes_any_parameters(kernel, value):
    """The bias is 0 at distance 0 and nowhere above, finite, with finite gradients, whatever has been learned."""
    encoding = make("kerple", kernel=kernel)
    with torch.no_grad():
        encoding.weight.fill_(value)
    bias = encoding.distance_bias(torch.tensor(DISTANCES))
    bias.sum().backward()
    assert bias.isfinite().all() and (bias <= 0).all() and (bias[:, DISTANCES.index(0)] == 0).all()
    assert encoding.weight.grad.isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_kerple_starts_as_its_authors_do(kernel):
    """r1 and r2 are uniformly distributed, so that heads differ: up to 2 and 1, or 1 and 2."""
    encoding = make("kerple", 4096, kernel=kernel)
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


def test_kerple_in_float64_and_bfloat16():
    """Parameters of half precision still give a float32 bias, for the caller to cast."""
    encoding, distance = drawn(make("kerple")), torch.tensor(DISTANCES)
    weights = encoding.weight.detach().double().flatten().tolist()
    double = encoding.double().distance_bias(distance)
    expected = [[kerple(weights, 4, "log", head, distance) for distance in DISTANCES] for head in range(4)]
    torch.testing.assert_close(double, torch.tensor(expected, dtype=torch.float64), atol=1e-8, rtol=1e-8)
    half = encoding.bfloat16()
    weights = half.weight.double().flatten().tolist()
    assert_biases(half, lambda head, distance: kerple(weights, 4, "log", head, distance))


# Sandwich.


def sinusoid(position, size, base):
    angles = [position / base ** (2 * k / size) for k in range(size // 2)]
    return [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]


@pytest.mark.parametrize(("heads", "size", "base"), [(1, 2, 10000.0), (3, 6, 50.0), (8, 64, 10000.0), (12, 128, 10000.0)])
def test_sandwich_formula(heads, size, base):
    """The inner products of the vectors of two positions, divided by 8h/H; less those of a position with itself."""
    encoding = make("sandwich", heads, size=size, base=base)

    def oracle(head, distance):
        ours, theirs = sinusoid(max(-distance, 0), size, base), sinusoid(max(distance, 0), size, base)
        product = sum(one * other for one, other in zip(ours, theirs, strict=True))
        return (product - size / 2) / (8 * (head + 1) / heads)

    assert_biases(encoding, oracle)
    assert not list(encoding.parameters())


def test_sandwich_of_the_paper_in_a_softmax():
    """The paper subtracts nothing, which softmax doesn't see; its bias falls by the distance, in the last head least."""
    heads, size, length = 12, 128, 40
    table = torch.tensor([sinusoid(position, size, 10000.0) for position in range(length)], dtype=torch.float64)
    paper = (table @ table.T) / (torch.arange(1, heads + 1) * 8 / heads)[:, None, None]
    scores = torch.randn(heads, length, length, generator=torch.manual_seed(0), dtype=torch.float64)
    index = torch.arange(length) - torch.arange(length)[:, None]
    bias = make("sandwich", heads).distance_bias(torch.arange(1 - length, length))[:, index + length - 1]
    assert_close((scores + bias).softmax(-1), (scores + paper).softmax(-1))
    falls = bias[:, 0, 0] - bias[:, 0, -1]
    assert (falls.diff() < 0).all() and falls[-1] > 1


@pytest.mark.parametrize("size", [1, 127, 8194])
def test_sandwich_refuses_odd_and_huge_sizes(size):
    with pytest.raises(ValueError, match=rf"sandwich\.size={size}: allowed is an even number up to 8192"):
        make("sandwich", size=size)


# ALiBi.


def slopes_of(heads):
    """The authors' rule, by recursion as in their code."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 * (h + 1) / heads) for h in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return slopes_of(below) + slopes_of(2 * below)[0::2][: heads - below]


@pytest.mark.parametrize("slopes", ["fixed", "learned"])
@pytest.mark.parametrize("heads", [2, 4, 5, 6, 12])
def test_one_sided_heads(heads, slopes):
    """The authors' "nonsymmetric with mask": half of the heads for earlier keys, each half with the slopes of so many heads."""
    encoding = make("alibi", heads, sides="one_sided", slopes=slopes)
    left = (heads + 1) // 2
    expected = slopes_of(left) + slopes_of(heads - left)

    def oracle(head, distance):
        unseen = distance > 0 if head < left else distance < 0
        return -1e4 if unseen else -expected[head] * abs(distance)

    assert_biases(encoding, oracle)
    assert (encoding.distance_bias(torch.tensor([0])) == 0).all()


@pytest.mark.parametrize("slopes", ["fixed", "learned"])
@pytest.mark.parametrize("heads", [1, 2, 4, 5, 8])
def test_asymmetric_slopes(heads, slopes):
    encoding = make("alibi", heads, sides="asymmetric", slopes=slopes)
    expected = slopes_of(heads)
    assert_biases(
        encoding, lambda head, distance: -expected[head] * abs(distance) * (math.sqrt(2) if distance > 0 else 1), atol=2e-5
    )
    # No two of the tokens near have the same bias, on whichever sides they are.
    for row in encoding.distance_bias(torch.arange(-64, 65)).detach():
        assert row.sort().values.diff().min() > 1e-3 * row.abs().max() / 64


@pytest.mark.parametrize("sides", SIDES)
def test_gradients_of_learned_slopes(sides):
    encoding = drawn(make("alibi", sides=sides, slopes="learned"))
    assert encoding.weight.shape == ((2, 4) if sides == "asymmetric" else (4,))

    def oracle(weights, head, distance):
        if sides == "one_sided" and (distance > 0 if head < 2 else distance < 0):
            return -1e4
        later = sides == "asymmetric" and distance > 0
        return -weights[head + 4 * later] * abs(distance)

    weights = encoding.weight.detach().double().flatten().tolist()
    assert_biases(encoding, lambda head, distance: oracle(weights, head, distance))
    assert_gradients(encoding, oracle)


@pytest.mark.parametrize("heads", [3, 8])
def test_alibi_agrees_with_x_transformers(heads):
    """Its bias is symmetric alone, with slopes of one's own, too."""
    theirs = pytest.importorskip("x_transformers.x_transformers").AlibiPositionalBias
    index = torch.arange(50) - torch.arange(50)[:, None] + 49
    every = torch.arange(-49, 50)
    assert_close(make("alibi", heads).distance_bias(every)[:, index], theirs(heads)(50, 50))
    learned = drawn(make("alibi", heads, slopes="learned"))
    own = theirs(heads, slopes=learned.weight.tolist())(50, 50)
    assert_close(learned.distance_bias(every)[:, index].detach(), own)
    # Of each side, an asymmetric one has the triangle of a symmetric one.
    asymmetric = drawn(make("alibi", heads, sides="asymmetric", slopes="learned"))
    lower, upper = (theirs(heads, slopes=row.tolist())(50, 50) for row in asymmetric.weight)
    assert_close(asymmetric.distance_bias(every)[:, index].detach(), lower.tril() + upper.triu())


def test_symmetric_alibi_is_as_it_was():
    """Weights and configs from before `sides` load, and mean the same."""
    encoding = make("alibi", 4, slopes="learned")
    assert {name: tuple(value.shape) for name, value in encoding.state_dict().items()} == {"weight": (4,)}
    encoding.load_state_dict({"weight": torch.tensor([1.0, 2.0, -3.0, 0.5])})
    expected = [[-slope * abs(distance) for distance in NEAR] for slope in (1.0, 2.0, -3.0, 0.5)]
    assert torch.equal(encoding.distance_bias(torch.tensor(NEAR)), torch.tensor(expected))
    assert canonical({"type": "alibi", "slopes": "learned", "per_layer": True})["sides"] == "symmetric"


@pytest.mark.parametrize("sides", SIDES[1:])
def test_sides_are_refused_where_there_is_one(sides):
    model = stock("gpt2")
    with pytest.raises(ValueError, match=rf"alibi\.sides='{sides}': here tokens see earlier ones alone.*leave sides out"):
        hf_posenc.patch(model, "alibi", sides=sides)
    assert type(model) is transformers.GPT2Model
    if sides == "one_sided":
        with pytest.raises(ValueError, match=r"alibi\.sides='one_sided' takes two heads or more.*'symmetric' or 'asymmetric'"):
            make("alibi", 1, sides=sides)


def bart(**changes):
    sizes = dict(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=61, max_position_embeddings=24,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BartModel(transformers.BartConfig(**sizes, **changes)).eval()


def test_sides_in_an_encoder_and_not_in_its_decoder():
    """As the error says."""
    with pytest.raises(ValueError, match=r"alibi\.sides") as error:
        hf_posenc.patch(bart(), "alibi", sides="asymmetric")
    where = re.search(r"where=(\{.*\})$", str(error.value)).group(1).replace("…", "'asymmetric'")
    model = hf_posenc.patch(bart(), "alibi", where=eval(where))
    assert model.encoder.posenc.sides == "asymmetric" and model.decoder.posenc.sides == "symmetric"


# Models.


KINDS = {
    "kerple": {"type": "kerple"},
    "kerple, power": {"type": "kerple", "kernel": "power", "per_layer": True},
    "sandwich": {"type": "sandwich"},
    "one_sided": {"type": "alibi", "sides": "one_sided"},
    "one_sided, learned": {"type": "alibi", "sides": "one_sided", "slopes": "learned", "per_layer": True},
    "asymmetric": {"type": "alibi", "sides": "asymmetric"},
    "asymmetric, learned": {"type": "alibi", "sides": "asymmetric", "slopes": "learned"},
}
ENCODERS = [name for name in KINDS if "sided" in name or "asymmetric" in name]


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", KINDS)
def test_padding_on_either_side_changes_nothing(name, backend):
    """Of a one-sided head the first token sees itself alone, or all that is behind it; never padding."""
    model = patched("bert", KINDS[name], attn_implementation=backend)
    ids = tokens(1, 9)
    expected = first(model(ids))
    for before, behind in ((4, 0), (0, 4), (3, 2)):
        padded = torch.cat([torch.full((1, before), 7), ids, torch.full((1, behind), 7)], dim=1)
        mask = torch.tensor([[0] * before + [1] * 9 + [0] * behind])
        found = first(model(padded, attention_mask=mask))
        assert found.isfinite().all()
        assert_close(found[:, before : before + 9], expected)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_one_sided_heads_see_one_side(backend):
    """With the first half of the heads at work alone, no token knows of a later one; with the other, of an earlier one."""
    ids = tokens(1, 9)
    other = ids.clone()
    other[:, 5] = 3 + (other[:, 5] - 2) % 50
    for half, same in ((slice(0, 16), slice(0, 5)), (slice(16, 32), slice(6, 9))):
        model = patched("bert", KINDS["one_sided"], attn_implementation=backend)
        with torch.no_grad():
            for layer in model.encoder.layer:
                kept = layer.attention.output.dense.weight[:, half].clone()
                layer.attention.output.dense.weight.zero_()[:, half] = kept
        before, after = first(model(ids)), first(model(other))
        assert_equal(after[:, same], before[:, same])
        moved = (after - before).abs().amax(-1)[0] > 1e-6
        assert moved.sum() == 9 - (same.stop - same.start)


@pytest.mark.parametrize("name", ENCODERS)
def test_sides_tell_a_text_from_its_reverse(name):
    """A symmetric bias doesn't: the states of a reversed text are those of the text, reversed."""
    ids = tokens(1, 9)
    for encoding, differ in ((KINDS[name], True), ("alibi", False)):
        model = patched("bert", encoding)
        gap = (first(model(ids.flip(1))).flip(1) - first(model(ids))).abs().max()
        assert gap > 1e-3 if differ else gap < 1e-5


@pytest.mark.parametrize("name", ENCODERS)
def test_sides_by_every_way_of_computing(name):
    """At 300 tokens SDPA reads the bias in other ways than eager attention: with gradients, without, padded."""
    model, ids = patched("bert", KINDS[name]), tokens(2, 300)
    mask = torch.ones(2, 300, dtype=torch.long)
    mask[0, :20] = mask[1, 290:] = 0
    results, gradients = [], []
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        with torch.no_grad():
            results.append(first(model(ids, attention_mask=mask))[mask.bool()])
        model.zero_grad()
        with_gradients = first(model(ids, attention_mask=mask))[mask.bool()]
        assert_close(with_gradients.detach(), results[0])
        with_gradients.square().sum().backward()
        gradients.append({name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None})
    assert_close(results[1], results[0])
    assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-4)
    assert any("posenc" in name for name in gradients[0]) == ("learned" in name)


def test_cross_attention_of_one_sided_heads_sees_no_padding():
    """Queries behind the last key have none on one side: their heads take the keys there are."""
    model = hf_posenc.patch(bart(), "alibi", where={"cross": KINDS["one_sided, learned"], "encoder": "none", "decoder": "none"})
    randomize_encoding(model)
    source, target = tokens(1, 5), tokens(1, 12)
    states = model.encoder(source)[0]
    expected = model.decoder(target, encoder_hidden_states=states)[0]
    padded = torch.cat([states, torch.full((1, 3, 32), 5.0)], dim=1)
    mask = torch.tensor([[1] * 5 + [0] * 3])
    found = model.decoder(target, encoder_hidden_states=padded, encoder_attention_mask=mask)[0]
    assert found.isfinite().all()
    assert_close(found, expected)


@pytest.mark.parametrize("name", ["kerple", "kerple, power", "sandwich"])
def test_cached_decoding_far_beyond_the_trained_length(name):
    model, ids = patched("gpt2", KINDS[name]), tokens(1, 60)
    expected = first(model(ids))
    start = model(ids[:, :50], use_cache=True)
    found = [model(ids[:, 50:53], past_key_values=start.past_key_values)]
    found += [model(ids[:, i : i + 1], past_key_values=start.past_key_values) for i in range(53, 60)]
    assert_close(torch.cat([first(step) for step in found], dim=1), expected[:, 50:])
