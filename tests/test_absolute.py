"""`fire`, `tupe` and `fourier`, to which a token's own position counts: outputs and gradients against float64 loops from the
papers' formulas, and what is special to each.

Shapes: B batch, L tokens, Q queries, K keys, H heads, E head_dim, D hidden_size.
"""

import copy
import functools
import itertools
import math

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, EncoderDecoderCache

import hf_posenc
from closeness import assert_close
from hf_posenc.encodings import CrossContext, Geometry, PositionContext, build, canonical
from models import LENGTH, VOCABULARY, first, patched, randomize, randomize_encoding, stock, tokens
from oracles import in_pieces, padded

D, H, E = 12, 3, 5


def make(kind, is_causal=False, max_length=None, dtype=torch.float32, seed=0, **options):
    """An encoding with parameters from N(0, 1)."""
    encoding = build(canonical({"type": kind, **options}), Geometry(D, H, E, max_length, is_causal))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return encoding.to(dtype)


def context_of(encoding, positions, keys=None):
    """The context of queries at `positions` [B][Q]; keys [B][K] in another order than 0, 1, 2, …, or else the same tokens."""
    positions = torch.tensor(positions)
    start = torch.arange(positions.shape[1])[None, -1:] - positions[:, -1:]
    return PositionContext(encoding, positions, 0, start, keys=None if keys is None else torch.tensor(keys))


def states(batch, length):
    return torch.zeros(batch, H, length, E)


def bias_of(encoding, context, keys):
    query = states(1, context.positions.shape[1])
    return encoding("score_bias", query, states(1, keys), context)


def doubles(encoding):
    """Parameters by name, float64 leaves of a graph of their own."""
    return {name: value.detach().double().requires_grad_() for name, value in encoding.named_parameters()}


def stacked(rows):
    return torch.stack([stacked(row) if isinstance(row, list) else row for row in rows])


def assert_same(encoding, actual, parameters, expected):
    """Values and the gradients of all parameters, for a random upstream gradient."""
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5 * max(1, expected.abs().max().item()))
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    actual.backward(upstream.to(actual.dtype))
    expected.backward(upstream)
    for name, parameter in encoding.named_parameters():
        wanted = parameters[name].grad
        assert wanted.abs().max() > 0, name
        torch.testing.assert_close(parameter.grad.double(), wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())


# FIRE.


def fire(parameters, i, j, longest):
    """b(i, j) of all heads, as a list, in plain float64."""
    c, length = (parameters["logarithms"][place].exp() for place in (0, 1))

    def psi(x):
        return (c * x + 1).log()

    whole = longest if longest > length else length
    ratio = (psi(abs(i - j)) / psi(whole)).clamp(max=1) * (1 if i >= j else -1)
    biases = []
    for h in range(H):
        total = parameters["bias"][h]
        for w in range(len(parameters["hidden_bias"])):
            hidden = parameters["hidden_weight"][w] * ratio + parameters["hidden_bias"][w]
            total = total + parameters["weight"][h, w] * hidden.clamp(min=0)
        biases.append(total)
    return biases


def fire_rows(parameters, queries, keys, longest):
    """`[B, H, Q, K]`; longest: n_i of the query at i in a row of the batch."""
    rows = []
    for b, (here, there) in enumerate(zip(queries, keys, strict=True)):
        pairs = [[fire(parameters, i, j, longest(b, i)) for j in there] for i in here]
        rows.append([[[pair[h] for pair in row] for row in pairs] for h in range(H)])
    return stacked(rows)


CAUSAL = {
    "from 0": ([[0, 1, 2, 3, 4, 5]], None),
    "jumping": ([[9, 2, 300, 4], [1, 7, 7, 2**20]], [[9, 2, 300, 4], [1, 7, 7, 2**20]]),
    "behind a cache": ([[6, 7], [3, 4]], [[0, 1, 2, 3, 4, 5, 6, 7], [-3, -2, -1, 0, 1, 2, 3, 4]]),
}


@pytest.mark.parametrize(("positions", "keys"), CAUSAL.values(), ids=CAUSAL)
def test_fire_formula_in_decoders(positions, keys):
    encoding = make("fire", is_causal=True, width=7)
    parameters, there = doubles(encoding), keys or positions
    expected = fire_rows(parameters, positions, there, lambda b, i: i)
    actual = bias_of(encoding, context_of(encoding, positions, keys), len(there[0]))
    assert_same(encoding, actual, parameters, expected)


