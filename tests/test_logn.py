"""`logn`: against float64 loops, against stock models whose query projections are scaled by hooks, and the trained length it
goes by.

Shapes: B batch, L tokens, H heads, E head_dim.
"""

import math

import pytest
import torch
from transformers import AutoModel, DynamicCache, StaticCache

import hf_posenc
from closeness import assert_apart, assert_close, assert_equal
from hf_posenc.architectures.structure import is_patched
from hf_posenc.encodings import Geometry, PositionContext, build, canonical
from models import HOSTS, LENGTH, backends, first, randomize_encoding, stock, tokens
from oracles import every_mask, in_pieces, padded, padding_of

SHORT = 5
"""A trained length below that of most inputs here."""


def make(is_causal=False, trained=SHORT, heads=3, **options):
    return build(canonical({"type": "logn", **options}), Geometry(16, heads, 8, None, is_causal, trained_length=trained))


def context_of(encoding, positions):
    positions = torch.as_tensor(positions)
    return PositionContext(encoding, positions=positions, past=0, start=positions[:, :1])


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def factor(length, trained=SHORT, part=1.0):
    """Of a query, by the length it goes by."""
    return 1.0 if length <= trained else 1.0 + part * (math.log(length) / math.log(trained) - 1.0)


def lengths_of(positions, is_causal):
    """`[B][L]`: the length that each query goes by."""
    return [[position + 1 if is_causal else max(row) + 1 for position in row] for row in positions]


# The encoding by itself.

