"""The plan that `patch` writes into a config, which building and loading use to install an encoding."""

import json

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, BertModel, T5EncoderModel

import hf_posenc
from closeness import assert_equal
from conftest import run_python
from hf_posenc.architectures import detection
from hf_posenc.architectures.structure import tokens_of
from hf_posenc.configuration import StackPlan
from models import HOSTS, by_structure, first, patched, stock, tiny, tokens


def plans(model):
    return model.config.position_plan


def edited(folder, change):
    """Replaces the plan in a saved config."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["position_plan"] = change(config["position_plan"])
    path.write_text(json.dumps(config))


def test_what_a_plan_says():
    (plan,) = plans(patched("bert", "alibi"))
    assert plan["stack"] == "BertModel" and plan["path"] == "" and plan["attentions"] == ["encoder.layer.*.attention.self"]
    assert plan["components"] == [["PositionTable", "embeddings.position_embeddings"]] and "is_decoder" in plan["masks"]
    decoder, encoder = sorted(plans(hf_posenc.patch(tiny("T5Model"), "alibi")), key=lambda plan: plan["path"])
    assert [(plan["path"], plan.get("role")) for plan in (encoder, decoder)] == [("encoder", None), ("decoder", "decoder")]
    assert decoder["cross_attentions"] == ["block.*.layer.*.EncDecAttention"] and "cross_attentions" not in encoder
    (plan,) = plans(hf_posenc.patch(tiny("RoFormerModel"), "alibi"))
    assert plan["components"] == [["SharedSinusoids", "encoder.embed_positions"]] and plan["custom_attentions"]


@pytest.mark.parametrize("host", by_structure(HOSTS))
def test_loading_finds_nothing(host, tmp_path, monkeypatch):
    model = patched(host, "shaw" if HOSTS[host].tables else "alibi", max_length=64)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(detection, "find_all", lambda *_: pytest.fail("detected"))
    again = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(first(again(tokens())), first(model(tokens())))
    assert plans(again) == plans(model)


def test_heads_share_a_plan(tmp_path, monkeypatch):
    model = patched("bert", "alibi", "ForMaskedLM")
    model.save_pretrained(tmp_path / "head")
    model.base_model.save_pretrained(tmp_path / "bare")
    monkeypatch.setattr(detection, "find_all", lambda *_: pytest.fail("detected"))
    for folder in ("head", "bare"):
        for auto in (AutoModel, AutoModelForMaskedLM):
            loaded = auto.from_pretrained(tmp_path / folder).base_model
            assert torch.equal(first(loaded(tokens())), first(model.base_model(tokens())))


def test_a_model_with_fewer_stacks(tmp_path):
    hf_posenc.patch(tiny("BartModel"), "alibi", keep_original=False).save_pretrained(tmp_path)
    decoder = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "posenc" in decoder.model.decoder._modules and type(decoder).__name__ == "PosEncBartForCausalLM"
    model = hf_posenc.patch(tiny("T5Model"), "alibi")
    model.save_pretrained(tmp_path)
    encoder = hf_posenc.PosEncT5EncoderModel.from_pretrained(tmp_path)
    assert torch.equal(encoder(tokens())[0], model.encoder(tokens())[0]) and isinstance(encoder, T5EncoderModel)


def test_a_model_with_more_stacks_is_an_error(tmp_path):
    hf_posenc.patch(tiny("BartForCausalLM"), "alibi").save_pretrained(tmp_path)
    words = r"omits 'encoder.layers.0.self_attn'. Restore the config .* position_plan to None"
    with pytest.raises(ValueError, match=words):
        hf_posenc.PosEncBartModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attentions": ["encoder.layers.*.attention"]}, r"names 'encoder.layers.\*.attention', but"),
        ({"components": [["PositionTable", "embeddings.places"]]}, "'embeddings.places', but .* no PositionTable"),
        ({"components": [["Tabel", "embeddings"]]}, r"names 'embeddings', but .* no Tabel"),
        ({"attentions": ["encoder.layer.0.attention.self"]}, "omits 'encoder.layer.1.attention.self'"),
        ({"components": [["PositionTable", "pooler"]]}, "names 'pooler', but .* no PositionTable"),
        ({"components": [["LinearBias", "pooler.x"]]}, "names 'pooler.x', but .* no LinearBias"),
        ({"attentions": ["pooler"]}, "names 'pooler', but .* no attention"),
        ({"windows": "yes"}, "position_plan.windows='yes' .*True or False"),
        (lambda plan: plan * 7_000, "more than 65536 values"),
        (lambda plan: [{"stack": "BertModel"}], "patch writes, must not be edited"),
        (lambda plan: "all", "position_plan='all' .*a list"),
    ],
)
def test_a_plan_that_does_not_fit_names_the_module(changes, words, tmp_path):
    patched("bert", "alibi").save_pretrained(tmp_path)
    edited(tmp_path, changes if callable(changes) else lambda plan: [{**plan[0], **changes}])
    with pytest.raises(ValueError, match=words):
        AutoModel.from_pretrained(tmp_path)


def test_without_a_plan_the_parts_are_found_and_saved(tmp_path):
    model = patched("bert", "alibi")
    model.save_pretrained(tmp_path)
    edited(tmp_path, lambda plan: None)
    again = AutoModel.from_pretrained(tmp_path)
    assert plans(again) is None and torch.equal(first(again(tokens())), first(model(tokens())))
    again.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["position_plan"] == plans(model)


def test_a_config_saved_alone_gets_a_plan(tmp_path):
    config = hf_posenc.PosEncBertConfig(position_encoding="alibi", num_hidden_layers=1)
    assert config.position_plan is None
    config.save_pretrained(tmp_path)
    (plan,) = json.loads((tmp_path / "config.json").read_text())["position_plan"]
    assert StackPlan.parse(plan).attentions == ("encoder.layer.*.attention.self",)


def test_stock_models_have_none(tmp_path):
    model = hf_posenc.unpatch(patched("bert", "alibi"))
    assert not hasattr(model.config, "position_plan")
    model.save_pretrained(tmp_path)
    assert "position_plan" not in json.loads((tmp_path / "config.json").read_text())


def test_tokens_of_a_model_that_asks_a_part_it_does_not_have():
    class Asking(BertModel):
        def get_input_embeddings(self):
            return self.missing.get_input_embeddings()

    assert tokens_of(Asking(stock("bert").config)) is not None


def test_where_names_more_than_the_plan_has(tmp_path):
    hf_posenc.patch(tiny("BartModel"), "alibi", where=["encoder"]).save_pretrained(tmp_path)
    wider = {"type": "alibi", "where": ["encoder", "decoder"]}
    with pytest.raises(ValueError, match="position_plan has no 'decoder', which position_encoding"):
        hf_posenc.PosEncBartModel.from_pretrained(tmp_path, position_encoding=wider)


@pytest.mark.parametrize("alibi", [False, True])
def test_settings_that_choose_other_positions(alibi, tmp_path):
    model = hf_posenc.patch(tiny("FalconModel", alibi=alibi), "alibi")
    assert ["alibi", alibi] in plans(model)[0]["settings"]
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="config.alibi has changed.*position_plan"):
        AutoModel.from_pretrained(tmp_path, alibi=not alibi)
    again = AutoModel.from_pretrained(tmp_path, alibi=alibi)
    assert torch.equal(first(again(tokens())), first(model(tokens())))


def test_a_plan_of_another_version(tmp_path):
    """Before Transformers 5.24, each attention of GPT-J had a table of angles. Since then, the layer stack has it."""
    model = hf_posenc.patch(tiny("GPTJModel", rotary_dim=4), "alibi")
    model.save_pretrained(tmp_path)
    edited(tmp_path, lambda plans: [{**plans[0], "components": [["RotaryEmbedding", "rotary"]]}])
    with pytest.raises(ValueError, match="'rotary'"):
        AutoModel.from_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "transformers_version": "5.1.0"}))
    again = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(first(again(tokens())), first(model(tokens())))
    again.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["position_plan"] == plans(model)
    code = "import sys, transformers; transformers.AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)"
    with pytest.raises(AssertionError, match="(?s)saved with Transformers 5.1.0.*Install hf_posenc"):
        run_python(code, tmp_path, HF_MODULES_CACHE=str(tmp_path / "modules"))


@pytest.mark.parametrize(("saved", "other"), [("Dinov2Model", "Dinov2Backbone"), ("Dinov2Backbone", "Dinov2Model")])
def test_another_class_of_the_same_config(tmp_path, saved, other):
    """A model's checkpoint also loads as a backbone, whose stack has another class than its plan describes, and reverse."""
    model = hf_posenc.patch(tiny(saved), "shaw")
    model.save_pretrained(tmp_path)
    loaded = getattr(hf_posenc, f"PosEnc{other}").from_pretrained(tmp_path)
    assert_equal(loaded.state_dict(), model.state_dict())
    size = model.config.image_size
    pixels = torch.randn(2, 3, size, size)
    last = [each(pixels, output_hidden_states=True).hidden_states[-1] for each in (model, loaded)]
    assert torch.equal(*last)
