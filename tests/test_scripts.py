"""The scripts: what the evaluation measures, and distillation from end to end on a tiny model."""

import json

import pytest
import torch
from transformers import AutoModel, BertTokenizer
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

import distill
import hf_posenc
from conftest import LENGTH, ROOT, VOCABULARY, stock, tokens
from evaluation import corpus, retrieval

SCRIPTS = ROOT / "scripts"
WORDS = [f"w{i}" for i in range(VOCABULARY - 5)]


def test_leaks_are_removed():
    summary = "Parser for command line options"
    document = (
        "Parser for command line options. A parser for the command line options of scripts. Use getopt.getopt here.\n"
        "This line is about module getopt. It supports long names, too.\n\nArguments follow the conventions of Unix."
    )
    assert corpus.without_leaks(document, "getopt", summary) == "Arguments follow the conventions of Unix."


def test_evaluation_and_training_are_disjoint(library):
    assert_disjoint(*library)


@pytest.mark.slow
def test_all_of_the_library_is_disjoint(monkeypatch):
    monkeypatch.setattr(corpus, "LEFT_OUT", corpus.LEFT_OUT - {"test"})
    assert_disjoint(*corpus.split.__wrapped__())


def assert_disjoint(modules, training):
    assert len(modules) >= 100 and len({module.summary for module in modules}) == len(modules)
    evaluated = {key for module in modules for key in corpus._sentence_keys(f"{module.summary}. {module.document}")}
    assert len(evaluated) > 1000
    assert not any(corpus._sentence_keys(text) & evaluated for text in training)
    for module in modules:
        query = set(corpus._words(module.summary))
        for sentence in corpus._sentences(module.document):
            assert len(query & set(corpus._words(sentence))) / len(query) < corpus.NEAR_COPY, (module.name, sentence)
        assert not any(line.strip() == module.name for line in module.document.splitlines())


def test_scores_by_hand():
    similarity = torch.tensor([[0.9, 0.1, 0.0], [0.8, 0.7, 0.1], [0.5, 0.5, 0.5]])
    score = retrieval.score(similarity, samples=200)
    # Ranks 1, 2 and, all three being tied, 3.
    assert score.recall_at_1 == pytest.approx(1 / 3) and score.mrr == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert score.mrr_interval[0] < score.mrr < score.mrr_interval[1]
    assert retrieval.score(torch.eye(5)).recall_at_1_interval == (1.0, 1.0)


def test_pooling_ignores_padding():
    model, ids = stock("bert"), tokens(1, 9)
    mask = torch.ones_like(ids)
    mask[:, 6:] = 0
    padded = retrieval.pooled(model, {"input_ids": ids, "attention_mask": mask})
    alone = retrieval.pooled(model, {"input_ids": ids[:, :6], "attention_mask": mask[:, :6]})
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-4)


def test_embeddings_keep_the_order_of_the_texts(tiny):
    tokenizer, model = BertTokenizer.from_pretrained(tiny / "model"), AutoModel.from_pretrained(tiny / "model")
    texts = [" ".join(WORDS[i : i + 2 + (7 * i) % 5]) for i in range(20)]
    together = retrieval.embed(model, tokenizer, texts, 16, "all")
    for i in (0, 7, 19):
        torch.testing.assert_close(
            together[i : i + 1], retrieval.embed(model, tokenizer, texts[i : i + 1], 16, "one"), atol=1e-5, rtol=1e-4
        )


