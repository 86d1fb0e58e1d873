"""compare.py: models, tasks and their heads, equal data for all encodings, resumed studies, processes, and files."""

import json
import re
import shlex
import shutil
import sys

import pytest
import torch
import yaml
from transformers import AutoModelForMaskedLM, AutoTokenizer
from typer.main import get_command

from conftest import ROOT, run_python
from hf_posenc import cli, compare
from hf_posenc.diagnostics.figures import Sheet
from hf_posenc.evaluation import records
from hf_posenc.plots import study_curves
from hf_posenc.studies import models, runs, study, tables, tasks, texts
from hf_posenc.studies.models import Sizes
from hf_posenc.studies.record import Part, as_record
from hf_posenc.studies.results import Results
from hf_posenc.studies.runs import Setup, Training
from hf_posenc.studies.study import Study
from models import stock

SIZES = ["--hidden_size", "16", "--num_hidden_layers", "1", "--num_attention_heads", "2", "--intermediate_size", "16"]
QUICK = [*SIZES, "--length", "3", "--multiples", "1", "2", "--steps", "2", "--batch_size", "2", "--test_rows", "4"]
COPY = [*QUICK, "--models", "llama", "--tasks", "copy"]
TINY = Sizes(16, 1, 2, 16)


def test_the_label_is_the_order_of_the_markers_by_hand():
    symbols = torch.tensor([[3, 1, 2, 5], [3, 1, 2, 5]])
    begin, end, first, second = 26, 28, 29, 30
    input_ids, labels = tasks.as_order(symbols, torch.tensor([[1, 3], [2, 0]]))
    assert input_ids.tolist() == [[begin, 3, first, 2, second, end], [begin, second, 1, first, 5, end]]
    assert labels.tolist() == [1, 0]


def test_drawn_markers_stand_once_each():
    task = tasks.TASKS["classification"]
    generator = torch.Generator().manual_seed(0)
    for input_ids, labels in (task.test(9, 200), task.train(5, 200, generator)):
        for row, label in zip(input_ids.tolist(), labels.tolist(), strict=True):
            first, second = (row.index(marker) for marker in tasks.MARKERS)
            assert label == (first < second) and sum(token in tasks.MARKERS for token in row) == 2
        assert 70 < labels.sum() < 130
    assert {task.train(3, 1, generator)[0].shape[1] for _ in range(30)} == {4, 5}


def test_masked_rows():
    task, clm = (texts.task(tasks.TASKS[name]) for name in ("mlm", "clm"))
    text = clm.test(64, 0)[0].flatten()
    input_ids, labels = task.test(64, 0)
    hidden = (input_ids == texts.MASK).flatten()
    assert hidden.sum() == 1229  # 15% of 8,192
    assert input_ids.flatten().equal(text.masked_fill(hidden, texts.MASK))
    assert labels.flatten().equal(text.masked_fill(~hidden, tasks.IGNORED))
    assert (task.test(128, 0)[0] == texts.MASK).flatten().equal(hidden)  # the same positions at each length
    drawn, wanted = task.train(40, 50, torch.Generator().manual_seed(0))
    assert (drawn == texts.MASK).equal(wanted != tasks.IGNORED) and (wanted != tasks.IGNORED).sum(1).eq(6).all()
    assert len({tuple(row) for row in (drawn == texts.MASK).tolist()}) == 50
    assert (task.train(2, 9, torch.Generator().manual_seed(0))[1] != tasks.IGNORED).sum() == 9  # at least one


@pytest.mark.parametrize("name", models.MODELS)
def test_heads_of_models(name):
    """Each architecture has a model for each of its heads, with the requested sizes and without dropout."""
    for head in models.MODELS[name].heads:
        model = models.stock(name, Sizes(24, 2, 3, 40), 11, 8, 0, head)
        config = model.config
        assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (24, 2, 3)
        assert 40 in {value for module in model.modules() for value in getattr(module, "weight", torch.empty(0)).shape}
        logits = model(input_ids=torch.arange(10).view(2, 5)).logits
        assert logits.shape == ((2, 2) if head == tasks.LABELS else (2, 5, 11))
        assert all(module.p == 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))


