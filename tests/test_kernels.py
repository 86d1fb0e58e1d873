"""How hf-posenc chooses the implementation of a bias. All implementations give the outputs and gradients of the direct
computation, with limited memory.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_posenc
import models
from closeness import assert_apart, assert_close, assert_equal
from hf_posenc.attention import bias_backends, blockwise, dispatch
from hf_posenc.attention.dispatch import AttentionCall
from hf_posenc.attention.distance_table import DistanceTable, VisibleSpans
from hf_posenc.encodings import Geometry, PositionContext
from models import CACHE, CAUSAL, ENCODINGS, first, pairs, patched, stock, tokens
from oracles import gradients, padded, random

H, E = 3, 4


BIASING = [
    name for name in ENCODINGS if dispatch.adds_score_bias(hf_posenc.list_encodings().get(name, hf_posenc.PositionEncoding))
]


def attention_of(query, key, value, columns, seen, scaling):
    """Attention from all scores at once. Queries that see no key give zeros."""
    queries, keys = query.shape[2], key.shape[2]
    column = (keys - 1 - torch.arange(keys)) + torch.arange(queries)[:, None]  # column 0: query 0 and the last key
    content, position = (0, 0) if columns.query_offsets is None else (each[:, None] for each in columns.query_offsets)
    scores = (query + content) @ key.mT
    if columns.for_queries is not None:
        scores = scores + (columns.for_queries[:, column] * (query + position)[:, :, :, None]).sum(-1)
    if columns.for_keys is not None:
        scores = scores + (columns.for_keys[:, column] * key[:, :, None]).sum(-1)
    scores = scores * scaling + (0 if columns.values is None else columns.values[:, column])
    shown = torch.zeros(len(query), 1, queries, keys, dtype=torch.bool)
    for first_row, last_row, begin, end in seen.spans:
        for i in range(queries):
            last = min(end, i + 1 + seen.shift) if seen.is_causal else end
            shown[first_row:last_row, 0, i, begin : max(last, begin)] = True
    return scores.masked_fill(~shown, -torch.inf).softmax(-1).nan_to_num(0) @ value


SEEN = {
    "all": lambda queries, keys: VisibleSpans(((0, 2, 0, keys),)),
    "right padding": lambda queries, keys: VisibleSpans(((0, 1, 0, keys), (1, 2, 0, keys - 3))),
    "left padding": lambda queries, keys: VisibleSpans(((0, 1, 4, keys), (1, 2, 0, keys))),
    "hidden row": lambda queries, keys: VisibleSpans(((0, 1, 0, keys), (1, 2, 0, 0))),
    "causal": lambda queries, keys: VisibleSpans(((0, 2, 0, keys),), True, keys - queries),
}


def inputs(queries, keys, kinds, heads_of_vectors, dtype=torch.float64, seed=0):
    def draw(*shape):
        draw.number += 1
        return random(*shape, seed=100 * seed + draw.number, dtype=dtype).requires_grad_()

    draw.number, columns = 0, queries + keys - 1
    states = draw(2, H, queries, E), draw(2, H, keys, E), draw(2, H, keys, E)
    values = draw(H, columns) if "values" in kinds else None
    vectors = [draw(heads_of_vectors, columns, E) if kind in kinds else None for kind in ("queries", "keys")]
    offsets = (draw(H, E), draw(H, E)) if "offsets" in kinds else None
    return states, DistanceTable(values, *vectors, head=1, tail=1, query_offsets=offsets)


def assert_alike(found, expected, leaves, upstream=None):
    """Compares outputs and gradients in float64."""
    assert_close(found, expected, rtol=1e-10, atol=1e-10)
    upstream = random(*found.shape, seed=9) if upstream is None else upstream
    grads = [torch.autograd.grad(each, leaves, upstream) for each in (found, expected)]
    for mine, theirs in zip(*grads, strict=True):
        assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blockwise, "FORWARD_QUERIES", 5)
    monkeypatch.setattr(blockwise, "BACKWARD_QUERIES", 4)


@pytest.mark.parametrize("offsets", ["", " offsets"])
@pytest.mark.parametrize("kinds", ["values", "queries", "keys", "values queries", "values queries keys"])
@pytest.mark.parametrize("seen", SEEN)
def test_blocks_against_all_scores_at_once(small_blocks, kinds, offsets, seen):
    for queries, keys, heads_of_vectors in ((11, 11, 1), (6, 13, H)):
        (query, key, value), columns = inputs(queries, keys, kinds + offsets, heads_of_vectors)
        given = SEEN[seen](queries, keys)
        hidden, bias = columns, columns.values
        if seen == "causal":  # as bias_backends._distance_table does
            future = torch.arange(keys - 1, -queries, -1) - given.shift > 0
            zeros = torch.zeros(H, queries + keys - 1, dtype=torch.float64)
            masked = (zeros if bias is None else bias).masked_fill(future, torch.finfo(torch.float64).min)
            hidden = replace(columns, values=masked)
        used = (columns.query_offsets or ())[: 2 if "queries" in kinds else 1]
        leaves = [query, key, value, bias, columns.for_queries, columns.for_keys, *used]
        leaves = [each for each in leaves if each is not None]
        found = blockwise.attention(query, key, value, hidden, given, 0.3)
        assert_alike(found, attention_of(query, key, value, columns, given, 0.3), leaves)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_by_finite_differences(small_blocks, dropout):
    """Dropout drops the same weights in the backward pass."""
    (query, key, value), columns = inputs(5, 5, "values queries keys", 1)
    seen = SEEN["right padding"](5, 5)

    def compute(query, key, value, *tensors):
        torch.manual_seed(4)
        return blockwise.attention(query, key, value, DistanceTable(*tensors, head=1, tail=1), seen, 0.4, dropout=dropout)

    leaves = (query, key, value, *columns.tensors)
    assert torch.autograd.gradcheck(compute, leaves, fast_mode=True)
    assert torch.equal(compute(*leaves), compute(*leaves))
    whole = blockwise.attention(query, key, value, columns, seen, 0.4)
    assert torch.equal(compute(*leaves), whole) == (dropout == 0)
    with pytest.raises(RuntimeError, match="set_attn_implementation"):
        torch.autograd.grad(whole.sum(), query, create_graph=True)


@pytest.mark.parametrize("probability", [0.1, 0.5, 1.0])
def test_dropout_keeps_the_mean(probability):
    """The mean of 2 * 3 * 40 * 400 independently dropped weights is within five standard errors."""
    (query, key, _), columns = inputs(40, 400, "values", 1, dtype=torch.float32)
    identity = torch.eye(400).expand(2, H, 400, 400)  # outputs are then the weights
    seen = SEEN["all"](40, 400)
    whole = blockwise.attention(query, key, identity, columns, seen, 0.4).detach()
    left = blockwise.attention(query, key, identity, columns, seen, 0.4, dropout=probability).detach()
    dropped = left == 0
    assert abs(dropped.float().mean() - probability) < 5 * (0.25 / dropped.numel()) ** 0.5
    if probability < 1:
        assert_close(left[~dropped], whole[~dropped] / (1 - probability), rtol=1e-3)
        rows = dropped.flatten(0, 2).float()
        assert abs(torch.corrcoef(rows[:2])[0, 1]) < 0.3 and rows.mean(1).min() > 0 and rows.mean(1).max() < 1


def test_half_precision_is_as_exact_as_the_obvious_way():
    """Compared with float64, the errors of outputs and gradients are at most twice those of a bias in SDPA's mask."""
    length, kinds = 300, "values queries"
    (query, key, value), exact = inputs(length, length, kinds, 1, seed=3)
    seen, scaling = SEEN["all"](length, length), 0.5
    index = torch.arange(length)[:, None] + torch.arange(length - 1, -1, -1)

    def obvious(query, key, value, values, vectors, _):
        bias = values[:, index] + torch.einsum("bhie,nie->bhin", query, vectors[0][index.T]) * scaling
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)

    def mine(query, key, value, *tensors):
        return blockwise.attention(query, key, value, DistanceTable(*tensors, head=1, tail=1), seen, scaling)

    def errors(function, dtype):
        leaves = [
            None if each is None else each.detach().to(dtype).requires_grad_() for each in (query, key, value, *exact.tensors)
        ]
        output = function(*leaves)
        output.sum().backward()
        return [output.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]

    truth = errors(obvious, torch.float64)
    theirs, ours = errors(obvious, torch.bfloat16), errors(mine, torch.bfloat16)
    for right, other, found in zip(truth, theirs, ours, strict=True):
        assert (found.double() - right).norm() <= 2 * (other.double() - right).norm()


