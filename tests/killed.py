"""Kills saves over an existing folder by SIGKILL, and tells for each case how often the folder gave what, as JSON.

`main(FOLDER, N, CASE…)` kills at N random moments; with N = 0, before each change or listing of the folder. A save
runs in a fork; this process loads.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModel
from transformers.utils import logging

from models import patched

CASES = {
    "another encoding": (("relative", {}, {}), ("sinusoidal+alibi", {"intermediate_size": 40}, {})),
    "other weights": (("relative", {"seed": 1}, {}), ("relative", {"seed": 2, "layer_norm_eps": 1e-3}, {})),
    "other shards": (
        ("relative", {"seed": 1}, {"max_shard_size": "20KB"}),
        ("relative", {"seed": 2}, {"max_shard_size": "20KB"}),
    ),
    "fewer shards": (
        ("learned", {"seed": 1}, {"max_shard_size": "20KB"}),
        ("learned", {"seed": 2}, {"max_shard_size": "40KB"}),
    ),
    "shards to one": (("alibi", {"seed": 1}, {"max_shard_size": "20KB"}), ("alibi", {"seed": 2}, {})),
    "one to shards": (("alibi", {"seed": 1}, {}), ("alibi", {"seed": 2}, {"max_shard_size": "20KB"})),
}


def kill_at(number, folder):
    """Ends this process before the number-th event that names a folder or an entry of it. Not counted are files of code, forty
    and all alike, and what happens in folders inside."""
    count = 0

    def hook(event, arguments):
        nonlocal count
        paths = [Path(each) for each in arguments[:2] if isinstance(each, (str, Path))]
        if any(folder in (path, path.parent) and path.suffix != ".py" for path in paths):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


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


def sweep(work, case, moments):
    (encoding, changes, how), (next_encoding, next_changes, next_how) = case
    patched("bert", encoding, **changes).save_pretrained(work / "old", **how)
    model = patched("bert", next_encoding, **next_changes)
    model.save_pretrained(work / "new", **next_how)
    old, new = (content(AutoModel.from_pretrained(work / name)) for name in ("old", "new"))
    outcomes, number, ended, duration = Counter(), 0, False, 0.0
    folder = work / "folder"
    while number < moments if moments else not ended:
        number += 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(work / "old", folder)
        started = time.monotonic()
        if not (child := os.fork()):
            if not moments:
                kill_at(number, folder)
            model.save_pretrained(folder, **next_how)
            os._exit(0)
        if moments and number > 1:  # the first tells how long a save takes
            time.sleep(random.uniform(0, duration))
            os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)[1] == 0
        if number == 1:
            duration = 1.1 * (time.monotonic() - started)
        outcomes[outcome(folder, old, new)] += 1
        if moments or number % 5 == 0:
            model.save_pretrained(folder, **next_how)
            left = set(os.listdir(folder)) - {*os.listdir(work / "old"), *os.listdir(work / "new")}
            if left or outcome(folder, old, new) != "new":
                outcomes[f"after the next save: {outcome(folder, old, new)} {left}"] += 1
    return outcomes


def main(folder, moments, *names):
    random.seed(0)
    logging.disable_progress_bar()  # its lock is shared with forks, and a killed one doesn't give it back
    print(json.dumps({name: sweep(Path(folder, name), CASES[name], int(moments)) for name in names}))
