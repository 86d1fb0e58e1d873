"""The documentation: its Python runs from top to bottom, its commands parse, its links lead somewhere."""

import functools
import os
import re
import shlex
import subprocess
import sys

import pytest
from transformers import AutoTokenizer, LlamaConfig
from typer.main import get_command

from attacks.hub_server import TOKEN, serve
from conftest import LLAMA, ROOT, run_python, stock
from hf_posenc.cli import app
from hosts import tiny
from page_worker import blocks

PAGES = {path.name: path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md")}
PAGES |= {path.name: path for path in sorted((ROOT / "docs").glob("*.md"))}
NOTEBOOKS = {path.name: path for path in sorted((ROOT / "docs").glob("*.ipynb"))}
SLOW = ()
"""Pages that take longer than a few seconds."""
NOT_RUN = 0
"""Blocks of Python that a comment leaves out: counted, so that a new one is noticed."""
RUN = "import sys, page_worker; page_worker.main(*sys.argv[1:])"


def runnable(page):
    return [block for block in blocks(page) if block.language == "python" and not block.not_run]


def to_run():
    pages = {name: path for name, path in (PAGES | NOTEBOOKS).items() if runnable(path)}
    return [pytest.param(path, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, path in pages.items()]


def bert(folder, minilm):
    stock("bert", "ForMaskedLM", vocab_size=30522, max_position_embeddings=512, num_hidden_layers=4).save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm, model_max_length=512).save_pretrained(folder)


def old_checkpoint(folder, minilm):
    folder.symlink_to(ROOT / "tests" / "v4" / "bert" / "relative_key")


def sentences(folder, minilm):
    folder.symlink_to(minilm)


def some_texts(file, minilm):
    file.write_text("\n".join(f"The {noun} bit the man, and then it ran away." for noun in ("dog", "cat", "horse", "fox") * 8))


def evaluation(file, minilm):
    result = '{"model": "alibi", "this": true, "task": "fill-mask", "dataset": {"name": "pages"}, "metric": "loss", "value": 2.0}'
    file.write_text(f'{{"results": [{result}]}}')


def of_type(kind):
    return lambda folder, minilm: tiny.build(kind).save_pretrained(folder)


def llama(folder, minilm):
    stock("llama", vocab_size=30522).save_pretrained(folder)


THINGS = {
    "all-MiniLM-L6-v2": sentences,
    "bert-alibi/evaluation.json": evaluation,
    "bert-base-uncased": bert,
    "facebook/bart-base": of_type("bart"),
    "google-t5/t5-small": of_type("t5"),
    "google/vit-base-patch16-224": of_type("vit"),
    "llava-hf/llava-1.5-7b-hf": of_type("llava"),
    "meta-llama/Llama-3.2-1B": llama,
    "my.txt": some_texts,
    "old-checkpoint": old_checkpoint,
    "openai/clip-vit-base-patch32": of_type("clip"),
    "sentence-transformers/all-MiniLM-L6-v2": sentences,
}
"""What pages load and don't make: models of the Hub by name, tiny and random but for MiniLM, and a reader's own files."""


@pytest.mark.parametrize("page", to_run())
def test_the_page_runs(page, minilm, tmp_path):
    code = "".join(block.text for block in runnable(page))
    for name, made in THINGS.items():
        if f'"{name}"' in code:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            made(tmp_path / name, minilm)
    if "push_to_hub(" in code:
        return run_with_a_hub(page, tmp_path)
    run_python(RUN, page, tmp_path)


def run_with_a_hub(page, folder):
    """The client reads its settings when it is imported: a new interpreter."""
    with serve() as hub:
        settings = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0"}
        settings |= {"HF_HUB_DISABLE_XET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
        command = [sys.executable, "-c", RUN, str(page), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings}, timeout=240)
        assert done.returncode == 0, done.stderr[-4000:]
