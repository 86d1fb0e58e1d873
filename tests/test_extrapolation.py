"""The tasks of studies, runs that differ only in the encoding, and resumed studies."""

import io
import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from conftest import ROOT
from hf_posenc import compare
from hf_posenc.evaluation import records
from hf_posenc.studies import models, runs, study, tables, tasks, texts
from hf_posenc.studies.models import Sizes
from hf_posenc.studies.record import Part, as_record
from hf_posenc.studies.results import Results
from hf_posenc.studies.runs import Setup, Training

TINY = ["--hidden_size", "16", "--num_hidden_layers", "1", "--num_attention_heads", "2", "--intermediate_size", "16"]
QUICK = [*TINY, "--models", "llama", "--tasks", "copy", "--length", "3", "--steps", "2", "--batch_size", "2"]
SMALL = Setup(sizes=Sizes(16, 1, 2, 16), test_rows=4)


def answer_of(input_ids, labels):
    return [[int(token) for token in row if token != tasks.IGNORED] for row in labels]


def test_questions_and_answers_by_hand():
    symbols = torch.tensor([[3, 1, 2]])
    begin, then, end = 26, 27, 28
    input_ids, labels = tasks.as_copied(symbols)
    assert input_ids.tolist() == [[begin, 3, 1, 2, then, 3, 1, 2, end]]
    assert labels.tolist() == [[-100] * 5 + [3, 1, 2, end]]
    assert answer_of(*tasks.as_reversed(symbols)) == [[2, 1, 3, end]]
    # 97 + 5 = 102 and 99 + 99 = 198. The last digits come first, and the digits of both numbers alternate.
    input_ids, labels = tasks.as_sum(torch.tensor([[7, 9], [9, 9]]), torch.tensor([[5, 0], [9, 9]]))
    assert input_ids[0].tolist() == [10, 7, 5, 9, 0, 11, 2, 0, 1, 12]
    assert answer_of(input_ids, labels) == [[2, 0, 1, 12], [8, 9, 1, 12]]


def test_drawn_sums_are_right():
    input_ids, labels = tasks.TASKS["addition"].test(12, 50)

    def number(digits):
        return int("".join(str(int(digit)) for digit in reversed(digits)))

    for row, wanted in zip(input_ids.tolist(), answer_of(input_ids, labels), strict=True):
        assert number(row[1:25:2]) + number(row[2:25:2]) == number(wanted[:-1])
    assert len({tuple(row) for row in input_ids.tolist()}) == 50


def test_no_sum_is_both_learned_and_tested():
    """Two digits have only 10,000 questions, fewer than a study draws."""
    task, generator = tasks.TASKS["addition"], torch.Generator().manual_seed(0)
    for length in (1, 2):
        tested = {tuple(row) for row in task.test(length, 500)[0].tolist()}
        drawn = {tuple(row) for row in task.rows(length, 20_000, generator)[0].tolist()}
        assert not tested & drawn and len(tested) >= 10 and len(drawn) > 0.75 * 100**length
    # All digits occur at all places of questions and answers, except that a carry is 0 or 1.
    assert [len(set(digits)) for digits in zip(*tested, strict=True)] == [1, 10, 10, 10, 10, 1, 10, 10, 2, 1]


@pytest.mark.parametrize("name", tasks.BUILT_IN)
def test_rows_of_a_task(name):
    task = texts.task(tasks.TASKS[name])
    tasks.check(name, task, [task.length])
    for length in (task.length, 8 * task.length):
        input_ids, labels = task.test(length, 3)
        assert input_ids.shape[1] == task.tokens(length) and input_ids.max() < task.vocabulary
        if task.head == tasks.CAUSAL:
            assert labels[labels != tasks.IGNORED].equal(input_ids[labels != tasks.IGNORED])
        assert task.test(length, 3)[0].equal(input_ids)
    generator = torch.Generator().manual_seed(0)
    drawn = [task.train(task.length, 5, generator)[0] for _ in range(60)]
    lengths = {task.length} if task.texts else {task.tokens(n) for n in range(task.shortest, task.length + 1)}
    assert {rows.shape[1] for rows in drawn} == lengths


