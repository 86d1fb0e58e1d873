"""The kinds of groups, and the measurement of a group."""

import functools
import time
from collections.abc import Callable

import torch

from benchmarks import attention, peers, scale, whole
from benchmarks.comparing import Record
from benchmarks.grid import Group, Settings

KINDS: dict[str, Callable[[Group, Settings], dict[str, Record]]] = {
    "forward": functools.partial(whole.compare, whole.forward),
    "train": functools.partial(whole.compare, whole.train),
    "decode": whole.compare_decoding,
    "generate": functools.partial(whole.compare, whole.generate),
    "compile": whole.compare_compiled,
    "attention": attention.compare,
    "attention-train": attention.compare,
    "x-transformers": peers.compare_models,
    "rotation": peers.compare_rotations,
    "patch": scale.patching,
    "import": scale.importing,
    "encode": scale.encoding,
    "load": scale.loading,
}
"""Kind -> function that returns a record for each subject of a group."""


def measure(group: Group, settings: Settings) -> Record:
    """Measure a group. The record has its settings and, for each subject, the measurements or why it failed."""
    torch.set_num_threads(settings.threads)
    started = time.perf_counter()
    subjects = KINDS[group.kind](group, settings)
    record = {**group.about(), "rounds": settings.rounds, "threads": settings.threads}
    return {**record, "subjects": subjects, "seconds": round(time.perf_counter() - started, 1)}
