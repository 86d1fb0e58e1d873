"""A patched model keeps the `rope_parameters` that its original model is built from."""

import torch
from transformers import AutoConfig

import hf_posenc
from closeness import assert_equal
from models import first, patched, stock, tiny, tokens
from test_composites import PARENTS, parent

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 6.0, "original_max_position_embeddings": 4}
SETS = {"full_attention": {**YARN, "rope_theta": 700.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 90.0}}
SECTIONS = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 300.0}


def cases():
    """Name, original model, encoding, submodel, and inputs."""
    ids = {"input_ids": tokens()}
    yield "llama", stock("llama", rope_parameters=YARN), "alibi", None, ids
    yield "rope", stock("llama", rope_parameters=YARN), "rope", None, ids
    yield "gemma3", stock("gemma3", rope_parameters=SETS), "none", None, ids
    yield "modernbert", stock("modernbert", rope_parameters=SETS), "sinusoidal", None, ids
    yield "part", stock("phi", rope_parameters={**YARN, "partial_rotary_factor": 0.25}), "t5", None, ids
    model = parent("qwen2_vl")
    model.config.text_config.rope_parameters.update(SECTIONS)
    model = type(model)(model.config).eval()
    yield "composite", model, "alibi", "language_model", PARENTS["qwen2_vl"].inputs()
    two = {name: ids["input_ids"] for name in ("input_ids", "decoder_input_ids")}
    model = tiny("T5GemmaModel")
    model.config.encoder.rope_parameters["rope_theta"] = 300.0
    yield "half", type(model)(model.config).eval(), "alibi", "encoder", two


@torch.no_grad()
def test_a_reloaded_model_and_its_original_have_them(tmp_path):
    for name, model, encoding, submodel, inputs in cases():
        new, folder = hf_posenc.patch(model, encoding, submodel=submodel), tmp_path / name
        new.save_pretrained(folder)
        assert hf_posenc.inspect(folder).encoding == new.config.position_encoding["type"]
        loaded = type(new).from_pretrained(folder)
        assert_equal(first(loaded(**inputs)), first(new(**inputs)))
        back = hf_posenc.unpatch(loaded)
        assert_equal(first(back(**inputs)), first(model(**inputs)))
        back.save_pretrained(folder / "back")
        assert_equal(first(type(model).from_pretrained(folder / "back")(**inputs)), first(model(**inputs)))


def test_other_values_on_loading(tmp_path):
    """An option of the encoding, another length, and a config object don't lose them."""
    patched("llama", "rope", rope_parameters=YARN).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    for more in ({"position_encoding": {"type": "rope", "theta": 7.0}}, {"config": config}, {"config": tmp_path}):
        model = hf_posenc.PosEncLlamaModel.from_pretrained(tmp_path, **more)
        assert hf_posenc.unpatch(model).config.rope_parameters == config.rope_parameters
    assert config.rope_parameters["factor"] == 6.0