def test_a_subclass_that_changes_the_bias_is_asked_for_it(own_registry, always):
    base = hf_posenc.list_encodings()["shaw"]

    class Doubled(base, type="doubled-in-test"):
        def score_bias(self, query, key, context):
            return 2 * super().score_bias(query, key, context)

    model, plain = (patched("bert", name) for name in ("doubled-in-test", "shaw"))
    found = first(model(tokens()))
    assert_apart(found, first(plain(tokens())))
    model.set_attn_implementation("eager")
    assert_close(found, first(model(tokens())))


@pytest.fixture
def ways(monkeypatch):
    """The implementations that attentions use, in order."""
    taken = []

    def watched(*arguments):
        found = select_backend(*arguments)
        taken.append(found[0])
        return found

    select_backend = bias_backends.select_backend
    monkeypatch.setattr(bias_backends, "select_backend", watched)
    return taken


@pytest.mark.parametrize(
    ("host", "encoding", "train", "way"),
    [
        ("bert", "alibi", False, "toeplitz"),
        ("bert", "shaw", True, "blocks"),
        ("bert", "transformer_xl", False, "blocks"),
        ("llama", "t5", True, "blocks"),
        ("gpt2", "shaw", False, "blocks"),
    ],
)
def test_what_attend_really_takes(ways, monkeypatch, host, encoding, train, way):
    for each in ("toeplitz", "blocks"):
        monkeypatch.setitem(bias_backends.MIN_KEYS_FOR_BACKEND, each, 64)
    model = patched(host, encoding)
    with torch.set_grad_enabled(train):
        for length, taken in ((64, {way}), (63, {"dense"})):
            model(tokens(2, length))
            assert {*ways} == taken
            ways.clear()
        if host == "llama":
            model(tokens(1, 70), **{CACHE: StaticCache(model.config, max_cache_len=80)})
            assert {*ways} == {"dense"}
            ways.clear()
        model.set_attn_implementation("eager")
        model(tokens(2, 64))
        assert not ways