ENCODERS = {
    "from 0": ([[0, 1, 2, 3, 4, 5]], None),
    "by pair": ([[0, 1, 2, 3, 4, 5]], [[0, 1, 2, 3, 4, 5]]),
    "of several lengths": ([[0, 1, 2, 3, 3, 3], [0, 1, 2, 3, 4, 5]], None),
    "jumping": ([[9, 2, 300, 4]], [[9, 2, 300, 4]]),
}


@pytest.mark.parametrize(("positions", "keys"), ENCODERS.values(), ids=ENCODERS)
def test_fire_formula_in_encoders(positions, keys):
    """n_i is the text's last position, and distances to later keys are negative."""
    encoding = make("fire", width=7)
    parameters = doubles(encoding)
    context = context_of(encoding, positions, keys)
    if keys is None:
        context.start = torch.zeros(len(positions), 1, dtype=torch.long)
    # The keys of right padding go on by index; the mask hides them.
    there = keys or [list(range(len(row))) for row in positions]
    expected = fire_rows(parameters, there, there, lambda b, i: max(positions[b]))
    assert_same(encoding, bias_of(encoding, context, len(there[0])), parameters, expected)


@pytest.mark.parametrize("queries", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[7]]])
def test_fire_formula_between_stacks(queries):
    """n_i is the greater of the query's position and the last one that the encoder's mask shows."""
    encoding = make("fire", width=7)
    parameters = doubles(encoding)
    cross = CrossContext(encoding, torch.tensor([[0, 1, 1, 1, 1, 0]]))
    own = PositionContext(None, torch.tensor(queries), 0, torch.zeros(1, 1), cross=cross)
    there = [[-1, 0, 1, 2, 3, 4]]
    expected = fire_rows(parameters, queries, there, lambda b, i: max(i, 3))
    assert_same(encoding, bias_of(encoding, own.for_cross_attention(6), 6), parameters, expected)


def test_fire_start():
    """c, L and an MLP that begins as torch's layers; the values are the paper's."""
    encoding = build(canonical({"type": "fire"}), Geometry(D, H, E, is_causal=True))
    torch.testing.assert_close(encoding.logarithms.exp().tolist(), [0.1, 512.0], rtol=1e-5, atol=0)
    assert encoding.hidden_weight.shape == (32,) and encoding.weight.shape == (H, 32)
    other = build(canonical({"type": "fire", "c": 2.0, "threshold": 9, "width": 3}), Geometry(D, H, E))
    torch.testing.assert_close(other.logarithms.exp().tolist(), [2.0, 9.0], rtol=1e-5, atol=0)
    # Up to the threshold a bias depends on the distance alone.
    bias = bias_of(encoding, context_of(encoding, [list(range(40))]), 40)[0]
    torch.testing.assert_close(bias[:, 5, :6], bias[:, 30, 25:31])
    assert (bias[:, 30, 1:31] - bias[:, 30, :30]).abs().amax(0).min() > 1e-4


@pytest.mark.parametrize("value", [-1e6, -90.0, 90.0, 1e6])
@pytest.mark.parametrize("is_causal", [False, True])
def test_fire_is_finite_for_all_parameters(value, is_causal):
    encoding = make("fire", is_causal)
    for place in (0, 1):
        with torch.no_grad():
            encoding.logarithms.zero_()[place] = value
        bias = bias_of(encoding, context_of(encoding, [[0, 1, 2, 10**7]], [[0, 1, 2, 10**7]]), 4)
        bias.square().sum().backward()
        assert bias.isfinite().all() and all(parameter.grad.isfinite().all() for parameter in encoding.parameters())


