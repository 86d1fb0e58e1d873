"""Atomic saves: when killed, over links, over existing files, and the labels of weight files."""

import ast
import contextlib
import errno
import itertools
import json
import os
import re
import resource
import shutil
import signal
import stat
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from huggingface_hub.utils._paths import DEFAULT_IGNORE_PATTERNS
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel
from typer.testing import CliRunner

import hf_posenc
from conftest import ROOT, run_python
from hf_posenc import plots
from hf_posenc.cli import app
from hf_posenc.cli.folders import _obsolete, check_output_dir
from hf_posenc.evaluation import records
from hf_posenc.serialization import atomic
from hf_posenc.studies import study
from killed import CASES, SHARDS, states
from models import first, patched, slow, tokens


@pytest.mark.parametrize(("every", "cases"), [(False, ["one to shards"]), slow(True, [*CASES])], ids=["some", "all"])
def test_a_killed_save_leaves_the_old_model_the_new_one_or_an_error(tmp_path, every, cases):
    """This holds at every event of the save, or at some events of each kind."""
    said = run_python("import sys, killed; killed.main(*sys.argv[1:])", tmp_path, every, *cases, timeout=600)
    for case, outcomes in json.loads(said.splitlines()[-1]).items():
        assert set(outcomes) == {"old", "refused", "new"}, (case, outcomes)


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


def kill_before_rename(target, act):
    """Kills a forked process when `act` is about to rename a new file to `target`."""

    def kill(event, arguments):
        if event == "os.rename" and str(arguments[1]) == str(target) and Path(arguments[0]).parent.name == "files":
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(lambda: (sys.addaudithook(kill), act())) == -signal.SIGKILL


def leave(folder):
    """Starts a save into `folder` that is killed before any file is moved."""

    def act():
        with atomic.replaced(folder) as files:
            (files / "model.safetensors").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(act) == -signal.SIGKILL and list(folder.glob(f"{atomic.PREFIX}*"))


def test_leftovers_go_with_the_next_save_or_push_and_hinder_neither(tmp_path):
    """Temporary files of a running process stay."""
    model, folder = patched("bert", "alibi"), tmp_path / "folder"
    leave(tmp_path)
    with atomic.replaced(tmp_path) as files:
        (files / "notes.txt").write_text("mine")
        model.save_pretrained(tmp_path)
        assert len(list(tmp_path.glob(f"{atomic.PREFIX}*"))) == 1
    assert not list(tmp_path.glob(".*")) and {"notes.txt", "config.json", "model.safetensors"} < names(tmp_path)
    folder.mkdir()
    leave(folder)
    check_output_dir(folder, overwrite=False)
    hf_posenc.push_to_hub(model, "me/model", save_directory=folder)
    leave(folder)
    pushed = map(str, contents(folder))
    assert not any(atomic.PREFIX in path for path in filter_repo_objects(pushed, ignore_patterns=DEFAULT_IGNORE_PATTERNS))
    hf_posenc.push_to_hub(model, "me/model", save_directory=folder)
    assert not list(folder.glob(f"{atomic.PREFIX}*"))


def test_an_interrupted_save_is_refused_by_every_way_to_load(tmp_path):
    """The save is killed after moving the weights, and before moving config.json."""
    model = patched("bert", "relative")
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    kill_before_rename(tmp_path / "config.json", lambda: model.save_pretrained(tmp_path))
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
    assert same_output(tmp_path, model)


