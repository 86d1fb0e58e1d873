"""What one host or another does that the matrix can't see: against the stock model with positions added by hand."""

import copy
import json
import math

import pytest
import torch
import transformers
from transformers import AutoModel, DynamicCache

import hf_posenc
from conftest import BIASED, HOSTS, LENGTH, OFFSET, first, patched, randomize_encoding, run_python, stock, tokens

MASKS = {
    "none": None,
    "right": [[1] * 11, [1] * 7 + [0] * 4],
    "left": [[0] * 3 + [1] * 8, [1] * 11],
}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def padding_of(mask):
    """The arguments for a mask, and which tokens are real."""
    if mask is None:
        return {}, torch.ones(2, 11, dtype=torch.bool)
    return {"attention_mask": torch.tensor(mask)}, torch.tensor(mask).bool()


def counted(mask):
    """Positions `[B][L]` of real tokens counted one by one; of padding anything."""
    return [[max(sum(row[: i + 1]) - 1, 0) for i in range(len(row))] for row in mask or [[1] * 11] * 2]


def ids_of(host, mask):
    """The same as a stock host counts them. Most stock hosts count left padding in, unless they are told."""
    return torch.tensor(counted(mask)) + HOSTS[host].offset


def sinusoids(positions, size):
    """`[B, L, D]` by the paper's formula."""
    return torch.tensor(
        [
            [
                [(math.cos if d % 2 else math.sin)(position / 10000 ** ((d - d % 2) / size)) for d in range(size)]
                for position in row
            ]
            for row in positions
        ]
    )


# Vectors in every layer.

LAYERS = ["bert", "gpt2", "albert", "distilbert", "mpnet", "electra"]
INJECT = ["every_layer", "after_attention"]
every_inject = pytest.mark.parametrize("inject", INJECT)


