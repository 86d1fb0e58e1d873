"""The wheel, and the types that type checkers of users see."""

import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser

import pytest

from conftest import ROOT
from hf_posenc._versions import INSTALL, REPOSITORY

SNIPPET = """
from sentence_transformers import SentenceTransformer
from transformers import BertForMaskedLM

import hf_posenc


def all_of(bert: BertForMaskedLM, sentences: SentenceTransformer, layer: hf_posenc.PositionEmbedding) -> None:
    reveal_type(hf_posenc.patch(bert, "alibi", max_length=9))
    reveal_type(hf_posenc.unpatch(bert))
    reveal_type(hf_posenc.extend(bert, max_length=None))
    reveal_type(hf_posenc.patch(sentences, {"type": "rope"}))
    reveal_type(hf_posenc.unpatch(sentences))
    reveal_type(hf_posenc.extend(sentences, 9))
    reveal_type(hf_posenc.extend(layer, 9))
    reveal_type(hf_posenc.inspect(sentences))
    hf_posenc.patch("bert-base-uncased", "alibi")
    hf_posenc.extend(bert, "9")
"""


def run(*arguments, cwd):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=300)


def test_the_wheel(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("hf_posenc", "benchmarks", "experiments", "scripts", "tests", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = run("-c", "from setuptools.build_meta import build_wheel; build_wheel('dist')", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        said = Parser().parsestr(archive.read(metadata).decode())
    here = {
        str(path.relative_to(ROOT)) for path in (ROOT / "hf_posenc").rglob("*") if path.suffix in (".py", ".typed", ".json")
    }
    assert {name for name in names if ".dist-info/" not in name} == here and "hf_posenc/py.typed" in here
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert said["Author"] == "The hf-posenc maintainers" and "ALiBi" in said["Keywords"]
    assert said["License-Expression"] == "Apache-2.0" and "Typing :: Typed" in said.get_all("Classifier")


@pytest.mark.slow
def test_types(tmp_path):
    """`patch`, `unpatch`, and `extend` return the type of their argument."""
    pytest.importorskip("mypy")
    (tmp_path / "snippet.py").write_text(SNIPPET)
    config = ("--config-file", ROOT / "pyproject.toml", "--cache-dir", tmp_path / "cache", "--follow-imports", "silent")
    done = run("-m", "mypy", *config, tmp_path / "snippet.py", cwd=ROOT)
    revealed = [line.split('"')[1].rpartition(".")[2] for line in done.stdout.splitlines() if "Revealed type" in line]
    assert revealed == ["BertForMaskedLM"] * 3 + ["SentenceTransformer"] * 3 + ["PositionEmbedding", "Report"], done.stdout
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 2 and "[type-var]" in errors[0] and "[arg-type]" in errors[1], done.stdout


def test_one_address():
    """The address of the repository is defined in one place, and all pages agree. A release to PyPI will change it."""
    assert f'Repository = "{REPOSITORY}"' in (ROOT / "pyproject.toml").read_text() and INSTALL.endswith(REPOSITORY)
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "model_cards").rglob("*.md")]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"pip install .?hf-posenc(?!\[\w+(?:,\w+)*\] @ git)", text), page
        assert {*re.findall(r"git\+(https://[^\s\"`)]+)", text)} <= {REPOSITORY}, page
