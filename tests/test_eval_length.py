"""Evaluation by length: the placement of facts, the comparisons, and the level of chance."""

import json
import random
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from transformers import BertTokenizer

import hf_posenc
from conftest import LETTERS, ROOT
from experiments import eval_length, needles, retrieval_by_length
from experiments import stdlib_retrieval as stdlib
from hf_posenc.evaluation import perplexity, records, stdlib_corpus
from hf_posenc.evaluation.metrics import Ranks
from hf_posenc.evaluation.retrieval import Embedder, RetrievalStrategy, cut
from models import stock

SCRIPTS = ROOT / "scripts"
HAYSTACK = " ".join(f"{' '.join(LETTERS[i % 26] for i in range(n, n + 9))}." for n in range(60))


@pytest.fixture(scope="module")
def tokenizer(letters):
    return letters


@pytest.fixture(scope="module")
def model():
    return stock("bert", vocab_size=59)


def size(tokenizer, text):
    return len(tokenizer(text)["input_ids"])


def test_models_without_a_tokenizer(tmp_path, model):
    model.save_pretrained(tmp_path / "bare")
    with pytest.raises(SystemExit, match="bare has no tokenizer. Save the.*tokenizer there"):
        eval_length.load_tokenizers({"bare": str(tmp_path / "bare")})


def test_texts_and_ids_that_do_not_fit(tokenizer, model):
    """The errors are raised before anything is measured."""
    language = stock("gpt2", "LMHeadModel", vocab_size=20)
    with pytest.raises(ValueError, match="small has input_ids from .*, but the.*the ids 0 to 19"):
        perplexity.evaluate({"small": (language, tokenizer)}, [HAYSTACK], [16], "small")
    with pytest.raises(ValueError, match=r"tokenizer doesn't know the texts: .* are '\[UNK\]'"):
        perplexity.evaluate({"it": (language, tokenizer)}, ["\u4e00\u4e8c \u4e09"], [16], "it")
    with pytest.raises(ValueError, match="texts has input_ids from .* ids 0 to 19"):
        Embedder(stock("bert", vocab_size=20), tokenizer)([HAYSTACK[:20]])
    with pytest.raises(ValueError, match="tokenizer doesn't know the texts"):
        Embedder(model, tokenizer)(["\u4e00\u4e8c \u4e09"])


def test_facts_without_room(tokenizer):
    with pytest.raises(SystemExit, match="--lengths 40 .* a fact takes up to 41"):
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
    # A fact is inserted at the end of the sentence before the drawn token. A sentence has ten tokens.
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
        visible = tokenizer(cut(tokenizer, group[0].document, needles.BOUNDARY), add_special_tokens=False)
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


@pytest.mark.slow
def test_no_fact_is_in_the_corpus(library):
    modules, training = library
    texts = [*training, *(module.document for module in modules)]
    fact = re.compile(rf"({'|'.join(needles.NAMES)}) keeps the", re.IGNORECASE)
    assert len(texts) > 500 and not any(fact.search(text) for text in texts)


def test_long_documents_are_long(tokenizer, monkeypatch):
    modules = [stdlib_corpus.Module(f"m{i}", f"summary {i}", HAYSTACK[: 400 + 40 * i]) for i in range(12)]
    monkeypatch.setattr(stdlib, "split", lambda: (modules, []))
    sizes = [size(tokenizer, module.document) for module in modules]
    least = sorted(sizes)[-4]
    natural = stdlib.long_documents(tokenizer, least, 3)
    assert all(document in [m.document for m in modules] for _, document in natural) and len(set(natural)) == 3
    more = stdlib.long_documents(tokenizer, least, 6)
    assert len(more) == 6 and all(size(tokenizer, document) >= least for _, document in more)
    by_summary = {module.summary: module.document for module in modules}
    assert all(document.startswith(by_summary[summary]) for summary, document in more)
    assert len({summary for summary, _ in more}) == 6
    with pytest.raises(SystemExit, match=r"there are \d+ documents of at least"):
        stdlib.long_documents(tokenizer, least, 12)
    assert stdlib.long_documents(tokenizer, least, 12, fewer=True)[:6] == more


def run(monkeypatch, *arguments):
    """Runs the script's main in this process, where the standard library has already been read."""
    monkeypatch.setattr(sys, "argv", ["eval_length.py", *map(str, arguments)])
    eval_length.main()