def without_positions(host, part=0.0, **changes):
    """The stock model with this part of its own positions."""
    model = stock(host, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in (*HOSTS[host].tables, *HOSTS[host].biases):
                parameter.mul_(part)
    return model


def adding(model, host, inject, vectors):
    """A stock model, with hooks by which `vectors["now"]` are added in each layer."""

    def before(module, args):
        return (args[0] + vectors["now"], *args[1:])

    def after(module, args, output):
        return (output[0] + vectors["now"], *output[1:])

    for layer in model.get_submodule(HOSTS[host].layers):
        if inject == "every_layer":
            layer.register_forward_pre_hook(before)
        else:
            layer.get_submodule(HOSTS[host].block).register_forward_hook(after)
    return model


@every_inject
@every_mask
@pytest.mark.parametrize("host", LAYERS)
@torch.no_grad()
def test_vectors_are_added_in_every_layer(host, inject, mask):
    arguments, real = padding_of(mask)
    model = hf_posenc.patch(stock(host), "sinusoidal", inject=inject)
    expected = adding(without_positions(host), host, inject, {"now": sinusoids(counted(mask), 32)})
    outputs, theirs = (each(tokens(), output_hidden_states=True, **arguments) for each in (model, expected))
    for ours, other in zip(outputs.hidden_states, theirs.hidden_states, strict=True):
        torch.testing.assert_close(ours[real], other[real], atol=2e-5, rtol=1e-4)
    assert (first(outputs) - first(without_positions(host)(tokens(), **arguments)))[real].abs().max() > 0.01
    assert model.config.position_encoding["inject"] == inject and not hasattr(model.posenc, "weight")


@every_inject
@pytest.mark.parametrize("host", ["albert", "electra"])
def test_injected_vectors_have_the_width_of_the_layers(host, inject):
    """The host's table is narrower than they are."""
    assert hf_posenc.patch(stock(host), "learned").posenc.weight.shape == (LENGTH, 16)
    assert hf_posenc.patch(stock(host), "learned", inject=inject).posenc.weight.shape == (LENGTH, 32)
    with pytest.raises(ValueError, match=r"table has 16 columns, but vectors of 32 are added here: choose init='normal'"):
        hf_posenc.patch(stock(host), "learned", inject=inject, init="host")
    hf_posenc.patch(stock("bert"), "learned", inject=inject, init="host")


@every_inject
@pytest.mark.parametrize("host", LAYERS)
def test_injected_vectors_are_trained(host, inject):
    model = randomize_encoding(hf_posenc.patch(stock(host), "learned", inject=inject))
    weight = model.posenc.weight.detach()[:11].clone().requires_grad_()
    first(adding(without_positions(host), host, inject, {"now": weight})(tokens())).square().mean().backward()
    first(model(tokens())).square().mean().backward()
    torch.testing.assert_close(model.posenc.weight.grad[:11], weight.grad, atol=1e-5, rtol=1e-3)
    assert weight.grad.any(1).all() and not model.posenc.weight.grad[11:].any()


@every_inject
@pytest.mark.parametrize("encoding", ["learned", "sinusoidal+relative"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("host", ["bert", "gpt2", "distilbert"])
def test_injection_under_gradient_checkpointing(host, inject, encoding, reentrant):
    model = randomize_encoding(hf_posenc.patch(stock(host), encoding, inject=inject))

    def gradients():
        model.zero_grad()
        first(model(tokens(), **({"use_cache": False} if HOSTS[host].causal else {}))).square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    # Layers checkpoint in training alone, in which nothing may drop out here.
    for module in model.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    model.set_attn_implementation("eager")
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    actual = gradients()
    assert expected.keys() == actual.keys() and any("posenc" in name for name in actual)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-5, rtol=1e-3, msg=name)


@every_inject
@torch.no_grad()
def test_injection_in_cached_decoding(inject):
    """New tokens get the vectors of their own positions, behind a left-padded prompt too."""
    model, vectors = hf_posenc.patch(stock("gpt2"), "sinusoidal", inject=inject), {}
    expected = adding(without_positions("gpt2"), "gpt2", inject, vectors)
    mask = torch.tensor(MASKS["left"])
    whole, caches, real = sinusoids(counted(MASKS["left"]), 32), (DynamicCache(), DynamicCache()), mask.bool()
    for start, stop in ((0, 6), (6, 7), (7, 11)):
        vectors["now"] = whole[:, start:stop]
        ours, theirs = (
            first(each(tokens()[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache))
            for each, cache in zip((model, expected), caches, strict=True)
        )
        torch.testing.assert_close(ours[real[:, start:stop]], theirs[real[:, start:stop]], atol=2e-5, rtol=1e-4)


@every_inject
@pytest.mark.parametrize("host", ["bert", "mpnet"])
def test_blend_of_injected_vectors(host, inject):
    """Half of theirs in every layer, and half of the host's own positions where those enter."""
    model = hf_posenc.patch(stock(host), "sinusoidal", inject=inject)
    model.posenc.blend = 0.5
    expected = adding(without_positions(host, part=0.5), host, inject, {"now": 0.5 * sinusoids(counted(None), 32)})
    torch.testing.assert_close(first(model(tokens())), first(expected(tokens())), atol=2e-5, rtol=1e-4)


def test_injection_travels(tmp_path):
    """To a new process, and back to the stock model there."""
    pairs = [(host, inject) for host in LAYERS for inject in INJECT]
    for host, inject in pairs:
        model = randomize_encoding(hf_posenc.patch(stock(host), "learned+alibi", inject=inject, learned__std=0.5))
        folder = tmp_path / f"{host} {inject}"
        model.save_pretrained(folder)
        assert json.loads((folder / "config.json").read_text())["position_encoding"]["inject"] == inject
        torch.save([tokens(), first(model(tokens())), first(stock(host)(tokens()))], folder / "expected.pt")
    code = """
import sys, pathlib, torch, hf_posenc
from transformers import AutoModel
for folder in pathlib.Path(sys.argv[1]).iterdir():
    ids, ours, theirs = torch.load(folder / "expected.pt")
    model = AutoModel.from_pretrained(folder)
    encoding = model.config.position_encoding
    assert torch.equal(model(ids)[0], ours), folder
    assert encoding["inject"] == folder.name.split()[1] and encoding["learned"]["std"] == 0.5, folder
    assert torch.equal(hf_posenc.unpatch(model)(ids)[0], theirs), folder
    print("right")
"""
    assert run_python(code, tmp_path).split() == ["right"] * len(pairs)


@pytest.mark.parametrize(
    ("encoding", "inject", "words"),
    [
        ("alibi", "every_layer", "inject='every_layer' says where vectors are added, but 'alibi' makes none"),
        ("rope+shaw", "after_attention", r"inject='after_attention' .* but 'rope\+shaw' makes none"),
        ("sinusoidal", "each_layer", "inject='each_layer': allowed is 'input', 'every_layer', 'after_attention'"),
        ("sinusoidal", None, "inject=None: allowed is 'input'"),
        ("alibi", "output", "inject='output': allowed is 'input'"),
    ],
)
def test_wrong_inject(encoding, inject, words):
    with pytest.raises(ValueError, match=words):
        hf_posenc.patch(stock("bert"), encoding, inject=inject)
    with pytest.raises(ValueError, match=words):
        hf_posenc.PosEncBertConfig(position_encoding={"type": encoding, "inject": inject})


def test_inject_in_the_dict():
    model = hf_posenc.patch(stock("bert"), {"type": "sinusoidal", "inject": "after_attention", "base": 50})
    other = hf_posenc.patch(stock("bert"), "sinusoidal", inject="after_attention", base=50.0)
    assert torch.equal(first(model(tokens())), first(other(tokens())))
    assert hf_posenc.inspect(model).enters == {"embed": ("encoder.layer.0.attention", "encoder.layer.1.attention")}
    every = hf_posenc.patch(stock("albert"), "sinusoidal", inject="every_layer")
    assert hf_posenc.inspect(every).enters == {"embed": ("encoder.albert_layer_groups.0.albert_layers.0",)}
    at_input = hf_posenc.patch(stock("bert"), "sinusoidal+t5")
    attentions = ("encoder.layer.0.attention.self", "encoder.layer.1.attention.self")
    assert hf_posenc.inspect(at_input).enters == {"embed": ("embeddings.position_embeddings",), "distance_bias": attentions}


def test_a_checkpoint_from_before_inject(tmp_path):
    model = patched("bert", "alibi")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    old = {key: value for key, value in config["position_encoding"].items() if key != "inject"}
    assert set(old) == {"type", "max_length", "host"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "position_encoding": old}))
    again = AutoModel.from_pretrained(tmp_path)
    assert again.config.position_encoding == model.config.position_encoding
    assert torch.equal(first(again(tokens())), first(model(tokens())))
    assert torch.equal(first(hf_posenc.unpatch(again)(tokens())), first(stock("bert")(tokens())))


# Vectors of each layer's own: Shaw.


def as_v4_did(query, key, table, terms, scaling):
    """Scores of Transformers v4's relative_key(_query), `[B, H, L, L]`: its table is indexed by query - key."""
    length, rows = query.shape[2], (len(table) + 1) // 2
    index = torch.arange(length)[:, None] - torch.arange(length)[None, :] + rows - 1
    scores = query @ key.mT + torch.einsum("bhld,lrd->bhlr", query, table[index])
    if terms == "relative_key_query":
        scores = scores + torch.einsum("bhrd,lrd->bhlr", key, table[index])
    return scores * scaling


@pytest.mark.parametrize("terms", ["relative_key", "relative_key_query"])
@torch.no_grad()
def test_shaw_attends_as_v4_did(terms):
    model = randomize_encoding(hf_posenc.patch(stock("bert"), terms, max_distance=LENGTH - 1))
    model.set_attn_implementation("eager")
    output = model(tokens(), output_attentions=True, output_hidden_states=True)
    for layer, hidden, actual in zip(model.encoder.layer, output.hidden_states, output.attentions, strict=False):
        inner = layer.attention.self
        query, key = (project(hidden).view(2, 11, 4, 8).transpose(1, 2) for project in (inner.query, inner.key))
        # v4 counted query - key.
        scores = as_v4_did(query, key, inner.posenc.weight.flip(0), terms, 8**-0.5)
        torch.testing.assert_close(actual, scores.softmax(-1), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("beside", ["alibi", "rope"])
@torch.no_grad()
def test_shaw_beside_what_the_layers_share(beside):
    """The stack's bias is added, and the stack's rotation comes first, in every layer."""
    model = randomize_encoding(hf_posenc.patch(stock("bert"), f"{beside}+relative_key", shaw__max_distance=LENGTH - 1))
    model.set_attn_implementation("eager")
    output = model(tokens(), output_attentions=True, output_hidden_states=True)
    steps = (torch.arange(11)[None, :] - torch.arange(11)[:, None]).abs()
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    angles = torch.arange(11)[:, None] * torch.tensor([10000.0 ** (-i / 4) for i in range(4)])
    turn = torch.polar(torch.ones_like(angles), angles)
    for layer, hidden, actual in zip(model.encoder.layer, output.hidden_states, output.attentions, strict=False):
        inner = layer.attention.self
        query, key = (project(hidden).view(2, 11, 4, 8).transpose(1, 2) for project in (inner.query, inner.key))
        if beside == "rope":
            query, key = (torch.complex(*states.chunk(2, dim=-1)) * turn for states in (query, key))
            query, key = (torch.cat([states.real, states.imag], dim=-1) for states in (query, key))
        scores = as_v4_did(query, key, inner.posenc.shaw.weight.flip(0), "relative_key", 8**-0.5)
        if beside == "alibi":
            scores = scores - slopes[:, None, None] * steps
        torch.testing.assert_close(actual, scores.softmax(-1), atol=1e-6, rtol=1e-4)


def test_shaw_names_its_rows_once_in_a_forward(monkeypatch):
    """Not in each layer, if they agree."""
    model, calls = patched("bert", "shaw"), []
    kind = type(model.encoder.layer[0].attention.self.posenc)
    monkeypatch.setattr(kind, "_index", lambda self, *args, original=kind._index: calls.append(1) or original(self, *args))
    model(tokens())
    model(tokens())
    assert calls == [1, 1]


@pytest.mark.parametrize("terms", ["relative_key", "relative_key_query"])
@torch.no_grad()
def test_shaw_is_scaled_as_its_layer_scales(terms):
    model = hf_posenc.patch(stock("gpt2", scale_attn_by_inverse_layer_idx=True), terms, max_distance=LENGTH - 1)
    randomize_encoding(model).set_attn_implementation("eager")
    output = model(tokens(), output_attentions=True, output_hidden_states=True)
    future = torch.ones(11, 11).triu(1).bool()
    for index, block in enumerate(model.h):
        projected = block.attn.c_attn(block.ln_1(output.hidden_states[index])).split(32, dim=-1)
        query, key = (states.view(2, 11, 4, 8).transpose(1, 2) for states in projected[:2])
        scores = as_v4_did(query, key, block.attn.posenc.weight.flip(0), terms, 8**-0.5 / (index + 1))
        expected = scores.masked_fill(future, -torch.inf).softmax(-1)
        torch.testing.assert_close(output.attentions[index], expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("host", "paths"),
    [
        ("bert", ["encoder.layer.0.attention.self.", "encoder.layer.1.attention.self."]),
        ("gpt2", ["h.0.attn.", "h.1.attn."]),
        ("mpnet", ["encoder.layer.0.attention.attn.", "encoder.layer.1.attention.attn."]),
        # One layer, used twice.
        ("albert", ["encoder.albert_layer_groups.0.albert_layers.0.attention."]),
    ],
)
def test_each_layer_owns_its_vectors(host, paths):
    for kind, weight in (("shaw", "weight"), ("alibi+shaw", "shaw.weight")):
        model = hf_posenc.patch(stock(host), kind)
        again = AutoModel.from_config(model.config)
        for each in (model, again):
            own = {name: p for name, p in each.named_parameters() if "posenc" in name}
            assert list(own) == [f"{path}posenc.{weight}" for path in paths]
            weights = list(own.values())
            assert all(p.std().item() == pytest.approx(0.02, rel=0.1) for p in weights)
            assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])
        assert not any(name.startswith("posenc.") and "host" not in name for name in model.state_dict())


