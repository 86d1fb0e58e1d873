"""Derived classes and the Auto classes that build them."""

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer
from transformers.models.auto import modeling_auto

import hf_posenc
from conftest import run_python
from models import HOSTS, by_structure, first, patched, stock, tiny_config, tokens

every_host = pytest.mark.parametrize("host", by_structure(HOSTS))


@every_host
def test_every_head_has_a_derived_class(host):
    """Each Auto class that builds a class of the original model also builds the derived class."""
    config = patched(host, "relative", **HOSTS[host].one_layer).config
    autos = [each for name, each in vars(modeling_auto).items() if name.startswith("AutoModel")]
    heads = [auto for auto in autos if host in getattr(getattr(auto, "_model_mapping", None), "_model_mapping", ())]
    assert len(heads) >= 5
    for auto in heads:
        model = auto.from_config(config)
        assert type(model).__name__.startswith("PosEnc") and isinstance(model.config, type(config))
        assert model.base_model.posenc.weight.isfinite().all()
        assert getattr(hf_posenc, type(model).__name__) is type(model)


def test_from_scratch():
    def made(encoding, auto=AutoModel):
        sizes = {**tiny_config("BertModel").to_dict(), "max_position_embeddings": 512}
        config = hf_posenc.PosEncBertConfig(**{**sizes, "model_type": "posenc-bert", "position_encoding": encoding})
        return auto.from_config(config)

    model = made({"type": "rotary", "theta": 500}, AutoModelForMaskedLM)
    expected = {"type": "rope", "theta": 500.0, "layout": "half", "inject": "input", "max_length": None, "original": None}
    assert model.config.position_encoding == expected and model.config.model_type == "posenc-bert"
    assert type(model) is hf_posenc.PosEncBertForMaskedLM and first(model(tokens(1, 600))).isfinite().all()
    with pytest.raises(ValueError, match="from scratch"):
        hf_posenc.unpatch(model)
    assert made({"type": "learned", "max_length": 9}).posenc.weight.std().item() == pytest.approx(0.02, rel=0.2)
    table = made("learned")
    assert hf_posenc.inspect(table).max_length == len(table.posenc.weight) == 512  # the original length
    assert table.config.position_encoding["max_length"] is None  # building a model doesn't change its config


@every_host
def test_from_pretrained_with_an_encoding_is_patch(host, tmp_path):
    model = stock(host, HOSTS[host].head)
    model.save_pretrained(tmp_path)
    cls = getattr(hf_posenc, f"PosEnc{type(model).__name__}")
    loaded = cls.from_pretrained(tmp_path, position_encoding="alibi")
    assert type(loaded) is cls and torch.equal(first(loaded(tokens())), first(hf_posenc.patch(model, "alibi")(tokens())))
    assert torch.equal(first(hf_posenc.unpatch(loaded)(tokens())), first(model(tokens())))
    loaded, info = cls.from_pretrained(tmp_path, position_encoding={"type": "rope"}, output_loading_info=True)
    assert loaded.config.position_encoding["type"] == "rope" and not info["missing_keys"]


QUICK = "import hf_posenc; assert not {'transformers', 'hf_posenc.encodings'} & sys.modules.keys()"
TRANSFORMERS = "from transformers import AutoConfig; import transformers.models.auto.modeling_auto"


@pytest.mark.parametrize(
    "lines",
    [
        (QUICK, TRANSFORMERS),
        (QUICK, "from hf_posenc import patch", TRANSFORMERS),
        (TRANSFORMERS, "import hf_posenc"),
        ("from transformers import AutoConfig", "import hf_posenc"),
        ("sys.argv[:] = ['hf-posenc.py']", "import hf_posenc"),
        ("sys.argv.clear()", "import hf_posenc"),
    ],
    ids=["before", "used before", "after", "between", "in hf-posenc.py", "without a program"],
)
def test_importing_the_package_registers_its_classes(lines, tmp_path):
    patched("bert", "alibi").config.save_pretrained(tmp_path)
    load = ("from transformers import AutoConfig, AutoModel", "config = AutoConfig.from_pretrained(path)")
    build = "print(type(config).__name__, type(AutoModel.from_config(config)).__name__)"
    code = "\n".join(("import sys; path = sys.argv[1]", *lines, *load, build))
    assert run_python(code, tmp_path, fresh=True) == "PosEncBertConfig PosEncBertModel\n"


def test_tokenizer_beside_a_patched_model(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    patched("bert", "alibi").save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("w0 w1").input_ids == [2, 5, 6, 3]
