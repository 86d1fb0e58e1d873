"""Biases that depend on the content of queries and keys (Shaw, DeBERTa, Transformer-XL, CoPE, FoX) or on their absolute
positions (FIRE, TUPE).

The tests compare them with their papers' formulas in float64 loops, and with other libraries that implement them.

Shapes: B batch, Q queries, K keys, H heads, E head_dim, D hidden_size.
"""

import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DebertaV2Config, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention, make_log_bucket_position

import hf_posenc
import oracles
from closeness import assert_close
from hf_posenc.encodings import CrossContext, PositionContext
from models import CACHE, LENGTH, first, patched, randomize_encoding, stock, tiny, tokens
from oracles import context_of, in_pieces, padded, random

H, E, D = 3, 4, 12
SCALING = 0.7
COUNTING = ("cope", "fox")
make = functools.partial(oracles.make, hidden_size=D, heads=H, head_dim=E, is_causal=True)
double = functools.partial(make, seed=5, dtype=torch.float64)


def context_of_last(encoding, keys_at, queries, consecutive):
    """The context of the last of these keys `[B][K]`, as queries."""
    keys = torch.tensor(keys_at)
    past = keys.shape[1] - queries
    start = past - keys[:, past:][:, :1]
    positions = keys[:, past:].clamp(min=0)
    return context_of(encoding, positions, None if consecutive else keys, past, start, scaling=SCALING)


def bias_of(encoding, positions, keys=None, length=None, **more):
    """The bias `[B, H, Q, K]` of queries and keys with zero content."""
    context = context_of(encoding, positions, keys, **more)
    length = length or len((keys or positions)[0])
    return encoding("score_bias", torch.zeros(1, H, len(positions[0]), E), torch.zeros(1, H, length, E), context)


def entries(query, key, one):
    """`[B, H, Q, K]`, entry by entry: one(b, h, i, j)."""
    shape = *query.shape[:3], key.shape[2]
    return torch.stack([one(*index) for index in torch.cartesian_prod(*map(torch.arange, shape)).tolist()]).reshape(shape)


# The papers' formulas. queries_at, keys_at: positions `[B][Q]` and `[B][K]`. texts: the packed text of each key, as a letter.


def shaw(encoding, query, key, queries_at, keys_at, texts):
    """Equation 4."""

    def one(b, h, i, j):
        distance = keys_at[b][j] - queries_at[b][i]
        vector = encoding.weight[max(-encoding.max_distance, min(encoding.max_distance, distance)) + encoding.max_distance]
        states = query[b, h, i] + key[b, h, j] if encoding.terms == "keys+queries" else query[b, h, i]
        return states @ vector * SCALING

    return entries(query, key, one)


