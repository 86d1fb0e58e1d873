"""Evaluation by length: what is put where, what is compared, and what chance would give."""

import json
import random
import re
import sys
from functools import partial

import pytest
import torch
from transformers import BertTokenizer

import eval_length
import hf_posenc
from conftest import ROOT, stock
from evaluation import corpus, lengths, needles, windows
from evaluation.retrieval import embed

SCRIPTS = ROOT / "scripts"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
HAYSTACK = " ".join(f"{' '.join(LETTERS[i % 26] for i in range(n, n + 9))}." for n in range(60))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Every letter and sign is a token, inside of words, too."""
    path = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    signs = [*LETTERS, *(f"##{letter}" for letter in LETTERS), ".", "?"]
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *signs]))
    return BertTokenizer(str(path))


@pytest.fixture(scope="module")
def model():
    return stock("bert", vocab_size=59)


def size(tokenizer, text):
    return len(tokenizer(text)["input_ids"])


@pytest.mark.parametrize("length", [32, 200, 10_000])
def test_cut(tokenizer, length):
    text = windows.cut(tokenizer, HAYSTACK, length)
    assert HAYSTACK.startswith(text) and size(tokenizer, text) == min(length, size(tokenizer, HAYSTACK))


@pytest.mark.parametrize("length", [1, 2])
def test_cut_without_room(tokenizer, length):
    with pytest.raises(SystemExit, match=f"{length} tokens leave no room for text beside 2 special ones"):
        windows.cut(tokenizer, HAYSTACK, length)
    with pytest.raises(SystemExit, match="--lengths 40: a fact takes up to .* leaves none for a document"):
        needles.needles(tokenizer, HAYSTACK, 40, 4, random.Random(0))


def test_facts_have_one_answer():
    drawn = needles.facts(200, random.Random(1))
    assert len({question for _, question in drawn}) == 200
    whose = [re.match(r"(\w+) keeps the \w+ (\w+) in the \w+\.$", fact).groups() for fact, _ in drawn]
    assert len(set(whose)) == 200
    for (_, question), (name, thing) in zip(drawn, whose, strict=True):
        assert name in question and thing in question
    assert needles.facts(200, random.Random(1)) == drawn != needles.facts(200, random.Random(2))


def test_needles_depend_on_the_seed_alone(tokenizer):
    first, again, other = (needles.needles(tokenizer, HAYSTACK, 300, 4, random.Random(seed)) for seed in (3, 3, 4))
    assert first == again != other


def test_depths_are_spread_over_their_parts(tokenizer):
    depths = [
        needles.needles(tokenizer, HAYSTACK, 500, 2, random.Random(seed), part=(i, 4))[0].depth
        for i in range(4)
        for seed in range(8)
    ]
    # A fact goes to the end of the sentence before the token drawn; a sentence has ten tokens.
    size_of_part = (500 - 2 - 40) / 4
    for place, depth in enumerate(depths):
        assert (place // 8) * size_of_part - 30 <= depth <= (place // 8 + 1) * size_of_part + 5
    assert all(len(set(depths[i : i + 8])) > 3 for i in range(0, 32, 8))


def test_no_fact_lies_across_the_boundary(tokenizer):
    long = f"{HAYSTACK} {HAYSTACK}"
    sides, last = set(), needles.seen(tokenizer)
    assert last == 510
    for seed in range(40):
        group = needles.needles(tokenizer, long, 700, 3, random.Random(seed), part=(3, 4))
        visible = tokenizer(windows.cut(tokenizer, group[0].document, needles.BOUNDARY), add_special_tokens=False)
        for needle in group:
            fact = re.search(r"[A-Z]\w+ keeps [^.]+\.", needle.document)
            end = needle.depth + len(tokenizer(fact.group(), add_special_tokens=False)["input_ids"])
            assert end <= len(visible["input_ids"]) or needle.depth >= len(visible["input_ids"])
        sides.add(group[0].depth < last)
    assert sides == {True, False}


@pytest.mark.parametrize("length", [150, 300, 500])
def test_needles_lie_where_they_say(tokenizer, length):
    depths = []
    for seed in range(12):
        group = needles.needles(tokenizer, HAYSTACK, length, 4, random.Random(seed))
        facts = [fact for fact, _ in needles.facts(4, random.Random(seed))]
        for needle, fact in zip(group, facts, strict=True):
            assert size(tokenizer, needle.document) <= length
            assert [other in needle.document for other in facts] == [other == fact for other in facts]
            before, after = needle.document.split(fact)
            assert len(tokenizer(before, add_special_tokens=False)["input_ids"]) == needle.depth
            assert HAYSTACK.startswith(before) and (before == "" or before.rstrip().endswith("."))
            assert after.strip() in HAYSTACK
        assert len({needle.depth for needle in group}) == 1
        depths.append(group[0].depth)
    assert len(set(depths)) > 5 and max(depths) > 0.5 * (length - 60)


def test_no_fact_is_in_the_corpus(library):
    modules, training = library
    texts = [*training, *(module.document for module in modules)]
    fact = re.compile(rf"({'|'.join(needles.NAMES)}) keeps the", re.IGNORECASE)
    assert len(texts) > 500 and not any(fact.search(text) for text in texts)


def test_long_documents_are_long(tokenizer, monkeypatch):
    modules = [corpus.Module(f"m{i}", f"summary {i}", HAYSTACK[: 400 + 40 * i]) for i in range(12)]
    monkeypatch.setattr(lengths, "split", lambda: (modules, []))
    sizes = [size(tokenizer, module.document) for module in modules]
    least = sorted(sizes)[-4]
    natural = lengths.long_documents(tokenizer, least, 3)
    assert all(document in [m.document for m in modules] for _, document in natural) and len(set(natural)) == 3
    more = lengths.long_documents(tokenizer, least, 6)
    assert len(more) == 6 and all(size(tokenizer, document) >= least for _, document in more)
    by_summary = {module.summary: module.document for module in modules}
    assert all(document.startswith(by_summary[summary]) for summary, document in more)
    assert len({summary for summary, _ in more}) == 6
    with pytest.raises(SystemExit, match=r"there are \d+ documents of at least"):
        lengths.long_documents(tokenizer, least, 12)


def test_chunks_are_even_and_whole(tokenizer, model):
    texts = [HAYSTACK[:90], HAYSTACK[:200], "a b", HAYSTACK[:75]]
    chunks = windows.embed_chunks(model, tokenizer, texts, 20, "chunks")
    for text, actual in zip(texts, chunks, strict=True):
        pieces = windows.chunk(tokenizer, text, 20)
        ids = [tokenizer(piece)["input_ids"] for piece in pieces]
        assert [i for piece in ids for i in piece[1:-1]] == tokenizer(text, add_special_tokens=False)["input_ids"]
        lengths = [len(piece) for piece in ids]
        assert max(lengths) <= 20 and max(lengths) - min(lengths) <= 1
        assert len(pieces) == -(-len([i for piece in ids for i in piece[1:-1]]) // 18) == len(actual)
        for piece, vector in zip(ids, actual, strict=True):
            with torch.no_grad():
                mean = model(torch.tensor([piece])).last_hidden_state[0].mean(0)
            torch.testing.assert_close(vector, mean / mean.norm(), atol=1e-5, rtol=1e-4)


def test_a_model_that_ends_before(tokenizer, model):
    queries, documents = ["a b c.", "x y z."], [HAYSTACK[:200], HAYSTACK[100:400]]
    truncated, mean, best = windows.methods("tiny", model, tokenizer, 100, 200)
    assert [truncated.name, mean.name, best.name] == [
        "tiny, truncated at 24",
        "tiny, chunked by 24, mean",
        "tiny, chunked by 24, max",
    ]
    asked = embed(model, tokenizer, queries, 24, "queries")
    close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)
    close(truncated.similarity(queries, documents, ""), asked @ embed(model, tokenizer, documents, 24, "documents").T)
    for row, document in enumerate(documents):
        (chunks,) = windows.embed_chunks(model, tokenizer, [document], 24, "")
        average = chunks.mean(0) / chunks.mean(0).norm()
        close(mean.similarity(queries, documents, "")[:, row], asked @ average)
        close(best.similarity(queries, documents, "")[:, row], (asked @ chunks.T).max(1).values)
    (whole,) = windows.methods("longer", hf_posenc.patch(model, "alibi"), tokenizer, 100, 200)
    assert whole.name == "longer"


@pytest.mark.parametrize("candidates", [2, 6])
def test_who_sees_nothing_is_at_the_level_of_chance(candidates):
    equal = [torch.full((candidates, candidates), 0.5) for _ in range(3)]
    score = needles.score_needles(equal)
    assert (score.recall_at_1, score.mrr) == pytest.approx(needles.chance(candidates))
    generator = torch.Generator().manual_seed(0)
    drawn = needles.score_needles([torch.rand(candidates, candidates, generator=generator) for _ in range(4000)])
    assert (drawn.recall_at_1, drawn.mrr) == pytest.approx(needles.chance(candidates), abs=0.02)
    assert needles.score_needles([torch.eye(candidates)] * 2).recall_at_1_interval == (1.0, 1.0)


def test_scores_by_hand():
    similarity = torch.tensor([[0.9, 0.1, 0.0], [0.7, 0.7, 0.1], [0.6, 0.5, 0.4]])
    score = needles.score_needles([similarity])
    # Right; a draw with one other; third.
    assert score.recall_at_1 == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert score.mrr == pytest.approx((1 + (1 + 1 / 2) / 2 + 1 / 3) / 3) and score.queries == 3


def run(monkeypatch, *arguments):
    """The script's main, here, where the standard library is already read."""
    monkeypatch.setattr(sys, "argv", ["eval_length.py", *map(str, arguments)])
    eval_length.main()


