"""`from_pretrained` of a derived class: original and patched checkpoints, with a config, an encoding, or both."""

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, BertConfig, CLIPTextModel, PreTrainedModel, RobertaConfig

import hf_posenc
from closeness import assert_equal
from hf_posenc.architectures import structure
from hf_posenc.modeling import parameter_sharing
from hf_posenc.serialization import tokenizer_files
from models import BERT, LENGTH, VOCABULARY, first, stock, tiny, tokens

SIZES = {**BERT, "vocab_size": VOCABULARY}


Model, Config = hf_posenc.PosEncBertForMaskedLM, hf_posenc.PosEncBertConfig


ROPE = {"type": "rope", "theta": 500.0}


def bert_config(**changes):
    return BertConfig(**{**SIZES, **changes})


def config(encoding=None, **changes):
    return Config(**{**SIZES, "position_encoding": encoding, **changes})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An original model, a patched one, and a longer patched one without its original positions."""
    path = tmp_path_factory.mktemp("models")
    model = stock("bert", "ForMaskedLM")
    model.save_pretrained(path / "stock")
    hf_posenc.patch(model, ROPE).save_pretrained(path / "patched")
    hf_posenc.patch(model, ROPE, max_length=99, keep_original=False).save_pretrained(path / "longer")
    stock("bert", "ForMaskedLM").save_pretrained(path / "in" / "stock")
    return path


@pytest.fixture
def expected(folders):
    """The logits of the patched model."""
    return first(hf_posenc.patch(AutoModelForMaskedLM.from_pretrained(folders / "stock"), ROPE)(tokens()))


@pytest.mark.parametrize(
    "given",
    [
        lambda path: {"position_encoding": ROPE},
        lambda path: {"position_encoding": ROPE, "config": bert_config()},
        lambda path: {"position_encoding": ROPE, "config": config()},
        lambda path: {"position_encoding": ROPE, "config": config(ROPE)},
        lambda path: {"config": config(ROPE)},
        lambda path: {"position_encoding": ROPE, "config": path / "stock"},
        lambda path: {"position_encoding": ROPE, "config": str(path / "stock" / "config.json")},
        lambda path: {"config": path / "patched"},
        lambda path: {"config": Config.from_pretrained(path / "stock", position_encoding=ROPE)},
        lambda path: {"config": Config.from_pretrained(path / "longer")},
        lambda path: {"position_encoding": ROPE, "config": bert_config(), "output_loading_info": True},
        lambda path: {"position_encoding": ROPE, "device_map": "cpu"},
        lambda path: {"position_encoding": ROPE, "revision": "main", "torch_dtype": "auto"},
        lambda path: {"position_encoding": ROPE, "hidden_dropout_prob": 0.7},
    ],
)
def test_a_stock_checkpoint_is_patched(folders, expected, given):
    """Loading with an encoding gives the same model as `patch` after loading, in all spellings. `unpatch` restores the original
    model.
    """
    keywords = given(folders)
    before = [keywords["config"].to_dict()] if hasattr(keywords.get("config"), "to_dict") else []
    loaded = Model.from_pretrained(folders / "stock", **keywords)
    model, *info = loaded if isinstance(loaded, tuple) else (loaded,)
    assert type(model) is Model and model.config.position_encoding["original"]["kept"]
    assert_equal(first(model(tokens())), expected)
    again = hf_posenc.unpatch(model)
    assert_equal(first(again(tokens())), first(stock("bert", "ForMaskedLM")(tokens())))
    assert again.config.max_position_embeddings == LENGTH
    assert again.config.hidden_dropout_prob == keywords.get("hidden_dropout_prob", 0.1)
    assert not info or not info[0]["missing_keys"]
    assert before == ([keywords["config"].to_dict()] if before else [])


@pytest.mark.parametrize("given", [bert_config, lambda: config(ROPE)], ids=["stock", "derived"])
def test_arguments_for_weights(folders, expected, given):
    """These arguments work together with a config: subfolders, dtypes, attention, and the weights themselves."""
    keywords = {"config": given(), "position_encoding": ROPE}
    model = Model.from_pretrained(folders / "in", subfolder="stock", **keywords)
    assert_equal(first(model(tokens())), expected)
    model = Model.from_pretrained(folders / "stock", dtype=torch.bfloat16, attn_implementation="eager", **keywords)
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16} and model.config._attn_implementation == "eager"
    weights = stock("bert", "ForMaskedLM").state_dict()
    assert_equal(first(Model.from_pretrained(None, state_dict=weights, **keywords)(tokens())), expected)


def test_through_the_auto_classes(folders, expected):
    model = AutoModelForMaskedLM.from_pretrained(folders / "stock", config=config(ROPE))
    assert type(model) is Model and model.config.position_encoding["original"]["kept"]
    assert_equal(first(model(tokens())), expected)
    # New parameters are initialized. They don't count as missing, as they would in a patched checkpoint.
    model = Model.from_pretrained(folders / "stock", config=config("relative"))
    assert model.bert.posenc.weight.std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("name", ["patched", "longer"])
@pytest.mark.parametrize(
    "given",
    [
        lambda path: {},
        lambda path: {"position_encoding": "rope"},
        lambda path: {"config": path},
        lambda path: {"config": path, "position_encoding": "rotary"},
        lambda path: {"config": Config.from_pretrained(path)},
        lambda path: {"config": config(ROPE)},
        lambda path: {"config": config(), "position_encoding": "rope"},
        lambda path: {"config": config()},
        lambda path: {"config": config(ROPE), "dtype": "float32", "attn_implementation": "sdpa", "output_loading_info": True},
    ],
)
def test_a_patched_checkpoint_stays_what_it_is(folders, expected, name, given):
    keywords = given(folders / name)
    before = copy.deepcopy(keywords)
    loaded = Model.from_pretrained(folders / name, **keywords)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    assert keywords == before
    assert_equal(first(model(tokens())), expected)
    assert model.config.position_encoding["original"] == Config.from_pretrained(folders / name).position_encoding["original"]


def test_weights_and_a_config_alone(folders, expected):
    model = Model.from_pretrained(folders / "patched")
    again = Model.from_pretrained(None, config=model.config, state_dict=model.state_dict())
    assert_equal(first(again(tokens())), expected)


RIVAL = "'rope' encoding, not 'alibi'"


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("stock", lambda path: {}, "unpatched model, and PosEncBertForMaskedLM .*position_encoding="),
        ("stock", lambda path: {"position_encoding": None}, "needs an encoding for it"),
        ("stock", lambda path: {"config": bert_config()}, "needs an encoding for it"),
        ("stock", lambda path: {"config": config()}, "needs an encoding for it"),
        (
            "stock",
            lambda path: {"config": config("alibi"), "position_encoding": "rope"},
            "='rope'.* config.*'alibi'.*only one",
        ),
        (
            "stock",
            lambda path: {"config": SIZES, "position_encoding": "rope"},
            "keyword arguments of from_pretrained",
        ),
        (
            "stock",
            lambda path: {"config": RobertaConfig(), "position_encoding": "rope"},
            "config=RobertaConfig .* PosEncB",
        ),
        ("patched", lambda path: {"config": bert_config()}, "was saved with an encoding.*PosEncBertConfig.from_pretrained"),
        ("patched", lambda path: {"config": bert_config(), "position_encoding": "rope"}, "was saved with an encoding"),
        ("patched", lambda path: {"config": path / "stock"}, "was saved with an encoding"),
        ("patched", lambda path: {"config": RobertaConfig()}, "config=RobertaConfig .* PosEncBertForMaskedLM"),
        ("patched", lambda path: {"config": config("alibi")}, f"the {RIVAL}"),
        ("longer", lambda path: {"config": config("alibi")}, f"the {RIVAL}"),
        ("longer", lambda path: {"config": config(ROPE), "position_encoding": "alibi"}, RIVAL),
        ("longer", lambda path: {"config": config(), "position_encoding": "alibi"}, RIVAL),
    ],
)
def test_what_does_not_go_together(folders, name, given, words):
    with pytest.raises(ValueError, match=words):
        Model.from_pretrained(folders / name, **given(folders))


@pytest.mark.parametrize("name", ["stock", "longer"])
def test_a_checkpoint_of_another_host(folders, name):
    """All weights would be missing, which Transformers only logs."""
    with pytest.raises(ValueError, match=r"bert' model, but PosEncRobertaModel loads 'roberta'"):
        hf_posenc.PosEncRobertaModel.from_pretrained(folders / name, position_encoding="rope")


@pytest.mark.parametrize("typed", [True, False])
def test_a_part_of_a_larger_checkpoint(tmp_path, typed):
    """CLIP's text model loads from a whole CLIP checkpoint, as its original class does."""
    tiny("CLIPModel").save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["text_config"].pop("model_type") == "clip_text_model"
    if not typed:
        (tmp_path / "config.json").write_text(json.dumps(saved))
    model = hf_posenc.PosEncCLIPTextModel.from_pretrained(tmp_path, position_encoding="alibi")
    expected = hf_posenc.patch(CLIPTextModel.from_pretrained(tmp_path), "alibi")
    assert_equal(first(model(tokens())), first(expected(tokens())))