def test_links_are_replaced_and_what_they_point_to_stays(tmp_path):
    """A snapshot in the Hub's cache is a directory of links."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    patched("bert", "alibi").save_pretrained(blobs)
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    before = contents(blobs)
    (tmp_path / "link").symlink_to(snapshot)
    patched("bert", "relative").save_pretrained(tmp_path / "link")
    assert contents(blobs) == before and (tmp_path / "link").is_symlink()
    assert not (snapshot / "config.json").is_symlink() and not (snapshot / "model.safetensors").is_symlink()
    assert same_output(snapshot, patched("bert", "relative"))


def test_other_files_stay_and_superseded_weights_go(tmp_path):
    others = {"README.md", "tokenizer.json", "model.fp16.safetensors", "model.md", "model-best.safetensors"}
    for name in others:
        (tmp_path / name).write_text("mine")
    model = patched("bert", "alibi")
    model.save_pretrained(tmp_path, **SHARDS)
    assert {"model.safetensors.index.json", "model-00001-of-00005.safetensors"} < names(tmp_path)
    for how in ({}, {"variant": "fp16"}):
        model.save_pretrained(tmp_path, **how)
        assert {name for name in names(tmp_path) if not name.endswith(".py")} == others | {"config.json", "model.safetensors"}
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
        with pytest.raises(ValueError, match="model is a file"):
            save(path)
    assert path.read_text() == "mine"


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


# The labels of weight files.


def test_a_config_saved_over_weights_of_another_encoding(tmp_path):
    patched("bert", "alibi").save_pretrained(tmp_path)
    patched("bert", "rope").config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="was saved.*'alibi' encoding, but its config names 'rope'"):
        AutoModel.from_pretrained(tmp_path)
    same = patched("bert", "alibi").config
    same.layer_norm_eps = 1e-3
    same.save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path).config.layer_norm_eps == 1e-3


def relabel(path, label):
    save_file(load_file(path), path, metadata={"format": "pt", **({} if label is None else {"position_encoding": label})})


def test_shards_of_several_saves(tmp_path):
    """A mixture of labeled and unlabeled shards, or of shards with different options, raises an error. Shards of other tools
    without labels load.
    """
    model = patched("bert", "rope")
    model.save_pretrained(tmp_path, **SHARDS)
    paths = sorted(tmp_path.glob("*.safetensors"))
    for label in (None, json.dumps({**model.config.position_encoding, "theta": 5.0})):
        relabel(paths[1], label)
        with pytest.raises(ValueError, match=r"00001-of-00005.safetensors and .*00002-of-00005.safetensors are from two saves"):
            AutoModel.from_pretrained(tmp_path)
    for path in paths:
        relabel(path, None)
    assert same_output(tmp_path, model)


def test_labels_that_are_not_ours(tmp_path):
    patched("bert", "alibi").save_pretrained(tmp_path)
    for label in ("", "null", "[]", '{"type": 7}', "[" * 100_000):
        relabel(tmp_path / "model.safetensors", label)
        with pytest.raises(ValueError, match="was saved with the .* encoding, but its config names 'alibi'"):
            AutoModel.from_pretrained(tmp_path)


def test_labels_that_are_no_json_are_in_the_error(tmp_path):
    patched("bert", "alibi").save_pretrained(tmp_path)
    relabel(tmp_path / "model.safetensors", "of another program")
    with pytest.raises(ValueError, match="was saved.*program' encoding"):
        AutoModel.from_pretrained(tmp_path)


def test_a_written_file_is_on_disk_with_its_directory(tmp_path, monkeypatch):
    """No file stays open, and a second writer of the same file doesn't treat the first one's file as left over."""
    flushed, flush = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino) or flush(descriptor))
    opened = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    with atomic.atomic_file(tmp_path / "a.txt") as file:
        file.write("first")
        with atomic.atomic_file(tmp_path / "a.txt") as other:
            other.write("second")
    assert (tmp_path / "a.txt").read_text() == "first" and [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert flushed.count(tmp_path.stat().st_ino) == 2 and (tmp_path / "a.txt").stat().st_ino in flushed
    assert opened is None or len(os.listdir("/proc/self/fd")) == opened


def test_options_may_differ_from_the_label(tmp_path):
    patched("bert", "rope").save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, position_encoding={"type": "rope", "theta": 5.0})
    assert model.config.position_encoding["theta"] == 5.0
    config = json.loads((tmp_path / "config.json").read_text())
    config["position_encoding"]["theta"] = 7.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert AutoModel.from_pretrained(tmp_path).config.position_encoding["theta"] == 7.0


# One file, replaced completely or not at all.


def add_results(folder):
    result = {"model": "new", "task": "t", "metric": "m", "length": 1, "dataset": {"name": "d" * 20_000}}
    records.add(folder, [result])


def write_card(folder):
    cards = CliRunner().invoke(app, ["--debug", "model-card", str(folder), "--output", str(folder / "README.md")])
    raise cards.exception


WRITERS = {
    "evaluation.json": add_results,
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
    with small_files(1_000 if name == "README.md" else 10_000), pytest.raises(OSError, match="was not changed. Free") as raised:
        WRITERS[name](tmp_path)
    assert raised.value.errno == errno.EFBIG and str(tmp_path / name) in str(raised.value)
    assert contents(tmp_path) == old and ".part" not in str(raised.value)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_permissions_and_symlinks_of_a_replaced_file(tmp_path, umask):
    (tmp_path / "there").mkdir()
    old, new, link = tmp_path / "there" / "old.json", tmp_path / "new.json", tmp_path / "link.json"
    old.write_text("old")
    old.chmod(0o640)
    link.symlink_to(Path("there", "old.json"))
    umask = os.umask(umask)
    try:
        for path in (link, new):
            atomic.write_text(path, "é")
    finally:
        given = os.umask(umask)
    assert link.is_symlink() and old.read_bytes() == new.read_bytes() == "é".encode()
    assert old.stat().st_mode & 0o777 == 0o640 and new.stat().st_mode & 0o777 == 0o666 & ~given
    assert len(contents(tmp_path)) == 3


def test_a_file_stays_if_writing_it_raises(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    for error in (KeyboardInterrupt, ValueError("mine")):
        with pytest.raises(error if isinstance(error, type) else ValueError), atomic.atomic_file(path) as file:
            file.write("new")
            raise error
    assert contents(tmp_path) == {Path("a.txt"): b"old"}
    with pytest.raises(IsADirectoryError), atomic.atomic_file(tmp_path):
        pass
    with pytest.raises(FileNotFoundError), atomic.atomic_file(tmp_path / "nowhere" / "a.txt"):
        pass
    with pytest.raises(ValueError, match="mode='a' isn't supported"), atomic.atomic_file(path, "a"):
        pass


def test_devices_and_pipes_are_written_not_replaced_and_other_hidden_files_stay(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    atomic.write_text(tmp_path / "pipe", "text")
    assert os.read(reading, 10) == b"text" and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    os.close(reading)
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        atomic.write_text(tmp_path / "full", "text")
    (tmp_path / ".data.zip.part").write_text("half a download")
    atomic.write_text(tmp_path / "data", "x")
    assert names(tmp_path) == {"pipe", "full", "data", ".data.zip.part"}


def test_a_killed_write_of_a_file_leaves_the_old_or_the_new_one(tmp_path):
    folder, seen = tmp_path / "folder", set()
    put(folder, {"a.json": "old"})
    for state in states(folder, lambda: atomic.write_text(folder / "a.json", "new")):
        seen.add((state / "a.json").read_text())
        atomic.write_text(state / "a.json", "newest")
        assert contents(state) == {Path("a.json"): b"newest"}, "the next write removes what is left"
    assert seen == {"old", "new"}


# Files of a directory, replaced together.


def model_of(kind, name):
    """The files of a fake model: original or with positions, in one file or in shards."""
    config = {"model_type": kind, "name": name} | ({"position_encoding": {"type": name}} if kind == "posenc" else {})
    weights = (
        {"model.safetensors": name}
        if name in "ab"
        else {f"model-{n:05}-of-00002.safetensors": name for n in (1, 2)} | {"model.safetensors.index.json": name}
    )
    extra = {"tokenizer.json": name, "modules.json": '[{"path": "1_Pooling"}]', "1_Pooling/config.json": name}
    return {"config.json": json.dumps(config), "generation_config.json": name, **weights, **(extra if name in "ac" else {})}


def put(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def save_over(folder, files):
    with atomic.replaced(folder, _obsolete) as new:
        put(new, files)


def shown(folder, files):
    """Whether a directory holds exactly these files, without temporary ones."""
    found = {str(path): text.decode() for path, text in contents(folder).items() if atomic.PREFIX not in str(path)}
    return found == files


MODELS = [("stock", "a"), ("posenc", "b"), ("stock", "c"), ("posenc", "d")]


@pytest.mark.parametrize(
    ("before", "after", "every"),
    [(MODELS[before], MODELS[after], False) for before, after in ((1, 2), (2, 3))]
    + [slow(before, after, True) for before, after in itertools.permutations(MODELS, 2)],
)
def test_a_save_killed_anywhere_is_complete_or_undone(tmp_path, caplog, before, after, every):
    """Models may be original or with positions, in one file or in shards, with or without a tokenizer and modules."""
    folder, seen = tmp_path / "folder", set()
    old, new, notes = model_of(*before), model_of(*after), {"notes.txt": "mine", "checkpoint-1/config.json": "mine"}

    def outcome(state):
        atomic.recover(state)
        outcome = "old" if shown(state, old | notes) else "new" if shown(state, new | notes) else "a mixture"
        assert outcome != "a mixture" and not list(state.glob(".*"))
        return outcome

    put(folder, old | notes)
    for state in states(folder, lambda: save_over(folder, new), every):
        config = atomic.json_of(state / "config.json")
        mixed = not (shown(state, old | notes) or shown(state, new | notes))
        assert not mixed or config is None or atomic.MARKER in config, "a mixture of old and new can be loaded"
        caplog.clear()
        again = shutil.copytree(state, tmp_path / "again" / state.name / "folder")
        seen.add(found := outcome(state))
        if mixed:
            assert found == "old" and "has been undone; the earlier files are kept" in caplog.text
            for killed in states(again, lambda again=again: atomic.recover(again), every)[1::5]:
                assert outcome(killed) == "old"
        save_over(state, new)
        assert shown(state, new | notes)
    assert seen == {"old", "new"}


@pytest.mark.parametrize("number", [1, 2, 3, 7, 10, 12])
def test_ctrl_c_while_files_are_replaced(tmp_path, monkeypatch, number):
    """An incomplete save is undone before the program ends. The last rename completes it."""
    put(tmp_path, model_of("stock", "a"))
    replace, count = os.replace, itertools.count(1)

    def interrupted(*paths):
        if next(count) == number:
            raise KeyboardInterrupt
        replace(*paths)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_over(tmp_path, model_of("posenc", "d"))
    assert shown(tmp_path, model_of("stock", "a")) and next(count) > number
    assert not list(tmp_path.glob(".*"))


def test_an_interrupted_save_is_dropped_if_another_program_has_saved_since(tmp_path, caplog):
    put(tmp_path, model_of("stock", "a"))
    kill_before_rename(tmp_path / "model.safetensors", lambda: save_over(tmp_path, model_of("stock", "b")))
    assert not (tmp_path / "config.json").exists()
    put(tmp_path, model_of("stock", "a"))
    atomic.recover(tmp_path)
    assert shown(tmp_path, model_of("stock", "a")) and "has been undone" in caplog.text


@pytest.mark.parametrize("name", ["../outside.txt", "/tmp/outside.txt", "link/outside.txt", "", "..", 3])
@pytest.mark.parametrize("kind", ["move", "remove"])
def test_a_journal_changes_nothing_outside_its_directory(tmp_path, name, kind):
    """A downloaded directory can contain any journal."""
    folder, outside = tmp_path / "folder", tmp_path / "outside.txt"
    outside.write_text("mine")
    journal = {"marker": False, "flush": False, "move": ["a"], "remove": [], kind: [name]}
    temporary = ".posenc-x/.cache/huggingface"
    put(folder, {"notes.txt": "mine", f"{temporary}/files/a": "a", f"{temporary}/journal.json": json.dumps(journal)})
    (folder / "link").symlink_to(tmp_path)
    atomic.recover(folder)
    assert outside.read_text() == "mine" and names(folder) == {"notes.txt", "link"}


def test_processes_save_to_one_directory(tmp_path):
    models, children = [model_of(*each) for each in MODELS], []
    for files in models:
        if not (child := os.fork()):
            for _ in range(10):
                save_over(tmp_path, files)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert any(shown(tmp_path, files) for files in models) and not list(tmp_path.glob(".*"))


def test_paths_of_output_directories(tmp_path, monkeypatch):
    """The path may be relative, end with a slash, be a symlink, or be a dangling symlink. The current directory may change
    meanwhile.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dangling").symlink_to("later")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for given, found in (("a/", "a"), ("./b/../b", "b"), ("dangling", "later"), ("link/", "real")):
        with atomic.replaced(given) as files:
            os.chdir("/")
            put(files, model_of("stock", "a"))
        os.chdir(tmp_path)
        assert shown(tmp_path / found, model_of("stock", "a")), given
    assert (tmp_path / "link").is_symlink() and (tmp_path / "dangling").is_symlink()


