"""`inspect`: the report on a model or a checkpoint."""

import json
import threading

import pytest
import torch
import transformers
from torch import nn

import hf_posenc
from hf_posenc import inspection
from models import LENGTH, patched, stock, tiny, tokens


def test_inspect(tmp_path):
    """`inspect` gives the same report for a model, its config, its directory, and its config file."""
    model = patched("gpt2", "rope", max_length=99)
    report = hf_posenc.inspect(model)
    assert (report.encoding, report.options, report.max_length) == ("rope", {"theta": 10000.0, "layout": "half"}, 99)
    assert report.locations == {"rotate": ("h.0.attn", "h.1.attn")} and report.can_unpatch
    model.save_pretrained(tmp_path / "rope")
    assert all(
        hf_posenc.inspect(each) == report for each in (model.config, tmp_path / "rope", tmp_path / "rope" / "config.json")
    )
    report = hf_posenc.inspect(patched("bert", "sinusoidal", "ForMaskedLM"))
    assert report.locations == {"embed": ("bert.embeddings.position_embeddings",)} and report.max_length is None
    assert "no limit" in str(report) and "sinusoidal (base=10000.0" in str(report)
    model = stock("bert")
    model.config.position_embedding_type = "relative_key"
    model.save_pretrained(tmp_path / "v4")
    report = hf_posenc.inspect(tmp_path / "v4")
    assert (report.encoding, report.max_length) == ("learned", LENGTH) and "relative_key" in report.ignored[0]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_wrapped_model(minilm, tmp_path):
    """The report is that of the wrapped model."""
    from peft import LoraConfig, get_peft_model
    from sentence_transformers import SentenceTransformer

    sentences = SentenceTransformer(minilm, device="cpu")
    assert hf_posenc.inspect(sentences) == hf_posenc.inspect(sentences[0].model)
    sentences = hf_posenc.patch(sentences, "alibi", max_length=99)
    sentences.save_pretrained(str(tmp_path / "sentences"))
    assert hf_posenc.inspect(sentences) == hf_posenc.inspect(tmp_path / "sentences")
    patched("bert", "relative", max_length=99).save_pretrained(tmp_path / "base")
    base = transformers.AutoModel.from_pretrained(tmp_path / "base")
    report = hf_posenc.inspect(base)
    assert hf_posenc.inspect(nn.DataParallel(base)) == report
    lora = get_peft_model(base, LoraConfig(target_modules=["query"]))
    assert hf_posenc.inspect(lora) == hf_posenc.inspect(nn.DataParallel(lora)) == report and report.max_length == 99
    lora.save_pretrained(tmp_path / "adapter")
    assert hf_posenc.inspect(tmp_path / "adapter") == report
    layer = hf_posenc.TokenPositionEmbedding(50, "sinusoidal", 8, max_length=7)
    assert hf_posenc.inspect(layer) == hf_posenc.inspect(layer.positions)


def test_a_model_made_of_several(tmp_path):
    """Submodels of a composite model may have different encodings and lengths, so no report describes the whole model."""
    decoders = [stock("gpt2", "LMHeadModel", add_cross_attention=True) for _ in range(2)]
    for encoder, decoder, encoding in (
        (stock("bert"), decoders[0], "learned"),
        (patched("bert", "alibi", max_length=99), hf_posenc.patch(decoders[1], "rope"), "alibi"),
    ):
        model = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder)
        model.save_pretrained(tmp_path / encoding)
        for each in (model, tmp_path / encoding):
            with pytest.raises(ValueError, match="EncoderDecoderModel"):
                hf_posenc.inspect(each)
        assert hf_posenc.inspect(model.encoder).encoding == encoding


