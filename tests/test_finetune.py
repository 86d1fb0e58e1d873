"""Fine-tuning from end to end on tiny models. Each task has a reference implementation and data of its kind."""

import csv
import json
import re
from collections import Counter

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import ClassLabel, Dataset, Features, List, Value
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    BertTokenizer,
    ByT5Tokenizer,
    GPT2Config,
    GPT2Model,
    RobertaTokenizer,
    pipeline,
)

import vocabularies
from conftest import ROOT, WORDS, run_python
from hf_posenc.training import classification, finetune, question_answering
from hub_server import TOKEN, USER, serve
from models import BERT, HOSTS, LENGTH, VOCABULARY, slow

SCRIPTS = ROOT / "scripts"


def rows(count, start=0):
    """Texts of 3 to 9 words: "good" ones use the words from w20 on, "bad" ones use the words before."""
    made = []
    for i in range(start, start + count):
        words = [WORDS[20 * (i % 2) + (7 * i + 3 * j) % 20] for j in range(3 + i % 7)]
        made.append((" ".join(words), "good" if i % 2 else "bad"))
    return made


def tagged(count, start=0):
    """Sentences of 1 to 9 words. A word's tag is the third of the vocabulary that it is in: LOW, MID, or TOP."""
    for i in range(start, start + count):
        words = [WORDS[(7 * i + 11 * j) % 54] for j in range(1 + i % 9)]
        yield words, [("LOW", "MID", "TOP")[int(word[1:]) // 18] for word in words]


def asked(count, start=0, unanswerable=False):
    """Contexts of 6 to 40 words with an answer of two to four words in capitals, W50 to W55. With `unanswerable`, every fourth
    context has none.
    """
    for i in range(start, start + count):
        words = [WORDS[(7 * i + 3 * j) % 50] for j in range(6 + 11 * i % 35)]
        answers = {"text": [], "answer_start": []}
        if not unanswerable or i % 4:
            run = "  ".join([f"W{50 + i % 2}", *["W52"] * (i % 3), f"W{53 + i % 3}"])
            place = i * 5 % len(words)
            answers = {"text": [run], "answer_start": [len("".join(f"{word} " for word in words[:place]))]}
            words.insert(place, run)
        question = " ".join(f"w{(i + 9 * j) % 50}" for j in range(1 + i % 5))
        yield {"question": question, "context": " ".join(words), "answers": answers}


def write(path, data, header=("text", "label")):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *data])


def write_json(path, data):
    path.write_text("\n".join(map(json.dumps, data)))
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A directory with a tiny BERT, a GPT-2 without a pad token, their tokenizers, and rows of all tasks."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    # The models are initialized as for training from scratch, because they must learn.
    sizes = BERT | HOSTS["bert"].no_dropout | {"vocab_size": VOCABULARY}
    BertModel(BertConfig(**sizes, problem_type="multi_label_classification")).save_pretrained(path / "bert")
    vocabularies.of_bert(path).save_pretrained(path / "bert")
    gpt2 = HOSTS["gpt2"].sizes | HOSTS["gpt2"].no_dropout | {"pad_token_id": None}
    GPT2Model(GPT2Config(vocab_size=VOCABULARY, **gpt2)).bfloat16().save_pretrained(path / "gpt2")
    vocabularies.of_words(eos_token="[CLS]").save_pretrained(path / "gpt2")
    (path / "data").mkdir()
    (text, label), *others = rows(40)
    # The first text will be truncated.
    write(path / "data" / "train.csv", [(" ".join([text] * LENGTH), label), *others])
    # Three labels of eleven are wrong, so that no metric is 1. With batches of two, one row is left over.
    other = {"good": "bad", "bad": "good"}
    flipped = [(text, other[label] if i < 3 else label) for i, (text, label) in enumerate(rows(11, 40))]
    write(path / "data" / "validation.csv", flipped)
    return path


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A separate cache, and no Accelerator of another run."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def arguments_for(tiny, output, *more, model="bert", data=("--train_file", "--validation_file"), batch=8):
    """The command line of a short run that learns the task. Flags in `more` take precedence."""
    files = {"--train_file": "train.csv", "--validation_file": "validation.csv"}
    given = ["--model_name_or_path", tiny / model, "--output_dir", output, "--max_train_steps", 40]
    given += ["--learning_rate", 0.005, "--per_device_train_batch_size", batch, "--per_device_eval_batch_size", 2]
    for flag in data:
        given += [flag, tiny / "data" / files[flag]]
    return [str(each) for each in (*given, *more)]


def read(output):
    return json.loads((output / "all_results.json").read_text())


def train(*arguments, **options):
    """Runs the script in this process, and returns its all_results.json."""
    finetune.main(arguments_for(*arguments, **options))
    return read(arguments[1])


def measures(record):
    return {key: value for key, value in record.items() if key.startswith("eval_")}


# Sequence classification.


def f1_of(given, expected, labels=("bad", "good")):
    """The mean F1 over labels."""
    hits = Counter(g for g, e in zip(given, expected, strict=True) if g == e)
    return sum(2 * hits[label] / (given.count(label) + expected.count(label)) for label in labels) / len(labels)


