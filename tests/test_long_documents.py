"""Experiments on documents beyond 512 tokens: manual pages, spliced documents, chunks and spans, distant evidence."""

import gzip
import math
import random

import pytest
import torch

from experiments import distant_evidence, long_documents
from experiments.data import manuals
from experiments.data.pages import Page
from models import stock

PAGE = r""".\" a comment
.TH READIT 2 2023 "Linux"
.SH NAME
readit \- read "it"
.SH DESCRIPTION
.BR readit ()
reads\f[I] it\fP.
.SH STANDARDS
{}
.SH NOTES
A note.
.SH SEE ALSO
.BR read (2)
"""


class Words:
    """A tokenizer whose tokens are words. Its ids are the order in which it meets them, from 5."""

    cls_token_id, sep_token_id = 1, 2

    def __init__(self):
        self.known = {}

    def __call__(self, text, **options):
        return {"input_ids": [self.known.setdefault(word, 5 + len(self.known)) for word in text.split()]}


def numbered(name, count):
    return " ".join(f"{name}{number}" for number in range(count))


@pytest.mark.parametrize(
    ("standards", "label"),
    [
        ("POSIX.1-2001, SVr4.", 1),
        ("This call is Linux-specific.", 0),
        ("SVr4, 4.3BSD (but not POSIX).", 0),
        ("None of these interfaces is described in POSIX.1.", 0),
        (".BR one ():\nPOSIX.1-2008.\n.BR two ()\nis a nonstandard extension.", 1),
    ],
)
def test_manual_pages(standards, label, tmp_path):
    folder = tmp_path / "man" / "man2"
    folder.mkdir(parents=True)
    for name, source in (("readit.2", PAGE.format(standards)), ("other.2", PAGE.partition(".SH STANDARDS")[0])):
        with gzip.open(folder / f"{name}.gz", "wt") as file:
            file.write(source)
    (page,) = manuals.read(tmp_path)
    assert (page.path, page.label) == ("readit.2", label)
    assert page.before == 'NAME\nreadit - read "it"\nDESCRIPTION\nreadit ()\nreads it.\n'
    assert page.evidence.startswith("STANDARDS\n") and page.after == "NOTES\nA note.\n"


def test_evidence_of_manual_pages_is_beyond_the_first_input():
    sizes = {"early": (509, 3), "late": (510, 3), "last": (1500, 34), "too late": (1500, 35)}
    found = [
        manuals.Manual(name, numbered("a", before), numbered("b", evidence), numbered("c", 40), 1)
        for name, (before, evidence) in sizes.items()
    ]
    documents = long_documents.standards(found, Words())
    assert [len(each.tokens) for each in documents] == [553, 1534]


def test_spliced_documents_have_their_evidence_apart():
    tokenizer, found = Words(), []
    for directory in "abc":
        found += [Page(f"{directory}/{n}", "", numbered(f"{directory}/{n}:", 1100)) for n in range(8)]
    documents = long_documents.spliced(found, tokenizer, 80)
    words = {number: word for word, number in tokenizer.known.items()}
    for each in documents:
        names = [words[token].partition(":")[0] for token in each.tokens]
        assert len(names) == 1022 and {long_documents.half(name) for name in names} == {each.half}
        first, middle, last = ({*names[a:b]} for a, b in ((0, 256), (256, 766), (766, 1022)))
        assert len(first) == len(middle) == len(last) == 1 and not middle & (first | last)
        assert (first == last) == each.label
        assert each.label or {*first}.pop()[0] != {*last}.pop()[0]
    assert {(each.half, each.label) for each in documents} == {(a, b) for a in (0, 1) for b in (0, 1)}


@pytest.mark.parametrize("chunked", [False, True])
def test_states_of_frozen_layers_are_computed_once(chunked, monkeypatch):
    monkeypatch.setattr(long_documents, "FROZEN", 1)
    monkeypatch.setattr(long_documents, "ROOM", 20)
    encoder = stock("bert").eval()
    document = long_documents.Document(tuple(range(5, 35)), 0, 0)
    model = long_documents.Classifier(encoder, Words(), chunked)
    calls = []
    encoder.encoder.layer[0].layer.register_forward_hook(lambda *_: calls.append(1))
    first, again = (model(document, "a") for _ in range(2))
    assert torch.equal(first, again) and len(calls) == (2 if chunked else 1)
    first.sum().backward()
    trained = {name.split(".layer.")[1][0] for name, each in encoder.named_parameters() if each.grad is not None}
    assert trained == {"1"}


@pytest.mark.parametrize(("size", "sizes"), [(510, [510]), (511, [255, 256]), (1534, [383, 384, 383, 384])])
def test_chunks_are_of_equal_size(size, sizes):
    parts = long_documents.chunks(tuple(range(size)))
    assert [len(part) for part in parts] == sizes and sum(parts, ()) == tuple(range(size))


