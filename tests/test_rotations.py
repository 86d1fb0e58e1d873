"""Rotations of queries and keys: rope with Transformers' frequency rules and with a part of the features, xpos, pope, and fope.

The tests compare them with float64 loops from the papers, other libraries, and original models with the same rotation.

Shapes: B batch, H heads, L tokens, E head_dim.
"""

import cmath
import functools
import math
import re

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.models.gptj import modeling_gptj
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention, RoFormerSinusoidalPositionalEmbedding

import hf_posenc
import oracles
from closeness import assert_apart, assert_close, assert_equal
from models import CACHE, DECODER, LLAMA, Host, first, patched, randomize_encoding, stock, tiny, tokens
from oracles import context_of, in_pieces, padded, random, turned

LONG = 16
"""The trained length of these models."""


PAIRS = 4


RULES = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 3.0, "original_max_position_embeddings": 500},
    "longrope": {
        "factor": 3.0,
        "original_max_position_embeddings": LONG,
        "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
    "llama3": {"factor": 3.0, "original_max_position_embeddings": 500, "low_freq_factor": 1.0, "high_freq_factor": 9.0},
    "proportional": {"partial_rotary_factor": 0.5},
}


BY_LENGTH = ("dynamic", "longrope")


LAYOUTS = ["half", "interleaved"]


make = functools.partial(oracles.make, hidden_size=32, head_dim=2 * PAIRS, is_causal=True, trained=LONG)


def rope(rule="default", **options):
    return make("rope", rope_type=rule, **options)


def llama(layers=2, prefix="Llama", **changes):
    sizes = dict(LLAMA, max_position_embeddings=LONG, head_dim=2 * PAIRS, num_hidden_layers=layers)
    return stock(Host(prefix, sizes | changes, **DECODER))


def with_rule(rule, layers=2):
    """An original model with a rule, and the patched one."""
    model = llama(layers, rope_parameters={"rope_type": rule, "rope_theta": 10000.0, **RULES[rule]})
    return model, hf_posenc.patch(model, "rope", rope_type=rule, **RULES[rule])


def scores(query, key):
    return query @ key.mT


def rotated(encoding, query, key, positions):
    return encoding("rotate", query, key, context_of(encoding, positions))


# Reference implementations.