def deberta(encoding, query, key, queries_at, keys_at, texts):
    span = encoding.buckets or encoding.max_distance

    def row(distance):
        """δ of a distance, which is assigned to a bucket first."""
        if encoding.buckets and abs(distance) > (half := encoding.buckets // 2):
            ratio = math.log(abs(distance) / half) / math.log((encoding.max_distance - 1) / half)
            distance = math.copysign(half + math.ceil(ratio * (half - 1)), distance)
        return 0 if distance <= -span else 2 * span - 1 if distance >= span else int(distance) + span

    def one(b, h, i, j):
        total = torch.zeros((), dtype=query.dtype)
        distance = queries_at[b][i] - keys_at[b][j]
        if "c2p" in encoding.terms:
            total = total + query[b, h, i] @ encoding.relative_keys[h, row(distance)]
        if "p2c" in encoding.terms:
            total = total + key[b, h, j] @ encoding.relative_queries[h, row(-distance)]
        return total * SCALING

    return entries(query, key, one)


def transformer_xl(encoding, query, key, queries_at, keys_at, texts):
    def one(b, h, i, j):
        distance = queries_at[b][i] - keys_at[b][j]
        angles = [distance / encoding.base ** (2 * n / D) for n in range(D // 2)]
        wave = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=query.dtype)
        terms = query[b, h, i] + encoding.position[h], encoding.weight[h] @ wave
        return (terms[0] @ terms[1] + encoding.content[h] @ key[b, h, j]) * SCALING

    return entries(query, key, one)


def between(texts, b, j, i):
    """The keys from j to i that belong to the same text."""
    return [index for index in range(j, i + 1) if texts[b][index] == texts[b][j]]


def cope(encoding, query, key, queries_at, keys_at, texts):
    past = key.shape[2] - query.shape[2]

    def one(b, h, i, j):
        asked = query[b, h, i]
        gates = [torch.sigmoid(asked @ key[b, h, index] * SCALING) for index in between(texts, b, j, i + past)]
        position = sum(gates).clamp(max=encoding.max_position - 1)
        low, high = math.floor(position.item()), math.ceil(position.item())
        part = position - low
        return (asked @ encoding.weight[high] * part + asked @ encoding.weight[low] * (1 - part)) * SCALING

    return entries(query, key, lambda *at: one(*at) if at[3] <= at[2] + past else query.new_zeros(()))


def fox(encoding, query, key, queries_at, keys_at, texts):
    past = key.shape[2] - query.shape[2]

    def one(b, h, i, j):
        total = torch.zeros((), dtype=query.dtype)
        for index in between(texts, b, j, i + past)[1:]:
            total = total + torch.log(torch.sigmoid(encoding.weight[h] @ key[b, h, index] + encoding.bias[h]))
        return total

    return entries(query, key, lambda *at: one(*at) if at[3] <= at[2] + past else query.new_zeros(()))


def fire(encoding, query, key, queries_at, keys_at, texts, longest=None):
    """longest: a function that returns n_i of the query at position i in row b. In decoders, n_i is i."""
    c, length = encoding.logarithms.exp()

    def psi(x):
        return (c * x + 1).log()

    def one(b, h, i, j):
        here, there = queries_at[b][i], keys_at[b][j]
        whole = longest(b, here) if longest else here
        ratio = (psi(abs(here - there)) / psi(whole if whole > length else length)).clamp(max=1) * (1 if here >= there else -1)
        hidden = (encoding.hidden_weight * ratio + encoding.hidden_bias).clamp(min=0)
        return encoding.weight[h] @ hidden + encoding.bias[h]

    return entries(query, key, one)


def tupe(encoding, query, key, queries_at, keys_at, texts):
    def projected(weight, position, h):
        return weight[h * E : (h + 1) * E] @ encoding.weight[position]

    def one(b, h, i, j):
        here, there = queries_at[b][i], max(keys_at[b][j], 0)
        if encoding.untie_cls and 0 in (here, there):
            return encoding.theta[0 if here == 0 else 1, h]
        return projected(encoding.query_weight, here, h) @ projected(encoding.key_weight, there, h) / math.sqrt(2 * E)

    return entries(query, key, one)


ORACLES = {each.__name__: each for each in (shaw, deberta, transformer_xl, cope, fox, fire, tupe)}
OPTIONS = {
    "shaw": {"max_distance": 3},
    "shaw, both": {"max_distance": 40, "terms": "keys+queries"},
    "deberta": {"max_distance": 3},
    "deberta, wide": {"max_distance": 40},
    "deberta c2p": {"max_distance": 2, "terms": "c2p"},
    "deberta p2c": {"max_distance": 1, "terms": "p2c"},
    "deberta buckets": {"max_distance": 20, "buckets": 6},
    "transformer_xl": {"base": 50.0},
    "cope": {"max_position": 64},
    "cope, clipped": {"max_position": 3},
    "fox": {},
    "fire": {"width": 7},
    "tupe": {"max_length": 400},
    "tupe untied": {"max_length": 400, "untie_cls": True},
    "tupe short": {"max_length": 6, "untie_cls": True},  # fewer rows than positions: the whole table is projected
}
# The positions of all keys, their texts (-: padding), the number of queries at the end, and whether positions increase by one.
TOKENS = {
    "from 0": ([[0, 1, 2, 3, 4, 5]] * 2, ["aaaaaa"] * 2, 6, True),
    "left padding": ([[-2, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]], ["--aaaa", "aaaaaa"], 6, True),
    "right padding": ([[0, 1, 2, 3, 4, 5]], ["aaaa--", "aaaaaa"], 6, True),
    "cached": ([[0, 1, 2, 3, 4, 5], [-2, -1, 0, 1, 2, 3]], ["aaaaaa", "--aaaa"], 2, True),
    "one token": ([[0, 1, 2, 3, 4, 5]], ["aaaaaa"] * 2, 1, True),
    "behind right padding": ([[0, 1, 1, 1, 2, 3], [0, 1, 2, 3, 4, 5]], ["aa--aa", "aaaaaa"], 2, False),
    "behind padding at 0": ([[0, 1, 0, 0, 2, 3], [0, 0, 0, 1, 2, 3]], ["aa--aa", "--aaaa"], 2, False),
    "jumping": ([[0, 3, 4, 9, 30, 31]], ["aaaaaa"] * 2, 6, False),
    "backwards": ([[9, 2, 2, 30, 1, 0], [3, 2, 300, 7, 7, 5]], ["aaaaaa"] * 2, 3, False),
    "packed": ([[0, 1, 2, 0, 0, 1]], ["aaabcc"] * 2, 6, False),
}


def real(texts, queries):
    """`[B, 1, Q, K]`: whether a query sees a key. The key must be in the same text, not padding, and not later."""
    keys = len(texts[0])
    seen = [[[j <= i and row[j] == row[i] != "-" for j in range(keys)] for i in range(keys - queries, keys)] for row in texts]
    return torch.tensor(seen)[:, None]


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        (name, case)
        for name, case in itertools.product(OPTIONS, TOKENS)
        if not (name.startswith(COUNTING) and case == "backwards")
        and not (name == "tupe short" and case in ("jumping", "backwards"))
    ],
)
def test_scores_and_gradients(name, tokens):
    kind, (keys_at, texts, queries, consecutive) = name.replace(",", "").split()[0], TOKENS[tokens]
    encoding = double(kind, **OPTIONS[name])
    query, key = random(2, H, queries, E).requires_grad_(), random(2, H, 6, E, seed=1).requires_grad_()
    shown = real(texts, queries)
    upstream = random(2, H, queries, 6, seed=2) * shown
    context = context_of_last(encoding, keys_at, queries, consecutive)
    rows = (keys_at * 2)[:2]
    results, leaves = [], [query, key, *encoding.parameters()]
    for scores in (
        lambda: encoding("score_bias", query, key, context),
        lambda: ORACLES[kind](encoding, query, key, context.positions.tolist() * 2, rows, texts),
    ):
        bias = scores()
        found = torch.autograd.grad((bias * upstream).sum(), leaves, allow_unused=True, materialize_grads=True)
        results.append([bias * shown, *found])
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@torch.no_grad()
def test_precision(name, dtype, tolerance):
    """The errors in a long text are small relative to the largest score. FIRE and FoX, also under autocast, round only their
    parameters and states.
    """
    kind, length = name.replace(",", "").split()[0], 6 if name == "tupe short" else 400
    encoding = make(kind, seed=5, dtype=dtype, **OPTIONS[name])
    exact = make(kind, **OPTIONS[name]).double()
    exact.load_state_dict(encoding.state_dict())
    query, key = random(1, H, length, E, dtype=dtype), random(1, H, length, E, seed=1, dtype=dtype)
    for queries in (length, 1):
        context = context_of_last(encoding, [list(range(length))], queries, True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind in ("fire", "fox")):
            actual = encoding("score_bias", query[:, :, -queries:], key, context)
        expected = exact("score_bias", query[:, :, -queries:].double(), key.double(), replace(context, computed={}))
        seen = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
        most = 1e-5 if kind in ("fire", "fox") else tolerance
        assert ((actual - expected) * seen).abs().max() < most * (expected * seen).abs().max()


