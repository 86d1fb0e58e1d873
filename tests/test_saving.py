"""Saves that are whole or not at all: killed, over links, over what others have left, and the labels of weight files."""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from huggingface_hub.utils._paths import DEFAULT_IGNORE_PATTERNS
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

import hf_posenc
from conftest import first, patched, run_python, tokens
from hf_posenc import saving
from hf_posenc.cli.folders import check_output_dir

SHARDS = {"max_shard_size": "20KB"}


@pytest.mark.parametrize(
    ("moments", "cases"),
    [
        (0, ["another encoding", "other shards", "one to shards"]),
        pytest.param(0, ["other weights", "fewer shards", "shards to one"], marks=pytest.mark.slow),
        pytest.param(100, ["another encoding", "other shards"], marks=pytest.mark.slow),
    ],
)
def test_a_killed_save_leaves_the_old_model_the_new_one_or_an_error(tmp_path, moments, cases):
    said = run_python("import sys, killed; killed.main(*sys.argv[1:])", tmp_path, moments, *cases, timeout=600)
    for case, outcomes in json.loads(said.splitlines()[-1]).items():
        assert set(outcomes) <= {"old", "refused", "new"} and len(outcomes) >= 2, (case, outcomes)
        assert moments or len(outcomes) == 3, (case, outcomes)


def leave(folder, write=lambda files: (files / "model.safetensors").touch()):
    """A save into `folder` that a kill ends before anything is moved."""
    if not (child := os.fork()):
        with saving.replaced(folder) as files:
            write(files)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [path for path in folder.iterdir() if path.name.startswith(saving.PREFIX)]


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_leftovers_are_removed_by_the_next_save_and_those_of_a_living_process_stay(tmp_path):
    model = patched("bert", "alibi")
    leave(tmp_path)
    with saving.replaced(tmp_path) as files:
        (files / "notes.txt").write_text("mine")
        model.save_pretrained(tmp_path)
        assert len(list(tmp_path.glob(f"{saving.PREFIX}*"))) == 1
    assert not list(tmp_path.glob(".*")) and {"notes.txt", "config.json", "model.safetensors"} < names(tmp_path)


def test_leftovers_hinder_no_save_and_no_push(tmp_path):
    model, folder = patched("bert", "alibi"), tmp_path / "folder"
    folder.mkdir()
    leave(folder)
    check_output_dir(folder, overwrite=False)
    hf_posenc.push_to_hub(model, "me/model", save_directory=folder)
    leave(folder)
    pushed = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    assert not any(saving.PREFIX in path for path in filter_repo_objects(pushed, ignore_patterns=DEFAULT_IGNORE_PATTERNS))
    hf_posenc.push_to_hub(model, "me/model", save_directory=folder)
    assert not list(folder.glob(f"{saving.PREFIX}*"))


