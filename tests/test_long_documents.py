"""Experiments on documents beyond 512 tokens: manual pages, spliced documents, chunks and spans, distant evidence."""

import gzip
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
        document = [words[token] for token in each.document]
        assert len(document) == length
        (color,) = [
            word for word in document if word in distant_evidence.COLORS or word.rstrip(".") in distant_evidence.COLORS
        ][:1]
        assert color.rstrip(".") == distant_evidence.COLORS[each.target] or task == "questions"
        clue = max(document.index(word) for word in ("object.", "selected") if word in document)
        first, last = each.mentions[0]
        if task == "tokens":
            assert first == last and document[first] in distant_evidence.NAMES and first - clue == distance + 2
        else:
            right = each.mentions[each.target][0]
            assert document[clue + 3] == f"{document[right - 3]}." and document[right].isdigit()


def test_spans_overlap():
    assert distant_evidence.spans(300, 510) == [(0, 300)]
    assert distant_evidence.spans(976, 510) == [(0, 510), (382, 892), (764, 976)]


class Scripted:
    """A reader with given logits for each token, whatever the span."""

    def __init__(self, logits):
        self.logits = logits

    def __call__(self, questions, documents):
        return [self.logits[torch.tensor(document)] for document in documents]


@pytest.mark.parametrize("spanned", [False, True])
def test_answers_are_read_from_all_spans(spanned):
    document = tuple(range(976))
    start = torch.full((976, 2), -5.0)
    start[900, 0], start[901, 1], start[100, 0], start[100, 1] = 5.0, 5.0, 4.0, 4.0
    each = distant_evidence.Example((1,), document, ((100, 100), (900, 901)), 1)
    assert distant_evidence.read("questions", Scripted(start), each, spanned) == (True, 2, 0)
    labels = torch.zeros(976, 5)
    labels[:, 0], labels[800:802, 3], labels[400, 2] = 1.0, 2.0, 2.0
    each = distant_evidence.Example((), document, ((800, 802),), 2)
    assert distant_evidence.read("tokens", Scripted(labels), each, spanned) == (False, 2, 2)