# Shaw and DeBERTa.


def test_shaw_start_shows_the_order():
    torch.manual_seed(0)
    weight = make("shaw", head_dim=64).weight.detach()
    assert weight.shape == (257, 64) and weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(("buckets", "max_distance"), [(4, 5), (6, 20), (32, 128), (256, 512), (256, 1000)])
def test_deberta_agrees_with_transformers_on_buckets(buckets, max_distance):
    encoding = make("deberta", buckets=buckets, max_distance=max_distance)
    distance = torch.arange(-3000, 3001)
    expected = make_log_bucket_position(distance, buckets, max_distance).long()
    assert torch.equal(encoding.rows(distance), expected.clamp(-buckets, buckets) + buckets)


@pytest.mark.parametrize("terms", ["c2p", "p2c", "c2p+p2c"])
@pytest.mark.parametrize(("buckets", "max_distance", "length"), [(0, 16, 16), (8, 64, 64)])
def test_deberta_agrees_with_transformers(terms, buckets, max_distance, length):
    """The bias agrees below the span. At the span, Transformers clips the reversed rows of its position-to-content term one
    distance earlier.
    """
    encoding = double("deberta", terms=terms, buckets=buckets, max_distance=max_distance)
    config = DebertaV2Config(
        hidden_size=H * E,
        num_attention_heads=H,
        relative_attention=True,
        pos_att_type=terms.split("+"),
        position_buckets=buckets or -1,
        max_relative_positions=max_distance,
        share_att_key=False,
    )
    theirs, table = DisentangledSelfAttention(config).double(), random(2 * encoding.span, H * E, seed=7)
    with torch.no_grad():
        if "c2p" in terms:
            encoding.relative_keys.copy_(theirs.pos_key_proj(table).unflatten(-1, (H, E)).transpose(0, 1))
        if "p2c" in terms:
            rows = theirs.pos_query_proj(table).unflatten(-1, (H, E)).transpose(0, 1)
            encoding.relative_queries.copy_(rows.flip(1).roll(1, dims=1))
    query, key = random(1, H, length, E), random(1, H, length, E, seed=1)
    bias = theirs.disentangled_attention_bias(query[0], key[0], None, table, scale_factor=3)
    ours = encoding("score_bias", query, key, context_of_last(encoding, [list(range(length))], length, True))[0] / SCALING
    within = torch.ones(length, length, dtype=torch.bool)
    if buckets:
        step = encoding.rows(torch.arange(length)[:, None] - torch.arange(length)) - encoding.span
        within = step.abs() < encoding.span
    assert within.float().mean() > 0.8
    torch.testing.assert_close((ours * within).float(), (bias * within * math.sqrt(3 * E)).float(), atol=1e-5, rtol=1e-5)


