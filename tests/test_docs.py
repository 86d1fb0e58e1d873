"""The documentation: its Python code runs, its commands parse, and its links have targets."""

import functools
import json
import re
import shlex
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from typer.main import get_command

import hf_posenc
from conftest import ROOT, run_python
from hf_posenc import compare
from hf_posenc.cli import app
from hub_server import TOKEN, serve
from models import stock
from page_worker import blocks
from tools.hosts import tiny

PAGES = {name: ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "scripts/README.md")}
PAGES |= {path.relative_to(ROOT / "docs").as_posix(): path for path in sorted((ROOT / "docs").rglob("*.md"))}
NOTEBOOKS = {path.name: path for path in sorted((ROOT / "docs").glob("*.ipynb"))}
NOUNS = [
    f"{colour} {animal}"
    for colour in ("red", "grey", "white")
    for animal in ("dog", "cat", "fox", "cow", "ox", "hen", "bee", "ram")
]
SLOW = (
    "guides/analyze.md",
    "guides/convert.md",
    "guides/integrations.md",
    "guides/longer_inputs.md",
    "quickstart.ipynb",
    "tutorials/long_documents.md",
)
"""Pages that take longer than a few seconds."""
NOT_RUN = 0
"""The number of Python blocks that a comment excludes. A new one fails the test."""
RUN = "import sys, page_worker; page_worker.main(*sys.argv[1:])"


def runnable(page):
    return [block for block in blocks(page) if block.language == "python" and not block.not_run]


TO_RUN = [
    pytest.param(path, id=name, marks=pytest.mark.slow if name in SLOW else ())
    for name, path in (PAGES | NOTEBOOKS).items()
    if runnable(path)
]


def made(place, name, minilm):
    """Makes what a page loads under this name: a model of the Hub, or a file of the reader. Models are tiny and random, except
    MiniLM.
    """
    there = THINGS[name]
    place.parent.mkdir(parents=True, exist_ok=True)
    if name in ("bert-base-uncased", "classifier"):
        AutoTokenizer.from_pretrained(minilm, model_max_length=512).save_pretrained(place)
    if isinstance(there, bytes):
        place.write_bytes(there)
    elif isinstance(there, Path):
        place.symlink_to(there if there.parts else minilm)
    else:
        there().save_pretrained(place)


TEXTS = [" ".join(f"The {noun} bit the man, and then it ran {number} miles." for number in range(16)) for noun in NOUNS]
RESULT = b'{"model": "alibi", "this": true, "task": "fill-mask", "dataset": {"name": "pages"}, "metric": "loss", "value": 2.0}'
STUDY = {"model": "bert", "task": "classification", "encoding": "rope", "length": 16, "multiple": 1.0, "metric": "accuracy"}
LABELS = {0: "praise", 1: "refund"}
LABELED = [{"text": text, "label": LABELS[number % 2]} for number, text in enumerate(TEXTS[:4])]
BERT = dict(vocab_size=30522, max_position_embeddings=512, num_hidden_layers=12)
MINILM = Path()
THINGS = {
    "all-MiniLM-L6-v2": MINILM,
    "bert-alibi/evaluation.json": b'{"results": [' + RESULT + b"]}",
    "bert-alibi/length.png": b"\x89PNG of lengths",
    "bert-base-uncased": lambda: stock("bert", "ForMaskedLM", **BERT),
    "classifier": lambda: hf_posenc.extend(
        stock("bert", "ForSequenceClassification", id2label=LABELS, **BERT), 2048, "dynamic"
    ),
    "facebook/bart-base": lambda: tiny.build("bart"),
    "first/compare.json": json.dumps(
        {"rows": [STUDY | {"seed": seed, "value": seed / 2} for seed in (0, 1)], "table": [STUDY | {"mean": 0.25}]}
    ).encode(),
    "google-t5/t5-small": lambda: tiny.build("t5"),
    "google/vit-base-patch16-224": lambda: tiny.build("vit"),
    "llava-hf/llava-1.5-7b-hf": lambda: tiny.build("llava"),
    "meta-llama/Llama-3.2-1B": lambda: stock("llama", vocab_size=30522),
    "my.txt": "\n".join(TEXTS).encode(),
    "old-checkpoint": ROOT / "tests" / "v4" / "bert",
    "sentence-transformers/all-MiniLM-L6-v2": MINILM,
    "validation.jsonl": "\n".join(map(json.dumps, LABELED)).encode(),
}
"""Models and files that pages load without making them: models of the Hub by name, and a reader's files. Models are tiny and
random, except MiniLM.
"""


