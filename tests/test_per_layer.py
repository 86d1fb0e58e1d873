"""Encodings with separate parameters in each attention (`per_layer=True`), and with parameters that all attentions share."""

import pytest
import torch
from transformers import AutoModel
from transformers.models.t5.modeling_t5 import T5Attention

import hf_posenc
import models
from closeness import assert_apart, assert_close, assert_equal
from models import HOSTS, LENGTH, backends, first, patched, randomize_encoding, stock, tokens
from oracles import alibi, future, gpt2_query_key, gradients, heads
from reloading import keep, reload

RELATIVE = {"max_distance": 3, "per_layer": True}
T5 = {"num_buckets": 8, "max_distance": 12, "per_layer": True}
SLOPES = {"slopes": "learned", "per_layer": True}
OWNERS = {
    "relative": ({"type": "relative", **RELATIVE}, (), ("weight",)),
    "t5": ({"type": "t5", **T5}, (), ("weight",)),
    "alibi": ({"type": "alibi", **SLOPES}, (), ("weight",)),
    "alibi, fixed": ({"type": "alibi", "per_layer": True}, (), ()),
    "a part": ({"type": "alibi+relative", "relative": RELATIVE}, (), ("relative.weight",)),
    "the other part": ({"type": "t5+alibi", "t5": T5, "alibi__slopes": "learned"}, ("alibi.weight",), ("t5.weight",)),
    "both parts": ({"type": "t5+alibi", "t5": T5, "alibi": SLOPES}, (), ("t5.weight", "alibi.weight")),
    "shaw": ({"type": "shaw"}, (), ("weight",)),
    "shaw, shared": ({"type": "shaw", "per_layer": False}, ("weight",), ()),
    "beside shaw": ({"type": "alibi+shaw"}, (), ("shaw.weight",)),
}
"""An encoding, the parameters of the layer stack, and those of each attention."""
PATHS = {
    "bert": ["encoder.layer.0.attention.self.", "encoder.layer.1.attention.self."],
    "gpt2": ["h.0.attn.", "h.1.attn."],
    "mpnet": ["encoder.layer.0.attention.attn.", "encoder.layer.1.attention.attn."],
    # One layer, used twice.
    "albert": ["encoder.albert_layer_groups.0.albert_layers.0.attention."],
}


def as_v4_did(query, key, table, terms, scaling):
    """Scores of Transformers v4's relative_key(_query), `[B, H, L, L]`. v4 indexes its table by query - key, hf-posenc by key -
    query.
    """
    table = table.flip(0)
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
        query, key = (heads(project(hidden)) for project in (inner.query, inner.key))
        scores = as_v4_did(query, key, inner.posenc.weight, terms, 8**-0.5)
        assert_close(actual, scores.softmax(-1))


@pytest.mark.parametrize("beside", ["alibi", "rope"])
@torch.no_grad()
def test_shaw_beside_what_the_layers_share(beside):
    """In every layer, the shared bias is added, and the shared rotation is applied before Shaw's products."""
    model = randomize_encoding(hf_posenc.patch(stock("bert"), f"{beside}+relative_key", shaw__max_distance=LENGTH - 1))
    model.set_attn_implementation("eager")
    output = model(tokens(), output_attentions=True, output_hidden_states=True)
    angles = torch.arange(11)[:, None] * torch.tensor([10000.0 ** (-i / 4) for i in range(4)])
    turn = torch.polar(torch.ones_like(angles), angles)
    for layer, hidden, actual in zip(model.encoder.layer, output.hidden_states, output.attentions, strict=False):
        inner = layer.attention.self
        query, key = (heads(project(hidden)) for project in (inner.query, inner.key))
        if beside == "rope":
            query, key = (torch.complex(*states.chunk(2, dim=-1)) * turn for states in (query, key))
            query, key = (torch.cat([states.real, states.imag], dim=-1) for states in (query, key))
        scores = as_v4_did(query, key, inner.posenc.shaw.weight, "relative_key", 8**-0.5)
        if beside == "alibi":
            scores = scores + alibi(11)
        assert_close(actual, scores.softmax(-1))