def test_texts_are_held_out():
    trained, tested = (bytes(text.tolist()).decode(errors="ignore") for text in (texts.of_bytes().train, texts.of_bytes().test))
    paragraphs = [each.strip() for each in tested.split("\n\n")][:-1]  # the last one is truncated
    assert len(paragraphs) > 30 and not {*paragraphs} & {each.strip() for each in trained.split("\n\n")}
    pieces, labels = texts.task(tasks.TASKS["clm"]).test(64, 0)
    assert bytes(pieces.flatten().tolist()).decode(errors="ignore") == tested and (labels[:, 0] == tasks.IGNORED).all()


def test_a_paragraph_that_is_tested_is_no_training_text(monkeypatch):
    topics = {name: f"{name} alone\n\nshared by {'ef' if name in 'ef' else name}" for name in "abcdefgh"}
    monkeypatch.setattr(texts.pydoc_data.topics, "topics", topics)
    trained, tested = texts.topics()
    assert tested == "e alone\n\nshared by ef"
    assert "f alone" in trained and "shared by f" not in trained and "shared by ef" not in trained and "shared by g" in trained


def test_a_score_is_of_answers_alone():
    class Fixed(torch.nn.Module):
        """Predicts the tokens in `wanted` for any input."""

        def forward(self, input_ids, use_cache):
            logits = torch.zeros(*input_ids.shape, 29)
            logits[:, :-1].scatter_(2, wanted[: len(input_ids), 1:, None], 50.0)
            return type("Output", (), {"logits": logits})

    input_ids, labels = tasks.as_copied(torch.tensor([[3, 1, 2], [4, 5, 6]]))
    wanted = input_ids.clone()
    wanted[:, 1:5] = 0  # wrong in the question, which doesn't count
    assert runs.measured(Fixed(), input_ids, labels, tasks.TASKS["copy"]) == {
        "exact": 1.0,
        "tokens": 1.0,
        "loss": pytest.approx(0.0, abs=1e-6),
    }
    wanted[1, 6] = 0
    found = runs.measured(Fixed(), input_ids, labels, tasks.TASKS["copy"])
    assert found["exact"] == 0.5 and found["tokens"] == 7 / 8 and found["loss"] == pytest.approx(50 / 8)


def test_training_lowers_the_loss_and_tables_reach_the_longest_test():
    record = runs.run(SMALL, Training(3, 60, 8), "copy", models.encoding("learned"), seed=0)
    assert record["max_length"] == 2 * 24 + 3 and [*record["scores"]] == ["3", "4", "6", "12", "24"]
    assert record["losses"][-1] < 0.9 * record["losses"][0]
    assert runs.run(SMALL, Training(3, 1, 8), "copy", models.encoding("alibi"), seed=0)["max_length"] is None


def outputs(folder):
    """The files of a study, without times."""
    kept = {file.name: records.read(file) for file in sorted((folder / "llama" / "runs").iterdir())}
    for record in kept.values():
        del record["cpu_seconds"]
    whole = records.read(folder / "compare.json")
    del whole["models"]["llama"]["runs"]
    return kept, whole


def test_a_run_that_fails_is_told_and_tried_again(tmp_path, monkeypatch):
    run = study.run

    def failing(setup, training, task, encoding, seed, save_to):
        if encoding.label == "t5":
            raise RuntimeError("out of luck")
        return run(setup, training, task, encoding, seed, save_to)

    monkeypatch.setattr(study, "run", failing)
    arguments = [*QUICK, "--encodings", "none", "t5", "--seeds", "0", "--output_dir", str(tmp_path)]
    with pytest.raises(SystemExit, match="copy, t5, seed 0: RuntimeError: out of luck"):
        compare.main(arguments)
    assert {row["encoding"] for row in records.read(tmp_path / "compare.json")["table"]} == {"none"}
    monkeypatch.setattr(study, "run", run)
    compare.main(arguments)
    assert {row["encoding"] for row in records.read(tmp_path / "compare.json")["table"]} == {"none", "t5"}