@pytest.mark.parametrize("host", ["bert", "gpt2", "albert", "mpnet"])
def test_blend_of_what_layers_own(host):
    """Each instance has its own; all at 0 the host is as it was."""
    model, expected = patched(host, "sinusoidal+shaw"), stock(host)
    for module in model.modules():
        if isinstance(module, hf_posenc.PositionEncoding):
            module.blend = 0.0
    torch.testing.assert_close(first(model(tokens())), first(expected(tokens())), atol=2e-5, rtol=1e-4)
    next(m for m in model.modules() if getattr(m, "type", "") == "shaw").blend = 1.0
    next(
        m for name, m in model.named_modules() if name.endswith(("self.posenc", "attn.posenc", "attention.posenc"))
    ).blend = 1.0
    assert not torch.allclose(first(model(tokens())), first(expected(tokens())), atol=1e-3)


# Own encodings which the matrix has none of.


class Stretch(hf_posenc.PositionEncoding, type="test-stretch"):
    """A rotation that each layer owns."""

    per_layer = True

    def __init__(self, geometry, **options):
        super().__init__(geometry, **options)
        self.weight = torch.nn.Parameter(torch.empty(geometry.head_dim))
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.normal_(self.weight)

    def rotate(self, query, key, context):
        factor = 1 + context.positions[:, None, :, None] * self.weight
        return tuple(None if states is None else states * factor for states in (query, key))