def test_scores_of_labels_and_masked_tokens_by_hand():
    class Fixed(torch.nn.Module):
        def __init__(self, logits):
            super().__init__()
            self.logits = logits

        def forward(self, input_ids):
            return type("Output", (), {"logits": self.logits})

    rows = torch.zeros(2, 3, dtype=torch.long)
    right, wrong = [0.0, 50.0], [50.0, 0.0]
    found = runs.measured(Fixed(torch.tensor([right, wrong])), rows, torch.tensor([1, 1]), tasks.TASKS["classification"])
    assert found == {"exact": 0.5, "tokens": 0.5, "loss": pytest.approx(25.0)}
    # Masked tokens aren't shifted: the first of a row, and the last.
    labels = torch.tensor([[1, -100, -100], [-100, 1, 1]])
    logits = torch.tensor([[right, wrong, wrong], [wrong, right, wrong]])
    found = runs.measured(Fixed(logits), rows, labels, tasks.TASKS["mlm"])
    assert found == {"exact": 0.5, "tokens": pytest.approx(2 / 3), "loss": pytest.approx(50 / 3)}


def test_an_encoder_without_positions_stays_at_chance():
    """Without positions, an encoder's output is the same for each order of the symbols. With positions, it learns the order."""
    setup = Setup(model="bert", sizes=Sizes(32, 2, 2, 32), learning_rate=4e-3, multiples=(1.0,))
    accuracy = {
        name: runs.run(setup, Training(4, 70, 32), "classification", models.encoding(name), 0)["scores"]["4"]["exact"]
        for name in ("none", "rope")
    }
    assert 0.4 < accuracy["none"] < 0.6 and accuracy["rope"] > 0.9


def shorten(monkeypatch, tokens=256):
    """Truncate the text for tests."""
    texts.of_bytes.cache_clear()
    monkeypatch.setattr(texts, "TEST_TOKENS", tokens)


@pytest.fixture(autouse=True)
def whole_texts():
    yield
    for each in (texts.of_bytes, texts.of_tokenizer, texts.paragraphs):
        each.cache_clear()


def read_runs(folder):
    """The records of a study by their paths, without times."""
    found = {str(file.relative_to(folder)): records.read(file) for file in sorted(folder.glob("*/runs/*.json"))}
    for record in found.values():
        del record["cpu_seconds"]
    return found


def test_unsupported_encodings_and_the_same_data(tmp_path, capsys, monkeypatch):
    shorten(monkeypatch)
    arguments = ["--models", "bert", "llama", "--encodings", "none", "learned", "cope", "rope_2d", "--seeds", "0", "1"]
    tasks_of = ["--tasks", "mlm", "clm", "classification"]
    compare.main([*QUICK, *arguments, *tasks_of, "--length", "8", "--test_rows", "4", "--output_dir", str(tmp_path)])
    said = capsys.readouterr().err
    assert "bert has no head for clm" in said and "llama has no head for mlm" in said
    assert "bert: cope is left out: 'cope' requires causal attention" in said
    record = records.read(tmp_path / "compare.json")
    assert [*record["models"]] == ["bert", "llama"] and not record["failed"]
    bert, llama = record["models"].values()
    assert [*bert["unsupported"]] == ["cope", "rope_2d"] and [*llama["unsupported"]] == ["rope_2d"]
    scores = {(row["model"], row["task"], row["encoding"]): row for row in record["table"]}
    assert {label for model, task, label in scores if (model, task) == ("bert", "mlm")} == {"none", "learned"}
    assert {label for model, task, label in scores if (model, task) == ("llama", "clm")} == {"none", "learned", "cope"}
    assert bert["tasks_left_out"] == ["clm"] and llama["tasks_left_out"] == ["mlm"]
    assert scores["bert", "mlm", "learned"]["max_length"] == 16
    text = (tmp_path / "compare.txt").read_text()
    assert "bert, mlm, L = 8 bytes: perplexity" in text and "unsupported" in text and "requires causal attention" in text
    assert (tmp_path / "compare.png").stat().st_size > 10_000

    # All encodings of a model had the same initial weights and data rows. Other seeds and tasks had different ones.
    found = read_runs(tmp_path)
    assert len(found) == 2 * 2 * (2 + 3)
    digests = {}
    for path, each in found.items():
        digests.setdefault((path.split("/")[0], each["task"], each["seed"]), []).append(each["digests"])
    assert len(digests) == 8 and all(all(each == of[0] for each in of) for of in digests.values())
    assert len({of[0]["train"] for of in digests.values()}) == 6  # both models share the rows of classification
    assert len({of[0]["model"] for of in digests.values()}) == 8
    same = bert["digests"]["mlm"]
    assert same["0"] == digests["bert", "mlm", 0][0] != same["1"]
    with pytest.raises(SystemExit, match="mlm, seed 0: none and.*training rows"):
        wrong = [each for path, each in found.items() if path.startswith("bert/runs/mlm")]
        wrong[-2]["digests"]["train"] = "another"
        Results(sorted(wrong, key=lambda each: each["encoding"]))


