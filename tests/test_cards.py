"""Model cards: how they describe a model and its evaluation, and the cards of the models trained in this project."""

import argparse
import copy
import functools
import json
import operator
import re
import sys

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from transformers import AutoModel
from typer.testing import CliRunner

import hf_posenc
from conftest import ROOT, run_python
from hf_posenc.cli import app
from hf_posenc.evaluation import records as files
from hf_posenc.hub.cards import model_card
from hf_posenc.hub.eval_results import EVALUATION, checked_evaluation, result_files
from hf_posenc.serialization import saved_files
from hf_posenc.training import models
from hub_server import TOKEN, serve
from models import BERT, patched, shared, stock, tiny, tokens

CARDS = ROOT / "model_cards"
NAMES = sorted(folder.name for folder in CARDS.iterdir())


def result(**changes):
    about = {"model": "distilled", "this": True, "task": "text-retrieval", "dataset": {"name": "pages"}, "metric": "mrr"}
    return {**about, "value": 0.5, **changes}


MEASURED = {
    "command": "python scripts/distill.py --position_encoding alibi",
    "training": {"datasets": [{"name": "books", "id": "me/books"}, {"name": "letters"}], "steps": 3400},
    "results": [
        result(model="original", this=False, value=0.66534, interval=[0.609, 0.71963], length=512, count=1830),
        result(value=0.62476, interval=[0.56869, 0.68141], length=512, count=1830),
        result(value=0.75, length=1024, count=48),
        result(metric="loss", value=0.00042, seeds=[0, 1]),
        result(dataset={"name": "a|b", "id": "me/pages", "split": "test", "task_id": "default"}, value=1),
    ],
    "notes": ["Measured on a Sunday."],
}


# The content of a card.


def test_a_table_for_each_data_set():
    """Each data set has a table of one metric. evaluation.json has the other metrics."""
    card = model_card(stock("bert"), "me/model", evaluation=MEASURED, figures=["a curve.png"])
    tables = card.partition("## Results\n")[2].partition("## Training")[0]
    assert tables.strip().splitlines() == [
        "### pages",
        "",
        "text-retrieval, mrr, n = 48 to 1,830:",
        "",
        "| model | 512 tokens | 1024 tokens |",
        "| --- | --: | --: |",
        "| original | 0.665 |  |",
        "| **distilled** | 0.625 | 0.750 |",
        "",
        r"### [a\|b](https://huggingface.co/datasets/me/pages) (test)",
        "",
        "text-retrieval, mrr:",
        "",
        "| model | value |",
        "| --- | --: |",
        "| **distilled** | 1.000 |",
        "",
        "The model of this card is in bold. [evaluation.json](evaluation.json) has all metrics, with 95% intervals, "
        "not corrected for multiple comparisons.",
        "",
        "Measured on a Sunday.",
    ]
    loss = {**MEASURED, "results": [each for each in MEASURED["results"] if each["metric"] == "loss"]}
    table = "| model | value |\n| --- | --: |\n| **distilled** (mean of seeds 0, 1) | 4.20e-04 |"
    assert table in model_card(stock("bert"), "me/model", evaluation=loss)
    assert "![a curve](a%20curve.png)" in card
    assert "Trained on [books](https://huggingface.co/datasets/me/books), letters for 3,400 steps." in card
    assert f"```bash\n{MEASURED['command']}\n```" in card


def test_metadata():
    metadata = {"license": "mit", "language": "de", "base_model": "me/base"}
    data = ModelCard(model_card(patched("bert", "sinusoidal+alibi"), "me/model", evaluation=MEASURED, metadata=metadata)).data
    found = data.to_dict()
    own = [result for result in MEASURED["results"] if result["this"]]
    assert {result.metric_value for result in data.eval_results} == {result["value"] for result in own}
    assert all(result.dataset_type in ("pages", "me/pages") for result in data.eval_results)
    by_name = {result.metric_name: result.metric_args for result in data.eval_results if result.dataset_type == "pages"}
    assert by_name == {
        "loss, mean of 2 seeds": {"seeds": [0, 1]},
        "mrr, 512 tokens": {"length": 512, "interval": [0.56869, 0.68141], "count": 1830},
        "mrr, 1024 tokens": {"length": 1024, "count": 48},
    }
    assert found.pop("model-index")[0]["name"] == "model"
    assert found == {
        **metadata,
        "base_model_relation": "finetune",
        "datasets": ["me/books"],
        "library_name": "transformers",
        "metrics": ["loss", "mrr"],
        "pipeline_tag": "feature-extraction",
        "tags": ["hf-posenc", "sinusoidal", "alibi"],
    }


