"""The script that checks the claims about supported models."""

import time

import pytest

from models import slow
from tools import check_support
from tools.hosts import checks, tiny

TAKEN = {
    # text encoders
    "bert": "learned",
    "roberta": "learned",
    "albert": "learned",
    "dpr": "learned",
    "megatron-bert": "learned",
    "mpnet": "learned+t5",
    "deberta-v2": "deberta",
    "modernbert": "rope",
    "roformer": "rope",
    "xlnet": "transformer_xl",
    # decoders: experts, latent attention, several rotary modules, shared keys, streams, states besides attentions
    "gpt2": "learned",
    "opt": "learned",
    "ctrl": "sinusoidal",
    "bloom": "alibi",
    "gptj": "rope",
    "llama": "rope",
    "mixtral": "rope",
    "deepseek_v3": "rope",
    "granite_swa": "rope",
    "gemma4_text": "rope",
    "hy_v4": "rope",
    "lfm2": "rope",
    "falcon_h1": "rope",
    # encoder-decoders
    "bart": "learned",
    "marian": "learned",
    "whisper": "learned",
    "encoder-decoder (encoder)": "learned",
    "time_series_transformer": "learned",
    # images
    "vit": "learned",
    "dinov2": "learned",
    "yolos": "learned",
    "beit": "t5",
    "swin": "t5",
    "dinov3_vit": "rope",
    "qwen2_5_vl_vision": "rope",
    # audio
    "wav2vec2": "convolution",
    "wav2vec2-conformer": "transformer_xl",
    "audio-spectrogram-transformer": "learned",
    # submodels of composite models
    "clip (text_model)": "learned",
    "llava (language_model)": "rope",
}
"""A sample of 40 families: model type and patched submodel -> the positions of the original model."""
QUICK = ("hy_v4", "yolos", "clip (text_model)")
"""A decoder, a model of images, and a submodel, for `make test`. models.py has none of these architectures."""
REFUSED = {
    "resnet": "no supported positions or attention",
    "fnet": "unsupported attention",
}


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in TAKEN])
def test_taken(name):
    verdict = check_support.judge(name.partition(" ")[0])
    assert verdict.verified and (verdict.name, verdict.source) == (name, TAKEN[name]), verdict
    assert verdict.checks["order gone"] == verdict.checks["order back"] == checks.PASSED


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind):
    verdict = check_support.judge(kind)
    assert verdict.reason == REFUSED[kind] and check_support.remedy_for(verdict), verdict


@pytest.mark.parametrize("kind", ["bert", slow("llama"), "whisper", slow("vit"), slow("wav2vec2-conformer")])
def test_a_failed_check_is_seen(monkeypatch, kind):
    """If the original positions remain active in addition to the new encoding, the check fails."""
    monkeypatch.setattr(checks.hf_posenc, "patch", lambda model, encoding: model)
    verdict = check_support.judge(kind)
    assert verdict.checks["order gone"] == checks.FAILED and verdict.failed and not verdict.verified


def test_an_encoding_that_does_nothing_is_seen(monkeypatch):
    patch = checks.hf_posenc.patch
    monkeypatch.setattr(checks.hf_posenc, "patch", lambda model, encoding: patch(model, "none"))
    verdict = check_support.judge("vit")
    assert verdict.checks["order gone"] == checks.PASSED and verdict.checks["order back"] == checks.FAILED


def verified(results):
    return check_support.Verdict("bert", "bert", source="learned", encodings=("rope",), checks=results).verified


def test_checks_that_prove_nothing_do_not_count():
    """Skipped checks don't count as verification. Neither do checks of an original model that ignores order."""
    model = tiny.build("bert")
    model.embeddings.position_embeddings.weight.data.zero_()
    results = checks.checked(checks.Host("bert", model, ""))
    assert results["order gone"] == checks.NO_ORDER and not verified(results)
    passed = dict.fromkeys(checks.CHECKS, checks.PASSED)
    assert verified(passed) and not verified(passed | {"cache": "skipped (the stock model differs by chunks)"})


@pytest.mark.parametrize("kind", ["jamba", slow("zamba2"), slow("nemotron_h")])
def test_encodings_of_attention_without_positions_are_seen(monkeypatch, kind):
    """Attention of hybrids has no positions. The checks pass, and fail if an encoding does nothing, or if order remains."""
    assert check_support.judge(kind).verified
    patch = checks.hf_posenc.patch
    monkeypatch.setattr(checks.hf_posenc, "patch", lambda model, encoding: patch(model, "none"))
    verdict = check_support.judge(kind)
    assert verdict.checks["order gone"] == checks.PASSED and verdict.checks["order back"] == checks.FAILED
    monkeypatch.setattr(checks.hf_posenc, "patch", lambda model, encoding: patch(model, "alibi"))
    assert check_support.judge(kind).checks["order gone"] == checks.FAILED


