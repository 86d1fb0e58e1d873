"""The prose of pages and messages: words per page, terms, cells, sentences, and a snapshot of every error message."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LIMITS = {
    "README.md": 715,
    "CONTRIBUTING.md": 830,
    "CHANGELOG.md": 400,
    "scripts/README.md": 500,
    "docs/tutorials/long_documents.md": 550,
    "docs/guides/choose.md": 350,
    "docs/guides/patch.md": 550,
    "docs/guides/longer_inputs.md": 650,
    "docs/guides/convert.md": 550,
    "docs/guides/train.md": 850,
    "docs/guides/classify_long_documents.md": 650,
    "docs/guides/share.md": 700,
    "docs/guides/export.md": 490,
    "docs/guides/integrations.md": 1000,
    "docs/guides/custom_encoding.md": 860,
    "docs/guides/custom_model.md": 1100,
    "docs/guides/other_models.md": 350,
    "docs/guides/v4.md": 450,
    "docs/guides/analyze.md": 750,
    "docs/guides/compare.md": 800,
    "docs/reference/encodings.md": 450,
    "docs/reference/models.md": 200,
    "docs/reference/model_notes.md": 1100,
    "docs/reference/extend_methods.md": 740,
    "docs/reference/cli.md": 60,
    "docs/reference/position_context.md": 460,
    "docs/reference/api.md": 130,
    "docs/reference/hub.md": 750,
    "docs/reference/versions.md": 290,
    "docs/background/how_it_works.md": 700,
    "docs/background/precision.md": 460,
    "docs/results/index.md": 400,
    "docs/results/long_inputs.md": 1100,
    "docs/results/extrapolation.md": 370,
    "docs/results/drope.md": 300,
    "docs/results/speed.md": 150,
    "docs/contributing/architectures.md": 450,
}
"""Maximum number of words (`wc -w`) of each page, without tables that commands write."""
TOTAL = 18_700
BANNED = (
    *(
        "hosts?",
        "verbs?",
        "refus(e|es|ed|al|als)",
        "folders?",
        "anew",
        "afresh",
        "oracles?",
        "whoever",
        "promises?",
        "bit-equal",
    ),
    *("bit by bit", "just patched", "by hand", "in small", "of (your|a user's|its) own", "stands? beside", "lies? behind"),
    *(
        "(is|are) told",
        "goes on by itself",
        "without an end",
        "made of several",
        "written[- ]out",
        "usable length",
        "longest input",
    ),
    *(
        "token states",
        "facts at each depth",
        "trained short, tested long",
        "tell apart",
        "behind (token )?512",
        "whole answers",
    ),
    *(
        "HostRefused",
        "keep_host",
        "neighbour\\w*",
        "colours?",
        "behaviour\\w*",
        "optimis\\w*",
        "generalis\\w*",
        "initialis\\w*",
    ),
)
"""Terms of the glossary that have a standard equivalent, and British spellings."""
BANNED_TERM = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)|https?://\S+", re.DOTALL | re.MULTILINE)
GENERATED = re.compile(r"<!-- [^>]*(?:begin|--markdown) -->.*?<!-- [^>]*end -->", re.DOTALL)
ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`\[*]|\Z)|\n\n|\n[-*] |\n#+ .*\n")


def pages():
    return [*LIMITS]


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def words(page):
    return len(GENERATED.sub("", read(page)).split())


def test_every_page_has_a_limit():
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert there == {page for page in LIMITS if page.startswith("docs/")}


def test_words_of_pages():
    counts = {page: words(page) for page in LIMITS}
    print(f"{len(counts)} pages, {sum(counts.values()):,} words of at most {TOTAL:,}")
    assert not {page: f"{count} of {LIMITS[page]}" for page, count in counts.items() if count > LIMITS[page]}
    assert sum(counts.values()) <= TOTAL


@pytest.mark.parametrize("page", pages())
def test_terms_and_sentences(page):
    assert not [match[0] for match in BANNED_TERM.finditer(CODE.sub(" ", read(page)))], "use the standard term"
    plain = CODE.sub(" ", ROW.sub("", GENERATED.sub("", read(page))))
    long = [sentence for sentence in SENTENCE.split(plain) if sentence and len(sentence.split()) > 40]
    assert not long, "sentences of more than 40 words"


@pytest.mark.parametrize("page", pages())
def test_cells_of_tables(page):
    rows = ROW.findall(re.sub(r"^```.*?^```", "", GENERATED.sub("", read(page)), flags=re.DOTALL | re.MULTILINE))
    cells = [cell for row in rows for cell in re.sub(r"\]\([^)]*\)", "]", row).strip("|").split("|")]
    assert not [cell for cell in cells if len(cell.split()) > 12]


SNAPSHOT = ROOT / "tests" / "messages.txt"
RAISED = re.compile(r"(Error|Exit|Refused|Warning|Exception)$")


def message(node):
    """The text of an expression; what is formatted in is {…}."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}" for part in node.values)
        return "".join(parts)
    return f"{{{ast.unparse(node)}}}"


def messages():
    """Every error and warning that the package raises with a message: file, class, and text."""
    for path in sorted((ROOT / "hf_posenc").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args:
                name = ast.unparse(node.func)
                if RAISED.search(name) or name in ("warnings.warn", "warn", "logger.warning", "logger.warning_once"):
                    texts = [message(each) for each in node.args if isinstance(each, ast.Constant | ast.JoinedStr)]
                    if any(len(text.split()) > 2 for text in texts):
                        yield path.relative_to(ROOT / "hf_posenc").as_posix(), name, " | ".join(texts)


def snapshot():
    lines, last = [], ""
    for path, name, text in messages():
        lines += ["", path] if path != last else []
        lines.append(f"  {name}: {text}".replace("\n", "\\n"))
        last = path
    return "\n".join(lines).lstrip("\n") + "\n"


def test_messages():
    """All messages in one file, so that rewording is one reviewed diff: python tests/test_prose.py writes it."""
    found = snapshot()
    print(f"{sum(line.startswith('  ') for line in found.splitlines())} messages")
    assert found == SNAPSHOT.read_text(encoding="utf-8")


def test_terms_in_messages():
    wrong = {}
    for _, _, text in messages():
        said = re.sub(r"\{[^}]*\}|'[^']*'|`[^`]*`", " ", text)
        if match := BANNED_TERM.search(said):
            wrong[text] = match[0]
    assert not wrong, "use the standard term"


COMMENT = re.compile(r"(?:^|\s)# (.*)$", re.MULTILINE)
SOURCES = ("hf_posenc", "benchmarks", "experiments", "scripts", "tools", "tests")


@pytest.mark.parametrize("folder", SOURCES)
def test_terms_in_docstrings_and_comments(folder):
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        statements = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
        texts = [node.value for node in statements if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        for text in (*texts, *COMMENT.findall(source)):
            if match := BANNED_TERM.search(re.sub(r"`[^`]*`", " ", text)):
                wrong.append(f"{path.relative_to(ROOT)}: {match[0]}")
    assert not wrong, "use the standard term"


PROSE = 5
"""Words in a row that a test may match of a message."""


def test_tests_assert_values_not_prose():
    """A pattern of pytest.raises or pytest.warns names a value, an argument, or a class, in few words."""
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "match" and isinstance(node.value, ast.Constant | ast.JoinedStr):
                runs = re.split(r"[^A-Za-z' ]|\.\*|\{[^}]*\}", message(node.value))
                if any(len(run.split()) > PROSE for run in runs):
                    wrong.append(f"{path.name}:{node.value.lineno}: {message(node.value)}")
    assert not wrong


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot(), encoding="utf-8")