@pytest.mark.parametrize("length", [1, 9, 10])
def test_fire_in_chunks(monkeypatch, length):
    """Never more hidden values at once than CHUNK, none kept for the backward pass, and all as in one piece."""
    encoding, width = make("fire", is_causal=True), 32
    context = context_of(encoding, [list(range(length))])
    whole = bias_of(encoding, context, length)
    whole.square().sum().backward()
    expected = [parameter.grad.clone() for parameter in encoding.parameters()]
    limit, sizes, layers = 3 * length * width, [], type(encoding)._layers
    monkeypatch.setattr("hf_posenc.encodings.fire.CHUNK", limit + width)
    monkeypatch.setattr(type(encoding), "_layers", lambda self, part: sizes.append(part.numel() * width) or layers(self, part))
    with torch.no_grad():
        assert_close(bias_of(encoding, context, length), whole)
    assert sum(sizes) == length**2 * width and max(sizes) <= limit + width
    encoding.zero_grad()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda tensor: tensor):
        chunked = bias_of(encoding, context, length)
    assert_close(chunked, whole)
    assert length == 1 or max(saved) < limit
    chunked.square().sum().backward()
    assert_close([parameter.grad for parameter in encoding.parameters()], expected)


@pytest.mark.parametrize("kind", ["fire", "tupe"])
@pytest.mark.parametrize("host", ["bert", "gpt2"])
def test_biases_are_computed_once_unless_they_are_trained(monkeypatch, host, kind):
    calls = []
    for per_layer in (False, True):
        model = hf_posenc.patch(stock(host), kind, per_layer=per_layer)
        cls = type(next(module for module in model.modules() if getattr(module, "type", None) == kind))
        with monkeypatch.context() as patch:
            patch.setattr(cls, "_bias", lambda self, *args, own=cls._bias: calls.append(1) or own(self, *args))
            with torch.no_grad():
                model(tokens())
            calls.append("trained")
            model(tokens())
            calls.append("next")
    assert calls == [1, "trained", 1, 1, "next", 1, 1, "trained", 1, 1, "next"]