def test_nothing_measured_nothing_said():
    card = model_card(shared("bert", "alibi"), "me/model")
    assert not {"datasets", "metrics", "model-index", "base_model", "license"} & ModelCard(card).data.to_dict().keys()
    assert "## Results" not in card and "## Training" not in card


@pytest.mark.parametrize(("name", "base"), [("me/base", "me/base"), ("model", None), ("checkpoint 7", None), ("", None)])
def test_the_base_model_is_no_folder(name, base):
    """A directory name, or the name of a model without a namespace, isn't used as base model. Only the Hub knows such names."""
    model = patched("bert", "alibi")
    model.config.position_encoding["original"]["name_or_path"] = name
    assert ModelCard(model_card(model, "me/model")).data.base_model == base


def blocks(model, **arguments):
    """The Python blocks of a card, which load the model."""
    return re.findall("```python\n(.*?)\n```", model_card(model, "me/model", **arguments), re.DOTALL)


def with_code(model, name="AutoModel", of=None):
    """The model as if it had been saved with its code."""
    model.config.auto_map = {"AutoConfig": "modeling_posenc.AnyConfig", name: f"modeling_posenc.{of or type(model).__name__}"}
    return model


def load_by(name, model="me/model", **arguments):
    given = "".join(f", {key}={value}" for key, value in arguments.items())
    return f'from transformers import {name}\n\nmodel = {name}.from_pretrained("{model}"{given})'


def test_ways_to_load_it():
    package, stock_again = blocks(shared("bert", "alibi"))
    assert package.startswith("import hf_posenc") and 'AutoModel.from_pretrained("me/model")' in package
    assert "hf_posenc.unpatch(model)" in stock_again
    first, alone, _ = blocks(with_code(patched("bert", "alibi", head="ForMaskedLM"), "AutoModelForMaskedLM"))
    assert "AutoModelForMaskedLM" in first and "trust_remote_code" not in first
    assert alone == load_by("AutoModelForMaskedLM", trust_remote_code=True)
    # The code is saved, but not for the class that loads the head.
    assert len(blocks(with_code(patched("bert", "alibi", head="ForMaskedLM"), of="PosEncBertModel"))) == 2
    # An Auto class without a task in hf-posenc.
    choice = with_code(patched("bert", "rope", head="ForMultipleChoice"), "AutoModelForMultipleChoice")
    assert "AutoModelForMultipleChoice" in blocks(choice)[1]
    assert blocks(shared("bert")) == [load_by("AutoModel")]
    heads, _ = blocks(patched("gpt2", "rope", head="DoubleHeadsModel"))
    assert "from hf_posenc import PosEncGPT2DoubleHeadsModel" in heads
    for host, head, name in (("bert", "Model", "AutoModel"), ("gpt2", "DoubleHeadsModel", "GPT2DoubleHeadsModel")):
        forgetful = hf_posenc.patch(stock(host, head), "rope", keep_original=False)
        assert len(blocks(forgetful)) == 1
        assert blocks(forgetful, metadata={"base_model": "me/base"})[1] == load_by(name, "me/base")
    (layer,) = blocks(hf_posenc.PositionEmbedding("sinusoidal", hidden_size=8))
    assert "import hf_posenc" in layer and "AutoModel" in layer


LOAD = """
import importlib.abc, json, sys, torch

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "hf_posenc":
            raise ModuleNotFoundError("No module named 'hf_posenc'", name=name)

sys.meta_path.insert(0, absent := Absent())
alone, package, stock = json.loads(sys.argv[1])
ids, expected, of_host = torch.load("expected.pt")
results, written = [], {}
for code in (alone, package, stock):
    exec(code, written)
    with torch.no_grad():
        results.append(torch.equal(written["model"].eval()(ids)[0], of_host if code is stock else expected))
    results.append(f"{type(written['model']).__module__.partition('.')[0]} {type(written['model']).__name__}")
    if code is alone:
        assert "hf_posenc" not in sys.modules
        sys.meta_path.remove(absent)
print(json.dumps(results))
"""


