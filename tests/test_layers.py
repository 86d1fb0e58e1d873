"""`layers=`: an encoding in some layers only."""

import json
import re

import pytest
import torch
from transformers import AutoModel

import hf_posenc
from closeness import assert_apart, assert_close, assert_equal
from models import CACHE, HOSTS, first, patched, randomize_encoding, stock, tokens
from reloading import keep, reload

FOUR = dict(num_hidden_layers=4)
KINDS = ["bert", "mpnet", "gpt2", "llama", "modernbert"]
"""Models with a separate attention in each layer, one of each structure."""
SIZES = {host: {"n_layer": 4} if host == "gpt2" else FOUR for host in KINDS}


def into(host, encoding, **arguments):
    """A patched model of four layers, with new random values for the encoding's parameters."""
    return randomize_encoding(hf_posenc.patch(stock(host, **SIZES[host]), encoding, **arguments))


def layers_of(model, host):
    return model.get_submodule(HOSTS[host].layers)


@torch.no_grad()
def layer_by_layer(model, host, given=None):
    """The input of each layer, and the output of its attention block. `given` replaces the inputs of the layers."""
    entered, answered, handles = [], [], []

    def before(module, args):
        entered.append(args[0])
        return None if given is None else (given[len(entered) - 1], *args[1:])

    def after(module, args, answer):
        answered.append(answer[0] if isinstance(answer, tuple) else answer)

    for layer in layers_of(model, host):
        handles.append(layer.register_forward_pre_hook(before, prepend=True))
        handles.append(layer.get_submodule(HOSTS[host].block).register_forward_hook(after))
    model(tokens())
    for handle in handles:
        handle.remove()
    return entered, answered


def acting_in(model, host):
    """The numbers of the layers whose attention output for the same input differs from that without positions."""
    entered, ours = layer_by_layer(model, host)
    _, without = layer_by_layer(hf_posenc.patch(stock(host, **SIZES[host]), "none"), host, entered)
    by = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, without, strict=True)]
    assert all(distance < 1e-5 or distance > 1e-4 for distance in by), by
    return [number for number, distance in enumerate(by) if distance > 1e-4]


WAYS_TO_SAY_IT = {
    "::2": [0, 2],
    "1::2": [1, 3],
    "3::4": [3],
    ":2": [0, 1],
    "-1:": [3],
    "::-1": [0, 1, 2, 3],
    "::": [0, 1, 2, 3],
    "1:99": [1, 2, 3],
    (0,): [0],
    (3, 1): [1, 3],
    (-1,): [3],
    (-4, 2): [0, 2],
}


@pytest.mark.parametrize("layers", WAYS_TO_SAY_IT)
def test_ways_to_say_it(layers):
    expected = WAYS_TO_SAY_IT[layers]
    for given in (layers, list(layers)) if isinstance(layers, tuple) else (layers, f" {layers} "):
        model = into("bert", "alibi", layers=given)
        assert hf_posenc.inspect(model).layers == {"alibi": tuple(expected)}
        assert acting_in(model, "bert") == expected
        written = model.config.position_encoding["layers"]
        assert written == (list(layers) if isinstance(layers, tuple) else layers)


@pytest.mark.parametrize(
    ("host", "encoding"),
    [
        *(("bert", encoding) for encoding in ("rope", "alibi", "relative", "relative, each its own", "t5", "shaw")),
        *((host, "rope" if number % 2 else "shaw") for number, host in enumerate(KINDS[1:])),
    ],
)
def test_only_these_layers(host, encoding):
    encoding, _, each = encoding.partition(", ")
    encoding = {"type": encoding, **({"per_layer": True} if each else {})}
    assert acting_in(into(host, encoding, layers=[1, 2]), host) == [1, 2]
    assert acting_in(into(host, encoding), host) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("host", "one", "two", "inject"),
    [
        ("bert", "rope", "alibi", "input"),
        ("bert", "alibi", "relative", "input"),
        ("mpnet", "t5", "shaw", "input"),
        ("gpt2", "rope", "relative", "input"),
        ("llama", "alibi", "shaw", "input"),
        ("llama", "sinusoidal", "learned", "every_layer"),
        ("modernbert", "sinusoidal", "learned", "after_attention"),
    ],
)
def test_two_encodings_in_turn(host, one, two, inject):
    """Each layer gives the same output as in a model with only its encoding."""
    layers = {f"{one}__layers": "0::2", f"{two}__layers": "1::2"}
    model = into(host, f"{one}+{two}", inject=inject, **layers)
    assert hf_posenc.inspect(model).layers == {one: (0, 2), two: (1, 3)}
    for each in (one, two):
        alone = into(host, each, inject=inject)
        drawn = dict(model.named_parameters())
        for name, parameter in alone.named_parameters():
            if "posenc." in name and (same := drawn.get(name.replace("posenc.", f"posenc.{each}."))) is not None:
                parameter.data.copy_(same)
        entered, answers = layer_by_layer(model, host)
        _, theirs = layer_by_layer(alone, host, entered)
        for number in (0, 2) if each == one else (1, 3):
            assert_close(answers[number], theirs[number])


