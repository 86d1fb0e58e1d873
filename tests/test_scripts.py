"""The scripts: the evaluation data, and distillation from end to end on a tiny model."""

import email
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModel, BertTokenizer
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

import hf_posenc
import vocabularies
from closeness import assert_close
from conftest import ROOT, WORDS, run_python
from experiments import demo, stdlib_retrieval
from hf_posenc.evaluation import retrieval, stdlib_corpus
from hf_posenc.training import distill, sentences
from models import LENGTH, slow, stock, tokens

SCRIPTS = ROOT / "scripts"


def test_leaks_are_removed():
    summary = "Parser for command line options"
    document = (
        "Parser for command line options. A parser for the command line options of scripts. Use getopt.getopt here.\n"
        "This line is about module getopt. It supports long names, too.\n\nArguments follow the conventions of Unix."
    )
    assert stdlib_corpus.without_leaks(document, "getopt", summary) == "Arguments follow the conventions of Unix."


def sentences_of(text):
    """The sentences of at least eight words, as words."""
    sentences = (tuple(re.findall(r"\w+", sentence.lower())) for sentence in re.split(r"(?<=[.!?])\s+|\n\s*\n", text))
    return {sentence for sentence in sentences if len(sentence) >= 8}


@pytest.mark.slow
@pytest.mark.parametrize("own_tests", [False, True])
def test_evaluation_and_training_are_disjoint(library, monkeypatch, own_tests):
    """This holds for the library with and without the texts of its tests."""
    if own_tests:
        monkeypatch.setattr(stdlib_corpus, "LEFT_OUT", stdlib_corpus.LEFT_OUT - {"test"})
    modules, training = stdlib_corpus.split.__wrapped__() if own_tests else library
    assert len(modules) >= 100 and len({module.summary for module in modules}) == len(modules)
    evaluated = {sentence for module in modules for sentence in sentences_of(f"{module.summary}. {module.document}")}
    assert len(evaluated) > 1000
    assert not any(evaluated & sentences_of(text) for text in training)
    for module in modules:
        assert not sentences_of(module.summary) & sentences_of(module.document)
        assert not any(line.strip() == module.name for line in module.document.splitlines())


