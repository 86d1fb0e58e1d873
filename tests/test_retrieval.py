"""Retrieval in the package: embeddings, long texts, bags of words, ranks, paired differences, and cloze queries."""

import itertools
import math
import random
import re
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

import hf_posenc
from conftest import LETTERS, WORDS
from hf_posenc.evaluation import cloze_queries, metrics, retrieval
from models import LENGTH, stock
from tools import coverage

DOCUMENT = " ".join(f"{' '.join(LETTERS[i % 26] for i in range(n, n + 9)).capitalize()}." for n in range(60))
"""60 sentences of 9 words and 10 tokens. Every 26th is the same."""


@pytest.fixture(scope="module")
def model():
    return stock("bert", vocab_size=59)


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def by_hand(model, tokenizer, text, pool=lambda hidden: hidden.mean(0)):
    """The embedding of one text, alone in its batch."""
    with torch.no_grad():
        vector = pool(model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0])
    return vector / vector.norm()


@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_embeddings_keep_the_order_of_the_texts(letters, model, monkeypatch, batch_tokens):
    monkeypatch.setattr(retrieval, "BATCH_TOKENS", batch_tokens)
    sizes = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: sizes.append(kwargs["input_ids"].shape), with_kwargs=True)
    texts = [" ".join(LETTERS[i : i + 2 + (7 * i) % 5]) for i in range(20)]
    model.train()
    try:
        together = retrieval.embed(model, letters, texts)
        assert model.training
    finally:
        hook.remove()
        model.eval()
    assert all(rows * length <= batch_tokens or rows == 1 for rows, length in sizes)
    assert sum(rows for rows, _ in sizes) == 20 and (len(sizes) == 1) == (batch_tokens == 10_000)
    for row, text in zip(together, texts, strict=True):
        torch.testing.assert_close(row, by_hand(model, letters, text), atol=1e-5, rtol=1e-4)


def test_pools_of_ones_own(letters, model):
    found = retrieval.embed(model, letters, ["a b c.", "d."], pool=lambda hidden, batch: hidden[:, 0])
    torch.testing.assert_close(found[1], by_hand(model, letters, "d.", lambda hidden: hidden[0]), atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="Pass a.*more strings"):
        retrieval.embed(model, letters, [])


def test_each_text_is_embedded_once(letters, model, monkeypatch):
    embedder, asked, embed = retrieval.Embedder(model, letters), [], retrieval.embed

    def counted(model, tokenizer, texts, *rest):
        asked.extend(texts)
        return embed(model, tokenizer, texts, *rest)

    monkeypatch.setattr(retrieval, "embed", counted)
    first = embedder(["a b.", "c.", "a b."])
    again = embedder(["d e.", "c."])
    assert asked == ["a b.", "c.", "d e."] and torch.equal(first[0], first[2]) and torch.equal(first[1], again[1])
    assert embedder.limit == LENGTH and retrieval.Embedder(hf_posenc.patch(model, "alibi"), letters).limit is None


@pytest.mark.parametrize("length", [32, 200, 10_000])
def test_cut(letters, length):
    text = retrieval.cut(letters, DOCUMENT, length)
    assert DOCUMENT.startswith(text) and len(ids(letters, text)) == min(length - 2, len(ids(letters, DOCUMENT)))


def test_cut_without_room(letters):
    with pytest.raises(ValueError, match="2 tokens leave.*text besides 2 special ones. Use 3"):
        retrieval.cut(letters, DOCUMENT, 2)