@pytest.mark.slow
def test_a_submodel_is_checked_if_the_inputs_of_the_whole_model_are_unknown(monkeypatch):
    """The checks call only the submodel, and fail if its positions remain or if an encoding does nothing."""
    model = tiny.build("sam")
    host = checks.Host("sam", model, "vision_encoder")
    host.look()
    assert host.alone and host.called(model) is model.vision_encoder
    assert {*host.reading.specs} == {"pixel_values"}
    patch = checks.hf_posenc.patch
    monkeypatch.setattr(checks.hf_posenc, "patch", lambda model, encoding, submodel: model)
    assert checks.checked(checks.Host("sam", model, "vision_encoder"))["order gone"] == checks.FAILED
    monkeypatch.setattr(checks.hf_posenc, "patch", lambda model, encoding, submodel: patch(model, "none", submodel=submodel))
    assert checks.checked(checks.Host("sam", model, "vision_encoder"))["order back"] == checks.FAILED


@pytest.mark.slow
def test_a_check_that_the_original_model_fails_is_listed(monkeypatch):
    """It doesn't apply, but the reports list it. Without a known reason, or if only the patched model fails, it counts."""
    verdict = check_support.judge("recurrent_gemma")
    why = tiny.RECIPES["recurrent_gemma"]["stock_fails"]["padding"]
    assert verdict.verified and verdict.stock_fails == {"padding": why} and "padding" in verdict.not_applicable
    assert why in check_support.report([verdict]) and why in check_support.tables([verdict])
    monkeypatch.setitem(tiny.RECIPES, "recurrent_gemma", {**tiny.RECIPES["recurrent_gemma"], "stock_fails": {}})
    verdict = check_support.judge("recurrent_gemma")
    assert not verdict.verified and verdict.checks["padding"].startswith(checks.SKIPPED)
    monkeypatch.setitem(tiny.RECIPES, "gpt2", {"stock_fails": dict.fromkeys(("padding", "cache"), "claimed")})
    verdict = check_support.judge("gpt2")
    assert verdict.checks["padding"] == verdict.checks["cache"] == checks.PASSED


@pytest.mark.parametrize(
    ("kind", "part", "where"),
    [
        ("vit", "", [("output", "embeddings.patch_embeddings.projection", 16)]),
        ("patchtst", "", [("input", "encoder", 6)]),
        ("wav2vec2", "", [("output", "feature_extractor.conv_layers.6.conv", 12)]),
        ("whisper", "", [("output", "encoder.conv2", 24), ("argument", "decoder_input_ids", 11)]),
        ("t5", "", [("argument", "input_ids", 11), ("argument", "decoder_input_ids", 11)]),
        ("clip", "text_model", [("argument", "input_ids", 11)]),
        ("csm", "depth_decoder", [("input", "model.inputs_embeds_projector", 11)]),
        (
            "videoprism",
            "video_model.vision_model",
            [("output", "video_model.vision_model.spatial_embeddings.patch_embeddings.projection", count) for count in (4, 16)],
        ),
        ("clip", "vision_model", [("output", "vision_model.embeddings.patch_embedding", 16)]),
    ],
)
def test_contents_change_places_where_they_enter(kind, part, where):
    """Token content is permuted after a front end that sees order, and before the original positions, which
    change the outputs.
    """
    host = checks.Host(kind, tiny.build(kind), part)
    host.look()
    assert [(each.where, each.name, each.count) for each in (probe.entrance for probe in host.probes)] == where
    assert all(host.order(stock, probe)[0] > checks.OTHER for probe in host.probes for stock in host.judging(probe))


def _hang(connection):
    time.sleep(60)


def test_a_hanging_type_does_not_stop_a_run(tmp_path, monkeypatch):
    """The process of a hanging type is killed. Its verdict is stored with the others, and is valid for the
    current code only.
    """
    monkeypatch.setattr(check_support, "_serve", _hang)
    kept = check_support.Kept(tmp_path / "verdicts.jsonl")
    verdicts = check_support.judged(["bert", "gpt2"], 1, kept, limit=0.2)
    assert [verdict.crash for verdict in verdicts] == ["not done within 0 seconds"] * 2
    assert {*check_support.Kept(kept.path).verdicts} == {"bert", "gpt2"}
    assert check_support.Kept(kept.path).verdicts == kept.verdicts
    monkeypatch.setattr(check_support, "state_of_the_code", lambda: "other")
    assert not check_support.Kept(kept.path).verdicts
