"""Read a directory of documentation as texts for evaluation and training: .rst, .txt, .md, and .html pages.

    python -m experiments.data.pages DIR                             # amount of text, with samples
    python -m experiments.data.pages DIR --train_file train.jsonl    # the training pages, for distill.py --train_file

Debian packages contain such directories. `apt-get download PACKAGE` and `dpkg-deb -x FILE DIRECTORY` unpack them without
installation: linux-doc-6.1 (usr/share/doc/linux-doc-6.1/html/_sources), postgresql-doc-15
(usr/share/doc/postgresql-doc-15/html), and anarchism (usr/share/doc/anarchism/html), which isn't about software.

Near-duplicate pages are removed first. The hash of a page's path determines whether it is for evaluation or training.
"""

import argparse
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from hf_posenc.evaluation import terminals
from hf_posenc.evaluation.cloze_queries import plain, sentence_spans
from hf_posenc.progress import ProgressBar
from hf_posenc.serialization.atomic import write_text

KINDS = (".rst", ".txt", ".md", ".html", ".htm")
SOURCES = "_sources"
"""Sphinx's directory with the sources of its HTML pages. If it exists, the HTML pages are excluded."""
LEFT_OUT = ("translations",)
EVALUATION_SHARE = 0.5
MIN_WORDS = 150
MIN_QUERY_WORDS = 4
SHINGLE = 8
"""Words in a shingle."""
NEAR_COPY = 0.5
"""Two pages are near-duplicates if they share at least this fraction of the shingles of the smaller one."""
ADMONITIONS = "note|warning|tip|important|caution|attention|hint|danger|seealso|topic|rubric"
CODE = "code-block|code|parsed-literal|literalinclude|highlight|table|csv-table|list-table|math"
SKIPPED = {"script", "style", "nav", "head", "header", "footer"}
SKIPPED_CLASSES = {"navheader", "navfooter", "toc", "sphinxsidebar", "related", "footer", "headerlink"}
BLOCKS = {"p", "div", "li", "dt", "dd", "pre", "tr", "table", "section", "blockquote", "ul", "ol", "dl", "br", "hr"}
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
ABOUT = r"\W*(authors?|copyright|c|date|release date|version|original|written by|maintainers?|contact|email|updated)\b"
"""Matches the start of sentences that say nothing about a page's subject."""
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


@dataclass(frozen=True)
class Page:
    """A page's path in its directory, its query (the title), and its text without the query."""

    path: str
    title: str
    document: str


def name_of(folder: Path) -> str:
    """The name for the texts of a directory: the nearest directory name other than html and _sources."""
    return next((part for part in reversed(folder.resolve().parts) if part not in (SOURCES, "html")), folder.name)


def split(folder: Path, left_out: Collection[str] = LEFT_OUT, share: float = EVALUATION_SHARE) -> tuple[list[Page], list[str]]:
    """(evaluation pages, training texts), disjoint by page and by sentence.

    No training text has a sentence of eight words or more that occurs in an evaluation page. Evaluation pages are about `share`
    of all pages, and have distinct titles.
    """
    pages = without_near_copies(read(folder, left_out))
    titles = Counter(plain(page.title) for page in pages)
    evaluation = [page for page in pages if for_evaluation(page.path, share) and titles[plain(page.title)] == 1]
    seen = {key for page in evaluation for key in _keys(f"{page.title}\n\n{page.document}")}
    training = []
    for page in pages:
        if not for_evaluation(page.path, share):
            paragraphs = [page.title, *re.split(r"\n\s*\n", page.document)]
            training.append("\n\n".join(text for text in paragraphs if not _keys(text) & seen))
    return evaluation, [text for text in training if len(text.split()) >= MIN_WORDS]