@torch.no_grad()
def test_the_ways_lead_there(tmp_path, monkeypatch):
    """A process without the package runs the block that doesn't need it first."""
    host, ids = stock("bert", head="ForMaskedLM"), tokens(length=9)
    model = hf_posenc.patch(host, "alibi")
    model.save_pretrained(tmp_path / "model")
    torch.save((ids, model(ids)[0], host(ids)[0]), tmp_path / "expected.pt")
    package, alone, stock_again = re.findall("```python\n(.*?)\n```", model_card(tmp_path / "model", "model"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    found = run_python(LOAD, json.dumps([alone, package, stock_again]), fresh=True, HF_HOME=str(tmp_path / "home"))
    assert json.loads(found) == [
        *(True, "transformers_modules PosEncBertForMaskedLM"),
        *(True, "hf_posenc PosEncBertForMaskedLM"),
        *(True, "transformers BertForMaskedLM"),
    ]


def test_an_encoding_from_elsewhere():
    class Farther(hf_posenc.PositionEncoding, type="farther-card"):
        """Serves no purpose."""

        def distance_bias(self, distance):
            return distance[None].float()

    model = hf_posenc.patch(stock("bert"), "farther-card")
    words = "its class `Farther` is not part of hf-posenc: import or define it before loading"
    assert f"{words}\n" in model_card(model, "me/model")
    assert f"{words} with hf-posenc; the code saved with the model includes it\n" in model_card(with_code(model), "me/model")


@pytest.mark.parametrize(
    "make",
    [
        lambda: patched("bert", "alibi", max_length=64),
        lambda: patched("roberta", "sinusoidal+alibi", head="ForMaskedLM"),
        lambda: patched("gpt2", "rope", head="DoubleHeadsModel"),
        lambda: stock("bert", head="ForTokenClassification"),
        lambda: hf_posenc.PositionEmbedding("learned", hidden_size=8, max_length=16),
    ],
)
def test_a_config_is_enough(tmp_path, make):
    model = make()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / EVALUATION).write_text(json.dumps(MEASURED))
    assert model_card(tmp_path, "me/model") == model_card(model, "me/model", evaluation=MEASURED)
    assert "## Results" not in model_card(tmp_path, "me/model", evaluation={})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"repo_id": "me/my model"}, "me/my model"),
        ({"figures": ["../secret.png"]}, r"/secret\.png"),
        ({"figures": ["/etc/passwd"]}, "'/etc/passwd' is outside"),
        ({"metadata": {"tags": ["mine"], "license": "mit"}}, "metadata contains tags"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        model_card(shared("bert"), **{"repo_id": "me/model", **arguments})
    with pytest.raises(ValueError, match="model is a TokenPositionEmbedding. Pass a Transformers model"):
        model_card(hf_posenc.TokenPositionEmbedding(30, "learned", hidden_size=8, max_length=4), "me/model")


# Evaluation results.


def broken(*path, value):
    """MEASURED with another value at this path, or without the value if it is `...`."""
    measured = copy.deepcopy(MEASURED)
    *before, last = path
    place = functools.reduce(operator.getitem, before, measured)
    place[last] = value
    if value is ...:
        del place[last]
    return measured


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ([], r"evaluation.json is \[\]..*must be an object"),
        ({"resluts": []}, "resluts"),
        ({"command": ["python"]}, r"python"),
        ({"training": {"datasets": ["books"]}}, r"books"),
        ({"training": {"datasets": [{"id": "me/books"}]}}, r"training.datasets\[0\] lacks 'name'"),
        ({"training": {"steps": 0}}, "training has steps 0.*must be an integer from 1 to"),
        ({"notes": [""]}, r"notes \[''\].*must be a list of texts"),
        (broken("results", 1, "value", value=...), r"value"),
        (broken("results", 1, "value", value=float("nan")), r"results\[1\] has value nan.*must be a finite number"),
        (broken("results", 1, "value", value=True), r"results\[1\] has value True"),
        (broken("results", 1, "value", value="0.5"), r"results\[1\] has value '0.5'"),
        (broken("results", 0, "interval", value=[0.7, 0.6]), r"results\[0\] has interval \[0.7, 0.6\].*the lower one first"),
        (broken("results", 0, "interval", value=[0.5]), r"interval \[0.5\]"),
        (broken("results", 0, "interval", value=[0.5, float("inf")]), r"interval \[0.5, inf\]"),
        (broken("results", 2, "length", value=-1), r"results\[2\] has length -1.*must be an integer from 1 to"),
        (broken("results", 2, "count", value=1.5), "count 1.5"),
        (broken("results", 3, "seeds", value=[0, "1"]), r"seeds \[0, '1'\].*must be a list of integers"),
        (broken("results", 2, "this", value="yes"), "yes"),
        (broken("results", 2, "lenght", value=1), r"lenght"),
        (broken("results", 4, "dataset", "name", value=" "), r"results\[4\].dataset has name ' '"),
        (broken("results", 4, "dataset", "id", value=None), r"task_id"),
        (
            broken("results", 1, "value", value=10**5000),
            r"results\[1\] has value a int with too many digits.*must be a finite",
        ),
        ({"training": {"steps": 10**400}}, "1000"),
        (broken("results", 2, "length", value=512), r"results\[2\] and results\[1\] have the same"),
    ],
)
def test_bad_evaluation(measured, words):
    with pytest.raises(ValueError, match=words):
        checked_evaluation(measured)


