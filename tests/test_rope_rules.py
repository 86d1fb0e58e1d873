"""`rope` with Transformers' frequency rules and with a part of the features rotated: against float64 loops from the papers,
against stock models that have the same rule, and what rules that go by a text's length ask of caches and padding.

Shapes: B batch, H heads, L tokens, E head_dim, R rotated features.
"""

import math
import re

import pytest
import torch
from transformers import AutoModel, DynamicCache, GenerationConfig, StaticCache
from transformers.models.gptj import modeling_gptj

import hf_posenc
from closeness import assert_apart, assert_close, assert_equal
from conftest import needs_inductor
from hf_posenc.encodings import Geometry, PositionContext, build, canonical
from models import DECODER, LLAMA, Host, first, stock, tokens
from oracles import in_pieces, padded

LONG = 16
"""The length that these hosts are trained at."""
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


def make(rule="default", head_dim=2 * PAIRS, trained=LONG, **options):
    return build(
        canonical({"type": "rope", "rope_type": rule, **options}), Geometry(32, 4, head_dim, None, True, trained_length=trained)
    )


def context_of(encoding, positions):
    positions = torch.as_tensor(positions)
    return PositionContext(encoding, positions=positions, past=0, start=positions[:, :1])


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def llama(layers=2, **changes):
    sizes = dict(LLAMA, max_position_embeddings=LONG, head_dim=2 * PAIRS, num_hidden_layers=layers)
    return stock(Host("Llama", sizes, **DECODER), **changes)


# Oracles.


def yarn(theta, size, factor, original, beta_fast=32.0, beta_slow=1.0, truncate=True):
    """Of the paper's "NTK-by-parts", with the ramp over pairs of its authors' code."""

    def pair_of(turns):  # the pair, as a fraction, that turns so often in the original length
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
    """The frequencies of 4 pairs by the parameters in RULES, in a text of this length."""
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


def turned(states, positions, steps, layout, magnitude=1.0):
    """`[B, H, L, E]` in float64, one pair after the other; steps: the frequencies of each row."""
    out = states.double().clone()
    for b, row in enumerate(positions):
        for i, position in enumerate(row):
            for pair, step in enumerate(steps[b]):
                one, two = (pair, pair + len(steps[b])) if layout == "half" else (2 * pair, 2 * pair + 1)
                cos, sin = math.cos(position * step), math.sin(position * step)
                a, b_ = states[b, :, i, one].double(), states[b, :, i, two].double()
                out[b, :, i, one] = magnitude * (a * cos - b_ * sin)
                out[b, :, i, two] = magnitude * (b_ * cos + a * sin)
    return out


# The rules.