# Transformer-XL.


def test_transformer_xl_at_huge_positions():
    """At these positions, float32 angles would be off by 0.7. The scores don't depend on the absolute positions, whether keys
    increase by one or not.
    """
    encoding = make("transformer_xl", seed=5)
    query, key = (random(1, H, 5, E, seed=seed, dtype=torch.float32) for seed in (0, 1))
    found = [
        encoding("score_bias", query, key, context_of_last(encoding, [[start + n for n in range(5)]], 5, consecutive))
        for start in (0, 10**7)
        for consecutive in (True, False)
    ]
    for each in found[1:]:
        assert_close(each, found[0], rtol=0, atol=1e-6)


def test_transformer_xl_returns_copies_of_its_parameters():
    """FSDP frees the memory of the parameters after a call."""
    encoding = double("transformer_xl")
    owned = {each.untyped_storage().data_ptr() for each in encoding.parameters()}
    assert owned.isdisjoint(each.untyped_storage().data_ptr() for each in encoding("query_offsets"))


@pytest.mark.parametrize("length", [64, 65, 150])
def test_transformer_xl_of_one_query_after_many_keys(length):
    """Distances to a single query are computed in steps of 64 keys. The first text has padding before it."""
    model = patched("gpt2", "transformer_xl", max_length=256).double()
    ids, mask = tokens(2, length), torch.ones(2, length, dtype=torch.long)
    mask[0, :7] = 0
    with torch.no_grad():
        expected = first(model(input_ids=ids, attention_mask=mask))[:, -1:]
        cache = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True)[CACHE]
        found = first(model(input_ids=ids[:, -1:], attention_mask=mask, **{CACHE: cache}))
    assert_close(found, expected)


def test_transformer_xl_makes_no_vectors_of_pairs():
    """The largest tensor has about two numbers for each query, key, and head."""
    encoding, length, sizes = double("transformer_xl"), 64, []
    query, context = random(1, H, length, E), context_of_last(encoding, [list(range(64))], 64, True)

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            sizes.append(made.numel() if isinstance(made, torch.Tensor) else 0)
            return made

    for each in (context, replace(context, keys=context.key_positions(length), computed={})):
        with Watch():
            encoding("score_bias", query, query, each)
    assert max(sizes) == 2 * H * length * length


