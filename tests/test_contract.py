"""Properties of models with encodings. Each model is patched once, and then all checks run on it.

`make test` runs each encoding on one model, and each model of another structure with several mechanisms. `make test-all` runs
each model with each mechanism, and each encoding on one model of each kind (see `cover.py`), and slow checks on the pairs of
`make test`.
"""

import functools
import json
import re

import pytest
import torch

import contract_worker
from checks.registry import Subject, load
from closeness import assert_close
from conftest import run_python
from cover import cover, quick, six
from models import slow

COVER, QUICK = cover(), {*quick()}


def parameters():
    for pair in COVER:
        it = Subject(*pair)
        for name, check in load().items():
            if pair in on(check.on) and check.applies_to(it):
                slow = check.slow or pair not in QUICK
                yield pytest.param(*pair, name, marks=[pytest.mark.slow] * slow + getattr(check.run, "pytestmark", []))


@functools.cache
def on(pairs):
    return {*pairs()}


@pytest.mark.filterwarnings(  # the last one of a model's code
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore:.*does not support setting",
    "ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function at 'fsdp.py",
)
def test_contract(host, encoding, name):
    load()[name].run(Subject(host, encoding))


def pytest_generate_tests(metafunc):
    """Parametrize test_contract. `make test` doesn't collect slow cases, which are five times as many."""
    if metafunc.function is test_contract:
        slow = metafunc.config.option.markexpr != "not slow"
        run = [each for each in parameters() if slow or "slow" not in [mark.name for mark in each.marks]]
        metafunc.parametrize(("host", "encoding", "name"), run)


AUTO = {"encoder": "AutoModelForMaskedLM", "decoder": "AutoModelForCausalLM", "encoder-decoder": "AutoModelForSeq2SeqLM"}


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    """Model and encoding -> the errors that a new process finds after reloading.

    One process checks the pairs of `make test`. Another process for each model checks the others.
    """

    @functools.cache
    def found(host):
        folder = tmp_path_factory.mktemp("reloaded")
        for pair in COVER:
            if (pair in QUICK) if host is None else (pair[0] == host and pair not in QUICK):
                save(Subject(*pair), folder / " ".join(pair))
        return json.loads(run_python("import sys, reload_worker; reload_worker.main(sys.argv[1])", folder).splitlines()[-1])

    return lambda host, encoding: found(None if (host, encoding) in QUICK else host)[f"{host} {encoding}"]


@torch.no_grad()
def save(it, path):
    model, base = it.model, it.model.base_model
    model.save_pretrained(path / "head")
    thorough = (it.name, it.encoding) in six()
    bare = thorough and it.kind in AUTO and base is not model
    if bare:
        base.save_pretrained(path / "bare")
    expected = {
        "auto": AUTO.get(it.kind, "AutoModel"),
        "other": "AutoModelForTokenClassification" if bare and it.kind == "encoder" else None,
        "inputs": it.inputs(),
        "head": it.plain(model),
        "bare": base(**it.inputs())[0] if bare else None,
        "half": it.twin().to(torch.bfloat16)(**it.half_inputs())[0] if thorough else None,
        "stock": it.plain(it.stock),
        "experts": getattr(it.stock.config, "_experts_implementation", None),
    }
    torch.save(expected, path / "expected.pt")


@pytest.mark.parametrize(("host", "encoding"), [pair if pair in QUICK else slow(*pair) for pair in COVER])
def test_save_and_reload(host, encoding, reloaded):
    """A new process reloads the model and unpatches it, and one model of each kind bare, from head to bare, from bare to
    another head, and in bf16.
    """
    assert reloaded(host, encoding) == []


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory, launch):
    """The results of two processes."""
    folder = tmp_path_factory.mktemp("two")
    codes, said = launch("contract_worker", folder, processes=2)
    assert codes == [0, 0], said[-4000:]
    return torch.load(folder / "found.pt", weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", contract_worker.ENCODINGS)
@pytest.mark.parametrize("host", contract_worker.HOSTS)
@pytest.mark.parametrize("name", contract_worker.WAYS)
def test_two_processes(name, host, encoding, in_two_processes):
    it, found = Subject(host, encoding), in_two_processes[name, host, encoding]
    if name == "tensor parallel" and not it.model.supports_tp_plan:
        assert re.search("ValueError: .*has no `tp_plan`", found)  # an error of Transformers that original models raise also
        return
    if (name, encoding) == ("tensor parallel", "alibi"):
        assert re.search("ValueError: .*for 4 heads, but this attention has 2, .*tensor-parallel plan.*FSDP", found)
        return
    assert not isinstance(found, str), found
    model = it.twin()
    output, gradient = contract_worker.outputs_and_gradient(it, model, model)
    assert_close(found[0], output)
    if name != "tensor parallel":
        assert_close(found[1], gradient)
