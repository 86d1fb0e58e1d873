"""Progress bars without a terminal, from this library and from those that its commands use."""

import contextlib
import io
import re
import sys

import pytest
from tqdm import std
from tqdm.auto import tqdm

from conftest import said_by_python
from hf_posenc import progress
from models import stock

TRAIN = """
import runpy, sys
sys.argv[0] = "train_mlm"
runpy.run_module("hf_posenc.training.train_mlm", run_name="__main__")
"""
BARS = ("training", "Loading weights", "tokenizing")
"""Bars of this library, Transformers, and datasets."""


@pytest.fixture
def model(tmp_path, tokenizer):
    for part in (stock("bert", "ForMaskedLM"), tokenizer):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "texts.txt").write_text("w1 w2 w3 w4 w5\n" * 20)
    return tmp_path / "model"


@pytest.mark.parametrize("settings", [{}, {progress.INTERVAL: "0.1"}], ids=["default", "set"])
def test_bars_of_a_command(model, tmp_path, settings):
    arguments = ["--model_name_or_path", model, "--train_file", tmp_path / "texts.txt", "--output_dir", tmp_path / "out"]
    _, errors = said_by_python(TRAIN, *arguments, "--max_train_steps", 3, fresh=False, **settings)
    assert all((bar in errors) == bool(settings) for bar in BARS), errors
    assert ("%|" in errors) == bool(settings)


def test_importing_the_library_changes_no_other_bars():
    _, errors = said_by_python("import hf_posenc.evaluation.retrieval\nfrom tqdm.auto import tqdm\n[*tqdm(range(3))]")
    assert "0/3" in errors and "3/3" in errors


class Log(io.StringIO):
    """Standard error of a command, with a clock that advances by 10 seconds for each step."""

    now, terminal = 0.0, False

    def isatty(self):
        return self.terminal

    def monotonic(self):
        return self.now

    def steps(self, outer, inner):
        with contextlib.redirect_stderr(self):
            if tqdm in (outer, inner):  # in a command
                progress.limit_other_libraries()
            for _ in outer(range(6), desc="A", mininterval=0):  # no letter looks like a movement of the cursor
                for _ in inner(range(4), desc="B", mininterval=0, leave=False):
                    self.now += 10
        return self.getvalue()


@pytest.fixture
def log(monkeypatch):
    log = Log()
    monkeypatch.setattr(progress, "time", log)
    monkeypatch.setattr(progress, "_LINES", progress._Lines())
    progress._LINES.due = progress.SECONDS
    return log


@pytest.mark.parametrize("inner", [progress.ProgressBar, tqdm], ids=["own", "other"])
def test_nested_bars_share_the_lines(log, inner):
    lines = log.steps(progress.ProgressBar, inner).splitlines(keepends=True)
    assert len(lines) == 6 * 4 * 10 / progress.SECONDS
    assert all(line[:3] in ("A: ", "B: ") and line.endswith("it/s]\n") and "\r" not in line for line in lines)


@pytest.mark.parametrize("where", ["terminal", "notebook"])
def test_bars_as_tqdm_makes_them(log, monkeypatch, where):
    log.terminal = where == "terminal"
    if where == "notebook":
        monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", sys)
    before = vars(std.tqdm)["__init__"]
    ours = log.steps(progress.ProgressBar, progress.ProgressBar).count("\r")
    assert vars(std.tqdm)["__init__"] is before
    assert 30 < ours == log.steps(tqdm, tqdm).count("\r") - ours


SLOW = """if True:
    import sys, time
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    import hf_posenc, slow_encoding
    from tqdm import std
    from hf_posenc import progress
    from hf_posenc.serialization import import_check, remote_code
    from models import stock
    model = hf_posenc.patch(stock("bert"), "slow")
    if sys.argv[2] == "slow":
        progress._Lines.due, read, passed = 0.0, remote_code.parsed, []
        remote_code.parsed = lambda source: passed.append(10.0) or read(source)  # each file takes 10 seconds
        import_check.check_imports = lambda file: passed.append(40.0) or []
        std.time = time.monotonic = lambda: sum(passed)
    print("begin", file=sys.stderr)
    model.save_pretrained(Path(sys.argv[1]) / "model")
"""
ENCODING = """from hf_posenc import PositionEncoding

class Slow(PositionEncoding, type="slow"):
    def distance_bias(self, distance):
        return -distance.abs()[None].float()
"""


@pytest.mark.parametrize("speed", ["slow", "fast"])
def test_saving_an_own_encoding(speed, tmp_path):
    """It reports the files that it reads and imports, if that takes long."""
    (tmp_path / "slow_encoding.py").write_text(ENCODING)
    _, errors = said_by_python(SLOW, tmp_path, speed, fresh=False)
    lines = [line for line in errors.partition("begin")[2].splitlines() if re.search("files|file/s|s/file", line)]
    assert bool(lines) == (speed == "slow"), errors
    if lines:
        assert lines[0].startswith("reading the code to save") and lines[-1].startswith("importing the copied encodings: ")