def test_digests_tell_rows_and_their_order_apart():
    first, second = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[3, 4], [1, 2]])
    assert runs.digest(first) == runs.digest(first.clone()) != runs.digest(second)
    assert runs.digest(torch.tensor(1.0)) != runs.digest(torch.tensor(-1.0))
    assert runs.digest(first, second) != runs.digest(second, first)


def test_patching_leaves_the_weights_of_a_model():
    """Patching keeps the weights that a digest covers."""
    for head in (tasks.MASKED, tasks.LABELS):
        host = models.stock("bert", TINY, 9, 8, 3, head)
        before = {name: value.clone() for name, value in host.state_dict().items() if "position_embeddings" not in name}
        after = models.patched(host, models.encoding("alibi"), 3).state_dict()
        assert len(before) > 10 and all(after[name].equal(value) for name, value in before.items())


@pytest.mark.slow
def test_a_study_that_was_killed_goes_on(tmp_path, launch):
    arguments = [*COPY, "--encodings", "none", "t5", "--seeds", "0", "1", "--output_dir"]
    codes, _ = launch("compare", *arguments, tmp_path / "whole")
    assert codes == [0]
    codes, _ = launch("compare", *arguments, tmp_path / "resumed", kill=("hf_posenc.studies.study.run", 3))
    assert codes == [-9] and len(read_runs(tmp_path / "resumed")) == 2
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "resumed").glob("*/runs/*.json")}
    codes, _ = launch("compare", *arguments, tmp_path / "resumed")
    assert codes == [0] and read_runs(tmp_path / "resumed") == read_runs(tmp_path / "whole")
    assert len(read_runs(tmp_path / "resumed")) == 4
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())  # not run again


@pytest.mark.slow
def test_processes_of_accelerate_give_the_same_records(tmp_path, launch):
    """Two processes of Accelerate's launcher take runs from one list. One of the processes fails in one of its runs."""
    arguments = [*COPY, "--encodings", "none", "t5", "alibi", "--seeds", "0", "1", "--output_dir"]
    codes, _ = launch("compare", *arguments, tmp_path / "one")
    assert codes == [0]
    codes, said = launch("compare", *arguments, tmp_path / "two", processes=2)
    assert codes == [0, 0], said
    assert len(read_runs(tmp_path / "one")) == 6 and read_runs(tmp_path / "one") == read_runs(tmp_path / "two")
    one, two = (records.read(tmp_path / name / "compare.json")["rows"] for name in ("one", "two"))
    assert one == two and said.count("Mean over 2 seeds") == 1
    codes, said = launch("compare", *arguments, tmp_path / "three", "--processes", "2", processes=2)
    assert codes == [1, 1] and "Accelerate's launcher has started 2 already" in said


def test_each_process_takes_its_share(tmp_path, monkeypatch):
    planned = Study(Setup(), {"copy": Training(3, 1, 1)}, tuple(map(models.encoding, ("none", "t5", "rope"))), {}, (0, 1), "h")
    taken = []

    class State:
        num_processes, is_main_process = 2, False

        def wait_for_everyone(self):
            pass

    monkeypatch.setattr(study, "attempt", lambda *arguments: taken.append((arguments[3].label, arguments[4])) or "no luck")
    shares = []
    for State.process_index in (0, 1):
        monkeypatch.setattr(study, "process_state", State)
        failed = study.carry_out({tmp_path: planned}, 1)
        shares.append(taken.copy())
        taken.clear()
    assert shares == [[("none", 0), ("rope", 0), ("t5", 1)], [("t5", 0), ("none", 1), ("rope", 1)]]
    assert failed == dict.fromkeys(("h, copy, t5, seed 0", "h, copy, none, seed 1", "h, copy, rope, seed 1"), "no luck")
    with pytest.raises(SystemExit, match="--processes 2: Accelerate's launcher has started 2 already"):
        study.carry_out({tmp_path: planned}, 2)