@pytest.fixture(scope="module")
def folders(tokenizer, model, tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    for name, each in (("stock", model), ("alibi", hf_posenc.patch(model, "alibi"))):
        each.save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    for name in ("llama", "gpt2"):
        stock(name, vocab_size=59, head="ForCausalLM" if name == "llama" else "LMHeadModel").save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    (path / "pages").mkdir()
    for number in range(24):
        choose = random.Random(number)
        sentences = [" ".join("".join(choose.choices(LETTERS, k=3)) for _ in range(9)).capitalize() + "." for _ in range(45)]
        title = f"Page of the number {LETTERS[number]}"
        (path / "pages" / f"{number}.txt").write_text(f"{title}\n{'=' * len(title)}\n\n" + "\n\n".join(sentences))
    return path


NAMES = ["bag of words", "stock, truncated at 24", "stock, chunked by 24, mean", "stock, chunked by 24, max", "alibi"]
ARGUMENTS = ["--haystacks", "3", "--candidates", "2", "--depths", "4"]


def test_from_end_to_end(folders, monkeypatch, tmp_path):
    for name in ("stock", "alibi"):
        shutil.copytree(folders / name, tmp_path / name)
    both = [f"{name}={tmp_path / name}" for name in ("stock", "alibi")]
    arguments = [*ARGUMENTS, "--pages", folders / "pages", "--lengths", "64", "1000", "--documents", "8"]
    run(monkeypatch, *both, *arguments, "--output_dir", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "length.json").read_text())
    settings, scores, differences = found["settings"], found["scores"], found["differences"]
    assert settings["lengths"] == [64, 1000] and settings["needle_lengths"] == [1000] and settings["documents"] == 8
    assert settings["texts"] == "pages" and settings["baseline"] == NAMES[1] and found["chance"]["candidates"] == [0.5, 0.75]
    for task in ("title", "deep"):
        for length in ("64", "1000"):
            assert list(scores[task][length]) == NAMES and scores[task][length]["alibi"]["queries"] == 8
            assert list(differences[task][length]) == [name for name in NAMES if name != NAMES[1]]
            for name, each in differences[task][length].items():
                gap = scores[task][length][name]["mrr"] - scores[task][length][NAMES[1]]["mrr"]
                assert each["value"] == pytest.approx(gap) and each["interval"][0] <= gap <= each["interval"][1]
    assert all(512 <= depth < 1000 for depth in found["depths"]["1000"]) and len(found["depths"]["1000"]) == 8
    within, beyond = scores["needle"]["1000"], scores["needle beyond"]["1000"]
    assert within["alibi"]["queries"] + beyond["alibi"]["queries"] == 3 * 2 * 4
    assert beyond[NAMES[1]]["recall_at_1"] == 0.5 and beyond["bag of words"]["recall_at_1"] > 0.5
    assert list(found["heat"]) == NAMES
    cells = found["heat"]["alibi"]["1000"]
    assert [cell["score"]["queries"] for cell in cells] == [6] * 4
    assert [int(cell["tokens_before"] // 250) for cell in cells] == [0, 1, 2, 3]
    assert (tmp_path / "out" / "length.png").stat().st_size > 10_000 < (tmp_path / "out" / "needle.png").stat().st_size
    shown = (tmp_path / "out" / "length.txt").read_text()
    assert "chance" in shown and "beyond the first 512 tokens" in shown and NAMES[1] in shown
    assert f"{scores['deep']['1000']['alibi']['mrr']:.3f}" in shown
    value, (low, high) = (differences["deep"]["1000"]["alibi"][name] for name in ("value", "interval"))
    assert f"{value:+.3f} [{low:+.2f}, {high:+.2f}]" in shown
    # Separate runs of two models give the same results as a joint run.
    run(monkeypatch, both[1], *arguments, "--output_dir", tmp_path / "again", "--baseline", "bag of words", "--tasks", "deep")
    again = json.loads((tmp_path / "again" / "length.json").read_text())
    assert list(again["scores"]) == ["deep"] and list(again["differences"]["deep"]["64"]) == ["alibi"]
    for length in ("64", "1000"):
        for figure, value in scores["deep"][length]["alibi"].items():
            assert again["scores"]["deep"][length]["alibi"][figure] == pytest.approx(value, abs=1e-6)
    assert not (tmp_path / "again" / "needle.png").exists()
    # Short lengths have no deep questions.
    short = [
        *ARGUMENTS,
        "--pages",
        folders / "pages",
        "--lengths",
        "64",
        "--documents",
        "3",
        "--output_dir",
        tmp_path / "short",
    ]
    run(monkeypatch, both[1], *short)
    found = json.loads((tmp_path / "short" / "length.json").read_text())
    assert list(found["scores"]) == ["title", "needle"] and found["depths"] == {}


@pytest.mark.slow
def test_the_standard_library_is_the_default(folders, library, monkeypatch, tmp_path, capsys):
    arguments = ["--lengths", "64", "2000", "--documents", "5", "--tasks", "title", "deep"]
    run(monkeypatch, folders / "alibi", *arguments, "--output_dir", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "length.json").read_text())
    assert found["settings"]["texts"] == records.LIBRARY and found["settings"]["documents"] == 5
    monkeypatch.setattr(stdlib, "split", lambda: (library[0][:30], []))
    many = [*arguments[:3], "--documents", "50", "--tasks", "title"]
    run(monkeypatch, folders / "alibi", *many, "--output_dir", tmp_path / "few")
    assert "not 50; --pages takes a folder with more" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit, match="documents have 500000 tokens or more: lower --lengths, or give other --pages"):
        run(monkeypatch, folders / "alibi", "--lengths", "500000", "--output_dir", tmp_path / "none")


