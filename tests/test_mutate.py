"""Mutation testing: the operators on source text, the seeded choice of mutants, and the verdicts on a small package."""

import contextlib
import os
import subprocess
import sys

import pytest

from conftest import ROOT
from tools import mutate

SOURCE = '''
import re

LIMIT = 3


@re.compile(r"é+")
def clamp(value: int, low: int = 0) -> int:
    """1 + 1"""
    note: int = f"é {value + 1}" and low
    if (
        "é" in note or value < low
    ):
        raise ValueError(
            note
        )
    return low if value - low else value
'''


def test_operators_change_one_place():
    mutants = mutate.Edits("clamp.py", SOURCE.encode()).found
    changed = {each.apply(SOURCE.encode()).decode() for each in mutants}
    assert all(text.count("\n") == SOURCE.count("\n") and "LIMIT = 3" in text and '"""1 + 1"""' in text for text in changed)
    lines = SOURCE.splitlines()
    differing = {(new.strip(), i) for text in changed for i, new in enumerate(text.splitlines()) if new != lines[i]}
    assert {text for text, i in differing} == {
        'note: int = f"é {value + 1}" or low',
        "pass",
        'not ("é" in note or value < low)',
        '"é" not in note or value < low',
        '"é" in note and value < low',
        '"é" in note or value <= low',
        "",
        "return None",
        "return low if not (value - low) else value",
        "return low if value + low else value",
    }
    assert all(mutate.compiles(each, SOURCE.encode()) for each in mutants)


def test_the_choice_is_reproducible():
    few, lines = mutate.draw(ROOT, ["hf_posenc/attention"], 5, seed=3)
    more, _ = mutate.draw(ROOT, ["hf_posenc/attention"], 8, seed=3)
    assert few == more[:5] != mutate.draw(ROOT, ["hf_posenc/attention"], 5, seed=4)[0]
    assert lines > 100 and len({(each.path, each.line) for each in more}) == 8


def test_a_change_of_the_source_leaves_other_mutants(tmp_path):
    drawn = []
    for text in (SOURCE, SOURCE.replace("import re", "import re\n\n\ndef more(x):\n    return x\n\n")):
        (tmp_path / "clamp.py").write_text(text, encoding="utf-8")
        mutants, _ = mutate.draw(tmp_path, ["."], 9, seed=0)
        drawn.append([mutate.changed_line(tmp_path, each) for each in mutants])
    assert [each for each in drawn[1] if "return x" not in each] == drawn[0]


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "toy").mkdir()
    (tmp_path / "tests").mkdir()
    functions = {"seen": "return 1", "run_only": "return 1", "unreached": "return 1"}
    (tmp_path / "toy" / "__init__.py").write_text("\n".join(f"def {name}():\n    {body}" for name, body in functions.items()))
    tests = "import toy\n\ndef test_one():\n    assert toy.seen() == 1\n\ndef test_other():\n    toy.run_only()\n"
    (tmp_path / "tests" / "test_toy.py").write_text(tests)
    return tmp_path


@pytest.mark.slow
def test_a_tested_line_is_killed_and_an_untested_one_survives(toy, monkeypatch):
    command = [sys.executable, "-m", "tools.mutate", "--packages", "toy", "--mutants", "9", "--processes", "1"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}"}
    done = subprocess.run(command, cwd=toy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "all                                 3        1        0         2            1      33.3" in done.stdout
    assert "toy/__init__.py:4" in done.stdout and "(1 of 1 tests)" in done.stdout
    assert "toy/__init__.py:6" in done.stdout and "(not reached)" in done.stdout
    monkeypatch.setattr(mutate, "ProcessPoolExecutor", lambda *_: contextlib.nullcontext())  # without which nothing can be run
    assert done.stdout.endswith(mutate.measure(toy, ["toy"], 9, 0, 1, 60)), "the second run reuses all verdicts"
    assert len((toy / "build" / "mutants" / "results.jsonl").read_text().splitlines()) == 3
