"""`hf-posenc convert`, and the comparison at its end."""

import json
import os
import random
import re
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForMaskedLM, BertTokenizer

import hf_posenc
from closeness import assert_equal
from conftest import ROOT, run_python
from hf_posenc.evaluation import model_comparison
from hf_posenc.evaluation.retrieval import Embedder
from models import LENGTH, patched, stock
from test_cli import run

WORDS = ["river", "stone", "window", "garden", "letter", "bridge", "candle", "forest", "mirror", "harbor", "meadow", "lantern"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def texts(count=40, sentences=4, seed=0):
    choose = random.Random(seed)
    return [" ".join(" ".join(choose.choices(WORDS, k=9)).capitalize() + "." for _ in range(sentences)) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny BERT with a head and a tokenizer, and texts of 42 tokens as JSON lines."""
    path = tmp_path_factory.mktemp("models")
    (path / "vocab.txt").write_text("\n".join([*SPECIAL, ".", *WORDS]))
    stock("bert", "ForMaskedLM").save_pretrained(path / "bert")
    BertTokenizer(str(path / "vocab.txt"), model_max_length=LENGTH).save_pretrained(path / "bert")
    write(path / "texts.jsonl", texts(64))
    write(path / "few.jsonl", texts(24))
    pairs = [{"query": text.split(". ")[-1], "document": text} for text in texts(24)]
    (path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return path


def write(path, texts):
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))


def embedder(model, folder):
    return Embedder(model.eval(), BertTokenizer.from_pretrained(folder / "bert"))


@pytest.fixture
def training(launch, monkeypatch):
    """The command trains models in the launcher's processes."""

    def trained(command, **how):
        (code,), _ = launch("distill", *command[3:])
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr("hf_posenc.cli.convert.subprocess.run", trained)


def test_compared_texts_are_held_out(folder, tmp_path, training):
    """The second half only evaluates, and the first half only calibrates and trains."""
    first, second, other = texts(32), texts(32, seed=1), texts(32, seed=2)
    given = ("--option", "max_distance=4", "--max-length", 64, "--json", "--output-dir")

    def converted(name, rows, *flags):
        write(tmp_path / f"{name}.jsonl", rows)
        command = ("convert", folder / "bert", "relative", "--texts", tmp_path / f"{name}.jsonl", *flags, *given)
        return json.loads(run(*command, tmp_path / name))["comparison"]["rows"]["128"]

    def weights(name):
        return AutoModelForMaskedLM.from_pretrained(tmp_path / name).state_dict()

    def originals(rows):
        return {name: row["score"] for name, row in rows.items() if name.startswith("original")}

    rows = converted("a", first + second, "--train-steps", 2)
    assert originals(converted("b", first + other, "--train-steps", 2)) != originals(rows)
    assert_equal(weights("b"), weights("a"))
    assert originals(converted("c", other + second)) == originals(rows)


def test_documents_of_queries_are_held_out(folder, tmp_path):
    given = ("convert", folder / "bert", "relative", "--option", "max_distance=4", "--texts")
    run(*given, folder / "texts.jsonl", "--queries", folder / "pairs.jsonl", "--output-dir", tmp_path / "compared")
    write(tmp_path / "rest.jsonl", texts(64)[24:])
    run(*given, tmp_path / "rest.jsonl", "--no-compare", "--output-dir", tmp_path / "rest")
    made, expected = (AutoModelForMaskedLM.from_pretrained(tmp_path / name).state_dict() for name in ("compared", "rest"))
    assert_equal(made, expected)
    few = (*given, folder / "few.jsonl", "--queries", folder / "pairs.jsonl", "--output-dir", tmp_path / "few")
    assert "no text is left" in run(*few, code=1)


def test_a_command(folder, tmp_path, training):
    given = ("--option", "max_distance=4", "--texts", folder / "texts.jsonl", "--max-length", 64, "--output-dir")
    said = run("convert", folder / "bert", "relative", *given, tmp_path / "out", "--train-steps", 2)
    expected = hf_posenc.convert(
        AutoModelForMaskedLM.from_pretrained(folder / "bert"),
        "relative",
        texts=texts(32),
        tokenizer=str(folder / "bert"),
        max_length=64,
        max_distance=4,
    )
    made, loading = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loading["missing_keys"]
    assert made.config.position_encoding == expected.config.position_encoding and made.config.position_encoding["per_layer"]
    assert BertTokenizer.from_pretrained(tmp_path / "out").model_max_length == 64
    # The body is trained. The head is that of the original.
    head, body = "cls.predictions.transform.dense.weight", "bert.encoder.layer.0.output.dense.weight"
    assert torch.equal(made.get_parameter(head), expected.get_parameter(head))
    assert not torch.equal(made.get_parameter(body), expected.get_parameter(body))
    words = re.sub(r"[\s│]+", " ", said)
    assert "calibrated on: 24 inputs of up to 24 tokens" in words and "8 held-out inputs" in words
    assert f"32 questions: a sentence from beyond its first {LENGTH} tokens finds its text" in words
    ways = ("original, truncated", "chunked by 24, mean", "chunked by 24, max", "calibrated", "trained")
    assert all(f" {way} " in words for way in ways)
    assert "128 tokens" in said


def test_with_questions_of_ones_own(folder, tmp_path):
    given = ("--option", "num_buckets=4", "--option", "max_distance=9", "--texts", folder / "texts.jsonl")
    said = run("convert", folder / "bert", "t5", *given, "--queries", folder / "pairs.jsonl", "--output-dir", tmp_path / "out")
    assert "24 of your queries find their documents" in re.sub(r"\s+", " ", said)
    amount = ("--calibration-texts", 9, "--calibration-length", 20, "--no-compare")
    said = run("convert", folder / "bert", "t5", *given, *amount, "--output-dir", tmp_path / "few")
    assert "9 inputs of up to 20 tokens, 180 in total" in re.sub(r"\s+", " ", said) and "MRR" not in said


@pytest.mark.slow
def test_trained_without_the_repository(folder, tmp_path):
    """Training needs only the package as pip installs it, in a directory outside the repository."""
    shutil.copytree(ROOT / "hf_posenc", tmp_path / "site" / "hf_posenc", ignore=shutil.ignore_patterns("__pycache__"))
    few = ("--option", "max_distance=4", "--train-steps", 2, "--max-length", 40)
    texts_of = ("--texts", folder / "texts.jsonl", "--output-dir", tmp_path / "out")
    command = [sys.executable, "-m", "hf_posenc", "convert", folder / "bert", "relative", *few, *texts_of]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "COLUMNS": "200"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    said = re.sub(r"[\s│]+", " ", done.stdout)
    assert " calibrated 0." in said and " trained 0." in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--texts", "nowhere.jsonl"), "nowhere.jsonl is not a file"),
        (("--texts", "vocab.txt", "--text-column", "words"), "has no column 'words'"),
        (("--texts", "bert/config.json"), "has no column 'text'"),
        (("--texts", "texts.jsonl", "--queries", "texts.jsonl"), "has no column 'query'"),
        (("--texts", "texts.jsonl", "--option", "max_distance=99"), "too short or too few for 'relative'"),
        (("--texts", "few.jsonl", "--option", "max_distance=4"), "12 of 12 texts"),
    ],
)
def test_refuses(folder, tmp_path, arguments, words):
    arguments = [folder / each if (folder / str(each)).exists() or "nowhere" in each else each for each in arguments]
    assert words in run("convert", folder / "bert", "relative", *arguments, "--output-dir", tmp_path / "out", code=1)
    assert not (tmp_path / "out").exists()