@pytest.fixture
def always(monkeypatch):
    """Uses the fast implementations for inputs of any length, with a reduced block size."""
    monkeypatch.setattr(blockwise, "FORWARD_QUERIES", 5)
    monkeypatch.setattr(blockwise, "BACKWARD_QUERIES", 4)
    monkeypatch.setattr(bias_backends, "CAUSAL_QUERIES", 4)
    for way in bias_backends.MIN_KEYS_FOR_BACKEND:
        monkeypatch.setitem(bias_backends.MIN_KEYS_FOR_BACKEND, way, 2)
    monkeypatch.setattr(bias_backends, "MIN_KEYS_BY_ROW", 2)


KINDS = hf_posenc.list_encodings()
ONE_SIDED = {"type": "alibi", "sides": "one_sided", "slopes": "learned"}
ASYMMETRIC = {"type": "alibi", "sides": "asymmetric", "per_layer": True}
BIASED = [*BIASING, "shaw+alibi", "transformer_xl+t5", "t5+relative", "rope+t5"]
DENSE = [name for name in BIASING if {"score_bias"} <= {*KINDS[name].mechanisms()} and not KINDS[name].has_distance_vectors()]
"""Encodings with a bias by content or absolute position that isn't by distance. They always use a dense bias."""


BUCKETS = [{"type": "deberta", "buckets": 4, "max_distance": 5, "terms": terms} for terms in ("c2p", "p2c", "c2p+p2c")]
PAIRS = [pytest.param("bert", encoding, id=str(encoding)) for encoding in (ONE_SIDED, ASYMMETRIC, *BUCKETS)]
PAIRS += [each for each in pairs(encodings=BIASED, hosts=("bert", "gpt2", "llama"), on=("bert", "gpt2", "llama"))]