@pytest.mark.parametrize("terms", ["relative_key", "relative_key_query"])
@torch.no_grad()
def test_shaw_is_scaled_as_its_layer_scales(terms):
    model = hf_posenc.patch(stock("gpt2", scale_attn_by_inverse_layer_idx=True), terms, max_distance=LENGTH - 1)
    randomize_encoding(model).set_attn_implementation("eager")
    output = model(tokens(), output_attentions=True, output_hidden_states=True)
    for index, block in enumerate(model.h):
        query, key = gpt2_query_key(block, output.hidden_states[index])
        scores = as_v4_did(query, key, block.attn.posenc.weight, terms, 8**-0.5 / (index + 1))
        expected = scores.masked_fill(future(11), -torch.inf).softmax(-1)
        assert_close(output.attentions[index], expected)


class Slope(hf_posenc.PositionEncoding, type="test-slope"):
    """A custom encoding in each attention, unless `per_layer=False`."""

    start: float = 1.0
    per_layer = True

    def __init__(self, geometry, **options):
        super().__init__(geometry, **options)
        self.weight = torch.nn.Parameter(torch.full((1,), self.start))

    def distance_bias(self, distance):
        return -self.weight[:, None] * distance.abs()


OWNERS |= {
    "own": ({"type": "test-slope"}, (), ("weight",)),
    "own, shared": ({"type": "test-slope", "per_layer": False}, ("weight",), ()),
    "own, a part": ({"type": "test-slope+shaw", "shaw__per_layer": False}, ("shaw.weight",), ("test-slope.weight",)),
}


@pytest.mark.parametrize(
    ("host", "name"),
    [*(("bert", name) for name in OWNERS), ("gpt2", "both parts"), ("mpnet", "own, a part"), ("albert", "shaw")],
)
def test_who_owns_the_parameters(host, name):
    """This holds for patched models and models from scratch. Random parameters have different initial values in each layer."""
    encoding, shared, own = OWNERS[name]
    model = hf_posenc.patch(stock(host), encoding)
    for each in (model, AutoModel.from_config(model.config)):
        found = {path: parameter for path, parameter in each.named_parameters() if "posenc" in path}
        expected = {f"posenc.{path}" for path in shared} | {f"{start}posenc.{path}" for start in PATHS[host] for path in own}
        assert found.keys() == expected
        drawn = [parameter for parameter in found.values() if parameter.ndim > 1]
        assert not any(torch.equal(one, other) for i, one in enumerate(drawn) for other in drawn[:i])
        if "shaw" in encoding["type"]:
            assert drawn and all(parameter.std().item() == pytest.approx(0.02, rel=0.1) for parameter in drawn)


def bias_of(name, weights, length, is_causal):
    """`[4, L, L]` by the formulas, from the parameters of one attention and of the layer stack."""
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    bias = alibi(length) if name in ("alibi, fixed", "a part") else torch.zeros(4, length, length)
    for path, weight in weights.items():
        if "relative" in (name, path.partition(".")[0]):
            for i in range(length):
                for j in range(length):
                    bias[:, i, j] += weight[:, max(-3, min(3, j - i)) + 3] / 8**0.5
        elif "t5" in (name, path.partition(".")[0]):
            bias = bias + weight[T5Attention._relative_position_bucket(distance, not is_causal, 8, 12)].permute(2, 0, 1)
        else:
            bias = bias - weight[:, None, None] * distance.abs()
    return bias


