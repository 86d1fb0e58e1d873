"""hf_posenc.studies: custom tasks and their errors, texts and configs from files, and saved models."""

import functools
import json
import shutil
import subprocess
import sys

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
)
from typer.main import get_command

from hf_posenc import cli, compare, plots
from hf_posenc.evaluation import records
from hf_posenc.studies import IGNORED, Task, models, register_task, runs, study, tables, tasks, texts, trained_models
from hf_posenc.studies.record import _mark_significant, p_value
from hf_posenc.studies.results import Mean

SIZES = ["--hidden_size", "16", "--num_hidden_layers", "1", "--num_attention_heads", "2", "--intermediate_size", "16"]
QUICK = [*SIZES, "--length", "3", "--multiples", "1", "2", "--steps", "2", "--batch_size", "2", "--test_rows", "4"]

COUNT = '''
"""How many ones are in a row? The answer is the last token."""

import torch

from hf_posenc.studies import IGNORED, Task, register_task


def rows(length, count, generator):
    bits = torch.randint(2, (count, length), generator=generator)
    answer = 2 + bits.sum(1, keepdim=True)
    input_ids = torch.cat([bits, answer], dim=1)
    labels = torch.full_like(input_ids, IGNORED)
    labels[:, -1:] = answer
    return input_ids, labels


def mean_error(predictions, labels):
    """The absolute error of the answer."""
    return (predictions - labels)[:, -1].abs().double()


register_task("ones", Task(rows=rows, metric=mean_error, lower_is_better=True, vocabulary=30, unit="bits", length=4, steps=3))
'''


@pytest.fixture(autouse=True)
def own_tasks():
    """Tasks and texts of one test aren't there in the next."""
    before = {**tasks.TASKS}
    yield
    tasks.TASKS.clear()
    tasks.TASKS.update(before)
    for each in (texts.of_bytes, texts.of_tokenizer, texts.paragraphs):
        each.cache_clear()


@pytest.fixture
def my_task(tmp_path, monkeypatch):
    """The file of a module with a task, in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "my_task.py"
    file.write_text(COUNT)
    yield file
    sys.modules.pop("my_task", None)


def drawn(length, count, generator):
    input_ids = torch.randint(5, (count, length + 1), generator=generator)
    return input_ids, input_ids.index_fill(1, torch.tensor([0]), IGNORED)


def task_of(**changes):
    return Task(**{"rows": drawn, "metric": "exact match", "vocabulary": 5, **changes})


COMMAND = ["--import", "my_task", "--models", "llama", "--tasks", "ones", "--encodings", "none", "rope", *SIZES]
COMMAND += ["--batch_size", "2", "--test_rows", "4", "--multiples", "1", "2", "--output_dir", "out"]


def test_a_custom_task_with_its_metric(my_task, tmp_path):
    compare.main([*COMMAND, "--seeds", "0", "1"])
    record = records.read(tmp_path / "out" / "compare.json")
    assert {(row["task"], row["metric"]) for row in record["rows"]} == {("ones", "mean_error")}
    assert record["models"]["llama"]["tasks"]["ones"]["lower_is_better"] is True
    run = records.read(tmp_path / "out" / "llama" / "runs" / "ones-none-0.json")
    assert run["scores"]["4"]["mean_error"] >= 0 and "task ones (my_task.py)" in run["settings"]
    assert "llama, ones, L = 4 bits: mean_error" in (tmp_path / "out" / "compare.txt").read_text()


def test_a_custom_metric_is_computed_from_predictions():
    """Decoders predict the next token. A metric sees predictions and labels at the same places, without the first."""
    seen = []

    def share(predictions, labels):
        seen.append((predictions, labels))
        return (predictions == labels).double().mean(1)

    class Next(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            return type("Output", (), {"logits": torch.nn.functional.one_hot((input_ids + 1) % 5, 5).float()})

    input_ids = torch.tensor([[0, 1, 2, 3], [0, 1, 1, 1]])
    found = runs.measured(Next(), input_ids, input_ids, task_of(metric=share))
    assert found["share"] == pytest.approx((1 + 1 / 3) / 2)
    assert seen[0][0].tolist() == [[1, 2, 3], [1, 2, 2]] and seen[0][1].tolist() == [[1, 2, 3], [1, 1, 1]]


@pytest.mark.parametrize("change", [("length=4", "length=5"), ("2 + bits", "3 + bits"), ("absolute error", "error")])
def test_a_changed_task_is_another_setting(my_task, change):
    compare.main([*COMMAND, "--seeds", "0"])
    my_task.write_text(COUNT.replace(*change))
    del sys.modules["my_task"]
    command = [*COMMAND, "--seeds", "0", "1", "--length", "4"]
    with pytest.raises(SystemExit, match=r"task ones \(my_task.py\)"):
        compare.main(command)


@pytest.mark.parametrize("code, use", [("2 + bits", "HELP + bits"), ("abs().double()", "abs().double() * HELP")])
def test_a_changed_helper_module_is_another_setting(my_task, tmp_path, code, use):
    """The settings cover modules that the task's rows or its metric use."""
    (tmp_path / "helper.py").write_text("HELP = 2\n")
    my_task.write_text("from helper import HELP\n" + COUNT.replace(code, use))
    compare.main([*COMMAND, "--seeds", "0"])
    (tmp_path / "helper.py").write_text("HELP = 10\n")
    del sys.modules["my_task"], sys.modules["helper"]
    with pytest.raises(SystemExit, match=r"task ones \(my_task.py\)"):
        compare.main([*COMMAND, "--seeds", "0", "1"])
    del sys.modules["helper"]