def test_other_settings_are_an_error_that_names_them(tmp_path):
    arguments = [*COPY, "--encodings", "none", "--seeds", "0", "--output_dir", str(tmp_path)]
    compare.main(arguments)
    for changed, message in (
        (["--steps", "3"], "created with steps=2, and now it is 3.*restore steps, or choose another --output_dir"),
        (["--length", "4", "--batch_size", "3"], r"length=3, and now it is 4 \(batch_size differs, too\)"),
        (["--multiples", "1", "4"], r"multiples=\[1.0, 2.0\], and now it is \[1.0, 4.0\]"),
        (["--learning_rate", "llama=0.1"], "learning_rate=0.005, and now it is 0.1"),
        (["--tasks", "reverse", "--hidden_size", "32"], "hidden_size=16, and now it is 32"),
    ):
        with pytest.raises(SystemExit, match=message):
            compare.main([*arguments, *changed])
    file = next(tmp_path.glob("llama/runs/*.json"))
    before = file.read_text()
    compare.main([*arguments, "--report_only"])
    assert file.read_text() == before
    file.write_text("{")
    with pytest.raises(SystemExit, match=f"{file.name}.*--output_dir"):
        compare.main(arguments)
    file.write_text(before)
    # Additions join a study: another model, encoding, seed, and task, and other options of the same model.
    wider = '{"type": "llama", "num_key_value_heads": 1}'
    compare.main([*arguments, "--models", "llama", wider, "--encodings", "alibi", "none", "--seeds", "0", "1"])
    assert len(read_runs(tmp_path)) == 8
    assert [*records.read(tmp_path / "compare.json")["models"]] == ["llama", "llama num_key_value_heads=1"]


def test_a_file_is_its_flags(tmp_path):
    file = tmp_path / "study.yaml"
    study_of = {
        "models": ["llama", {"type": "gpt2", "hidden_size": 32}],
        "encodings": ["none", {"type": "rope", "theta": 50.0}],
        "tasks": "copy",
        "seeds": [3, 4],
        "length": {"copy": 5},
        "multiples": [1, 1.5],
        "learning_rate": {"llama": 1e-3, "gpt2": 2e-3},
        "steps": 7,
    }
    file.write_text(yaml.safe_dump(study_of))
    arguments = compare.parse_arguments([str(file), "--output_dir", "here", "--seeds", "9", *SIZES])
    assert arguments.seeds == [9] and arguments.length == {"copy": 5} and arguments.steps == {"copy": 7}
    studies, _ = compare.studies_of(arguments)
    assert [str(folder.parent) for folder in studies] == ["here"] * 2
    first, second = studies.values()
    assert [each.label for each in first.encodings] == ["none", "rope theta=50.0"]
    assert (first.label, second.label) == ("llama", "gpt2 hidden_size=32")
    assert (first.setup.learning_rate, second.setup.learning_rate) == (1e-3, 2e-3)
    assert (first.setup.sizes.hidden_size, second.setup.sizes.hidden_size) == (16, 32)
    assert first.setup.multiples == (1.0, 1.5) and first.trainings["copy"] == Training(5, 7, 32)

    for text, message in (
        ("encoding: [none]", "'encoding' isn't a key of a study .did you mean 'encodings'"),
        ("output_dir: x", "'output_dir' isn't a key of a study"),
        ("seeds: [[1]]", r"seeds is \[1\]\. Use"),
        ("[none]", "Use a mapping"),
        ("seeds: [0]\nsteps: 2\nseeds: [1]", "'seeds' occurs twice"),
        ("encodings: [{type: rope, theta: 5, theta: 6}]", "'theta' occurs twice"),
        ("encodings: [{type: rope, theta: 2024-01-01}]", "Use texts, numbers"),
        ("encodings: [none, --report_only]", "'--report_only'. Use names"),
        ("a: [", "isn't a valid study: while parsing"),
    ):
        file.write_text(text)
        with pytest.raises(SystemExit, match=message):
            compare.parse_arguments([str(file), "--output_dir", "here"])


