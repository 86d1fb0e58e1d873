"""experiments/after_conversion.py: paired runs, resumption, and the differences in the record."""

import json

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from experiments import after_conversion as experiment
from experiments.after_conversion import DISTILLED, ORIGINAL, UNCHANGED, WITHOUT_DROPOUT, Example, LabeledSet, Run
from hf_posenc.evaluation import records

SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30522)


@pytest.fixture
def data():
    """Two classes with one word each, and three pages."""
    examples = [Example(("good film", "bad film")[i % 2], i % 2, f"page {i % 3}") for i in range(64)]
    return LabeledSet(2, 8, examples, examples[:18])


def tiny(seed=0):
    torch.manual_seed(seed)
    return BertForSequenceClassification(BertConfig(**SIZES, num_labels=2))


def test_runs_of_a_seed_see_the_same_batches(data):
    first, second, other = (experiment.in_order(data.training, seed) for seed in (0, 0, 1))
    batches = [next(first) for _ in range(9)]
    assert batches == [next(second) for _ in range(9)] != [next(other) for _ in range(9)]
    assert sorted(sum(batches[:4], [])) == sorted(data.training)


def test_fine_tuning_learns_and_repeats(data):
    found = [list(experiment.fine_tune(tiny(), data, (1, 5), seed=0)) for _ in range(2)]
    np.testing.assert_array_equal(*found)
    assert [each.shape for each in found[0]] == [(18,), (18,)]


def test_differences_are_paired_by_seed_and_by_change(data):
    right, wrong = np.ones(18, bool), np.zeros(18, bool)
    answers = {
        (ORIGINAL, UNCHANGED, 0): right,
        (ORIGINAL, UNCHANGED, 1): wrong,
        (DISTILLED, UNCHANGED, 0): wrong,
        (ORIGINAL, WITHOUT_DROPOUT, 0): wrong,
        (DISTILLED, WITHOUT_DROPOUT, 0): right,
    }
    runs = {Run("reviews", *key, ()).key: {"right": {"100": experiment.packed(each)}} for key, each in answers.items()}
    rows = {(row["model"], row["change"]): row for row in experiment.rows_of({"runs": runs}, {"reviews": data})}
    assert rows[ORIGINAL, UNCHANGED]["accuracy"] == 0.5 and rows[ORIGINAL, UNCHANGED]["seeds"] == [0, 1]
    assert rows[DISTILLED, UNCHANGED]["difference"] == -1 and rows[DISTILLED, UNCHANGED]["seeds"] == [0]
    assert rows[DISTILLED, WITHOUT_DROPOUT]["by_seed"] == [1]


def test_a_killed_experiment_resumes(data, tmp_path, monkeypatch):
    """Finished runs are in the record with a table and a figure, and are not run again."""
    runs = [Run(name, model, UNCHANGED, 0, (1,)) for name in experiment.TOKENS for model in (ORIGINAL, experiment.CALIBRATED)]
    done, limit = [], 2

    def classifier(run, classes, output):
        if len(done) == limit:
            raise KeyboardInterrupt
        done.append(run)
        return tiny()

    for name, value in {
        "labeled_set": lambda name, folder: data,
        "make_models": lambda output: None,
        "planned": lambda curve: runs,
        "classifier": classifier,
        "stability_of": lambda name, output: {"cosine": [1.0], "noise": [0.0]},
    }.items():
        monkeypatch.setattr(experiment, name, value)
    arguments = ["--pages", str(tmp_path), "--output_dir", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        experiment.main(arguments)
    assert len(records.read(tmp_path / "after_conversion.json")["runs"]) == 2
    limit = 4
    experiment.main(arguments)
    assert done == runs and len(json.loads((tmp_path / "after_conversion.json").read_text())["rows"]) == 4
    assert "calibrated" in (tmp_path / "after_conversion.txt").read_text() and (tmp_path / "after_conversion.png").exists()
    monkeypatch.setattr(experiment, "labeled_set", lambda name, folder: LabeledSet(2, 8, data.training, data.evaluation[1:]))
    with pytest.raises(SystemExit):
        experiment.main(arguments)
