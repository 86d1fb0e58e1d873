"""`tests/attack.py`: what is broken is found, and nothing is found of what isn't."""

import importlib
import tempfile
import time
import warnings

import pytest
import torch

import attack
import hf_posenc
from attacks.cases import CRASH, EQUAL, FAULTS, HANG, REFUSED, SKIPPED, STOCK_TOO, WRONG, Case, Settings, judge, quiet
from attacks.cases import end_elsewhere as end
from conftest import ROOT, run_python


class Broken(hf_posenc.PositionEncoding, type="attack-broken"):
    """Counts keys where they lie, padding included."""

    def score_bias(self, query, key, context):
        return (query @ key.mT).tanh() * torch.arange(key.shape[2])


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_broken_encoding_is_found():
    only = "gaps/left-padded prompt, then token by token/llama/"
    verdicts = attack.judged("gaps", Settings(("attack-broken", "alibi")), only=only)
    assert {verdict.encoding: verdict.outcome for verdict in verdicts} == {"attack-broken": WRONG, "alibi": EQUAL}
    page = attack.report(verdicts, Settings(("attack-broken", "alibi")))
    assert page.startswith("2 cases: 0 skipped, 1 equal, 0 refused, 0 stock too, 1 WRONG, 0 CRASH, 0 HANG\n")
    assert f"WRONG  {only}attack-broken: differs by" in page


def test_a_broken_host_is_found(monkeypatch):
    """A model that forgets its cache."""
    from attacks import decoding

    forgetful = decoding.generator("llama")
    monkeypatch.setattr(decoding.drawn(hf_posenc.patch(forgetful, "rope")).__class__, "forward", without_cache)
    (verdict,) = attack.judged("decoding", Settings(("rope",)), only="decoding/token by token/llama/")
    assert verdict.outcome == WRONG


def without_cache(self, *args, past_key_values=None, **kwargs):
    output = type(self).original_class.forward(self, *args, **kwargs)
    output.past_key_values = past_key_values
    return output


def differs():
    yield torch.zeros(2), torch.ones(2)


def refuses():
    yield hf_posenc.PositionEmbedding("alibi", hidden_size=8), None


def crashes():
    yield {}["key"], None


OUTCOMES = {
    "equal": (lambda: iter([(torch.ones(2), torch.zeros(2), torch.ones(2))]), None, EQUAL),
    "not finite": (lambda: iter([(torch.full((2,), torch.nan), torch.ones(2))]), None, WRONG),
    "another shape": (lambda: iter([(torch.ones(2, 1), torch.ones(2))]), None, WRONG),
    "nothing to compare": (lambda: iter(()), None, SKIPPED),
    "differs": (differs, None, WRONG),
    "differs, and so does stock": (differs, lambda: False, STOCK_TOO),
    "refuses": (refuses, None, REFUSED),
    "an error without a remedy": (lambda: iter([int("x")]), None, CRASH),
    "crashes": (crashes, None, CRASH),
    "crashes, and so does stock": (crashes, lambda: {}["key"], STOCK_TOO),
    "crashes, and stock otherwise": (crashes, lambda: int("x"), CRASH),
    "hangs": (lambda: time.sleep(5) or iter(()), None, HANG),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_outcomes(name):
    run, stock, outcome = OUTCOMES[name]
    assert judge("a", Case("b", "c", "d", run, stock=stock, limit=0.2 if outcome == HANG else 60)).outcome == outcome


@pytest.mark.slow
def test_the_exit_status_tells_of_faults():
    code = "import sys, runpy; sys.argv = ['attack.py', *sys.argv[1:]]; sys.path.insert(0, {!r})\n" + (
        "try: runpy.run_path({!r}, run_name='__main__')\nexcept SystemExit as end: print('status', int(end.code or 0))"
    )
    only = ("--attacks", "gaps", "--encodings", "none", "--only", "gaps/ids that jump/gpt2/", "--processes", "1")
    assert "status 0" in run_python(code.format(str(ROOT / "tests"), str(ROOT / "tests" / "attack.py")), *only)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", attack.FAMILIES)
def test_a_slice_of_each_family(family):
    settings = Settings(("itself", "rope", "alibi", "learned+shaw"), kills=18)
    with warnings.catch_warnings():
        quiet()
        cases = list(importlib.import_module(f"attacks.{family}").cases(settings))
        try:
            verdicts = [judge(family, case) for case in cases[:: max(1, len(cases) // 24)]]
        finally:
            end()
    assert any(verdict.outcome == EQUAL for verdict in verdicts)
    assert not [verdict for verdict in verdicts if verdict.outcome in FAULTS]