@pytest.mark.parametrize(("host", "encoding"), PAIRS)
def test_fast_ways_agree_with_eager_attention(always, ways, host, encoding):
    """The outputs agree with and without gradients, padded, and in chunks with a cache. Llama has fewer heads for keys than for
    queries.
    """
    model = patched(host, encoding)
    for side in (None, "right", "left"):
        ids, mask = (tokens(2), None) if side is None else padded(tokens(2), [11, 7], side)
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        results = {}
        for implementation in ("eager", "sdpa"):
            model.set_attn_implementation(implementation)
            output = first(model(ids, attention_mask=mask))[real]
            results[implementation] = output.detach(), gradients(model, lambda _, output=output: output.square().sum())
            with torch.no_grad():
                assert_close(first(model(ids, attention_mask=mask))[real], results[implementation][0])
        assert {*ways} - {"dense"} or encoding in DENSE
        assert_close(results["sdpa"][0], results["eager"][0])
        assert_close(results["sdpa"][1], results["eager"][1], rtol=1e-3, atol=1e-4)
    if host in CAUSAL:
        with torch.no_grad():
            whole, before = first(model(tokens(2))), model(tokens(2)[:, :4], use_cache=True)
            assert_close(first(model(tokens(2)[:, 4:], **{CACHE: before.past_key_values})), whole[:, 4:])


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("case", [*SEEN, "scattered positions"])
def test_products_with_vectors_in_each_precision(always, ways, case, dtype, limit):
    """Outputs and gradients agree with attention in float64 with the bias of all pairs. All queries have one head of keys."""
    cls = hf_posenc.list_encodings()["transformer_xl"]
    queries, keys = (7, 13) if case == "causal" else (11, 11)
    module = cls(Geometry(H * E, H, E, max_length=40))
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(random(*parameter.shape, seed=50 + number))
    states = [random(2, *shape, E, seed=n).to(dtype) for n, shape in enumerate(((H, queries), (1, keys), (1, keys)))]
    past, there = keys - queries, None
    if case == "scattered positions":
        there = torch.stack([torch.arange(keys) * 3, torch.arange(keys).flip(0)])
    here = torch.arange(past, keys)[None] if there is None else there
    context = PositionContext(module, here, past, torch.zeros(1, 1).long(), there, scaling=0.3)
    shown = torch.ones(2, 1, queries, keys, dtype=torch.bool)
    for first_row, last_row, begin, end in SEEN[case](queries, keys).spans if case in SEEN else ():
        shown[first_row:last_row] = ((torch.arange(keys) >= begin) & (torch.arange(keys) < end)).expand(queries, -1)
    shown = shown.tril(past) if case == "causal" else shown
    sees = shown.any(-1).mT.expand(-1, -1, H)  # [B, Q, H]
    results = []
    for kind, dense in ((dtype, False), (torch.float64, True)):
        module = module.to(dtype).to(kind)
        query, key, value = leaves = [each.to(kind, copy=True).requires_grad_() for each in states]
        its = replace(context, encoding=module, computed={})
        if dense:
            bias = bias_backends.score_bias([module], query, key, its)
            weights = (query @ key.mT * 0.3 + bias).masked_fill(~shown, -torch.inf).softmax(-1).nan_to_num(0)
            output = (weights @ value).transpose(1, 2)
        else:
            output = biased(leaves, shown, module, its, scaling=0.3)
        leaves = [*leaves, *module.parameters()]
        results.append([output[sees], *torch.autograd.grad(output[sees].double().square().sum(), leaves)])
    assert {*ways} == {"dense" if case == "scattered positions" else "blocks"}
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("host", ["bert", "llama"])
def test_values_are_as_wide_as_wider_keys(monkeypatch, host, train):
    """SDPA's kernels need one width for queries, keys, and values."""
    model, widths = patched(host, "pope"), []
    original = torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, **more):
        widths.append((query.shape[-1], value.shape[-1]))
        return original(query, key, value, **more)

    with torch.set_grad_enabled(train):
        model.set_attn_implementation("eager")
        expected = first(model(tokens()))
        model.set_attn_implementation("sdpa")
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        found = first(model(tokens()))
    assert widths and all(wide == narrow for wide, narrow in widths)
    assert_close(found, expected)
    if train:
        grads = [gradients(model, lambda _, output=output: output.square().sum()) for output in (found, expected)]
        assert_close(*grads, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("encoding", "train"), [("alibi", False), ("t5", True), ("shaw", True), ("transformer_xl", True)])
