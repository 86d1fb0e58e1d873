"""Directories of documentation: reading pages, near-duplicates, and the split into evaluation and training."""

import json
import random
import sys

import pytest

from experiments.data import pages
from hf_posenc.training import data

RST = """.. SPDX-License-Identifier: GPL-2.0
.. _label:

=======================
Kernel Samepage Merging
=======================

:Author: Someone

KSM is a *memory-saving* de-duplication feature of ``mm/ksm.c``.  See
:ref:`Documentation/admin-guide/mm/ksm.rst <admin_guide_ksm>` and :c:func:`ksm_do_scan`.

.. kernel-doc:: mm/ksm.c
   :DOC: Overview

Design
------

.. note::

   A note that stays.

.. toctree::
   one
   two

======  =====
Option  Use
======  =====

Code::

    x = 1
"""
HTML = """<html><head><title>5.1. Table Basics</title><style>p {}</style></head><body>
<div class="navheader"><table><tr><th>Chapter 5</th></tr></table></div>
<h1 class="title">5.1.&nbsp;Table Basics and More<a class="headerlink">&para;</a></h1>
<p>A table &amp; its
rows.<br/>A new line.<ul><li>One<li>Two</ul>
<pre>SELECT *
FROM t;</pre><script>var x;</script><img src="x"><p>The end.</p></body></html>"""


def squeezed(text):
    return " ".join(text.split())


def test_what_is_read_of_a_file():
    title, text = pages.parsed(RST, ".txt")
    assert title == "Kernel Samepage Merging"
    assert squeezed(text) == (
        "Kernel Samepage Merging KSM is a memory-saving de-duplication feature of mm/ksm.c. See "
        "Documentation/admin-guide/mm/ksm.rst and ksm_do_scan. Design A note that stays. Option Use Code: x = 1"
    )
    title, text = pages.parsed(HTML, ".html")
    paragraphs = ["5.1. Table Basics and More", "A table & its rows. A new line.", "One", "Two", "SELECT * FROM t;", "The end."]
    assert title == "Table Basics and More" and [squeezed(part) for part in text.split("\n\n")] == paragraphs
    assert "SELECT *\nFROM t;" in text
    assert pages.parsed("<head><title>Only  this</title></head><p>Text</p>", ".htm") == ("Only this", "Text")
    text = "---\nlayout: x\n---\n# The [title](a.md) here\n\nSome `code` and\n**bold**.\n\n```python\nx\n```\n\n## Next\n\nEnd."
    title, text = pages.parsed(text, ".md")
    assert (title, squeezed(text)) == ("The title here", "The title here Some code and bold. x Next End.")


def test_questions_are_taken_out():
    for title, text, question, document in (
        ("A title of five words", "A Title of Five Words\n\nText. More.", "A title of five words", "Text. More."),
        ("SELECT", "SELECT — retrieve rows from tables\n\nMore.", "SELECT — retrieve rows from tables", "More."),
        ("Short", "Author: me.\n\nShort\n\nThe first one says. More.", "Short: The first one says.", "Author: me.\n\nMore."),
    ):
        page = pages.asked("a.txt", title, text)
        assert page.title == question and squeezed(page.document) == squeezed(document)
    for title, text in (("", "Text of a page."), ("Title", "Title"), ("Title", "No long one. Here.")):
        assert pages.asked("a.txt", title, text) is None


def prose(seed, sentences=40):
    choose = random.Random(seed)
    return [" ".join(f"word{choose.randrange(3000)}" for _ in range(10)).capitalize() + "." for _ in range(sentences)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """40 pages, 6 near-duplicates of some, a sentence common to all, a translation, and a picture."""
    path = tmp_path_factory.mktemp("docs")
    (path / "deep" / "translations").mkdir(parents=True)

    def write(name, title, sentences):
        (path / name).write_text(f"{title}\n{'=' * len(title)}\n\n" + "\n\n".join(sentences), encoding="utf-8")

    shared = "This page is part of the documentation of everything there is."
    for number in range(40):
        write(f"deep/{number:02}.rst", f"All about the number {number}", [*prose(number), shared])
    for number in range(6):
        write(f"deep/{number:02}-copy.rst", f"Still about the number {number}", [*prose(number)[:30], *prose(100 + number, 5)])
        write(f"deep/{number:02}-other.rst", f"Nothing about the number {number}", [*prose(number)[:10], *prose(200 + number)])
    write("deep/translations/00.rst", "Translated", prose(300))
    write("short.txt", "A page that is short", prose(400)[:5])
    (path / "picture.png").write_bytes(b"\x89PNG")
    return path


def test_near_copies_are_left_out(folder):
    by_path = {page.path: set(squeezed(page.document).split(". ")) for page in pages.read(folder)}
    kept = {page.path for page in pages.without_near_copies(pages.read(folder))}
    assert len(by_path) == 52 and len(kept) == 46
    for name in by_path.keys() - kept:
        (other,) = [path for path in kept if len(by_path[path] & by_path[name]) > 0.5 * len(by_path[name])]
        assert other[:7] == name[:7]  # deep/00
    assert {f"deep/{number:02}-other.rst" for number in range(6)} <= kept


def test_the_split_is_disjoint(folder):
    evaluation, training = pages.split(folder)
    assert len(evaluation) + len(training) == 46 and min(len(evaluation), len(training)) >= 10
    asked = {sentence for page in evaluation for sentence in squeezed(page.document).split(". ")}
    trained = {sentence for text in training for sentence in squeezed(text).split(". ")}
    assert not asked & trained and len(asked) > 400 and len(trained) > 400
    assert not any("This page is part of" in text for text in training)
    again, _ = pages.split(folder)
    assert again == evaluation
    every, none = pages.split(folder, share=1)
    assert len(every) == 46 and none == []
    # The split depends only on the path, so that a new page doesn't move others.
    (folder / "new.rst").write_text(f"A new page of some\n------------------\n\n{' '.join(prose(500))}")
    try:
        assert {page.path for page in pages.split(folder)[0]} - {"new.rst"} == {page.path for page in evaluation}
    finally:
        (folder / "new.rst").unlink()


def test_sources_win_over_html(tmp_path):
    with pytest.raises(SystemExit, match="has no page of 150 words and a title among 0 files: give a folder"):
        pages.split(tmp_path)
    (tmp_path / "html" / "_sources").mkdir(parents=True)
    (tmp_path / "html" / "a.html").write_text(f"<h1>A title of five words</h1><p>{' '.join(prose(0))}</p>")
    assert [page.path for page in pages.read(tmp_path)] == ["html/a.html"]
    (tmp_path / "html" / "_sources" / "a.rst.txt").write_text(f"A title of five words\n=====\n\n{' '.join(prose(0))}")
    assert [page.path for page in pages.read(tmp_path)] == ["html/_sources/a.rst.txt"]
    assert pages.name_of(tmp_path / "html" / "_sources") == tmp_path.name


def test_the_training_file_is_read_by_the_training_scripts(folder, tmp_path, monkeypatch):
    file = tmp_path / "train.jsonl"
    monkeypatch.setattr(sys, "argv", ["pages", str(folder), "--train_file", str(file)])
    pages.main()
    _, training = pages.split(folder)
    assert data.read(file)["text"] == training == [json.loads(line)["text"] for line in file.read_text().splitlines()]