def test_a_changed_helper_of_an_encoding_is_another_setting(tmp_path, monkeypatch, own_registry):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "steepness.py").write_text("RATE = 1\n")
    (tmp_path / "steep.py").write_text(
        "import hf_posenc\nfrom steepness import RATE\n\nclass Steep(hf_posenc.PositionEncoding, type='steep'):\n"
        "    def distance_bias(self, distance):\n        return -RATE * distance.abs()[None].float()\n"
    )
    command = [*QUICK, "--import", "steep", "--models", "llama", "--tasks", "copy", "--encodings", "steep"]
    command += ["--output_dir", "out"]
    compare.main([*command, "--seeds", "0"])
    (tmp_path / "steepness.py").write_text("RATE = 50\n")
    with pytest.raises(SystemExit, match=r"encoding steep \(steep.py\)"):
        compare.main([*command, "--seeds", "0", "1"])
    del sys.modules["steep"], sys.modules["steepness"]


def test_multiples_without_the_trained_length(tmp_path):
    arguments = ["--models", "llama", "--tasks", "copy", "--encodings", "none", "--seeds", "0", "--output_dir", str(tmp_path)]
    compare.main([*QUICK, *arguments, "--multiples", "2", "4"])
    assert {row["multiple"] for row in records.read(tmp_path / "compare.json")["rows"]} == {2, 4}