def test_a_part_goes_before_all_in_any_order():
    for given in (["copy=7", "5"], ["5", "copy=7"]):
        arguments = compare.parse_arguments(["--output_dir", "x", "--tasks", "copy", "clm", "--length", *given])
        assert arguments.length == {"copy": 7, "clm": 5}


def test_lengths_are_not_those_of_rounded_floats():
    assert runs.test_lengths(Training(10, 1, 1), (0.7, 1.0, 1.4, 1.5, 2.3)) == [7, 10, 14, 15, 23]
    part = Part(Study(Setup(multiples=(1.4,)), {"copy": Training(10, 1, 1)}, (), {}, (0,)), Results([]))
    assert part.lengths("copy") == {1.4: 14}


def test_the_study_that_is_kept_can_be_run():
    file = str(ROOT / "experiments" / "studies" / "extrapolation.yaml")
    arguments = compare.parse_arguments([file, "--encodings", "none", "rope", "--output_dir", "x", *SIZES])
    studies, left_out = compare.studies_of(arguments)
    assert sum(len(each.runs()) for each in studies.values()) == 24 and not any(each.unsupported for each in studies.values())
    assert left_out == {"llama": []} and max(arguments.multiples) == 8


@pytest.fixture
def checkpoint(tmp_path, minilm, monkeypatch):
    """The directory of an encoder with a tokenizer. The texts are short."""
    folder = tmp_path / "my-bert"
    stock("bert", "ForMaskedLM", vocab_size=30522).save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    monkeypatch.setattr(texts, "topics", lambda: ("one two three " * 200, "two three one " * 100))
    texts.paragraphs.cache_clear()
    return folder


def test_a_checkpoint_keeps_its_weights(checkpoint, tmp_path, capsys, monkeypatch):
    seen = []
    patched = models.patched
    monkeypatch.setattr(models, "patched", lambda *of: seen.append(patched(*of)) or seen[-1])
    arguments = [*QUICK, "--models", f"checkpoint:{checkpoint}", "--tasks", "mlm", "--encodings", "none", "t5", "cope"]
    arguments += ["--seeds", "0", "--length", "6", "--output_dir", str(tmp_path / "out")]
    compare.main([*arguments, "--steps", "0"])
    own = AutoModelForMaskedLM.from_pretrained(checkpoint).state_dict()
    kept = [name for name in own if "position_embeddings" not in name and "seq_relationship" not in name]
    for model in seen[-2:]:
        assert all(model.state_dict()[name].equal(own[name]) for name in kept) and len(kept) > 20
    record = records.read(tmp_path / "out" / "compare.json")
    (own,) = record["models"].values()
    assert {row["encoding"] for row in record["table"]} == {"none", "t5"} and [*own["unsupported"]] == ["cope"]
    assert f"checkpoint:{checkpoint}, mlm, L = 6 tokens" in " ".join((tmp_path / "out" / "compare.txt").read_text().split())
    with pytest.raises(SystemExit, match="created with steps=0, and now it is 2"):
        compare.main(arguments)
    capsys.readouterr()
    compare.main([*arguments, "--steps", "0", "--tasks", "classification", "--length", "3"])
    assert re.search("lacks weights, which are initialized at random: .*classifier.bias", capsys.readouterr().err)
    # Other weights in the same directory make another model.
    model = AutoModelForMaskedLM.from_pretrained(checkpoint)
    model.bert.embeddings.word_embeddings.weight.data.neg_()
    model.save_pretrained(checkpoint)
    with pytest.raises(SystemExit, match="created with files="):
        compare.main([*arguments, "--steps", "0"])