@pytest.fixture
def folders(tokenizer, model, tmp_path):
    for name, each in (("stock", model), ("alibi", hf_posenc.patch(model, "alibi"))):
        each.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return tmp_path


def test_from_end_to_end(folders, library, monkeypatch):
    arguments = ["--lengths", "64", "1000", "--documents", "3", "--haystacks", "6", "--candidates", "2"]
    run(monkeypatch, f"stock={folders / 'stock'}", f"alibi={folders / 'alibi'}", *arguments, "--output_dir", folders / "out")
    found = json.loads((folders / "out" / "length.json").read_text())
    names = [
        "bag of words",
        "stock, truncated at 24",
        "stock, chunked by 24, mean",
        "stock, chunked by 24, max",
        "alibi",
    ]
    assert found["settings"]["lengths"] == [64, 1000] and found["chance"]["candidates"] == [0.5, 0.75]
    for length in ("64", "1000"):
        assert list(found["scores"]["retrieval"][length]) == names
    assert list(found["scores"]["needle beyond"]) == ["1000"]
    within, beyond = found["scores"]["needle"]["1000"], found["scores"]["needle beyond"]["1000"]
    counts = [each["alibi"]["queries"] for each in (within, beyond)]
    assert sum(counts) == 12 and min(counts) >= 4
    assert beyond["stock, truncated at 24"]["recall_at_1"] == 0.5 and beyond["bag of words"]["recall_at_1"] > 0.5
    assert (folders / "out" / "length.png").stat().st_size > 10_000
    shown = (folders / "out" / "length.txt").read_text()
    assert "chance" in shown and "behind the first 512 tokens" in shown and f"N = {counts[1]}" in shown
    run(monkeypatch, f"alibi={folders / 'alibi'}", *arguments, "--output_dir", folders / "again")
    again = json.loads((folders / "again" / "length.json").read_text())["scores"]
    assert all(again[task][n]["alibi"] == by[n]["alibi"] for task, by in found["scores"].items() for n in by)