@pytest.mark.parametrize("longest_word", [1, 3, 9, 60])
@pytest.mark.parametrize("window", [20, 24, 51])
def test_chunks_cover_the_text_exactly(letters, window, longest_word):
    choose = random.Random(f"{window} {longest_word}")
    for _ in range(10):
        words = ["".join(choose.choices(LETTERS, k=choose.randint(1, longest_word))) for _ in range(choose.randint(1, 60))]
        text = "  ".join(words) + " "
        pieces = retrieval.chunk(letters, text, window)
        assert "".join(pieces) == text
        if longest_word == 1:
            assert all(piece.startswith("  ") for piece in pieces[1:])
        assert all(len(ids(letters, piece)) <= window - 2 for piece in pieces)
        if longest_word <= (window - 2) // 4:  # no word is split, so the tokens are those of the text
            assert [i for piece in pieces for i in ids(letters, piece)] == ids(letters, text)
            assert all(piece.split() == [word for word in piece.split() if word in words] for piece in pieces)
        if longest_word == 1:
            sizes = [len(ids(letters, piece)) for piece in pieces]
            assert max(sizes) - min(sizes) <= 1 and len(pieces) == -(-sum(sizes) // (window - 2))


def test_a_model_that_ends_before(letters, model):
    embedder = retrieval.Embedder(model, letters)
    asked, documents = ["a b c.", "x y z."], [DOCUMENT[:200], DOCUMENT[100:400], "a b."]
    truncated, mean, best = retrieval.strategies("tiny", embedder, 200)
    assert [way.name for way in (truncated, mean, best)] == [
        "tiny, truncated at 24",
        "tiny, chunked by 24, mean",
        "tiny, chunked by 24, max",
    ]
    for i, j in itertools.product(range(2), range(3)):
        query = by_hand(model, letters, asked[i])
        places = letters(documents[j], add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        beginning = documents[j][: places[min(22, len(places)) - 1][1]]
        pieces = [by_hand(model, letters, piece) for piece in retrieval.chunk(letters, documents[j], 24)]
        average = sum(pieces) / len(pieces)
        expected = {
            truncated: query @ by_hand(model, letters, beginning),
            mean: query @ average / average.norm(),
            best: max(query @ piece for piece in pieces),
        }
        for way, value in expected.items():
            actual = way.similarity(asked, documents, "")[i, j]
            assert actual.item() == pytest.approx(value.item(), abs=1e-5), way.name


def test_which_methods_there_are(letters, model):
    limited, free = retrieval.Embedder(model, letters), retrieval.Embedder(hf_posenc.patch(model, "alibi"), letters)
    assert [way.name for way in retrieval.strategies("m", limited, 24)] == ["m"]
    assert [way.name for way in retrieval.strategies("m", free, 10_000)] == ["m"]
    names = [way.name for way in retrieval.strategies("m", free, 10_000, window=16)]
    assert names == ["m", "m, truncated at 16", "m, chunked by 16, mean", "m, chunked by 16, max"]
    with pytest.raises(ValueError, match="window=25"):
        retrieval.strategies("m", limited, 100, window=25)


def test_slow_tokenizers_are_refused(model):
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="Slow"):
        retrieval.Embedder(model, Slow())


def test_bag_of_words():
    choose = random.Random(0)
    texts = [" ".join(choose.choices(WORDS[: 4 + i], k=30)) + ", Sign! a" for i in range(12)]
    asked = [texts[3][:40], "w1 W1 w2 nowhere", "nowhere", ""]
    counts = [Counter(re.findall(r"\b\w\w+\b", text.lower())) for text in texts]
    words = sorted({*itertools.chain(*counts)})
    weight = [1 + math.log((1 + len(texts)) / (1 + sum(word in each for each in counts))) for word in words]

    def vector(text):
        found = Counter(re.findall(r"\b\w\w+\b", text.lower()))
        values = np.array([(1 + math.log(found[w])) * idf if w in found else 0 for w, idf in zip(words, weight, strict=True)])
        return values / max(np.linalg.norm(values), 1e-9)

    expected = np.array([[vector(query) @ vector(text) for text in texts] for query in asked])
    np.testing.assert_allclose(retrieval.lexical_similarity(asked, texts).numpy(), expected, atol=1e-6)


def expected_ranks(row, right):
    """Hit and reciprocal rank, averaged over all orders of equal documents."""
    found = []
    others = [j for j in range(len(row)) if j != right]
    equal = [j for j in others if abs(row[j] - row[right]) <= metrics.TIE]
    better = sum(row[j] > row[right] + metrics.TIE for j in others)
    for order in itertools.permutations([right, *equal]):
        found.append(better + order.index(right) + 1)
    return np.mean([rank == 1 for rank in found]), np.mean([1 / rank for rank in found])


def test_ranks_with_ties():
    generator = torch.Generator().manual_seed(0)
    similarity = torch.randint(0, 4, (30, 6), generator=generator) / 4 + 1e-7 * torch.rand(30, 6, generator=generator)
    right = torch.randint(0, 6, (30,), generator=generator).tolist()
    ranks = metrics.ranked(similarity, right)
    for i in range(30):
        assert (ranks.hits[i], ranks.reciprocals[i]) == pytest.approx(expected_ranks(similarity[i].tolist(), right[i]))
    # The ranks are 1, 2, and for three equal documents, 1, 2, and 3 with equal probability.
    found = metrics.score(torch.tensor([[0.9, 0.1, 0.0], [0.8, 0.7, 0.1], [0.5, 0.5, 0.5]]))
    assert found.recall_at_1 == pytest.approx((1 + 0 + 1 / 3) / 3)
    assert found.mrr == pytest.approx((1 + 1 / 2 + (1 + 1 / 2 + 1 / 3) / 3) / 3)
    assert found.mrr_interval[0] < found.mrr < found.mrr_interval[1] and found.queries == 3
    # All correct: the Clopper-Pearson interval for 5 of 5.
    assert metrics.score(torch.eye(5)).recall_at_1_interval == pytest.approx((0.025**0.2, 1.0))


EYE = torch.eye(3)
UNRANKED = {
    "NaN": (torch.tensor([[1.0, float("nan")], [0.0, 1.0]]), {}, "NaN"),
    "infinite": (torch.tensor([[1.0, float("inf")], [0.0, 1.0]]), {}, "NaN"),
    "no tensor": ([[1.0]], {}, "similarity has type list. Pass a tensor"),
    "one dimension": (torch.ones(3), {}, r"similarity has shape \[3\]. Pass a tensor .* \[queries, documents\]"),
    "no queries": (torch.ones(0, 3), {"right": []}, r"similarity has shape \[0, 3\]"),
    "complex": (torch.ones(3, 3, dtype=torch.complex64), {}, "similarity has shape .* real numbers"),
    "no targets": (torch.zeros(2, 3), {}, "2 queries and 3 documents .* `right`"),
    "one target for all": (EYE, {"right": [0]}, r"right has shape \[1\]. Pass one value for each of the 3 queries"),
    "a scalar": (EYE, {"right": 0}, r"right has shape \[\]"),
    "negative": (EYE, {"right": [0, -1, 2]}, r"right\[1\] is -1. Allowed: the index of a document, an integer from 0 to 2"),
    "fractions": (EYE, {"right": [0, 1, 1.5]}, r"right\[0\] is 0.0. Allowed"),
    "booleans": (EYE, {"right": [True, False, True]}, r"right\[0\] is True. Allowed"),
    "texts": (EYE, {"right": ["0", "1", "2"]}, r"right\[0\] is '0'. Allowed"),
    "groups of others": (EYE, {"groups": [0, 1]}, r"groups has shape \[2\]. Pass one value for each of the 3 queries"),
}


@pytest.mark.parametrize("name", UNRANKED)
def test_similarities_that_cannot_be_ranked(name):
    similarity, given, message = UNRANKED[name]
    with pytest.raises(ValueError, match=message):
        metrics.ranked(similarity, **given)


def test_targets_and_groups_as_tensors():
    expected = metrics.ranked(EYE, [1, 2, 0], [0, 0, 1])
    found = metrics.ranked(EYE.clone().requires_grad_(), torch.tensor([1, 2, 0]), torch.tensor([0, 0, 1]))
    assert all(np.array_equal(getattr(found, name), getattr(expected, name)) for name in ("hits", "reciprocals", "groups"))


def test_ranks_that_do_not_belong_together():
    for given in ((np.ones(3), np.ones(3), np.ones(2)), (np.ones(3), 1.0, np.ones(3)), ([], [], []), (np.ones((2, 2)),) * 3):
        with pytest.raises(ValueError, match="Pass three 1-D arrays of one length, 1 or more"):
            metrics.Ranks(*given)
    with pytest.raises(ValueError, match="no ranks to join"):
        metrics.joined([])


def drawn(seed, count=300, groups=None):
    generator = np.random.default_rng(seed)
    hits = generator.integers(0, 2, count).astype(float)
    return metrics.Ranks(hits, generator.random(count), np.arange(count) if groups is None else groups)


def test_a_method_does_not_differ_from_itself():
    ranks = drawn(0)
    assert metrics.paired(ranks, ranks) == metrics.Difference(0.0, (0.0, 0.0), 300)


def test_another_method_with_the_same_answers_can_differ():
    found = metrics.paired(drawn(0), drawn(0))
    # After 300 equal answers, different answers may still exist with a probability up to `missed`.
    missed = 1 - 0.025 ** (1 / 300)
    assert (found.value, found.queries, found.significant) == (0.0, 300, False)
    assert found.interval == pytest.approx((-missed, missed)) and missed < 0.013


@pytest.mark.parametrize("metric", ["mrr", "recall_at_1"])
def test_a_shift_is_found(metric):
    ranks = metrics.Ranks(drawn(0).hits * 0.9, drawn(0).reciprocals * 0.9, drawn(0).groups)
    shifted = metrics.Ranks(ranks.hits + 0.03, ranks.reciprocals + 0.03, ranks.groups)
    found = metrics.paired(shifted, ranks, metric)
    assert found.value == pytest.approx(0.03) and found.significant
    assert metrics.paired(ranks, shifted, metric).value == pytest.approx(-0.03)
    assert found.shown() == "+0.030 [+0.02, +0.04]"
    # Nevertheless, the intervals of the two scores overlap.
    one, other = metrics.score(ranks), metrics.score(shifted)
    assert getattr(one, f"{metric}_interval")[1] > getattr(other, f"{metric}_interval")[0]
    with pytest.raises(ValueError, match="metric='map'.*recall_at_1"):
        metrics.paired(ranks, shifted, "map")


def test_intervals_are_those_of_the_mean():
    """For many queries, an interval is 1.96 standard errors of the differences."""
    one, other = drawn(1, 2000), drawn(2, 2000)
    found, gaps = metrics.paired(one, other), one.reciprocals - other.reciprocals
    half = 1.96 * gaps.std(ddof=1) / 2000**0.5
    assert found.value == pytest.approx(gaps.mean())
    assert found.interval == pytest.approx((gaps.mean() - half, gaps.mean() + half), abs=0.1 * half)


def test_groups_are_drawn_together():
    """Ten equal queries in each of 40 groups contain no more information than 40 queries. Groups may differ in size."""
    once = drawn(3, 40)
    tenfold = metrics.Ranks(*(np.repeat(each, 10) for each in (once.hits, once.reciprocals, once.groups)))
    assert metrics.score(tenfold).mrr_interval == pytest.approx(metrics.score(once).mrr_interval)
    # All queries have equal weight. Of 30 groups of one and 30 groups of nine, only the large ones are correct.
    ragged = metrics.Ranks(*[np.repeat([0.0, 1.0] * 30, [1, 9] * 30)] * 2, np.repeat(np.arange(60), [1, 9] * 30))
    found = metrics.score(ragged)
    assert found.mrr == pytest.approx(0.9) and 0.8 < found.mrr_interval[0] < 0.9 < found.mrr_interval[1] < 0.96
    with pytest.raises(ValueError, match="the same queries"):
        metrics.paired(tenfold, once)


def wilson(right, count):
    z = stats.t.ppf(0.975, count - 1)
    center, half = right / count + z**2 / (2 * count), z * math.sqrt(right * (count - right) / count**3 + z**2 / (4 * count**2))
    return (center - half) / (1 + z**2 / count), (center + half) / (1 + z**2 / count)


@pytest.mark.parametrize(("right", "count"), [(1, 10), (19, 20), (30, 50)])
def test_the_interval_of_right_answers_is_wilsons(right, count):
    values, groups = np.repeat([1.0, 0.0], [right, count - right]), np.arange(count)
    # The sample variance has n - 1, as with one observation fewer.
    low, high = metrics.share(values, groups)[1]
    assert (low, high) == pytest.approx(wilson(right * (count - 1) / count, count - 1), rel=0.02, abs=0.01)


def test_the_interval_of_losses_is_students():
    values = np.random.default_rng(0).normal(3, 2, 12)
    center, (low, high) = metrics.mean(values, np.arange(12))
    expected = stats.t.interval(0.95, 11, values.mean(), stats.sem(values))
    assert center == pytest.approx(values.mean()) and (low, high) == pytest.approx(expected, rel=1e-3)
    for freedom in (1, 2, 3, 4, 10, 100, 10_000):
        assert metrics.student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1.3e-3)