def for_evaluation(path: str, share: float = EVALUATION_SHARE) -> bool:
    """Whether a page is for evaluation. This depends only on its path."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") < share * 2**64


def read(folder: Path, left_out: Collection[str] = LEFT_OUT) -> list[Page]:
    """The pages of a directory with a title and at least MIN_WORDS words, sorted by path.

    Raises SystemExit if there are none.
    """
    found = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in KINDS and path.is_file()]
    found = [path for path in found if not {*left_out} & {*path.relative_to(folder).parts}]
    sources = [path for path in found if SOURCES in path.parts]
    pages = []
    for path in ProgressBar(sources or found, desc="reading pages", unit="page", leave=False):
        text = path.read_text(encoding="utf-8", errors="replace")
        title, text = parsed(text, path.suffix.lower())
        page = asked(str(path.relative_to(folder)), title, text)
        if page is not None and len(page.document.split()) >= MIN_WORDS:
            pages.append(page)
    if not pages:
        raise SystemExit(
            f"{folder} has no page of {MIN_WORDS} words and a title among {len(found)} files: "
            f"give a folder with files {', '.join(KINDS)}"
        )
    return pages


def parsed(text: str, suffix: str) -> tuple[str, str]:
    """The title of a page ("" if it has none), and its text without markup."""
    if suffix in (".html", ".htm"):
        return from_html(text)
    return from_markdown(text) if suffix == ".md" else from_rst(text)


def asked(path: str, title: str, text: str) -> Page | None:
    """A page with its query: the title, or a sentence with the title if the title is shorter than MIN_QUERY_WORDS."""
    known = plain(title)
    paragraphs = [part.strip("\n") for part in re.split(r"\n\s*\n", text)]
    document = "\n\n".join(part for part in paragraphs if part.strip() and plain(_title(part)) != known)
    if not known or not document:
        return None
    if len(known.split()) < MIN_QUERY_WORDS:
        for start, end in sentence_spans(document):
            sentence = " ".join(document[start:end].split())
            if len(plain(sentence).split()) >= MIN_QUERY_WORDS and not re.match(ABOUT, sentence, flags=re.IGNORECASE):
                question = sentence if known in plain(sentence) else f"{title}: {sentence}"
                return Page(path, question, (document[:start] + document[end:]).strip())
        return None
    return Page(path, title, document)


def from_rst(text: str) -> tuple[str, str]:
    """The title and the text of reStructuredText, or of plain text with underlined headings."""
    lines = text.expandtabs().splitlines()
    heading = next((i for i in range(1, len(lines)) if _adorns(lines[i], lines[i - 1])), None)
    title = lines[heading - 1].strip() if heading else next((line.strip() for line in lines if line.strip()), "")
    kept: list[str] = []
    hidden: int | None = None  # the indentation of a directive whose body is skipped
    for line in lines:
        indentation = len(line) - len(line.lstrip())
        if hidden is not None and line.strip():
            if indentation > hidden:
                continue
            hidden = None
        if re.match(r"\s*\.\.(\s|$)", line):
            if not re.match(rf"\s*\.\.\s+({ADMONITIONS}|{CODE})::", line):
                hidden = indentation
            continue
        if re.match(r"\s*:[A-Z][\w -]*:(\s|$)", line):  # fields: author, date
            continue
        if not re.fullmatch(r"\s*([=\-~`^\"'*+#_:.<>|])\1{2,}\s*|[\s=+|-]*", line) or not line.strip():
            kept.append(line)
    return _inline(title), _inline("\n".join(kept))


def _adorns(line: str, above: str) -> bool:
    return bool(re.fullmatch(r"([=\-~`^\"'*+#_:.<>])\1{2,}\s*", line)) and any(sign.isalnum() for sign in above)


def _inline(text: str) -> str:
    """Remove the markup of roles, links, literals, and emphasis."""
    text = re.sub(r"(:[\w:+-]+:)?`([^`<]+?)\s*<[^`>]+>`_{0,2}", r"\2", text)
    text = re.sub(r"(?::[\w+-]+)*:`~?([^`]+)`", r"\1", text)
    text = re.sub(r"``(.+?)``", r"\1", text)
    text = re.sub(r"`([^`]+)`_{0,2}", r"\1", text)
    text = re.sub(r"(?<!\w)\*{1,2}([^\s*](?:[^*\n]*[^\s*])?)\*{1,2}(?!\w)", r"\1", text)
    return re.sub(r"::(?=\s|$)", ":", text)


def from_markdown(text: str) -> tuple[str, str]:
    """The title and the text of Markdown."""
    text = re.sub(r"\A---\n.*?\n---\n|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(```|~~~).*$", "", text, flags=re.MULTILINE)
    first = re.search(r"^#{1,6}\s+(.+?)\s*#*\s*$", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    under, plain_text = from_rst(re.sub(r"^#{1,6}\s+(.+?)\s*#*\s*$", r"\n\1\n", text, flags=re.MULTILINE))
    return _inline(re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", first.group(1))) if first else under, plain_text


def from_html(text: str) -> tuple[str, str]:
    """The title (the first heading, or otherwise the title element) and the text of HTML."""
    parser = _Text()
    parser.feed(text)
    parser.close()
    title = next((clean for heading in parser.headings if (clean := _title(heading))), _title(parser.title))
    return title, re.sub(r"\n[ \t]*(\n[ \t]*)+", "\n\n", "".join(parser.parts)).replace("¶", "").strip()


def _title(text: str) -> str:
    """A heading without its number or pilcrow."""
    text = " ".join(text.replace("¶", "").split())
    return re.sub(r"^((Chapter|Appendix|Part)\s+)?([A-Z]|[IVX]+|\d+)(\.\d+)*\.\s+", "", text)


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.headings: list[str] = []
        self.title = ""
        self.stack: list[tuple[str, bool]] = []  # open elements, and whether they are skipped

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = set((dict(attrs).get("class") or "").split())
        if tag in BLOCKS | HEADINGS:
            self.parts.append("\n\n" if tag not in ("br", "tr") else "\n")
        if tag in HEADINGS:
            self.headings.append("")
        if tag not in VOID:
            self.stack.append((tag, tag in SKIPPED or bool(classes & SKIPPED_CLASSES)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in (each for each, _ in self.stack):  # missing end tags: the elements end with the outer one
            while self.stack.pop()[0] != tag:
                pass
        if tag in BLOCKS | HEADINGS:
            self.parts.append("\n\n" if tag != "tr" else "\n")

    def handle_data(self, data: str) -> None:
        open_tags = [tag for tag, _ in self.stack]
        if "title" in open_tags and "head" in open_tags:
            self.title += data
        elif not any(skipped for _, skipped in self.stack):
            self.parts.append(data if "pre" in open_tags else re.sub(r"\s+", " ", data))
            if HEADINGS & {*open_tags}:
                self.headings[-1] += data


def shingles(text: str) -> set[int]:
    """Hashes of a quarter of all sequences of SHINGLE words. The selection depends only on the hash."""
    words = plain(text).split()
    hashes = (zlib.crc32(" ".join(words[i : i + SHINGLE]).encode()) for i in range(max(1, len(words) - SHINGLE + 1)))
    return {each for each in hashes if each % 4 == 0}


def without_near_copies(pages: Iterable[Page]) -> list[Page]:
    """The pages without near-duplicates of earlier pages."""
    kept: list[Page] = []
    sizes: list[int] = []
    holders: dict[int, list[int]] = {}
    for page in ProgressBar(list(pages), desc="looking for near copies", unit="page", leave=False):
        own = shingles(page.document)
        shared = Counter(number for each in own for number in holders.get(each, ()))
        if any(count >= NEAR_COPY * min(len(own), sizes[number]) for number, count in shared.items()):
            continue
        for each in own:
            holders.setdefault(each, []).append(len(kept))
        kept.append(page)
        sizes.append(len(own))
    return kept


def _keys(text: str) -> set[str]:
    keys = (plain(text[start:end]) for start, end in sentence_spans(text))
    return {key for key in keys if len(key.split()) >= SHINGLE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path)
    add("--leave_out", nargs="*", default=list(LEFT_OUT), help="names of directories and files in it to exclude")
    add("--train_file", type=Path, help='output file of JSON lines {"text": page}, for the training scripts')
    arguments = parser.parse_args()
    evaluation, training = split(arguments.folder, arguments.leave_out)
    print(f"{len(evaluation):,} evaluation pages, {sum(len(page.document.split()) for page in evaluation):,} words")
    print(f"{len(training):,} training pages, {sum(len(text.split()) for text in training):,} words")
    if arguments.train_file:
        lines = (json.dumps({"text": text}, ensure_ascii=False) for text in training)
        write_text(arguments.train_file, "\n".join(lines) + "\n")
        print(arguments.train_file)
        return
    for page in evaluation[:: max(1, len(evaluation) // 5)]:
        print(f"\n{page.path}: {page.title!r}\n    {page.document[:200]!r}…")


if __name__ == "__main__":
    terminals.set_up()
    main()
