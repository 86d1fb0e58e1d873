"""Saving and loading: in a new process, from weights only, with merged options, and from damaged files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import hf_posenc
from models import BERT, LLAMA, Host, first, patched, stock, tokens


def test_another_type_on_load(tmp_path):
    patched("bert", "rope").save_pretrained(tmp_path)
    for load in (AutoModel, AutoConfig, hf_posenc.PosEncBertModel):
        with pytest.raises(ValueError, match=r"saved with the 'rope' encoding, not 'alibi'.*unpatch"):
            load.from_pretrained(tmp_path, position_encoding="alibi")
    assert AutoModel.from_pretrained(tmp_path, position_encoding="rotary").config.position_encoding["type"] == "rope"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"type": "rope", "angle": 1.0}, "no option 'angle'"),
        ({"type": "rope", "theta": -1.0}, "theta=-1.0"),
        ({"type": "nothing"}, "Unknown position encoding 'nothing'"),
        ({"theta": 1.0}, "a name or a dict"),
        ("rope?", "Unknown position encoding"),
        (["rope"], "a name or a dict"),
        ({"type": "rope", "max_length": "long"}, "max_length='long'"),
        ({"type": "rope", "original": {"kept": True}}, "must not be edited"),
        ({"type": "rope", "original": 7}, "must not be edited"),
        ({"type": "rope", "max_length": -1}, "max_length=-1"),
    ],
)
def test_malformed_config(tmp_path, value, words):
    patched("bert", "rope").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "position_encoding": value}))
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        AutoModel.from_pretrained(tmp_path)


def test_config_without_an_encoding(tmp_path):
    patched("bert", "rope").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["position_encoding"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"needs config\.position_encoding"):
        AutoModel.from_pretrained(tmp_path)
    stock("bert").save_pretrained(tmp_path / "stock")
    with pytest.raises(ValueError, match=r"hf_posenc\.patch"):
        hf_posenc.PosEncBertModel.from_pretrained(tmp_path / "stock")


@pytest.mark.parametrize("encoding", ["learned", "relative"])
def test_missing_and_unexpected_weights(tmp_path, encoding):
    patched("bert", encoding).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: value for name, value in weights.items() if name != "posenc.weight"}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing_keys posenc\.weight"):
        AutoModel.from_pretrained(tmp_path)
    save_file({**weights, "posenc.extra": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected_keys posenc\.extra"):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("host", "auto"),
    [
        (Host("Mixtral", dict(LLAMA, num_local_experts=4, head_dim=8), "ForCausalLM"), AutoModelForCausalLM),
        (Host("NomicBert", BERT), AutoModel),
    ],
    ids=["mixtral", "nomic_bert"],
)
def test_hosts_whose_weights_have_other_names_in_files(host, auto, tmp_path):
    """Such a model can be loaded, patched, saved, and loaded, then unpatched, saved, and loaded. Transformers renames weights
    by the model type, which a loaded config has as an attribute.
    """
    stock(host, "ForCausalLM" if auto is AutoModelForCausalLM else "Model").save_pretrained(tmp_path / "stock")
    model = auto.from_pretrained(tmp_path / "stock").eval()
    changed = hf_posenc.patch(model, "alibi")
    changed.save_pretrained(tmp_path / "patched")
    again = auto.from_pretrained(tmp_path / "patched").eval()
    assert type(again) is type(changed) and torch.equal(first(again(tokens())), first(changed(tokens())))
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(first(auto.from_pretrained(tmp_path / "again").eval()(tokens())), first(changed(tokens())))
    back = hf_posenc.unpatch(again)
    assert back.config.model_type == model.config.model_type and torch.equal(first(back(tokens())), first(model(tokens())))
    back.save_pretrained(tmp_path / "back")
    assert torch.equal(first(auto.from_pretrained(tmp_path / "back").eval()(tokens())), first(model(tokens())))
