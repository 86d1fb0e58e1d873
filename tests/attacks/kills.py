"""A save over an existing folder that is killed at a random moment: what is there then loads as old, as new, or not at all."""

import functools
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel

from attacks.cases import Case, Comparison, Settings, elsewhere, new_folder, no_grad
from attacks.subjects import patched, stock, tokens

IDS = tokens(10)[None]
SHARDS = {"max_shard_size": "40KB"}
OVERWRITES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "one file over one": ("alibi", {}, "rope", {}),
    "the same encoding, other weights": ("shaw", {}, "shaw", {}),
    "one file over shards": ("alibi", SHARDS, "sinusoidal", {}),
    "shards over one file": ("learned", {}, "alibi", SHARDS),
    "shards over shards": ("t5", SHARDS, "relative", SHARDS),
    "the same encoding in shards": ("alibi", SHARDS, "alibi", SHARDS),
}
"""What is there, and what is saved over it: encodings, and how they are saved."""


def cases(settings: Settings) -> Iterator[Case]:
    chance = random.Random(settings.seed)
    for number in range(settings.kills):
        attack = list(OVERWRITES)[number % len(OVERWRITES)]
        part = chance.random()
        run = no_grad(killed, attack, part, number % 4 == 3)
        yield Case(attack, "bert", f"at {part:.3f} of the save", run)


@functools.cache
def model(encoding: str, seed: int) -> Any:
    return patched(stock("bert", seed=seed), encoding)


@functools.cache
def pair(attack: str) -> tuple[str, float, Tensor, Tensor]:
    """A folder with what is there, the seconds that a save over it takes, and the outputs of old and new."""
    old, how_old, new, how_new = OVERWRITES[attack]
    folder = new_folder()
    model(old, 0).save_pretrained(folder, **how_old)
    trial = [copied(folder) for _ in range(3)]
    begin = time.perf_counter()
    for each in trial:
        model(new, 1).save_pretrained(each, **how_new)
    return folder, (time.perf_counter() - begin) / 3, model(old, 0)(IDS)[0], model(new, 1)(IDS)[0]


def copied(folder: str) -> str:
    return shutil.copytree(folder, f"{new_folder()}/model")


def killed(attack: str, part: float, in_another_process: bool) -> Iterator[Comparison]:
    folder, seconds, old, new = pair(attack)
    there, encoding = copied(folder), OVERWRITES[attack][2]
    child = os.fork()
    if child == 0:  # nothing of this process may run in it but the save
        try:
            model(encoding, 1).save_pretrained(there, **OVERWRITES[attack][3])
        finally:
            os._exit(0)
    time.sleep(part * seconds * 1.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    yield elsewhere(output, there) if in_another_process else output(there), old, new


def output(folder: str) -> Tensor:
    with torch.no_grad():
        return AutoModel.from_pretrained(folder)(IDS)[0]
