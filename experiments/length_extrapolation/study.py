"""A study: tasks × encodings × seeds of one model. Each finished run has a file, so interrupted studies can be resumed.

Runs are distributed over the processes of `carry_out` or of Accelerate's launcher.
"""

import json
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers.utils import logging

from experiments.length_extrapolation import models
from experiments.length_extrapolation.models import Encoding
from experiments.length_extrapolation.runs import Setup, Training, process_state, run, task_of
from hf_posenc.evaluation import records, terminals
from hf_posenc.progress import ProgressBar

RUNS = "runs"
Record = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """The runs of one model.

    trainings: task -> training settings.
    `refused`: label -> reason for each encoding that the model doesn't support.
    label: the model's label, if a command has several models.
    """

    setup: Setup
    trainings: dict[str, Training]
    encodings: tuple[Encoding, ...]
    refused: dict[str, str]
    seeds: tuple[int, ...]
    label: str = ""

    def runs(self) -> list[tuple[str, Encoding, int]]:
        """All runs, seed by seed, so that an unfinished study has results for all tasks and encodings."""
        return [(task, each, seed) for seed in self.seeds for task in self.trainings for each in self.encodings]

    def settings(self, task: str, label: str) -> Record:
        """The settings of a run except its seed, by name. For other studies' tasks or encodings, only the common settings."""
        settings = asdict(self.setup)
        settings |= settings.pop("sizes") or {}
        if task in self.trainings:
            settings |= asdict(self.trainings[task])
        for each in self.encodings:
            if each.label == label:
                settings |= {"options": each.options, **models.own_code(each)}
        return json.loads(json.dumps(settings))  # as read from a file


def planned(
    setup: Setup, trainings: dict[str, Training], encodings: Sequence[Encoding], seeds: Sequence[int], label: str = ""
) -> Study:
    """The study of the encodings that the model supports."""
    head = task_of(setup.host, next(iter(trainings))).head
    reasons = {each.label: models.refusal(setup.host, setup.sizes, each, head, setup.host_options) for each in encodings}
    taken = tuple(each for each in encodings if reasons[each.label] is None)
    refused = {label: reason for label, reason in reasons.items() if reason is not None}
    return Study(setup, trainings, taken, refused, tuple(seeds), label)


def file_of(folder: Path, task: str, encoding: Encoding, seed: int) -> Path:
    return folder / RUNS / f"{task}-{encoding.file_name}-{seed}.json"


def finished(folder: Path, study: Study) -> dict[tuple[str, str, int], Record]:
    """The finished runs of a study in its directory, by task, label, and seed.

    Raises SystemExit if a run in the directory has other settings.
    """
    planned, found = {(task, each.label, seed) for task, each, seed in study.runs()}, {}
    for file in sorted((folder / RUNS).glob("*.json")):
        try:
            record = records.read(file)
            key, before = (record["task"], record["encoding"], record["seed"]), record["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{file} is no record of a run ({error!r}): remove it, or give another --output_dir") from None
        now = study.settings(*key[:2])
        if differing := [name for name in now if before.get(name) != now[name]]:
            name, *others = differing
            also = f" ({', '.join(others)} {'differs' if len(others) == 1 else 'differ'}, too)" if others else ""
            raise SystemExit(
                f"{file} was made with {name}={before.get(name)!r}, and now it is {now[name]!r}{also}: a study has one "
                f"setting; give {' and '.join(differing)} as before, or another --output_dir"
            )
        if key in planned:
            found[key] = record
    return found


def records_of(folder: Path, study: Study) -> list[Record]:
    """The finished runs of a study, in the order of `Study.runs`."""
    done = finished(folder, study)
    return [done[key] for key in ((task, each.label, seed) for task, each, seed in study.runs()) if key in done]


