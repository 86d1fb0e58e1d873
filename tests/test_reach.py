"""What is claimed of hosts: the script that checks it, its kept output, and the page that quotes it."""

import os
import subprocess
import sys

import pytest

import reach
from conftest import ROOT
from hosts import checks

KEPT = ROOT / "scripts" / "results" / "reach.txt"
TAKEN = {
    "bert": "learned",
    "mpnet": "learned+t5",
    "modernbert": "rope",
    "mixtral": "rope",
    "deepseek_v3": "rope",
    "granite_swa": "rope",
    "gemma4_text": "rope",
    "hy_v4": "rope",
}
"""An encoder of each kind of source, and decoders: experts, latent attention, several rotary modules, shared keys, streams."""
REFUSED = {
    "lfm2": "convolutions, which see the order of their inputs",
    "llava": "made of several models",
    "vit": "other sources of position",
    "kyutai_speech_to_text": "no table of token embeddings",
}


@pytest.mark.parametrize("kind", TAKEN)
def test_taken(kind):
    verdict = reach.judge(kind)
    assert verdict.source == TAKEN[kind] and verdict.verified, verdict
    assert verdict.checks["order gone"] == verdict.checks["order back"] == checks.PASSED


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind):
    verdict = reach.judge(kind)
    assert verdict.reason == REFUSED[kind], verdict


def test_a_failed_check_is_seen(monkeypatch):
    """Positions that stay in beside the new encoding fail the check, and so does an encoding that does nothing."""
    monkeypatch.setattr(checks.hf_posenc, "patch", lambda model, encoding: model)
    verdict = reach.judge("bert")
    assert verdict.checks["order gone"] == checks.FAILED and not verdict.verified


def test_the_pages_quote_the_result():
    headline, *lines = KEPT.read_text().splitlines()
    assert all(headline in page.read_text() for page in (ROOT / "README.md", ROOT / "docs" / "hosts.md"))
    assert not any("FAILED" in line or "crashed" in line for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_kept_result_is_what_runs_now(tmp_path):
    page = tmp_path / "reach.txt"
    command = [sys.executable, ROOT / "scripts" / "reach.py", "--output_file", page]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert page.read_text() == KEPT.read_text()