def test_autocast(always, ways, encoding, train):
    """The effect of the encoding, which is the difference to the output without positions, is that in float32."""
    models_by_name = {name: patched("llama", name).train(train) for name in (encoding, "none")}

    def effect():
        output, without = (first(model(tokens())).float() for model in models_by_name.values())
        return output - without

    expected = effect()
    for implementation in ("eager", "sdpa"):
        for model in models_by_name.values():
            model.set_attn_implementation(implementation)
        with torch.set_grad_enabled(train), torch.autocast("cpu", dtype=torch.bfloat16):
            found = effect()
            if train:
                gradients(models_by_name[encoding], lambda _, found=found: found.square().sum())
        assert torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.99
    assert ways and "dense" not in ways


def test_dropout_in_code_saved_without_blocks(always, monkeypatch):
    """The code saved with a model of fixed biases omits the module for blocks. With dropout, its bias is then dense."""
    model = hf_posenc.patch(stock("bert", attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0), "alibi").train()
    monkeypatch.setattr(bias_backends, "_blockwise", lambda: None)
    outputs = []
    for least in (2, 99):
        monkeypatch.setitem(bias_backends.MIN_KEYS_FOR_BACKEND, "blocks", least)
        torch.manual_seed(0)
        outputs.append(first(model(tokens())))
    assert_close(*outputs)


def near(requires_grad=True):
    """Registers "near-in-test", which hides tokens at distances above 2."""

    class Near(hf_posenc.PositionEncoding, type="near-in-test"):
        def __init__(self, geometry, **options):
            super().__init__(geometry, **options)
            self.weight = torch.nn.Parameter(torch.ones(()), requires_grad=requires_grad)

        def distance_bias(self, distance):
            return torch.where(distance.abs() > 2, -torch.inf, self.weight * distance)[None]


@pytest.mark.parametrize("way", ["toeplitz", "blocks"])
def test_a_bias_that_hides_keys(own_registry, always, way):
    """A bias of -inf hides keys as a mask does, even a whole block of keys."""
    near(requires_grad=way == "blocks")
    model = hf_posenc.patch(stock("bert"), "near-in-test")
    outputs = []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        outputs.append(first(model(tokens(1, 600))))
        found = gradients(model, lambda _: outputs[-1].sum())
        assert all(gradient.isfinite().all() for gradient in found.values())
    assert_close(outputs[1], outputs[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda vectors: vectors, "returned .*pair"),
        (lambda vectors: (vectors[0], None), r"returned \(21, 8\), None for 21 distances.*\(1, 21, 8\)"),
        (lambda vectors: (None, vectors[:, :5]), "pair"),
        (lambda vectors: (None, None), None),
    ],
)
def test_vectors_of_another_shape(own_registry, always, ways, given, message):
    class Wrong(hf_posenc.list_encodings()["shaw"], type="wrong-in-test"):
        def distance_vectors(self, distance):
            return given(self.weight[self.rows(distance)][None])

    model = patched("bert", "wrong-in-test", hidden_size=32, num_attention_heads=4)
    if message is None:  # score_bias is called
        expected = first(model(tokens()))
        model.set_attn_implementation("eager")
        assert_close(first(model(tokens())), expected)
    else:
        with pytest.raises(ValueError, match=message):
            model(tokens())


def biased(states, mask, encoding, context, forward=sdpa_attention_forward, is_causal=False, scaling=0.5):
    """The output `[B, Q, H, E]` of an attention that uses SDPA."""
    module, options = SimpleNamespace(is_causal=is_causal), {"scaling": scaling, "is_causal": is_causal}
    call = AttentionCall(module, *states, mask, [encoding], context, is_causal, options)
    return bias_backends.biased_attention(forward, call)[0]