def test_a_missing_checkpoint(tmp_path):
    """Transformers raises its own error, whatever the other arguments are."""
    for keywords in {}, {"position_encoding": "rope"}, {"position_encoding": "rope", "config": bert_config()}:
        with pytest.raises(OSError):
            Model.from_pretrained(tmp_path / "nowhere", **keywords)


def test_a_folder_without_a_config_or_with_an_older_one(folders, expected, tmp_path):
    """Older configs have no model type."""
    (tmp_path / "model.safetensors").write_bytes((folders / "stock" / "model.safetensors").read_bytes())
    model = Model.from_pretrained(tmp_path, config=bert_config(), position_encoding=ROPE)
    assert_equal(first(model(tokens())), expected)
    saved = json.loads((folders / "stock" / "config.json").read_text())
    del saved["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert_equal(first(Model.from_pretrained(tmp_path, position_encoding=ROPE)(tokens())), expected)


def test_an_encoding_saved_by_its_name(folders, tmp_path):
    """A user may have written this config."""
    Model.from_pretrained(folders / "longer").save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**saved, "position_encoding": "rope"}))
    for keywords in {"position_encoding": "alibi"}, {"config": config("alibi")}:
        with pytest.raises(ValueError, match="'rope' encoding, not 'alibi'"):
            Model.from_pretrained(tmp_path, **keywords)
    assert Model.from_pretrained(tmp_path, config=config("rope")).config.position_spec.type == "rope"