POSITIONS = {
    "short": [[0, 1, 2, 3], [4, 5, 6, 15]],
    "short and long": [[0, 1, 2, 3], [13, 14, 15, 16]],
    "right padding": [[0, 1, 1, 1], [500, 501, 502, 503]],
    "far": [[10**6, 10**6 + 1, 9, 2], [1, 7, 7, 100_000]],
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("theta", [10000.0, 500.0])
def test_formula(rule, layout, theta):
    """In float64 to the rounding of float64 at any position: the frequencies aren't Transformers' float32."""
    encoding = make(rule, theta=theta, layout=layout, **RULES[rule])
    query, key = random(2, 3, 4, 8), random(2, 2, 4, 8, seed=1)
    for positions in POSITIONS.values():
        steps = [steps_of(rule, theta, max(row) + 1) for row in positions]
        actual = encoding.rotate(query, key, context_of(encoding, positions))
        for ours, states in zip(actual, (query, key), strict=True):
            expected = turned(states, positions, steps, layout, MAGNITUDES.get(rule, 1.0))
            torch.testing.assert_close(ours, expected, atol=1e-8, rtol=0)
            single, _ = encoding.rotate(states.float(), None, context_of(encoding, positions))
            torch.testing.assert_close(single.double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    "options", [{"beta_fast": 9.0, "beta_slow": 0.5}, {"truncate": False}, {"beta_fast": 12.0, "truncate": False}], ids=str
)
def test_yarn_ramps(options):
    encoding = make("yarn", **RULES["yarn"], **options)
    expected = turned(random(1, 1, 3, 8), [[1, 9, 400]], [yarn(10000.0, 8, 3.0, 500, **options)], "half", MAGNITUDES["yarn"])
    actual, _ = encoding.rotate(random(1, 1, 3, 8), None, context_of(encoding, [[1, 9, 400]]))
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=0)


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
    """What queries and keys are multiplied by at position 0."""
    encoding = make(rule, **{**RULES[rule], **options})
    query = random(1, 2, 1, 8)
    assert_close(encoding.rotate(query, None, context_of(encoding, [[0]]))[0], query * expected, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_a_stock_llama_with_that_rule(rule):
    """One and the same to position 512, below the trained length and above it; saved and loaded, too."""
    sizes = {"max_position_embeddings": LONG} if rule in BY_LENGTH else {"max_position_embeddings": 600}
    model = llama(rope_parameters={"rope_type": rule, "rope_theta": 10000.0, **RULES[rule]}, **sizes)
    new = hf_posenc.patch(model, "rope", rope_type=rule, **RULES[rule])
    for length in (9, LONG, LONG + 1, 512):
        ids = tokens(1, length)
        assert_close(first(new(ids)), first(model(ids)))
    if rule != "default":
        assert_apart(first(hf_posenc.patch(model, "rope")(ids)), first(model(ids)))


@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_reload(rule, tmp_path):
    model = hf_posenc.patch(llama(), "rope", rope_type=rule, **RULES[rule])
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert_equal(first(again(tokens(2, 20))), first(model(tokens(2, 20))))
    assert again.config.position_encoding == model.config.position_encoding
    assert ("rope_type" in again.config.position_encoding) == (rule != "default")


@torch.no_grad()
def test_the_trained_length_stays_when_the_promise_changes():
    """Of a model made from scratch the config's length tells it, until `extend` changes that."""
    options = {"type": "rope", "rope_type": "longrope", "short_factor": [1.0] * PAIRS, "long_factor": [2.0] * PAIRS}
    sizes = {name: value for name, value in LLAMA.items() if name != "num_attention_heads"}
    sizes |= dict(num_attention_heads=4, vocab_size=61, max_position_embeddings=LONG)
    config = hf_posenc.PosEncLlamaConfig(**sizes, position_encoding={**options, "max_length": LONG})
    model = hf_posenc.PosEncLlamaModel(config).eval()
    longer = hf_posenc.extend(model, max_length=4 * LONG)
    assert longer.config.position_encoding["original_max_position_embeddings"] == LONG
    assert longer.config.position_encoding["factor"] == 1.0
    assert_equal(first(longer(tokens(1, 12))), first(model(tokens(1, 12))))
    assert longer.posenc._given["original_max_position_embeddings"] == LONG


# A part of the features.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("part", "size"), [(0.5, 4), (0.25, 2), (0.75, 6), (0.8, 6)])
def test_partial_rotation(layout, part, size):
    encoding = make(partial_rotary_factor=part, layout=layout)
    states, positions = random(1, 2, 4, 8), [[3, 0, 700, 10**6]]
    expected = turned(states[..., :size], positions, [[10000 ** (-2 * pair / size) for pair in range(size // 2)]], layout)
    actual, _ = encoding.rotate(states, None, context_of(encoding, positions))
    torch.testing.assert_close(actual[..., :size], expected, atol=1e-9, rtol=0)
    assert torch.equal(actual[..., size:], states[..., size:])


def test_an_odd_head_of_which_a_part_is_rotated():
    encoding, states = make(head_dim=9, partial_rotary_factor=0.9), random(1, 1, 2, 9)
    actual, _ = encoding.rotate(states, None, context_of(encoding, [[0, 5]]))
    assert torch.equal(actual[..., 8], states[..., 8]) and not torch.equal(actual[:, :, 1, :8], states[:, :, 1, :8])


def test_gptj():
    encoding, states = make(partial_rotary_factor=0.5, layout="interleaved"), random(1, 4, 64, 8, dtype=torch.float32)
    sin, cos = modeling_gptj.create_sinusoidal_positions(64, 4)[None].chunk(2, dim=-1)
    theirs = modeling_gptj.apply_rotary_pos_emb(states[..., :4].transpose(1, 2), sin, cos).transpose(1, 2)
    actual, _ = encoding.rotate(states, None, context_of(encoding, torch.arange(64)[None]))
    torch.testing.assert_close(actual, torch.cat([theirs, states[..., 4:]], dim=-1), atol=2e-5, rtol=0)


@pytest.mark.parametrize("prefix", ["GPTNeoX", "StableLm", "Phi"])
@torch.no_grad()
def test_a_stock_model_that_rotates_a_part(prefix):
    part = {"rotary_pct": 0.5} if prefix == "GPTNeoX" else {"partial_rotary_factor": 0.5}
    model = stock(Host(prefix, dict(LLAMA, max_position_embeddings=LONG, num_key_value_heads=4, **part), **DECODER))
    ids = tokens(2, 14)
    assert_close(first(hf_posenc.patch(model, "rope", partial_rotary_factor=0.5)(ids)), first(model(ids)))
    assert_apart(first(hf_posenc.patch(model, "rope")(ids)), first(model(ids)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options", [{"partial_rotary_factor": 0.5}, {"rope_type": "yarn", **RULES["yarn"]}], ids=["part", "yarn"]
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which torch's own jvp calls
def test_gradients(layout, options):
    """Of states, first and second, against finite differences; in forward mode; and in a batch of batches."""
    encoding = make(layout=layout, **options)
    states = random(1, 1, 3, 8).requires_grad_()

    def turn(states):
        return encoding.rotate(states, None, context_of(encoding, [[1, 5, 40]]))[0]

    assert torch.autograd.gradcheck(turn, states, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(turn, states)
    assert_close(torch.vmap(turn)(states[None])[0], turn(states))


# The length of each text.


@pytest.mark.parametrize("rule", BY_LENGTH)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_each_row_has_its_length(rule, side):
    """Padding and a longer row beside it change nothing: each is what the stock Llama makes of it alone."""
    model = llama(rope_parameters={"rope_type": rule, "rope_theta": 10000.0, **RULES[rule]})
    new, lengths = hf_posenc.patch(model, "rope", rope_type=rule, **RULES[rule]), (30, 11)
    given, mask = padded(tokens(2, 30), lengths, side)
    output = first(new(given, attention_mask=mask))
    for row, length in enumerate(lengths):
        assert_close(output[row][mask[row].bool()][None], first(model(tokens(2, 30)[row : row + 1, :length])))


@pytest.mark.parametrize("rule", BY_LENGTH)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("layers", [1, 2])
@torch.no_grad()
def test_cached_keys_are_rotated_anew(rule, static, layers):
    """Each step is the forward pass over all tokens up to it, while the text grows over the trained length: in one layer
    exactly; in several, where hidden states in the cache are those of the shorter text, once all are beyond (longrope)."""
    new, ids = hf_posenc.patch(llama(layers), "rope", rope_type=rule, **RULES[rule]), tokens(2, 30)
    cuts = (9, 15, 16, 17, 18, 25, 30) if layers == 1 else (20, 21, 25, 30) if rule == "longrope" else (9, 12, 15, 16)
    mask = torch.ones_like(ids)
    mask[0, : 3 if layers == 1 else 0] = 0
    cache = StaticCache(config=new.config, max_cache_len=34) if static else DynamicCache(config=new.config)
    before = 0
    for stop in cuts:
        step = first(new(ids[:, before:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True))
        whole = first(new(ids[:, :stop], attention_mask=mask[:, :stop]))[:, before:]
        real = mask[:, before:stop].bool()
        assert_close(step[real], whole[real])
        before = stop


@torch.no_grad()
def test_behind_a_sliding_window():
    """The cache has dropped the first keys; the length is still that of the whole text."""
    sizes = dict(LLAMA, max_position_embeddings=LONG, head_dim=2 * PAIRS, num_hidden_layers=1, sliding_window=6)
    model, ids = stock(Host("Mistral", sizes, **DECODER)), tokens(2, 24)
    new = hf_posenc.patch(model, "rope", rope_type="dynamic", factor=3.0)
    cache, before = DynamicCache(config=new.config), 0
    for stop in (8, 9, 16, 17, 24):
        step = first(new(ids[:, before:stop], past_key_values=cache, use_cache=True))
        assert_close(step, first(new(ids[:, :stop]))[:, before:])
        before = stop


@torch.no_grad()
def test_a_part_of_a_composition():
    new = hf_posenc.patch(llama(1), "rope+alibi", rope__rope_type="dynamic", rope__factor=3.0)
    ids, cache = tokens(1, 24), DynamicCache(config=new.config)
    first(new(ids[:, :10], past_key_values=cache, use_cache=True))
    step = first(new(ids[:, 10:], past_key_values=cache, use_cache=True))
    assert_close(step, first(new(ids))[:, 10:])


@torch.no_grad()
def test_rules_without_length_store_rotated_keys():
    ids = tokens(1, 20)
    for rule in ("linear", "yarn", "llama3", "proportional"):
        new = hf_posenc.patch(llama(), "rope", rope_type=rule, **RULES[rule])
        assert not new.posenc.rotation_depends_on_length(new.posenc._options)
        assert_close(in_pieces(new, ids, (9, 15, 16, 17)), first(new(ids)))


def test_continuous_batching():
    model = stock(Host("Llama", dict(LLAMA, max_position_embeddings=LONG, head_dim=8), **DECODER), "ForCausalLM")
    new = hf_posenc.patch(model, "rope", rope_type="dynamic", factor=3.0)
    settings = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with pytest.raises(ValueError, match="rotates all of them anew at every step: use model.generate"):
        new.generate_batch([[5, 6, 7]], generation_config=settings)
    with pytest.raises(ValueError, match="rotates all of them anew at every step: use model.generate"):
        new(tokens(1, 5), cache=object())


@pytest.mark.parametrize(
    "options", [*({"rope_type": rule, **RULES[rule]} for rule in BY_LENGTH), {"partial_rotary_factor": 0.5}]
)
def test_traces_as_one_graph(options):
    encoding, states = make(**options), random(2, 3, 4, 8)

    def turn(states, positions):
        return encoding.rotate(states, None, context_of(encoding, positions))[0]

    traced = torch.compile(turn, fullgraph=True, backend="eager")
    for positions in POSITIONS.values():
        assert_close(traced(states, torch.tensor(positions)), turn(states, torch.tensor(positions)), atol=1e-9)


@pytest.mark.slow
@needs_inductor
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # which inductor imports
@torch.no_grad()
def test_compiles():
    new = hf_posenc.patch(llama(), "rope", rope_type="dynamic", factor=3.0, partial_rotary_factor=0.75)
    compiled = torch.compile(new, fullgraph=True)
    assert_close(first(compiled(tokens(1, 20), use_cache=False)), first(new(tokens(1, 20), use_cache=False)))


# Errors.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rope_type": "ntk"}, "rope.rope_type='ntk'.*'default' or 'linear'"),
        ({"rope_type": "linear"}, "rope_type='linear' needs 'factor': give factor=…"),
        ({"rope_type": "longrope", "factor": 2.0}, "needs 'short_factor', 'long_factor': give short_factor=…, long_factor=…"),
        ({"rope_type": "llama3", "factor": 2.0}, "needs 'low_freq_factor', 'high_freq_factor'"),
        (
            {"factor": 2.0},
            "rope.factor=2.0: rope_type='default' takes none of these; leave it out, or take rope_type='linear' or",
        ),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "rope.beta_fast=3.0: .*'factor'; leave.*rope_type='yarn'"),
        ({"rope_type": "linear", "factor": 0.0}, "rope.factor=0.0.*above 0"),
        ({"rope_type": "linear", "factor": "4"}, "rope.factor='4'"),
        ({"rope_type": "linear", "facto": 4.0}, "did you mean 'factor'"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5: .* up to 1"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor=0.0: .*above 0"),
        ({"partial_rotary_factor": 0.4}, "head_dim is 8, .*=0.4 rotates 3, an odd number: take partial_rotary_factor=0.3125"),
        ({"partial_rotary_factor": 0.1}, "rotates 0, fewer than 2: take partial_rotary_factor=0.3125"),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.1}, "rotates 0, fewer than 2"),
        ({"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.25}, "rotates 2, fewer than 4: take .*=0.5625"),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}, "mscale and mscale_all_dim act together"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_slow": 40.0}, "beta_slow=40.0: allowed is a number below beta_fast=32.0"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1}, "original_max_position_embeddings=1: "),
        (
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "low_freq_factor=4.0: allowed is a number below high_freq_factor=4.0",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 3},
            "long_factor has 3 values, for 4 rotated",
        ),
        ({"rope_type": "longrope", "short_factor": [], "long_factor": [1.0] * 4}, "short_factor has 0 values, for 4 rotated"),
        ({"rope_type": "longrope", "short_factor": [0.0] * 4, "long_factor": [1.0] * 4}, "short_factor=.*above 0"),
    ],
    ids=str,
)
def test_bad_options(options, said):
    model = llama()
    with pytest.raises(ValueError, match=said):
        hf_posenc.patch(model, "rope", **options)
    assert not hasattr(model.config, "position_encoding") and not hasattr(model, "posenc")


def test_suggested_parts_are_allowed():
    for head_dim in (3, 6, 8, 9, 17, 63, 80, 127):
        for part in (0.05, 0.1, 0.33, 0.4, 0.77, 0.95, 1.0):
            for rule, options in (("default", {}), ("dynamic", {"factor": 2.0})):
                try:
                    make(rule, head_dim, partial_rotary_factor=part, **options)
                except ValueError as error:
                    found = re.search(r"take partial_rotary_factor=([\d.]+)", str(error))
                    assert found or head_dim == 3, (head_dim, part)
                    if found:
                        make(rule, head_dim, partial_rotary_factor=float(found[1]), **options)


@pytest.mark.parametrize("rule", ["dynamic", "yarn", "longrope", "llama3"])
def test_no_length_to_start_from(rule):
    options = {name: value for name, value in RULES[rule].items() if name != "original_max_position_embeddings"}
    with pytest.raises(ValueError, match="original_max_position_embeddings=None: .*so give one"):
        make(rule, trained=None, **options)
    make(rule, trained=None, **options, original_max_position_embeddings=9)
    if rule == "longrope":
        with pytest.raises(ValueError, match="'longrope' needs 'factor' or 'attention_factor' here"):
            make(rule, trained=None, **{**RULES[rule], "factor": None})