def test_perplexity_by_length(folders, monkeypatch, tmp_path):
    both = [f"{name}={folders / name}" for name in ("gpt2", "llama")]
    arguments = ["--pages", folders / "pages", "--lengths", "16", "64", "--documents", "3", "--output_dir", tmp_path / "out"]
    run(monkeypatch, *both, *arguments)
    found = json.loads((tmp_path / "out" / "length.json").read_text())
    windows = {length: {name: each["window"] for name, each in by.items()} for length, by in found["perplexity"].items()}
    assert windows == {"16": {"gpt2": 16, "llama": 16}, "64": {"gpt2": 24, "llama": 24}}
    assert found["scores"] == {} and found["settings"]["tasks"] == ["perplexity"]
    for by_model in found["perplexity"].values():
        assert by_model["gpt2"]["ratio"] == 1.0 and by_model["gpt2"]["ratio_interval"] == [1.0, 1.0]
        ratio = by_model["llama"]["perplexity"] / by_model["gpt2"]["perplexity"]
        assert by_model["llama"]["ratio"] == pytest.approx(ratio) and ratio != 1.0
    assert "windows of 24" in (tmp_path / "out" / "length.txt").read_text()
    with pytest.raises(SystemExit, match="--tasks perplexity: stock has.*language model"):
        run(monkeypatch, f"stock={folders / 'stock'}", *arguments, "--tasks", "perplexity")
    with pytest.raises(SystemExit, match="--baseline 'x'.*the models: 'gpt2', 'llama'"):
        run(monkeypatch, *both, *arguments, "--baseline", "x")