class Liking(hf_posenc.PositionEncoding, type="test-liking"):
    """Scores by content, and so by layer."""

    def score_bias(self, query, key, context):
        return (query @ key.mT).tanh() * context.distances(key.shape[2])[:, None]


class Nearby(hf_posenc.PositionEncoding, type="test-nearby"):
    """-inf, of which no part can be taken."""

    def distance_bias(self, distance):
        return torch.where(distance.abs() > 2, -torch.inf, 0.0)[None]


@pytest.mark.parametrize("kind", ["test-stretch", "test-liking"])
@torch.no_grad()
def test_own_encodings_by_layer(kind):
    model = randomize_encoding(hf_posenc.patch(stock("gpt2"), kind))
    model.set_attn_implementation("eager")
    output = model(tokens(), output_attentions=True, output_hidden_states=True)
    positions, future = torch.arange(11), torch.ones(11, 11).triu(1).bool()
    for block, hidden, actual in zip(model.h, output.hidden_states, output.attentions, strict=False):
        projected = block.attn.c_attn(block.ln_1(hidden)).split(32, dim=-1)
        query, key = (states.view(2, 11, 4, 8).transpose(1, 2) for states in projected[:2])
        if kind == "test-stretch":
            query, key = (states * (1 + positions[:, None] * block.attn.posenc.weight) for states in (query, key))
        scores = query @ key.mT * 8**-0.5
        if kind == "test-liking":
            scores = scores + (query @ key.mT).tanh() * (positions[None, :] - positions[:, None])
        torch.testing.assert_close(actual, scores.masked_fill(future, -torch.inf).softmax(-1), atol=1e-5, rtol=1e-4)
    # Keys are stored as they are turned.
    cache = DynamicCache()
    pieces = [first(model(tokens()[:, a:b], past_key_values=cache)) for a, b in ((0, 6), (6, 7), (7, 11))]
    torch.testing.assert_close(torch.cat(pieces, 1), first(output), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("host", ["bert", "mpnet"])
def test_no_part_of_minus_infinity(host):
    model = hf_posenc.patch(stock(host), "test-nearby")
    model.posenc.blend = 0.0
    torch.testing.assert_close(first(model(tokens())), first(stock(host)(tokens())), atol=1e-5, rtol=1e-4)


# Compositions in a model.


def test_options_of_a_composition_travel(tmp_path):
    options = {"sinusoidal": {"base": 77.0, "layout": "concatenated", "scale": "learned"}}
    model = hf_posenc.patch(
        stock("bert"),
        {"type": "sinusoidal+rotary+alibi", **options},
        rotary__theta=50,
        rope__layout="interleaved",
        max_length=9,
    )
    randomize_encoding(model).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["position_encoding"]
    rope = {"theta": 50.0, "layout": "interleaved"}
    host = saved.pop("host")
    assert host["kept"] and saved == {
        "type": "sinusoidal+rope+alibi", **options, "rope": rope, "alibi": {}, "inject": "input", "max_length": 9
    }  # fmt: skip
    assert "posenc.sinusoidal.factor" in model.state_dict()
    assert hf_posenc.inspect(model).options == {**options, "rope": rope, "alibi": {}}
    assert torch.equal(first(AutoModel.from_pretrained(tmp_path)(tokens(length=9))), first(model(tokens(length=9))))
    with pytest.raises(ValueError, match=r"10 tokens.*max_length=9 of this model's 'sinusoidal\+rope\+alibi'"):
        model(tokens(length=10))

    # What is given on loading is merged with it, part by part.
    given = {"type": "sinusoidal+rope+alibi", "rope": {"theta": 5.0}, "sinusoidal": {"base": 3.0}}
    other = AutoModel.from_pretrained(tmp_path, position_encoding=given)
    expected = {"sinusoidal": {**options["sinusoidal"], "base": 3.0}, "rope": {**rope, "theta": 5.0}, "alibi": {}}
    assert {part: other.config.position_encoding[part] for part in expected} == expected
    assert other.config.position_encoding["max_length"] == 9 and other.config.position_encoding["host"] == host
    assert (other.posenc.rope.theta, other.posenc.rope.layout, other.posenc.sinusoidal.base) == (5.0, "interleaved", 3.0)
    given = {"type": "sinusoidal+rotary+alibi", "rope__theta": 6.0}
    assert AutoModel.from_pretrained(tmp_path, position_encoding=given).posenc.rope.theta == 6.0
    same = AutoModel.from_pretrained(tmp_path, position_encoding="sinusoidal+rotary+alibi")
    assert torch.equal(first(same(tokens(length=9))), first(model(tokens(length=9))))
    for wrong in ("sinusoidal+rope", "rope+sinusoidal+alibi", "sinusoidal", "alibi"):
        with pytest.raises(ValueError, match=r"saved with the 'sinusoidal\+rope\+alibi' encoding, not"):
            AutoModel.from_pretrained(tmp_path, position_encoding=wrong)


@pytest.mark.parametrize("host", ["bert", "gpt2", "mpnet"])
@torch.no_grad()
def test_a_composition_is_all_of_its_parts(host):
    """Each part leaves its mark: bias and rotation in the attentions, vectors at the input."""
    whole = patched(host, "sinusoidal+rope+alibi")
    expected = first(whole(tokens()))
    for part in whole.posenc.children():
        if isinstance(part, hf_posenc.PositionEncoding):
            less = "+".join(name for name in ("sinusoidal", "rope", "alibi") if name != part.type)
            assert (first(patched(host, less)(tokens())) - expected).abs().max() > 1e-3
    nothing = first(patched(host, "sinusoidal+rope+alibi+none")(tokens()))
    torch.testing.assert_close(nothing, expected)
    torch.testing.assert_close(first(patched(host, "alibi+rope+sinusoidal")(tokens())), expected, atol=1e-5, rtol=1e-4)


def test_position_embedding_takes_what_embeds_alone():
    layer = hf_posenc.PositionEmbedding("sinusoidal+learned", 8, max_length=5, learned__std=1)
    expected = layer.posenc.learned.weight + sinusoids([range(5)], 8)
    torch.testing.assert_close(layer(torch.zeros(1, 5, 8)), expected)
    for kind in ("sinusoidal+alibi", "alibi+none", "rope+sinusoidal", "sinusoidal+shaw"):
        with pytest.raises(ValueError, match=r"doesn't act by vectors alone.*hf_posenc\.patch"):
            hf_posenc.PositionEmbedding(kind, 8)


# Hosts which count from another number than 0.

ROBERTAS = [host for host in OFFSET if host not in BIASED]


@pytest.mark.parametrize("host", OFFSET)
def test_usable_length(host):
    """Two rows of the table serve no token."""
    model = stock(host)
    assert hf_posenc.inspect(model).max_length == LENGTH and model.config.max_position_embeddings == LENGTH + 2
    learned = hf_posenc.patch(model, "learned")
    assert hf_posenc.inspect(learned).max_length == LENGTH == len(learned.posenc.weight)
    assert learned.config.max_position_embeddings == LENGTH + 2
    longer = hf_posenc.patch(model, "learned", max_length=30)
    assert hf_posenc.inspect(longer).max_length == 30 == len(longer.posenc.weight)
    assert longer.config.max_position_embeddings == 32
    again = hf_posenc.unpatch(longer)
    assert again.config.max_position_embeddings == LENGTH + 2 == again.embeddings.position_embeddings.num_embeddings
    assert hf_posenc.inspect(hf_posenc.patch(model, "alibi")).max_length is None


@pytest.mark.parametrize("host", OFFSET)
@pytest.mark.parametrize("encoding", ["learned", "alibi"])
def test_ids_in_the_count_of_the_host(host, encoding):
    model, ids = patched(host, encoding), tokens()
    expected = first(model(ids))
    assert torch.equal(first(model(ids, position_ids=torch.arange(2, 13)[None])), expected)
    for start in (0, -5):
        message = rf"position_ids begin at {start}, but {type(model).__name__} counts its first token as 2 and padding as 1"
        with pytest.raises(ValueError, match=rf"{message}, patched or not: add 2 to ids that count from 0"):
            model(ids, position_ids=torch.arange(start, start + 11)[None])
    if encoding == "learned":
        with pytest.raises(ValueError, match=f"from 0 to {LENGTH} don't fit a learned table of {LENGTH} rows"):
            model(ids[:, :2], position_ids=torch.tensor([[2, LENGTH + 2]]))


@every_mask
@pytest.mark.parametrize("host", OFFSET)
@torch.no_grad()
def test_the_hosts_own_ids_and_table_change_nothing(host, mask):
    """Where the mask hides just the padding tokens, from which the host makes its ids."""
    arguments, real = padding_of(mask)
    ids = torch.where(real, tokens(), 1)
    model = stock(host)
    if host == "mpnet":
        new = hf_posenc.patch(model, "learned+t5", learned__init="host")
        new.posenc.t5.weight.copy_(model.encoder.relative_attention_bias.weight)
    else:
        new = hf_posenc.patch(model, "learned", init="host")
    expected = first(model(ids, **arguments))[real]
    # With its own ids: 1 for padding, and 2 for the first token.
    by_hand = (real.cumsum(1) + 1) * real + 1 * ~real
    for more in ({}, {"position_ids": by_hand}):
        actual = first(new(ids, **arguments, **more))[real]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 if host == "mpnet" else 0)


