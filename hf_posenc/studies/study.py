"""A study: tasks × encodings × seeds of one model. Each finished run has a file, so interrupted studies can be resumed.

Runs are distributed over the processes of `carry_out` or of Accelerate's launcher.
"""

import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers.utils import logging

from hf_posenc.evaluation import records, terminals
from hf_posenc.progress import ProgressBar
from hf_posenc.studies import models, tasks
from hf_posenc.studies.models import Encoding
from hf_posenc.studies.runs import Setup, Training, process_state, run

RUNS = "runs"
Record = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """The runs of one model.

    trainings: task -> training settings.
    unsupported: label -> reason for each encoding that the model doesn't support.
    label: the model's label, if a command has several models.
    save: whether the trained models are saved.
    """

    setup: Setup
    trainings: dict[str, Training]
    encodings: tuple[Encoding, ...]
    unsupported: dict[str, str]
    seeds: tuple[int, ...]
    label: str = ""
    save: bool = False

    def runs(self) -> list[tuple[str, Encoding, int]]:
        """All runs, seed by seed, so that an unfinished study has results for all tasks and encodings."""
        return [(task, each, seed) for seed in self.seeds for task in self.trainings for each in self.encodings]

    def settings(self, task: str, label: str) -> Record:
        """The settings of a run except its seed, by name. For other studies' tasks or encodings, only the common settings."""
        settings = asdict(self.setup)
        settings |= settings.pop("sizes") or {}
        if task in self.trainings:
            settings |= asdict(self.trainings[task]) | tasks.version(task)
        for each in self.encodings:
            if each.label == label:
                settings |= {"options": each.options, **models.version(each)}
        return json.loads(json.dumps(settings))  # as read from a file


def planned(
    setup: Setup,
    trainings: dict[str, Training],
    encodings: Sequence[Encoding],
    seeds: Sequence[int],
    label: str = "",
    save: bool = False,
) -> Study:
    """The study of the encodings that the model supports."""
    head = tasks.get_task(next(iter(trainings))).head
    reasons = {
        each.label: models.why_unsupported(setup.model, setup.sizes, each, head, setup.model_options) for each in encodings
    }
    supported = tuple(each for each in encodings if reasons[each.label] is None)
    unsupported = {label: reason for label, reason in reasons.items() if reason is not None}
    return Study(setup, trainings, supported, unsupported, tuple(seeds), label, save)


def file_of(directory: Path, task: str, encoding: Encoding, seed: int) -> Path:
    return directory / RUNS / f"{task}-{encoding.file_name}-{seed}.json"


def model_of(directory: Path, task: str, encoding: Encoding, seed: int) -> Path:
    """The directory of a run's saved model, next to its record."""
    return file_of(directory, task, encoding, seed).with_suffix("")


def finished(directory: Path, study: Study) -> dict[tuple[str, str, int], Record]:
    """The finished runs of a study in its directory, by task, label, and seed.

    Raises SystemExit if a run in the directory has other settings.
    """
    planned, found = {(task, each.label, seed) for task, each, seed in study.runs()}, {}
    settings = functools.cache(study.settings)  # digests of custom code take time
    for file in sorted((directory / RUNS).glob("*.json")):
        try:
            record = records.read(file)
            key, before = (record["task"], record["encoding"], record["seed"]), record["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(
                f"{file} is not the record of a run ({error!r}). Remove it, or choose another --output_dir."
            ) from None
        now = settings(*key[:2])
        if differing := [name for name in now if before.get(name) != now[name]]:
            raise SystemExit(f"{file} {_difference(differing, before, now)}")
        if key in planned:
            found[key] = record
    return found


def _difference(differing: list[str], before: Record, now: Record) -> str:
    """What is different in the settings of a finished run, and the remedy."""
    name, *others = differing
    also = f" ({', '.join(others)} {'differs' if len(others) == 1 else 'differ'}, too)" if others else ""
    if name.startswith(("task ", "encoding ")):
        what = f"was created with another version of the {name}{also}. Its code{' or rows' * name.startswith('task ')} changed"
        return f"{what}: restore it, or choose another --output_dir."
    return (
        f"was created with {name}={before.get(name)!r}, and now it is {now[name]!r}{also}. All runs of a study have the same "
        f"settings: restore {' and '.join(differing)}, or choose another --output_dir."
    )


def records_of(directory: Path, study: Study) -> list[Record]:
    """The finished runs of a study, in the order of `Study.runs`."""
    done = finished(directory, study)
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
        raise SystemExit(
            f"--processes {processes}: Accelerate's launcher has started {state.num_processes} already. Omit --processes."
        )
    done = {directory: finished(directory, study) for directory, study in studies.items()}
    every = [(directory, *run) for directory, study in studies.items() for run in study.runs()]
    missing = [
        (directory, task, each, seed)
        for directory, task, each, seed in every
        if (task, each.label, seed) not in done[directory]
        or (studies[directory].save and not model_of(directory, task, each, seed).is_dir())
    ]
    missing.sort(key=lambda each: studies[each[0]].seeds.index(each[3]))
    state.wait_for_everyone()  # until all have read the directories and have the same list
    # Adjacent runs take similar times, so each process gets its share of slow ones.
    mine = missing[state.process_index :: state.num_processes]
    failed: dict[str, str] = {}
    start = len(every) - len(missing)
    if start and state.is_main_process:
        print(f"{start} of {len(every)} runs are finished. The other {len(missing)} start now.", file=sys.stderr)
    bar = ProgressBar(total=start + len(mine), initial=start, desc="runs", unit="run", disable=not state.is_main_process)
    with bar:
        for planned, outcome in _outcomes(studies, mine, processes, modules):
            directory, task, each, seed = planned
            study = studies[directory]
            name = ", ".join(filter(None, (study.label, task, each.label, f"seed {seed}")))
            if isinstance(outcome, str):
                failed[name] = outcome
            else:
                settings = study.settings(task, each.label)
                write(file_of(directory, task, each, seed), {**outcome, "settings": settings, "torch": torch.__version__})
            bar.set_postfix_str(name)
            bar.update()
    return dict(gather_object(list(failed.items())))


def _outcomes(
    studies: Mapping[Path, Study], missing: list[Planned], processes: int, modules: tuple[str, ...]
) -> Iterator[tuple[Planned, Record | str]]:
    def arguments(planned: Planned) -> tuple[Any, ...]:
        directory, task, each, seed = planned
        study = studies[directory]
        saved = model_of(*planned) if study.save else None
        return study.setup, study.trainings[task], task, each, seed, saved

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
            raise SystemExit("A process died, possibly for lack of memory. Run the same command again to resume.") from None
        finally:
            pool.shutdown(cancel_futures=True)


def begin(modules: tuple[str, ...] = (), begun: Any = None) -> None:
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
        return tasks.described(error)[:300]


def failures(failed: Mapping[str, str]) -> list[str]:
    return [f"{name}: {why}" for name, why in failed.items()]


def stop_for(failed: Mapping[str, str]) -> None:
    """Raises SystemExit if any run failed."""
    if failed:
        raise SystemExit("\n".join(["These runs failed. The same command tries them again:", *failures(failed)]))