@torch.no_grad()
def answers(path, texts):
    """The labels that a saved classifier predicts for texts, one at a time."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    logits = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    return [model.config.id2label[i] for i in logits.argmax(-1).tolist()]


@pytest.fixture(scope="module")
def one_process(tiny, tmp_path_factory):
    """A run on one process that pushes its result. Returns its output directory, its record, its output, and the Hub's
    repositories.
    """
    output = tmp_path_factory.mktemp("one") / "out"
    with serve() as hub:
        settings = {"PYTHONPATH": str(ROOT), "HF_HOME": f"{output}-home", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        push = ("--push_to_hub", "--hub_model_id", f"{USER}/classifier", "--hub_private_repo", "--eval_steps", "20")
        code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        command = [SCRIPTS / "finetune.py", *arguments_for(tiny, output, *push)]
        shown = run_python(code, *command, fresh=True, HF_ENDPOINT=hub.endpoint, HF_TOKEN=TOKEN, **settings)
        return output, read(output), shown, hub.repos


def test_metrics_are_those_of_the_saved_model(tiny, one_process):
    output, record, shown, _ = one_process
    with (tiny / "data" / "validation.csv").open() as file:
        texts, expected = zip(*[(row["text"], row["label"]) for row in csv.DictReader(file)], strict=True)
    given = answers(output, texts)
    assert given == [label for _, label in rows(11, 40)]
    right = sum(g == e for g, e in zip(given, expected, strict=True))
    assert record["eval_accuracy"] == pytest.approx(8 / 11) == right / 11
    assert record["eval_macro_f1"] == pytest.approx(f1_of(given, expected))
    assert record["eval_majority_share"] == max(map(expected.count, ("bad", "good"))) / 11
    assert record["eval_samples"] == 11 and record["train_samples"] == 40 and record["processes"] == 1
    assert record["arguments"]["seed"] == 0 and record["seconds"] > 0 and record["steps"] == len(record["losses"]) == 40
    assert [each["step"] for each in record["evaluations"]] == [20, 40] and record["epochs"] == 8
    assert measures(record).items() <= record["evaluations"][-1].items()
    assert "step 40: accuracy 0.7273" in shown and "BertForSequenceClassification\n" in shown and "learned" in shown
    assert "labels: bad, good" in shown and "1 process on cpu" in shown
    assert "1 of 40 training texts are truncated to 24 tokens" in shown
    assert AutoTokenizer.from_pretrained(output).model_max_length == LENGTH == record["text_length"]
    assert json.loads((output / "tokenizer.json").read_text())["truncation"] is None


def test_the_hub_has_what_was_saved(one_process):
    output, _, _, repos = one_process
    ((name, repo),) = repos.items()
    files = repo.commits[-1].files
    assert name == f"{USER}/classifier" and repo.private and "text-classification" in files["README.md"].decode()
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert files[file] == (output / file).read_bytes(), file


def test_decoder_without_pad_token_and_without_limit(tiny, tmp_path):
    data = ("--position_encoding", "alibi", "--dataset_name", tiny / "data")
    record = train(tiny, tmp_path / "out", *data, model="gpt2", data=())
    assert record["eval_accuracy"] == pytest.approx(8 / 11) and record["text_length"] == 512
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.pad_token == tokenizer.eos_token == "[CLS]" and tokenizer.model_max_length == int(1e30)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32 and model.config.pad_token_id == 2
    assert model.config.position_encoding["max_length"] is None
    together = model(**tokenizer([text for text, _ in rows(9)], padding=True, return_tensors="pt")).logits.argmax(-1)
    assert [model.config.id2label[i] for i in together.tolist()] == answers(tmp_path / "out", [text for text, _ in rows(9)])


def test_extended_before_training(tiny, tmp_path):
    """The script runs `hf-posenc extend` before training, with the model's own encoding and its weights."""
    record = train(tiny, tmp_path / "out", "--extend", "dynamic", "--model_max_length", 2 * LENGTH, "--max_train_steps", 3)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.position_encoding["trained_rows"] == LENGTH and record["text_length"] == 2 * LENGTH
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 2 * LENGTH
    assert model.bert.posenc.weight.shape[0] == LENGTH


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--extend", "dynamic"), "--extend needs --model_max_length"),
        (("--extend", "cubic", "--model_max_length", 48, "--position_encoding", "alibi"), "--position_encoding or --extend"),
        (("--extend", "stretch", "--model_max_length", 48), "stretch"),
        (("--extend", "yarn", "--model_max_length", 48), "yarn"),
        (("--model_max_length", 48), "--position_encoding or --extend"),
    ],
)
def test_bad_extensions(tiny, tmp_path, more, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        train(tiny, tmp_path / "out", *more)
    assert named in f"{stopped.value.code}{capsys.readouterr().err}" and not (tmp_path / "out").exists()


def test_patched_and_patched_before(tiny, tmp_path):
    """A trained head keeps the order of its labels in further training."""
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny / "bert", id2label={0: "good", 1: "bad"}, label2id={"good": 0, "bad": 1}
    )
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny / "bert").save_pretrained(tmp_path / "model")
    encoding = '{"type": "rope", "theta": 500}'
    more = ("--position_encoding", encoding, "--model_max_length", 2 * LENGTH)
    first = train(tiny, tmp_path / "first", *more, model=tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "first")
    assert type(model).__name__ == "PosEncBertForSequenceClassification" and model.config.id2label == {0: "good", 1: "bad"}
    assert model.config.position_encoding["theta"] == 500 and model.config.position_encoding["max_length"] == 2 * LENGTH
    assert AutoTokenizer.from_pretrained(tmp_path / "first").model_max_length == 2 * LENGTH == first["text_length"]
    classify = pipeline("text-classification", model=str(tmp_path / "first"))
    assert [each["label"] for each in classify([text for text, _ in rows(6)])] == [label for _, label in rows(6)]
    assert first["eval_accuracy"] == pytest.approx(8 / 11)

    trained = {"model": tmp_path / "first"}
    second = train(tiny, tmp_path / "second", "--position_encoding", "rotary", "--max_train_steps", 3, **trained)
    assert max(second["losses"]) < first["losses"][0] / 4 and second["text_length"] == 2 * LENGTH
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "second").config
    assert config.position_encoding == model.config.position_encoding
    write(tmp_path / "three.csv", [*rows(6), ("w3 w4", "so-so")])
    for more, words in (
        (("--position_encoding", "alibi"), "saved with the 'rope' encoding, not 'alibi'"),
        (("--text_length", 49), "text_length"),
        (("--train_file", tmp_path / "three.csv"), "2 classes, and the data have 3"),
    ):
        with pytest.raises(SystemExit, match=words):
            train(tiny, tmp_path / "other", *more, **trained)
    assert not (tmp_path / "other").exists()


