"""The claims about supported models: the script that checks them, its stored output, and the page that quotes it."""

import dataclasses
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch

from conftest import ROOT
from models import slow
from tools import check_support
from tools.hosts import checks, inputs, tiny

KEPT, PAGE = ROOT / "scripts" / "results" / "check_support.txt", ROOT / "docs" / "reference" / "models.md"
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
OPEN = {
    "granite_speech5_ctc",
    "muse_glimmer_vision",
    "muse_spark_vision",
}
"""Supported model types that fail a check.

Muse Glimmer's assistant compares queries with keys of another model's tokens, so its patched models raise an error. The others
merge adjacent tokens, in each layer or after the last one, where the check of order can't detect it.
"""
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
    monkeypatch.setattr(checks, "_ignores_padding", lambda host, model, *rest: not checks._is_patched(model))
    verdict = check_support.judge("gpt2")
    assert verdict.checks["padding"] == checks.FAILED and verdict.checks["cache"] == checks.PASSED


def test_rounding_is_no_difference_between_attention_implementations(monkeypatch):
    """A difference counts if it remains in double precision."""
    host = checks.Host("bert", tiny.build("bert"), "")
    host.look()
    apart, types = checks._apart, []

    def rounded(a, b):
        types.append(a.dtype)
        return 1.0 if a.dtype == torch.float32 else apart(a, b)

    monkeypatch.setattr(checks, "_apart", rounded)
    assert all(checks.eager_is_sdpa(host)) and {*types} == {torch.float32, torch.float64}
    monkeypatch.setattr(checks, "_apart", lambda a, b: 0.0 if not types.append(a.dtype) and len(types) < 2 else 1.0)
    types.clear()
    assert not any(checks.eager_is_sdpa(host))


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


def test_the_pages_quote_the_result():
    headline, *lines = KEPT.read_text().splitlines()
    assert all(headline in page.read_text() for page in (ROOT / "README.md", PAGE))
    assert {line.split()[0] for line in lines if "FAILED" in line} == OPEN
    assert not any("crashed" in line for line in lines)
    refused = PAGE.read_text().partition("### Unsupported")[2].partition("\n\n### ")[0].splitlines()
    remedies = [line.split(" | ")[-1] for line in refused if line.startswith("| ")][1:]
    assert len(remedies) > 5 and not any(len(remedy) < 12 or "models.md" in remedy for remedy in remedies), remedies
    rows = check_support.read_csv(KEPT.with_suffix(".csv"))
    unsupported = [
        check_support.Verdict(row["model_type"], row["family"], reason=row["reason"])
        for row in rows
        if row["support"] == "unsupported"
    ]
    listed = {line for line in check_support.tables(unsupported).splitlines() if line.startswith("- ")}
    assert listed == {line for line in PAGE.read_text().partition("### Unsupported")[2].splitlines() if line.startswith("- ")}
    assert any(f"inkling (`{each.kind}`)" in line for each in unsupported for line in listed)
    assert headline.startswith(f"{sum(row['support'] == 'all' for row in rows)} of ") and len(
        {row["family"] for row in rows}
    ) == len(rows)


def test_changes_since_the_kept_file_are_printed(tmp_path):
    """For example those of another version of Transformers. Equal rows print nothing."""
    passed = check_support.Verdict("bert", "bert", source="learned", encodings=checks.ENCODINGS, checks={"cache": "passed"})
    gone = check_support.Verdict("old", "old", reason="unsupported attention")
    check_support.write_csv(tmp_path / "kept.csv", check_support.rows([passed, gone]))
    before = check_support.read_csv(tmp_path / "kept.csv")
    assert check_support.changes(before, check_support.rows([passed, gone])) == "0 families have changed"
    failed = dataclasses.replace(passed, checks={"cache": checks.FAILED})
    lines = check_support.changes(before, check_support.rows([failed, dataclasses.replace(gone, folder="new")])).splitlines()
    assert lines == [
        "3 families have changed",
        "    new: new, unsupported unsupported attention",
        "    old: no longer there, before: unsupported",
        "    bert: support 'all' -> 'not verified', cache 'passed' -> 'FAILED'",
    ]


def test_inputs_of_recipes_are_arguments():
    """Otherwise, a recipe for an unknown type, or an input that no `forward` accepts, would be ignored silently."""
    assert {*tiny.RECIPES} <= {*check_support.CONFIG_MAPPING}
    for kind, recipe in tiny.RECIPES.items():
        known = {"config", "inputs", "class", "architectures", "vectors", "entrance", "stock_fails", "kernel_std"}
        assert {*recipe} <= known, kind
        assert {*recipe.get("stock_fails", {})} <= {"eager=sdpa", "padding", "cache"}, kind
    assert inputs.reading("bros", tiny.build("bros")).specs["bbox"].shape == ("B", "L", 8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_kept_result_is_what_runs_now(tmp_path):
    if KEPT.read_text().splitlines()[1] != check_support.packages():
        pytest.skip("the stored result is from a run with other optional packages")
    page, docs = tmp_path / "check_support.txt", tmp_path / "hosts.md"
    shutil.copy(PAGE, docs)
    command = [sys.executable, "-m", "tools.check_support", "--output_file", page, "--docs_file", docs]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--verdicts_file", tmp_path / "verdicts.jsonl"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert page.read_text() == KEPT.read_text()
    assert docs.read_text() == PAGE.read_text()