def test_loss_is_zero_for_the_teacher_and_ignores_padding():
    hidden, mask = torch.randn(2, 5, 8), torch.tensor([[1.0, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    batch = {"attention_mask": mask}
    assert distill.distillation_losses(hidden, hidden, batch).tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    other = hidden.clone()
    other[0, 3:] = 100.0
    assert distill.distillation_losses(other, hidden, batch).tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert distill.distillation_losses(-hidden, hidden, batch).tolist() == pytest.approx([4.0, 4.0], abs=1e-5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A directory with a tiny BERT in several forms, its tokenizer, and a few lines of text."""
    path = tmp_path_factory.mktemp("tiny")
    stock("bert").save_pretrained(path / "model")
    stock("bert").save_pretrained(path / "words")
    stock("bert", hidden_size=16).save_pretrained(path / "narrow")
    original = AutoModel.from_pretrained(path / "model")
    hf_posenc.patch(original, "alibi").save_pretrained(path / "patched")
    stock("bert").save_pretrained(path / "v4")
    config = json.loads((path / "v4" / "config.json").read_text())
    (path / "v4" / "config.json").write_text(json.dumps({**config, "position_embedding_type": "relative_key"}))
    for name in ("model", "patched", "narrow", "v4"):
        vocabularies.of_bert(path).save_pretrained(path / name)
    vocabularies.of_bert(path, ["a"]).save_pretrained(path / "words")
    (path / "texts.txt").write_text("\n".join(" ".join(WORDS[i : i + 12]) for i in range(40)))
    # It has a projection, a pooling other than the default of sentence-transformers, and a prompt.
    body = Transformer(str(path / "model"))
    modules = [body, Pooling(32, "cls"), Dense(32, 7), Normalize()]
    made = SentenceTransformer(modules=modules, device="cpu", prompts={"query": "w1 w2 "}, similarity_fn_name="dot")
    made.save_pretrained(str(path / "cls"), create_model_card=False)
    CrossEncoder(str(path / "model"), device="cpu").save_pretrained(str(path / "reranker"), create_model_card=False)
    return path


def run(launch, tiny, output, *arguments, processes=1, fails=False):
    """The output of a run of distill.py."""
    given = ["--model_name_or_path", tiny / "model", "--output_dir", output, "--train_file", tiny / "texts.txt"]
    given += ["--max_train_steps", 4, "--min_text_length", 6, "--text_length", 12]
    codes, said = launch("distill", *given, "--per_device_train_batch_size", 4, *arguments, processes=processes)
    assert any(codes) == fails and "Traceback" not in said, said[-3000:]
    return said


@pytest.mark.parametrize("encoding", ["learned", slow('{"type": "rope", "theta": 500}')])
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


SENTENCES = """
import json, sys, torch, hf_posenc
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
length = model.preprocess(["w3 " * 2000])["input_ids"].shape[1]
kind = type(model[0].model).__name__
print(json.dumps([model.max_seq_length, length, kind, model.prompts["query"], model.similarity_fn_name]))
torch.save([str(list(model)[1:]), model[2].linear.weight], sys.argv[2])
"""


def test_distill_a_sentence_transformer(launch, tiny, tmp_path):
    """The model's own modules pool in training, and stay frozen. The result is a SentenceTransformer with these modules."""
    chosen = ("--model_name_or_path", tiny / "cls", "--position_encoding", "alibi", "--load_best_model_at_end")
    said = run(launch, tiny, tmp_path / "out", *chosen, "--validation_file", tiny / "texts.txt", "--eval_steps", 2)
    assert "Pooling (cls), Dense, Normalize" in said
    loaded = json.loads(run_python(SENTENCES, tmp_path / "out", tmp_path / "modules.pt").splitlines()[-1])
    assert loaded == [VERY_LARGE_INTEGER, 2002, "PosEncBertModel", "w1 w2 ", "dot"]
    before = SentenceTransformer(str(tiny / "cls"), device="cpu")
    shown, projection = torch.load(tmp_path / "modules.pt", weights_only=True)
    assert shown == str(list(before)[1:]) and torch.equal(projection, before[2].linear.weight)


@pytest.mark.slow
def test_a_patched_model_is_distilled_from_its_original(launch, tiny, tmp_path):
    """If either of the two is a SentenceTransformer, its modules pool both models, and are saved with the result."""
    pooled = hf_posenc.patch(SentenceTransformer(str(tiny / "cls"), device="cpu"), "alibi")
    pooled.save_pretrained(str(tmp_path / "cls-patched"), create_model_card=False)
    losses = {}
    for student, teacher in (("patched", "model"), ("patched", "cls"), ("cls-patched", "cls"), ("cls-patched", "model")):
        folder, output = (tiny if student == "patched" else tmp_path) / student, tmp_path / f"{student}-{teacher}"
        run(launch, tiny, output, "--model_name_or_path", folder, "--teacher", tiny / teacher)
        losses[student, teacher] = json.loads((output / "distillation.json").read_text())["losses"]
        assert AutoModel.from_pretrained(output).config.position_encoding["type"] == "alibi"
        assert (output / "modules.json").exists() == ("cls" in output.name)
    plain = losses.pop(("patched", "model"))
    assert len({*map(tuple, losses.values())}) == 1 and plain != losses["patched", "cls"]
    found = SentenceTransformer(str(tmp_path / "patched-cls"), device="cpu")
    assert found.max_seq_length == VERY_LARGE_INTEGER and type(found[0].model).__name__ == "PosEncBertModel"


@pytest.mark.parametrize("mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ("cls", "max")])
def test_pooling_is_that_of_the_sentence_transformer(tiny, tmp_path, mode):
    body = Transformer(str(tiny / "model"))
    made = SentenceTransformer(modules=[body, Pooling(body.get_embedding_dimension(), mode), Normalize()], device="cpu")
    made.save_pretrained(str(tmp_path / "made"), create_model_card=False)
    found = sentences.load(str(tmp_path / "made"))
    texts = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9"]
    batch = found.tokenizer(texts, padding=True, return_tensors="pt").data
    with torch.no_grad():
        embeddings = retrieval.pooling(found, torch.device("cpu"))(found[0].model(**batch).last_hidden_state, batch)
    assert_close(embeddings, made.encode(texts, convert_to_tensor=True))


def test_distill_says_what_it_trains_on(capsys, monkeypatch):
    """The standard library is one of its packages here, which is read fast."""
    monkeypatch.setattr(stdlib_corpus.sysconfig, "get_path", lambda name: str(Path(email.__file__).parent))
    split = stdlib_corpus.split.__wrapped__
    monkeypatch.setattr(stdlib_corpus, "split", split)
    modules, passages = split()
    chosen = SimpleNamespace(train_file=None, dataset_name=None, text_column="words", long_text_length=None)
    texts = distill.load_texts(Accelerator(cpu=True), chosen)["train"]["words"]
    assert list(texts) == passages and len(passages) > 5 and len(modules) > 5
    assert f"{len(texts)} passages" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--calibrate",), "--calibrate needs --position_encoding"),
        (("--position_encoding", "sinusoidal", "--calibrate"), "--calibrate doesn't apply to 'sinusoidal'"),
        (("--position_encoding", "alibi", "--long_text_length", "9"), "--long_text_length 9 must be above --text_length"),
        (("--position_encoding", "relative"), "too short or too few for 'relative'"),
        (("--position_encoding", "alibi", "--min_text_length", "20"), "--min_text_length 20"),
        (("--model_name_or_path", "patched"), "--model_name_or_path {patched} --teacher ORIGINAL"),
        (("--model_max_length", "90"), "--model_max_length needs --position_encoding or --extend"),
        (("--position_encoding", "alibi", "--max_length", "90"), "unrecognized arguments: --max_length 90"),
        (("--position_encoding", "alibi", "--learning_rate", "3e37", "--num_warmup_steps", 0), "loss is nan at step 2"),
    ],
)
def test_distill_refuses(launch, tiny, tmp_path, arguments, words):
    arguments = [tiny / each if (tiny / str(each)).is_dir() else each for each in arguments]
    assert words.format(patched=tiny / "patched") in run(launch, tiny, tmp_path / "out", *arguments, fails=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("teacher", "more", "words"),
    [
        ("patched", (), "patched can't be the teacher. It is patched"),
        ("v4", (), "position_embedding_type='relative_key': Transformers 5 drops"),
        ("narrow", (), "narrow can't be the teacher."),
        ("words", (), "words can't be the teacher."),
        ("reranker", (), "reranker has model_type 'CrossEncoder'. Allowed: SentenceTransformer"),
        ("nowhere", (), "nowhere"),
        ("model", ("--text_length", LENGTH + 1), "maximum length is 24 tokens. Lower --text_length 25"),
        ("model", ("--position_encoding", "rope"), "saved with the 'alibi' encoding, not 'rope'"),
        ("model", ("--position_encoding", "alibi", "--model_max_length", 90), "--model_max_length 90 doesn't apply"),
        ("cls", ("--push_to_hub", "--hub_model_id", "me/it"), "SentenceTransformer('{output}').push_to_hub('me/it')"),
    ],
)
def test_a_teacher_refused(launch, tiny, tmp_path, teacher, more, words):
    given = ["--model_name_or_path", "patched", "--teacher", teacher, *more]
    given = [tiny / str(each) if (tiny / str(each)).is_dir() else each for each in given]
    words = words.format(output=tmp_path / "out")
    assert words in run(launch, tiny, tmp_path / "out", *given, fails=True)
    assert not (tmp_path / "out").exists()


def test_distill_without_text(launch, tiny, tmp_path):
    (tmp_path / "empty.csv").write_text("words\nsome\n")
    chosen = ("--position_encoding", "alibi", "--train_file", tmp_path / "empty.csv")
    assert "no column `text`" in run(launch, tiny, tmp_path / "out", *chosen, fails=True)
    given = ["--model_name_or_path", tiny / "model", "--position_encoding", "alibi", "--output_dir", tmp_path / "out"]
    codes, said = launch("distill", *given, "--validation_file", tiny / "texts.txt")
    assert codes == [2] and "needs --train_file or --dataset_name" in said


def test_the_demo_embeds_each_text_once(monkeypatch, tokenizer):
    """The texts of the first table aren't embedded again, and the score equals that of all texts at once."""
    words = [" ".join(WORDS[(3 * i + j * j) % len(WORDS)] for j in range(9)) for i in range(8)]
    modules = [stdlib_corpus.Module(f"m{i}", " ".join(text.split()[2:5]), text) for i, text in enumerate(words)]
    for module in (demo, stdlib_retrieval):
        monkeypatch.setattr(module, "split", lambda: (modules, []))
    model, seen = stock("bert"), []
    monkeypatch.setattr(stdlib_retrieval, "embed", lambda *given: seen.extend(given[2]) or retrieval.embed(*given))
    found = demo.Summaries(model, tokenizer, "tiny")
    first, whole = found.first_score(), found.score()
    assert sorted(seen) == sorted(text for module in modules for text in (module.summary, module.document))
    assert (first.queries, whole) == (3, stdlib_retrieval.evaluate(model, tokenizer, demo.MAX_SEQ_LENGTH)) and whole.mrr < 1


def test_the_pages_show_the_kept_results():
    """The tables of the README and the results, and the printed table of the demo, are from one run."""
    readme, shown = (ROOT / "README.md").read_text(), (ROOT / "docs" / "results" / "index.md").read_text()
    kept = json.loads((SCRIPTS / "results" / "demo.json").read_text())
    table = (SCRIPTS / "results" / "demo.txt").read_text().rstrip()
    names = {
        "original": "original",
        "patched only": "patched only (`relative`)",
        "calibrated, no training": "converted, no training",
        "trained": "converted, 100 steps of distillation",
        "bag of words": "bag of words",
    }
    for name, score in kept["scores"].items():
        (row,) = [line for line in table.splitlines() if f"│ {name} " in line]
        share = score["mrr"] / kept["scores"]["original"]["mrr"]
        percent = "100%" if name == "original" else f"{share:.1%}"
        assert f"{score['mrr']:.3f} [" in row
        assert f"| {names[name]} | {score['mrr']:.3f} | {percent} |" in shown
        assert percent in readme or name in ("bag of words", "original")
    for name, score in kept["deep"].items():
        assert any(f"│ {name} " in line and f" {score['mrr']:.3f} " in line for line in table.splitlines())
    assert kept["share_of_the_originals_mrr"]["trained"] >= 0.97
    assert kept["teacher_checksum"]["before"] == kept["teacher_checksum"]["after"]