def test_intervals_without_variance():
    """Equal answers show only that other answers are rare. A single group shows nothing."""
    groups = np.arange(20)
    assert metrics.share(np.ones(20), groups)[1] == pytest.approx((0.8316, 1.0), abs=1e-4)
    assert metrics.share(np.zeros(20), groups)[1] == pytest.approx((0.0, 0.1684), abs=1e-4)
    assert metrics.share(np.full(20, 0.5), groups)[1] == pytest.approx((0.4158, 0.5842), abs=1e-4)
    assert metrics.difference(np.ones(20), np.zeros(20), groups)[1] == pytest.approx((0.6632, 1.0), abs=1e-4)
    assert metrics.share(np.array([0.0, 1.0]), np.zeros(2))[1] == pytest.approx((0.0125, 0.9875))
    with pytest.raises(ValueError, match="two or more observations"):
        metrics.mean(np.ones(5), np.zeros(5))


@pytest.mark.parametrize("estimate", [metrics.share, metrics.mean, lambda *given: metrics.difference(given[0], *given)])
def test_values_without_a_mean(estimate):
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match="NaN"):
            estimate(np.array([0.5, wrong]), np.arange(2))
    for values, groups in (([], []), ([0.5, 0.5], [0]), ([[0.5]], [[0]])):
        with pytest.raises(ValueError, match="Pass two 1-D arrays of one length"):
            estimate(np.array(values), np.array(groups))


