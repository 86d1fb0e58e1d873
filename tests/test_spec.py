"""`position_encoding` of a config has one form, is parsed once, and is written as it was read."""

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModel, BertConfig

import hf_posenc
from hf_posenc.configuration import PARSED, OriginalSpec, PositionSpec, make_stock, merged, read, write
from hf_posenc.encodings import encoding_class
from models import HOSTS, LENGTH, TABLED, VOCABULARY, first, patched, stock, tokens

HOST = {"name_or_path": "somebody/base", "rows": 512, "kept": True}


GIVEN = {
    "name": "alibi",
    "alias": "relative_key_query",
    "composition": "learned+rotary",
    "a part's options": {"type": "sinusoidal+rope", "rope__theta": 50, "sinusoidal": {"base": 7}},
    "slice": {"type": "rope", "theta": 50, "layers": " 3::4 "},
    "indices": {"type": "alibi", "layers": [0, -1]},
    "parts with layers": {"type": "rope+alibi", "rope__layers": "::2", "alibi": {"layers": (1, 3)}},
    "an encoding twice": {"type": "rope+rope", "rope__layers": "::2", "rope_2__layers": "1::2", "rope_2__theta": 50},
    "vectors in layers": {"type": "sinusoidal", "inject": "every_layer", "layers": [2]},
    "promise": {"type": "learned", "max_length": 99},
    "original": {"type": "none", "original": HOST},
    "layers of None": {"type": "alibi", "layers": None},
}


@pytest.mark.parametrize("case", GIVEN)
def test_round_trips(case):
    """Parsing a written spec gives an equal spec, which is written equally, also through JSON."""
    given = copy.deepcopy(GIVEN[case])
    spec = PositionSpec.parse(given)
    assert given == GIVEN[case]
    written = spec.to_dict()
    assert PositionSpec.parse(written) == spec and PositionSpec.parse(json.loads(json.dumps(written))) == spec
    assert PositionSpec.parse(written).to_dict() == written == json.loads(json.dumps(written))
    assert pickle.loads(pickle.dumps(spec)) == spec == copy.deepcopy(spec)


def test_canonical_form():
    options = {"type": "rope", "theta": 10000.0, "layout": "half"}
    assert PositionSpec.parse("rotary").to_dict() == {**options, "inject": "input", "max_length": None, "original": None}
    spec = PositionSpec.parse(
        {"type": "rotary+relative_key", "rotary__layers": [1, 0], "shaw__max_distance": 3, "original": HOST}
    )
    assert spec == PositionSpec(
        type="rope+shaw",
        options={"rope": {"theta": 10000.0, "layout": "half"}, "shaw": {"max_distance": 3, "terms": "keys", "per_layer": True}},
        layers={"rope": (1, 0)},
        original=OriginalSpec("somebody/base", 512, True),
    )
    assert spec.to_dict()["rope"] == {"theta": 10000.0, "layout": "half", "layers": [1, 0]} and "layers" not in spec.to_dict()
    assert spec.encoding is encoding_class("rope+shaw") and list(spec.parts) == ["rope", "shaw"]
    assert PositionSpec.parse({"type": "relative_key_query"}).options["terms"] == "keys+queries"


def test_frozen():
    """The written dict is a copy."""
    spec = PositionSpec.parse({**GIVEN["parts with layers"], "original": HOST})
    written = spec.to_dict()
    written["rope"]["theta"], written["alibi"]["layers"] = 3.0, []
    assert spec.options["rope"]["theta"] == 10000.0 and spec.layers["alibi"] == (1, 3)
    for each, name in ((spec, "type"), (spec.original, "rows")):
        with pytest.raises(FrozenInstanceError):
            setattr(each, name, 3)
    assert replace(spec, max_length=3).max_length == 3 and spec.max_length is None


def test_parts_by_layer():
    for given, layers, expected in (
        (GIVEN["parts with layers"], 4, [("rope",), ("alibi",), ("rope",), ("alibi",)]),
        ({"type": "rope+alibi+none", "alibi__layers": "-1:"}, 2, [("rope", "none"), ("rope", "alibi", "none")]),
        ({"type": "rope+alibi", "rope__layers": [0]}, 2, [("rope", "alibi"), ("alibi",)]),
        ({"type": "rope+alibi", "rope__layers": [0], "alibi__layers": [2]}, 3, [("rope",), (), ("alibi",)]),
    ):
        assert PositionSpec.parse(given).parts_by_layer(layers, range(layers)) == expected


