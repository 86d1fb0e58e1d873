"""DeBERTa, Transformer-XL, CoPE and FoX: biases that depend on what queries and keys hold, against their papers' formulas in
slow float64 loops, and against the libraries that have them.

Shapes: B batch, Q queries, K keys, H heads, E head_dim.
"""

import math
from dataclasses import replace

import pytest
import torch
from transformers import DebertaV2Config, DynamicCache, MistralConfig, MistralModel, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention, make_log_bucket_position

import hf_posenc
from closeness import assert_close
from hf_posenc.encodings import Geometry, PositionContext, build, canonical
from models import first, patched, randomize_encoding, stock, tokens
from oracles import in_pieces

H, E, D = 3, 4, 12
SCALING = 0.7
KINDS = ("deberta", "transformer_xl", "cope", "fox")
COUNTING = ("cope", "fox")


def make(kind, dtype=torch.float64, seed=5, **options):
    """An encoding for a decoder, its parameters drawn from N(0, 1)."""
    encoding = build(canonical({"type": kind, **options}), Geometry(D, H, E, is_causal=True)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return encoding


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def context_of(encoding, keys_at, queries, consecutive, past=None):
    """The context of the last of these keys `[B][K]` as queries."""
    keys = torch.tensor(keys_at)
    past = keys.shape[1] - queries if past is None else past
    start = past - keys[:, -queries:][:, :1]
    positions = keys[:, past : past + queries].clamp(min=0)
    return PositionContext(encoding, positions, past, start, None if consecutive else keys, scaling=SCALING)


def entries(query, key, one):
    """`[B, H, Q, K]`, entry by entry: one(b, h, i, j)."""
    shape = *query.shape[:3], key.shape[2]
    return torch.stack([one(*index) for index in torch.cartesian_prod(*map(torch.arange, shape)).tolist()]).reshape(shape)


# The papers' formulas. queries_at, keys_at: positions `[B][Q]`, `[B][K]`. texts: which of several each key is of, as letters.


def deberta(encoding, query, key, queries_at, keys_at, texts):
    span = encoding.buckets or encoding.max_distance

    def row(distance):
        """δ, of a distance which is put into its bucket first."""
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
    """The keys from j to i, of one text."""
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


ORACLES = {"deberta": deberta, "transformer_xl": transformer_xl, "cope": cope, "fox": fox}
OPTIONS = {
    "deberta": {"max_distance": 3},
    "deberta, wide": {"max_distance": 40},
    "deberta c2p": {"max_distance": 2, "terms": "c2p"},
    "deberta p2c": {"max_distance": 1, "terms": "p2c"},
    "deberta buckets": {"max_distance": 20, "buckets": 6},
    "transformer_xl": {"base": 50.0},
    "cope": {"max_position": 64},
    "cope, clipped": {"max_position": 3},
    "fox": {},
}
# Positions of all keys, the texts that they are of (-: padding), how many of the last are queries, whether they rise by one.
TOKENS = {
    "from 0": ([[0, 1, 2, 3, 4, 5]] * 2, ["aaaaaa"] * 2, 6, True),
    "left padding": ([[-2, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]], ["--aaaa", "aaaaaa"], 6, True),
    "right padding": ([[0, 1, 2, 3, 4, 5]], ["aaaa--", "aaaaaa"], 6, True),
    "cached": ([[0, 1, 2, 3, 4, 5], [-2, -1, 0, 1, 2, 3]], ["aaaaaa", "--aaaa"], 2, True),
    "one token": ([[0, 1, 2, 3, 4, 5]], ["aaaaaa"] * 2, 1, True),
    "behind right padding": ([[0, 1, 1, 1, 2, 3], [0, 1, 2, 3, 4, 5]], ["aa--aa", "aaaaaa"], 2, False),
    "behind padding at 0": ([[0, 1, 0, 0, 2, 3], [0, 0, 0, 1, 2, 3]], ["aa--aa", "--aaaa"], 2, False),
    "jumping": ([[0, 3, 4, 9, 30, 31]], ["aaaaaa"] * 2, 6, False),
    "packed": ([[0, 1, 2, 0, 0, 1]], ["aaabcc"] * 2, 6, False),
}


def real(texts, queries):
    """`[B, 1, Q, K]`: the keys of its own text that each query sees which is no padding."""
    keys = len(texts[0])
    seen = [[[j <= i and row[j] == row[i] != "-" for j in range(keys)] for i in range(keys - queries, keys)] for row in texts]
    return torch.tensor(seen)[:, None]


@pytest.mark.parametrize(("keys_at", "texts", "queries", "consecutive"), TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("name", OPTIONS)
def test_scores_and_gradients(name, keys_at, texts, queries, consecutive):
    kind = name.replace(",", "").split()[0]
    encoding = make(kind, **OPTIONS[name])
    query = random(2, H, queries, E).requires_grad_()
    key = random(2, H, len(keys_at[0]), E, seed=1).requires_grad_()
    shown = real(texts, queries)
    upstream = random(2, H, queries, len(keys_at[0]), seed=2) * shown
    context = context_of(encoding, keys_at, queries, consecutive)
    rows = (keys_at * 2)[:2]
    results, leaves = [], [query, key, *encoding.parameters()]
    for scores in (
        lambda: encoding("score_bias", query, key, context),
        lambda: ORACLES[kind](encoding, query, key, [row[-queries:] for row in rows], rows, texts),
    ):
        bias = scores()
        found = torch.autograd.grad((bias * upstream).sum(), leaves, allow_unused=True, materialize_grads=True)
        results.append([bias * shown, *found])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=0)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_precision(name, dtype, tolerance):
    """Of a long text, in units of the largest score."""
    kind = name.replace(",", "").split()[0]
    double, encoding = make(kind, **OPTIONS[name]), make(kind, dtype, **OPTIONS[name])
    with torch.no_grad():
        for ours, theirs in zip(double.parameters(), encoding.parameters(), strict=True):
            ours.copy_(theirs)
    query, key = random(1, H, 400, E, dtype=dtype), random(1, H, 400, E, seed=1, dtype=dtype)
    for queries in (400, 1):
        context = replace(context_of(encoding, [list(range(400))], queries, True), computed={})
        actual = encoding("score_bias", query[:, :, -queries:], key, context)
        expected = double("score_bias", query[:, :, -queries:].double(), key.double(), replace(context, computed={}))
        seen = torch.ones(queries, 400, dtype=torch.bool).tril(400 - queries)
        assert ((actual - expected) * seen).abs().max() < tolerance * (expected * seen).abs().max()


# DeBERTa.


@pytest.mark.parametrize(("buckets", "max_distance"), [(4, 5), (6, 20), (32, 128), (256, 512), (256, 1000)])
def test_deberta_agrees_with_transformers_on_buckets(buckets, max_distance):
    encoding = make("deberta", buckets=buckets, max_distance=max_distance)
    distance = torch.arange(-3000, 3001)
    expected = make_log_bucket_position(distance, buckets, max_distance).long()
    assert torch.equal(encoding.rows(distance), expected.clamp(-buckets, buckets) + buckets)


@pytest.mark.parametrize("terms", ["c2p", "p2c", "c2p+p2c"])
@pytest.mark.parametrize(("buckets", "max_distance", "length"), [(0, 16, 16), (8, 64, 64)])
def test_deberta_agrees_with_transformers(terms, buckets, max_distance, length):
    """Up to the span, at which the rows of its position-to-content term, in reverse, are clipped one distance earlier."""
    encoding = make("deberta", terms=terms, buckets=buckets, max_distance=max_distance)
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
    ours = encoding("score_bias", query, key, context_of(encoding, [list(range(length))], length, True))[0] / SCALING
    within = torch.ones(length, length, dtype=torch.bool)
    if buckets:
        step = encoding.rows(torch.arange(length)[:, None] - torch.arange(length)) - encoding.span
        within = step.abs() < encoding.span
    assert within.float().mean() > 0.8
    torch.testing.assert_close((ours * within).float(), (bias * within * math.sqrt(3 * E)).float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name.startswith("deberta")])