def test_scores_beyond_their_bounds():
    with pytest.raises(ValueError, match=r"0\.0.*1\.5"):
        metrics.share(np.array([0.0, 1.5]), np.arange(2))


@pytest.mark.parametrize("name", [*coverage.SCORES, *coverage.PAIRS])
def test_intervals_contain_the_mean(name):
    """Each interval is from 20 queries. For "R@1, p = 0.95", the percentile bootstrap misses the mean in 37% of them."""
    random = np.random.default_rng(0)
    draw = {**coverage.SCORES, **coverage.PAIRS}[name]
    low, high = coverage.ours(draw(random, (600, 20))).T
    true = coverage.true_mean(draw, random)
    assert np.mean((low <= true) & (true <= high)) > 0.92


def test_joined_ranks():
    parts = [drawn(seed, 5, np.full(5, seed)) for seed in (1, 2)]
    both = metrics.joined(parts)
    assert both.groups.tolist() == [1] * 5 + [2] * 5
    assert both.reciprocals.tolist() == [*parts[0].reciprocals, *parts[1].reciprocals]


@pytest.mark.parametrize(("behind", "within"), [(0, None), (100, None), (512, None), (100, 200), (512, 552)])
def test_a_sentence_is_taken_out_behind_so_many_tokens(letters, behind, within):
    sentences = [f"{' '.join(random.Random(n).choices(LETTERS, k=9)).capitalize()}." for n in range(60)]
    document = " ".join(sentences)
    depths = set()
    for seed in range(40):
        found = cloze_queries.cloze_query(letters, document, random.Random(seed), behind, within)
        number = sentences.index(found.query)
        assert found.depth == 10 * number >= behind  # ten tokens per sentence
        assert found.query not in found.document
        assert found.document.split() == " ".join(sentences[:number] + sentences[number + 1 :]).split()
        if within is not None:
            assert found.depth + 10 <= within - 2
        depths.add(found.depth)
    assert len(depths) > (1 if within == 552 else 4)
    assert max(depths) > (within or 600) - 0.5 * ((within or 600) - behind)


def test_which_sentences_are_questions(letters):
    choose = random.Random(0)
    whole = "One two three four five six seven eight nine."
    assert cloze_queries.cloze_query(letters, whole, choose).query == whole
    for bad in (
        "One two three four five six.",  # short
        "one two three four five six seven eight nine.",  # its beginning is missing
        "One two three four five six seven eight nine",  # a heading
        "Int a = b[3] + c[4]; d = {e: 5}; f(); g++; h |= i; 1 2 3 4.",  # code
        f"{whole} {whole}",  # the document still contains it after its removal
        f"{whole}\n\none two three four five six seven eight nine, ten",
        "",
    ):
        assert cloze_queries.cloze_query(letters, bad, choose) is None, bad
    assert cloze_queries.cloze_query(letters, whole, choose, excluded={"one two three four five six seven eight nine"}) is None


def test_sentences():
    text = "  One e.g. this. Two!\nThree?\n\nA heading\n\n(Four.) 5 is five.\n"
    found = [" ".join(text[start:end].split()) for start, end in cloze_queries.sentence_spans(text)]
    assert found == ["One e.g. this.", "Two!", "Three?", "A heading", "(Four.) 5 is five."]
    assert cloze_queries.sentence_spans(" \n ") == []