def test_what_is_no_model(tmp_path):
    unknown = stock("bert").config.to_dict()
    unknown = {"model_type": "encoder-decoder", "encoder": unknown, "decoder": unknown}
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text(json.dumps(unknown))
    for given, words in (
        (nn.Linear(1, 1), "Linear"),
        (tiny("ResNetModel"), "ResNetModel"),
        (None, "Hub.*None"),
        ({"model_type": "bert"}, "Pass a model"),
        (tmp_path, "has no config.json"),
        (tmp_path / "unknown", "no class for EncoderDecoderConfig"),
    ):
        with pytest.raises(ValueError, match=words):
            hf_posenc.inspect(given)
    with pytest.raises(OSError, match="nowhere"):
        hf_posenc.inspect(tmp_path / "nowhere")


def test_other_threads_build_models_meanwhile(monkeypatch):
    """`inspect` doesn't affect models that other threads build. Accelerate's init_empty_weights would remove the weights in all
    threads.
    """
    built, real = [], inspection.AutoModel.from_config

    def from_config(config):
        thread = threading.Thread(target=lambda: built.append(torch.nn.Linear(2, 2).weight.device.type))
        thread.start()
        thread.join()
        return real(config)

    monkeypatch.setattr(inspection.AutoModel, "from_config", from_config)
    assert hf_posenc.inspect(stock("bert").config).encoding == "learned"
    assert built == ["cpu"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_places_of_an_encoder_decoder(tmp_path):
    """The printed report shows the options and layers of each place, in the same order after loading."""
    where = {
        "encoder": {"type": "rope", "theta": 7.0},
        "decoder": {"type": "shaw+rope", "rope__layers": [1], "shaw__layers": [0]},
        "cross": {"type": "alibi", "slopes": "learned"},
    }
    model = hf_posenc.patch(stock("bart", "ForConditionalGeneration"), "rope", where=where, layers=[0])
    report = hf_posenc.inspect(model)
    assert [*report.where] == [*report.places] == ["encoder", "decoder", "cross"]
    assert report.places["encoder"].options["theta"] == 7.0 and report.places["cross"].options["slopes"] == "learned"
    assert report.places["decoder"].layers == {"rope": (1,), "shaw": (0,)}
    lines = str(report).splitlines()
    shown = [line.split(":")[0].strip() for line in lines]
    assert shown[1:4] == ["encoder encoding", "decoder encoding", "cross encoding"] and "encoding" not in shown
    assert "rope (theta=7.0" in lines[1] and "slopes='learned'" in lines[3] and "parts" not in shown
    assert "decoder rope layers" in shown and "decoder shaw layers" in shown
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert str(hf_posenc.inspect(loaded)) == str(report)
    layers = hf_posenc.inspect(hf_posenc.patch(stock("bart"), "rope", where={"encoder": {}, "decoder": {"layers": [1]}})).places
    assert (layers["encoder"].layers, layers["decoder"].layers) == ({}, {"rope": (1,)})
    same = hf_posenc.inspect(hf_posenc.patch(stock("bart"), "rope", where=["encoder", "decoder"]))
    assert same.places == {} and "encoder (rope), decoder (rope)" in str(same)


def test_divergences_of_each_stack():
    texts = [{"input_ids": tokens(batch=30, length=24, seed=seed)} for seed in range(3)]
    model = hf_posenc.convert(stock("bart", "ForConditionalGeneration"), "relative", max_distance=4, texts=texts)
    report = hf_posenc.inspect(model)
    assert report.calibrated == {"model.encoder": 2, "model.decoder": 2} and len(report.calibration.kl_after) == 4
    rows = [line for line in str(report).splitlines() if "divergence:" in line]
    for row, name, numbers in zip(rows, ("encoder", "decoder"), (slice(2), slice(2, 4)), strict=True):
        values = ", ".join(f"{value:.2f}" for value in report.calibration.kl_after[numbers])
        assert f"{values} after" in row and f"model.{name}" in row
    one = hf_posenc.convert(stock("bart"), "relative", max_distance=4, texts=texts, where="decoder")
    assert hf_posenc.inspect(one).calibrated == {} and str(hf_posenc.inspect(one)).count("divergence:") == 1
