"""Oracles of pope and fope."""

import math

import pytest
import torch
from transformers import FalconConfig, FalconForCausalLM, ViTConfig, ViTModel

import hf_posenc
from closeness import assert_close
from hf_posenc.attention.dispatch import AttentionState, rotate
from hf_posenc.encodings import Geometry, PatchLayout, PositionContext, encoding_class
from models import first, patched, randomize, randomize_encoding, stock, tokens
from oracles import in_pieces

HEADS, E = 2, 8


def make(kind, seed=0, **options):
    sizes = {"trained_length": 20, "num_key_value_heads": options.pop("groups", HEADS)}
    encoding = encoding_class(kind)(Geometry(16, HEADS, E, **sizes), **options).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in (*encoding.parameters(), *encoding.buffers()):
            each.copy_(torch.randn(each.shape, generator=generator))
    return encoding


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scores(encoding, query, key, positions):
    positions = torch.tensor([positions])
    context = PositionContext(encoding, positions, 0, torch.zeros(1, 1, dtype=torch.long))
    query, key = encoding("rotate", query, key, context)
    return query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(2, 3)


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
    encoding, shape = make("pope", theta=theta), (1, HEADS, len(positions), E)
    query, key, upstream = random(*shape), random(*shape, seed=1), random(1, HEADS, len(positions), len(positions), seed=2)
    actual = scores(encoding, query, key, positions)
    phase = encoding.weight.detach().clone().requires_grad_()
    expected = pope_by_hand(query, key, positions, theta, phase)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    (found,) = torch.autograd.grad((actual * upstream).sum(), encoding.weight)
    (right,) = torch.autograd.grad((expected * upstream).sum(), phase)
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


def test_pope_agrees_with_x_transformers():
    x_transformers = pytest.importorskip("x_transformers.x_transformers")
    theirs, ours = x_transformers.PolarEmbedding(E, HEADS), make("pope")
    with torch.no_grad():
        theirs.learned_bias.copy_(-(random(HEADS, 1, E).abs() % 6))
        ours.weight.copy_(theirs.learned_bias[:, 0])
    query, key = random(1, HEADS, 512, E).float(), random(1, HEADS, 512, E, seed=1).float()
    angles, bias = theirs(torch.arange(512))
    turn = x_transformers.apply_polar_pos_emb
    expected = turn(query, angles) @ turn(key, angles + bias).transpose(2, 3)
    assert_close(scores(ours.float(), query, key, [*range(512)]), expected)


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
    encoding = make("fope", theta=theta, trained_length=length, coefficients="learned", groups=groups)
    assert encoding.cosines.shape == (groups, turning, turning)
    states, upstream = random(1, HEADS, len(positions), E), random(1, HEADS, len(positions), E, seed=2)
    context = PositionContext(encoding, torch.tensor([positions]), 0, torch.zeros(1, 1, dtype=torch.long))
    query, key = encoding("rotate", states, states[:, :groups], context)
    coefficients = [each.detach().clone().requires_grad_() for each in (encoding.cosines, encoding.sines)]
    expected = fope_by_hand(states, positions, theta, length, *coefficients)
    torch.testing.assert_close(query, expected, rtol=1e-9, atol=1e-9)
    if groups == HEADS:
        assert torch.equal(key, query)
    if turning:
        found = torch.autograd.grad((query * upstream).sum(), [encoding.cosines, encoding.sines])
        right = torch.autograd.grad((expected * upstream).sum(), coefficients)
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


def test_fope_without_noise_is_rope_where_all_waves_turn():
    query, key = random(1, HEADS, 5, E), random(1, HEADS, 5, E, seed=1)
    fope = encoding_class("fope")(Geometry(16, HEADS, E), trained_length=10**6, gain=0.0).double()
    rope = encoding_class("rope")(Geometry(16, HEADS, E))
    torch.testing.assert_close(scores(fope, query, key, [*range(5)]), scores(rope, query, key, [*range(5)]))


def test_fope_start():
    torch.manual_seed(0)
    encoding = encoding_class("fope")(Geometry(768, 12, 64, trained_length=10**6, num_key_value_heads=12))
    noise = encoding.cosines - torch.eye(32)
    assert abs(noise.std().item() - 0.3 / 32**0.5) < 0.002 and not torch.equal(encoding.cosines, encoding.sines)
    assert [*encoding.state_dict()] == ["cosines", "sines"] and not [*encoding.parameters()]