def test_a_directory_in_the_place_of_a_new_file(tmp_path):
    files = model_of("stock", "b")
    put(tmp_path, {"config.json": "{}", "generation_config.json/mine": "mine"})
    with (
        pytest.raises(ValueError, match="generation_config.json is a directory"),
        atomic.replaced(tmp_path) as new,
    ):
        put(new, files)
    assert contents(tmp_path) == {Path("config.json"): b"{}", Path("generation_config.json/mine"): b"mine"}


@pytest.mark.skipif(not hasattr(os, "setuid") or os.getuid() != 0, reason="another user is needed")
def test_a_directory_that_is_not_writable(tmp_path):
    put(tmp_path, model_of("stock", "a"))
    for path in (tmp_path, *tmp_path.parents[:3]):
        path.chmod(0o755)

    def refused():
        os.setuid(65534)
        for act in (lambda: save_over(tmp_path, {}), lambda: atomic.write_text(tmp_path / "notes.txt", "mine")):
            with pytest.raises(PermissionError, match="was not changed. Make it writable, or choose another path"):
                act()
        with pytest.raises(ValueError, match="isn't writable.*permissions"):
            check_output_dir(tmp_path / "new" / "model", overwrite=True)

    assert in_child(refused) == 0 and shown(tmp_path, model_of("stock", "a"))