def test_a_part_without_layers_acts_in_all():
    model = into("bert", "rope+alibi", alibi__layers=[1])
    assert hf_posenc.inspect(model).layers == {"alibi": (1,)}
    entered, answers = layer_by_layer(model, "bert")
    _, ropes = layer_by_layer(into("bert", "rope"), "bert", entered)
    _, both = layer_by_layer(into("bert", "rope+alibi"), "bert", entered)
    assert_close(answers, [ropes[0], both[1], ropes[2], ropes[3]])
    assert_apart(both[1], ropes[1])


@pytest.mark.parametrize(("host", "part"), [("bert", "relative"), *((host, "shaw") for host in KINDS)])
def test_parameters_in_these_layers_only(host, part):
    model = into(host, f"alibi+{part}", **{f"{part}__layers": [-1], f"{part}__per_layer": True})
    owners = {name for name, _ in model.named_parameters() if "posenc" in name}
    assert len(owners) == 1 and owners.pop().startswith(f"{HOSTS[host].layers}.3.")
    assert len([name for name, _ in into(host, part, per_layer=True).named_parameters() if "posenc" in name]) == 4
    first(model.train()(tokens())).square().sum().backward()
    assert next(p for name, p in model.named_parameters() if "posenc" in name).grad.abs().sum() > 0


@pytest.mark.parametrize("inject", ["every_layer", "after_attention"])
@pytest.mark.parametrize("host", KINDS)
@torch.no_grad()
def test_vectors_in_these_layers_only(host, inject):
    """The output equals that of a model without positions whose layers get the vectors added by hooks."""
    model = into(host, "sinusoidal", inject=inject, layers=[1, 3])
    assert hf_posenc.inspect(model).layers == {"sinusoidal": (1, 3)}
    assert len(hf_posenc.inspect(model).locations["embed"]) == 2
    plain = hf_posenc.patch(stock(host, **SIZES[host]), "none")
    vectors = hf_posenc.PositionEmbedding("sinusoidal", 32)(torch.zeros(1, 11, 32))

    def before(module, args):
        return (args[0] + vectors, *args[1:])

    def after(module, args, answer):
        return (answer[0] + vectors, *answer[1:]) if isinstance(answer, tuple) else answer + vectors

    for number in (1, 3):
        layer = layers_of(plain, host)[number]
        if inject == "every_layer":
            layer.register_forward_pre_hook(before)
        else:
            layer.get_submodule(HOSTS[host].block).register_forward_hook(after)
    assert_close(first(model(tokens())), first(plain(tokens())))


SAVED = {
    "llama list": ("llama", "shaw", {"layers": [-1, 0]}),
    "modernbert twice": ("modernbert", "rope+rope", {"rope__layers": "::2", "rope_2__layers": "1::2", "rope_2__theta": 50.0}),
    "gpt2 vectors": ("gpt2", "learned+alibi", {"learned__layers": [2], "alibi__layers": "0:2", "inject": "every_layer"}),
    "bert its own": ("bert", "t5", {"layers": [1, 3], "per_layer": True}),
}


def test_reload_in_a_new_process(tmp_path):
    for name, (host, encoding, arguments) in SAVED.items():
        model = into(host, encoding, **arguments)
        keep(tmp_path / name, model, stock(host, **SIZES[host]), tokens())
        written = json.loads((tmp_path / name / "config.json").read_text())["position_encoding"]
        for option, value in arguments.items():
            part, _, option = option.rpartition("__")
            assert (written[part] if part else written)[option] == value
    reload(tmp_path)


def test_layers_given_on_loading(tmp_path):
    into("bert", "alibi", layers=[0]).save_pretrained(tmp_path)
    other = AutoModel.from_pretrained(tmp_path, position_encoding={"type": "alibi", "layers": [2, 3]})
    assert acting_in(other, "bert") == [2, 3]


def test_from_scratch():
    config = hf_posenc.PosEncLlamaConfig(
        **(HOSTS["llama"].sizes | FOUR), vocab_size=61, position_encoding={"type": "shaw", "layers": "::3"}
    )
    model = hf_posenc.PosEncLlamaModel(config)
    assert hf_posenc.inspect(model).layers == {"shaw": (0, 3)}
    assert re.search(r"layers: +0, 3$", str(hf_posenc.inspect(model)), re.MULTILINE)


