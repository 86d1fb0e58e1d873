"""A corpus from the documentation of Python's standard library, which every installation has.

In evaluation, a module's one-line summary (the query) should retrieve its documentation. Training texts come from all other
modules, and from the topics of `help()`. The sources are parsed, not imported.
"""

import ast
import functools
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_posenc.progress import ProgressBar

LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "idlelib", "turtledemo", "ensurepip", "lib-dynload"}
EVALUATION_MODULES = 256
MIN_WORDS = 150
MIN_QUERY_WORDS = 4
TOPICS = "pydoc_data.topics"
NEAR_COPY = 0.6
"""A sentence is a copy of the query if it has this share of the query's words, or the query has this share of its words."""


@dataclass(frozen=True)
class Module:
    """A module's dotted name, its one-line summary, and its documentation without copies of the summary."""

    name: str
    summary: str
    document: str


def modules(progress: bool = True) -> list[Module]:
    """All documented modules of the standard library, sorted by path. Some summaries are empty."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(root.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(root).parts)]
    found = (
        _read(path, root)
        for path in ProgressBar(paths, desc="reading the standard library", unit="file", leave=False, disable=not progress)
    )
    return [module for module in found if module is not None]


@functools.cache
def split(progress: bool = True) -> tuple[list[Module], list[str]]:
    """Evaluation modules and training texts, from different modules.

    No training text contains a sentence of eight or more words of an evaluation document or query.
    """
    candidates = modules(progress)
    summaries: dict[str, int] = {}
    for module in candidates:
        summaries[_plain(module.summary)] = summaries.get(_plain(module.summary), 0) + 1
    long = [
        module
        for module in candidates
        if not module.name.startswith("test")
        and len(module.document.split()) >= MIN_WORDS
        and len(_words(module.summary)) >= MIN_QUERY_WORDS
        and module.name != TOPICS
        and summaries[_plain(module.summary)] == 1
    ]
    # Evaluation modules are spread evenly over the alphabet.
    step = max(1.0, len(long) / EVALUATION_MODULES)
    evaluation = [long[int(i * step)] for i in range(min(EVALUATION_MODULES, len(long)))]
    names = {module.name for module in evaluation}
    seen = {key for module in evaluation for key in _sentence_keys(f"{module.summary}. {module.document}")}
    training = []
    for module in candidates:
        if module.name not in names:
            kept = [s for s in _sentences(f"{module.summary}. {module.document}") if not _sentence_keys(s) & seen]
            training += _passages(kept)
    return evaluation, training


def joined(passages: list[str]) -> list[str]:
    """Join passages into longer training texts: eight passages have about 2,400 tokens."""
    return ["\n\n".join(passages[i : i + 8]) for i in range(0, len(passages), 8)]


def without_leaks(document: str, name: str, summary: str) -> str:
    """The document without copies and near copies of the query, and without lines that name the module."""
    query = set(_words(summary))
    last = re.escape(name.rpartition(".")[2])
    named = re.compile(rf"(?<![\w]){re.escape(name)}(?![\w])|\bmodule\s+{last}\b", re.IGNORECASE)
    lines = [line for line in document.splitlines() if not named.search(line)]
    kept = []
    for sentence in _sentences("\n".join(lines)):
        words = set(_words(sentence))
        shared = len(words & query)
        if not query or not words or shared / len(query) < NEAR_COPY and (len(words) < 4 or shared / len(words) < NEAR_COPY):
            kept.append(sentence)
    return "\n\n".join(kept)


def _read(path: Path, root: Path) -> Module | None:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):  # Some test files are invalid on purpose.
        return None
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    docstring = ast.get_docstring(tree) or ""
    if name == TOPICS:
        strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        return Module(name, "", "\n\n".join(strings))
    summary, _, rest = docstring.strip().partition("\n")
    # In "name -- summary" and "name: summary", the name is removed.
    last = re.escape(name.rpartition(".")[2])
    summary = re.sub(
        rf"^\s*(the\s+)?({re.escape(name)}|{last})(\.py)?\s*(--?|:|–)\s*", "", summary, flags=re.IGNORECASE
    ).strip()
    texts = [rest, *_docstrings(tree)]
    if not any(texts):
        return None
    return Module(name, summary.rstrip("."), without_leaks("\n".join(texts), name, summary))


def _docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (text := ast.get_docstring(node)):
            yield f"{node.name.replace('_', ' ').strip()}: {text}"


def _sentences(text: str) -> list[str]:
    pieces = re.split(r"(?<=[.!?:])\s+|\n\s*\n", text)
    return [joined for piece in pieces if (joined := " ".join(piece.split()))]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _plain(text: str) -> str:
    return " ".join(_words(text))


def _sentence_keys(text: str) -> set[str]:
    return {_plain(sentence) for sentence in _sentences(text) if len(_words(sentence)) >= 8}


def _passages(sentences: list[str], words: int = 200) -> list[str]:
    """Join sentences, in order, into passages of about `words` words."""
    passages, current, count = [], [], 0
    for sentence in sentences:
        current.append(sentence)
        count += len(sentence.split())
        if count >= words:
            passages.append("\n\n".join(current))
            current, count = [], 0
    if count >= words // 4:
        passages.append("\n\n".join(current))
    return passages