def test_spread_over_devices(folders, tmp_path):
    """Weights on several devices can't be shared. The error recommends a way that works."""
    places = {"embeddings": "cpu", "encoder": "disk", "pooler": "cpu"}
    with pytest.raises(ValueError, match="Accelerate's hooks.*one device.*patch first"):
        hf_posenc.PosEncBertModel.from_pretrained(
            folders / "stock", position_encoding="rope", device_map=places, offload_folder=str(tmp_path)
        )
    assert isinstance(Model.from_pretrained(folders / "patched", device_map="auto"), PreTrainedModel)


# Loading time.


@pytest.mark.parametrize("encoding", ["rope", "shaw"])
@pytest.mark.parametrize("host", ["bert", "gpt2", "bart", "llama", "vit"])
def test_a_loaded_model_is_changed_instead_of_rebuilt(host, encoding, tmp_path, monkeypatch):
    """The result is the same as that of `patch`, which builds a second model."""

    def described(module):
        settings = {name: value for name, value in vars(module).items() if type(value) in (bool, int, float, str)}
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        return type(module), settings, hooks, type(vars(module).get("config")), {*module._buffers}

    stock(host).save_pretrained(tmp_path)
    torch.manual_seed(0)
    original = AutoModel.from_pretrained(tmp_path)
    expected = hf_posenc.patch(original, encoding)
    monkeypatch.delattr(parameter_sharing, "build_on_meta")
    torch.manual_seed(0)
    model = type(expected).from_pretrained(tmp_path, position_encoding=encoding)
    vars(model).pop("_use_kernels", None)  # set by from_pretrained
    modules = dict(model.named_modules())
    assert {path: described(each) for path, each in modules.items()} == {
        path: described(each) for path, each in expected.named_modules()
    }
    assert model.config.to_dict() == expected.config.to_dict()
    state = model.state_dict()
    for name, tensor in expected.state_dict().items():
        assert_equal(state.pop(name), tensor)
    assert not state
    model.save_pretrained(tmp_path / "patched")
    again = AutoModel.from_pretrained(tmp_path / "patched")
    assert_equal(again.state_dict()[name], tensor)