POSITIONS = {
    "from 0": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "per row": [[0, 1, 2, 3], [40, 41, 42, 43]],
    "left padding": [[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]],
    "right padding": [[0, 1, 2, 3, 3, 3], [0, 1, 2, 3, 4, 5]],
    "jumping": [[9, 2, 300, 4], [1, 7, 7, 2**24]],
    "up to the trained length": [[0, 1, 2, 3, 4]],
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", ["fixed", "learned"])
@pytest.mark.parametrize("given", [None, 3, 700])
def test_formula(positions, is_causal, scale, given):
    encoding, parts = make(is_causal, scale=scale, trained_length=given), [1.0, 1.0, 1.0]
    if scale == "learned":
        parts = [0.5, -2.0, 3.0]
        with torch.no_grad():
            encoding.factor.copy_(torch.tensor(parts))
    query, key = random(2, 3, len(positions[0]), 8), random(2, 1, 4, 8, seed=1)
    expected = query.clone()
    for b, row in enumerate((lengths_of(positions, is_causal) * 2)[:2]):
        for h, part in enumerate(parts):
            for i, length in enumerate(row):
                expected[b, h, i] *= factor(length, given or SHORT, part)
    actual, same = encoding.rotate(query, key, context_of(encoding, positions))
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
    assert same is key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_factor_is_rounded_last(dtype):
    encoding = make(True, trained=512)
    positions = [[511, 512, 600, 2**24]]
    expected = torch.tensor([factor(p + 1, 512) for p in positions[0]], dtype=torch.float64).to(dtype)
    actual, _ = encoding.rotate(torch.ones(1, 3, 4, 8, dtype=dtype), None, context_of(encoding, positions))
    assert actual.dtype == dtype and torch.equal(actual[0, 1, :, 0], expected)


def test_keys_alone():
    """Hosts that cache their keys first have no query yet."""
    encoding, key = make(), random(1, 3, 8, 8)
    nothing, same = encoding.rotate(None, key, context_of(encoding, [list(range(8))]))
    assert nothing is None and same is key


@pytest.mark.parametrize("is_causal", [False, True])
def test_learned_factors(is_causal):
    """They start as the fixed scale, change nothing up to the trained length, and get their gradients beyond."""
    positions, upstream = [[0, 1, 2, 3, 4, 5, 6, 70]], random(1, 3, 8, 8, seed=2)
    learned, query = make(is_causal, scale="learned"), random(1, 3, 8, 8)
    assert learned.factor.tolist() == [1.0, 1.0, 1.0] and not list(make(is_causal).parameters())
    output = learned.rotate(query, None, context_of(learned, positions))[0]
    fixed = make(is_causal)
    assert torch.equal(output, fixed.rotate(query, None, context_of(fixed, positions))[0])
    output.backward(upstream)
    growth = torch.tensor([factor(length) - 1 for length in lengths_of(positions, is_causal)[0]], dtype=torch.float64)
    expected = (upstream * query * growth[:, None]).sum((0, 2, 3))
    torch.testing.assert_close(learned.factor.grad.double(), expected, atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        learned.factor.copy_(torch.tensor([0.0, -5.0, 40.0]))
    near, within = query[:, :, :SHORT], [list(range(SHORT))]
    assert torch.equal(learned.rotate(near, None, context_of(learned, within))[0], near)


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_values_are_read(is_causal):
    """On a GPU that would wait for it; on the meta device there are none."""
    encoding = make(is_causal).to("meta")
    positions, query = torch.zeros(2, 9, dtype=torch.long, device="meta"), torch.zeros(2, 3, 9, 8, device="meta")
    scaled, _ = encoding.rotate(query, None, context_of(encoding, positions))
    assert scaled.shape == query.shape and scaled.is_meta


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_tokens(is_causal):
    encoding = make(is_causal)
    scaled, _ = encoding.rotate(torch.ones(2, 3, 0, 8), None, context_of(encoding, torch.zeros(2, 0, dtype=torch.long)))
    assert scaled.shape == (2, 3, 0, 8)


@pytest.mark.parametrize("length", [None, 0, 1])
def test_a_host_that_tells_no_length(length):
    with pytest.raises(ValueError, match=r"logn\.trained_length=None: this host.*trained_length=512.*logn__trained_length"):
        make(trained=length)
    assert make(trained=length, trained_length=9).trained_length == 9


# In models.

PROJECTIONS = {"attention.self.query": 4, "attention.attn.q": 4, "self_attn.q_proj": 4, "attn.c_attn": 12, "attention.q_lin": 4}
"""Path in a layer of what makes its queries -> how many times head_dim it gives out: 4 heads, with keys and values 12."""


def multiplied(model, host, factors):
    """A model with hooks on its projections that multiply queries by `factors`, `[B or 1, L, H]`."""

    def times(module, args, output):
        heads = output.unflatten(-1, (-1, 8))
        return torch.cat([heads[:, :, :4] * factors[..., None], heads[:, :, 4:]], dim=2).flatten(-2)

    for layer in model.get_submodule(HOSTS[host].layers):
        path = next(path for path in PROJECTIONS if path in dict(layer.named_modules()))
        layer.get_submodule(path).register_forward_hook(times)
    return model


def factors_of(mask, host, parts):
    """`[B, L, H]` by counting what a mask `[B][L]` shows."""
    rows = [[sum(row[: i + 1]) if HOSTS[host].causal else sum(row) for i in range(len(row))] for row in mask]
    return torch.tensor([[[factor(length, part=part) for part in parts] for length in row] for row in rows])


def scaled(host, encoding="none", scale="learned", head="Model", trained=SHORT, **changes):
    """A patched model without and with `logn`, all other parameters alike, and the factors of its heads."""
    options = {"logn__trained_length": trained, "logn__scale": scale}
    plain = randomize_encoding(hf_posenc.patch(stock(host, head, **changes), f"{encoding}+none"))
    model = randomize_encoding(hf_posenc.patch(stock(host, head, **changes), f"{encoding}+logn", **options))
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            model.get_parameter(name).copy_(parameter)
    part = model.base_model.posenc.logn
    return plain, model, part.factor.tolist() if scale == "learned" else [1.0] * 4


@every_mask
@pytest.mark.parametrize("scale", ["fixed", "learned"])
@pytest.mark.parametrize(
    ("host", "encoding"),
    [
        ("bert", "relative"),
        ("bert", "sinusoidal"),
        ("bert", "shaw"),
        ("distilbert", "rope"),
        ("roberta", "learned"),
        ("mpnet", "rope"),
        ("gpt2", "relative"),
        ("gpt2", "rope"),
        ("llama", "rope"),
        ("llama", "t5"),
    ],
)
@torch.no_grad()
def test_queries_are_multiplied(host, encoding, scale, mask):
    """By the number of real tokens, wherever the padding is; in decoders by each query's own position."""
    plain, model, parts = scaled(host, encoding, scale)
    arguments, real = padding_of(mask)
    before = first(plain(tokens(), **arguments))[real]
    multiplied(plain, host, factors_of(real.long().tolist(), host, parts))
    for implementation in backends(model):
        model.set_attn_implementation(implementation)
        plain.set_attn_implementation(implementation)
        actual = first(model(tokens(), **arguments))[real]
        assert_close(actual, first(plain(tokens(), **arguments))[real])
        assert_apart(actual, before)


@torch.no_grad()
def test_a_stock_llama_with_scaled_queries():
    """Patched with the rotation it has: nothing of ours is on the other side."""
    model = stock("llama", "ForCausalLM")
    theta = model.config.rope_parameters["rope_theta"]
    new = hf_posenc.patch(model, "rope+logn", rope__theta=theta, logn__trained_length=SHORT)
    expected = multiplied(stock("llama", "ForCausalLM").model, "llama", factors_of([[1] * 11], "llama", [1.0] * 4))
    assert_close(first(new.model(tokens())), first(expected(tokens())))
    assert_apart(first(new.model(tokens())), first(model.model(tokens())))


@pytest.mark.parametrize("host", ["bert", "gpt2"])
@torch.no_grad()
def test_position_ids_by_hand(host):
    """The greatest of them tells the length of an encoder's text, each its own query's in a decoder."""
    plain, model, parts = scaled(host, "rope")
    ids = torch.stack([torch.arange(11) * 3, torch.arange(11).flip(0)])
    lengths = lengths_of(ids.tolist(), HOSTS[host].causal)
    by_hand = torch.tensor([[[factor(length, part=part) for part in parts] for length in row] for row in lengths])
    multiplied(plain, host, by_hand)
    arguments = {"position_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert_close(first(model(tokens(), **arguments)), first(plain(tokens(), **arguments)))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("encoding", ["relative", "rope"])
@pytest.mark.parametrize("host", ["gpt2", "llama"])
@torch.no_grad()
def test_cached_decoding_beyond_the_trained_length(host, encoding, side, static):
    """In chunks and token by token, with each query's own factor."""
    plain, model, parts = scaled(host, encoding, head=HOSTS[host].head)
    ids, mask = tokens(2, 16), torch.ones(2, 16, dtype=torch.long)
    if side == "left":
        mask[0, :4] = 0
    if side == "right":  # of a prompt of 12 tokens
        mask[0, 8:12] = 0
    cache = StaticCache(config=model.config, max_cache_len=20) if static else DynamicCache(config=model.config)
    real = mask.bool()
    actual = in_pieces(model, ids, (12, 13, 14), mask, cache)[real]
    assert_close(actual, first(model(ids, attention_mask=mask))[real])
    multiplied(plain.base_model, host, factors_of(mask.tolist(), host, parts))
    assert_close(actual, first(plain(ids, attention_mask=mask))[real])


@pytest.mark.parametrize("host", ["bert", "gpt2"])
@torch.no_grad()
def test_tokens_of_a_decoder_know_nothing_of_later_ones(host):
    """Those of an encoder know how many there are."""
    plain, model, _ = scaled(host, "rope", "fixed")
    ids = tokens(1, 20)
    if HOSTS[host].causal:
        assert_close(first(model(ids))[:, :9], first(model(ids[:, :9])))
    within = ids[:, :SHORT]
    assert_equal(first(model(within)), first(plain(within)))
    batch, mask = padded(ids, [9], "left")
    assert_close(first(model(batch, attention_mask=mask))[:, -9:], first(model(ids[:, :9])))


@torch.no_grad()
def test_only_in_its_layers():
    model = hf_posenc.patch(stock("bert"), "relative+logn", logn__trained_length=SHORT, logn__layers=[1])
    plain = hf_posenc.patch(stock("bert"), "relative")
    plain.posenc.weight.copy_(model.posenc.relative.weight)
    factors = factors_of([[1] * 11], "bert", [1.0] * 4)
    plain.encoder.layer[1].attention.self.query.register_forward_hook(
        lambda module, args, output: (output.unflatten(-1, (4, 8)) * factors[..., None]).flatten(-2)
    )
    assert_close(first(model(tokens())), first(plain(tokens())))


@pytest.mark.slow
@pytest.mark.parametrize("host", ["bert", "gpt2"])
@torch.no_grad()
def test_one_graph(host):
    """Also across the trained length."""
    _, model, _ = scaled(host, "relative")
    model.config.use_cache = False
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for length in (4, 9, 13):
        ids, mask = padded(tokens(2, length), [length, length - 2], "left")
        actual = first(compiled(ids, attention_mask=mask))[mask.bool()]
        assert_close(actual, first(model(ids, attention_mask=mask))[mask.bool()])


# The trained length.


def trained_length(model):
    return next(stack.posenc.geometry.trained_length for stack in model.modules() if is_patched(stack))


@pytest.mark.parametrize("host", ["bert", "roberta", "albert", "gpt2", "llama"])
@torch.no_grad()
def test_the_trained_length_is_the_stock_hosts(host, tmp_path):
    """Whatever length is promised, and wherever the model has been. RoBERTa's table has two rows more than that."""
    model, ids = stock(host), tokens(1, 60)
    expected, other = (
        first(hf_posenc.patch(model, "rope+logn", logn__trained_length=length)(ids)) for length in (LENGTH, LENGTH + 2)
    )
    assert not torch.equal(expected, other)
    new = hf_posenc.patch(model, "rope+logn")
    longer = hf_posenc.patch(model, "rope+logn", max_length=70, keep_original=False)
    longer.save_pretrained(tmp_path / "longer")
    loaded = AutoModel.from_pretrained(tmp_path / "longer")
    further = hf_posenc.extend(loaded, 200)
    further.save_pretrained(tmp_path / "further")
    kept = hf_posenc.patch(model, "rope+logn", max_length=70)
    for each in (
        new,
        longer,
        loaded,
        further,
        AutoModel.from_pretrained(tmp_path / "further"),
        hf_posenc.extend(longer, None),
        hf_posenc.patch(hf_posenc.unpatch(hf_posenc.extend(kept, 90)), "rope+logn", max_length=80),
    ):
        assert trained_length(each) == LENGTH
        assert each.config.position_encoding["logn"]["trained_length"] is None
        assert_equal(first(each(ids)), expected)


@torch.no_grad()
def test_the_trained_length_of_a_model_from_scratch(tmp_path):
    """It is that of its config, and extending the model, which changes that, writes it down."""
    sizes = {**HOSTS["bert"].sizes, "vocab_size": 61}
    config = hf_posenc.PosEncBertConfig(**sizes, position_encoding={"type": "rope+logn", "max_length": 40})
    model, ids = AutoModel.from_config(config).eval(), tokens(1, 40)
    assert trained_length(model) == LENGTH
    longer = hf_posenc.extend(model, 90)
    assert longer.config.max_position_embeddings == 90
    assert longer.config.position_encoding["logn"] == {"trained_length": LENGTH, "scale": "fixed"}
    assert model.config.position_encoding["logn"] == {"trained_length": None, "scale": "fixed"}
    longer.save_pretrained(tmp_path)
    for each in (longer, hf_posenc.extend(longer, 100), AutoModel.from_pretrained(tmp_path)):
        assert_equal(first(each(ids)), first(model(ids)))
    alone = AutoModel.from_config(hf_posenc.PosEncBertConfig(**sizes, position_encoding={"type": "logn", "max_length": 40}))
    assert hf_posenc.extend(alone, 90).config.position_encoding["trained_length"] == LENGTH


@torch.no_grad()
def test_learned_factors_are_saved(tmp_path):
    _, model, parts = scaled("llama", "relative", head="ForCausalLM")
    model.save_pretrained(tmp_path)
    loaded = hf_posenc.PosEncLlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.model.posenc.logn.factor.tolist() == parts and trained_length(loaded) == LENGTH
    assert_equal(first(loaded(tokens())), first(model(tokens())))
    longer = hf_posenc.extend(model, None)
    assert longer.model.posenc.logn.factor is model.model.posenc.logn.factor