NUMBERS = {"10^400": "1" + 400 * "0", "-10^5000": "-1" + 5000 * "0", "nested": 500 * "[" + 500 * "]"}
NUMBERS |= {text: text for text in ("1e400", "NaN", "-Infinity", "true", '"1"', "1e308", "-0.0", "5e-324")}
FIGURES = ("1e308", "-0.0", "5e-324")
"""Those that are valid metric values."""


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_a_file(tmp_path, name):
    """A number is shown in the card, or raises an error that names its entry."""
    shared("bert").config.save_pretrained(tmp_path)
    for entry, given in {
        "value": "{}", "interval": "[{0}, {0}]", "length": "{}", "count": "{}", "seeds": "[{}]",
    }.items():  # fmt: skip
        made = json.dumps({"results": [result(value=0.5) | {entry: "HERE"}]}).replace('"HERE"', given.format(NUMBERS[name]))
        (tmp_path / EVALUATION).write_text(made)
        if name in FIGURES and entry in ("value", "interval"):
            card = model_card(tmp_path, "me/model")
            assert ModelCard(card).data.eval_results and max(map(len, card.splitlines())) < 200 and "-0.000" not in card
        else:
            with pytest.raises(ValueError, match=rf"results\[0\] has {entry} .*must be"):
                model_card(tmp_path, "me/model")