# CoPE and FoX.


def test_cope_agrees_with_x_transformers():
    theirs = pytest.importorskip("x_transformers.x_transformers").CoPE(E, H, max_pos=4)
    encoding = double("cope", max_position=4)
    theirs.pos_emb.data = encoding.weight.data
    query, key = random(2, H, 12, E), random(2, H, 12, E, seed=1)
    scores = (query @ key.mT * SCALING).masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -torch.inf)
    bias = encoding("score_bias", query, key, context_of_last(encoding, [list(range(12))], 12, True))
    torch.testing.assert_close(bias.tril(), (theirs(query, scores) * SCALING).tril())


def test_fox_agrees_with_x_transformers():
    """In x-transformers, gates are computed from the layer's input. Here, each head has the same key as input."""
    theirs = pytest.importorskip("x_transformers.x_transformers").DataDependentAlibi(E, H).double()
    encoding = double("fox")
    theirs.to_forget_gates[0].weight.data, theirs.to_forget_gates[0].bias.data = encoding.weight.data, encoding.bias.data
    states = random(2, 12, E)
    key = states[:, None].expand(-1, H, -1, -1)
    bias = encoding("score_bias", key, key, context_of_last(encoding, [list(range(12))], 12, True))
    torch.testing.assert_close(bias, theirs(states).tril())


def test_fox_forgets_at_several_rates_before_it_learns():
    kept = make("fox", heads=4).bias.detach().sigmoid()
    lasting = [-1 / math.log(gate) for gate in kept.tolist()]
    assert lasting == pytest.approx([16, 64, 256, 1024], rel=1e-4)
    assert make("fox", heads=1).bias.sigmoid().item() == pytest.approx(math.exp(-1 / 16))


def test_fox_of_a_long_text():
    """After 100,000 tokens, adjacent keys still differ by one gate. A nearly closed gate gives no infinity."""
    encoding = make("fox", seed=5)
    key = random(1, H, 100_000, E, dtype=torch.float32)
    key[:, :, -1] *= 1e4
    logits = (key.double() * encoding.weight[:, None].double()).sum(-1) + encoding.bias[:, None]
    context = context_of_last(encoding, [list(range(100_000))], 2, True)
    bias = encoding("score_bias", key[:, :, -2:], key, context)
    assert bias.isfinite().all() and (bias <= 0).all()
    expected = -torch.nn.functional.softplus(-logits[..., -2])
    torch.testing.assert_close(bias[:, :, 0, -3].double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", [*COUNTING, "xpos"])
def test_encoders_refuse_what_is_for_decoders(kind):
    with pytest.raises(ValueError, match=f"'{kind}' requires causal attention"):
        hf_posenc.patch(stock("bert"), kind)


@pytest.mark.parametrize("kind", COUNTING)
@torch.no_grad()
def test_padding_is_not_counted(kind):
    """Prompts with left padding, right padding, and no padding decode in one batch with a cache as each does alone."""
    model, ids = patched("gpt2", kind, n_positions=32), tokens(4, 12)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [1] * 7, [1, 0, 0, 0, 0, 0, 0]])
    whole = torch.nn.functional.pad(mask, (0, 5), value=1)
    alone = [first(model(ids[row, shown][None]))[0, -5:] for row, shown in enumerate(whole.bool())]
    for given, static in ((whole, True), (whole[:2], True), (whole[:2], False)):  # also without a full row
        cache = StaticCache(config=model.config, max_cache_len=16) if static else DynamicCache(config=model.config)
        decoded = in_pieces(model, ids[: len(given)], (7, 8, 10), given, cache)
        assert_close(list(decoded[:, 7:]), alone[: len(given)])


@pytest.mark.parametrize("kind", ["deberta", "transformer_xl", "cope", "fox"])
@torch.no_grad()
def test_a_sliding_window(kind):
    """The cache has dropped the keys outside the window, and everything before them."""
    model = randomize_encoding(hf_posenc.patch(tiny("MistralModel", sliding_window=5), kind))
    ids, mask = tokens(2, 16), torch.ones(2, 16, dtype=torch.long)
    expected, mask[0, :3] = first(model(ids)), 0
    assert_close(in_pieces(model, ids, (7, 8, 9, 12), None, StaticCache(config=model.config, max_cache_len=20)), expected)
    found = in_pieces(model, ids, (7, 8, 9, 12, 13), mask)
    assert_close([found[1], found[0, 3:]], [expected[1], first(model(ids[:1, 3:]))[0]])