@pytest.mark.parametrize("page", TO_RUN)
def test_the_page_runs(page, minilm, tmp_path):
    code = "".join(block.text for block in runnable(page))
    for name in THINGS:
        if f'"{name}"' in code:
            made(tmp_path / name, name, minilm)
    if '"scripts/' in code:
        (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    if "push_to_hub(" not in code:
        printed = run_python(RUN, page, tmp_path)
        assert all(block.text.strip() in printed for block in blocks(page) if block.language == "text"), printed
        return
    with serve() as hub:  # the Hub's client reads its settings at import
        settings = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        run_python(RUN, page, tmp_path, fresh=True, HF_HUB_DISABLE_XET="1", **settings)


def test_blocks_that_are_not_run_are_counted():
    left_out = [(name, block.line) for name, path in PAGES.items() for block in blocks(path) if block.not_run]
    assert len(left_out) == NOT_RUN, left_out


def commands(page, program):
    """(words, whether some are omitted) for each command in a page that calls a program. "…" stands for omitted words."""
    for block in blocks(page):
        for line in block.text.replace("\\\n", " ").splitlines() if block.language == "" else ():
            words = shlex.split(line, comments=True) if line.startswith(program) else ()
            if words:
                yield [word for word in words if word != "…"], "…" in words


def test_commands_parse(tmp_path, monkeypatch):
    """Subcommands, arguments, and options exist, and values have the right types."""
    monkeypatch.chdir(tmp_path)
    group = get_command(app)
    group.callback = None
    figures = group.commands["plot"]
    figures._make_commands()
    monkeypatch.setattr(figures, "_make_commands", lambda: None)  # it would restore their callbacks
    commands_of = [*group.commands.values()]
    for command in commands_of:
        command.callback = lambda **given: None
        commands_of += getattr(command, "commands", {}).values()
    found = [(page, words) for page in PAGES.values() for words, _ in commands(page, "hf-posenc")]
    for page, words in found:
        for word in words[2:]:  # directories that must exist
            if not word.startswith("-") and not Path(word).suffix:
                Path(word).mkdir(parents=True, exist_ok=True)
        try:
            group.main(words[1:], "hf-posenc", standalone_mode=False)
            if words[1] == "compare":  # its flags are those of another parser
                compare.parser_of().parse_args(words[2:])
        except (Exception, SystemExit) as error:
            pytest.fail(f"{page}: {words}: {error!r}")
    assert len(found) > 12


PARSE = """
import argparse, json, runpy, sys

class Parsed(BaseException):
    pass

def parse_args(self, args=None, namespace=None):
    for action in self._actions if cut else ():
        action.required = False
    parse(self, args, namespace)
    raise Parsed

def error(self, message):
    raise ValueError(message)

parse, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, parse_args
argparse.ArgumentParser.error = error
for words, cut in json.load(open(sys.argv[1])):
    sys.argv = words
    try:
        (runpy.run_path if words[0].endswith(".py") else runpy.run_module)(words[0], run_name="__main__")
    except Parsed:
        print("parsed")
    except Exception as wrong:
        print("wrong:", words, repr(wrong))
"""
"""Runs each script or module until it has parsed its arguments."""
OURS = re.compile(r"(scripts|tests|tools)/\w+\.py|(benchmarks|experiments|hf_posenc|tools)(\.\w+)+")


def script_of(words):
    """The words of a command, starting at the script or module, if it runs one of this repository."""
    start = next((place for place, word in enumerate(words) if OURS.fullmatch(word)), None)
    return words[start:] if start is not None else []


def test_scripts_parse(tmp_path, monkeypatch):
    """The scripts exist and accept these arguments."""
    monkeypatch.chdir(ROOT)
    found = [each for page in PAGES.values() for program in ("python", "accelerate") for each in commands(page, program)]
    asked = [(script_of(words), cut) for words, cut in found if script_of(words)]
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    said = run_python(PARSE, tmp_path / "asked.json")
    assert len(asked) > 8 and said.count("parsed") == len(asked) and "wrong:" not in said, said


def test_targets_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    called = {words[1] for page in PAGES.values() for words, _ in commands(page, "make")}
    assert "test" in called <= {*targets}


LINK = re.compile(r"\]\(([^()\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)


@functools.cache
def anchors(path):
    """The anchors that GitHub generates for the headings of a page."""
    slugs = []
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE), re.M):
        words = re.sub(r"\]\([^)]*\)", "", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        slugs.append(f"{slug}-{slugs.count(slug)}" if slug in slugs else slug)
    return set(slugs)


@pytest.mark.parametrize("page", [pytest.param(path, id=name) for name, path in (PAGES | NOTEBOOKS).items()])
def test_links_lead_somewhere(page):
    lost = []
    for match in LINK.finditer(CODE.sub("", page.read_text(encoding="utf-8"))):
        target, _, anchor = (match[1] or match[2]).partition("#")
        there = page.parent / target if target else page
        if "://" not in target and not (there.exists() and (not anchor or anchor in anchors(there))):
            lost.append(match[0])
    assert not lost