MALFORMED = {
    "no type": ({"theta": 3.0}, "theta"),
    "a number": (7, "7"),
    "None": (None, "None"),
    "a list": (["alibi"], "alibi"),
    "type of another kind": ({"type": 5}, "5"),
    "unknown": ({"type": "alibbi"}, "'alibbi'"),
    "unknown option": ({"type": "alibi", "slope": 3}, "'slope'"),
    "unknown key": ({"type": "alibi", "place": ["decoder"]}, "place"),
    "option of another kind": ({"type": "rope", "theta": "big"}, "'big'"),
    "inject": ({"type": "sinusoidal", "inject": "output"}, "inject='output'"),
    "inject of a list": ({"type": "sinusoidal", "inject": ["input"]}, r"inject=\['input'\]"),
    "inject of what makes no vectors": ({"type": "alibi", "inject": "every_layer"}, "inject='every_layer'"),
    "max_length": ({"type": "alibi", "max_length": 0}, "max_length=0"),
    "max_length of text": ({"type": "alibi", "max_length": "many"}, "max_length='many'"),
    "max_length of True": ({"type": "alibi", "max_length": True}, "max_length=True"),
    "layers": ({"type": "alibi", "layers": "some"}, "layers='some'"),
    "part of text": ({"type": "rope+alibi", "rope": "fast"}, "'fast'"),
    "original of text": ({"type": "alibi", "original": "bert"}, "original.*'bert'"),
    "original without a key": ({"type": "alibi", "original": {k: v for k, v in HOST.items() if k != "kept"}}, "original.*base"),
    "original with another key": ({"type": "alibi", "original": {**HOST, "more": 1}}, "more"),
    "rows of text": ({"type": "alibi", "original": {**HOST, "rows": "512"}}, "original.*'512'"),
    "rows of True": ({"type": "alibi", "original": {**HOST, "rows": True}}, "original.*True"),
    "no rows": ({"type": "alibi", "original": {**HOST, "rows": 0}}, "0"),
    "kept of a number": ({"type": "alibi", "original": {**HOST, "kept": 1}}, "'kept': 1"),
}


def test_malformed():
    for given, words in MALFORMED.values():
        with pytest.raises(ValueError, match=words):
            PositionSpec.parse(given)
        if given is not None:  # a config without an encoding is valid, and only building the model needs one
            with pytest.raises(ValueError, match=words):
                hf_posenc.PosEncBertConfig(position_encoding=given)


def test_only_what_came_from_the_hub_names_a_host(tmp_path, monkeypatch, in_the_hubs_cache):
    """A directory can have a name like a repo id, and may be missing when the model is patched."""
    monkeypatch.chdir(tmp_path)
    stock("bert").save_pretrained("team/secret")
    model = AutoModel.from_pretrained("team/secret")
    there = hf_posenc.patch(model, "alibi")
    stock("bert").save_pretrained(in_the_hubs_cache)
    hidden = hf_posenc.patch(AutoModel.from_pretrained(in_the_hubs_cache), "alibi")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for new in (there, hidden, hf_posenc.patch(model, "alibi")):
        assert new.config.position_spec.original.name_or_path == ""
        new.save_pretrained("saved")
        assert b"team/secret" not in b"".join(path.read_bytes() for path in Path("saved").iterdir())


def test_host_spec(in_the_hubs_cache):
    """A directory isn't a base model. Neither is its name."""
    for name in ("bert", "../me/base", "./base", "/me/base", "~/base", "C:/base", "me/base/", "checkpoint 7"):
        assert OriginalSpec.parse({**HOST, "name_or_path": name}).name_or_path == ""
    assert OriginalSpec.parse(None) is None and OriginalSpec.parse({**HOST, "rows": None}).rows is None
    model = stock("bert")
    model.name_or_path = model.config.name_or_path = in_the_hubs_cache
    host = hf_posenc.patch(model, "alibi").config.position_spec.original
    assert host == OriginalSpec("somebody/base", LENGTH, True)
    assert not hf_posenc.patch(model, "alibi", keep_original=False).config.position_spec.original.kept


@pytest.fixture
def parsed(monkeypatch):
    """The arguments of PositionSpec.parse."""
    calls, parse = [], PositionSpec.parse.__func__

    def counting(cls, given, in_code=False):
        calls.append(given)
        return parse(cls, given, in_code)

    monkeypatch.setattr(PositionSpec, "parse", classmethod(counting))
    return calls


@pytest.mark.parametrize("host", ["bert", "llama"])
def test_parsed_once(host, parsed, tmp_path):
    """The spec is parsed once for patching, for reading a config, and for loading a model."""
    new = hf_posenc.patch(stock(host, HOSTS[host].head), "sinusoidal+shaw")
    assert len(parsed) == 1
    new(tokens())
    new.config.to_dict(), hf_posenc.inspect(new), hf_posenc.unpatch(new)
    assert len(parsed) == 1
    new.save_pretrained(tmp_path)
    for load in (AutoConfig.from_pretrained, AutoModel.from_pretrained):
        parsed.clear()
        loaded = load(tmp_path)
        assert len(parsed) == 1
    loaded(tokens())
    assert len(parsed) == 1


def test_reading_a_config_serializes_nothing(monkeypatch):
    config = hf_posenc.PosEncBertConfig(position_encoding="alibi")
    monkeypatch.setattr(PositionSpec, "to_dict", None)
    assert config.position_spec.type == "alibi"


