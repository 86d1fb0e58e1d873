"""The claims about supported models: the script that checks them, its stored output, and the page that quotes it."""

import csv
import os
import shutil
import subprocess
import sys
import time

import pytest

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
QUICK = ("deberta-v2", "gptj", "hy_v4", "bart", "yolos", "wav2vec2-conformer", "clip (text_model)")
"""One or two of each group, for `make test`. models.py has none of these architectures."""
OPEN = {
    "granite_speech5_ctc",
    "muse_glimmer_vision",
    "muse_spark_vision",
    "omniasr_audio",
    "omniasr_ctc",
    "recurrent_gemma",
    "sam3_lite_text",
}
"""Supported model types that fail a check.

The first three merge adjacent tokens, in each layer or after the last one, where the check of order can't detect it.
RecurrentGemma's states see left padding, as in the original model. SAM 3 Lite's two attention implementations differ by
rounding (2.7e-5, limit 2e-5). The tiny OmniASR ends with the same state in all frames.
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


@pytest.mark.parametrize(
    ("kind", "part", "where"),
    [
        ("vit", "", [("output", "embeddings.patch_embeddings.projection", 16)]),
        ("patchtst", "", [("input", "encoder", 6)]),
        ("wav2vec2", "", [("output", "feature_extractor.conv_layers.6.conv", 12)]),
        ("whisper", "", [("output", "encoder.conv2", 24), ("argument", "decoder_input_ids", 11)]),
        ("t5", "", [("argument", "input_ids", 11), ("argument", "decoder_input_ids", 11)]),
        ("clip", "text_model", [("argument", "input_ids", 11)]),
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
    with KEPT.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert headline.startswith(f"{sum(row['support'] == 'all' for row in rows)} of ") and len(
        {row["family"] for row in rows}
    ) == len(rows)


def test_inputs_of_recipes_are_arguments():
    """Otherwise, a recipe for an unknown type, or an input that no `forward` accepts, would be ignored silently."""
    assert {*tiny.RECIPES} <= {*check_support.CONFIG_MAPPING}
    for kind, recipe in tiny.RECIPES.items():
        assert {*recipe} <= {"config", "inputs", "class", "architectures", "vectors", "entrance", "kernel_std"}, kind
    assert inputs.reading("bros", tiny.build("bros")).specs["bbox"].shape == ("B", "L", 8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_kept_result_is_what_runs_now(tmp_path):
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
