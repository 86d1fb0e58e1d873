"""`hf-posenc eval` and `hf-posenc bench`: their measurements and errors."""

import json

import pytest
import torch
from transformers import AutoTokenizer, BertTokenizer
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import diagnostics
from hf_posenc.cli import app
from hf_posenc.evaluation import metrics, throughput
from hf_posenc.evaluation.retrieval import Embedder, cut
from models import stock

WORDS = ["river", "stone", "window", "garden", "letter", "bridge", "candle", "forest", "mirror", "harbor", "meadow", "lantern"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tiny models with a tokenizer of WORDS, with 24 tokens or without a length limit. Texts of 60 words, and questions."""
    path = tmp_path_factory.mktemp("models")
    (path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]))
    masked = stock("bert", "ForMaskedLM")
    models = {
        "short": masked,
        "endless": hf_posenc.patch(masked, "alibi"),
        "embeds": stock("bert"),
        "embeds-endless": hf_posenc.patch(stock("bert"), "alibi"),
    }
    for name, model in models.items():
        model.save_pretrained(path / name)
        BertTokenizer(str(path / "vocab.txt"), model_max_length=24).save_pretrained(path / name)
    generator = torch.Generator().manual_seed(0)
    drawn = [[WORDS[i] for i in torch.randint(len(WORDS), (60,), generator=generator)] for _ in range(24)]
    texts = [" ".join(row) for row in drawn]
    (path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    questions = [{"query": " ".join(row[:6]), "document": text} for row, text in zip(drawn, texts, strict=True)]
    (path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    return path


def run(folder, *words, code=0):
    done = CliRunner().invoke(app, [str(folder / word) if (folder / word).exists() else word for word in words])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stderr if code else done.stdout


def test_language_models_by_their_loss(folder):
    given = ["--texts", "texts.jsonl", "--length", "40", "--length", "60", "--count", "3"]
    found = json.loads(run(folder, "eval", "endless", *given, "--json"))
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text().splitlines()][:3]
    tokenizer = AutoTokenizer.from_pretrained(folder / "endless")
    model = hf_posenc.patch(stock("bert", "ForMaskedLM"), "alibi")
    curve = diagnostics.length_curve(model, texts, tokenizer=tokenizer, lengths=[40, 60])
    assert found["endless"]["lengths"] == [40, 60] and found["endless"]["measure"] == "masked loss"
    assert found["endless"]["mean"] == pytest.approx(curve.mean, rel=1e-5)
    assert "40 tokens" in run(folder, "eval", "endless", *given)
    assert json.loads(run(folder, "eval", "short", "endless", *given, "--json")) == found
    assert "Error: No model supports 40 tokens" in run(folder, "eval", "short", *given, code=1)


def test_others_by_retrieval(folder):
    given = ["eval", "embeds", "embeds-endless", "--texts", "texts.jsonl", "--queries", "questions.jsonl"]
    found = json.loads(run(folder, *given, "--length", "16", "--length", "62", "--json"))["rows"]
    assert [*found["16"]] == ["embeds", "embeds-endless"]
    ways = ["embeds, truncated at 24", "embeds, chunked by 24, mean", "embeds, chunked by 24, max", "embeds-endless"]
    assert [*found["62"]] == ways and found["62"][ways[0]]["difference"] is None
    rows = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder / "embeds")
    embeddings = []
    for model in (stock("bert"), hf_posenc.patch(stock("bert"), "alibi")):
        read = Embedder(model, tokenizer)
        documents = [cut(tokenizer, row["document"], 16) for row in rows]
        embeddings.append(metrics.ranked(read([row["query"] for row in rows]) @ read(documents).T))
    assert found["16"]["embeds"]["score"]["mrr"] == pytest.approx(embeddings[0].reciprocals.mean(), rel=1e-5)
    difference = embeddings[1].reciprocals.mean() - embeddings[0].reciprocals.mean()
    assert found["16"]["embeds-endless"]["difference"]["value"] == pytest.approx(difference, abs=1e-6)
    assert "24 of your queries" in run(folder, *given, "--length", "16")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("eval", "short", "embeds", "--texts", "texts.jsonl"), "short by their loss, embeds by retrieval"),
        (("eval", "short", "--texts", "texts.jsonl", "--queries", "questions.jsonl"), "--queries"),
        (("eval", "short", "short", "--texts", "texts.jsonl"), "Two models are named 'short'"),
        (("bench", "short", "--length", "999"), "length=999 is above the maximum length of short"),
        (("bench", "short", "--device", "nothing"), "--device 'nothing'"),
    ],
)
def test_refused(folder, words, error):
    assert error in run(folder, *words, code=1)


def test_speeds(folder):
    found = json.loads(run(folder, "bench", "short", "endless", "--length", "8", "--length", "64", "--rounds", "2", "--json"))
    assert found["8"].keys() == {"short", "endless"} and found["64"].keys() == {"endless"}
    assert found["8"]["short"]["ratio"] is None and found["64"]["endless"]["ratio"] is None
    assert found["8"]["endless"]["ratio"] > 0 and found["8"]["short"]["milliseconds"] > 0


def test_ratios_are_of_rounds():
    speed = throughput._speed([0.5, 2.0, 4.0], 100, [1.0, 2.0, 2.0])
    assert speed == throughput.Speed(2000.0, 50.0, 1.0, (0.75, 1.5))