def test_a_changed_config_is_read_anew(parsed):
    config = hf_posenc.PosEncBertConfig(position_encoding="alibi")
    assert read(config) is read(config) is config.position_spec and len(parsed) == 1
    config.position_encoding = "rotary"
    assert read(config).type == "rope" and config.position_spec.type == "rope"
    config.position_encoding = {"type": "rope", "theta": 50.0}
    assert read(config).options["theta"] == 50.0
    write(config, replace(read(config), max_length=9))
    before = len(parsed)
    assert read(config).max_length == 9 and config.position_encoding["max_length"] == 9
    config.position_encoding["max_length"] = 5
    assert read(config).max_length == 5 and len(parsed) == before + 1
    make_stock(config)
    assert type(config) is BertConfig and "position_encoding" not in vars(config) and PARSED not in vars(config)


@pytest.mark.parametrize("encoding", ["learned", {"type": "rope+shaw", "shaw__layers": [0]}])
@pytest.mark.parametrize("host", ["bert", "roberta", "llama"])
def test_building_a_model_leaves_its_config(host, encoding):
    facts = HOSTS[host]
    config = getattr(hf_posenc, f"PosEnc{facts.prefix}Config")(vocab_size=VOCABULARY, **facts.sizes, position_encoding=encoding)
    before = copy.deepcopy(config.to_dict())
    model = AutoModel.from_config(config)
    first(model(tokens()))
    assert config.to_dict() == before == model.config.to_dict()
    if host in TABLED and encoding == "learned":
        assert model.posenc.weight.shape[0] == LENGTH and config.position_encoding["max_length"] is None


def test_configs_are_compared_copied_and_pickled(tmp_path):
    """They are saved also, without the parsed spec."""
    model = patched("llama", {"type": "rope+shaw", "rope__layers": [0], "shaw__layers": [1]})
    config = model.config
    assert PARSED in vars(config)
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), copy.copy(config)):
        assert twin == config and twin.position_spec == config.position_spec
    model.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.position_encoding == config.position_encoding and loaded.position_spec == config.position_spec
    for written in (config.to_dict(), config.to_diff_dict(), json.loads(config.to_json_string())):
        assert PARSED not in written and written["position_encoding"] == config.position_encoding
    for text in ((tmp_path / "config.json").read_text(), repr(config), config.to_json_string(use_diff=False)):
        assert PARSED not in text and "PositionSpec" not in text
    assert PARSED not in vars(hf_posenc.unpatch(model).config)
    twin = copy.deepcopy(config)
    twin.position_encoding["rope"]["theta"] = 3.0
    assert twin != config and twin.position_spec.options["rope"]["theta"] == 3.0
    assert config.position_spec.options["rope"]["theta"] == 10000.0
    fresh = hf_posenc.PosEncBertConfig(position_encoding="alibi")
    other = hf_posenc.PosEncBertConfig(position_encoding={"type": "alibi"})
    fresh.position_spec  # noqa: B018  # reading must not make them unequal
    assert fresh == other


def test_merged():
    saved = PositionSpec.parse({"type": "rope+alibi", "rope__layers": [0], "original": HOST}).to_dict()
    assert merged(saved, None) == saved and merged(saved, "rotary+alibi")["original"] == HOST
    changed = merged(saved, {"type": "rope+alibi", "rope": {"layers": [1]}, "max_length": 7})
    assert PositionSpec.parse(changed) == replace(PositionSpec.parse(saved), layers={"rope": (1,)}, max_length=7)
    with pytest.raises(ValueError, match="saved with the 'rope\\+alibi' encoding, not 'rope'"):
        merged(saved, "rope")


def test_merged_with_an_alias():
    """An alias sets its own options."""
    saved = PositionSpec.parse("shaw").to_dict()
    assert saved["terms"] == "keys"
    assert PositionSpec.parse(merged(saved, "relative_key_query")).options["terms"] == "keys+queries"
    assert PositionSpec.parse(merged(saved, {"type": "relative_key_query", "terms": "keys"})).options["terms"] == "keys"
    both = PositionSpec.parse("shaw+alibi").to_dict()
    assert PositionSpec.parse(merged(both, "relative_key_query+alibi")).options["shaw"]["terms"] == "keys+queries"


@pytest.mark.parametrize("spelling", [{"absolute": {"std": 3.0}}, {"absolute__std": 3.0}, {"learned": {"std": 3.0}}])
def test_options_are_overridden_in_any_spelling(spelling, tmp_path):
    """Aliases and flat keys override options of a layer stack and on loading. Other options are unchanged."""
    outer = {"type": "learned+alibi", "learned": {"init": "sinusoidal"}, "max_length": 9}
    spec = PositionSpec.parse({**outer, "where": {"encoder": {}, "decoder": spelling}})
    expected = {"init": "sinusoidal", "std": 3.0}
    assert spec.encoding_for("decoder").options["learned"].items() >= expected.items()
    assert spec.encoding_for("encoder").options["learned"].items() >= {**expected, "std": 0.02}.items()
    hf_posenc.PosEncBertConfig(position_encoding=outer).save_pretrained(tmp_path)
    given = {"type": "learnable+alibi", **spelling}
    loaded = AutoConfig.from_pretrained(tmp_path, position_encoding=given).position_encoding
    assert loaded["learned"].items() >= expected.items() and loaded["max_length"] == 9
