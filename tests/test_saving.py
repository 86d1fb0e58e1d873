"""Saves that are interrupted, over links, over existing files, and into directories that can't be written."""

import contextlib
import itertools
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from huggingface_hub.utils._paths import DEFAULT_IGNORE_PATTERNS
from transformers import AutoModel
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import plots
from hf_posenc.cli import app
from hf_posenc.evaluation import records
from hf_posenc.serialization import atomic
from hf_posenc.studies import study
from models import first, patched, tokens

SHARDS = {"max_shard_size": "20KB"}


def names(folder):
    return {path.name for path in folder.iterdir()}


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def same_output(folder, model):
    return torch.equal(first(AutoModel.from_pretrained(folder)(tokens())), first(model(tokens())))


def in_child(act):
    """The exit status of a forked process, which is negative for a signal."""
    if not (child := os.fork()):
        try:
            act()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(number, folder, act):
    """Whether a forked process was killed at its `number`-th event (open, rename, remove, …) with a path in a directory."""
    count = itertools.count(1)

    def kill(event, arguments):
        inside = arguments and isinstance(arguments[0], str | Path) and Path(arguments[0]).is_relative_to(folder)
        if inside and next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return in_child(lambda: (sys.addaudithook(kill), act())) == -signal.SIGKILL


@pytest.mark.parametrize(("old_shards", "new_shards"), [({}, SHARDS), (SHARDS, {})], ids=["over one file", "over shards"])
def test_a_killed_save_leaves_the_old_model_the_new_one_or_none(tmp_path, old_shards, new_shards):
    """No mixture can be loaded. The next save removes what the killed one left."""
    old, new, folder = patched("bert", "alibi", seed=1), patched("bert", "relative", seed=2), tmp_path / "folder"
    old.save_pretrained(tmp_path / "old", **old_shards)
    new.save_pretrained(tmp_path / "new", **new_shards)
    seen, number = set(), 1
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "old", folder)
        killed = killed_at(number, folder, lambda: new.save_pretrained(folder, **new_shards))
        left = {str(path) for path in contents(folder)}
        assert not any("posenc-" in path for path in filter_repo_objects(left, ignore_patterns=DEFAULT_IGNORE_PATTERNS))
        try:
            found = first(AutoModel.from_pretrained(folder)(tokens()))
        except ValueError as error:
            assert not (folder / "config.json").exists() and str(folder) in str(error)
            seen.add("none")
        else:
            (which,) = [name for name, model in (("old", old), ("new", new)) if torch.equal(found, first(model(tokens())))]
            seen.add(which)
        if not killed:
            break
        new.save_pretrained(folder, **new_shards)
        assert contents(folder).keys() == contents(tmp_path / "new").keys() and same_output(folder, new)
        number += 7
    assert seen == {"old", "none", "new"} and number > 100


@pytest.mark.parametrize("number", [1, 2, 20])
def test_ctrl_c_while_files_are_renamed(tmp_path, monkeypatch, number):
    patched("bert", "alibi").save_pretrained(tmp_path)
    replace, count, model = os.replace, itertools.count(1), patched("bert", "relative")

    def interrupted(*paths):
        if Path(paths[1]).parent == tmp_path:
            assert not (tmp_path / "config.json").exists(), "config.json is the last file"
            if next(count) == number:
                raise KeyboardInterrupt
        replace(*paths)

    with monkeypatch.context() as patching, pytest.raises(KeyboardInterrupt):
        patching.setattr(os, "replace", interrupted)
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json"):
        AutoModel.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    assert same_output(tmp_path, model) and not list(tmp_path.glob(".*"))