def test_a_bad_file(tmp_path):
    shared("bert").config.save_pretrained(tmp_path)
    file = tmp_path / EVALUATION
    for text, words in (
        ("{", f"{EVALUATION} can't be read as JSON"),
        ('{"results": [], "results": []}', "an object has the entry 'results' twice"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=words):
            model_card(tmp_path, "me/model")
    file.write_text("\ufeff{}", encoding="utf-8")  # as Windows writes it
    assert saved_files.read_json(file) == {}


def test_metadata_without_last_bits():
    measured = {"results": [result(value=0.1 + 0.2, interval=[0.1 + 0.2, 0.7 + 0.1], count=3)]}
    (found,) = ModelCard(model_card(shared("bert"), "me/model", evaluation=measured)).data.eval_results
    assert found.metric_value == 0.3 and found.metric_args == {"interval": [0.3, 0.8], "count": 3}


def test_lengths_in_other_units():
    """Lengths of images are patches. Two units make two columns."""
    measured = {"results": [result(value=0.5, length=8, unit="patches"), result(value=0.25, length=8)]}
    card = model_card(shared("bert"), "me/model", evaluation=measured)
    assert "| model | 8 patches | 8 tokens |" in card and "| **distilled** | 0.500 | 0.250 |" in card
    names = [each.metric_name for each in ModelCard(card).data.eval_results]
    assert sorted(names) == ["mrr, 8 patches", "mrr, 8 tokens"]


def of_clip(encoding, part):
    return hf_posenc.patch(tiny("CLIPModel"), encoding, submodel=part, max_length=8)


KINDS = {
    "text": (lambda: patched("bert", "alibi", max_length=64), "- maximum length: 64 tokens"),
    "image": (lambda: hf_posenc.patch(tiny("ViTModel"), "rope_2d", max_length=16), "- maximum length: 16 patches"),
    "a stock model of images": (lambda: tiny("ViTModel"), "- maximum length: 16 patches"),
    "text in another": (lambda: of_clip("alibi", "text_model"), "the submodel `text_model`\n- maximum length: 8 tokens"),
    "images in another": (
        lambda: of_clip("rope_2d", "vision_model"),
        "the submodel `vision_model`\n- maximum length: 8 patches",
    ),
    "speech": (lambda: hf_posenc.patch(tiny("Wav2Vec2Model"), "alibi", max_length=8), "- maximum length: 8 positions"),
    "sequences": (lambda: hf_posenc.patch(tiny("BartForConditionalGeneration"), "alibi"), "AutoModelForSeq2SeqLM"),
    "int8": (lambda: hf_posenc.patch(stock("bert"), "learned", init="host", storage="int8"), "`storage='int8'`"),
    "extended": (lambda: hf_posenc.extend(stock("bert"), 48, "cubic"), "- class: `BertModel`"),
}


@pytest.mark.parametrize("name", KINDS)
def test_cards_of_kinds_of_models(name):
    make, words = KINDS[name]
    assert words in model_card(make(), "me/model")


def test_what_a_reader_needs():
    """A card starts with the purpose. It has labels, size, license, and language, or states that they are missing."""
    model = hf_posenc.patch(
        stock("bert", "ForSequenceClassification", id2label={0: "no|yes", 1: "maybe"}), "alibi", max_length=64
    )
    card = model_card(model, "me/model", metadata={"base_model": "me/base", "language": ["de", "en"]})
    title, _, purpose = card.partition("---\n\n")[2].splitlines()[:3]
    assert title == "# model" and purpose == (
        "model is [me/base](https://huggingface.co/me/base) with `alibi` position encoding and a maximum length of 64 tokens."
    )
    assert card.index("## Load the model") < card.index("## Details")
    size = sum(parameter.numel() for parameter in model.parameters())
    for line in (f"parameters: {size:,}", r"labels: `no\|yes`, `maybe`", "license: not stated", "language: de, en"):
        assert f"\n- {line}\n" in card
    assert "<https://arxiv.org/abs/2108.12409>" in card.partition("## Citation")[2]


def test_a_model_from_scratch_has_no_base():
    """The card doesn't call the model patched, even with a base model in the metadata."""
    config = hf_posenc.PosEncBertConfig(position_encoding="alibi", **BERT)
    assert len(blocks(AutoModel.from_config(config), metadata={"base_model": "me/base"})) == 1


@pytest.mark.parametrize("source", ["stock", "patched"])
def test_a_model_trained_from_scratch_has_no_base(tmp_path, source, tokenizer, monkeypatch):
    """Only the sizes come from the named model, so the card mentions neither `unpatch` nor a base model."""
    monkeypatch.setattr("hf_posenc.modeling.parameter_sharing._public_name", lambda name: name and "me/base")
    model = stock("bert") if source == "stock" else patched("bert", "alibi")
    model.save_pretrained(tmp_path)
    arguments = argparse.Namespace(
        position_encoding="alibi" if source == "stock" else None,
        model_name_or_path=str(tmp_path),
        model_max_length=None,
        extend=None,
        from_scratch=True,
        train_positions_only=False,
        gradient_checkpointing=False,
    )
    card = model_card(models.load_model(arguments, AutoModel, tokenizer), "me/model")
    assert "unpatch" not in card and "base_model" not in card and "me/base" not in card and "`alibi`" in card


def test_notes_without_results_have_a_heading():
    card = model_card(shared("bert"), "me/model", evaluation={"notes": ["One run.", "On a CPU."]})
    assert "\n\n## Results\n\nOne run.\n\nOn a CPU.\n\n## Details\n" in card


def test_result_files():
    """Result files come from the checked evaluation. Checking again changes nothing."""
    checked = checked_evaluation(MEASURED)
    assert checked_evaluation(checked) == checked == checked_evaluation(json.loads(json.dumps(checked)))
    files = result_files(MEASURED)
    (entry,) = parse_eval_result_entries(yaml.safe_load(files.pop(".eval_results/me--pages.yaml")))
    assert (entry.dataset_id, entry.task_id, entry.value, entry.notes) == ("me/pages", "default", 1, "mrr")
    assert not files and result_files({}) == result_files(broken("results", 4, "this", value=False)) == {}
    twice = {**MEASURED, "results": [*MEASURED["results"], {**MEASURED["results"][4], "metric": "recall_at_1"}]}
    with pytest.raises(ValueError, match=r"default"):
        result_files(twice)


# Existing cards.


def test_from_a_shell(tmp_path):
    folder, output = tmp_path / "bert-alibi", tmp_path / "bert-alibi" / "README.md"
    patched("bert", "alibi").save_pretrained(folder)
    (folder / EVALUATION).write_text(json.dumps(MEASURED))

    def run(*arguments, code=0):
        done = CliRunner().invoke(app, ["model-card", str(folder), *map(str, arguments)])
        assert done.exit_code == code, done.output
        return done.output

    assert run() == model_card(folder, "bert-alibi")
    output.write_text("---\nlicense: mit\n---\n")
    run("--repo-id", "me/x", "--figures", "a.png", "--output", output)
    assert "license: mit\n" in output.read_text() and "![a](a.png)" in output.read_text()
    assert "mrr" in ModelCard(output.read_text()).data.metrics
    assert "my model" in run("--repo-id", "my model", code=1)


def test_an_existing_card_keeps_its_text_and_gets_new_metadata(tmp_path):
    output = tmp_path / "README.md"
    patched("bert", "alibi").save_pretrained(tmp_path)
    head = "license: mit\nlicense_link: mine\ntags:\n- rope\n- medical\nmetrics:\n- f1\nbase_model: me/base\nlibrary_name: x\n"
    output.write_text(f"---\n{head}---\n\n# Mine\n\nTrained with love.\n")
    for _ in range(2):
        done = CliRunner().invoke(app, ["model-card", str(tmp_path), "--output", str(output)])
        assert done.exit_code == 0, done.output
        card = ModelCard(output.read_text())
        assert card.text == "\n# Mine\n\nTrained with love.\n"
        assert card.data.to_dict() == {
            **{"license": "mit", "license_link": "mine", "base_model": "me/base", "library_name": "transformers"},
            **{"pipeline_tag": "feature-extraction", "tags": ["hf-posenc", "alibi", "medical"]},
        }


# Evaluations by the scripts, and the cards of the models trained in this project.


def test_a_training_record_becomes_an_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scripts/finetune.py", "--train_file", "a b.csv"])
    arguments = {"train_file": "data/a b.csv", "validation_file": "data/c.csv", "dataset_name": None}
    record = {"arguments": arguments, "steps": 12, "step": 12, "text_length": 64, "losses": [1.0], "eval_samples": 100}
    record |= {"eval_accuracy": 0.75, "eval_majority_share": 0.5}
    made = files.of_training(record, "PosEncBertForSequenceClassification")
    files.write(tmp_path / EVALUATION, made)
    checked = checked_evaluation(json.loads((tmp_path / EVALUATION).read_text()))
    training, (ours, baseline) = checked["training"], checked["results"]
    assert checked["command"] == "python scripts/finetune.py --train_file 'a b.csv'"
    assert [dataset["name"] for dataset in training["datasets"]] == ["a b.csv"] and training["steps"] == 12
    about = {"metric": "accuracy", "length": 64, "count": 100}
    assert ours.items() >= {**about, "model": "this model", "value": 0.75, "task": "text-classification"}.items()
    assert baseline.items() >= {**about, "model": "the most frequent label", "value": 0.5}.items()
    assert ours["dataset"]["name"] == "c.csv"
    record["arguments"] = {"dataset_name": "me/books", "dataset_config_name": "old"}
    trained = checked_evaluation(files.of_training(record, "BertForMaskedLM"))
    assert trained["training"]["datasets"][0]["id"] == "me/books" and trained["results"][0]["task"] == "fill-mask"


VALIDATE = """
import sys
from huggingface_hub import ModelCard

class Broken(ModelCard):
    def __str__(self):
        return "---\\ntags: [\\n---\\n"

for path in sys.argv[1:]:
    ModelCard.load(path).validate()
try:
    Broken("").validate()
except ValueError:
    sys.exit(0)
sys.exit("the validator takes anything")
"""


def test_they_pass_the_clients_validator(tmp_path):
    full = tmp_path / "full.md"
    full.write_text(model_card(patched("bert", "sinusoidal+alibi"), "me/model", evaluation=MEASURED, figures=["a.png"]))
    settings = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
    with serve() as hub:
        run_python(
            VALIDATE, *(CARDS / name / "README.md" for name in NAMES), full, fresh=True, HF_ENDPOINT=hub.endpoint, **settings
        )
        assert hub.log == ["POST /api/validate-yaml"] * (len(NAMES) + 2)