@pytest.mark.parametrize("kind", ["fire", "fourier"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_precision_rounds_the_result_alone(kind, dtype):
    """Under autocast, or with parameters in bfloat16."""
    encoding = make(kind, is_causal=True).to(dtype)
    exact, positions = copy.deepcopy(encoding).double(), [list(range(2000, 2040))]

    def values(encoding):
        if kind == "fourier":
            return encoding("embed", torch.tensor(positions))
        return bias_of(encoding, context_of(encoding, positions), 40)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = values(encoding)
    assert_close(actual.double(), values(exact), rtol=1e-5, atol=1e-6)


BART = dict(
    vocab_size=VOCABULARY,
    d_model=32,
    encoder_layers=1,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=LENGTH,
    pad_token_id=0,
)


@pytest.mark.parametrize("kind", ["fire", "tupe"])
@torch.no_grad()
def test_between_stacks_padding_and_caches_change_nothing(kind):
    torch.manual_seed(0)
    model = randomize(transformers.BartModel(transformers.BartConfig(**BART))).eval()
    model = randomize_encoding(hf_posenc.patch(model, kind, where=["encoder", "decoder", "cross"]))
    source, target = tokens(1, 9), tokens(1, 7, seed=1)
    expected = first(model(source, decoder_input_ids=target))
    for side in ("left", "right"):
        more, mask = padded(source, [9], side)
        states = model.encoder(more, attention_mask=mask)
        cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
        pieces = [
            first(
                model(
                    encoder_outputs=states,
                    attention_mask=mask,
                    decoder_input_ids=target[:, start:stop],
                    past_key_values=cache,
                    use_cache=True,
                )
            )
            for start, stop in itertools.pairwise((0, 3, 4, 7))
        ]
        assert_close(torch.cat(pieces, dim=1), expected)


# TUPE.


def tupe(parameters, positions, keys, untie_cls):
    """`[B, H, Q, K]`, a number at a time."""

    @functools.cache
    def projected(name, position, h):
        rows = parameters[name][h * E : (h + 1) * E]
        return [(row * parameters["weight"][position]).sum() for row in rows]

    def pair(i, j, h):
        if untie_cls and i == 0:
            return parameters["theta"][0, h]
        if untie_cls and j == 0:
            return parameters["theta"][1, h]
        both = zip(projected("query_weight", i, h), projected("key_weight", j, h), strict=True)
        return sum(q * k for q, k in both) / math.sqrt(2 * E)

    batch = zip(positions, keys, strict=True)
    return stacked([[[[pair(i, j, h) for j in there] for i in here] for h in range(H)] for here, there in batch])


# One query is multiplied in another order; positions fewer than rows are projected by themselves.
TUPE = {
    "one query behind a cache": ([[4]], [[0, 1, 2, 3, 4]], 9),
    "few": ([[0, 1, 2]], None, 9),
    "many": ([[0, 1, 2, 3, 4, 5]], None, 6),
    "many of a long table": ([[0, 1, 2, 3, 4, 5]], None, 9),
    "two texts": ([[5, 0, 1, 4, 2, 3], [0, 1, 2, 3, 0, 1]], [[5, 0, 1, 4, 2, 3], [0, 1, 2, 3, 0, 1]], 6),
}


@pytest.mark.parametrize(("positions", "keys", "rows"), TUPE.values(), ids=TUPE)
@pytest.mark.parametrize("untie_cls", [False, True])
def test_tupe_formula(positions, keys, rows, untie_cls):
    encoding = make("tupe", max_length=rows, untie_cls=untie_cls)
    parameters, there = doubles(encoding), keys or positions
    expected = tupe(parameters, positions, there, untie_cls)
    actual = bias_of(encoding, context_of(encoding, positions, keys), len(there[0]))
    assert_same(encoding, actual, parameters, expected)


@pytest.mark.parametrize(
    ("positions", "length", "rows", "most"),
    [
        ([[500]], 501, 512, 501 * D * H + 2 * D * H * E),  # the other way, all keys are projected: 501 · D · H · E
        ([list(range(20))] * 30, 20, 20, 2 * 20 * D * H * E + 30 * 20 * 20 * H * E),  # the table once, not 30 texts
        ([list(range(20))], 20, 10**5, 2 * 20 * D * H * E + 20 * 20 * H * E),  # 20 rows of a long table
    ],
    ids=["a cache", "texts", "a long table"],
)
def test_tupe_multiplies_no_more_than_it_has_to(positions, length, rows, most):
    encoding = make("tupe", max_length=rows)
    keys = None if len(positions) > 1 else [list(range(length))]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        bias_of(encoding, context_of(encoding, positions, keys), length)
    assert counter.get_total_flops() <= 2 * most


def test_tupe_start():
    """Biases of about 0.2, whatever the width; theta at 0."""
    for size in (64, 512):
        encoding = build(canonical({"type": "tupe", "untie_cls": True}), Geometry(size, 4, size // 4, 128))
        context = context_of(encoding, [list(range(128))])
        bias = encoding("score_bias", torch.zeros(1, 4, 128, size // 4), torch.zeros(1, 4, 128, size // 4), context)[0]
        assert bias[:, 1:, 1:].std().item() == pytest.approx(0.25 / math.sqrt(2), rel=0.2)
        assert not encoding.theta.any() and not bias[:, 0].any() and not bias[:, :, 0].any()


def test_tupe_beyond_its_table():
    model, ids = patched("bert", "tupe"), tokens(1, 5)
    with pytest.raises(ValueError, match=f"position_ids up to {LENGTH} don't fit max_length={LENGTH} of this model's 'tupe'"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 3, LENGTH]]))
    with pytest.raises(ValueError, match=f"max_length={LENGTH}.*truncat"):
        model(tokens(1, LENGTH + 1))
    encoding = make("tupe", max_length=4)
    with pytest.raises(ValueError, match="positions up to 5 don't fit the 4 rows"):  # an encoder's keys, say
        bias_of(encoding, context_of(encoding, [[0]], [[0, 1, 2, 3, 4, 5]]), 6)
    with pytest.raises(ValueError, match=f"max_length={LENGTH + 1}|made for its max_length"):
        hf_posenc.extend(model, max_length=LENGTH + 1)


@pytest.mark.parametrize("host", ["bert", "gpt2"])
@torch.no_grad()
def test_tupe_r(host):
    """TUPE-R is the sum of both biases, before the softmax."""
    model = patched(host, "tupe+t5")
    seen = {}
    for name, part in model.posenc.named_parts().items():
        verb = "score_bias" if name == "tupe" else "distance_bias"
        own = getattr(part, verb)
        setattr(part, verb, lambda *args, name=name, own=own: seen.setdefault(name, own(*args)))
    model.set_attn_implementation("eager")
    both = first(model(tokens()))
    distance = torch.arange(11)[None, :] - torch.arange(11)[:, None]
    summed = seen["tupe"] + seen["t5"][:, distance + 10][None]
    one = patched(host, "tupe")
    one.set_attn_implementation("eager")
    one.posenc.score_bias = lambda *args: summed
    assert_close(first(one(tokens())), both)
    assert set(model.config.position_encoding) >= {"tupe", "t5"}


@pytest.mark.parametrize("kind", ["tupe", "fire"])
@torch.no_grad()
def test_untied_options_in_decoding(kind):
    """With keys of left padding at negative positions, and tokens in pieces."""
    options = {"untie_cls": True} if kind == "tupe" else {"width": 5}
    model = randomize_encoding(hf_posenc.patch(stock("gpt2"), kind, **options))
    ids = tokens(2)
    expected = first(model(ids))
    more, mask = padded(ids, [11, 11], "left")
    assert_close(in_pieces(model, more, [9, 10], mask)[:, 3:], expected)


# Fourier features.


def fourier(parameters, position, scale=1.0):
    """PE of one position, a list of D numbers, in plain float64."""
    frequencies, hidden = parameters["frequencies"], []
    angles = [frequency * position * scale for (frequency,) in frequencies]
    size = 2 * len(frequencies)
    features = [value / math.sqrt(size) for value in [*(a.cos() for a in angles), *(a.sin() for a in angles)]]
    for weights, bias in zip(parameters["hidden_weight"], parameters["hidden_bias"], strict=True):
        z = bias + sum(weight * feature for weight, feature in zip(weights, features, strict=True))
        hidden.append(z * (1 + torch.erf(z / math.sqrt(2))) / 2)
    rows = zip(parameters["weight"], parameters["bias"], strict=True)
    return [bias + sum(weight * value for weight, value in zip(weights, hidden, strict=True)) for weights, bias in rows]


@pytest.mark.parametrize("scale", [1.0, 0.01])
@pytest.mark.parametrize("positions", [[0, 1, 2, 17], [511, 4096, 10**5, 10**7]])
def test_fourier_formula(positions, scale):
    encoding = make("fourier", features=6, width=4, scale=scale)
    parameters = doubles(encoding)
    expected = stacked([fourier(parameters, position, scale) for position in positions])
    assert_same(encoding, encoding("embed", torch.tensor(positions)), parameters, expected)


@pytest.mark.parametrize("gamma", [3.0, 10.0, 100.0])
def test_fourier_start(gamma):
    """Features of positions d apart have products of exp(-d²/2γ²) / 2; the vectors' entries have the deviation asked for, and
    those of neighbours differ."""
    torch.manual_seed(0)
    encoding = build(canonical({"type": "fourier", "gamma": gamma, "features": 1024, "std": 0.5}), Geometry(128))
    angles = encoding.frequencies.detach()[:, 0] * torch.arange(100)[:, None]
    features = torch.cat([angles.cos(), angles.sin()], dim=-1) / 32
    for d in (0, 1, 5, 50):
        assert (features[0] @ features[d]).item() == pytest.approx(math.exp(-(d**2) / (2 * gamma**2)) / 2, abs=0.05)
    vectors = encoding("embed", torch.arange(1024)).float()
    assert vectors.std().item() == pytest.approx(0.5, rel=0.25)
    assert len(vectors.bfloat16().unique(dim=0)) == 1024
    steps = (vectors[1:] - vectors[:-1]).norm(dim=-1) / vectors.norm(dim=-1)[1:]
    assert steps.mean().item() == pytest.approx(math.sqrt(2 - 2 * math.exp(-1 / (2 * gamma**2))), rel=0.5)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("fourier", {"features": 7}, "fourier.features=7: allowed is an even number.*take 8"),
        ("fourier", {"gamma": 0.0}, "fourier.gamma=0.0: allowed is a finite number above 0"),
        ("fourier", {"scale": -1.0}, "fourier.scale=-1.0: allowed is a finite number above 0"),
        ("fourier", {"width": 0}, "fourier.width=0: allowed is an integer above 0"),
        ("fire", {"c": 0.0}, "fire.c=0.0: allowed is a finite number above 0"),
        ("fire", {"threshold": -3.0}, "fire.threshold=-3.0: allowed is a finite number above 0"),
        ("fire", {"width": 0}, "fire.width=0: allowed is an integer above 0"),
        ("tupe", {"untie_cls": 1, "max_length": 4}, "tupe.untie_cls=1: allowed is True or False"),
    ],
)
def test_options(kind, options, message):
    with pytest.raises(ValueError, match=message):
        make(kind, **options)