@pytest.mark.parametrize("host", ROBERTAS)
@torch.no_grad()
def test_positions_come_from_the_mask_not_from_padding_tokens(host):
    """The stock model skips a padding token in the middle of a text, even if its mask shows it."""
    model, ids = stock(host), tokens()
    ids[:, 4] = 1
    new, mask = hf_posenc.patch(model, "learned", init="host"), torch.ones_like(ids)
    in_a_row = first(model(ids, attention_mask=mask, position_ids=torch.arange(2, 13).expand(2, -1)))
    assert torch.equal(first(new(ids, attention_mask=mask)), in_a_row)
    assert not torch.allclose(first(model(ids, attention_mask=mask)), in_a_row, atol=1e-3)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(first(new(inputs_embeds=embeds, attention_mask=mask)), in_a_row)


# Hosts whose attention is written out.


def rembert(**changes):
    """Not in the matrix, but in the table of written-out attentions."""
    sizes = {**HOSTS["bert"].sizes, "input_embedding_size": 16, "output_embedding_size": 16, "vocab_size": 61, **changes}
    torch.manual_seed(0)
    return transformers.RemBertModel(transformers.RemBertConfig(**sizes)).eval()


def written_out(host, **changes):
    return rembert(**changes) if host == "rembert" else stock(host, **changes)


