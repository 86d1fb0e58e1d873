"""`inspect`: what a report says of a model or a checkpoint."""

import pytest
import transformers

import hf_posenc
from conftest import LENGTH, patched, stock


def test_inspect(tmp_path):
    report = hf_posenc.inspect(patched("gpt2", "rope", "LMHeadModel", max_length=99))
    assert (report.encoding, report.options, report.max_length) == ("rope", {"theta": 10000.0, "layout": "half"}, 99)
    assert report.enters == {"rotate": ("transformer.h.0.attn", "transformer.h.1.attn")} and report.host_kept
    patched("bert", "sinusoidal", "ForMaskedLM").save_pretrained(tmp_path / "patched")
    report = hf_posenc.inspect(tmp_path / "patched")
    assert report.enters == {"embed": ("embeddings.position_embeddings",)} and report.max_length is None
    assert "no limit" in str(report) and "sinusoidal (base=10000.0" in str(report)
    model = stock("bert")
    model.config.position_embedding_type = "relative_key"
    model.save_pretrained(tmp_path / "v4")
    report = hf_posenc.inspect(tmp_path / "v4")
    assert (report.encoding, report.max_length) == ("learned", LENGTH) and "relative_key" in report.ignored[0]
    resnet = transformers.ResNetModel(transformers.ResNetConfig(hidden_sizes=[8], depths=[1], embedding_size=8))
    with pytest.raises(ValueError, match="ResNetModel"):
        hf_posenc.inspect(resnet)