class KeepsNewest(DynamicLayer):
    """A cache that returns only the two newest keys, and claims that it holds all keys."""

    seen = 0

    def update(self, key, value, *args, **kwargs):
        self.seen += key.shape[2]
        key, value = super().update(key, value, *args, **kwargs)
        self.keys, self.values = key[:, :, -2:], value[:, :, -2:]
        return self.keys, self.values

    def get_seq_length(self):
        return self.seen

    def get_mask_sizes(self, query_length):
        return 2, 0


@pytest.mark.parametrize("kind", COUNTING)
def test_a_cache_without_the_keys_between(kind):
    model = patched("gpt2", kind)
    cache = DynamicCache(config=model.config)
    cache.layers = [KeepsNewest(config=model.config) for _ in cache.layers]
    with pytest.raises(ValueError, match=f"'{kind}' counts .* only 2 of 6.*DynamicCache"):
        model(tokens(2, 6), **{CACHE: cache})


@pytest.mark.parametrize("encoding", COUNTING)
@pytest.mark.parametrize("of_padding", [0, 4])
@torch.no_grad()
def test_padding_between_a_prefix_and_tokens_is_not_counted(encoding, of_padding):
    """The ids of the padding don't matter. Prefix tuning and `generate` give padding the id of the next token, or others."""
    model, prefix, text = patched("gpt2", encoding), tokens(1, 4), tokens(1, 5, seed=1)
    expected = first(model(torch.cat([prefix, text], dim=1)))[:, 4:]
    cache = DynamicCache(config=model.config)
    model(prefix, **{CACHE: cache})
    ids, mask = torch.cat([torch.zeros(1, 2, dtype=torch.long), text], dim=1), torch.tensor([[1] * 4 + [0] * 2 + [1] * 5])
    positions = torch.tensor([[of_padding] * 2 + [4, 5, 6, 7, 8]])
    found = [first(model(ids[:, :5], attention_mask=mask[:, :9], position_ids=positions[:, :5], **{CACHE: cache}))[:, 2:]]
    for i in range(5, 7):
        more = {"attention_mask": mask[:, : i + 5], "position_ids": positions[:, i : i + 1]}
        found.append(first(model(ids[:, i : i + 1], **{CACHE: cache}, **more)))
    assert_close(torch.cat(found, dim=1), expected)


# FIRE.


ENCODERS = {
    "from 0": ([[0, 1, 2, 3, 4, 5]], None),
    "by pair": ([[0, 1, 2, 3, 4, 5]], [[0, 1, 2, 3, 4, 5]]),
    "of several lengths": ([[0, 1, 2, 3, 3, 3], [0, 1, 2, 3, 4, 5]], None),
    "jumping": ([[9, 2, 300, 4]], [[9, 2, 300, 4]]),
}


def assert_fire(encoding, actual, positions, there, longest):
    query, key = (torch.zeros(len(rows), H, len(rows[0]), E).double() for rows in (positions, there))
    expected = fire(encoding, query, key, positions, there, None, longest)
    assert_close(actual, expected, rtol=1e-10)
    upstream, parameters = random(*expected.shape), list(encoding.parameters())
    found, right = (torch.autograd.grad((bias * upstream).sum(), parameters) for bias in (actual, expected))
    assert_close(found, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("positions", "keys"), ENCODERS.values(), ids=ENCODERS)
def test_fire_in_encoders(positions, keys):
    """n_i is the last position of the text, and distances to later keys are negative."""
    encoding = double("fire", width=7, is_causal=False)
    actual = bias_of(encoding, positions, keys, start=[[0]] * len(positions))
    # The positions of right padding continue by index. The mask hides these keys.
    there = keys or [list(range(len(row))) for row in positions]
    assert_fire(encoding, actual, there, there, lambda b, i: max(positions[b]))