def as_it_was(host, **changes):
    """A stock model whose attention is written out, and the same with its own positions given by our encodings."""
    model = written_out(host, **changes)
    if host != "mpnet":
        return model, hf_posenc.patch(model, "learned", init="host")
    new = hf_posenc.patch(model, "learned+t5", learned__init="host")
    with torch.no_grad():
        new.posenc.t5.weight.copy_(model.encoder.relative_attention_bias.weight)
    return model, new


WRITTEN_OUT = pytest.mark.parametrize("host", ["mpnet", "megatron-bert", "rembert"])


@WRITTEN_OUT
@every_mask
@torch.no_grad()
def test_written_out_attention_is_the_hosts(host, mask):
    """Attentions and hidden states, padded or not."""
    arguments, real = padding_of(mask)
    arguments |= {"output_attentions": True, "output_hidden_states": True}
    model, new = as_it_was(host)
    theirs, ours = model(tokens(), position_ids=ids_of(host, mask), **arguments), new(tokens(), **arguments)
    for one, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        torch.testing.assert_close(one[real], other[real], atol=1e-5, rtol=1e-4)
    for one, other in zip(ours.attentions, theirs.attentions, strict=True):
        torch.testing.assert_close(one.transpose(1, 2)[real], other.transpose(1, 2)[real], atol=1e-5, rtol=1e-4)