def test_a_checkpoint_of_the_hub(checkpoint, in_the_hubs_cache, tmp_path):
    """It is loaded as everywhere in Transformers, and another commit is another setting."""
    cached = tmp_path / "cache" / "models--somebody--base"
    (cached / "refs").mkdir()
    command = [*QUICK, "--models", f"checkpoint:{in_the_hubs_cache}", "--tasks", "mlm", "--encodings", "t5", "--seeds", "0"]
    command += ["--length", "6", "--steps", "0", "--output_dir", str(tmp_path / "out")]
    for commit in ("1" * 40, "2" * 40):
        (cached / "refs" / "main").write_text(commit)
        shutil.copytree(checkpoint, cached / "snapshots" / commit)
    with pytest.raises(SystemExit, match="created with files="):
        for commit in ("1" * 40, "2" * 40):
            (cached / "refs" / "main").write_text(commit)
            compare.main(command)
    (row, *_) = records.read(tmp_path / "out" / "compare.json")["table"]
    assert row["model"] == f"checkpoint:{in_the_hubs_cache}"


def test_importing_compare_changes_no_setting():
    code = """
import os
for name in ("HF_HUB_OFFLINE", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
    os.environ.pop(name, None)
before = {**os.environ}
import hf_posenc.compare
print({*os.environ.items()} - {*before.items()})
"""
    assert run_python(code, fresh=True).strip() == "set()"


def test_tasks_in_the_tokens_of_a_checkpoint(minilm):
    mlm, clm, mapped, order = (texts.task(tasks.TASKS[name], minilm) for name in ("mlm", "clm", "copy", "classification"))
    text = texts.of_tokenizer(minilm)
    input_ids, labels = mlm.test(64, 0)
    hidden = input_ids == text.mask
    assert hidden.sum() == 1229 and labels[hidden].equal(text.test[: labels.numel()].view(-1, 64)[hidden])
    assert mlm.unit == clm.unit == "tokens" and mlm.digest() == clm.digest() != texts.of_bytes().digest()
    assert clm.test(100, 0)[0].flatten().equal(text.test[:8100])
    # Each symbol becomes one ordinary token, and the answers are unchanged.
    own = tasks.TASKS["copy"]
    (ours, scored), (theirs, wanted) = own.test(5, 50), mapped.test(5, 50)
    pairs = {*zip(ours.flatten().tolist(), theirs.flatten().tolist(), strict=True)}
    assert len(pairs) == len({first for first, _ in pairs}) == len({second for _, second in pairs}) == 29
    assert (wanted != tasks.IGNORED).equal(scored != tasks.IGNORED)
    assert wanted[wanted != tasks.IGNORED].equal(theirs[wanted != tasks.IGNORED])
    assert order.test(5, 50)[1].equal(tasks.TASKS["classification"].test(5, 50)[1])


