"""Fine-tuning a classifier from end to end on tiny models, and the data it is shown with."""

import csv
import json
import os
import subprocess
import sys

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    BertTokenizer,
    GPT2Config,
    GPT2Model,
    PreTrainedTokenizerFast,
    pipeline,
)

from conftest import BERT, HOSTS, LENGTH, ROOT, VOCABULARY
from hub_server import TOKEN, USER, serve

SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

import finetune  # noqa: E402
import reviews  # noqa: E402

WORDS = [f"w{i}" for i in range(VOCABULARY - 5)]
NO_DROPOUT = {
    "bert": dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "gpt2": dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
}


def rows(count, start=0):
    """Texts of 3 to 9 words: "good" ones of the words from w20 on, "bad" ones of those before."""
    made = []
    for i in range(start, start + count):
        words = [WORDS[20 * (i % 2) + (7 * i + 3 * j) % 20] for j in range(3 + i % 7)]
        made.append((" ".join(words), "good" if i % 2 else "bad"))
    return made


def write(path, data, header=("text", "label")):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *data])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny BERT and a GPT-2 without pad token, their tokenizers, and labelled texts."""
    path = tmp_path_factory.mktemp("tiny")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    torch.manual_seed(0)
    # As they start from scratch, since these are to learn something.
    sizes = BERT | NO_DROPOUT["bert"] | {"vocab_size": VOCABULARY}
    BertModel(BertConfig(**sizes, problem_type="multi_label_classification")).save_pretrained(path / "bert")
    (path / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizer(str(path / "vocab.txt")).save_pretrained(path / "bert")
    gpt2 = HOSTS["gpt2"][1] | NO_DROPOUT["gpt2"] | {"pad_token_id": None}
    GPT2Model(GPT2Config(vocab_size=VOCABULARY, **gpt2)).bfloat16().save_pretrained(path / "gpt2")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="[CLS]").save_pretrained(path / "gpt2")
    (path / "data").mkdir()
    (text, label), *others = rows(40)
    # The first one is to be cut.
    write(path / "data" / "train.csv", [(" ".join([text] * LENGTH), label), *others])
    # Three labels of eleven are wrong, so that no metric is 1; batches of two leave one over.
    other = {"good": "bad", "bad": "good"}
    flipped = [(text, other[label] if i < 3 else label) for i, (text, label) in enumerate(rows(11, 40))]
    write(path / "data" / "validation.csv", flipped)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def arguments_for(tiny, output, *more, model="bert", data=("--train_file", "--validation_file"), batch=8):
    """The command line of a short run that learns the task; flags in `more` win."""
    files = {"--train_file": "train.csv", "--validation_file": "validation.csv"}
    given = ["--model_name_or_path", str(tiny / model), "--output_dir", str(output), "--max_train_steps", "40"]
    given += ["--learning_rate", "0.005", "--per_device_train_batch_size", str(batch), "--per_device_eval_batch_size", "2"]
    for flag in data:
        given += [flag, str(tiny / "data" / files[flag])]
    return [*given, *map(str, more)]


def train(*arguments, **options):
    """Run the script in this process; its all_results.json."""
    line = arguments_for(*arguments, **options)
    finetune.main(line)
    return json.loads((arguments[1] / "all_results.json").read_text())


def train_apart(tiny, output, *more, launcher=(), batch=8, **settings):
    """Run the script in processes of its own; its all_results.json and its standard output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"HF_DATASETS_CACHE": str(output) + "-cache", "OMP_NUM_THREADS": "1", **settings}
    command = [sys.executable, *launcher, str(SCRIPTS / "finetune.py"), *arguments_for(tiny, output, *more, batch=batch)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((output / "all_results.json").read_text()), done.stdout


@torch.no_grad()
def answers(path, texts):
    """The labels that a saved classifier gives to texts, one at a time."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    logits = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    return [model.config.id2label[i] for i in logits.argmax(-1).tolist()]


@pytest.fixture(scope="module")
def one_process(tiny, tmp_path_factory):
    """A run on one process which pushes what it has trained: its output folder, its record, what it said, the Hub's repos."""
    output = tmp_path_factory.mktemp("one") / "out"
    with serve() as hub:
        settings = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        settings["HF_HOME"] = str(output) + "-home"
        push = ("--push_to_hub", "--hub_model_id", f"{USER}/classifier", "--hub_private_repo")
        return output, *train_apart(tiny, output, *push, **settings), hub.repos


def test_metrics_are_those_of_the_saved_model(tiny, one_process):
    output, record, shown, _ = one_process
    with (tiny / "data" / "validation.csv").open() as file:
        texts, expected = zip(*[(row["text"], row["label"]) for row in csv.DictReader(file)], strict=True)
    given = answers(output, texts)
    assert given == [label for _, label in rows(11, 40)]
    hits = {name: sum(g == e == name for g, e in zip(given, expected, strict=True)) for name in ("bad", "good")}
    f1 = [2 * hits[name] / (given.count(name) + expected.count(name)) for name in hits]
    assert record["eval_accuracy"] == pytest.approx(8 / 11) == sum(hits.values()) / 11
    assert record["eval_macro_f1"] == pytest.approx(sum(f1) / 2)
    assert record["eval_majority_share"] == max(map(expected.count, hits)) / 11
    assert record["eval_samples"] == 11 and record["train_samples"] == 40 and record["processes"] == 1
    assert record["arguments"]["seed"] == 0 and record["seconds"] > 0 and record["steps"] == len(record["losses"]) == 40
    assert "eval_accuracy: 0.7273" in shown and "BertForSequenceClassification: learned" in shown
    assert AutoTokenizer.from_pretrained(output).model_max_length == LENGTH == record["max_length"]
    assert json.loads((output / "tokenizer.json").read_text())["truncation"] is None


def test_the_hub_has_what_was_saved(one_process):
    output, _, _, repos = one_process
    ((name, repo),) = repos.items()
    files = repo.commits[-1].files
    assert name == f"{USER}/classifier" and repo.private and "text-classification" in files["README.md"].decode()
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert files[file] == (output / file).read_bytes(), file


def test_two_processes_do_what_one_does(tiny, one_process, tmp_path):
    _, alone, _, _ = one_process
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29517")
    record, shown = train_apart(tiny, tmp_path / "out", launcher=launcher, batch=4)
    assert record["processes"] == 2 and shown.count("eval_accuracy:") == shown.count("usable length:") == 1
    assert record["losses"] == pytest.approx(alone["losses"], abs=1e-3)
    assert {key: record[key] for key in record if key.startswith("eval_")} == {
        key: alone[key] for key in alone if key.startswith("eval_")
    }


def test_accumulated_gradients_are_those_of_the_larger_batch(tiny, tmp_path):
    whole = train(tiny, tmp_path / "whole")
    parts = train(tiny, tmp_path / "parts", "--gradient_accumulation_steps", 2, batch=4)
    assert parts["steps"] == whole["steps"] == 40 and len(parts["losses"]) == 80
    assert [sum(pair) / 2 for pair in zip(*[iter(parts["losses"])] * 2, strict=True)] == pytest.approx(
        whole["losses"], abs=1e-3
    )


def test_patched_and_patched_before(tiny, tmp_path):
    encoding = '{"type": "rope", "theta": 500}'
    first = train(tiny, tmp_path / "first", "--position_encoding", encoding, "--max_length", 2 * LENGTH)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "first")
    assert type(model).__name__ == "PosEncBertForSequenceClassification"
    assert model.config.position_encoding["theta"] == 500 and model.config.position_encoding["max_length"] == 2 * LENGTH
    assert AutoTokenizer.from_pretrained(tmp_path / "first").model_max_length == 2 * LENGTH == first["max_length"]
    classify = pipeline("text-classification", model=str(tmp_path / "first"))
    assert [each["label"] for each in classify([text for text, _ in rows(6)])] == [label for _, label in rows(6)]

    trained = {"model": tmp_path / "first"}
    for name, again in (("same", ("--position_encoding", "rotary")), ("none", ())):
        second = train(tiny, tmp_path / name, *again, **trained)
        assert max(second["losses"][:3]) < first["losses"][0] / 4 and second["max_length"] == 2 * LENGTH
        config = AutoModelForSequenceClassification.from_pretrained(tmp_path / name).config
        assert config.position_encoding == model.config.position_encoding
    with pytest.raises(ValueError, match="saved with the 'rope' encoding, not 'alibi'"):
        train(tiny, tmp_path / "other", "--position_encoding", "alibi", **trained)
    with pytest.raises(SystemExit, match="--max_length 49 is above the usable length .* 48 tokens"):
        train(tiny, tmp_path / "longer", "--max_length", 49, **trained)
    write(tmp_path / "three.csv", [*rows(6), ("w3 w4", "so-so")])
    with pytest.raises(SystemExit, match="tells 2 classes apart, and the data have 3"):
        train(tiny, tmp_path / "three", "--train_file", tmp_path / "three.csv", **trained)
    assert not any((tmp_path / name).exists() for name in ("other", "longer", "three"))