@WRITTEN_OUT
def test_written_out_attention_drops_out_and_learns_as_the_hosts(host):
    model, new = as_it_was(host, attention_probs_dropout_prob=0.4, hidden_dropout_prob=0.2)
    results = []
    for each in (model.train(), new.train()):
        each.zero_grad()
        torch.manual_seed(3)
        output = first(each(tokens()))
        output.square().mean().backward()
        gradients = {name: p.grad.clone() for name, p in each.named_parameters() if p.grad is not None}
        results.append((output, {name: g for name, g in gradients.items() if "posenc" not in name and "position" not in name}))
    # The same random numbers drop the same weights.
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-5, rtol=1e-4)
    torch.manual_seed(4)
    assert not torch.allclose(first(new(tokens())), results[1][0], atol=1e-3)
    assert torch.equal(first(new.eval()(tokens())), first(new(tokens())))
    ours, theirs = results[1][1], {name: g for name, g in results[0][1].items() if "relative_attention_bias" not in name}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-5, rtol=1e-3, msg=name)


@WRITTEN_OUT
@pytest.mark.parametrize("encoding", ["alibi", "sinusoidal", "rope", "sinusoidal+alibi", "none"])
@every_mask
@torch.no_grad()
def test_written_out_hosts_fade(host, encoding, mask):
    model = written_out(host)
    arguments, real = padding_of(mask)
    new = hf_posenc.patch(model, encoding)
    full = first(new(tokens(), **arguments))
    new.posenc.blend = 0.0
    expected = first(model(tokens(), position_ids=ids_of(host, mask), **arguments))
    torch.testing.assert_close(first(new(tokens(), **arguments))[real], expected[real], atol=1e-5, rtol=1e-4)
    new.posenc.blend = 1.0
    assert torch.equal(first(new(tokens(), **arguments)), full)