@pytest.mark.parametrize("threshold", [5.5, 6.5, 7.5, 40.0])
def test_fire_in_decoders_by_distance(threshold):
    """Up to the threshold, all queries have one normalizer."""
    encoding, positions = double("fire", width=7), [list(range(8))]
    with torch.no_grad():
        encoding.logarithms[1] = math.log(threshold)
    assert_fire(encoding, bias_of(encoding, positions), positions, positions, lambda b, i: i)


@pytest.mark.parametrize("queries", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[7]]])
def test_fire_between_stacks(queries):
    """n_i is the greater of the query's position and the last position that the encoder's mask shows."""
    encoding = double("fire", width=7, is_causal=False)
    cross = CrossContext(encoding, torch.tensor([[0, 1, 1, 1, 1, 0]]))
    own = PositionContext(None, torch.tensor(queries), 0, torch.zeros(1, 1), cross=cross)
    states = torch.zeros(1, H, len(queries[0]), E), torch.zeros(1, H, 6, E)
    actual = encoding("score_bias", *states, own.for_cross_attention(6))
    assert_fire(encoding, actual, queries, [[-1, 0, 1, 2, 3, 4]], lambda b, i: max(i, 3))


def test_fire_start():
    """c and L have the paper's values. The MLP is initialized as torch's layers are."""
    encoding, other = make("fire"), make("fire", c=2.0, threshold=9, width=3)
    assert encoding.hidden_weight.shape == (32,) and encoding.weight.shape == (H, 32)
    assert encoding.logarithms.exp().tolist() == pytest.approx([0.1, 512.0])
    assert other.logarithms.exp().tolist() == pytest.approx([2.0, 9.0])
    # Up to the threshold, a bias depends only on the distance.
    bias = bias_of(encoding, [list(range(40))])[0]
    torch.testing.assert_close(bias[:, 5, :6], bias[:, 30, 25:31])
    assert (bias[:, 30, 1:31] - bias[:, 30, :30]).abs().amax(0).min() > 1e-4


@pytest.mark.parametrize("value", [-1e6, -90.0, 90.0, 1e6])
@pytest.mark.parametrize("is_causal", [False, True])
def test_fire_is_finite_for_all_parameters(value, is_causal):
    encoding = make("fire", seed=0, is_causal=is_causal)
    for place in (0, 1):
        with torch.no_grad():
            encoding.logarithms.zero_()[place] = value
        bias = bias_of(encoding, [[0, 1, 2, 10**7]], [[0, 1, 2, 10**7]])
        bias.square().sum().backward()
        assert bias.isfinite().all() and all(parameter.grad.isfinite().all() for parameter in encoding.parameters())


@pytest.mark.parametrize("length", [1, 9, 10])
def test_fire_in_chunks(monkeypatch, length):
    """There are never more than CHUNK hidden values at once, and none are kept for the backward pass. The results equal those
    of one piece.
    """
    encoding, width = make("fire", seed=0), 32
    compute = functools.partial(bias_of, encoding, [list(range(length))])
    whole = compute()
    expected = torch.autograd.grad(whole.square().sum(), list(encoding.parameters()))
    limit, sizes, layers = 3 * length * width, [], type(encoding)._layers
    monkeypatch.setattr("hf_posenc.encodings.fire.CHUNK", limit + width)
    monkeypatch.setattr(type(encoding), "_layers", lambda self, part: sizes.append(part.numel() * width) or layers(self, part))
    with torch.no_grad():
        assert_close(compute(), whole)
    assert sum(sizes) == length**2 * width and max(sizes) <= limit + width
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda tensor: tensor):
        chunked = compute()
    assert_close(chunked, whole)
    assert length == 1 or max(saved) < limit
    assert_close(torch.autograd.grad(chunked.square().sum(), list(encoding.parameters())), expected)


@pytest.mark.parametrize("kind", ["fire", "tupe"])
def test_biases_are_computed_once_unless_they_are_trained(monkeypatch, kind):
    calls = []
    for per_layer in (False, True):
        model = hf_posenc.patch(stock("gpt2"), kind, per_layer=per_layer)
        cls = type(next(module for module in model.modules() if getattr(module, "type", None) == kind))
        with monkeypatch.context() as patch:
            patch.setattr(cls, "_bias", lambda self, *args, own=cls._bias: calls.append(1) or own(self, *args))
            with torch.no_grad():
                model(tokens())
            calls.append("trained")
            model(tokens())
            calls.append("next")
    assert calls == [1, "trained", 1, 1, "next", 1, 1, "trained", 1, 1, "next"]


