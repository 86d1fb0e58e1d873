"""push_to_hub doesn't send tokens, local paths, or files behind links. No test here needs a Hub."""

import resource
import tempfile
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.cli import app
from hf_posenc.hub.cards import replaceable
from hf_posenc.hub.eval_results import checked_evaluation
from models import patched, stock
from test_hub import EVALUATION, contents

SECRET = "sk-Proj1234567890abcdefghij"


@pytest.mark.parametrize(
    "secret",
    [
        SECRET,
        "hf_" + "aB3" * 11,
        "ghp_" + "a1" * 18,
        "github_pat_" + "a1" * 20,
        "glpat-" + "a1" * 10,
        "AKIA" + "A1" * 8,
        "AIza" + "a1_-x" * 7,
        "xoxb-123456789012-abc",
        "-----BEGIN OPENSSH PRIVATE KEY-----",
    ],
)
def test_what_looks_like_a_token_is_not_pushed(tmp_path, secret):
    (tmp_path / "key.svg").write_text(f"<svg>\n<!-- {secret} --></svg>")
    with pytest.raises(ValueError, match="key.svg, line 2, looks like an access token") as refused:
        hf_posenc.push_to_hub(stock("bert"), "me/model", figures=[tmp_path / "key.svg"], save_directory=tmp_path / "to")
    assert secret not in str(refused.value) and not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    "place", ["{tmp}/a.json", "{home}/a.json", "/home/joe/x", "/Users/joe", r"C:\\Users\\joe\\x", "{cwd}/x"]
)
def test_a_path_of_this_machine_is_not_pushed(tmp_path, monkeypatch, place):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", "/somewhere/at home")
    path = place.format(tmp=tempfile.gettempdir(), home="/somewhere/at home", cwd=Path.cwd())
    (tmp_path / "a.svg").write_text(f"<svg>\n\n<!-- {path} --></svg>")
    with pytest.raises(ValueError, match="a.svg, line 3: '.*' is a local path.*nothing was uploaded"):
        hf_posenc.push_to_hub(stock("bert"), "me/model", figures=[tmp_path / "a.svg"], save_directory="to")
    assert not Path("to").exists()


def test_the_card_the_message_and_the_weights_are_searched(tmp_path):
    push = partial(hf_posenc.push_to_hub, repo_id="me/model", save_directory=tmp_path / "to")
    with pytest.raises(ValueError, match="commit_message.*/home/joe"):
        push(stock("bert"), commit_message="from /home/joe/model")
    model = stock("bert")
    model.config.data_file = "/data/of/joe.json"
    with pytest.raises(ValueError, match=r"/data/of/joe\.json"):
        push(model)
    model = patched("bert", "alibi")
    model.config.position_encoding["original"]["name_or_path"] = f"{tempfile.gettempdir()}/model"
    with pytest.raises(ValueError, match="(config.json|model.safetensors), line"):
        push(model)
    with pytest.raises(ValueError, match="evaluation.json, line [0-9]+, looks like"):
        push(stock("bert"), evaluation={**EVALUATION, "notes": [SECRET]})
    with pytest.raises(ValueError, match="evaluation.json, line [0-9]+: '/home/joe' is a local path"):
        push(stock("bert"), evaluation={**EVALUATION, "notes": ["at file:///home/joe/x"]})


@pytest.mark.parametrize(
    "text", ["/usr/bin", "https://a.org/home/joe", "and/or", "risk-adjusted-Returns-in-24", "hf_hub_download", "/tmp"]
)
def test_what_is_no_leak_is_pushed(tmp_path, text):
    (tmp_path / "a.svg").write_text(text)
    hf_posenc.push_to_hub(stock("bert"), "me/model", figures=[tmp_path / "a.svg"], save_directory=tmp_path / "to")
    assert (tmp_path / "to" / "a.svg").read_text() == text


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (
            "python /home/joe/train.py --f=/data/a.json --out '/x y/z'",
            "python train.py --f=a.json --out 'x y/z'",
        ),
        ("python ~/train.py C:\\Users\\joe\\a.json", "python train.py a.json"),
        (
            "python scripts/train.py https://a.org/b/c 1/2",
            "python scripts/train.py https://a.org/b/c 1/2",
        ),
    ],
)
def test_a_command_line_is_shown_without_absolute_folders(said, left):
    assert checked_evaluation({"command": said})["command"] == left
    assert checked_evaluation({"command": left})["command"] == left


