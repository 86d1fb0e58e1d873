"""Copies of a directory in each state in which a killed process could leave it.

A copy is made before each Python audit event that names a path in the directory. As after a kill, a copy has no locks and lacks
the data in the buffers of the process.

`main(DIRECTORY, EVERY, CASE…)` saves models over others. For each case, it prints the number of copies by outcome, as JSON.
"""

import json
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModel

from models import patched

SHARDS = {"max_shard_size": "20KB"}
CASES = {
    "another encoding": (("relative", {}, {}), ("sinusoidal+alibi", {"intermediate_size": 40}, {})),
    "other weights": (("relative", {"seed": 1}, {}), ("relative", {"seed": 2, "layer_norm_eps": 1e-3}, {})),
    "other shards": (("relative", {"seed": 1}, SHARDS), ("relative", {"seed": 2}, SHARDS)),
    "fewer shards": (("learned", {"seed": 1}, SHARDS), ("learned", {"seed": 2}, {"max_shard_size": "40KB"})),
    "shards to one": (("alibi", {"seed": 1}, SHARDS), ("alibi", {"seed": 2}, {})),
    "one to shards": (("alibi", {"seed": 1}, {}), ("alibi", {"seed": 2}, SHARDS)),
}


_current = None


def _watch(event, arguments):
    global _current
    if _current is not None:
        watcher, _current = _current, None  # copying also causes events
        try:
            watcher(event, arguments)
        finally:
            _current = watcher


sys.addaudithook(_watch)


def states(folder, act, every=True, inside=True):
    """The copies of `folder` before the events of `act`, and after it.

    every: whether to return all copies. Otherwise, the result has the first and the last copy of each kind of event. The kind
        is the event with the directories and suffixes of its files.
    inside: whether to include events in subdirectories, and those of code. The code has 40 files that are written alike.
    """
    global _current
    copies, kinds = folder.parent / "copies", []
    shutil.rmtree(copies, ignore_errors=True)

    def of_path(path):
        if not path.is_relative_to(folder) or not inside and (folder not in (path, path.parent) or path.suffix == ".py"):
            return ""
        name = path.name if path.name == "config.json" or path == folder else path.suffix
        return re.sub(r"\.posenc-\w+", ".posenc", f"{path.parent.relative_to(folder.parent)}/{name}")

    def copy(event, arguments):
        places = [of_path(Path(each)) for each in arguments[:2] if isinstance(each, str | Path)]
        if any(places):
            shutil.copytree(folder, copies / str(len(kinds)), symlinks=True)
            kinds.append((event, *places))

    _current = copy
    try:
        act()
    finally:
        _current = None
    shutil.copytree(folder, copies / str(len(kinds)), symlinks=True)
    some = {
        ends[kind]
        for ends in ({k: n for n, k in enumerate(kinds)}, {k: n for n, k in [*enumerate(kinds)][::-1]})
        for kind in kinds
    }
    return [copies / str(number) for number in (range(len(kinds) + 1) if every else sorted({*some, len(kinds)}))]


def content(model):
    return {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}, model.state_dict()


def equal(one, other):
    (config, tensors), (other_config, others) = one, other
    same = config == other_config and tensors.keys() == others.keys()
    return same and all(torch.equal(tensors[name], others[name]) for name in tensors)


def outcome(folder, old, new):
    try:
        loaded = content(AutoModel.from_pretrained(folder))
    except ValueError as error:
        return "refused" if "interrupted" in str(error) and "save the model again" in str(error) else f"{error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "old" if equal(loaded, old) else "new" if equal(loaded, new) else "a mixture"


def outcomes_of(work, case, every):
    (encoding, changes, how), (next_encoding, next_changes, next_how) = case
    patched("bert", encoding, **changes).save_pretrained(work / "old", **how)
    model = patched("bert", next_encoding, **next_changes)
    model.save_pretrained(work / "new", **next_how)
    old, new = (content(AutoModel.from_pretrained(work / name)) for name in ("old", "new"))
    outcomes, folder = Counter(), shutil.copytree(work / "old", work / "folder")
    for turn, state in enumerate(states(folder, lambda: model.save_pretrained(folder, **next_how), every, inside=False)):
        outcomes[outcome(state, old, new)] += 1
        if turn % 5 == 0:
            model.save_pretrained(state, **next_how)
            left = set(os.listdir(state)) - {*os.listdir(work / "old"), *os.listdir(work / "new")}
            if left or outcome(state, old, new) != "new":
                outcomes[f"after the next save: {outcome(state, old, new)} {left}"] += 1
    return outcomes


def main(folder, every, *names):
    print(json.dumps({name: outcomes_of(Path(folder, name), CASES[name], every == "True") for name in names}))