@pytest.mark.parametrize("link", ["old", "files", "."])
def test_recovery_moves_nothing_through_symlinks(tmp_path, link):
    """A downloaded directory may contain a journal and symlinks to other directories."""
    model, victim = tmp_path / "model", tmp_path / "victim"
    put(victim, dict.fromkeys(("key", "journal.json", "config.json"), "{}"))
    temporary = model / ".posenc-x" / ".cache" / "huggingface"
    put(model, model_of("stock", "a"))
    temporary.parent.mkdir(parents=True)
    if link != ".":
        journal = json.dumps({"move": ["key", "z", "config.json"], "remove": []})
        put(temporary, {f"{'files' if link == 'old' else 'old'}/z": "", "journal.json": journal})
    (temporary / link).symlink_to(victim)
    before = contents(tmp_path)
    atomic.recover(model)
    assert contents(tmp_path) == before


# Every write in the package and the scripts is atomic.


WRITES = {
    *("write_text", "write_bytes", "writelines", "savefig", "to_csv", "to_json", "to_parquet", "tofile", "save_pretrained"),
    *("save_file", "save_model", "save", "savez", "savez_compressed", "savetxt", "imsave", "dump", "copyfile", "copy2"),
    *("copytree", "move", "rename", "renames", "touch", "symlink_to", "hardlink_to", "copyfileobj"),
}