def test_models_that_diverged_get_no_scores_by_chance():
    """The first of NaN logits is token 0, which may be right. Rows without a scored token don't count."""

    class Ruined(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            return type("Output", (), {"logits": torch.full((*input_ids.shape, 5), torch.nan)})

    def share(predictions, labels):
        return (predictions == labels).double().mean(1)

    ids = torch.zeros(2, 3, dtype=torch.long)
    assert runs.measured(Ruined(), ids, ids, task_of(metric=share))["share"] == 0
    labels = torch.stack([ids[0], torch.full((3,), IGNORED)])
    assert runs.measured(Ruined(), ids, labels, task_of())["exact"] == 0


def test_a_study_file_imports_its_task(my_task, tmp_path):
    (tmp_path / "study.yaml").write_text(
        "import: [my_task]\nmodels: [llama]\ntasks: [ones]\nlength: {ones: 3, copy: 2}\ncorrection: holm\n"
    )
    arguments = [str(tmp_path / "study.yaml"), "--output_dir", "out"]
    with pytest.raises(SystemExit):  # copy isn't a task of this study
        compare.parse_arguments(arguments)
    (tmp_path / "study.yaml").write_text((tmp_path / "study.yaml").read_text().replace(", copy: 2", ""))
    parsed = compare.parse_arguments(arguments)
    assert (parsed.tasks, parsed.length, parsed.correction) == (["ones"], {"ones": 3}, "holm")
    assert compare.parse_arguments([*arguments, "--correction", "none"]).correction is None
    (tmp_path / "study.yaml").write_text("encodings: []\n")
    with pytest.raises(SystemExit, match="encodings is empty"):
        compare.parse_arguments(arguments)


def one_number(predictions, labels):
    return 0.5


def accuracy(predictions, labels):
    return (predictions == labels).double().mean(1)


def broken(predictions, labels):
    return torch.nn.functional.dropout(predictions.float(), 2.0)  # raises an error in torch's own code


def not_finite(predictions, labels):
    return torch.where(predictions[:, 0] == labels[:, 0], 1.0, torch.nan)


def changed(change):
    """Rows after a change: a function of input_ids and labels that returns others, or changes them in place."""

    def rows(length, count, generator):
        found = drawn(length, count, generator)
        made = change(*found)
        return found if made is None else made

    return rows


def filled(which, row, value):
    """Rows with a value in all places of one row of input_ids (0) or labels (1)."""

    def fill(*found):
        found[which][row] = value

    return changed(fill)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rows": changed(lambda ids, labels: (ids[:0], labels[:0]))}, r"length 1: input_ids has the shape \[0, 2\]"),
        ({"rows": changed(lambda ids, labels: (ids[:-1], labels[:-1]))}, "length 1: 8 rows were requested, and 7 were"),
        ({"rows": filled(0, 3, 5)}, "row 3: the token at position 0 is 5, .* from 0 to 4"),
        ({"rows": filled(0, 2, -1)}, "row 2: the token at position 0 is -1"),
        ({"rows": filled(1, 5, 9)}, "row 5: the label at position 0 is 9"),
        ({"rows": filled(1, 6, IGNORED)}, "row 6: no token is scored"),
        ({"rows": changed(lambda ids, labels: (ids % 2, 1 - ids % 2))}, "row 0: the label at position 0 is ., but the token"),
        ({"rows": changed(lambda ids, labels: (ids, labels[:, :-1]))}, r"labels have the shape \[8, 1\], but must have"),
        ({"rows": changed(lambda ids, labels: (ids.float(), labels))}, "the dtypes are torch.float32"),
        ({"rows": changed(lambda ids, labels: [ids, labels])}, "rows returned list"),
        ({"rows": lambda length, count, generator: drawn(length, count, torch.default_generator)}, "differ between two calls"),
        ({"head": "labels"}, r"labels have the shape \[8, 2\], but must have \[8\]"),
        ({"metric": not_finite}, "row .: the metric not_finite is nan"),
        ({"metric": one_number}, "returned float for 8 rows"),
        ({"rows": changed(lambda ids, labels: ids[99])}, r"'mine', length 1: IndexError: .*test_studies.py, line \d+"),
        ({"metric": broken}, r"'mine', length 1, metric: ValueError: .*test_studies.py, line \d+"),
    ],
)
def test_invalid_rows_and_metrics_are_errors_before_training(changes, message, tmp_path, monkeypatch):
    register_task("mine", task_of(**changes))
    monkeypatch.setattr(study, "carry_out", lambda *arguments: pytest.fail("the study began"))
    with pytest.raises(SystemExit, match=message):
        compare.main([*QUICK, "--models", "llama", "--tasks", "mine", "--length", "4", "--output_dir", str(tmp_path)])


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("my task", {}, "can't be named"),
        ("copy", {}, "'copy' exists"),
        ("mine", {"metric": "exact_match"}, "did you mean 'exact match'"),
        ("mine", {"head": "encoder"}, "head='encoder'"),
        ("mine", {"metric": accuracy}, "name is 'accuracy'"),
        ("mine", {"metric": lambda predictions, labels: predictions}, "name is '<lambda>'"),
        ("mine", {"metric": functools.partial(not_finite)}, "name is None"),
        ("mine", {"vocabulary": 0}, "vocabulary is 0"),
        ("mine", {"length": 2, "shortest": 3}, "length 2 is below shortest, 3"),
    ],
)
def test_invalid_tasks(name, changes, message):
    with pytest.raises(ValueError, match=message):
        register_task(name, task_of(**changes))
    assert "mine" not in tasks.TASKS and "my task" not in tasks.TASKS


