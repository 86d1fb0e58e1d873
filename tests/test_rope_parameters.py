"""The `rope_parameters` of a patched model: other tools would rotate by them, so config.json has them elsewhere."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, LlamaConfig

import hf_posenc
from closeness import assert_equal
from conftest import run_python
from models import first, patched, stock, tiny, tokens
from test_composites import PARENTS, parent

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 6.0, "original_max_position_embeddings": 4}
SETS = {"full_attention": {**YARN, "rope_theta": 700.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 90.0}}
SECTIONS = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 300.0}
TEXT = "text_config.rope_parameters"


def cases():
    """Name -> original model, encoding, submodel, inputs, and the paths that are moved."""
    ids, own = {"input_ids": tokens()}, ("rope_parameters",)
    yield "llama", stock("llama", rope_parameters=YARN), "alibi", None, ids, own
    yield "rope", stock("llama", rope_parameters=YARN), "rope", None, ids, own
    yield "gemma3", stock("gemma3", rope_parameters=SETS), "none", None, ids, own
    yield "modernbert", stock("modernbert", rope_parameters=SETS), "sinusoidal", None, ids, own
    yield "part", stock("phi", rope_parameters={**YARN, "partial_rotary_factor": 0.25}), "t5", None, ids, own
    model = parent("qwen2_vl")
    model.config.text_config.rope_parameters.update(SECTIONS)
    model = type(model)(model.config).eval()
    yield "composite", model, "alibi", "language_model", PARENTS["qwen2_vl"].inputs(), (TEXT,)
    two = {name: ids["input_ids"] for name in ("input_ids", "decoder_input_ids")}
    model = tiny("T5GemmaModel")
    model.config.encoder.rope_parameters["rope_theta"] = 300.0
    yield "half", type(model)(model.config).eval(), "alibi", "encoder", two, ("encoder.rope_parameters",)


def at(written, path):
    for name in path.split("."):
        written = written.get(name, {})
    return written


@torch.no_grad()
def test_reload_in_a_new_process(tmp_path):
    for name, model, encoding, submodel, inputs, moved in cases():
        new, folder = hf_posenc.patch(model, encoding, submodel=submodel), tmp_path / name
        new.save_pretrained(folder)
        saved = json.loads((folder / "config.json").read_text())
        assert [*saved["position_encoding"]["replaced"]] == [*moved]
        for path in moved:
            assert not at(saved, path) and saved["position_encoding"]["replaced"][path] == at(model.config.to_dict(), path)
        assert hf_posenc.inspect(folder).encoding == new.config.position_encoding["type"]
        kept = inputs, first(new(**inputs)), first(model(**inputs)), model.config.to_dict(), new.config.to_dict(), moved
        torch.save(kept, folder / "kept.pt")
    assert run_python("import sys, test_rope_parameters as t; t.compare(sys.argv[1])", tmp_path) == "right\n" * 7


@torch.no_grad()
def compare(root):
    for folder in Path(root).iterdir():
        inputs, ours, theirs, original, whole, moved = torch.load(folder / "kept.pt")
        (name,) = json.loads((folder / "config.json").read_text())["architectures"]
        model = getattr(hf_posenc, name).from_pretrained(folder)
        assert_equal(first(model(**inputs)), ours)
        model.save_pretrained(folder / "again")
        again = hf_posenc.unpatch(getattr(hf_posenc, name).from_pretrained(folder / "again"))
        back = hf_posenc.unpatch(model)
        for each in (back, again):
            assert_equal(first(each(**inputs)), theirs)
            assert all(at(each.config.to_dict(), path) == at(original, path) for path in moved)
        for config in (AutoConfig.from_pretrained(folder), type(model.config).from_json_file(folder / "config.json")):
            assert all(at(config.to_dict(), path) == at(whole, path) for path in moved)
        back.save_pretrained(folder / "back")
        stock = getattr(transformers, name.removeprefix("PosEnc")).from_pretrained(folder / "back")
        assert_equal(first(stock(**inputs)), theirs)
        print("right")


def test_the_saved_code_restores_them(tmp_path):
    patched("llama", "alibi", rope_parameters=YARN).save_pretrained(tmp_path)
    code = """if True:
        import sys
        from transformers import AutoModel
        model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
        assert "hf_posenc" not in sys.modules
        model.config.save_pretrained(sys.argv[1] + "/again")
        print(model.config.rope_parameters == {**model.config.rope_parameters, "rope_theta": 500.0, "factor": 6.0})
    """
    assert run_python(code, tmp_path) == "True\n"
    for folder in (tmp_path, tmp_path / "again"):
        assert "rope_parameters" not in json.loads((folder / "config.json").read_text())


def test_other_values_on_loading(tmp_path):
    """An option of the encoding, another length, and a config object don't lose them."""
    patched("llama", "rope", rope_parameters=YARN).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    for more in ({"position_encoding": {"type": "rope", "theta": 7.0}}, {"config": config}, {"config": tmp_path}):
        model = hf_posenc.PosEncLlamaModel.from_pretrained(tmp_path, **more)
        assert hf_posenc.unpatch(model).config.rope_parameters == config.rope_parameters
        assert "replaced" not in model.config.position_encoding
    assert config.rope_parameters["factor"] == 6.0


def test_a_model_from_scratch(tmp_path):
    config = hf_posenc.PosEncLlamaConfig(**LlamaConfig().to_dict() | {"rope_parameters": YARN}, position_encoding="alibi")
    config.save_pretrained(tmp_path)
    assert "rope_parameters" not in json.loads((tmp_path / "config.json").read_text())
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters


def test_where_the_original_rotation_stays(tmp_path):
    hf_posenc.patch(tiny("MoonshineModel"), "alibi", where="encoder").save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "replaced" not in saved["position_encoding"] and saved["rope_parameters"]


@pytest.mark.parametrize(
    "value",
    [7, {"vocab_size": {}}, {"rope_parameters": 7}, {"decoder.rope_parameters": {}}, {"hidden_size.rope_parameters": {}}],
)
def test_edited_files_are_refused(value, tmp_path):
    patched("llama", "alibi").save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    saved["position_encoding"]["replaced"] = value
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="position_encoding\\['replaced'\\].*must not be edited"):
        AutoModel.from_pretrained(tmp_path)