@pytest.mark.parametrize(
    ("options", "sizes", "message"),
    [
        ({}, {}, "fope.trained_length=None: .* so give one"),
        ({"trained_length": 9}, {"head_dim": 7}, "this host's head_dim is 7, an odd number"),
        ({"trained_length": 9, "gain": -0.1}, {}, "fope.gain=-0.1: allowed is 0 or more"),
    ],
)
def test_fope_refusals(options, sizes, message):
    with pytest.raises(ValueError, match=message):
        encoding_class("fope")(Geometry(**{"hidden_size": 16, "num_attention_heads": 2, "head_dim": 8, **sizes}), **options)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_keys_of_twice_the_width_are_cached(implementation):
    """With fewer heads than queries have."""
    model = patched("llama", "pope", "ForCausalLM")
    model.set_attn_implementation(implementation)
    ids = tokens(2, 12)
    assert_close(in_pieces(model, ids, (5, 11)), first(model(ids)))


def test_a_static_cache():
    model, ids = patched("llama", "pope", "ForCausalLM"), tokens(2, 6)
    generated = model.generate(ids, max_new_tokens=5, do_sample=False, cache_implementation="static")
    assert torch.equal(generated, model.generate(ids, max_new_tokens=5, do_sample=False))


def test_the_scaling_stays_that_of_the_hosts_width():
    """Falcon's attention leaves it to SDPA to take it from the width of queries."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61, "alibi": False}
    model = randomize(FalconForCausalLM(FalconConfig(**sizes, bos_token_id=1, eos_token_id=2))).eval()
    model = randomize_encoding(hf_posenc.patch(model, "pope"))
    outputs = []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        outputs.append(first(model(tokens())))
    assert_close(outputs[1], outputs[0])


def test_tokens_aside_are_at_position_0():
    """ViT's class token, whose queries and keys become as wide as those of patches."""
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=8, image_size=32, patch_size=16
    )
    torch.manual_seed(0)
    model = randomize_encoding(hf_posenc.patch(randomize(ViTModel(config)).eval(), "pope"))
    module = next(module for module in model.modules() if isinstance(vars(module).get("posenc_state"), AttentionState))
    query, key = random(1, 4, 5, 8).float(), random(1, 4, 5, 8, seed=1).float()
    context = PositionContext(
        model.posenc, torch.arange(4)[None], 0, torch.zeros(1, 1, dtype=torch.long), patches=PatchLayout((1, 0))
    )
    turned, turned_key = rotate(module, query, key, context)
    whole = PositionContext(model.posenc, torch.tensor([[0, 0, 1, 2, 3]]), 0, torch.zeros(1, 1, dtype=torch.long))
    expected, expected_key = model.posenc("rotate", query, key, whole)
    assert_close(turned, expected)
    assert_close(turned_key, expected_key)
    assert first(model(torch.randn(1, 3, 32, 32))).isfinite().all()


@pytest.mark.parametrize(
    ("encoding", "reason"),
    [
        ("pope+rope", "'pope' takes magnitudes of the features as they are, which 'rope' changes"),
        ("pope+shaw", "'pope' makes queries and keys twice as wide as the vectors that 'shaw' multiplies them by"),
        ("fox+rope", "the gates of 'fox' come from keys"),
    ],
)
def test_what_cannot_act_in_one_layer(encoding, reason):
    one, other = encoding.split("+")
    for name in (encoding, f"{other}+{one}"):
        with pytest.raises(ValueError, match=f"can't act in one layer: {reason}.*layers of its own .*__layers=…"):
            hf_posenc.patch(stock("gpt2"), name)
    layered = {f"{one}__layers": [0], f"{other}__layers": [1]}
    assert first(hf_posenc.patch(stock("gpt2"), encoding, **layered)(tokens())).isfinite().all()


@pytest.mark.parametrize("encoding", ["pope+alibi", "fox+logn", "tupe+pope", "fire+pope"])
def test_what_can(encoding):
    model, ids = patched("gpt2", encoding), tokens(2, 12)
    assert_close(in_pieces(model, ids, (5, 11)), first(model(ids)))


def test_fope_in_a_model_acts_as_its_own_rotation_would():
    model = stock("llama")
    theta = model.config.rope_parameters["rope_theta"]
    same = hf_posenc.patch(stock("llama"), "fope", theta=theta, gain=0.0, trained_length=10**6)
    assert_close(first(same(tokens())), first(model(tokens())))