DEEP = "[" * 100_000


def test_what_is_nested_too_deeply_or_no_unicode(tmp_path):
    (tmp_path / "evaluation.json").write_text(DEEP)
    with pytest.raises(ValueError, match="can't be read as JSON: it is nested too deeply"):
        hf_posenc.push_to_hub(stock("bert"), "me/model", evaluation=tmp_path / "evaluation.json")
    deep = []
    for _ in range(10_000):
        deep = [deep]
    for evaluation in ({"notes": deep}, {"command": deep}, deep):
        with pytest.raises(ValueError, match="nested too deeply"):
            checked_evaluation(evaluation)
    with pytest.raises(ValueError, match=r"ud800"):
        checked_evaluation({"command": "\ud800"})
    with pytest.raises(ValueError, match="commit_message"):
        hf_posenc.push_to_hub(stock("bert"), "me/model", commit_message=5)


HEADS = ("a: [", "a: &a [*a]", "1: 2", f"a: {'[' * 900}{']' * 900}", "- a", "eval_results: 1", "model-index: 5", 'a: "\\ud800"')


@pytest.mark.parametrize("head", HEADS)
def test_metadata_of_a_card_is_kept_or_the_card_stays(head):
    kept = replaceable(f"---\n{head}\n---\n")
    if kept is None:
        assert "ud800" not in head and "*" not in head
    else:
        assert hf_posenc.model_card(stock("bert"), "me/model", metadata=kept).encode()


def test_a_full_disk_is_an_oserror(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            hf_posenc.push_to_hub(stock("bert"), "me/model", save_directory=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def folder_with_links(tmp_path, to):
    patched("bert", "alibi").save_pretrained(tmp_path / "mine")
    (tmp_path / "key.pem").write_text("KEY-4711")
    for name in to:
        (tmp_path / "mine" / name).symlink_to(tmp_path / "key.pem")
    return tmp_path / "mine"


def test_links_in_the_folder_are_not_pushed(tmp_path):
    folder = folder_with_links(tmp_path, ["a.png", "evaluation.json"])
    (folder / "b.png").touch()
    (folder / "c.png").symlink_to("b.png")
    (folder / "d.png").mkdir()
    (tmp_path / "link").symlink_to(folder)
    done = CliRunner().invoke(app, ["push", str(tmp_path / "link"), "me/it", "--save-directory", str(tmp_path / "ready")])
    assert done.exit_code == 0, done.stderr
    for name in ("a.png", "c.png", "d.png", "evaluation.json"):
        assert f"{tmp_path / 'link' / name} isn't a regular file, so it isn't pushed" in done.stdout
    pushed = contents(tmp_path / "ready")
    assert "b.png" in pushed and not {"a.png", "c.png", "d.png", "evaluation.json"} & pushed.keys()
    assert b"KEY-4711" not in b"".join(pushed.values())


@pytest.mark.parametrize("name", ["chat_template.jinja", "vocab.txt", "generation_config.json", "additional_chat_templates"])
def test_a_config_or_tokenizer_that_is_a_link_out_of_the_folder_is_refused(tmp_path, name):
    folder = folder_with_links(tmp_path, [name] if "." in name else [])
    if "." not in name:
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "a.jinja").write_text("KEY-4711")
        (folder / name).symlink_to(tmp_path / "outside")
    done = CliRunner().invoke(app, ["push", str(folder), "me/it", "--save-directory", str(tmp_path / "ready")])
    assert done.exit_code == 1 and "which is outside the directory" in done.stderr
    assert not (tmp_path / "ready").exists()


def test_a_snapshot_of_the_hubs_cache_is_pushed(tmp_path):
    cache = tmp_path / "models--me--it"
    patched("bert", "alibi").save_pretrained(cache / "snapshots" / "0")
    (cache / "blobs").mkdir()
    for number, path in enumerate((cache / "snapshots" / "0").iterdir()):
        path.rename(cache / "blobs" / str(number))
        path.symlink_to(f"../../blobs/{number}")
    done = CliRunner().invoke(
        app, ["push", str(cache / "snapshots" / "0"), "me/it", "--save-directory", str(tmp_path / "ready")]
    )
    assert done.exit_code == 0, done.stderr
