"""The code blocks of a documentation page, and a process that runs its Python blocks.

`<!-- not run: why -->` before a block excludes it. If a block begins with `# name.py`, it is written to that file and imported.
All other blocks share one namespace, from top to bottom.
"""

import importlib
import json
import os
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LEFT_OUT = re.compile(r"<!-- not run: (.+?) -->\s*\Z")
FILE = re.compile(r"# (\w+)\.py\n")


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    line: the number of its first line in the page, counted from 1.
    not_run: why it doesn't run. Empty if it runs.
    """

    language: str
    text: str
    line: int
    not_run: str = ""

    @property
    def module(self):
        """The name of the module whose file the block is. Empty if it isn't a file."""
        match = FILE.match(self.text)
        return match[1] if match else ""


def blocks(page):
    """All blocks of a page. The blocks of a notebook are its code cells."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = (cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
        return [Block("python", "".join(cell["source"]) + "\n", 1) for cell in cells]
    found = []
    for match in FENCE.finditer(text):
        reason = LEFT_OUT.search(text[: match.start()])
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(match[1], match[2], line, reason[1] if reason else ""))
    return found


def main(page, folder):
    """Run the Python blocks of a page in a directory. Tracebacks show the lines of the page."""
    os.chdir(folder)
    os.environ["MPLBACKEND"] = "Agg"
    sys.path.insert(0, "")
    namespace = vars(sys.modules["__main__"])
    for block in blocks(Path(page)):
        if block.language != "python" or block.not_run:
            continue
        if block.module:
            Path(f"{block.module}.py").write_text(block.text, encoding="utf-8")
            importlib.invalidate_caches()
            importlib.import_module(block.module)
            continue
        try:
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec", dont_inherit=True), namespace)
        except Exception:
            traceback.print_exc()
            sys.exit(f"{page}: the block at line {block.line} failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