def test_a_loaded_model_with_another_length_is_rebuilt(folders):
    """Buffers have the new length."""
    model = hf_posenc.PosEncBertModel.from_pretrained(folders / "stock", position_encoding={**ROPE, "max_length": 99})
    assert model.embeddings.position_ids.shape == (1, 99)


@pytest.mark.parametrize("host", ["bert", "llama"])
def test_walks_through_the_modules_do_not_grow_with_layers(host, monkeypatch):
    """Iterating over all modules once per layer would make loading quadratic in the number of layers. 200 layers took 2.4 times
    as long as the original.
    """
    walks = []
    named_modules, modules_by_path = torch.nn.Module.named_modules, structure.modules_by_path

    def counted(self, memo=None, prefix="", *args, **kwargs):
        if isinstance(self, PreTrainedModel) and not prefix:
            walks.append(type(self).__name__)
        return named_modules(self, memo, prefix, *args, **kwargs)

    def counted_too(model, **kwargs):
        walks.append(type(model).__name__)
        return modules_by_path(model, **kwargs)

    def walks_of(layers):
        model = hf_posenc.patch(stock(host, num_hidden_layers=layers), "alibi")
        walks.clear()
        type(model)(model.config)
        return len(walks)

    monkeypatch.setattr(torch.nn.Module, "named_modules", counted)
    monkeypatch.setattr(structure, "modules_by_path", counted_too)
    assert walks_of(2) == walks_of(7) > 0


LOADS = {
    "patched": hf_posenc.PosEncBertModel.from_pretrained,
    "inspect": hf_posenc.inspect,
    "from_v4": lambda name: hf_posenc.from_v4(name, AutoModel),
    "card": lambda name: hf_posenc.model_card(name, "me/x"),
    "stock": lambda name: hf_posenc.PosEncBertModel.from_pretrained(name, position_encoding="alibi"),
    "tokenizer": tokenizer_files.load_tokenizer,
}


@pytest.mark.parametrize("way", LOADS)
def test_a_directory_that_does_not_exist(way, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = r"directory '.*' doesn't exist. Pass the directory"
    for name in ("nothing/of/this/name", Path("nothing"), "./nothing", ""):
        with pytest.raises(FileNotFoundError, match=words):
            LOADS[way](name)


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", '{"architectures": [1]}', '{"a": ' * 80 + "0" + "}" * 80])
def test_a_config_that_is_none(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    words = r"The config.json of .* (nested|isn't the config of a model: (it holds a list|arch)|can't be loaded: TypeError)"
    for way in ("patched", "inspect", "from_v4", "card"):
        with pytest.raises(ValueError, match=words):
            LOADS[way](tmp_path)


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "{}", '{"base_model_name_or_path": "FILE"}', '{"a": 1, "a": 2}'])
def test_an_adapter_without_a_base(content, tmp_path):
    """The file that such an adapter names isn't opened."""
    (tmp_path / "secret").write_text("{")
    (tmp_path / "adapter_config.json").write_text(content.replace("FILE", str(tmp_path / "secret")))
    with pytest.raises(
        ValueError, match=r"adapter_config.json (can't be read as JSON|holds a list|has base_model_name_or_path=)"
    ):
        hf_posenc.inspect(tmp_path)