def test_deberta_tells_all_its_vectors(name):
    """What attention in blocks is computed from; equal `rows` have equal vectors."""
    encoding, length = make("deberta", **OPTIONS[name]), 30
    distance = torch.arange(1 - length, length)
    of_queries, of_keys = encoding("distance_vectors", distance)
    query, key = random(1, H, length, E), random(1, H, length, E, seed=1)
    index = torch.arange(length)[None, :] - torch.arange(length)[:, None] + length - 1
    expected = torch.zeros(())
    if of_queries is not None:
        expected = torch.einsum("bhqe,hqke->bhqk", query, of_queries[:, index])
    if of_keys is not None:
        expected = expected + torch.einsum("bhke,hqke->bhqk", key, of_keys[:, index])
    bias = encoding("score_bias", query, key, context_of(encoding, [list(range(length))], length, True))
    torch.testing.assert_close(bias, expected * SCALING)
    for vectors in (of_queries, of_keys):
        for row in encoding.rows(distance).unique() if vectors is not None else ():
            alike = vectors[:, encoding.rows(distance) == row]
            assert torch.equal(alike, alike[:, :1].expand_as(alike))


@pytest.mark.parametrize(("buckets", "max_distance"), [(5, 128), (2, 128), (128, 128), (256, 128)])
def test_deberta_of_wrong_sizes(buckets, max_distance):
    words = rf"deberta\.buckets={buckets}, deberta\.max_distance={max_distance}: allowed are 0 buckets, or an even number"
    with pytest.raises(ValueError, match=words):
        make("deberta", buckets=buckets, max_distance=max_distance)