@pytest.mark.parametrize(
    ("host", "name"),
    [
        *(("bert", name) for name in ("relative", "t5", "alibi", "alibi, fixed", "a part")),
        *(("gpt2", name) for name in ("relative", "the other part", "both parts")),
    ],
)
@torch.no_grad()
def test_each_attention_adds_its_own_bias(host, name):
    encoding, shared, own = OWNERS[name]
    model = randomize_encoding(hf_posenc.patch(stock(host), encoding))
    model.set_attn_implementation("eager")
    output = model(tokens(), output_attentions=True, output_hidden_states=True)
    for number, (hidden, actual) in enumerate(zip(output.hidden_states, output.attentions, strict=False)):
        if host == "gpt2":
            query, key = gpt2_query_key(model.h[number], hidden)
        else:
            inner = model.encoder.layer[number].attention.self
            query, key = (heads(project(hidden)) for project in (inner.query, inner.key))
        weights = {path: model.get_parameter(f"posenc.{path}") for path in shared}
        weights |= {path: model.get_parameter(f"{PATHS[host][number]}posenc.{path}") for path in own}
        scores = query @ key.mT * 8**-0.5 + bias_of(name, weights, 11, host == "gpt2")
        if host == "gpt2":
            scores = scores.masked_fill(future(11), -torch.inf)
        assert_close(actual, scores.softmax(-1))


@torch.no_grad()
def test_shared_vectors_of_shaw():
    """If all layers have the same vectors, both models are equal."""
    shared, each = (randomize_encoding(hf_posenc.patch(stock("bert"), "shaw", per_layer=owned)) for owned in (False, True))
    assert_apart(first(each(tokens())), first(shared(tokens())))
    for path in PATHS["bert"]:
        each.get_parameter(f"{path}posenc.weight").copy_(shared.posenc.weight)
    assert_close(first(each(tokens())), first(shared(tokens())))


def test_reload_in_a_new_process(tmp_path):
    for host, name in [
        ("bert", "alibi"),
        ("bert", "a part"),
        ("bert", "shaw, shared"),
        *((host, "both parts") for host in PATHS),
    ]:
        keep(tmp_path / f"{host} {name}", patched(host, OWNERS[name][0]), stock(host), tokens())
    reload(tmp_path)


@pytest.mark.parametrize(
    ("host", "name"), [("bert", "relative"), ("bert", "both parts"), ("albert", "both parts"), ("mpnet", "shaw, shared")]
)
def test_gradients(host, name):
    """Each parameter gets a gradient, which is the same in all implementations."""
    model = patched(host, OWNERS[name][0], **HOSTS[host].no_dropout).train()
    found = {}
    for implementation in backends(model):
        model.set_attn_implementation(implementation)
        for reentrant in (None, False, True) if model.supports_gradient_checkpointing else (None,):
            if reentrant is not None:
                models.checkpointing(model, use_reentrant=reentrant)
            every = gradients(model, lambda model: first(model(tokens())).square().sum())
            found[implementation, reentrant] = {path: value for path, value in every.items() if "posenc" in path}
            models.checkpointing(model, enable=False)
    expected = next(iter(found.values()))
    assert expected.keys() == {path for path, _ in model.named_parameters() if "posenc" in path}
    assert all(value.any() for value in expected.values())
    for actual in found.values():
        assert_close(actual, expected)


@pytest.mark.parametrize("host", ["bert", "gpt2"])
@pytest.mark.parametrize("per_layer", [False, True])
def test_learned_slopes(host, per_layer, tmp_path):
    """Learned slopes start bit-identical to the fixed ones. Trained slopes reload unchanged."""
    with torch.no_grad():
        fixed = first(hf_posenc.patch(stock(host), "alibi")(tokens()))
        model = hf_posenc.patch(stock(host), "alibi", slopes="learned", per_layer=per_layer)
        assert_equal(first(model(tokens())), fixed)
        scratch = AutoModel.from_config(model.config)
        for path, slope in scratch.named_parameters():
            assert "posenc" not in path or torch.equal(slope, torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]))
    slopes = [parameter for path, parameter in model.named_parameters() if "posenc" in path]
    start = [slope.detach().clone() for slope in slopes]
    optimizer = torch.optim.SGD(slopes, lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        first(model(tokens())).square().sum().backward()
        optimizer.step()
    assert len(slopes) == (2 if per_layer else 1)
    assert all((slope != before).all() for slope, before in zip(slopes, start, strict=True))
    assert not per_layer or not torch.equal(*slopes)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert_apart(first(model(tokens())), fixed, by=1e-5)
        assert_equal(first(AutoModel.from_pretrained(tmp_path)(tokens())), first(model(tokens())))