QUALIFIED = {"shutil.copy", "os.replace", "os.link", "os.symlink", "os.truncate", "os.open"}


ATOMIC = {"atomic_file", "replaced", "new_directory", "TemporaryDirectory"}
"""Within these, written files aren't visible yet."""


ELSEWHERE = {
    "hf_posenc/serialization/atomic.py": "the atomic writers themselves",
    "hf_posenc/serialization/mixins.py:_write_metadata": "in the temporary directory of save_pretrained",
    "hf_posenc/serialization/mixins.py:EncodingModelMixin.save_pretrained": "distributed checkpoints are written by all ranks",
    "hf_posenc/serialization/mixins.py:EncodingConfigMixin.save_pretrained": "where the package isn't installed",
    "hf_posenc/serialization/copies.py:copy_code": "where the package isn't installed",
    "hf_posenc/cli/output.py:_reserved_stdout": "a duplicate of standard output",
    "hf_posenc/encodings/determinism.py:": "a pickler of bytes in memory",
    "hf_posenc/explorer/encodings.py:picture": "bytes in memory",
    "hf_posenc/hub/push.py:_keep": "in the temporary directory of push_to_hub",
    "benchmarks/v4.py:environment": "an environment that is new, and made again without its last file",
    "tools/check_support.py:Kept.add": "a line is added to the end",
    "tools/mutate.py:": "a temporary copy of the checkout, and files under build/",
    "hf_posenc/training/output.py:save_model": "in the temporary directory of checkpoints.write and checkpoints.replace",
    "hf_posenc/training/output.py:finish.fill": "in the temporary directory of checkpoints.replace",
    "hf_posenc/training/sentences.py:save": "in the temporary directory of checkpoints.write and checkpoints.replace",
}
"""Other writes: the function, or the beginning of its path -> why it needs no atomic writer."""