@pytest.mark.parametrize("kind", ["fire", "tupe"])
@torch.no_grad()
def test_between_stacks_padding_and_caches_change_nothing(kind):
    model = randomize_encoding(hf_posenc.patch(tiny("BartModel"), kind, where=["encoder", "decoder", "cross"], max_length=12))
    source, target = tokens(1, 9), tokens(1, 7, seed=1)
    expected = first(model(source, decoder_input_ids=target))
    for side in ("left", "right"):
        more, mask = padded(source, [9], side)
        given = dict(encoder_outputs=model.encoder(more, attention_mask=mask), attention_mask=mask, use_cache=True)
        given[CACHE] = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
        pieces = [
            first(model(**given, decoder_input_ids=target[:, start:stop])) for start, stop in itertools.pairwise((0, 3, 4, 7))
        ]
        assert_close(torch.cat(pieces, dim=1), expected)


# TUPE.


@pytest.mark.parametrize(
    ("positions", "length", "rows", "most"),
    [
        ([[500]], 501, 512, 501 * D * H + 2 * D * H * E),  # the other way projects all keys: 501 · D · H · E
        ([list(range(20))] * 30, 20, 20, 2 * 20 * D * H * E + 30 * 20 * 20 * H * E),  # projects the table once, not 30 texts
        ([list(range(20))], 20, 10**5, 2 * 20 * D * H * E + 20 * 20 * H * E),  # projects 20 rows of a long table
    ],
    ids=["a cache", "texts", "a long table"],
)
def test_tupe_multiplies_no_more_than_it_has_to(positions, length, rows, most):
    encoding = make("tupe", max_length=rows)
    keys = None if len(positions) > 1 else [list(range(length))]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        bias_of(encoding, positions, keys, length)
    assert counter.get_total_flops() <= 2 * most


def test_tupe_start():
    """The biases are about 0.2 for any width, and theta is 0."""
    for size in (64, 512):
        encoding = oracles.make("tupe", size, H, size // 4, max_length=128, untie_cls=True)
        bias = bias_of(encoding, [list(range(128))])[0]
        assert bias[:, 1:, 1:].std().item() == pytest.approx(0.25 / math.sqrt(2), rel=0.2)
        assert not encoding.theta.any() and not bias[:, 0].any() and not bias[:, :, 0].any()


def test_tupe_beyond_its_table():
    model, ids = patched("bert", "tupe"), tokens(1, 5)
    with pytest.raises(ValueError, match=f"position_ids up to {LENGTH} don't fit max_length={LENGTH} of this model's 'tupe'"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 3, LENGTH]]))
    with pytest.raises(ValueError, match=f"max_length={LENGTH}.*truncat"):
        model(tokens(1, LENGTH + 1))
    with pytest.raises(ValueError, match="Positions up to 5 .* the 4 position embeddings"):  # such as an encoder's keys
        bias_of(make("tupe", max_length=4), [[0]], [[0, 1, 2, 3, 4, 5]])
    with pytest.raises(ValueError, match=f"max_length={LENGTH + 1}|limited to its max_length"):
        hf_posenc.extend(model, max_length=LENGTH + 1)


class Unit(torch.nn.Module):
    """A wrapper of a module, with its attributes, as FSDP1 wraps each unit of its policy."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


@pytest.mark.parametrize("length", [8, 300])
def test_wrapped_parts_of_a_composition_have_their_effect(length):
    model, ids = patched("bert", "shaw+t5", max_length=length), tokens(2, length)
    expected = first(model(input_ids=ids))
    for whole in [each for each in model.modules() if isinstance(each, hf_posenc.PositionEncoding) and "+" in each.type]:
        for name in ("shaw", "t5"):
            if name in whole._modules:
                whole.add_module(name, Unit(whole._modules[name]))
    assert torch.equal(first(model(input_ids=ids)), expected)
    assert sum(isinstance(each, Unit) for each in model.modules()) > 1