def write(file: Path, record: Record) -> None:
    """Write a record atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    records.write(file, record)


Planned = tuple[Path, str, Encoding, int]
"""A run: the directory of its study, task, encoding, and seed."""


def carry_out(studies: Mapping[Path, Study], processes: int, modules: tuple[str, ...] = ()) -> dict[str, str]:
    """Execute the unfinished runs of studies by directory. Returns the reasons of failed runs, which are retried next time.

    Each process of Accelerate's launcher executes an interleaved share of the runs. All processes return all reasons.
    """
    state = process_state()
    if processes > 1 and state.num_processes > 1:
        raise SystemExit(f"--processes {processes}: Accelerate's launcher has started {state.num_processes} already")
    done = {folder: finished(folder, study) for folder, study in studies.items()}
    every = [(folder, *run) for folder, study in studies.items() for run in study.runs()]
    missing = [each for each in every if (each[1], each[2].label, each[3]) not in done[each[0]]]
    missing.sort(key=lambda each: studies[each[0]].seeds.index(each[3]))
    state.wait_for_everyone()  # until all have read the directories and have the same list
    # Adjacent runs take similar times, so each process gets its share of slow ones.
    mine = missing[state.process_index :: state.num_processes]
    failed: dict[str, str] = {}
    start = len(every) - len(missing)
    bar = ProgressBar(total=start + len(mine), initial=start, desc="runs", unit="run", disable=not state.is_main_process)
    with bar:
        for planned, outcome in _outcomes(studies, mine, processes, modules):
            folder, task, each, seed = planned
            study = studies[folder]
            name = ", ".join(filter(None, (study.label, task, each.label, f"seed {seed}")))
            if isinstance(outcome, str):
                failed[name] = outcome
            else:
                settings = study.settings(task, each.label)
                write(file_of(folder, task, each, seed), {**outcome, "settings": settings, "torch": torch.__version__})
            bar.set_postfix_str(name)
            bar.update()
    return dict(gather_object(list(failed.items())))


def _outcomes(
    studies: Mapping[Path, Study], missing: list[Planned], processes: int, modules: tuple[str, ...]
) -> Iterator[tuple[Planned, Record | str]]:
    def arguments(planned: Planned) -> tuple[Any, ...]:
        folder, task, each, seed = planned
        return studies[folder].setup, studies[folder].trainings[task], task, each, seed

    if processes == 1 or len(missing) < 2:
        torch.set_num_threads(1)
        for planned in missing:
            yield planned, attempt(*arguments(planned))
        return
    context = multiprocessing.get_context("spawn")
    begun = modules, context.Value("i", 0)
    with ProcessPoolExecutor(processes, mp_context=context, initializer=begin, initargs=begun) as pool:
        try:
            running = {pool.submit(attempt, *arguments(planned)): planned for planned in missing}
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool:
            raise SystemExit("a process died (too little memory?): finished runs are kept, the same command goes on") from None
        finally:
            pool.shutdown(cancel_futures=True)


def begin(modules: tuple[str, ...], begun: Any = None) -> None:
    """Set up a process: one thread, custom encodings, and one of the GPUs in turn, if there are any.

    begun: a shared count of the pool's processes that have started.
    """
    torch.set_num_threads(1)
    if begun is not None:
        terminals.set_up()
        quiet()
    if begun is not None and torch.cuda.is_available():
        with begun.get_lock():
            os.environ["ACCELERATE_TORCH_DEVICE"] = f"cuda:{begun.value % torch.cuda.device_count()}"
            begun.value += 1
    terminals.import_modules(modules)


def quiet() -> None:
    """Silence Transformers. The command reports missing weights of checkpoints once, not at each load."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def attempt(*arguments: Any) -> Record | str:
    """A run's record, or the reason why it failed. The other runs continue."""
    try:
        return run(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def told(failed: Mapping[str, str]) -> list[str]:
    return [f"{name}: {why}" for name, why in failed.items()]


def stop_for(failed: Mapping[str, str]) -> None:
    """Raises SystemExit if any run failed."""
    if failed:
        raise SystemExit("\n".join(["These runs failed, and are tried again next time:", *told(failed)]))