@torch.no_grad()
def test_mpnet_half_way():
    """Half of its table and of its biases, half of ALiBi."""
    new, expected = hf_posenc.patch(stock("mpnet"), "alibi"), without_positions("mpnet", part=0.5)
    new.posenc.blend = 0.5
    own = expected.encoder.compute_position_bias
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    steps = (torch.arange(11)[None, :] - torch.arange(11)[:, None]).abs()
    expected.encoder.compute_position_bias = lambda hidden: own(hidden) - 0.5 * slopes[:, None, None] * steps
    for mask in MASKS.values():
        arguments, real = padding_of(mask)
        theirs = first(expected(tokens(), position_ids=ids_of("mpnet", mask), **arguments))
        torch.testing.assert_close(first(new(tokens(), **arguments))[real], theirs[real], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("encoding", ["none", "alibi"])
def test_mpnets_own_biases_are_gone_and_kept(encoding, tmp_path):
    model = stock("mpnet")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.encoder.relative_attention_bias.weight.add_(torch.arange(32)[:, None] % 3)
    assert not torch.allclose(first(other(tokens())), first(model(tokens())), atol=1e-3)
    new = hf_posenc.patch(other, encoding)
    assert torch.equal(first(new(tokens())), first(hf_posenc.patch(model, encoding)(tokens())))
    key = "posenc.host.encoder.relative_attention_bias.weight"
    assert torch.equal(new.state_dict()[key], other.encoder.relative_attention_bias.weight)
    assert key in dict(new.named_buffers()) and not any("relative_attention_bias" in name for name, _ in new.named_parameters())
    new.save_pretrained(tmp_path)
    again = hf_posenc.unpatch(AutoModel.from_pretrained(tmp_path))
    assert torch.equal(again.encoder.relative_attention_bias.weight, other.encoder.relative_attention_bias.weight)
    assert torch.equal(first(again(tokens())), first(other(tokens())))
    assert not any("relative_attention_bias" in name for name in hf_posenc.patch(model, encoding, keep_host=False).state_dict())
    gone = hf_posenc.patch(model, encoding, keep_host=False)
    assert torch.equal(first(gone(tokens())), first(hf_posenc.patch(model, encoding)(tokens())))


def test_a_written_out_attention_is_an_encoders():
    for host in ("MegatronBert", "RemBert"):
        config = getattr(transformers, f"{host}Config")(**{**HOSTS["bert"].sizes, "vocab_size": 61}, is_decoder=True)
        with pytest.raises(ValueError, match="served as an encoder only: load it with is_decoder=False"):
            hf_posenc.patch(getattr(transformers, f"{host}Model")(config), "alibi")


def test_part_of_a_written_out_host_has_no_positions():
    for host in ("mpnet", "megatron-bert"):
        model = patched(host, "alibi")
        model(tokens())  # what it leaves behind is used up
        with pytest.raises(RuntimeError, match="without positions"):
            model.encoder(torch.zeros(1, 3, 32))


# LayoutLM.


@torch.no_grad()
def test_boxes_of_layoutlm_still_count():
    model, ids = hf_posenc.patch(stock("layoutlm"), "none"), tokens()
    corners = torch.randint(0, 8, (2, 11, 2), generator=torch.Generator().manual_seed(1))
    boxes = torch.cat([corners, corners + torch.randint(0, 8, (2, 11, 2), generator=torch.Generator().manual_seed(2))], dim=-1)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(3))
    expected = first(model(ids, bbox=boxes))
    torch.testing.assert_close(first(model(ids[:, order], bbox=boxes[:, order])), expected[:, order], atol=1e-5, rtol=1e-4)
    assert (first(model(ids, bbox=boxes[:, order])) - expected).abs().max() > 0.01
    assert (first(model(ids)) - expected).abs().max() > 0.01
    assert torch.equal(first(without_positions_of_words("layoutlm")(ids, bbox=boxes)), expected)


def without_positions_of_words(host):
    model = stock(host)
    model.embeddings.position_embeddings.weight.zero_()
    return model