@pytest.mark.parametrize("train", [False, True])
def test_a_far_key_that_counts_is_not_hidden(train):
    """A key with a bias of about -200 would have no weight, but its score makes it count."""
    query, key, value = (random(1, H, 300, E, seed=seed, dtype=torch.float32) for seed in (5, 6, 7))
    states = [each.requires_grad_(train) for each in (12 * query, 12 * key, value)]
    encoding, index = hf_posenc.list_encodings()["alibi"](Geometry(H * E, H, E)), torch.arange(300)[None]
    context = PositionContext(encoding, index, 0, index.new_zeros(1, 1), scaling=0.5)
    bias = -torch.tensor([0.0625, 0.00390625, 0.25])[:, None, None] * (index[0][:, None] - index[0]).abs()
    scores = states[0].double() @ states[1].double().mT * 0.5 + bias
    far = scores.softmax(-1) * (bias < -40)
    assert far.max() > 0.5  # such keys exist
    expected = (scores.softmax(-1) @ states[2].double()).transpose(1, 2)
    assert_close(biased(states, None, encoding, context).double(), expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_a_key_that_differs_by_twice_the_product_of_lengths():
    """This key has a bias of -250. Its score is 200, and those of all other keys are -200."""
    query = torch.zeros(1, H, 1024, E).index_fill(3, torch.tensor([0]), 20.0)
    key, value = -query, random(1, H, 1024, E, dtype=torch.float32)
    key[:, :, 1000] *= -1
    encoding, index = hf_posenc.list_encodings()["alibi"](Geometry(H * E, H, E)), torch.arange(1024)[None]
    context = PositionContext(encoding, index, 0, index.new_zeros(1, 1), scaling=0.5)
    found = biased((query, key, value), None, encoding, context)
    assert_close(found[0, 0, 2], value[0, 2, 1000])


@torch.no_grad()
def test_causal_and_other_layers_of_one_pass():
    """Results that are computed once for all layers are shared only by layers that see the same keys."""
    states = [random(1, H, 300, E, seed=seed, dtype=torch.float32) for seed in (5, 6, 7)]
    encoding, index = hf_posenc.list_encodings()["alibi"](Geometry(H * E, H, E)), torch.arange(300)[None]

    def context():
        return PositionContext(encoding, index, 0, index.new_zeros(1, 1), scaling=0.5)

    shared = context()
    for is_causal in (True, False, True):
        alone = biased(states, None, encoding, context(), is_causal=is_causal)
        assert_equal(biased(states, None, encoding, shared, is_causal=is_causal), alone)


def _forbids_near(distance):
    return torch.where(distance.abs() < 4, -torch.inf, -2.0 * distance.abs())


STEEP = {
    "falls": lambda distance: -2.0 * distance.abs(),
    "peaks far": lambda distance: 0.9 * distance.abs(),
    "rises": lambda distance: 1.5 * distance,
    "forbids near": _forbids_near,
}
MASKS = {
    "all": lambda queries, keys: torch.ones(queries, keys),
    "causal": lambda queries, keys: torch.ones(queries, keys).tril(keys - queries),
    "only the first keys": lambda queries, keys: torch.arange(keys).expand(queries, -1) < 40,
    "only the last keys": lambda queries, keys: torch.arange(keys).expand(queries, -1) >= keys - 40,
    "causal, without the first keys": lambda queries, keys: (
        torch.ones(queries, keys).tril(keys - queries).triu(-queries) * (torch.arange(keys) >= 60)
    ),
    "causal, only the first keys": lambda queries, keys: (
        torch.ones(queries, keys).tril(keys - queries) * (torch.arange(keys) < 40)
    ),
    "not its own key": lambda queries, keys: torch.ones(queries, keys).tril(keys - queries - 1),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", STEEP)
def test_steep_biases_under_masks_that_hide_the_own_key(own_registry, bias, mask):
    """Queries that see no key have no defined output, and aren't compared."""

    class Steep(hf_posenc.PositionEncoding, type="steep-in-test"):
        def __init__(self, geometry, **options):
            super().__init__(geometry, **options)
            self.factor = torch.nn.Parameter(torch.ones(()))

        def distance_bias(self, distance):
            return torch.stack([self.factor * factor * STEEP[bias](distance.float()) for factor in (1, 0.5, 0.01)])

    encoding, keys = Steep(Geometry(H * E, H, E)), 300
    for queries in (300, 90):
        states = [random(2, H, length, E, seed=5 + n, dtype=torch.float32) for n, length in enumerate((queries, keys, keys))]
        index = torch.arange(keys - queries, keys)[None]
        context = PositionContext(encoding, index, keys - queries, index.new_zeros(1, 1), scaling=0.5)
        shown = MASKS[mask](queries, keys).bool()
        distance = torch.arange(keys)[None] - index.T
        exact = [each.double().requires_grad_() for each in states]
        scores = exact[0] @ exact[1].mT * 0.5 + encoding.distance_bias(distance.flatten()).detach().unflatten(
            -1, distance.shape
        )
        scores = scores.masked_fill(~shown, -torch.inf)
        sees = scores.amax((0, 1, 3)) > -torch.inf
        expected = (scores[:, :, sees].softmax(-1) @ exact[2]).transpose(1, 2)
        for train in (False, True):
            given = [each.requires_grad_(train) for each in states]
            with torch.set_grad_enabled(train):
                found = biased(given, shown.expand(2, 1, -1, -1), encoding, context)
            assert_close(found[:, sees].double(), expected, rtol=1e-4, atol=1e-5)
        ours = torch.autograd.grad(found[:, sees].square().sum(), states)
        theirs = torch.autograd.grad(expected.square().sum(), exact)
        for mine, right in zip(ours, theirs, strict=True):
            assert_close(mine.double(), right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("host", "dropout", "side"), [("bert", 0.0, "left"), ("llama", 0.0, "left"), ("bert", 0.3, "left"), ("llama", 0.3, "right")]
)
def test_padding_to_which_a_bias_hides_all_keys(own_registry, always, ways, host, dropout, side):
    """In a window of 2 with mostly padding, neither outputs nor gradients are NaN."""

    near()
    model = hf_posenc.patch(stock(host), "near-in-test")
    model.config.attention_probs_dropout_prob = model.config.attention_dropout = dropout
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
        if hasattr(module, "dropout") and isinstance(module.dropout, torch.nn.Dropout):
            module.dropout.p = dropout
    ids, mask = padded(tokens(2, 30), [30, 4], side)
    results = {}
    for implementation in ("sdpa", "eager") if dropout == 0 else ("sdpa",):
        model.set_attn_implementation(implementation)
        output = first(model.train()(ids, attention_mask=mask))
        assert output.isfinite().all()
        found = gradients(model, lambda _, output=output: output[mask.bool()].square().sum())
        assert all(gradient.isfinite().all() for gradient in found.values())
        results[implementation] = found
    if dropout == 0:
        assert_close(results["sdpa"], results["eager"], rtol=1e-3, atol=1e-4)
    assert "blocks" in ways


@pytest.mark.parametrize("encoding", ["shaw", "relative_key_query", "shaw+alibi", "transformer_xl+alibi"])
def test_hidden_queries_in_half_precision(always, ways, encoding):
    """The lowest float32 becomes -inf in half precision. Here, queries before the first visible key are in a
    block with others.
    """
    for dtype in (torch.bfloat16, torch.float16):
        model = patched("llama", encoding).to(dtype).train()
        ids, mask = padded(tokens(2, 11), [11, 6], "left")
        output = first(model(ids, attention_mask=mask))
        loss = output[mask.bool()].float().square().sum()
        found = gradients(model, lambda _, loss=loss: loss)
        assert all(gradient.isfinite().all() for gradient in found.values()) and "blocks" in ways


@pytest.mark.parametrize("encoding", ["t5", "shaw", "transformer_xl"])
def test_checkpointing_drops_the_same_weights(always, encoding):
    """In reentrant checkpointing, the first run of a layer is without gradients."""
    outputs = []

    def note(module, args, output):
        outputs.append(output[0].detach().clone())

    for reentrant in (False, True):
        outputs.clear()
        model = patched("bert", encoding, attention_probs_dropout_prob=0.4, hidden_dropout_prob=0.0).train()
        model.encoder.layer[0].attention.self.register_forward_hook(note)
        models.checkpointing(model, use_reentrant=reentrant)
        model.enable_input_require_grads()
        first(model(tokens())).sum().backward()
        assert len(outputs) == 2 and torch.equal(*outputs)


def test_other_vectors_have_other_rows_than_their_base_class(own_registry, always):
    class Fading(hf_posenc.list_encodings()["shaw"], type="fading-in-test"):
        max_distance = 2

        def distance_vectors(self, distance):
            vectors, _ = super().distance_vectors(distance)
            return vectors * (0.9 ** distance.abs())[None, :, None], None

        def score_bias(self, query, key, context):
            distance = context.distances(key.shape[2])[0]
            vectors, _ = self.distance_vectors(distance.flatten())
            return torch.einsum("bhqe,qke->bhqk", query, vectors[0].unflatten(0, distance.shape)) * context.scaling

    model = patched("bert", "fading-in-test")
    results = {}
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        output = first(model(tokens()))
        results[implementation] = [output.detach(), *gradients(model, lambda _, y=output: y.square().sum()).values()]
    assert_close(results["sdpa"], results["eager"], rtol=1e-3)


def test_gradients_of_a_bias_reach_what_it_is_made_of(own_registry, always):
    """Gradients reach the tensors that a bias is computed from, even if they aren't parameters of the encoding."""
    slope = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    class Given(hf_posenc.PositionEncoding, type="given-in-test"):
        def distance_bias(self, distance):
            return -slope * distance.abs()[None]

    model = hf_posenc.patch(stock("bert"), "given-in-test").double().requires_grad_(False)
    found = []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        found.append(torch.autograd.grad(first(model(tokens())).square().sum(), slope)[0])
    assert_close(found[1], found[0])


@pytest.mark.parametrize("encoding", ["alibi", "t5", "shaw", "relative_key_query", "transformer_xl"])
def test_another_default_device(always, ways, encoding):
    model = patched("bert", encoding).train()
    ids, mask = padded(tokens(2), [11, 7], "right")
    with torch.device("meta"):
        first(model(ids, attention_mask=mask)).sum().backward()
    assert ways and "dense" not in ways


def test_autocast_leaves_doubles_as_they_are(always, ways):
    model = patched("bert", "t5").double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert first(model(tokens())).isfinite().all()


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # from torch's rule for unfold
@pytest.mark.parametrize("encoding", ["t5", "transformer_xl", "tupe"])
def test_torch_func_takes_a_dense_bias(always, ways, encoding):
    model = patched("bert", encoding)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters, ids):
        return first(torch.func.functional_call(model, parameters, (ids[None],))).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, tokens())
    assert {*ways} == {"dense"}
    for row, ids in enumerate(tokens()):
        expected = gradients(model, lambda _, ids=ids: first(model(ids[None])).square().sum())
        assert_close({name: each[name][row] for name in expected}, expected, rtol=1e-3, atol=1e-4)