@pytest.mark.parametrize("host", ["gpt2", "llama"])
@torch.no_grad()
def test_cached_decoding(host):
    model = patched(
        host, {"type": "rope+alibi+shaw", "rope": {"layers": [0]}, "alibi": {"layers": [1]}, "shaw": {"layers": [2, 3]}},
        **SIZES[host],
    )  # fmt: skip
    start = model(tokens(2, 12)[:, :7], use_cache=True)
    rest = model(tokens(2, 12)[:, 7:], **{CACHE: start.past_key_values}, use_cache=True)
    assert_close(torch.cat([first(start), first(rest)], dim=1), first(model(tokens(2, 12))))


ALLOWED = "of 'alibi' isn't valid"


@pytest.mark.parametrize(
    ("encoding", "options", "words"),
    [
        ("alibi", {"layers": [4]}, r"layers=\[4\] of 'alibi' don't exist.* 4 layers, from 0 to 3"),
        ("alibi", {"layers": [-5, 0]}, r"layers=\[-5\] of 'alibi' don't exist"),
        ("alibi", {"layers": "4:"}, "layers='4:' of 'alibi' don't exist"),
        ("alibi", {"layers": []}, rf"layers=\[\] {ALLOWED}"),
        ("alibi", {"layers": [1, 1]}, r"layers=\[1, 1\] of 'alibi' include a layer twice"),
        ("alibi", {"layers": [3, -1]}, r"layers=\[3, -1\] of 'alibi' include a layer twice in a model of 4"),
        ("alibi", {"layers": "last"}, f"layers='last' {ALLOWED}"),
        ("alibi", {"layers": "3"}, f"layers='3' {ALLOWED}"),
        ("alibi", {"layers": 3}, f"layers=3 {ALLOWED}"),
        ("alibi", {"layers": "::0"}, f"layers='::0' {ALLOWED}"),
        ("alibi", {"layers": "1" * 30 + ":"}, ALLOWED),
        ("alibi", {"layers": [True]}, rf"layers=\[True\] {ALLOWED}"),
        ("alibi", {"layers": ["1"]}, rf"layers=\['1'\] {ALLOWED}"),
        ("alibi", {"layers": [1.0]}, rf"layers=\[1\.0\] {ALLOWED}"),
        ("alibi", {"layers": {}}, rf"layers=\{{\}} {ALLOWED}"),
        ("sinusoidal", {"layers": [1]}, "layers of 'sinusoidal' .* added to the input"),
        ("learned+alibi", {"learned__layers": [1]}, "layers of 'learned' .* added to the input"),
        ("none", {"layers": [1]}, "layers of 'none' .* no effect"),
        ("none+alibi", {"none__layers": [1]}, "layers of 'none' .* no effect"),
        ("rope+alibi", {"rope__layers": ":3", "alibi__layers": [2]}, "'rope' and 'alibi' both include layer 2"),
        ("rope+alibi", {"layers": [1]}, "name a part.* rope__layers=… or alibi__layers=…"),
        ("rope+alibi", {"shaw__layers": [1]}, "no part 'shaw'"),
        ("rope+rope", {}, "rope"),
        ("rope+rope", {"rope__layers": [1]}, "rope"),
    ],
)
def test_refused(encoding, options, words):
    model = stock("bert", **FOUR)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modules = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=words):
        hf_posenc.patch(model, encoding, **options)
    assert [type(module) for module in model.modules()] == modules and not hasattr(model.config, "position_encoding")
    assert_equal(dict(model.state_dict()), state)


def test_a_shared_layer():
    """ALBERT uses one layer several times."""
    model = stock("albert")
    with pytest.raises(hf_posenc.UnsupportedModelError, match=r"AlbertModel has 2 layers.*layers \[0\]") as error:
        hf_posenc.patch(model, "alibi", layers=[0])
    assert error.value.reason == "no attention for each layer" and "Omit layers." in str(error.value)
    first(hf_posenc.patch(model, "alibi")(tokens()))


def test_an_encoding_twice_with_layers_for_each():
    model = into("llama", "rope+rope", rope__layers=":2", rope_2__layers="2:", rope_2__theta=5.0)
    assert hf_posenc.inspect(model).layers == {"rope": (0, 1), "rope_2": (2, 3)}
    assert acting_in(model, "llama") == [0, 1, 2, 3]
    same = into("llama", "rope+rope", rope__layers=":2", rope_2__layers="2:")
    assert_equal(first(same(tokens())), first(into("llama", "rope")(tokens())))
    assert_apart(first(model(tokens())), first(same(tokens())))


def test_malformed_layers_in_a_config(tmp_path):
    into("bert", "alibi", layers=[0]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    for wrong, words in (([9], "don't exist"), ("x", "isn't valid"), ([0, 0], "twice"), ([10**9], "don't exist")):
        saved["position_encoding"]["layers"] = wrong
        path.write_text(json.dumps(saved))
        with pytest.raises(ValueError, match=words):
            AutoModel.from_pretrained(tmp_path)
