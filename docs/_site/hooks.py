"""Hooks of mkdocs: pages and files of the repository outside docs/, the notebook as a page, and the links between all of them.

Nothing is copied in the tree. What a page links to is put on the site under its path in the repository: README.md is the
first page, docs/guides/patch.md the page guides/patch, scripts/results/needle.png a file.
"""

import json
import logging
import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LOG = logging.getLogger("mkdocs.plugins.hooks")
"""Its warnings are errors in strict mode."""
LINK = re.compile(r"(\]\()([^()\s#]+)(#[^()\s]*)?(?=\))")
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z]+:")
PAGES = {"README.md": "index.md"}
"""Places on the site, by paths in the repository, that have another name there."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Pages that mkdocs.yml doesn't name come last."""
    pages = (path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    rest = sorted(page for page in pages if page not in str(config.nav))
    if rest and config.nav is not None:
        config.nav.append({"More": rest})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md and CHANGELOG.md, notebooks, and all files outside docs/ that a page links to."""
    waiting = [(site_path(name), ROOT / name) for name in ("README.md", "CHANGELOG.md")]
    waiting += [(file.src_uri, Path(file.abs_src_path or "")) for file in files.documentation_pages()]
    for notebook in list(files):
        if notebook.src_uri.endswith(".ipynb"):
            content = as_markdown(Path(notebook.abs_src_path or ""))
            files.append(File.generated(config, notebook.src_uri.replace(".ipynb", ".md"), content=content))
    while waiting:
        place, path = waiting.pop()
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, abs_src_path=str(path)))
        if path.suffix == ".md":
            waiting += [(there, ROOT / it) for it, there in linked(path) if files.get_file_from_path(there) is None]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the repository become links between places on the site."""
    source = repository_path(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def placed(match: re.Match[str]) -> str:
        start, target, anchor = match[1], match[2], match[3] or ""
        if ELSEWHERE.match(target):
            return match[0]
        there = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
        if not (ROOT / repository_path(there)).is_file() and files.get_file_from_path(there) is None:
            LOG.warning(f"{source} links to {target}, which is no file")
            return match[0]
        return f"{start}{posixpath.relpath(there, folder or '.')}{anchor}"

    return outside_code(LINK, placed, markdown)


def linked(page: Path) -> list[tuple[str, str]]:
    """(path in the repository, place on the site) of all files that a page links to."""
    found: list[tuple[str, str]] = []

    def look(match: re.Match[str]) -> str:
        if ELSEWHERE.match(match[2]):
            return match[0]
        path = Path(os.path.normpath(page.parent / match[2]))
        if path.is_file() and path.is_relative_to(ROOT):
            found.append((path.relative_to(ROOT).as_posix(), site_path(path.relative_to(ROOT).as_posix())))
        return match[0]

    outside_code(LINK, look, page.read_text(encoding="utf-8"))
    return found


def outside_code(pattern: re.Pattern[str], replace, text: str) -> str:
    """`pattern.sub` outside of blocks and spans of code."""
    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [pattern.sub(replace, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, pattern.sub(replace, text[end:])])


def site_path(path: str) -> str:
    """A path in the repository -> the place on the site."""
    return PAGES.get(path, path.removeprefix("docs/").replace(".ipynb", ".md"))


def repository_path(place: str) -> str:
    """A place on the site -> the path in the repository."""
    names = {there: path for path, there in PAGES.items()}
    if place in names:
        return names[place]
    notebook = f"docs/{place.removesuffix('.md')}.ipynb"
    if (ROOT / notebook).is_file():
        return notebook
    return f"docs/{place}" if (ROOT / "docs" / place).is_file() else place


def as_markdown(notebook: Path) -> str:
    """A notebook's cells as a page, with the pictures and texts that they have put out."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![output of the cell above](data:image/png;base64,{''.join(data['image/png']).strip()})")
            elif text := "".join(output.get("text") or data.get("text/plain", "")):
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