OURS = {"atomic.write_text", "sentences.save", "output.save_model"}


def qualified(node):
    if isinstance(node, ast.Attribute):
        return f"{qualified(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else qualified(node.func) if isinstance(node, ast.Call) else "…"


def is_write(call):
    name = qualified(call.func)
    last = name.rpartition(".")[2]
    if name in QUALIFIED:
        return True
    if last in ("open", "fdopen"):
        given = [*call.args[name == "open" :], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
        modes = [str(each.value) for each in given if isinstance(each, ast.Constant)]
        return any(re.fullmatch(r"[rwaxbt+]*[wax+][rwaxbt+]*", mode) for mode in modes)
    return "." in name and last in WRITES and name not in OURS or last == "save_file"


def writes(tree):
    """(qualified function, line) of every write outside an atomic writer."""

    def visit(node, where, safe):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            where = f"{where}.{node.name}" if where else node.name
        if isinstance(node, ast.With):
            used = {qualified(item.context_expr).rpartition(".")[2] for item in node.items}
            safe = safe or bool(used & ATOMIC)
        if isinstance(node, ast.Call) and not safe and is_write(node):
            yield where, node.lineno
        for child in ast.iter_child_nodes(node):
            yield from visit(child, where, safe)

    return visit(tree, "", False)


def test_every_file_is_written_by_the_atomic_writer():
    found = {}
    for folder in ("hf_posenc", "benchmarks", "experiments", "scripts", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for where, line in writes(ast.parse(path.read_text())):
                found[f"{path.relative_to(ROOT)}:{where}"] = line
    allowed = {each for each in ELSEWHERE if any(name.startswith(each) for name in found)}
    wrong = {name: line for name, line in found.items() if not any(name.startswith(each) for each in ELSEWHERE)}
    assert not wrong, "use hf_posenc.serialization.atomic.atomic_file, write_text or replaced"
    assert allowed == ELSEWHERE.keys(), "no longer needed"


def test_the_search_for_writes():
    calls = ["open(path, 'w')", "path.open(mode='ab')", "path.write_text('')", "json.dump(x, file)", "figure.savefig(path)"]
    calls += ["torch.save(x, path)", "save_file(x, path)", "shutil.copy(x, path)", "os.replace(x, path)"]
    for code in (*calls, "frame.to_csv(path)", "model.save_pretrained(path)"):
        assert [*writes(ast.parse(f"def f():\n  {code}"))] == [("f", 2)]
        assert not [*writes(ast.parse(f"with atomic.replaced(folder) as path:\n  {code}"))]
    passed = "open(path)\npath.open('rb')\nopen('wax')\ntext.replace('a', 'b')\natomic.write_text(a, b)"
    assert not [*writes(ast.parse(passed))]