def test_labels_tell_encodings_apart():
    made = [
        models.encoding(each) for each in ("shaw", "relative_key_query", "nope", {"type": "rope", "theta": 5.0}, "rope+alibi")
    ]
    assert [each.label for each in made] == ["shaw", "relative_key_query", "none", "rope theta=5.0", "rope+alibi"]
    assert len({each.file_name for each in made}) == 5 and not any(set('/ "{') & {*each.file_name} for each in made)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (["--length", "0"], "'0'"),
        (["--steps", "lm=4"], "'lm=4'.*copy"),
        (["--tasks", "copy", "copy"], "Give each once"),
        (["--hidden_size", "30"], "llama can't be created with .*hidden_size=30"),
        (["--seeds", "-1"], "'-1'|expected"),
        (["--encodings", "rope", "rotary"], "rope is there already"),
        (["--encodings", "robe"], "did you mean 'rope'"),
        (["--import", "no_such_module"], "no_such_module"),
    ],
)
def test_wrong_flags(wrong, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        compare.main([*QUICK, "--encodings", "none", *wrong, "--output_dir", str(tmp_path)])
    assert re.search(message, f"{stopped.value} {capsys.readouterr().err}")


def study_by_hand(scores):
    """Records of {task: {label: {length: values over seeds}}}. A value is both exact match and token accuracy,
    or a perplexity.
    """
    made = []
    for task, by_label in scores.items():
        for label, by_length in by_label.items():
            for seed in range(3):
                values = {str(length): each[seed] for length, each in by_length.items()}
                measured = {
                    length: {"loss": math.log(value) if value < math.inf else None}
                    if task == "lm"
                    else {"exact": value, "tokens": value, "loss": 1.0}
                    for length, value in values.items()
                }
                about = {"task": task, "encoding": label, "seed": seed, "settings": {"length": min(by_length)}}
                made.append(about | {"max_length": 99 if label == "learned" else None, "parameters": 1, "scores": measured})
    return Results(made)


def part_of(results):
    """The part of a study that was trained on 4 symbols and tested on 8."""
    setup = Setup(multiples=(1.0, 2.0))
    return Part(study.Study(setup, {"copy": Training(4, 1, 1)}, (), {}, (0, 1, 2)), results)


def test_means_and_intervals_by_hand():
    results = study_by_hand({"copy": {"t5": {4: [0.1, 0.2, 0.6]}}, "lm": {"t5": {4: [2.0, 4.0, math.inf]}}})
    mean = results.mean("copy", "t5", 4, "exact")
    # Standard deviation √0.07, Student's t of two degrees of freedom 4.303: 4.303 · √(0.07 / 3) = 0.657.
    assert mean.mean == pytest.approx(0.3) and mean.half == pytest.approx(0.6573, abs=1e-4) and mean.shown() == "0.30 ± 0.66"
    infinite = results.mean("lm", "t5", 4, "perplexity")
    assert infinite.mean == math.inf and infinite.half is None and infinite.shown() == "inf"


def test_runs_that_diverge_are_marked():
    """NaN outputs count as wrong answers, whatever the first token is. The table marks the runs."""

    class Ruined(torch.nn.Module):
        def forward(self, input_ids, use_cache=None):
            return SimpleNamespace(logits=torch.full((*input_ids.shape, 5), math.nan))

    ids = torch.zeros(3, 4, dtype=torch.long)
    assert runs.measured(Ruined(), ids, ids, tasks.TASKS["copy"]) == {"exact": 0.0, "tokens": 0.0, "loss": None}
    made = study_by_hand({"copy": {label: {4: [0.1, 0.2, 0.6], 8: [0, 0, 0]} for label in ("t5", "rope")}})
    made.records["copy", "t5", 1]["scores"]["4"]["loss"] = None
    made.records["copy", "t5", 2]["losses"] = [1.0, None]
    assert (made.diverged("copy", "t5"), made.diverged("copy", "rope")) == (2, 0)
    text = io.StringIO()
    for run in made.records.values():
        run.update(cpu_seconds=0, digests={})
    record = json.loads(records.as_text(as_record([part_of(made)], {}, {}, None)))
    Console(file=text, width=140).print(tables.for_terminal(record)[0])
    shown = " ".join(text.getvalue().split())
    assert "t5 (2 runs diverged)" in shown and "not corrected for multiple comparisons" in shown


@pytest.mark.slow
def test_processes_change_nothing(tmp_path, monkeypatch):
    """Custom encodings are known in each process."""
    monkeypatch.chdir(tmp_path)
    own = "import hf_posenc\n\n\nclass Near(hf_posenc.PositionEncoding, type='near'):\n    def distance_bias(self, distance):\n"
    (tmp_path / "my_near.py").write_text(f"{own}        return -0.5 * distance.abs()[None].float()\n")
    arguments = [*QUICK, "--import", "my_near", "--encodings", "near", "t5", "--seeds", "0", "1"]
    for count in ("1", "2"):
        command = [sys.executable, "-m", "hf_posenc.compare", *arguments, "--processes", count, "--output_dir", count]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert outputs(tmp_path / "1") == outputs(tmp_path / "2")