def test_decoder_without_pad_token_and_without_limit(tiny, tmp_path):
    record = train(
        tiny, tmp_path / "out", "--position_encoding", "alibi", "--dataset_name", tiny / "data", model="gpt2", data=()
    )
    assert record["eval_accuracy"] == pytest.approx(8 / 11) and record["max_length"] == 512
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.pad_token == tokenizer.eos_token == "[CLS]" and tokenizer.model_max_length == int(1e30)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert (
        model.dtype == torch.float32 and model.config.pad_token_id == 2 and model.config.position_encoding["max_length"] is None
    )
    together = model(**tokenizer([text for text, _ in rows(9)], padding=True, return_tensors="pt")).logits.argmax(-1)
    assert [model.config.id2label[i] for i in together.tolist()] == answers(tmp_path / "out", [text for text, _ in rows(9)])


def test_json_with_columns_of_its_own_and_nothing_to_measure(tiny, tmp_path, capsys):
    lines = [json.dumps({"said": text, "stars": 10 if label == "good" else 9}) for text, label in rows(40)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    columns = ("--text_column", "said", "--label_column", "stars", "--num_train_epochs", 2, "--max_train_steps", 3)
    record = train(tiny, tmp_path / "out", "--train_file", tmp_path / "train.jsonl", *columns, data=())
    assert not any(key.startswith("eval_") for key in record) and record["steps"] == 3
    assert "nothing is measured" in capsys.readouterr().out
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config
    assert config.id2label == {0: "9", 1: "10"} and config.label2id == {"9": 0, "10": 1}


def test_names_of_a_data_sets_own_classes():
    features = Features({"text": Value("string"), "label": ClassLabel(names=["negative", "neutral", "positive"])})
    data = Dataset.from_dict({"text": ["w1", "w2", "w3"], "label": [2, 0, 2]}, features=features)
    assert finetune.label_names({"train": data}, "label") == {0: "negative", 2: "positive"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--push_to_hub",), "--push_to_hub and --hub_model_id go together"),
        (("--hub_model_id", "me/it"), "--push_to_hub and --hub_model_id go together"),
        (("--hub_private_repo",), "goes with --push_to_hub"),
        (("--push_to_hub", "--hub_model_id", "me/no/such"), "--hub_model_id me/no/such: Repo id must be"),
        (("--push_to_hub", "--hub_model_id", "me/it"), "there is no token for the Hub"),
        (("--dataset_name", "imdb"), "give one of the two"),
        (("--dataset_config_name", "plain"), "goes with --dataset_name"),
        (("--position_encoding", "{rope}"), "'{rope}' is no JSON"),
        (("--max_length", "0"), "'0': allowed is an integer from 1 on"),
        (("--num_train_epochs", "1.5"), "'1.5': allowed is an integer from 1 on"),
    ],
)
def test_arguments_refused(tiny, tmp_path, capsys, monkeypatch, more, words):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(SystemExit):
        finetune.parse_arguments(arguments_for(tiny, tmp_path / "out", *more))
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("train.csv", "words,label\nw1,a\nw2,b\n", r"the train data have the columns \['words', 'label'\], but no `text`"),
        ("train.csv", "text,stars\nw1,a\nw2,b\n", "but no `label`: see --label_column"),
        ("train.csv", "text,label\n", "can't be read: .* no data"),
        ("train.csv", "", "can't be read"),
        ("train.csv", "text,label\nw1,a\n,b\n", "row 2 of the train data has no text"),
        ("train.csv", "text,label\nw1,a\nw2,\n", "row 2 of the train data has no label"),
        ("train.csv", "text,label\n1,a\n2,b\n", "`text` of the train data is to hold strings, but row 1 has 1"),
        ("train.csv", "text,label\nw1,0.5\nw2,0.7\n", "is to hold strings or integers, but row 1 has 0.5"),
        ("train.csv", "text,label\nw1,a\nw2,a\n", "the only label in the train data is 'a'"),
        ("train.csv", "text,label\nw1,a\nw2,good\n", r"the validation data have the labels \['bad'\]"),
        ("train.json", '{"text": "w1"', "can't be read"),
        ("train.txt", "w1\n", "none of the files that are read here: .csv, .json, .jsonl"),
        ("nowhere/train.csv", None, "is not there"),
    ],
)
def test_data_refused(tiny, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit, match=words):
        train(tiny, tmp_path / "out", "--train_file", tmp_path / name, data=("--validation_file",))
    assert not (tmp_path / "out").exists()