@pytest.mark.parametrize(
    "wrong, message",
    [
        (["--models", "lama"], "There is no model 'lama' .did you mean 'llama'"),
        (["--models", '{"type": "llama", "num_heads": 2}'], "config of llama has no option 'num_heads'"),
        (["--models", '{"type": "llama", "attention_dropout": 0.3}'], "'attention_dropout' can't be given: the study sets it"),
        (["--steps", "copy=2", "copy=3"], "copy=2 copy=3: copy is given 2 times"),
        (["--steps", "2", "3"], "2 3: a number for all is given 2 times"),
        (["--weight_decay", "nan"], "'nan' must be a number of at least 0"),
        (["--models", '{"type": "llama", "hidden_size": 7}'], "llama hidden_size=7 can't be created"),
        (["--models", '{"type": "llama"'], "--models .*delimiter"),
        (["--models", "llama", '{"type": "llama"}'], "Give each once"),
        (["--models", "checkpoint:nowhere"], "The config of nowhere can't be loaded"),
        (["--models", '{"type": "checkpoint:x", "hidden_size": 4}'], "hidden_size can't be given: x has its own config"),
        (["--models", "bert"], "bert: the model has no head for any of --tasks copy"),
        (["--tasks", "copy", "mlm"], "--tasks mlm: none of the models, llama, has a head"),
        (["--tasks", "classification", "--length", "1"], "The task classification has no length 1"),
        (["--tasks", "clm", "--length", "5000"], "tested at 10,000 bytes, and its text for tests has 8,192"),
        (["--multiples", "0"], "'0' must be a number above 0"),
        (["--learning_rate", "bert=1"], "'bert=1' isn't valid.*of llama"),
        (["--encodings", "rope_2d"], "the models support none of them"),
        (["--report_only"], "no finished run"),
        (["nothing.yaml"], "nothing.yaml isn't a valid study"),
    ],
)
def test_wrong_flags(wrong, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        compare.main([*COPY, "--encodings", "none", "--output_dir", str(tmp_path), *wrong])
    assert re.search(message, f"{stopped.value} {capsys.readouterr().err}")


def part_of(label, by_encoding, unsupported=()):
    """The part of a study for one model, made from {encoding: {length: score of each seed}}. The models learned 4 symbols."""
    made = [
        {
            "task": "classification",
            "encoding": encoding,
            "seed": seed,
            "settings": {"length": 4},
            "max_length": 10 if encoding == "learned" else None,
            "scores": {str(length): {"exact": values[seed]} for length, values in by_length.items()},
        }
        for encoding, by_length in by_encoding.items()
        for seed in range(len(by_length[4]))
    ]
    setup = Setup(multiples=(1.0, 2.0))
    return Part(
        Study(setup, {"classification": Training(4, 1, 1)}, (), dict.fromkeys(unsupported, "why"), (0, 1), label), Results(made)
    )


def record_of(parts, correction=None):
    """What compare.json has of these parts."""
    for part in parts:
        for run in part.results.records.values():
            run.update(cpu_seconds=0, digests={})
    return json.loads(records.as_text(as_record(parts, {}, {}, correction)))


def test_the_table_by_hand():
    parts = [
        part_of("first", {"none": {4: [0.5, 0.5], 8: [0.4, 0.4]}, "learned": {4: [0.5, 0.5], 8: [0.5, 0.6]}}, ["cope"]),
        part_of("second", {"none": {4: [1.0], 8: [0.9]}}),
    ]
    means, differences, unsupported = tables.for_terminal(record_of(parts))
    table = means
    assert [[*column.cells] for column in table.columns] == [
        [
            "[bold]first, classification, L = 4 symbols: accuracy[/bold]",
            "learned †",  # sorted by the accuracy at 2 L
            "none",
            "cope",
            "[bold]second, classification, L = 4 symbols: accuracy[/bold]",
            "none (1 seed fewer)",
        ],
        ["", "0.50", "0.50", "unsupported", "", "1.00"],
        # Standard deviation 0.1 / √2, Student's t of one degree of freedom 12.706: 12.706 · 0.1 / 2 = 0.635.
        ["", "0.55 ± 0.64", "0.40", "", "", "0.90"],
    ]
    assert [column.header for column in table.columns] == ["", "1 L", "2 L"] and "1 to 2 seeds" in table.caption
    assert [[*column.cells] for column in unsupported.columns] == [["first"], ["cope"], ["why"]]
    assert len(tables.for_terminal(record_of(parts[1:]))) == 1
    # Paired with none: 0.1 and 0.2, half width 0.64.
    assert [[*column.cells][1:] for column in differences.columns] == [["learned †"], ["+0.00"], ["+0.15 ± 0.64"]]


def test_differences_are_paired_by_seed():
    found = {("none", 0): 0.5, ("none", 1): 0.7, ("none", 2): 0.1, ("alibi", 0): 0.6, ("alibi", 1): 0.9, ("rope", 2): 0.1}
    common = {"task": "classification", "settings": {"length": 4}}
    rows = [
        common | {"encoding": label, "seed": seed, "scores": {"4": {"exact": value}}} for (label, seed), value in found.items()
    ]
    results = Results(rows)
    mean = results.difference("classification", "alibi", "none", 4, "accuracy")
    # 0.1 and 0.2: standard deviation 0.1 / √2, Student's t of one degree of freedom 12.706.
    assert (mean.mean, mean.half) == (pytest.approx(0.15), pytest.approx(12.706 * 0.1 / 2, rel=1e-3))
    assert results.difference("classification", "rope", "alibi", 4, "accuracy") is None


def test_a_changed_class_is_another_setting(tmp_path, monkeypatch, own_registry):
    """Runs of a changed class aren't mixed with runs of the previous class."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "changing.py"
    file.write_text(
        "import hf_posenc\n\nclass Changing(hf_posenc.PositionEncoding, type='changing'):\n"
        "    def distance_bias(self, distance):\n        return -distance.abs()[None].float()\n"
    )
    command = ["--import", "changing", "--models", "bert", "--encodings", "changing", "none", "--tasks", "classification"]
    command += [*SIZES, "--steps", "1", "--batch_size", "1", "--test_rows", "2", "--length", "4", "--output_dir", "study"]
    monkeypatch.setattr(compare, "draw", lambda record, path: None)
    compare.main([*command, "--seeds", "0"])
    compare.main([*command, "--seeds", "0", "1"])
    file.write_text(file.read_text().replace("-distance", "-2 * distance"))
    with pytest.raises(SystemExit, match=r"encoding changing \(changing.py\)"):
        compare.main([*command, "--seeds", "0", "1", "2"])
    del sys.modules["changing"]


def test_matplotlib_is_missed_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="pip install"):
        compare.main(["--output_dir", str(tmp_path / "study")])
    assert not (tmp_path / "study").exists()


def test_a_flag_narrows_a_study_file(tmp_path):
    (tmp_path / "study.yaml").write_text("tasks: [clm, copy]\nsteps: {clm: 3, copy: 4}\nlength: {copy: 5}\n")
    given = [str(tmp_path / "study.yaml"), "--output_dir", "out"]
    assert compare.parse_arguments(given).steps == {"clm": 3, "copy": 4}
    narrowed = compare.parse_arguments([*given, "--tasks", "clm"])
    assert (narrowed.tasks, narrowed.steps, narrowed.length) == (["clm"], {"clm": 3}, {})
    (tmp_path / "study.yaml").write_text("tasks: [clm]\nsteps: {copy: 4}\n")
    with pytest.raises(SystemExit):
        compare.parse_arguments(given)


def test_the_example_of_the_help_is_allowed():
    for text in re.findall(r"'(\{.*?\})'", compare.__doc__):
        given = yaml.safe_load(text)
        if given["type"] not in models.MODELS:
            models.encoding(given)


def test_an_encoding_has_one_line_in_all_panels():
    styles = study_curves.styles_of(Sheet((3, 3)), ["none", *(f"e{number}" for number in range(20))])
    assert len({str(style) for style in styles.values()}) == 21 and styles["none"]["linestyle"] == "--"


WINDOW = """
import hf_posenc


class Window(hf_posenc.PositionEncoding, type="window"):
    width: int = 8

    def distance_bias(self, distance):
        return (distance.abs() > self.width)[None] * -1e4
"""


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch, checkpoint, own_registry):
    """All commands of docs/guides/compare.md run, smaller and shorter, with the files that the page names."""
    page = (ROOT / "docs" / "guides" / "compare.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "study.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    (tmp_path / "my_window.py").write_text(WINDOW)
    (tmp_path / "my_task.py").write_text(re.search(r"```python\n(# my_task.*?)```", page, re.DOTALL)[1])
    shorten(monkeypatch)
    monkeypatch.setattr(compare, "draw", lambda record, path: None)  # takes half of the time
    shorter = [*SIZES, "--steps", "1", "--batch_size", "1", "--test_rows", "2", "--processes", "1", "--seeds", "0"]
    commands = re.findall(r"^hf-posenc compare (.*)$", joined_lines(page), re.MULTILINE)
    for given in commands:
        compare.main([*shlex.split(given), *shorter])
    del sys.modules["my_window"], sys.modules["my_task"], tasks.TASKS["first_symbol"]
    made = {file.parent.name for file in tmp_path.glob("*/compare.json")}
    assert made == {"first", "study", "window", "trained", "recall"}
    assert {file.suffix for file in (tmp_path / "recall").glob("compare.*")} == {".txt", ".json"}
    for given in re.findall(r"^hf-posenc (plot .*)$", page, re.MULTILINE):
        with pytest.raises(SystemExit) as stopped:
            get_command(cli.app)(shlex.split(given))
        assert not stopped.value.code and (tmp_path / given.split()[-1]).exists()
    assert [*records.read(tmp_path / "window" / "compare.json")["models"]["bert"]["encodings"]] == [
        "none", "window", "window width=4"
    ]  # fmt: skip


def joined_lines(text):
    return text.replace("\\\n", " ")