def test_links_are_replaced_and_what_they_point_to_stays(tmp_path, monkeypatch):
    """A snapshot in the Hub's cache is a directory of links."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    patched("bert", "alibi").save_pretrained(blobs)
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    before = contents(blobs)
    (tmp_path / "link").symlink_to("snapshot")
    (tmp_path / "dangling").symlink_to("later")
    monkeypatch.chdir(tmp_path)
    for given, written in (("link/", snapshot), ("./dangling", tmp_path / "later")):
        patched("bert", "relative").save_pretrained(given)
        assert Path(given).is_symlink() and same_output(written, patched("bert", "relative"))
    assert contents(blobs) == before
    assert not (snapshot / "config.json").is_symlink() and not (snapshot / "model.safetensors").is_symlink()


def test_other_files_stay_and_superseded_weights_go(tmp_path):
    others = {"README.md", "tokenizer.json", "model.fp16.safetensors", "model.md", "model-best.safetensors", "posenc_mine.py"}
    for name in others:
        (tmp_path / name).write_text("mine")
    model = patched("bert", "alibi")
    model.save_pretrained(tmp_path, **SHARDS)
    assert {"model.safetensors.index.json", "model-00001-of-00005.safetensors"} < names(tmp_path)
    for how in ({}, {"variant": "fp16"}):
        model.save_pretrained(tmp_path, **how)
        left = names(tmp_path) - others
        assert {name for name in left if not name.endswith(".py")} == {"config.json", "model.safetensors"}
    assert all((tmp_path / name).read_text() == "mine" for name in others - {"model.fp16.safetensors"})
    model.save_pretrained(tmp_path / "other rank", is_main_process=False)
    assert not names(tmp_path / "other rank")


def test_saving_into_the_folder_that_a_model_is_mapped_from(tmp_path):
    patched("bert", "relative", seed=1).save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    patched("bert", "relative").save_pretrained(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in AutoModel.from_pretrained(tmp_path).state_dict().items())


def test_a_file_in_the_folders_place(tmp_path):
    path = tmp_path / "model"
    path.write_text("mine")
    model = patched("bert", "alibi")
    for save in (model.save_pretrained, model.config.save_pretrained):
        with pytest.raises(OSError, match=str(path)):
            save(path)
    assert path.read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "setuid") or os.getuid() != 0, reason="another user is needed")
def test_a_directory_that_is_not_writable(tmp_path):
    model = patched("bert", "alibi")
    model.save_pretrained(tmp_path)
    before = contents(tmp_path)
    for path in (tmp_path, *tmp_path.parents[:3]):
        path.chmod(0o755)

    def refused():
        os.setuid(65534)
        with pytest.raises(PermissionError, match=str(tmp_path)):
            patched("bert", "relative").save_pretrained(tmp_path)

    assert in_child(refused) == 0 and contents(tmp_path) == before


@contextlib.contextmanager
def small_files(size):
    """Limits the size of each file to a number of bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("there", [False, True], ids=["new", "over another"])
def test_a_full_disk_changes_nothing(tmp_path, there):
    folder = tmp_path / "model"
    if there:
        patched("bert", "alibi").save_pretrained(folder)
    before = contents(tmp_path)
    with small_files(20_000), pytest.raises(Exception, match="File too large"):  # enough for a config, not for weights
        patched("bert", "rope").save_pretrained(folder)
    assert contents(tmp_path) == before and folder.exists() == there


# One file, replaced completely or not at all.


def write_card(folder):
    cards = CliRunner().invoke(app, ["--debug", "model-card", str(folder), "--output", str(folder / "README.md")])
    raise cards.exception


WRITERS = {
    "evaluation.json": lambda folder: records.write(folder / "evaluation.json", {"name": "d" * 20_000}),
    "README.md": write_card,
    "study.json": lambda folder: study.write(folder / "study.json", {"rows": ["row"] * 5000}),
    "figure.svg": lambda folder: plots.waves("sinusoidal", path=folder / "figure.svg"),
    "page.md": lambda folder: records.fill(folder / "page.md", ("<!-- a -->", "<!-- b -->"), "x" * 20_000),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_destroys_no_file(tmp_path, name):
    """The operating system allows no writes of more than 10,000 bytes to one file."""
    patched("bert", "alibi").save_pretrained(tmp_path)
    before = {"evaluation.json": '{"results": []}', "page.md": "<!-- a --><!-- b -->"}.get(name, "old")
    (tmp_path / name).write_text(hf_posenc.model_card(tmp_path, "me/model") if name == "README.md" else before)
    old = contents(tmp_path)
    with small_files(1_000 if name == "README.md" else 10_000), pytest.raises(OSError, match="File too large"):
        WRITERS[name](tmp_path)
    assert contents(tmp_path) == old


def test_permissions_and_symlinks_of_a_replaced_file(tmp_path):
    (tmp_path / "there").mkdir()
    old, link = tmp_path / "there" / "old.json", tmp_path / "link.json"
    old.write_text("old")
    old.chmod(0o640)
    link.symlink_to(Path("there", "old.json"))
    with pytest.raises(KeyboardInterrupt), atomic.atomic_file(link) as file:
        file.write("new")
        raise KeyboardInterrupt
    assert old.read_text() == "old"
    atomic.write_text(link, "é")
    assert link.is_symlink() and old.read_bytes() == "é".encode() and old.stat().st_mode & 0o777 == 0o640
    assert len(contents(tmp_path)) == 2


def test_pipes_are_written_directly(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    atomic.write_text(tmp_path / "pipe", "text")
    assert os.read(reading, 10) == b"text" and names(tmp_path) == {"pipe"}
    os.close(reading)