def test_data_set_without_a_train_split(tiny, tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "test.csv", rows(4))
    with pytest.raises(SystemExit, match=r"has the splits \['test'\], but no `train`"):
        train(tiny, tmp_path / "out", "--dataset_name", tmp_path / "data", data=())


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        (("--position_encoding", "alibbi"), ValueError, "unknown position encoding 'alibbi'"),
        (("--max_length", LENGTH + 1), SystemExit, "--max_length 25 is above the usable length .* 24 tokens"),
        (("--max_length", 2), SystemExit, "--max_length 2 leaves no room for text beside 2 special tokens"),
        (("--learning_rate", "inf"), SystemExit, "the loss is nan at step 2"),
        (("--learning_rate", "inf", "--max_train_steps", 1), SystemExit, "after step 1 the weights are not finite"),
    ],
)
def test_refused(tiny, tmp_path, more, error, words):
    with pytest.raises(error, match=words):
        train(tiny, tmp_path / "out", *more)
    assert not (tmp_path / "out" / "config.json").exists()


def test_reviews_are_split_by_movie(tmp_path):
    corpus = [("fresh", f"Great number {i}, in its own way", f"movie{i // 4}") for i in range(400)]
    corpus += [("plot", "A man walks", "movie1"), ("rotten", "great NUMBER 7 in its own way!", "movie2"), ("rotten", "…", "m")]
    write(tmp_path / "corpus.csv", corpus, header=("category", "text", "movie_name"))
    parts = reviews.split(reviews.read(tmp_path / "corpus.csv"))
    assert sum(map(len, parts)) == 400 and all(review.label == "fresh" for part in parts for review in part)
    movies = [{review.movie for review in part} for part in parts]
    assert not movies[0] & movies[1] and 10 <= len(movies[1]) <= 30
    write(tmp_path / "other.csv", [("a", "b")])
    with pytest.raises(SystemExit, match="but no category, movie_name"):
        reviews.read(tmp_path / "other.csv")


def test_the_real_reviews():
    try:
        path = reviews.corpus_file()
    except SystemExit as missing:
        pytest.skip(str(missing))
    train, validation = reviews.split(reviews.read(path))
    assert (len(train), len(validation)) == (10_476, 2_273)
    assert {review.label for review in train} == {review.label for review in validation} == {"fresh", "rotten"}


def test_the_readme_shows_the_kept_results():
    shown = (ROOT / "README.md").read_text()
    for name, record in json.loads((SCRIPTS / "results" / "finetune.json").read_text()).items():
        assert f"| {name} | {record['eval_accuracy']:.3f} | {record['eval_macro_f1']:.3f} |" in shown