class Largest(TorchDispatchMode):
    """Records the memory of the largest result."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor):
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(
    ("host", "encoding", "train"),
    [
        *[("bert", "t5", True), ("bert", "relative_key_query", True), ("bert", "transformer_xl", True)],
        *[("llama", "alibi", False), ("llama", "shaw", False), ("llama", "transformer_xl", False)],
    ],
)
def test_no_tensor_of_all_heads_queries_and_keys(host, encoding, train):
    length = 2048
    model = patched(host, encoding, max_position_embeddings=length, num_hidden_layers=1)
    heads = model.config.num_attention_heads
    with torch.set_grad_enabled(train):
        # The model's own padding mask has one head, and one byte for each query and key.
        with Largest() as largest:
            output = first(model(tokens(1, length)))
            if train:
                output.sum().backward()
        assert largest.bytes < heads * length * length * 4 / 3
        model.set_attn_implementation("eager")
        with Largest() as obvious:
            model(tokens(1, length))
        assert obvious.bytes >= heads * length * length * 4


def test_an_own_function_named_sdpa_gets_a_mask():
    seen = []

    def own(module, query, key, value, mask, **arguments):
        seen.append(mask)
        return sdpa_attention_forward(module, query, key, value, mask, **arguments)

    states, index = [random(1, H, 300, E, seed=seed, dtype=torch.float32) for seed in range(3)], torch.arange(300)[None]
    encoding = hf_posenc.list_encodings()["alibi"](Geometry(H * E, H, E))
    context = PositionContext(encoding, index, 0, index.new_zeros(1, 1), scaling=0.5)
    theirs = biased(states, None, encoding, context, forward=own)
    assert seen[0].shape == (1, H, 300, 300)
    assert_close(biased(states, None, encoding, context), theirs)


@pytest.mark.parametrize("shown", [lambda i, j: j > -1, lambda i, j: j < 100, lambda i, j: (j <= i) & (j < 280)])
@pytest.mark.parametrize("encoding", ["fox", "cope"])
def test_blocks_of_keys_up_to_each_query_only(encoding, shown):
    """With and without gradients, 4-D masks that show later keys, or hide a query's own key, give the same outputs."""
    model, index = patched("llama", encoding, max_length=300), torch.arange(300)
    ids, mask = tokens(1, 300), shown(index[:, None], index[None]).expand(1, 1, 300, 300)
    outputs = model(input_ids=ids, attention_mask=mask)[0]
    with torch.no_grad():
        assert_close(model(input_ids=ids, attention_mask=mask)[0], outputs.detach(), atol=1e-4, rtol=1e-4)
