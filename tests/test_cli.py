"""The command line: thin over the API, errors in a line, nothing half written."""

import json
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertTokenizer, RobertaForMaskedLM
from typer.testing import CliRunner

import hf_posenc
from conftest import ENCODINGS, LENGTH, ROOT, first, patched, run_python, stock, tokens
from hf_posenc.cli import app


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a stock BERT with its tokenizer, a stock RoBERTa without, and a patched BERT."""
    path = tmp_path_factory.mktemp("models")
    (path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    stock("bert", "ForMaskedLM").save_pretrained(path / "bert")
    BertTokenizer(str(path / "vocab.txt"), model_max_length=LENGTH).save_pretrained(path / "bert")
    stock("roberta", "ForMaskedLM").save_pretrained(path / "roberta")
    patched("bert", "alibi").save_pretrained(path / "patched")
    return path


def run(*arguments, code=0):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout if code == 0 else done.stderr


def test_list():
    listed = json.loads(run("list", "--json"))
    assert [name for name in listed if name in ENCODINGS] == list(ENCODINGS)
    assert listed["rope"]["options"] == {"theta": 10000.0, "layout": "half"} and listed["rope"]["aliases"] == ["rotary"]
    assert all(listed[name]["paper"].startswith("https://") for name in ENCODINGS if name not in ("counter", "normalized"))
    shown = run("list")
    assert all(name in shown for name in ENCODINGS) and "theta" in shown


@pytest.mark.parametrize("name", ["bert", "roberta", "patched"])
def test_inspect(folders, name):
    report = asdict(hf_posenc.inspect(folders / name))
    assert json.loads(run("inspect", folders / name, "--json")) == json.loads(json.dumps(report))
    shown = run("inspect", folders / name)
    assert "usable length: " + ("no limit" if name == "patched" else f"{LENGTH} tokens") in shown


def test_inspect_says_what_is_ignored(folders, tmp_path):
    config = json.loads((folders / "bert" / "config.json").read_text()) | {"position_embedding_type": "relative_key"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "ignored: position_embedding_type='relative_key'" in run("inspect", tmp_path)


def test_patch_saves_the_model_with_its_head_and_tokenizer(folders, tmp_path):
    shown = run(
        *("patch", folders / "bert", "sinusoidal+rotary", "--option", "sinusoidal__base=500", "--option"),
        *("rope__layout=interleaved", "--max-length", 40, "--inject", "every_layer", "--output-dir", tmp_path / "deep" / "new"),
    )
    assert "usable length: 40 tokens" in shown and "distil" in shown
    expected = hf_posenc.patch(
        AutoModelForMaskedLM.from_pretrained(folders / "bert"),
        {"type": "sinusoidal+rope", "sinusoidal": {"base": 500.0}, "rope": {"layout": "interleaved"}},
        max_length=40,
        inject="every_layer",
    )
    torch.save((tokens(), first(expected(tokens()))), tmp_path / "expected.pt")
    code = """
import sys, torch, hf_posenc
from transformers import AutoModelForMaskedLM
ids, expected = torch.load(sys.argv[2])
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1])
print(type(model).__name__, torch.equal(model(ids)[0], expected))
"""
    assert run_python(code, tmp_path / "deep" / "new", tmp_path / "expected.pt").split() == ["PosEncBertForMaskedLM", "True"]
    assert AutoTokenizer.from_pretrained(tmp_path / "deep" / "new").model_max_length == 40
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["new"]


def test_patch_without_a_limit_or_a_tokenizer(folders, tmp_path):
    run("patch", folders / "bert", '{"type": "alibi"}', "--output-dir", tmp_path / "bert")
    assert AutoTokenizer.from_pretrained(tmp_path / "bert").model_max_length > 10**9
    assert "no tokenizer" in run("patch", folders / "roberta", "t5", "--no-keep-host", "--output-dir", tmp_path / "roberta")
    model = hf_posenc.PosEncRobertaForMaskedLM.from_pretrained(tmp_path / "roberta")
    assert isinstance(model, RobertaForMaskedLM) and not model.config.position_encoding["host"]["kept"]


@pytest.mark.parametrize(
    ("encoding", "arguments", "words"),
    [
        ("alibbi", (), "unknown position encoding 'alibbi'"),
        ("rope", ("--option", "thetta=3"), "has no option 'thetta'"),
        ("rope", ("--option", "theta"), "give name=value"),
        ("{type: rope}", (), "is no JSON"),
        ("alibi", ("--inject", "every_layer"), "'alibi' makes none"),
        ("alibi", ("--max-length", "0"), "max_length=0"),
    ],
)
def test_patch_refuses(folders, tmp_path, encoding, arguments, words):
    error = run("patch", folders / "bert", encoding, *arguments, "--output-dir", tmp_path / "new", code=1)
    assert words in error and "Traceback" not in error and not list(tmp_path.iterdir())


def test_patch_keeps_what_is_there(folders, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "isn't empty" in run("patch", folders / "bert", "alibi", "--output-dir", tmp_path, code=1)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    new = tmp_path / "new"
    run("patch", folders / "bert", "alibi", "--output-dir", new)
    run("patch", folders / "bert", "rope", "--output-dir", new, "--overwrite")
    assert hf_posenc.inspect(new).encoding == "rope"
    assert "already" in run("patch", folders / "patched", "rope", "--output-dir", tmp_path / "other", code=1)


def test_push_reads_the_folder_first(tmp_path):
    assert "Error" in run("push", tmp_path / "nowhere", "me/x", code=1)


def test_as_a_command(folders):
    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "hf_posenc.cli", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=120
        )

    done = command("inspect", folders / "nowhere")
    assert done.returncode == 1 and done.stderr.startswith("Error:") and "Traceback" not in done.stderr
    shown = command("--help")
    assert shown.returncode == 0 and all(name in shown.stdout for name in ("list", "inspect", "patch", "push"))


def test_without_typer():
    code = "import sys; sys.modules['typer'] = None; import hf_posenc; print('fine'); import hf_posenc.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 1 and done.stdout == "fine\n" and 'pip install "hf-posenc[cli]"' in done.stderr
