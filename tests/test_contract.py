"""Properties of every model with every encoding. Each model is patched once, and then all checks run on it.

`make test` runs each encoding on one model. It also runs each model that differs from those before it with all mechanisms at
once, and some checks with one or two single mechanisms. `make test-all` runs all pairs, and adds slow checks on the pairs of
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
from models import (
    ALL_HOSTS,
    ALL_WAYS,
    AUDIO_HOSTS,
    CONFIGURED,
    GRIDS,
    HOSTS,
    PAIR_HOSTS,
    ROTARY_HOSTS,
    VARIANTS,
    VISION_HOSTS,
    suits,
)

WAYS = ("sinusoidal", "rope", "alibi", "shaw", "relative")
ALIKE = {*[*ROTARY_HOSTS][7:], *[*PAIR_HOSTS][7:], *[*VISION_HOSTS][4:], *[*AUDIO_HOSTS][2:]}
ALIKE |= {"xlm-roberta", "camembert", "data2vec-text", "ernie", "rembert", "nllb-moe", "blenderbot"}
"""Models that are built like another model in these lists, in the last line like RoBERTa, BERT, M2M-100, and BART."""

SIMILAR = {"counter", "normalized", "fourier", "sinusoidal+alibi"}
SIMILAR |= {"fope", "xpos", "rope, part", "rope, yarn"}
SIMILAR |= {"kerple", "kerple, power, per layer", "t5", "alibi, learned, per layer", "alibi, one side, learned"}
SIMILAR |= {"relative_key_query", "deberta", "transformer_xl", "tupe, class token"}
SIMILAR |= {"deberta, shared", "cope, shared", "fox, shared", "transformer_xl, shared", "learned+shaw"}
"""Encodings with the same mechanisms as another one, such as `sinusoidal`, `rope, linear`, `relative`, `shaw`, and ALL_WAYS."""


def chosen():
    """The pairs of `make test`: each encoding on one model, and some encodings on each model that differs from those before
    it. These are a composition of all mechanisms, and single mechanisms in turn: one for text models, of which there are many,
    and two for others.
    """
    found = {}
    for turn, encoding in enumerate(VARIANTS):
        hosts = [host for host in ("bert", "gpt2", "llama") if suits(host, encoding)]
        found[hosts[turn % len(hosts)], encoding] = None
    for turn, host in enumerate(host for host in ALL_HOSTS if host not in ALIKE):
        others = [] if host in (HOSTS | ROTARY_HOSTS) else [(host, WAYS[(turn + 2) % 5])]
        found |= dict.fromkeys([(host, ALL_WAYS), (host, WAYS[turn % 5]), *others])
    decoders = [name for name in CONFIGURED if not name.startswith(("rope_2d", "tupe", "alibi, one side"))]
    found |= {(("gpt2", "llama")[turn % 2], name): None for turn, name in enumerate(decoders)}
    found |= dict.fromkeys([("bert", "tupe, class token"), ("bert", "alibi, one side, learned"), ("bert", "learned")])
    return found | dict.fromkeys([("vit", name) for name in (*GRIDS, "rope_2d, mixed", "sinusoidal_2d+alibi")])


QUICK = chosen()
ONCE = [(host, encoding) for host, encoding in QUICK if encoding not in WAYS or host in ("bert", "gpt2", "llama")]
"""Each encoding on one model, and each model with all mechanisms at once."""
PAIRS = [(host, encoding) for host in ALL_HOSTS for encoding in VARIANTS if suits(host, encoding)]
PAIRS = sorted(dict.fromkeys([*PAIRS, *QUICK]), key=lambda pair: [*ALL_HOSTS].index(pair[0]))


def parameters(pairs=PAIRS):
    for host, encoding in pairs:
        it = Subject(host, encoding)
        for name, check in load().items():
            if ((host, encoding) in QUICK or not check.few) and check.applies_to(it):
                quick = (host, encoding) in QUICK and not check.slow
                quick = quick and not (check.once and (host, encoding) not in ONCE)
                quick = quick and not (check.by_mechanism and encoding in SIMILAR)
                marks = [] if quick else [pytest.mark.slow]
                yield pytest.param(host, encoding, name, marks=[*marks, *getattr(check.run, "pytestmark", [])])


@pytest.mark.filterwarnings(  # the last one of a model's code
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore:.*does not support setting",
    "ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function at 'fsdp.py",
)
def test_contract(host, encoding, name):
    load()[name].run(Subject(host, encoding))


def pytest_generate_tests(metafunc):
    """Parametrize test_contract. `make test` doesn't collect the others, which are more than ten times as many."""
    if metafunc.function is test_contract:
        slow = metafunc.config.option.markexpr != "not slow"
        found = parameters() if slow else parameters([pair for pair in PAIRS if pair in QUICK])
        run = [each for each in found if slow or "slow" not in [mark.name for mark in each.marks]]
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
        for pair in PAIRS:
            if (pair in ONCE) if host is None else (pair[0] == host and pair not in ONCE):
                save(Subject(*pair), folder / " ".join(pair))
        return json.loads(run_python("import sys, reload_worker; reload_worker.main(sys.argv[1])", folder).splitlines()[-1])

    return lambda host, encoding: found(None if (host, encoding) in ONCE else host)[f"{host} {encoding}"]


@torch.no_grad()
def save(it, path):
    model, base = it.model, it.model.base_model
    model.save_pretrained(path / "head")
    bare = it.kind in AUTO and base is not model
    if bare:
        base.save_pretrained(path / "bare")
    expected = {
        "auto": AUTO.get(it.kind, "AutoModel"),
        "other": "AutoModelForTokenClassification" if it.name in HOSTS else None,
        "inputs": it.inputs(),
        "head": it.plain(model),
        "bare": base(**it.inputs())[0] if bare else None,
        "half": it.twin().to(torch.bfloat16)(**it.half_inputs())[0],
        "stock": it.plain(it.stock),
        "experts": getattr(it.stock.config, "_experts_implementation", None),
    }
    torch.save(expected, path / "expected.pt")


@pytest.mark.parametrize(
    ("host", "encoding"), [pytest.param(*pair, marks=[] if pair in ONCE else pytest.mark.slow) for pair in PAIRS]
)
def test_save_and_reload(host, encoding, reloaded):
    """A new process reloads the model bare, with a head, from head to bare, from bare to another head, in bf16,
    and unpatched.
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


def test_every_host_is_checked():
    assert {*ALL_HOSTS} == {host for host, *_ in (each.values for each in parameters())}