@pytest.mark.parametrize("length", [2, 16, 23, 40])
@pytest.mark.parametrize("window", [2, 5, 16])
def test_each_token_is_scored_once(window, length):
    model = stock("llama", vocab_size=59, head="ForCausalLM")
    ids = torch.randint(5, 59, (length,), generator=torch.Generator().manual_seed(0))
    expected, scored = [], 1
    for start in range(0, length, window // 2):
        seen = ids[start : start + window]
        with torch.no_grad():
            logits = model(seen[None]).logits[0].double()
        for place in range(scored, start + len(seen)):
            expected.append(-logits[place - start - 1].log_softmax(-1)[ids[place]].item())
            assert place - start >= min(place, window - window // 2)
        scored = max(scored, start + len(seen))
    actual = perplexity.losses(model, ids, window)
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-4, rtol=1e-4)


def test_questions_at_each_length(tokenizer):
    same = [f"{' '.join(LETTERS[n : n + 9]).capitalize()}." for n in range(10)]

    def text(seed):
        """Sentences of ten tokens. All texts share those from token 520 to 620."""
        choose = random.Random(seed)
        own = [" ".join(choose.choices(LETTERS, k=9)).capitalize() + "." for _ in range(110)]
        return " ".join([*own[:52], *same, *own[52:]])

    texts = [(f"title {i}", text(i)) for i in range(8)] + [("short", text(9)[:400])]
    found = retrieval_by_length.cases(tokenizer, texts, [100, 660, 1000], 6, seed=0)
    assert len(found) == 6 and len({case.title for case in found}) == 6
    assert [case.title for case in found] != [
        case.title for case in retrieval_by_length.cases(tokenizer, texts, [100, 660, 1000], 6, 1)
    ]
    for case in found:
        assert sorted(case.deep) == [660, 1000] and (case.title, case.document) in texts
        for length, question in case.deep.items():
            assert 512 <= question.depth <= length - 2 - 10 and question.query not in same
            assert question.query in case.document and question.query not in case.at(tokenizer, length)
            assert size(tokenizer, case.at(tokenizer, length)) == length
        assert case.question(100) is case.deep[1000]
        assert case.at(tokenizer, 100) == cut(tokenizer, case.document, 100)
    assert retrieval_by_length.cases(tokenizer, texts, [100], 20, 0)[0].deep == {}


def test_which_method_is_the_baseline(tokenizer, model):
    limited, free = Embedder(model, tokenizer), Embedder(hf_posenc.patch(model, "alibi"), tokenizer)

    def baseline(embedders, asked=None, **window):
        return retrieval_by_length.baseline_of(retrieval_by_length.ways(embedders, 100, **window), asked)

    assert baseline({"a": limited, "b": free}) == "a, truncated at 24"
    assert baseline({"b": free, "a": limited}) == "b"
    assert baseline({"b": free, "a": limited}, window=10) == "b, truncated at 10"
    with pytest.raises(SystemExit, match=r"bag\ of\ words"):
        baseline({"b": free}, "c")


def test_the_heat_map_has_each_fact_in_its_cell(tokenizer):
    """The method reads only the second half of each document."""

    def second_half(queries, documents, title):
        halves = [document[len(document) // 2 :] for document in documents]
        wanted = [re.findall(r"the (\w+ \w+) that", query)[0] for query in queries]
        return torch.tensor([[float(each in half) for half in halves] for each in wanted])

    found, haystacks = (
        retrieval_by_length.Found(),
        [retrieval_by_length.Case("", HAYSTACK), retrieval_by_length.Case("", HAYSTACK[::-1])],
    )
    ways = [RetrievalStrategy("second half", second_half)]
    retrieval_by_length.evaluate_needles(found, ways, tokenizer, haystacks, [200, 400], depths=5, candidates=3, seed=0)
    for length in (200, 400):
        cells = found.heat()["second half"][length]
        recalls = [cell["score"].recall_at_1 for cell in cells]
        assert recalls[:2] == pytest.approx([1 / 3] * 2) and recalls[3:] == [1.0] * 2
        assert all(cell["score"].queries == 6 for cell in cells)


def test_a_needle_stays_in_its_part(tokenizer):
    """This holds even if a table leaves no sentence before the needle."""
    haystack = f"{HAYSTACK[:200]} {'a ' * 400}"
    for part in range(4):
        (first, *_) = needles.needles(tokenizer, haystack, 400, 2, random.Random(0), (part, 4))
        assert part * 90 - 10 <= first.depth <= (part + 1) * 90 + 10


def test_who_sees_nothing_is_at_the_level_of_chance():
    """If all similarities are equal, needle recall is at the level of chance."""
    found = retrieval_by_length.Found()
    found.add("needle", 64, "blind", Ranks(np.full(4, 0.5), np.full(4, 0.75), np.arange(4)))
    assert found.scores()["needle"][64]["blind"].recall_at_1 == needles.chance(2)[0]


def test_models_that_cannot_be_compared(folders, monkeypatch, tmp_path):
    out = ("--output_dir", tmp_path / "out")
    with pytest.raises(SystemExit, match="two models are called 'same'"):
        run(monkeypatch, f"same={folders / 'stock'}", f"same={folders / 'alibi'}", *out)
    shutil.copytree(folders / "alibi", tmp_path / "alibi")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "alibi")
    with pytest.raises(SystemExit, match="b has.*than a"):
        run(monkeypatch, f"a={folders / 'stock'}", f"b={tmp_path / 'alibi'}", *out)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--lengths", "16"), "32 tokens or more"),
        (("--lengths", "4", "64"), "8 tokens or more"),
        (("--candidates", "1"), "2 or more"),
        (("--candidates", "301"), "there are 300 different facts"),
        (("--documents", "1"), "2 or more"),
        (("--depths", "0"), "1 or more"),
        (("--needle_lengths", "4096"), "beyond the longest of --lengths"),
        (("--tasks", "deep", "--lengths", "512"), "behind 512 tokens: give --lengths beyond"),
        (("--evaluation_share", "0"), "shares above 0, up to 1"),
    ],
)
def test_bad_arguments(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(sys, "argv", ["eval_length.py", "model", "--output_dir", "out", *arguments])
    with pytest.raises(SystemExit):
        eval_length.parse_arguments()
    assert words in capsys.readouterr().err


def test_the_page_shows_the_kept_results():
    page = (ROOT / "docs" / "results" / "long_inputs.md").read_text()
    for name in ("linux-doc-6.1", "postgresql-doc-15"):
        scores = json.loads((SCRIPTS / "results" / f"length-{name}.json").read_text())["scores"]["deep"]["1024"]
        converted, chunks = (scores[way]["mrr"] for way in ("minilm-relative", "minilm, chunked by 512, mean"))
        assert f"{converted:.3f} and {chunks:.3f}" in page
    rows = json.loads((SCRIPTS / "results" / "windows.json").read_text())["retrieval"]
    found = {(row["corpus"], row["task"], row["method"]): row["mrr"] for row in rows if row["tokens"] == 2048}
    ways = {
        "original, truncated": "minilm, truncated at 512",
        "averaged chunks": "minilm, chunked by 512, mean",
        "`dynamic`": "dynamic",
        "`windows`": "windows, stride 382",
    }
    for shown, way in ways.items():
        figures = [
            f"{found[corpus, task, way]:.3f}"
            for corpus in ("linux-doc-6.1", "postgresql-doc-15")
            for task in ("title", "beyond 512")
        ]
        assert f"| {shown} | {' | '.join(figures)} |" in page
