"""A study: tasks × encodings × seeds, a file for each finished run, so that one that was killed goes on where it was."""

import importlib
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from evaluation import records
from generalisation import models
from generalisation.models import Encoding
from generalisation.runs import Setup, Training, run

RUNS = "runs"
Record = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """
    trainings: task -> how it is trained.
    refused: label -> reason, of encodings that the host can't have.
    """

    setup: Setup
    trainings: dict[str, Training]
    encodings: tuple[Encoding, ...]
    refused: dict[str, str]
    seeds: tuple[int, ...]

    def runs(self) -> list[tuple[str, Encoding, int]]:
        """All runs, seed by seed, so that an unfinished study has something to say of everything."""
        return [(task, each, seed) for seed in self.seeds for task in self.trainings for each in self.encodings]

    def settings(self, task: str, label: str) -> Record:
        """What a run depends on beside its seed, by name; of a task or encoding of another study, what runs have in common."""
        settings = asdict(self.setup)
        settings |= settings.pop("sizes")
        if task in self.trainings:
            settings |= asdict(self.trainings[task])
        for each in self.encodings:
            if each.label == label:
                settings["options"] = each.options
        return json.loads(json.dumps(settings))  # as a file gives it back


def planned(setup: Setup, trainings: dict[str, Training], encodings: Sequence[Encoding], seeds: Sequence[int]) -> Study:
    """The study of the encodings that the host can have."""
    reasons = {each.label: models.refusal(setup.host, setup.sizes, each) for each in encodings}
    taken = tuple(each for each in encodings if reasons[each.label] is None)
    refused = {label: reason for label, reason in reasons.items() if reason is not None}
    return Study(setup, trainings, taken, refused, tuple(seeds))


def file_of(folder: Path, task: str, encoding: Encoding, seed: int) -> Path:
    return folder / RUNS / f"{task}-{encoding.file_name}-{seed}.json"


def finished(folder: Path, study: Study) -> dict[tuple[str, str, int], Record]:
    """The runs of a study that its folder has, by task, label and seed.

    Raises SystemExit where a run in the folder has other settings.
    """
    planned, found = {(task, each.label, seed) for task, each, seed in study.runs()}, {}
    for file in sorted((folder / RUNS).glob("*.json")):
        try:
            record = records.read(file)
            key, before = (record["task"], record["encoding"], record["seed"]), record["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{file} is no record of a run ({error!r}): remove it, or give another --output_dir") from None
        for name, now in study.settings(*key[:2]).items():
            if before.get(name) != now:
                raise SystemExit(
                    f"{file} was made with {name}={before.get(name)!r}, and now it is {now!r}: a study has one setting; give "
                    f"{name} as it was, or another --output_dir"
                )
        if key in planned:
            found[key] = record
    return found


def write(file: Path, record: Record) -> None:
    """Write a record whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    records.write_whole(file, record)


def carry_out(folder: Path, study: Study, processes: int, modules: tuple[str, ...] = ()) -> dict[str, str]:
    """Do the runs that the folder doesn't have. Returns the reasons of those that failed, which are tried again next time."""
    done = finished(folder, study)
    missing = [(task, each, seed) for task, each, seed in study.runs() if (task, each.label, seed) not in done]
    failed: dict[str, str] = {}
    with tqdm(total=len(study.runs()), initial=len(done), desc="runs", unit="run") as bar:
        for (task, each, seed), outcome in _outcomes(study, missing, processes, modules):
            if isinstance(outcome, str):
                failed[f"{task}, {each.label}, seed {seed}"] = outcome
            else:
                settings = study.settings(task, each.label)
                write(file_of(folder, task, each, seed), {**outcome, "settings": settings, "torch": torch.__version__})
            bar.set_postfix_str(f"{task} {each.label} {seed}")
            bar.update()
    return failed


Planned = tuple[str, Encoding, int]


def _outcomes(
    study: Study, missing: list[Planned], processes: int, modules: tuple[str, ...]
) -> Iterator[tuple[Planned, Record | str]]:
    def arguments(planned: Planned) -> tuple[Any, ...]:
        task, each, seed = planned
        return study.setup, study.trainings[task], task, each, seed

    if processes == 1 or len(missing) < 2:
        torch.set_num_threads(1)
        for planned in missing:
            yield planned, attempt(*arguments(planned))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=begin, initargs=(modules,)) as pool:
        try:
            running = {pool.submit(attempt, *arguments(planned)): planned for planned in missing}
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool:
            raise SystemExit("a process died (too little memory?): finished runs are kept, the same command goes on") from None
        finally:
            pool.shutdown(cancel_futures=True)


def begin(modules: tuple[str, ...]) -> None:
    """In each process: one thread, and encodings of one's own."""
    torch.set_num_threads(1)
    if modules:
        sys.path.insert(0, "")
    for name in modules:
        importlib.import_module(name)


def attempt(*arguments: Any) -> Record | str:
    """A run's record, or why it failed: the others go on."""
    try:
        return run(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