def test_early_stopping_ends_with_the_best_model(tiny, tmp_path):
    """All validation labels are wrong, so scores fall as the model learns."""
    other = {"good": "bad", "bad": "good"}
    write(tmp_path / "wrong.csv", [(text, other[label]) for text, label in rows(20)])
    options = ("--validation_file", tmp_path / "wrong.csv", "--eval_steps", 5)
    record = train(tiny, tmp_path / "out", *options, "--early_stopping_patience", 2)
    scores = {each["step"]: each["eval_macro_f1"] for each in record["evaluations"]}
    best = max(scores, key=scores.get)
    assert record["steps"] == best + 10 < 40 and record["best_step"] == best and record["eval_macro_f1"] == scores[best]
    assert scores[best] > scores[record["steps"]]
    (folder,) = (tmp_path / "out").glob("best_*")
    assert folder.name == f"best_{best}"
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (folder / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
    given = answers(tmp_path / "out", [text for text, _ in rows(20)])
    assert f1_of(given, [other[label] for _, label in rows(20)]) == pytest.approx(scores[best])


def test_a_best_model_needs_validation_data(tiny, tmp_path):
    """A dataset may have no split `validation`. The error comes before training."""
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.csv", rows(8))
    for more in (("--load_best_model_at_end",), ("--early_stopping_patience", 1)):
        with pytest.raises(SystemExit, match="--validation_file"):
            train(tiny, tmp_path / "out", "--dataset_name", tmp_path / "data", *more, "--checkpointing_steps", 1, data=())
        assert not (tmp_path / "out").exists()


def test_columns_and_labels_of_data_sets(tiny, tags, tmp_path, capsys):
    """JSON may have other column names. A ClassLabel keeps only the labels that occur. Evaluation rows are optional."""
    data = [{"said": text, "stars": 10 if label == "good" else 9} for text, label in rows(40)]
    file = write_json(tmp_path / "train.jsonl", data)
    columns = ("--text_column", "said", "--label_column", "stars", "--num_train_epochs", 2, "--max_train_steps", 2)
    record = train(tiny, tmp_path / "json", "--train_file", file, *columns, data=())
    assert not measures(record) and not record["evaluations"] and record["steps"] == 2
    assert "not evaluated" in capsys.readouterr().out
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "json").config
    assert config.id2label == {0: "9", 1: "10"} and config.label2id == {"9": 0, "10": 1}

    features = Features({"text": Value("string"), "label": ClassLabel(names=["negative", "neutral", "positive"])})
    known = Dataset.from_dict({"text": ["w1", "w2", "w3", "w4"] * 10, "label": [2, 0, 2, 0] * 10}, features=features)
    known.to_parquet(tmp_path / "train.parquet")
    part = ("--validation_split_percentage", 25, "--max_train_steps", 1)
    record = train(tiny, tmp_path / "parquet", "--train_file", tmp_path / "train.parquet", *part, data=())
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "parquet").config
    assert config.id2label == {0: "negative", 1: "positive"}
    assert (record["train_samples"], record["eval_samples"]) == (30, 10)
    # Words and tags in CSV, one string each.
    train(tiny, tmp_path / "tags", *TAGS, "--train_file", tags / "train.csv", "--max_train_steps", 1, data=())
    config = AutoModelForTokenClassification.from_pretrained(tmp_path / "tags").config
    assert config.id2label == {0: "LOW", 1: "MID", 2: "TOP"}