def test_an_interrupted_save_is_refused_by_every_way_to_load(tmp_path):
    """Killed when the weights have been moved and config.json has not."""
    model = patched("bert", "relative")
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)

    def kill_before_the_config(event, arguments):
        if (
            event == "os.rename"
            and Path(arguments[1]) == tmp_path / "config.json"
            and Path(arguments[0]).parent.name == "files"
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    if not (child := os.fork()):
        sys.addaudithook(kill_before_the_config)
        model.save_pretrained(tmp_path)
    os.waitpid(child, 0)
    for load in (
        lambda: AutoConfig.from_pretrained(tmp_path),
        lambda: AutoModel.from_pretrained(tmp_path),
        lambda: AutoModel.from_pretrained(tmp_path, config=config),
        lambda: hf_posenc.PosEncBertModel.from_pretrained(tmp_path),
        lambda: hf_posenc.inspect(tmp_path),
    ):
        with pytest.raises(ValueError, match=r"last save into .* was interrupted.*save the model again"):
            load()
    model.save_pretrained(tmp_path)
    assert torch.equal(first(AutoModel.from_pretrained(tmp_path)(tokens())), first(model(tokens())))


def test_links_are_replaced_and_what_they_point_to_stays(tmp_path):
    """A snapshot in the Hub's cache is a folder of links."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    patched("bert", "alibi").save_pretrained(blobs)
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    before = {path: path.read_bytes() for path in blobs.iterdir()}
    (tmp_path / "link").symlink_to(snapshot)
    model = patched("bert", "relative")
    model.save_pretrained(tmp_path / "link")
    assert {path: path.read_bytes() for path in blobs.iterdir()} == before and (tmp_path / "link").is_symlink()
    assert not (snapshot / "config.json").is_symlink() and not (snapshot / "model.safetensors").is_symlink()
    assert torch.equal(first(AutoModel.from_pretrained(snapshot)(tokens())), first(model(tokens())))


def test_other_files_stay_and_superseded_weights_go(tmp_path):
    others = {"README.md", "tokenizer.json", "model.fp16.safetensors", "model.md", "model-best.safetensors"}
    for name in others:
        (tmp_path / name).write_text("mine")
    patched("bert", "alibi").save_pretrained(tmp_path, **SHARDS)
    assert {"model.safetensors.index.json", "model-00001-of-00005.safetensors"} < names(tmp_path)
    for how, weights in (({}, {"model.safetensors"}), ({"variant": "fp16"}, {"model.safetensors"})):
        patched("bert", "alibi").save_pretrained(tmp_path, **how)
        assert {name for name in names(tmp_path) if "model" in name} == others - {"README.md", "tokenizer.json"} | weights | {
            "modeling_posenc.py",
            "posenc_modeling.py",
        }
    assert all((tmp_path / name).read_text() == "mine" for name in others - {"model.fp16.safetensors"})


def test_saving_into_the_folder_that_a_model_is_mapped_from(tmp_path):
    patched("bert", "relative", seed=1).save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    patched("bert", "relative", seed=2).save_pretrained(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in AutoModel.from_pretrained(tmp_path).state_dict().items())


def test_a_file_in_the_folders_place(tmp_path):
    path = tmp_path / "model"
    path.write_text("mine")
    model = patched("bert", "alibi")
    for save in (model.save_pretrained, model.config.save_pretrained):
        with pytest.raises(ValueError, match="model is a file: give a folder"):
            save(path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("there", [False, True], ids=["new", "over another"])
def test_a_full_disk_changes_nothing(tmp_path, there):
    folder = tmp_path / "model"
    if there:
        patched("bert", "alibi").save_pretrained(folder)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # enough for a config, not for weights
    try:
        with pytest.raises(Exception, match="File too large"):
            patched("bert", "rope").save_pretrained(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before and folder.exists() == there


def test_a_config_saved_over_weights_of_another_encoding(tmp_path):
    patched("bert", "alibi").save_pretrained(tmp_path)
    patched("bert", "rope").config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="was saved with the 'alibi' encoding, and its config asks for 'rope': restore"):
        AutoModel.from_pretrained(tmp_path)
    same = patched("bert", "alibi").config
    same.layer_norm_eps = 1e-3
    same.save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path).config.layer_norm_eps == 1e-3


def relabel(path, label):
    save_file(load_file(path), path, metadata={"format": "pt", **({} if label is None else {"position_encoding": label})})


def test_shards_of_several_saves(tmp_path):
    """An unlabelled one among labelled ones, one with other options; all without labels, as other tools write them, load."""
    model = patched("bert", "rope")
    model.save_pretrained(tmp_path, **SHARDS)
    paths = sorted(tmp_path.glob("*.safetensors"))
    for label in (None, json.dumps({**model.config.position_encoding, "theta": 5.0})):
        relabel(paths[1], label)
        with pytest.raises(ValueError, match=r"00001-of-00005.safetensors and .*00002-of-00005.safetensors are of two saves"):
            AutoModel.from_pretrained(tmp_path)
    for path in paths:
        relabel(path, None)
    assert torch.equal(first(AutoModel.from_pretrained(tmp_path)(tokens())), first(model(tokens())))


@pytest.mark.parametrize("label", ["", "null", "[]", '{"type": 7}', "[" * 100_000])
def test_labels_that_are_not_ours(tmp_path, label):
    patched("bert", "alibi").save_pretrained(tmp_path)
    relabel(tmp_path / "model.safetensors", label)
    with pytest.raises(ValueError, match="was saved with the .* encoding, and its config asks for 'alibi'"):
        AutoModel.from_pretrained(tmp_path)


def test_options_may_differ_from_the_label(tmp_path):
    patched("bert", "rope").save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, position_encoding={"type": "rope", "theta": 5.0})
    assert model.config.position_encoding["theta"] == 5.0
    config = json.loads((tmp_path / "config.json").read_text())
    config["position_encoding"]["theta"] = 7.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert AutoModel.from_pretrained(tmp_path).config.position_encoding["theta"] == 7.0


def test_on_other_ranks_nothing_is_saved(tmp_path):
    patched("bert", "alibi").save_pretrained(tmp_path / "model", is_main_process=False)
    assert not names(tmp_path / "model")
