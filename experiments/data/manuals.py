"""Linux's manual pages as documents whose label comes late: does POSIX specify the page's interface?

    apt-get download manpages manpages-dev
    dpkg-deb -x manpages_VERSION.deb MANUALS
    dpkg-deb -x manpages-dev_VERSION.deb MANUALS
    python -m experiments.data.manuals MANUALS      # how many pages there are, with a sample

The label comes from a page's section STANDARDS, which follows the description and is part of the document. The pages' lists of
other pages (SEE ALSO) are left out. Near copies of other pages are left out.
"""

import argparse
import gzip
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from experiments.data.pages import Page, without_near_copies
from hf_posenc.evaluation import terminals

LABELS = ("other", "POSIX")
EVIDENCE, LEFT_OUT = "STANDARDS", ("SEE ALSO",)
TEXT_MACROS = {"B", "I", "BR", "RB", "IR", "RI", "BI", "IB", "SS", "SM", "SB"}
SIGNS = {"\\-": "-", "\\(aq": "'", "\\(bu": "-", "\\(em": "-", "\\e": "\\", "\\ ": " "}
NEGATION = re.compile(r"\b(not|no|none|nonstandard|unspecified)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Manual:
    """A page in three parts: text before its section STANDARDS, this section, and text after it; and its index in LABELS."""

    path: str
    before: str
    evidence: str
    after: str
    label: int


def read(folder: Path) -> list[Manual]:
    """The English pages with a section STANDARDS, sorted by path. Raises SystemExit if there are none."""
    found: dict[str, Manual] = {}
    for path in sorted(folder.rglob("*.gz")):
        if path.parent.parent.name == "man" and not path.is_symlink():
            with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
                page = parsed(path.name.removesuffix(".gz"), file.read())
            if page is not None:
                found[page.path] = page
    if not found:
        raise SystemExit(f"{folder} has no manual page with a section {EVIDENCE}. Pass the directory of unpacked packages.")
    kept = without_near_copies(Page(each.path, each.path, each.before + each.evidence) for each in found.values())
    return [found[page.path] for page in kept]


def parsed(name: str, source: str) -> Manual | None:
    """A page from its source in troff. None if it has no section STANDARDS."""
    parts = {name: text for name, text in sections(source).items() if name not in LEFT_OUT}
    if not parts.get(EVIDENCE, "").strip():
        return None
    names = [*parts]
    middle = names.index(EVIDENCE)
    before, evidence, after = (
        "".join(f"{each}\n{parts[each]}\n" for each in chosen)
        for chosen in (
            names[:middle],
            names[middle : middle + 1],
            names[middle + 1 :],
        )
    )
    return Manual(name, before, evidence, after, int(specified(parts[EVIDENCE])))


def sections(source: str) -> dict[str, str]:
    """The text of each section by its heading, without markup."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in source.splitlines():
        if line.startswith(('.\\"', "'\\\"")):
            continue
        line = re.sub(r"\\f([A-Z]|\(..|\[\w*\])|\\[&/,|]", "", line)
        for sign, text in SIGNS.items():
            line = line.replace(sign, text)
        macro, _, rest = line[1:].partition(" ") if line.startswith(".") else ("", "", line)
        if macro == "SH":
            lines = found.setdefault(rest.strip(' "'), [])
        elif not macro or macro in TEXT_MACROS:
            lines.append(rest.replace('"', "") if macro else rest)
    return {name: "\n".join(text) for name, text in found.items()}


def specified(standards: str) -> bool:
    """Whether a sentence names POSIX without a negation."""
    return any("POSIX" in each and not NEGATION.search(each) for each in re.split(r"(?<=[.;:])\s", standards))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    found = read(parser.parse_args().folder)
    counts = Counter(LABELS[page.label] for page in found)
    print(f"{len(found):,} pages: {', '.join(f'{name} {count}' for name, count in counts.items())}")
    for page in found[:: max(1, len(found) // 5)]:
        print(f"\n{page.path}, {LABELS[page.label]}: {page.evidence[:200]!r}")


if __name__ == "__main__":
    terminals.set_up()
    main()
