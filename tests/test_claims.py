"""experiments/claims.py and counting.py: programs and their values, and verdicts from records."""

import re

import pytest
import torch
import yaml

from conftest import ROOT
from experiments import claims, counting
from hf_posenc.evaluation import records
from hf_posenc.studies import IGNORED, tasks


@pytest.fixture(autouse=True)
def registered():
    tasks.TASKS.pop("counting", None)
    yield
    tasks.TASKS.pop("counting", None)


def test_the_answer_is_the_value_that_the_program_prints():
    """A plain interpreter of the program gets the same value."""
    input_ids, labels = counting.rows(40, 200, torch.Generator().manual_seed(0))
    kinds, answers = set(), []
    for row, wanted in zip(input_ids.tolist(), labels.tolist(), strict=True):
        values = dict.fromkeys(range(counting.VARIABLES), 0)
        *program, printed, answer = row
        for token in program:
            kind, variable = divmod(token, counting.VARIABLES)
            kinds.add(kind)
            if kind < 2:
                values[variable] = 0 if kind == 0 else values[variable] + 1
        assert answer == counting.VALUE + values[printed - counting.PRINT]
        assert wanted == [IGNORED] * 41 + [answer] and max(values.values()) <= counting.MOST
        answers.append(answer - counting.VALUE)
    assert kinds == {0, 1, 2} and {*range(5)} <= {*answers}


def record_of(**scores):
    """Rows of compare.json from encoding -> multiple of L -> value of each seed."""
    rows = [
        {"task": "clm", "metric": "perplexity", "encoding": encoding, "multiple": multiple, "seed": seed, "value": value}
        for encoding, by_multiple in scores.items()
        for multiple, values in by_multiple.items()
        for seed, value in enumerate(values)
    ]
    return {"rows": rows}


def verdict(record, claim):
    return claims.judge(record, claim)["verdict"]


def test_verdicts():
    record = record_of(
        alibi={1.0: [5.0, 5.1, 5.2], 8.0: [5.0, 5.1, 5.25]},
        rope={1.0: [5.0, 5.0, 5.0], 8.0: [9.0, 20.0, 12.0]},
        wild={1.0: [5.0, 5.0, 5.0], 8.0: [3.0, 20.0, 12.0]},
        broken={1.0: [5.0, 5.0, 5.0], 8.0: [None, 5.0, 5.0]},
        low={1.0: [4.0, 4.0, 4.0]},
    )
    assert verdict(record, claims.flat("alibi", 8)) == "reproduced"
    assert verdict(record, claims.grows("alibi", 8)) == "contradicted"
    (below,) = claims.better("clm", "perplexity", (8,), "alibi", ("wild",))
    assert verdict(record, below) == "undecided"
    (below,) = claims.better("clm", "perplexity", (1,), "alibi", ("rope",))  # 0.0, 0.1, and 0.2 above
    assert verdict(record, below) == "undecided"
    # Mean 0.1 and half width 0.248.
    assert claims.judge(record, below)["half_width"] == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)
    # Equal differences don't show how much the seeds vary.
    (below,) = claims.better("clm", "perplexity", (1,), "low", ("rope",))
    assert verdict(record, below) == "undecided" and claims.judge(record, below)["half_width"] is None
    # A run that diverged has no interval.
    assert verdict(record, claims.flat("broken", 8)) == "undecided"


def test_higher_is_better_except_for_perplexity():
    (accuracy,) = claims.better("counting", "accuracy", (1,), "cope", ("rope",))
    (perplexity,) = claims.better("clm", "perplexity", (1,), "fox", ("rope",))
    assert (accuracy.sign, perplexity.sign) == (1, -1)


@pytest.mark.parametrize("name", claims.CLAIMS)
def test_a_study_measures_its_claims(name):
    """The study of each claim trains its encodings on its tasks, and tests them at its lengths."""
    given = yaml.safe_load((claims.STUDIES / f"{name}.yaml").read_text())
    for claim in claims.CLAIMS[name][1]:
        assert claim.task in given["tasks"] and {1, claim.multiple} <= {*given["multiples"]}
        assert {claim.encoding, claim.other or claim.encoding} <= {*given["encodings"]}


@pytest.mark.parametrize("name", claims.CLAIMS)
def test_the_verdicts_that_are_kept(name):
    """They follow from the scores in the record, for all claims."""
    kept = records.read(ROOT / "scripts" / "results" / f"{name}.json")
    again = [claims.judge(kept, claim) for claim in claims.CLAIMS[name][1]]
    assert [(each["claim"], each["verdict"]) for each in kept["verdicts"]] == [
        (each["claim"], each["verdict"]) for each in again
    ]
    counts = [each["verdict"] for each in again].count("reproduced"), len(again)
    page = (ROOT / "docs" / "results" / "extrapolation.md").read_text()
    assert re.search(rf"\[{name}\].*\| {counts[0]} of {counts[1]} \|", page)