def test_texts_from_a_file(tmp_path):
    file = tmp_path / "my.jsonl"
    rows = [f"This is text {number} of the corpus." for number in range(200)]
    file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    trained, tested = texts.paragraphs(str(file))
    assert "text 0 of" in trained and "text 199 of" in tested and not {*trained.split("\n\n")} & {*tested.split("\n\n")}
    assert 0.12 < len(tested) / (len(trained) + len(tested)) < 0.14
    command = [*QUICK, "--models", "llama", "--tasks", "clm", "--encodings", "none", "--seeds", "0"]
    command += ["--texts", str(file)]
    compare.main([*command, "--output_dir", str(tmp_path / "out")])
    file.write_text(file.read_text().replace("corpus", "Corpus"))
    texts.paragraphs.cache_clear()
    texts.of_bytes.cache_clear()
    with pytest.raises(SystemExit, match="created with digest="):
        compare.main([*command, "--output_dir", str(tmp_path / "out")])
    for content, message in (
        ("", "has no rows"),
        ('{"text": "one"}\n', "too few different texts"),
        ('{"body": "one"}\n{"body": "two"}\n', "row 1: it has no text in the column 'text', only body"),
        ('{"text": "a b"}\n{"text": "c"}\n', "its text for tests has 1"),
    ):
        file.write_text(content)
        texts.paragraphs.cache_clear()
        texts.of_bytes.cache_clear()
        with pytest.raises(SystemExit, match=message):
            compare.main([*command, "--output_dir", str(tmp_path / "other")])


