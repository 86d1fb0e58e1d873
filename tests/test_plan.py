"""The plan that `patch` writes into a config, which building and loading use to install an encoding."""

import json

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, T5EncoderModel

import hf_posenc
from closeness import assert_equal
from models import first, patched, tiny, tokens


def plans(model):
    return model.config.position_plan


def edited(folder, change):
    """Replaces the plan in a saved config."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["position_plan"] = change(config["position_plan"])
    path.write_text(json.dumps(config))


def test_a_model_with_fewer_stacks(tmp_path):
    hf_posenc.patch(tiny("BartModel"), "alibi", keep_original=False).save_pretrained(tmp_path)
    decoder = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert hasattr(decoder.model.decoder, "posenc") and type(decoder).__name__ == "PosEncBartForCausalLM"
    model = hf_posenc.patch(tiny("T5Model"), "alibi")
    model.save_pretrained(tmp_path)
    encoder = hf_posenc.PosEncT5EncoderModel.from_pretrained(tmp_path)
    assert torch.equal(encoder(tokens())[0], model.encoder(tokens())[0]) and isinstance(encoder, T5EncoderModel)


def test_a_model_with_more_stacks_is_an_error(tmp_path):
    hf_posenc.patch(tiny("BartForCausalLM"), "alibi").save_pretrained(tmp_path)
    words = r"omits 'encoder.layers.0.self_attn'. Restore the config .* position_plan to None"
    with pytest.raises(ValueError, match=words):
        hf_posenc.PosEncBartModel.from_pretrained(tmp_path)


def test_without_a_plan_the_parts_are_found_and_saved(tmp_path):
    model = patched("bert", "alibi")
    model.save_pretrained(tmp_path)
    edited(tmp_path, lambda plan: None)
    again = AutoModel.from_pretrained(tmp_path)
    assert plans(again) is None and torch.equal(first(again(tokens())), first(model(tokens())))
    again.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["position_plan"] == plans(model)


def test_stock_models_have_none(tmp_path):
    model = hf_posenc.unpatch(patched("bert", "alibi"))
    assert not hasattr(model.config, "position_plan")
    model.save_pretrained(tmp_path)
    assert "position_plan" not in json.loads((tmp_path / "config.json").read_text())


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