@pytest.mark.parametrize("task", distant_evidence.TASKS)
def test_clue_and_mention_are_a_distance_apart(task):
    tokenizer, random_ = Words(), random.Random(0)
    texts = [tokenizer(numbered("text", 1000))["input_ids"]]
    for distance, length in ((20, 84), (600, 976)):
        each = distant_evidence.example(task, random_, texts, distance, length, tokenizer)
        words = {number: word for word, number in tokenizer.known.items()}
        document = [words[token].rstrip(".,") for token in each.document]
        assert len(document) == length
        first, last = each.right
        (name,) = {word for word in document if word in distant_evidence.NAMES and document.count(word) == 2}
        early, late = (at for at, word in enumerate(document) if word == name)
        if task == "tokens":
            assert first == last == late and document[early + 3] == distant_evidence.TYPES[each.target]
            assert late - 4 - (early + 3) == distance + 1  # before the mention: "We come back to"
        else:
            assert first == last == late + 2 and document[first].isdigit() and document[early - 2] == "describes"
            assert each.mentions[0][0] - 3 - early == distance + 1  # before the weight: "The Lincoln weighs"
            assert len({document[at] for at, _ in each.mentions}) == distant_evidence.CANDIDATES


def test_spans_overlap():
    assert distant_evidence.spans(300, 510) == [(0, 300)]
    assert distant_evidence.spans(976, 510) == [(0, 510), (382, 892), (764, 976)]


class Scripted:
    """A reader with given logits for each token, whatever the span."""

    def __init__(self, logits):
        self.logits = logits

    def __call__(self, questions, documents):
        return [self.logits[torch.tensor(document)] for document in documents]


DOCUMENT = tuple(range(976))


@pytest.mark.parametrize("spanned", [False, True])
def test_labels_and_answers_are_read_from_all_spans(spanned):
    logits = torch.full((976, 2), -5.0)
    logits[900, 0], logits[901, 1], logits[100, 0], logits[100, 1] = 5.0, 5.0, 4.0, 4.0
    for target in (0, 1):
        each = distant_evidence.Example((1,), DOCUMENT, ((100, 100), (900, 901)), target)
        assert distant_evidence.is_right(distant_evidence.read(Scripted(logits), [each], spanned)[0], each) == (target == 1)
    labels = torch.zeros(976, 5)
    labels[:, 0], labels[800:802, 3], labels[400, 2] = 1.0, 2.0, 2.0
    for last in (801, 802):
        each = distant_evidence.Example((), DOCUMENT, ((800, last),), 2)
        parts = distant_evidence.read(Scripted(labels), [each], spanned)[0]
        assert torch.equal(distant_evidence.joined(parts), labels)
        assert distant_evidence.is_right(parts, each) == (last == 801)


def test_labels_are_those_of_the_most_central_span():
    parts = [(start, torch.full((end - start, 1), float(start))) for start, end in distant_evidence.spans(976, 510)]
    logits = distant_evidence.joined(parts)[:, 0]
    assert [int((logits == start).sum()) for start, _ in parts] == [446, 382, 148]


def test_the_loss_of_an_answer_counts_it_in_each_span():
    logits = torch.zeros(976, 2)
    logits[850] = 3.0
    each = distant_evidence.Example((1,), DOCUMENT, ((850, 850),), 0)
    whole, spans = (distant_evidence.read(Scripted(logits), [each], spanned)[0] for spanned in (False, True))
    copies = sum(start <= 850 < start + len(own) for start, own in spans)
    assert copies == 2 and len(whole) == 1
    for parts, count in ((whole, 1), (spans, 2)):
        others = sum(len(own) for _, own in parts) - count
        share = count * math.exp(3) / (count * math.exp(3) + others)
        assert distant_evidence.loss_of(parts, each).item() == pytest.approx(-math.log(share), abs=1e-4)


def test_table_of_distant_evidence():
    rows = [
        {
            "task": "tokens",
            "seed": 0,
            "documents": documents,
            "trained": trained,
            "method": method,
            "right": right,
            "seconds": 0.1,
        }
        for documents in distant_evidence.DISTANCES
        for trained in distant_evidence.TRAINED
        for method, right in zip(distant_evidence.METHODS, ([0, 1], [0, 1], [1, 1], [1, 0]), strict=True)
    ]
    runs = [{"task": "tokens", "seed": 0, "losses": {"short documents": [1.0]}, "rows": rows}]
    found = distant_evidence.summary(runs)
    assert [(row["accuracy"], row["difference"]) for row in found[:4]] == [(0.5, 0), (0.5, 0), (1.0, 0.5), (0.5, 0)]
    assert "tokens, far, trained on long documents, too (n = 2)" in distant_evidence.table(found, runs)