def test_a_model_of_a_config_file(tmp_path):
    """Any architecture with the head, with random weights."""
    file = tmp_path / "mistral.json"
    config = {"model_type": "mistral", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    file.write_text(json.dumps({**config, "num_key_value_heads": 1, "intermediate_size": 16, "vocab_size": 9}))
    model = models.stock(f"config:{file}", None, 29, 8, 0)
    assert type(model).__name__ == "MistralForCausalLM" and model.config.vocab_size == 29
    assert all(map(torch.equal, model.parameters(), models.stock(f"config:{file}", None, 29, 8, 0).parameters()))
    command = [*QUICK, "--models", f"config:{file}", "--tasks", "copy", "--encodings", "alibi", "--seeds", "0"]
    compare.main([*command, "--output_dir", str(tmp_path / "out")])
    file.write_text(file.read_text().replace('"intermediate_size": 16', '"intermediate_size": 32'))
    with pytest.raises(SystemExit, match="created with files="):
        compare.main([*command, "--output_dir", str(tmp_path / "out")])


def test_a_checkpoint_with_another_number_of_labels(tmp_path):
    """Its head is new, like a missing one."""
    config = BertConfig(vocab_size=40, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    assert models.new_weights(str(tmp_path), "labels", 5) == ["classifier.bias", "classifier.weight"]
    assert models.new_weights(str(tmp_path), "labels", 2) == []
    model = models.stock(f"checkpoint:{tmp_path}", None, 40, 8, 0, "labels", classes=5)
    assert model.config.num_labels == len(model.classifier.weight) == 5


def test_nothing_is_random_in_subconfigs():
    config = AutoConfig.for_model("llava")
    config.text_config.attention_dropout = config.text_config.router_jitter_noise = 0.1
    models.without_dropout(config)
    assert config.text_config.attention_dropout == config.text_config.router_jitter_noise == 0


OF_TWO_SEEDS = [*QUICK, "--models", "llama", "--tasks", "clm", "--encodings", "none", "rope", "--seeds", "0", "1"]
OF_TWO_SEEDS += ["--steps", "4", "--length", "8"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a finished study without models."""
    path = tmp_path_factory.mktemp("finished")
    compare.main([*OF_TWO_SEEDS, "--output_dir", str(path)])
    return path


def test_saved_models(finished, tmp_path):
    """Saved models are those of the records, also if --save is added to a finished study."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    saved = tmp_path / "llama" / "runs"
    before = {file.name: records.read(file)["scores"] for file in saved.glob("*.json")}
    assert not [*saved.glob("*/")]
    compare.main([*OF_TWO_SEEDS, "--save", "--output_dir", str(tmp_path)])
    assert {file.name: records.read(file)["scores"] for file in saved.glob("*.json")} == before
    assert {f"{directory.name}.json" for directory in saved.glob("*/")} == {*before}
    directory = saved / "clm-rope-1"
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False)
    task = texts.task(tasks.TASKS["clm"])
    assert runs.measured(model, *task.test(16, 4), task) == before["clm-rope-1.json"]["16"]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer("né\n")["input_ids"] == [*"né\n".encode()] and tokenizer.decode([*"né\n".encode()]) == "né\n"


def test_the_byte_tokenizer_knows_all_bytes():
    tokenizer = trained_models.byte_tokenizer()
    text = bytes(range(256)).decode("latin-1")
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == [*text.encode()] and tokenizer.mask_token_id == texts.MASK


def row(encoding, mean, difference=None, p=None, **more):
    about = {"model": "llama", "task": "copy", "metric": "exact", "length": 8, "multiple": 1.0, "seeds": 3, "half_width": 0.01}
    about |= {"max_length": None, "diverged": 0, "significant": p is not None and p < 0.05}
    return {
        **about,
        "encoding": encoding,
        "mean": mean,
        "difference": difference,
        "difference_half_width": 0.02,
        "p": p,
        **more,
    }


def record_of(*rows, correction=None):
    about = {"length": 8, "unit": "symbols", "lower_is_better": False, "chance": 0.1, "metrics": ["exact"]}
    own = {"tasks": {"copy": about}, "unsupported": {"rope_2d": "needs a grid & more"}}
    scores = [{**each, "seed": seed, "value": each["mean"]} for each in rows for seed in (0, 1)]
    return {"models": {"llama": own}, "baseline": "none", "correction": correction, "table": [*rows], "rows": scores}


SMALL = record_of(row("none", 0.5), row("rope_theta=5", 0.75, 0.25, 0.01), row("t5", 0.4, -0.1, 0.2, max_length=9))


def test_holm_correction():
    """p-values 0.01, 0.02, 0.04 become 0.03, 0.04, 0.04. With 0.03 in third place of four tests, nothing changes the order."""
    made = [{"p": p} for p in (0.04, 0.01, None, 0.02)]
    _mark_significant(made, "holm")
    assert [each["p_holm"] and round(each["p_holm"], 4) for each in made] == [0.04, 0.03, None, 0.04]
    assert [each["p"] for each in made] == [0.04, 0.01, None, 0.02]
    made = [{"p": p} for p in (0.02, 0.03, 0.03)]
    _mark_significant(made, "holm")
    assert [each["significant"] for each in made] == [False] * 3
    _mark_significant(plain := [{"p": p} for p in (0.02, 0.03, 0.03)], None)
    assert [each["significant"] for each in plain] == [True] * 3
    assert "Holm's correction for 2 tests" in tables.caption(record_of(*SMALL["table"], correction="holm"))


def test_p_values_agree_with_the_intervals():
    """p is below 0.05 exactly if Student's interval excludes 0."""
    generator = torch.Generator().manual_seed(0)
    for shift in torch.linspace(0, 3, 40).tolist():
        mean = Mean(tuple((torch.randn(3, generator=generator) + shift).tolist()))
        assert (p_value(mean) < 0.05) == (abs(mean.mean) > mean.half)
    assert all(Mean(equal).half is None for equal in ((0.0, 0.0), (0.5, 0.5), (0.3 - 0.2, 0.4 - 0.3)))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("width, inches", [("one", 3.4), ("two", 7.0)])
def test_the_figure_has_the_width_of_a_page_and_nothing_is_clipped(width, inches, count, tmp_path):
    long = "checkpoint:some/long/path/of-a-model-with-a-long-name, num_key_value_heads=2"
    names = ("bert", "llama num_key_value_heads=2", long)[-count:]
    rows = [{**each, "model": model} for each in SMALL["table"] for model in names]
    record = record_of(*rows)
    record["models"] = dict.fromkeys(names, record["models"]["llama"])
    figure = plots.study(record, width=width, path=tmp_path / "study.svg")
    assert figure.get_size_inches()[0] == pytest.approx(inches)
    (left, bottom), (right, top) = figure.bbox.padded(1).get_points()  # a pixel for rounding
    renderer = FigureCanvasAgg(figure).get_renderer()
    for axis in figure.axes:
        for text in (axis.title, axis.xaxis.label, axis.yaxis.label, *axis.get_xticklabels()):
            box = text.get_window_extent(renderer)
            assert left <= box.x0 and box.x1 <= right and bottom <= box.y0 and box.y1 <= top, text.get_text()
    legend = figure.legends[0].get_window_extent(renderer)
    assert left <= legend.x0 and legend.x1 <= right
    assert (tmp_path / "study.svg").read_text().startswith("<?xml")


def test_the_figure_of_a_directory_as_pdf(tmp_path):
    """PDF files have TrueType fonts. Publishers reject Type 3 fonts."""
    records.write(tmp_path / "compare.json", SMALL)
    with pytest.raises(SystemExit) as stopped:
        get_command(cli.app)(["plot", "study", str(tmp_path), "--output", str(tmp_path / "study.pdf")])
    assert not stopped.value.code and b"/Type3" not in (tmp_path / "study.pdf").read_bytes()


def test_the_metric_of_a_figure():
    with pytest.raises(ValueError, match="'f1'. It has exact"):
        plots.study(SMALL, metric="f1")
    with pytest.raises(ValueError, match="isn't a record of hf-posenc compare"):
        plots.study({"rows": []})
    with pytest.raises(ValueError, match="width='three'"):
        plots.study(SMALL, width="three")


def test_the_table_of_a_record_makes_a_data_frame():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(SMALL["table"])
    latex = frame.pivot_table("mean", ["model", "task", "encoding"], "length").to_latex(float_format="%.2f")
    assert all(value in latex for value in ("0.50", "0.75", "0.40"))


def test_the_command_of_the_package(my_task, tmp_path, capsys):
    """`hf-posenc compare` has the flags of hf_posenc.compare."""
    app = get_command(cli.app)
    with pytest.raises(SystemExit) as stopped:
        app(["compare", *COMMAND, "--seeds", "0"])
    assert not stopped.value.code and (tmp_path / "out" / "compare.txt").exists()
    with pytest.raises(SystemExit) as stopped:
        app(["compare", "--tasks", "copi", "--output_dir", "x"])
    assert stopped.value.code == 2 and "There is no task 'copi' (did you mean 'copy'?)" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        app(["compare", "--help"])
    assert not stopped.value.code and "--correction {holm,none}" in capsys.readouterr().out


@pytest.mark.slow
def test_the_module_as_a_command(my_task, tmp_path):
    """Processes import the modules, too."""
    command = [sys.executable, "-m", "hf_posenc.compare", *COMMAND, "--seeds", "0", "1", "--processes", "2"]
    subprocess.run(command, check=True)
    assert len([*(tmp_path / "out" / "llama" / "runs").glob("*.json")]) == 4


def test_llama_config_is_a_config_directory(tmp_path):
    LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16).save_pretrained(tmp_path)
    assert models.heads_of(f"config:{tmp_path}") == ("causal", "labels")
    with pytest.raises(ValueError, match="can't be loaded"):
        models.heads_of(f"config:{tmp_path / 'nothing'}")