def test_streams(tiny, tags, quiz, tmp_path):
    stream = ("--streaming", "--shuffle_buffer", 9, "--max_train_steps", 3, "--train_file")
    for name, line in (
        ("texts", (*stream, write_json(tmp_path / "texts.json", [{"text": t, "label": label} for t, label in rows(40)]))),
        ("tags", (*TAGS, *stream, tags / "train.json")),
        ("quiz", (*QUIZ, *stream, quiz / "v2-train.json")),
    ):
        record = train(tiny, tmp_path / name, *line, data=())
        assert record["train_samples"] is None is record["epochs"] and len(set(record["losses"])) == record["steps"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("task", ["texts", "tags", "quiz"])
def test_two_processes_and_accumulated_gradients_do_what_one_does(tiny, tags, quiz, tmp_path, launch, task):
    """Two processes take batches of two. Of eleven rows, three are left over, and their lengths differ."""
    line = {
        "texts": ["--train_file", tiny / "data" / "train.csv", "--validation_file", tiny / "data" / "validation.csv"],
        "tags": [*TAGS, "--train_file", tags / "train.json", "--validation_file", tags / "validation.json"],
        "quiz": quiz_line(quiz, "v2", "--model_max_length", LENGTH),
    }[task]
    line = (*line, "--position_encoding", "t5", "--max_train_steps", 12, "--eval_steps", 6)
    alone = train(tiny, tmp_path / "one", *line, data=())
    for name, batch, accumulated in (("two", 4, 1), ("accumulated", 2, 2)):
        cut = (*line, "--gradient_accumulation_steps", accumulated)
        codes, said = launch("finetune", *arguments_for(tiny, tmp_path / name, *cut, data=(), batch=batch), processes=2)
        assert codes == [0, 0], said[-3000:]
        record = read(tmp_path / name)
        assert record["processes"] == 2 and said.count("maximum length:") == 1
        assert record["losses"] == pytest.approx(alone["losses"], rel=1e-3, abs=1e-4)
        assert measures(record) == pytest.approx(measures(alone), rel=1e-3, abs=1e-4)


# Token classification.


def bpe():
    """A byte-level BPE tokenizer as in RoBERTa, which splits the words of WORDS into a few tokens each."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
    )
    learned.train_from_iterator([" ".join(WORDS)], trainer)
    model = json.loads(learned.to_str())["model"]
    return RobertaTokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])


def pieces():
    """A WordPiece tokenizer of single letters and digits."""
    letters = "wxyz0123456789"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), "-"]
    return BertTokenizer(vocab={word: i for i, word in enumerate(vocabulary)})


@pytest.mark.parametrize("make", [bpe, pieces])
@pytest.mark.parametrize("length", [100, 9])
def test_labels_are_at_the_first_token_of_each_word(make, length):
    """The reference implementation tokenizes one word after another."""
    tokenizer = make()
    sentences = [["w10", "xyz-w7", "", "w3"], ["\u200b", "w55"], ["w1"], ["w2", "-", "wwww", "\u00adw5", "w40", "\u200b"]]
    if make is bpe:  # which has tokens for everything
        sentences = [[word.replace("\u200b", "").replace("\u00ad", "") for word in words] for words in sentences]
    names = [[f"tag{row}{i}" for i in range(len(words))] for row, words in enumerate(sentences)]
    known = {name: i for i, name in enumerate(name for each in names for name in each)}
    made = classification.encoded_words({"words": sentences, "tags": names}, ("words", "tags"), tokenizer, known, length)
    for row, words in enumerate(sentences):
        ids, labels = [tokenizer.cls_token_id], [-100]
        for i, word in enumerate(words):
            own = tokenizer(" " * (make is bpe and i > 0) + word, add_special_tokens=False)
            # A space may be a separate token, which isn't part of the word.
            first = next((i for i, token in enumerate(own.tokens()) if token != "Ġ"), None)
            ids += own.input_ids
            labels += [known[names[row][i]] if token == first else -100 for token in range(len(own.input_ids))]
        assert made["length"][row] == len(ids) + 1
        assert made["input_ids"][row] == [*ids[: length - 1], tokenizer.sep_token_id]
        assert made["labels"][row] == [*labels[: length - 1], -100]


TAGS = ("--task", "token-classification", "--text_column", "words", "--label_column", "tags")


@pytest.fixture(scope="module")
def tags(tmp_path_factory):
    """Files of tagged sentences for training and validation: lists in JSON, ClassLabel lists in parquet, and strings in CSV."""
    path, names = tmp_path_factory.mktemp("tags"), ["LOW", "MID", "TOP"]
    right = [{"words": words, "tags": labels} for words, labels in tagged(40)]
    # One sentence will be truncated.
    right[0] = {key: value * 30 for key, value in right[0].items()}
    # Every fifth tag is wrong, and the last sentence is longer than the model's maximum length.
    wrong = []
    for i, (words, labels) in enumerate(tagged(11, 60)):
        labels = [names[(names.index(tag) + (j % 5 == i % 5)) % 3] for j, tag in enumerate(labels)]
        wrong.append({"words": words * (1 + 4 * (i == 10)), "tags": labels * (1 + 4 * (i == 10))})
    features = Features({"words": List(Value("string")), "tags": List(ClassLabel(names=names))})
    for split, data in {"train": right, "validation": wrong}.items():
        write_json(path / f"{split}.json", data)
        write(path / f"{split}.csv", [(" ".join(row["words"]), " ".join(row["tags"])) for row in data], ("words", "tags"))
        ids = [{**row, "tags": [names.index(tag) for tag in row["tags"]]} for row in data]
        Dataset.from_list(ids, features=features).to_parquet(path / f"{split}.parquet")
    return path


@torch.no_grad()
def assert_tag_metrics(record, output, validation, length):
    """The metrics equal those of the saved model's predictions for each word. Each word is one token, after [CLS] if there is
    one.
    """
    model, tokenizer = AutoModelForTokenClassification.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    special = tokenizer.num_special_tokens_to_add()
    given, expected, losses = [], [], []
    for line in validation.read_text().splitlines():
        row = json.loads(line)
        words = row["words"][: length - special]
        logits = model(**tokenizer(" ".join(words), return_tensors="pt")).logits[0][bool(special) :][: len(words)]
        wanted = row["tags"][: len(words)]
        given += [model.config.id2label[i] for i in logits.argmax(-1).tolist()]
        expected += wanted
        chosen = logits.log_softmax(-1)[range(len(words)), [model.config.label2id[tag] for tag in wanted]]
        losses += (-chosen).tolist()
    right = sum(g == e for g, e in zip(given, expected, strict=True))
    # Without entities, each word counts as one.
    assert record["eval_accuracy"] == record["eval_f1"] == pytest.approx(right / len(expected))
    assert record["eval_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4, abs=1e-5)
    assert record["eval_majority_share"] == max(map(expected.count, set(expected))) / len(expected)
    assert record["eval_samples"] == len(expected)
    assert 0.6 < record["eval_accuracy"] < 0.9  # all except the deliberate errors


@pytest.mark.parametrize(("model", "kind", "encoding"), [("bert", "parquet", "t5"), slow("gpt2", "csv", "alibi")])
def test_tags_are_learned_and_measured_over_words(tiny, tags, tmp_path, capsys, model, kind, encoding):
    files = ("--train_file", tags / f"train.{kind}", "--validation_file", tags / f"validation.{kind}")
    more = ("--position_encoding", encoding, "--model_max_length", LENGTH)
    record = train(tiny, tmp_path / "out", *TAGS, *files, *more, model=model, data=())
    assert_tag_metrics(record, tmp_path / "out", tags / "validation.json", LENGTH)
    said = capsys.readouterr().out
    assert "labels: LOW, MID, TOP" in said and f"1 of 40 training texts are truncated to {LENGTH} tokens" in said
    if encoding == "t5":
        assert load_file(tmp_path / "out" / "model.safetensors")["bert.posenc.weight"].any()
        text = "w1 w20 w40 w2"
        found = pipeline("token-classification", model=str(tmp_path / "out"))(text)
        assert [each["entity"] for each in found] == ["LOW", "MID", "TOP", "LOW"]
        assert [text[each["start"] : each["end"]] for each in found] == text.split()


def test_entities_are_measured_as_a_whole(tiny, tags, tmp_path):
    """An entity is right if its first word, its last word, and its type are."""
    for split in ("train", "validation"):
        text = (tags / f"{split}.json").read_text()
        for tag, entity in (("LOW", "O"), ("MID", "B-CITY"), ("TOP", "I-CITY")):
            text = text.replace(tag, entity)
        (tmp_path / f"{split}.json").write_text(text)
    files = ("--train_file", tmp_path / "train.json", "--validation_file", tmp_path / "validation.json")
    record = train(tiny, tmp_path / "out", *TAGS, *files, "--position_encoding", "t5", data=())
    model, tokenizer = (kind.from_pretrained(tmp_path / "out") for kind in (AutoModelForTokenClassification, AutoTokenizer))
    counts = Counter()
    for line in (tmp_path / "validation.json").read_text().splitlines():
        row = json.loads(line)
        with torch.no_grad():
            logits = model(**tokenizer(" ".join(row["words"]), return_tensors="pt")).logits[0, 1:-1]
        both = [entities([model.config.id2label[i] for i in logits.argmax(-1).tolist()]), entities(row["tags"])]
        counts.update(predicted=len(both[0]), expected=len(both[1]), right=len(both[0] & both[1]))
    assert record["eval_f1"] == pytest.approx(2 * counts["right"] / (counts["predicted"] + counts["expected"]))
    assert record["eval_precision"] == pytest.approx(counts["right"] / counts["predicted"])
    assert record["eval_recall"] == pytest.approx(counts["right"] / counts["expected"])
    assert 0 < record["eval_f1"] < record["eval_accuracy"] and "eval_macro_f1" not in record


def entities(tags):
    """The (first, last) words of entities of one type. I- without an entity before it begins one, as in conlleval."""
    starts = [i for i, tag in enumerate(tags) if tag[0] == "B" or (tag[0] == "I" and (i == 0 or tags[i - 1] == "O"))]
    return {(i, next((j for j in range(i + 1, len(tags)) if tags[j][0] != "I"), len(tags))) for i in starts}


# Question answering.


STRIDE = 5


def without_articles(text):
    """The words of an answer, as SQuAD compares them. These answers have no articles and no punctuation."""
    return text.lower().split()


def f1(said, wanted):
    said, wanted = without_articles(said), without_articles(wanted)
    if not said or not wanted:
        return float(said == wanted)
    return 2 * (Counter(said) & Counter(wanted)).total() / (len(said) + len(wanted))


@torch.no_grad()
def answered(model, tokenizer, row, length, stride, longest, unanswerable):
    """The saved model's answer and the losses of its windows. It uses windows over the context's tokens and loops over all
    spans.
    """
    question = tokenizer(row["question"], add_special_tokens=False).input_ids[:3]
    whole = tokenizer(row["context"], add_special_tokens=False, return_offsets_mapping=True)
    head, between, tail = ([tokenizer.cls_token_id], *[[tokenizer.sep_token_id]] * 2) if tokenizer.cls_token else ([], [], [])
    before = [*head, *question, *between]
    room = length - len(before) - len(tail)
    best, none, losses = (-torch.inf, ""), torch.inf, []
    for at in range(0, max(len(whole.input_ids) - stride, 1), room - stride):
        window = whole.input_ids[at : at + room]
        ids = torch.tensor([[*before, *window, *tail]])
        types = torch.tensor([[0] * len(before) + [1] * (len(window) + len(tail))])
        output = model(ids, **({"token_type_ids": types} if tokenizer.cls_token else {}))
        starts, ends = output.start_logits[0].double(), output.end_logits[0].double()
        none = min(none, (starts[0] + ends[0]).item())
        offsets = whole.offset_mapping[at : at + room]
        for i, (begin, _) in enumerate(offsets):
            for j in range(i, min(i + longest, len(offsets))):
                score = (starts[len(before) + i] + ends[len(before) + j]).item()
                best = max(best, (score, row["context"][begin : offsets[j][1]]))
        first = last = 0
        if row["answers"]["text"]:
            begin = row["answers"]["answer_start"][0]
            borders = [begin, begin + len(row["answers"]["text"][0])]
            if borders[0] in (firsts := [each[0] for each in offsets]) and borders[1] in (lasts := [e[1] for e in offsets]):
                first, last = len(before) + firsts.index(borders[0]), len(before) + lasts.index(borders[1])
        losses.append(-(starts.log_softmax(0)[first] + ends.log_softmax(0)[last]).item() / 2)
    return "" if unanswerable and none > best[0] else best[1], losses


def assert_answers(record, output, validation, length=LENGTH):
    examples = [json.loads(line) for line in validation.read_text().splitlines()]
    unanswerable = not all(row["answers"]["text"] for row in examples)
    loaded = AutoModelForQuestionAnswering.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    said, losses = zip(*(answered(*loaded, row, length, STRIDE, 4, unanswerable) for row in examples), strict=True)
    scores = [max(f1(each, text) for text in row["answers"]["text"] or [""]) for each, row in zip(said, examples, strict=True)]
    exact = [
        any(without_articles(each) == without_articles(text) for text in row["answers"]["text"] or [""])
        for each, row in zip(said, examples, strict=True)
    ]
    assert record["eval_f1"] == pytest.approx(sum(scores) / len(examples), abs=1e-6)
    assert record["eval_exact_match"] == pytest.approx(sum(exact) / len(examples), abs=1e-6)
    losses = [loss for each in losses for loss in each]
    assert record["eval_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4, abs=1e-5)
    assert record["eval_samples"] == len(examples) and len(losses) > len(examples)
    return said


@pytest.fixture(scope="module")
def quiz(tmp_path_factory):
    """Questions for training and validation. v2 has unanswerable ones. Some have two answers, or a half-right one."""
    path = tmp_path_factory.mktemp("quiz")
    for name in ("v1", "v2"):
        write_json(path / f"{name}-train.json", asked(48, unanswerable=name == "v2"))
        validation = list(asked(13, 101, unanswerable=name == "v2"))
        for i, row in enumerate(validation):
            (text,), (start,) = row["answers"]["text"] or [""], row["answers"]["answer_start"] or [0]
            if i % 4 == 1:
                more = row["context"][max(start - 4, 0) : start + len(text)]
                row["answers"] = {"text": [more], "answer_start": [max(start - 4, 0)]}
            elif i % 4 == 2:
                word = row["context"].split()[0]
                row["answers"] = {"text": [word, text], "answer_start": [0, start]}
        write_json(path / f"{name}-validation.json", validation)
    return path


QUIZ = ("--task", "question-answering", "--max_question_length", 3, "--doc_stride", STRIDE, "--max_answer_length", 4)


def quiz_line(quiz, kind, *more):
    files = ("--train_file", quiz / f"{kind}-train.json", "--validation_file", quiz / f"{kind}-validation.json")
    return (*QUIZ, *files, *more)


@pytest.mark.parametrize(("kind", "model"), [("v2", "left"), slow("v1", "gpt2")])
def test_answers_are_learned_and_measured_as_squad_does(tiny, quiz, tmp_path, kind, model):
    if model == "left":
        model = tmp_path / "left"
        BertModel.from_pretrained(tiny / "bert").save_pretrained(model)
        AutoTokenizer.from_pretrained(tiny / "bert", padding_side="left").save_pretrained(model)
    steps = ("--max_train_steps", 120 if model == "gpt2" else 80)
    line = quiz_line(quiz, kind, "--position_encoding", "alibi", "--model_max_length", LENGTH, *steps)
    record = train(tiny, tmp_path / "out", *line, data=(), model=model)
    said = assert_answers(record, tmp_path / "out", quiz / f"{kind}-validation.json")
    truth = [row["answers"]["text"] for row in asked(13, 101, unanswerable=kind == "v2")]
    assert [[each.strip()] if each else [] for each in said] == truth
    assert 0.5 < record["eval_exact_match"] < record["eval_f1"] < 1  # all except the half-right answers


@pytest.mark.parametrize("longest", [1, 3, 50])
def test_the_best_span(longest):
    generator = torch.Generator().manual_seed(longest)
    scores = torch.randn(6, 17, 2, generator=generator)
    characters = torch.arange(17)[None, :, None] * 4 + torch.tensor([0, 3]) + torch.arange(6)[:, None, None] * 100
    for row, outside in enumerate((slice(0), slice(5), slice(12, None), slice(1, 17), slice(0, 17, 2), slice(4, 9))):
        characters[row, outside] = -1
    found = question_answering.best_spans(scores, characters, longest)
    for row in range(6):
        best = (-torch.inf,)
        for i in range(17):
            for j in range(i, min(i + longest, 17)):
                if characters[row, i, 0] >= 0 and characters[row, j, 0] >= 0:
                    score = scores[row, i, 0].double() + scores[row, j, 1].double()
                    best = max(best, (score.item(), characters[row, i, 0].item(), characters[row, j, 1].item()))
        assert [each[row].item() for each in found] == pytest.approx(list(best), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("make", [bpe, pieces])
@pytest.mark.parametrize("side", ["right", "left"])
def test_every_piece_maps_back_to_the_answer(make, side):
    """If a window contains the whole answer, its positions are the answer's characters. Otherwise, they are the position of the
    CLS token.
    """
    tokenizer = make()
    tokenizer.padding_side = side
    context = "w1 w22, \u200b w333-xyz\tw4 (w55)  w6 w12. w7 w890 w31 w2 w5 w44 w3"
    ends = [i for i in range(len(context)) if context[i].isalnum() and not context[i + 1 : i + 2].isalnum()]
    starts = [i for i in range(len(context)) if context[i].isalnum() and not context[i - 1 : i].isalnum()]
    spans = [(begin, end + 1) for begin in starts for end in ends if begin <= end < begin + 14]
    examples = [
        {"question": "w1 w2 w3 w4", "context": context, "answers": {"text": [context[b:e]], "answer_start": [b]}}
        for b, e in spans
    ]
    task = object.__new__(question_answering.QuestionAnswering)
    task.tokenizer, task.pad = tokenizer, question_answering.DataCollatorWithPadding(tokenizer)
    rows = {key: [each[key] for each in examples] for key in ("question", "context", "answers")}
    made = question_answering.encoded({**rows, "example": list(range(len(examples)))}, tokenizer, 30, asked=6, stride=14)
    pieces = [dict(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)]
    assert len(pieces) >= 3 * len(examples) and max(len(piece["input_ids"]) for piece in pieces) == 30
    found = Counter()
    for at in range(0, len(pieces), 7):
        batch = task.collate(list(enumerate(pieces[at : at + 7])))
        for piece, (first, last), characters, ids in zip(
            pieces[at : at + 7], batch["labels"].tolist(), batch["context"].tolist(), batch["input_ids"], strict=True
        ):
            begin, end = spans[piece["example"]]
            covered = [each for each in characters if each[0] >= 0]
            own = {i for first, last in covered for i in range(first, last)}
            if {i for i in range(begin, end) if context[i] not in " \t\u200b"} <= own:
                assert context[characters[first][0] : characters[last][1]] == context[begin:end]
                found[piece["example"]] += 1
            else:
                assert first == last and ids[first] == tokenizer.cls_token_id
    assert set(found) == set(range(len(spans))) and max(found.values()) > 1


# Errors.


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--push_to_hub",), "--push_to_hub and --hub_model_id belong together"),
        (("--hub_model_id", "me/it"), "--push_to_hub and --hub_model_id belong together"),
        (("--hub_private_repo",), "--hub_private_repo needs"),
        (("--push_to_hub", "--hub_model_id", "me/no/such"), "--hub_model_id me/no/such: Repo id must be"),
        (("--push_to_hub", "--hub_model_id", "me/it"), "No token for the Hub"),
        (("--dataset_config_name", "plain"), "--dataset_config_name needs"),
        (("--position_encoding", "{rope}"), "'{rope}' isn't valid JSON"),
        (("--text_length", "0"), "'0' must be an integer of at least 1"),
        (("--task", "token-clasification"), "invalid choice: 'token-clasification'"),
        (("--doc_stride", 5), "--doc_stride doesn't apply to --task sequence-classification"),
        (("--task", "question-answering", "--text_column", "a"), "--text_column doesn't apply to --task question-answering"),
    ],
)
def test_arguments_refused(tiny, tmp_path, capsys, monkeypatch, more, words):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # offline needs no token
    with pytest.raises(SystemExit) as stopped:
        train(tiny, tmp_path / "out", *more)
    assert stopped.value.code == 2 and words in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("train.csv", "words,label\nw1,a\nw2,b\n", r"words.*label"),
        ("train.csv", "text,stars\nw1,a\nw2,b\n", "label_column"),
        ("train.csv", "text,label\n", "train.csv"),
        ("train.csv", "text,label\nw1,a\nw2,b,c\n", "train.csv"),
        ("train.jsonl", " \n\n", "train.jsonl"),
        ("train.jsonl", '{"text": "w1"}\n1\n', "train.jsonl"),
        ("train.csv", "text,label\nw1,bad\n  ,good\n", "train data.*'  '"),
        ("train.csv", "text,label\nw1,a\nw2,\n", "train data.* label ''"),
        ("train.csv", "text,label\n1,bad\n2,good\n", "train data.* 1 "),
        ("train.csv", "text,label\nw1,0.5\nw2,0.7\n", r"0\.5"),
        ("train.csv", "text,label\nw1,a\nw2,a\n", "only the label 'a'"),
        ("train.csv", "text,label\nw1,a\nw2,good\n", r"bad"),
        ("train.json", '{"text": "w1"', "train.json"),
        ("train.csv", "text,label\nnever,bad\nheard,good\n", r"tokenizer doesn't know the texts: .* are '\[UNK\]'"),
        ("train.docx", "w1\n", "train.docx.*.csv, .json, .jsonl"),
        ("nowhere/train.csv", None, "nowhere/train.csv"),
    ],
)
def test_data_refused(tiny, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit, match=words):
        train(tiny, tmp_path / "out", "--train_file", tmp_path / name, data=("--validation_file",))
    assert not (tmp_path / "out").exists()


WORDED = {"words": ["w1", "w2"], "tags": ["a", "b"]}
ASKED = {"question": "w1 w2", "context": "w3 w4 w5", "answers": {"text": ["w4"], "answer_start": [3]}}
WRONG_ROWS = [
    (WORDED, {"tags": ["a"]}, "2 words .* 1 labels"),
    (WORDED, {"words": None}, "None"),
    (WORDED, {"words": ["w1", None]}, r"None"),
    (WORDED, {"tags": ["a", None]}, "label None"),
    (WORDED, {"words": ["w1"], "tags": None}, "label None"),
    (ASKED, {"context": None}, "None"),
    (ASKED, {"answers": None}, "None"),
    (ASKED, {"answers": {"text": ["w4"], "answer_start": []}}, "train data"),
    (
        ASKED,
        {"answers": {"text": ["w4"], "answer_start": [4]}},
        "'w4' .* character 4",
    ),
    (ASKED, {"answers": {"text": ["w5"], "answer_start": [-2]}}, "'w5' .* character -2"),
    (ASKED, {"answers": {"text": [""], "answer_start": [0]}}, "'' .* character 0"),
]


@pytest.mark.parametrize(("row", "change", "words"), WRONG_ROWS)
def test_rows_refused(tiny, tmp_path, row, change, words):
    file = write_json(tmp_path / "train.json", [row, {**row, **change}])
    with pytest.raises(SystemExit, match=words):
        train(tiny, tmp_path / "out", *(TAGS if row is WORDED else QUIZ), "--train_file", file, data=())
    assert not (tmp_path / "out").exists()


def test_other_task_refused(tiny, tags, quiz, tmp_path):
    """Columns, tokenizers, lengths, labels, and sources that don't suit the task raise errors."""
    ByT5Tokenizer().save_pretrained(tmp_path / "slow")
    BertConfig(**BERT).save_pretrained(tmp_path / "slow")
    write_json(tmp_path / "silent.json", [{"words": ["\u200b"], "tags": ["LOW"]}])
    (tmp_path / "untrained").mkdir()
    write(tmp_path / "untrained" / "test.csv", rows(4))
    tagging = (*TAGS, "--train_file", tags / "train.json")
    asking = (*QUIZ, "--train_file", quiz / "v1-train.json")
    wrong = [
        ((*QUIZ, "--train_file", tags / "train.json"), r"words.*tags"),
        ((*tagging, "--model_name_or_path", tmp_path / "slow"), "ByT5Tokenizer.*fast tokenizer"),
        ((*asking, "--model_name_or_path", tmp_path / "slow"), "ByT5Tokenizer.*fast tokenizer"),
        ((*asking, "--doc_stride", 18), "no room for a context, given 3 special tokens"),
        ((*tagging, "--validation_file", tmp_path / "silent.json"), "[Nn]o word of the validation data"),
        ((*tagging, "--dataset_name", tiny / "data"), "--train_file or --dataset_name"),
        (("--dataset_name", tmp_path / "untrained"), r"no split `train`, only \['test'\]"),
    ]
    for line, words in wrong:
        with pytest.raises(SystemExit, match=words):
            train(tiny, tmp_path / "out", *line, data=())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--position_encoding", "alibbi"), "Unknown position encoding 'alibbi'"),
        (("--position_encoding", '{"type": "rope", "thetta": 1}'), "thetta"),
        (("--text_length", LENGTH + 1), "--text_length 25 is above .* 24 tokens"),
        (("--text_length", 2), "--text_length 2 leaves no room"),
        (("--learning_rate", "1e30"), "loss is nan at step 2"),
        (("--learning_rate", "1e30", "--max_train_steps", 2), "loss is nan at step 2|[Aa]fter step 2"),
    ],
)
def test_refused(tiny, tmp_path, capsys, more, words):
    with pytest.raises(SystemExit) as stopped:
        train(tiny, tmp_path / "out", *more)
    assert re.search(words, f"{stopped.value} {capsys.readouterr().err}")
    assert not (tmp_path / "out" / "config.json").exists()


def test_the_page_shows_the_kept_results():
    shown = (ROOT / "docs" / "results" / "index.md").read_text()
    kept = json.loads((SCRIPTS / "results" / "seeds.json").read_text())
    names = {"MiniLM": "MiniLM", "MiniLM-relative": "converted to `relative` and distilled"}
    for name, record in kept["models"].items():
        figures = record["mean_and_half_width"].values()
        assert f"| {names[name]} | {' | '.join(f'{mean:.3f}' for mean, _ in figures)} |" in shown
        assert all(float(f"{half:.3f}") <= 0.009 for _, half in figures) and "at most ±0.009" in shown
        assert all(len(values) == 3 for values in record["values"].values()) and record["steps"] == 328