def yarn(theta, size, factor, original, beta_fast=32.0, beta_slow=1.0, truncate=True):
    """The paper's "NTK-by-parts" frequencies, with the ramp over pairs of its authors' code."""

    def pair_of(turns):  # the fractional index of the pair that makes this many rotations in the original length
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(beta_fast), pair_of(beta_slow)
    low, high = (math.floor(low), math.ceil(high)) if truncate else (low, high)
    low, high = max(low, 0), min(high, size - 1)
    steps = []
    for pair in range(size // 2):
        slowed = min(max((pair - low) / (high - low), 0.0), 1.0)
        plain = theta ** (-2 * pair / size)
        steps.append(plain * (1 - slowed) + plain / factor * slowed)
    return steps


def llama3(theta, size, factor, original, low, high):
    steps = []
    for pair in range(size // 2):
        plain = theta ** (-2 * pair / size)
        turns = original * plain / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        steps.append(plain * kept + plain / factor * (1 - kept))
    return steps


def dynamic(theta, size, factor, original, length):
    if length > original:
        theta *= (factor * length / original - factor + 1) ** (size / (size - 2))
    return [theta ** (-2 * pair / size) for pair in range(size // 2)]


def steps_of(rule, theta, length):
    """The frequencies of 4 pairs with the parameters in RULES, for a text of this length."""
    plain, size = [theta ** (-pair / PAIRS) for pair in range(PAIRS)], 2 * PAIRS
    if rule == "linear":
        return [step / 3 for step in plain]
    if rule == "dynamic":
        return dynamic(theta, size, 3.0, LONG, length)
    if rule == "yarn":
        return yarn(theta, size, 3.0, 500)
    if rule == "longrope":
        factors = RULES["longrope"]["long_factor" if length > LONG else "short_factor"]
        return [step / factor for step, factor in zip(plain, factors, strict=True)]
    if rule == "llama3":
        return llama3(theta, size, 3.0, 500, 1.0, 9.0)
    if rule == "proportional":
        return [*plain[:2], 0.0, 0.0]
    return plain


MAGNITUDES = {"yarn": 0.1 * math.log(3) + 1, "longrope": math.sqrt(1 + math.log(3) / math.log(LONG))}


def by_steps(positions, steps, magnitude=1.0):
    """A function that returns the complex factor of each pair. steps: the frequencies of each row."""
    return lambda b, h, i, pair: magnitude * cmath.exp(1j * positions[b][i] * steps[b][pair])


def xpos(positions, sign, theta=10000.0, gamma=0.4, scale_base=512.0):
    def turn(b, h, i, pair):
        position, part = positions[b][i], pair / PAIRS
        stretch = ((part + gamma) / (1 + gamma)) ** (sign * position / scale_base)
        return stretch * cmath.exp(1j * position * theta**-part)

    return turn


# RoPE and its rules.

POSITIONS = {
    "short": [[0, 1, 2, 3], [4, 5, 6, 15]],
    "short and long": [[0, 1, 2, 3], [13, 14, 15, 16]],
    "right padding": [[0, 1, 1, 1], [500, 501, 502, 503]],
    "far": [[10**7, 2**24 + 1, 9, 2], [1, 7, 7, 100_000]],
}


def test_frequencies_that_diagnostics_read():
    encoding = make("xpos")
    size = encoding.geometry.head_dim
    assert_close(encoding.angular_frequencies(9), 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_formula(rule, layout):
    """Float64 states are rotated with float64 precision at any position. The frequencies aren't the float32 ones of
    Transformers.
    """
    for theta in (10000.0, 500.0):
        encoding = rope(rule, theta=theta, layout=layout, **RULES[rule])
        query, key = random(2, 3, 4, 8), random(2, 2, 4, 8, seed=1)
        for positions in POSITIONS.values():
            turn = by_steps(positions, [steps_of(rule, theta, max(row) + 1) for row in positions], MAGNITUDES.get(rule, 1.0))
            both = rotated(encoding, query, key, positions)
            alone = rotated(encoding, query, None, positions)[0], rotated(encoding, None, key, positions)[1]
            for ours, states, one in zip(both, (query, key), alone, strict=True):
                expected = turned(states, turn, layout)
                torch.testing.assert_close(ours, expected, atol=1e-7, rtol=0)
                assert torch.equal(ours, one)
                for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 0.05)):
                    found, _ = rotated(encoding, states.to(dtype), None, positions)
                    assert found.dtype == dtype
                    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("part", [1.0, 0.5])
def test_interleaved_agrees_with_gptj_and_roformer(part):
    states, encoding = (
        random(1, 4, 64, 16, dtype=torch.float32),
        rope(head_dim=16, layout="interleaved", partial_rotary_factor=part),
    )
    actual, _ = rotated(encoding, states, None, torch.arange(64)[None])
    width = int(16 * part)
    sin, cos = modeling_gptj.create_sinusoidal_positions(64, width)[None].chunk(2, dim=-1)
    theirs = modeling_gptj.apply_rotary_pos_emb(states[..., :width].transpose(1, 2), sin, cos).transpose(1, 2)
    torch.testing.assert_close(actual, torch.cat([theirs, states[..., width:]], dim=-1), atol=2e-5, rtol=0)
    if part == 1.0:
        table = RoFormerSinusoidalPositionalEmbedding(64, 16).create_weight()[None, None]
        theirs, _ = RoFormerSelfAttention.apply_rotary_position_embeddings(table, states, states)
        torch.testing.assert_close(actual, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "options", [{"beta_fast": 9.0, "beta_slow": 0.5}, {"truncate": False}, {"beta_fast": 12.0, "truncate": False}], ids=str
)
def test_yarn_ramps(options):
    encoding, states, positions = rope("yarn", **RULES["yarn"], **options), random(1, 1, 3, 8), [[1, 9, 400]]
    expected = turned(states, by_steps(positions, [yarn(10000.0, 8, 3.0, 500, **options)], MAGNITUDES["yarn"]))
    torch.testing.assert_close(rotated(encoding, states, None, positions)[0], expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("rule", "options", "expected"),
    [
        ("yarn", {"attention_factor": 1.7}, 1.7),
        ("yarn", {"mscale": 0.7, "mscale_all_dim": 0.4}, (0.07 * math.log(3) + 1) / (0.04 * math.log(3) + 1)),
        ("longrope", {"attention_factor": 0.6}, 0.6),
        ("longrope", {"factor": None, "original_max_position_embeddings": 4}, math.sqrt(1 + math.log(4) / math.log(4))),
        ("longrope", {"factor": None, "original_max_position_embeddings": None}, 1.0),
    ],
)
def test_temperature(rule, options, expected):
    """The factor on queries and keys at position 0."""
    encoding = rope(rule, **{**RULES[rule], **options})
    query = random(1, 2, 1, 8)
    assert_close(encoding.rotate(query, None, context_of(encoding, [[0]]))[0], query * expected, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_a_stock_llama_with_that_rule(rule):
    """The outputs are equal up to position 512, below and above the trained length, also after saving and loading."""
    sizes = {"max_position_embeddings": LONG} if rule in BY_LENGTH else {"max_position_embeddings": 600}
    model = llama(rope_parameters={"rope_type": rule, "rope_theta": 10000.0, **RULES[rule]}, **sizes)
    new = hf_posenc.patch(model, "rope", rope_type=rule, **RULES[rule])
    for length in (9, LONG, LONG + 1, 512):
        ids = tokens(1, length)
        assert_close(first(new(ids)), first(model(ids)))
    if rule != "default":
        assert_apart(first(hf_posenc.patch(model, "rope")(ids)), first(model(ids)))


@torch.no_grad()
def test_the_trained_length_stays_when_the_promise_changes():
    """For a model from scratch, it is the length in the config, until `extend` changes that."""
    options = {"type": "rope", "rope_type": "longrope", "short_factor": [1.0] * PAIRS, "long_factor": [2.0] * PAIRS}
    sizes = {name: value for name, value in LLAMA.items() if name != "num_attention_heads"}
    sizes |= dict(num_attention_heads=4, vocab_size=61, max_position_embeddings=LONG)
    config = hf_posenc.PosEncLlamaConfig(**sizes, position_encoding={**options, "max_length": LONG})
    model = hf_posenc.PosEncLlamaModel(config).eval()
    longer = hf_posenc.extend(model, max_length=4 * LONG)
    assert longer.config.position_encoding["original_max_position_embeddings"] == LONG
    assert longer.config.position_encoding["factor"] == 1.0
    assert_equal(first(longer(tokens(1, 12))), first(model(tokens(1, 12))))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("part", "size", "head_dim"), [(0.5, 4, 8), (0.25, 2, 8), (0.75, 6, 8), (0.8, 6, 8), (0.9, 8, 9)])
def test_partial_rotation(layout, part, size, head_dim):
    encoding = rope(head_dim=head_dim, partial_rotary_factor=part, layout=layout)
    states, positions = random(1, 2, 4, head_dim), [[3, 0, 700, 10**6]]
    turn = by_steps(positions, [[10000 ** (-2 * pair / size) for pair in range(size // 2)]])
    actual, _ = rotated(encoding, states, None, positions)
    torch.testing.assert_close(actual, turned(states, turn, layout, width=size), atol=1e-9, rtol=0)
    assert torch.equal(actual[..., size:], states[..., size:])


@pytest.mark.parametrize("prefix", ["GPTNeoX", "StableLm", "Phi"])
@torch.no_grad()
def test_a_stock_model_that_rotates_a_part(prefix):
    part = {"rotary_pct": 0.5} if prefix == "GPTNeoX" else {"partial_rotary_factor": 0.5}
    model = stock(Host(prefix, dict(LLAMA, max_position_embeddings=LONG, num_key_value_heads=4, **part), **DECODER))
    ids = tokens(2, 14)
    assert_close(first(hf_posenc.patch(model, "rope", partial_rotary_factor=0.5)(ids)), first(model(ids)))
    assert_apart(first(hf_posenc.patch(model, "rope")(ids)), first(model(ids)))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("rope", {}),
        ("rope", {"layout": "interleaved", "partial_rotary_factor": 0.5}),
        ("rope", {"rope_type": "yarn", **RULES["yarn"]}),
        ("xpos", {}),
        ("xpos", {"layout": "interleaved"}),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own jvp calls it
def test_gradients(kind, options):
    """First and second gradients equal finite differences. Forward mode works, and mapping over a dimension equals a loop."""
    encoding, states = make(kind, **options), random(2, 1, 1, 3, 8).requires_grad_()

    def turn(states):
        return sum(rotated(encoding, states, states.flip(-1), [[1, 5, 40]]))

    assert torch.autograd.gradcheck(turn, states[0], check_forward_ad=kind == "rope")
    assert torch.autograd.gradgradcheck(turn, states[0])
    if kind == "rope":
        looped, weights = torch.stack([turn(each) for each in states]), random(*states.shape, seed=1)
        assert_close(torch.func.vmap(turn)(states), looped)
        gradients = torch.func.vmap(torch.func.grad(lambda each, weight: (turn(each) * weight).sum()))(states, weights)
        assert_close(gradients, torch.autograd.grad((looped * weights).sum(), states)[0])
        assert_close(torch.func.jvp(turn, (states[0],), (states[1],))[1], looped[1])  # it is linear


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own jvp calls it
@pytest.mark.parametrize(
    ("host", "encoding"),
    [("bert", {"type": "fope", "coefficients": "learned"}), ("vit", {"type": "rope_2d", "frequencies": "mixed"})],
)
def test_forward_derivatives_of_trained_rotations(host, encoding):
    """They equal the product with the gradient. Parameters may be frozen, because torch.func gets them as arguments."""
    model = randomize_encoding(hf_posenc.patch(stock(host), encoding)).double()
    model.set_attn_implementation("eager")
    given = random(1, 3, 32, 32) if host == "vit" else tokens(1)
    parameters = {name: each.detach() for name, each in model.named_parameters() if "posenc" in name}
    weights, change = random(*first(model(given)).shape), {name: random(*each.shape) for name, each in parameters.items()}

    def weighted(parameters):
        return (first(torch.func.functional_call(model, parameters, (given,))) * weights).sum()

    expected = sum((each * change[name]).sum() for name, each in torch.func.grad(weighted)(parameters).items())
    assert expected.abs() > 1e-4
    for frozen in (False, True):
        model.requires_grad_(not frozen)
        assert_close(torch.func.jvp(weighted, (parameters,), (change,))[1], expected)


# Rules that depend on the length of each text.


@pytest.mark.parametrize("rule", BY_LENGTH)
@torch.no_grad()
def test_each_row_has_its_length(rule):
    """Padding and a longer row change nothing: each row gives the output of the original Llama for this row alone."""
    (model, new), lengths, ids = with_rule(rule), (30, 11), tokens(2, 30)
    for side in ("left", "right"):
        given, mask = padded(ids, lengths, side)
        output = first(new(given, attention_mask=mask))
        for row, length in enumerate(lengths):
            assert_close(output[row][mask[row].bool()][None], first(model(ids[row : row + 1, :length])))


@pytest.mark.parametrize("rule", BY_LENGTH)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("layers", [1, 2])
@torch.no_grad()
def test_cached_keys_are_rotated_anew(rule, static, layers):
    """Each step equals the forward pass over all previous tokens, while the text grows over the trained length.

    In one layer, this is exact. In several layers, the cache has hidden states of the shorter text, so it holds after all
    tokens are beyond it (longrope).
    """
    (_, new), ids = with_rule(rule, layers), tokens(2, 30)
    cuts = (9, 15, 16, 17, 18, 25, 30) if layers == 1 else (20, 21, 25, 30) if rule == "longrope" else (9, 12, 15, 16)
    mask = torch.ones_like(ids)
    mask[0, : 3 if layers == 1 else 0] = 0
    cache = StaticCache(config=new.config, max_cache_len=34) if static else DynamicCache(config=new.config)
    assert_steps(new, ids, cuts, cache, mask)


def assert_steps(model, ids, cuts, cache, mask=None):
    mask, before = torch.ones_like(ids) if mask is None else mask, 0
    for stop in cuts:
        step = first(model(ids[:, before:stop], attention_mask=mask[:, :stop], **{CACHE: cache}, use_cache=True))
        real = mask[:, before:stop].bool()
        assert_close(step[real], first(model(ids[:, :stop], attention_mask=mask[:, :stop]))[:, before:][real])
        before = stop


@pytest.mark.parametrize("case", ["sliding window", "composition"])
@torch.no_grad()
def test_length_of_a_whole_text(case):
    """The cache of a sliding window has dropped the first keys."""
    if case == "composition":
        new = hf_posenc.patch(llama(1), "rope+alibi", rope__rope_type="dynamic", rope__factor=3.0)
    else:
        new = hf_posenc.patch(llama(1, "Mistral", sliding_window=6), "rope", rope_type="dynamic", factor=3.0)
    assert_steps(new, tokens(2, 24), (8, 9, 16, 17, 24), DynamicCache(config=new.config))


@torch.no_grad()
def test_rules_without_length_store_rotated_keys():
    ids = tokens(1, 20)
    for rule in ("linear", "yarn", "llama3", "proportional"):
        new = hf_posenc.patch(llama(), "rope", rope_type=rule, **RULES[rule])
        assert_close(in_pieces(new, ids, (9, 15, 16, 17)), first(new(ids)))


def test_continuous_batching():
    model = stock(Host("Llama", dict(LLAMA, max_position_embeddings=LONG, head_dim=8), **DECODER), "ForCausalLM")
    new = hf_posenc.patch(model, "rope", rope_type="dynamic", factor=3.0)
    settings = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with pytest.raises(ValueError, match="rotates all keys again.*model.generate"):
        new.generate_batch([[5, 6, 7]], generation_config=settings)
    with pytest.raises(ValueError, match="rotates all keys again.*model.generate"):
        new(tokens(1, 5), read_index=[])


@pytest.mark.parametrize(
    "options",
    [{"rope_type": "dynamic", "factor": 3.0, "partial_rotary_factor": 0.75}, {"rope_type": "longrope", **RULES["longrope"]}],
    ids=str,
)
def test_traces_as_one_graph(options):
    encoding, states = make("rope", **options), random(2, 3, 4, 8)

    def turn(states, positions):
        return rotated(encoding, states, None, positions)[0]

    traced = torch.compile(turn, fullgraph=True, backend="eager")
    for positions in map(torch.tensor, POSITIONS.values()):
        assert_close(traced(states, positions), turn(states, positions), atol=1e-9)


def test_suggested_parts_are_allowed():
    for head_dim in (3, 6, 8, 9, 17, 63, 80, 127):
        for part in (0.05, 0.1, 0.33, 0.4, 0.77, 0.95, 1.0):
            for rule in ({}, {"rope_type": "dynamic", "factor": 2.0}):
                try:
                    make("rope", head_dim=head_dim, partial_rotary_factor=part, **rule)
                except ValueError as error:
                    found = re.search(r"set partial_rotary_factor=([\d.]+)", str(error))
                    assert found or head_dim == 3, (head_dim, part)
                    if found:
                        make("rope", head_dim=head_dim, partial_rotary_factor=float(found[1]), **rule)


@pytest.mark.parametrize("rule", ["dynamic", "yarn", "longrope", "llama3"])
def test_no_length_to_start_from(rule):
    options = RULES[rule] | {"original_max_position_embeddings": None}
    with pytest.raises(ValueError, match="original_max_position_embeddings=None: .* Set it"):
        rope(rule, trained=None, **options)
    rope(rule, trained=None, **options | {"original_max_position_embeddings": 9})
    if rule == "longrope":
        with pytest.raises(ValueError, match="'longrope' requires 'factor' or 'attention_factor'"):
            rope(rule, trained=None, **{**RULES[rule], "factor": None})


# xPos.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"theta": 77.0, "gamma": 1.5, "scale_base": 64.0}], ids=str)
def test_xpos_formula(layout, options):
    """Half precision is rounded once. bfloat16 factors would be off by 0.4% twice."""
    encoding, query, key = make("xpos", layout=layout, **options), random(2, 3, 4, 8), random(2, 2, 4, 8, seed=1)
    for positions in ([[0, 1, 2, 3], [0, 0, 1, 2]], [[9, 2, 300, 4], [1000, 7, 7, 4095]]):
        wanted = [turned(each, xpos(positions, sign, **options), layout) for each, sign in ((query, 1), (key, -1))]
        assert_close(list(rotated(encoding, query, key, positions)), wanted, rtol=1e-9, atol=1e-12)
        single = rotated(encoding, query.float(), key.float(), positions)
        assert_close([each.double() for each in single], wanted, rtol=1e-5, atol=1e-6)
        half = query.bfloat16()
        expected = turned(half, xpos(positions, 1, **options), layout).float().bfloat16()
        assert torch.equal(rotated(encoding, half, None, positions)[0], expected)


@pytest.mark.parametrize("library", ["rotary_embedding_torch", "x_transformers.x_transformers"])
def test_xpos_agrees_with(library):
    theirs = pytest.importorskip(library)
    query, key = random(1, 2, 512, 16, dtype=torch.float32), random(1, 2, 512, 16, seed=1, dtype=torch.float32)
    if library.startswith("rotary"):  # they count from the middle, with the same scores
        turned = theirs.RotaryEmbedding(16, use_xpos=True, xpos_scale_base=512).rotate_queries_and_keys(query, key)
    else:
        angles, scale = theirs.RotaryEmbedding(16, use_xpos=True).forward_from_seq_len(512)
        turned = [theirs.apply_rotary_pos_emb(each, angles, by) for each, by in ((query, scale), (key, scale**-1))]
    ours = rotated(make("xpos", head_dim=16, layout="interleaved"), query, key, torch.arange(512)[None])
    assert_close(scores(*ours).tril(), scores(*turned).tril())
    assert_apart(scores(query, key).tril(), scores(*turned).tril())


@pytest.mark.parametrize(("dtype", "last"), [(torch.float16, 1699), (torch.bfloat16, 33427), (torch.float32, 33427)])
def test_the_last_position_of_each_dtype(dtype, last):
    """Up to the last position, keys of 64 are finite, queries of 1/256 keep all digits, and scores are right. Later positions
    raise an error.
    """
    encoding, positions = make("xpos"), [[last - 9, last]]
    states = torch.full((1, 1, 2, 8), 64.0, dtype=dtype)
    small = torch.full((1, 1, 2, 8), 1 / 256, dtype=dtype)
    query, key = rotated(encoding, small, states, positions)
    assert query.dtype == key.dtype == dtype and key.isfinite().all()
    assert scores(torch.full_like(states, 11.0), key / 64 * 11).isfinite().all()  # for masked queries at 0: 968
    exact = scores(turned(small, xpos(positions, 1)), turned(states, xpos(positions, -1)))
    precision = {torch.float16: 3e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(scores(query.double(), key.double()), exact, atol=precision * exact.max().item(), rtol=0)
    for given in ((states, None), (None, states)):
        with pytest.raises(
            ValueError, match=f"Position {last + 1} is beyond {last}, .* in {dtype} .*larger scale_base"
        ) as error:
            rotated(encoding, *given, [[0, last + 1]])
        assert ("bfloat16 or float32" in str(error.value)) == (dtype == torch.float16)
    assert make("xpos", scale_base=5120.0)._last(torch.float16) >= 16_990
    assert make("xpos", gamma=10.0)._last(torch.float16) > 20_000


def test_elsewhere_the_number_of_tokens_counts():
    """If values can't be read without waiting, the number of tokens counts. It includes cached tokens once."""
    encoding = make("xpos")

    def turn(new, past=0):
        states = torch.zeros(1, 1, new, 8, dtype=torch.float16, device="meta")
        context = context_of(encoding, torch.arange(new, device="meta")[None], past=past)
        encoding.rotate(states, None, context)
        keys = torch.zeros(1, 1, new + past, 8, dtype=torch.float16, device="meta")
        return encoding.rotate(None, keys, context.for_keys(new + past))[1]

    assert turn(1700).shape == (1, 1, 1700, 8) and turn(100, past=1600).shape == (1, 1, 1700, 8)
    for new, past in ((1701, 0), (1, 1700)):
        with pytest.raises(ValueError, match="Position 1700 is beyond 1699"):
            turn(new, past)


@torch.no_grad()
def test_xpos_in_models():
    """Scores decrease, as a small scale_base shows in a short text. With a very large scale_base, xpos equals rope."""
    model, ids = stock("llama"), tokens()
    rope = first(hf_posenc.patch(model, "rope")(ids))
    assert_apart(first(hf_posenc.patch(model, "xpos", scale_base=4.0)(ids)), rope)
    assert_close(first(hf_posenc.patch(model, "xpos", scale_base=1e9)(ids)), rope)
    half = patched("gpt2", "xpos").half()
    with pytest.raises(ValueError, match=r"Position 1700 is beyond 1699.*torch.float16.*bfloat16 or float32"):
        half(tokens(1, 1701))
    with pytest.raises(ValueError, match="Position 5000 is beyond 1699"):
        half(tokens(1, 2), position_ids=torch.tensor([[4999, 5000]]))
    with pytest.raises(ValueError, match="max_length=50000 .*scale_base=512.0 and gamma=0.4 .* 33427"):
        hf_posenc.patch(stock("gpt2"), "xpos", max_length=50000)
    longer = hf_posenc.patch(stock("gpt2"), "xpos", max_length=50000, scale_base=1024.0)
    assert longer.config.position_encoding["max_length"] == 50000


# PoPE and FoPE.

HEADS, E = 2, 8
two_heads = functools.partial(oracles.make, heads=HEADS, dtype=torch.float64)


def softplus(value):
    return torch.log1p(torch.exp(value))


def pope_by_hand(query, key, positions, theta, phase):
    rows = []
    for head in range(query.shape[1]):
        for i, here in enumerate(positions):
            for j, there in enumerate(positions):
                total = 0.0
                for c in range(E):
                    angle = (here - there) * theta ** (-c / E) - phase[head, c]
                    total = total + softplus(query[0, head, i, c]) * softplus(key[0, head, j, c]) * torch.cos(angle)
                rows.append(total)
    return torch.stack(rows).view(1, query.shape[1], len(positions), len(positions))


@pytest.mark.parametrize("positions", [[0, 1, 2, 3], [7, 7000, 123456]])
@pytest.mark.parametrize("theta", [10000.0, 50.0])
def test_pope_formula_and_gradient(positions, theta):
    encoding, shape = two_heads("pope", seed=0, theta=theta), (1, HEADS, len(positions), E)
    query, key, upstream = random(*shape), random(*shape, seed=1), random(1, HEADS, len(positions), len(positions), seed=2)
    actual = scores(*rotated(encoding, query, key, [positions]))
    phase = encoding.weight.detach().clone().requires_grad_()
    expected = pope_by_hand(query, key, positions, theta, phase)
    assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    (found,) = torch.autograd.grad((actual * upstream).sum(), encoding.weight)
    assert_close(found, torch.autograd.grad((expected * upstream).sum(), phase)[0], rtol=1e-9, atol=1e-9)


def test_pope_agrees_with_x_transformers():
    x_transformers = pytest.importorskip("x_transformers.x_transformers")
    theirs, ours = x_transformers.PolarEmbedding(E, HEADS), two_heads("pope", dtype=torch.float32)
    with torch.no_grad():
        theirs.learned_bias.copy_(-(random(HEADS, 1, E).abs() % 6))
        ours.weight.copy_(theirs.learned_bias[:, 0])
    query, key = random(1, HEADS, 512, E).float(), random(1, HEADS, 512, E, seed=1).float()
    angles, bias = theirs(torch.arange(512))
    turn = x_transformers.apply_polar_pos_emb
    expected = turn(query, angles) @ turn(key, angles + bias).transpose(2, 3)
    assert_close(scores(*rotated(ours, query, key, [[*range(512)]])), expected)


def fope_by_hand(states, positions, theta, length, cosines, sines):
    """`[1, H, L, E]`, from pairs (i, i + E/2)."""
    steps = [theta ** (-2 * k / E) for k in range(E // 2)]
    turning = [k for k, step in enumerate(steps) if step >= 2 * math.pi / length]
    rows = []
    for head in range(states.shape[1]):
        group = head // (states.shape[1] // len(cosines))
        for i, position in enumerate(positions):
            low, high = [], []
            for m in range(E // 2):
                a, b = states[0, head, i, m], states[0, head, i, m + E // 2]
                if m not in turning:
                    low, high = [*low, a], [*high, b]
                    continue
                cos = sum(cosines[group, k, m] * math.cos(position * steps[k]) for k in turning)
                sin = sum(sines[group, k, m] * math.sin(position * steps[k]) for k in turning)
                low, high = [*low, a * cos - b * sin], [*high, b * cos + a * sin]
            rows.append(torch.stack([*low, *high]))
    return torch.stack(rows).view(states.shape)


@pytest.mark.parametrize("positions", [[0, 1, 2, 3], [7, 7000, 123456]])
@pytest.mark.parametrize(("theta", "length", "turning"), [(10000.0, 20, 1), (50.0, 200, 4), (50.0, 20, 2), (50.0, 6, 0)])
@pytest.mark.parametrize("groups", [1, 2])
def test_fope_formula_and_gradient(positions, theta, length, turning, groups):
    encoding = two_heads("fope", seed=0, theta=theta, trained_length=length, coefficients="learned", groups=groups)
    assert encoding.cosines.shape == (groups, turning, turning)
    states, upstream = random(1, HEADS, len(positions), E), random(1, HEADS, len(positions), E, seed=2)
    query, key = rotated(encoding, states, states[:, :groups], [positions])
    coefficients = [each.detach().clone().requires_grad_() for each in (encoding.cosines, encoding.sines)]
    expected = fope_by_hand(states, positions, theta, length, *coefficients)
    assert_close(query, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(key, query[:, :groups])
    if turning:
        found = torch.autograd.grad((query * upstream).sum(), [encoding.cosines, encoding.sines])
        assert_close(found, torch.autograd.grad((expected * upstream).sum(), coefficients), rtol=1e-9, atol=1e-9)


def test_fope_without_noise_is_rope_where_all_waves_turn():
    query, key, positions = random(1, HEADS, 5, E), random(1, HEADS, 5, E, seed=1), [[*range(5)]]
    fope = two_heads("fope", groups=HEADS, trained_length=10**6, gain=0.0)
    assert_close(scores(*rotated(fope, query, key, positions)), scores(*rotated(two_heads("rope"), query, key, positions)))
    model = stock("llama")
    theta = model.config.rope_parameters["rope_theta"]
    same = hf_posenc.patch(model, "fope", theta=theta, gain=0.0, trained_length=10**6)
    assert_close(first(same(tokens())), first(model(tokens())))


def test_fope_start():
    torch.manual_seed(0)
    encoding = oracles.make("fope", 768, 12, 64, trained=10**6, groups=12)
    noise = encoding.cosines - torch.eye(32)
    assert abs(noise.std().item() - 0.3 / 32**0.5) < 0.002 and not torch.equal(encoding.cosines, encoding.sines)
    assert [*encoding.state_dict()] == ["cosines", "sines"] and not [*encoding.parameters()]


def test_the_scaling_stays_that_of_the_hosts_width():
    """Falcon doesn't pass the scaling to SDPA, which would compute it from the width of the queries."""
    model = randomize_encoding(hf_posenc.patch(tiny("FalconForCausalLM", alibi=False), "pope"))
    outputs = []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        outputs.append(first(model(tokens())))
    assert_close(outputs[1], outputs[0])