# Transformer-XL.


def test_transformer_xl_at_huge_positions():
    """Where float32 angles would be off by 0.7. What positions there are changes nothing, neither for keys that rise by one
    nor for others."""
    encoding = make("transformer_xl", torch.float32)
    query, key = (random(1, H, 5, E, seed=seed, dtype=torch.float32) for seed in (0, 1))
    found = [
        encoding("score_bias", query, key, context_of(encoding, [[start + n for n in range(5)]], 5, consecutive))
        for start in (0, 10**7)
        for consecutive in (True, False)
    ]
    for each in found[1:]:
        assert_close(each, found[0], rtol=0, atol=1e-6)


def test_transformer_xl_makes_no_vectors_of_pairs():
    """The largest tensor has about two numbers for each query, key and head."""
    encoding, length, sizes = make("transformer_xl"), 64, []
    query, context = random(1, H, length, E), context_of(encoding, [list(range(64))], 64, True)

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            sizes.append(made.numel() if isinstance(made, torch.Tensor) else 0)
            return made

    for each in (context, replace(context, keys=context.key_positions(length), computed={})):
        with Watch():
            encoding("score_bias", query, query, each)
    assert max(sizes) == 2 * H * length * length


# CoPE.


def test_cope_agrees_with_x_transformers():
    theirs = pytest.importorskip("x_transformers.x_transformers").CoPE(E, H, max_pos=4)
    encoding = make("cope", max_position=4)
    theirs.pos_emb.data = encoding.weight.data
    query, key = random(2, H, 12, E), random(2, H, 12, E, seed=1)
    scores = (query @ key.mT * SCALING).masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -torch.inf)
    bias = encoding("score_bias", query, key, context_of(encoding, [list(range(12))], 12, True))
    torch.testing.assert_close(bias.tril(), (theirs(query, scores) * SCALING).tril())


@pytest.mark.parametrize("max_position", [0, 1, -3])
def test_cope_of_wrong_size(max_position):
    with pytest.raises(ValueError, match=rf"cope\.max_position={max_position}: allowed is an integer above 1"):
        make("cope", max_position=max_position)


# FoX.


def test_fox_agrees_with_x_transformers():
    """Whose gates come from the layer's input: here each head has the same key as input."""
    theirs = pytest.importorskip("x_transformers.x_transformers").DataDependentAlibi(E, H).double()
    encoding = make("fox")
    theirs.to_forget_gates[0].weight.data, theirs.to_forget_gates[0].bias.data = encoding.weight.data, encoding.bias.data
    states = random(2, 12, E)
    key = states[:, None].expand(-1, H, -1, -1)
    bias = encoding("score_bias", key, key, context_of(encoding, [list(range(12))], 12, True))
    torch.testing.assert_close(bias, theirs(states).tril())


def test_fox_forgets_at_several_rates_before_it_learns():
    encoding = build(canonical("fox"), Geometry(64, 4, 16, is_causal=True))
    kept = encoding.bias.detach().sigmoid()
    lasting = [-1 / math.log(gate) for gate in kept.tolist()]
    assert lasting == pytest.approx([16, 64, 256, 1024], rel=1e-4)
    assert build(canonical("fox"), Geometry(16, 1, 16, is_causal=True)).bias.sigmoid().item() == pytest.approx(
        math.exp(-1 / 16)
    )


def test_fox_of_a_long_text():
    """After 100,000 tokens, neighbours still differ by one gate; and one which is all but shut is no infinity."""
    encoding = make("fox", torch.float32)
    key = random(1, H, 100_000, E, dtype=torch.float32)
    key[:, :, -1] *= 1e4
    logits = (key.double() * encoding.weight[:, None].double()).sum(-1) + encoding.bias[:, None]
    context = context_of(encoding, [list(range(100_000))], 2, True)
    bias = encoding("score_bias", key[:, :, -2:], key, context)
    assert bias.isfinite().all() and (bias <= 0).all()
    expected = -torch.nn.functional.softplus(-logits[..., -2])
    torch.testing.assert_close(bias[:, :, 0, -3].double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["rope+fox", "fox+rope"])