def test_loss_is_zero_for_the_teacher_and_ignores_padding():
    hidden, mask = torch.randn(2, 5, 8), torch.tensor([[1.0, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert distill.distillation_losses(hidden, hidden, mask).tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    other = hidden.clone()
    other[0, 3:] = 100.0
    assert distill.distillation_losses(other, hidden, mask).tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert distill.distillation_losses(-hidden, hidden, mask).tolist() == pytest.approx([4.0, 4.0], abs=1e-5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny BERT, its tokenizer, and a few lines of text."""
    path = tmp_path_factory.mktemp("tiny")
    stock("bert").save_pretrained(path / "model")
    hf_posenc.patch(stock("bert"), "alibi").save_pretrained(path / "patched")
    (path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    for name in ("model", "patched"):
        BertTokenizer(str(path / "vocab.txt")).save_pretrained(path / name)
    (path / "texts.txt").write_text("\n".join(" ".join(WORDS[i : i + 12]) for i in range(40)))
    return path


def run(launch, tiny, output, *arguments, processes=1, fails=False):
    """What a run of distill.py says."""
    given = ["--model_name_or_path", tiny / "model", "--output_dir", output, "--train_file", tiny / "texts.txt"]
    given += ["--max_train_steps", 4, "--fade_steps", 2, "--min_seq_length", 6, "--max_seq_length", 12]
    codes, said = launch("distill", *given, "--per_device_train_batch_size", 4, *arguments, processes=processes)
    assert any(codes) == fails and "Traceback" not in said, said[-3000:]
    return said


@pytest.mark.parametrize("encoding", ["alibi", '{"type": "rope", "theta": 500}', "learned"])
def test_distill(launch, tiny, tmp_path, encoding):
    run(launch, tiny, tmp_path / "out", "--position_encoding", encoding)
    record = json.loads((tmp_path / "out" / "distillation.json").read_text())
    assert len(record["losses"]) == 4 and record["processes"] == 1
    assert record["teacher_checksum"]["before"] == record["teacher_checksum"]["after"]
    model = AutoModel.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "PosEncBertModel" and model(tokens()).last_hidden_state.isfinite().all()
    tokenizer = BertTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("w3 w4").input_ids == [2, 8, 9, 3]
    assert tokenizer.model_max_length == (LENGTH if encoding == "learned" else VERY_LARGE_INTEGER)
    with pytest.warns(UserWarning, match="trained"):
        hf_posenc.unpatch(model)


def test_distill_in_two_processes(launch, tiny, tmp_path):
    run(launch, tiny, tmp_path / "out", "--position_encoding", "relative", processes=2)
    record = json.loads((tmp_path / "out" / "distillation.json").read_text())
    assert record["processes"] == 2 and len(record["losses"]) == 4
    assert AutoModel.from_pretrained(tmp_path / "out")(tokens()).last_hidden_state.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--position_encoding", "alibbi"), "unknown position encoding 'alibbi'"),
        (("--position_encoding", "alibi", "--fade_steps", "9"), "--fade_steps 9 must be below --max_train_steps 4"),
        (("--position_encoding", "alibi", "--min_seq_length", "20"), "--min_seq_length 20"),
        (("--position_encoding", "alibi", "--model_name_or_path", "patched"), "is patched already"),
        (("--position_encoding", "alibi", "--learning_rate", "3e37", "--num_warmup_steps", 0), "the loss is nan at step 2"),
    ],
)
def test_distill_refuses(launch, tiny, tmp_path, arguments, words):
    arguments = [tiny / each if each == "patched" else each for each in arguments]
    assert words in run(launch, tiny, tmp_path / "out", *arguments, fails=True)
    assert not (tmp_path / "out").exists()


def test_distill_without_text(launch, tiny, tmp_path):
    (tmp_path / "empty.csv").write_text("words\nsome\n")
    chosen = ("--position_encoding", "alibi", "--train_file", tmp_path / "empty.csv")
    error = run(launch, tiny, tmp_path / "out", *chosen, fails=True)
    assert "no `text`" in error


def test_the_readme_shows_the_kept_results():
    """The table, and the figures behind it, are those of one run."""
    shown, kept = (ROOT / "README.md").read_text(), json.loads((SCRIPTS / "results" / "demo.json").read_text())
    table = (SCRIPTS / "results" / "demo.txt").read_text().rstrip()
    assert table in shown
    for name, score in kept["scores"].items():
        (row,) = [line for line in table.splitlines() if f"│ {name} " in line]
        assert f"{score['recall_at_1']:.3f} [" in row and f"{score['mrr']:.3f} [" in row
    assert kept["share_of_the_originals_mrr"] >= 0.9
    assert kept["teacher_checksum"]["before"] == kept["teacher_checksum"]["after"]