def test_a_task_without_a_case_is_left_out(folders, library, monkeypatch):
    arguments = ["--lengths", "64", "--documents", "3", "--haystacks", "2", "--candidates", "2"]
    run(monkeypatch, folders / "alibi", *arguments, "--output_dir", folders / "out")
    assert "behind the first" not in (folders / "out" / "length.txt").read_text()


def test_models_that_cannot_be_compared(folders, tokenizer, monkeypatch):
    out = ("--output_dir", folders / "out")
    with pytest.raises(SystemExit, match="two models are called 'same'"):
        run(monkeypatch, f"same={folders / 'stock'}", f"same={folders / 'alibi'}", *out)
    (folders / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]))
    BertTokenizer(str(folders / "vocab.txt")).save_pretrained(folders / "alibi")
    with pytest.raises(SystemExit, match="b has another vocabulary than a"):
        run(monkeypatch, f"a={folders / 'stock'}", f"b={folders / 'alibi'}", *out)
    assert not (folders / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--lengths", "16"), "32 tokens or more"),
        (("--candidates", "1"), "2 or more"),
        (("--candidates", "301"), "there are 300 different facts"),
        (("--documents", "1"), "2 or more"),
    ],
)
def test_bad_arguments(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(sys, "argv", ["eval_length.py", "model", "--output_dir", "out", *arguments])
    with pytest.raises(SystemExit):
        eval_length.parse_arguments()
    assert words in capsys.readouterr().err


def test_the_readme_shows_the_kept_results():
    shown = (ROOT / "README.md").read_text()
    scores = json.loads((SCRIPTS / "results" / "length.json").read_text())["scores"]
    by_task = {"needle beyond": ("recall_at_1", "R@1"), "retrieval": ("mrr", "MRR")}
    for task, (figure, name) in by_task.items():
        found = {way: f"{score[figure]:.3f}" for way, score in scores[task]["2048"].items()}
        (line,) = [part for part in shown.split("\n- ") if f"({name}): truncated" in part]
        for way in ("minilm, truncated at 512", "minilm, chunked by 512, mean", "minilm, chunked by 512, max", "minilm-alibi"):
            assert found[way] in line, (task, way)