def test_fox_beside_what_rotates(name):
    with pytest.raises(
        ValueError, match=r"can't act in one layer: the gates of 'fox' come from keys, and 'rope' may.*rope__layers"
    ):
        canonical(name)
    model = hf_posenc.patch(stock("gpt2"), name, rope__layers=[0], fox__layers=[1])
    assert model(tokens()).last_hidden_state.isfinite().all()


# In models.


@pytest.mark.parametrize("kind", COUNTING)
def test_encoders_refuse_what_counts_earlier_tokens(kind):
    with pytest.raises(ValueError, match=f"'{kind}' is defined for attention to earlier tokens alone"):
        hf_posenc.patch(stock("bert"), kind)


@pytest.mark.parametrize("kind", COUNTING)
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_padding_is_not_counted(kind, static):
    """Of prompts padded on the left, the right and not at all in one batch, decoded with a cache; each as if it were alone."""
    model = patched("gpt2", kind, "LMHeadModel", n_positions=32)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [1] * 7, [1, 0, 0, 0, 0, 0, 0]])
    ids = tokens(4, 12)
    whole = torch.cat([mask, torch.ones(4, 5, dtype=torch.long)], dim=1)
    for given in (whole, whole[:2]):  # without a full row, too
        cache = StaticCache(config=model.config, max_cache_len=16) if static else DynamicCache(config=model.config)
        decoded = in_pieces(model, ids[: len(given)], (7, 8, 10), given, cache)
        for row, shown in enumerate(given.bool()):
            alone = first(model(ids[row, shown][None]))[0]
            assert_close(decoded[row, 7:], alone[-5:])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_sliding_window(kind):
    """Its cache has dropped the keys that queries don't see any more, and with them what lies behind those."""
    config = MistralConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        sliding_window=5,
    )
    torch.manual_seed(0)
    model = randomize_encoding(hf_posenc.patch(MistralModel(config).eval(), kind))
    ids = tokens(2, 16)
    expected = first(model(ids))
    for cache in (DynamicCache(config=config), StaticCache(config=config, max_cache_len=20)):
        assert_close(in_pieces(model, ids, (7, 8, 9, 12, 13), None, cache), expected)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    padded = in_pieces(model, ids, (7, 8, 9, 12, 13), mask, DynamicCache(config=config))
    assert_close(padded[0, 3:], first(model(ids[:1, 3:]))[0])


class KeepsNewest(DynamicLayer):
    """A cache that gives out the two newest keys alone, and says that it holds all."""

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
    words = (
        f"'{kind}' counts all keys between two tokens, and of 6 this cache gives out 2: take one that keeps them all, such as D"
    )
    with pytest.raises(ValueError, match=words):
        model(tokens(2, 6), past_key_values=cache)


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_has_its_own(kind):
    own = {name for name, _ in patched("gpt2", kind).named_parameters() if "posenc" in name}
    shared = {name for name, _ in hf_posenc.patch(stock("gpt2"), kind, per_layer=False).named_parameters() if "posenc" in name}
    assert len(own) == 2 * len(shared) > 0 and all(name.startswith("posenc.") for name in shared)


@pytest.mark.parametrize("encoding", ["cope", "fox"])
@pytest.mark.parametrize("of_padding", [0, 3, 4])
@torch.no_grad()
def test_padding_between_a_prefix_and_tokens_is_not_counted(encoding, of_padding):
    """Whatever ids it has: prefix tuning and `generate` give it the next token's, or others."""
    model, prefix, text = patched("gpt2", encoding), tokens(1, 4), tokens(1, 5, seed=1)
    expected = first(model(torch.cat([prefix, text], dim=1)))[:, 4:]
    cache = DynamicCache(config=model.config)
    model(prefix, past_key_values=cache)
    ids, mask = torch.cat([torch.zeros(1, 2, dtype=torch.long), text], dim=1), torch.tensor([[1] * 4 + [0] * 2 + [1] * 5])
    positions = torch.tensor([[of_padding] * 2 + [4, 5, 6, 7, 8]])
    found = [first(model(ids[:, :5], attention_mask=mask[:, :9], position_ids=positions[:, :5], past_key_values=cache))[:, 2:]]
    for i in range(5, 7):
        more = {"attention_mask": mask[:, : i + 5], "position_ids": positions[:, i : i + 1]}
        found.append(first(model(ids[:, i : i + 1], past_key_values=cache, **more)))
    assert_close(torch.cat(found, dim=1), expected)