def test_questions_of_short_texts(folder):
    """If no text is longer than the original's maximum length, the query is a sentence from anywhere in the text."""
    short = [" ".join(text.split(". ")[:2]) + "." for text in texts()]
    short = [text.replace(". ", ".\n\n") for text in short]
    original = embedder(stock("bert"), folder)
    joined = [f"{a} {b}" for a, b in zip(short, texts(40, 1, seed=1), strict=True)]
    pairs, about = model_comparison.synthetic_pairs(original, joined[:40])
    assert "taken out of it" in about and all(pair.query not in pair.document for pair in pairs)
    with pytest.raises(ValueError, match="0 of 3 texts"):
        model_comparison.synthetic_pairs(original, ["one", "two", "three"])


def test_lengths(folder):
    """The lengths double until half of the documents fit."""
    original = embedder(stock("bert"), folder)
    documents = ["river " * size for size in (100, 100, 300, 600, 600)]
    assert model_comparison.lengths_of(original, documents, None) == [128, 256, 512]
    assert model_comparison.lengths_of(original, documents, 300) == [128, 256]
    assert model_comparison.lengths_of(original, ["river"] * 3, None) == [128]


def test_compared_with_each_use_of_the_original(folder):
    """The figures equal those of `scores` for each method."""
    model = patched("bert", "alibi")
    original, converted = embedder(stock("bert"), folder), embedder(model, folder)
    pairs = [model_comparison.Pair(text.split(". ")[0], text) for text in texts(24)]
    found = model_comparison.compare(original, {"calibrated": converted}, pairs, [16, 32])
    assert list(found[16]) == ["original", "calibrated"]
    assert list(found[32]) == [
        *(f"original, {how}" for how in ("truncated at 24", "chunked by 24, mean", "chunked by 24, max")),
        "calibrated",
    ]
    asked, documents = converted([pair.query for pair in pairs]), converted([" ".join(p.document.split()) for p in pairs])
    assert asked.shape == documents.shape
    assert found[32]["calibrated"].difference is None
    truncated = found[32]["original, truncated at 24"]
    gap = found[32]["calibrated"].score.mrr - truncated.score.mrr
    assert truncated.difference.value == pytest.approx(gap)


SENTENCES = """
import sys, torch
from sentence_transformers import SentenceTransformer
import hf_posenc
model = SentenceTransformer(sys.argv[1], device="cpu")
texts, expected = torch.load(sys.argv[2], weights_only=False)
assert torch.equal(torch.from_numpy(model.encode(texts)), expected)
print(model.max_seq_length, hf_posenc.inspect(model).calibration.texts, [type(each).__name__ for each in model])
"""


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_sentence_transformer_stays_one(folder, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer

    stock("bert").save_pretrained(tmp_path / "body")
    BertTokenizer.from_pretrained(folder / "bert").save_pretrained(tmp_path / "body")
    body = Transformer(str(tmp_path / "body"))
    before = SentenceTransformer(modules=[body, Pooling(32, "cls"), Normalize()], device="cpu")
    expected = before.encode(texts())
    model = hf_posenc.convert(before, "relative", texts=texts(), max_distance=4, max_length=100)
    assert model.max_seq_length == 100 and (before.encode(texts()) == expected).all() and before.max_seq_length == LENGTH
    model.save_pretrained(str(tmp_path / "saved"))
    torch.save((texts(3), torch.from_numpy(model.encode(texts(3)))), tmp_path / "expected.pt")
    said = run_python(SENTENCES, tmp_path / "saved", tmp_path / "expected.pt").splitlines()[-1]
    assert said == "100 24 ['Transformer', 'Pooling', 'Normalize']"
