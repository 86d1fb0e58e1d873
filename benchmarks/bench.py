"""Measure speed and memory of every encoding, compared with original models, with no encoding, and with other libraries.

    make bench        # the whole grid, with results in scripts/results/ (2 hours)
    python scripts/bench.py --quick
    python scripts/bench.py --groups forward,attention-2048-fp32 --encodings alibi,t5
    python scripts/bench.py --import my_encodings --groups forward --encodings alibi,window
    python scripts/bench.py --against v0.2 --groups forward-512-fp32 --encodings alibi,shaw
    python scripts/bench.py --report_only --output_dir scripts/results --docs_file docs/results/speed.md

Each group of subjects is measured in one process. In each round, every subject runs once, in random order, so that other load
on the machine affects all subjects alike. A ratio compares the throughput of two subjects within a round. 1.0 is as fast as the
reference, and less is slower. The median over all rounds is printed with an interval of order statistics.

A subject that fails is listed with the reason. Finished groups are saved, so that an interrupted run can be resumed. A group in
which every subject failed isn't saved, and the command then ends with status 1.
"""

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Silence the profiler, which counts memory. It logs each start, and warns about memory that was allocated earlier.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from benchmarks import against, grid, report, results, subjects
from benchmarks.grid import Group, Settings
from hf_posenc.evaluation import records, terminals
from hf_posenc.progress import ProgressBar
from hf_posenc.serialization.atomic import write_text

ROOT = Path(__file__).resolve().parents[1]
QUICK_ROUNDS = 6


def measured(group: Group, settings: Settings) -> Any:
    """Measure a group in a separate process, and return its record."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_measure, group, settings).result()
        except BrokenProcessPool:
            return failed(group, "its process died: too little memory?")
        except Exception as error:  # in the setup of the group, so other groups continue
            return failed(group, f"{type(error).__name__}: {error}"[:300])


def _measure(group: Group, settings: Settings) -> Any:
    # Imported only in the measuring process, so that imports of this process don't affect the libraries.
    from benchmarks.measuring import measure

    terminals.set_up()
    terminals.import_modules(settings.modules)
    return measure(group, settings)


def failed(group: Group, why: str) -> Any:
    """The record of a group that couldn't be measured."""
    return {**group.about(), "subjects": {"all": {"failed": why}}}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--groups", help="names or kinds of groups, separated by commas; all by default")
    add("--list", action="store_true", help="print the groups and what each measures, and measure nothing")
    add("--encodings", help="encodings, separated by commas; all that are registered by default")
    add(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="a module that defines encodings of your own; several separated by commas, or the option again",
    )
    add("--quick", action="store_true", help=f"a few groups, {QUICK_ROUNDS} rounds: minutes")
    add(
        "--against",
        metavar="REVISION",
        help="also measure this commit, and print what is slower or faster than there; at least 6 rounds",
    )
    add("--rounds", type=int, help="how often each subject is timed; default: 20")
    add("--warmup", type=int, default=2, help="untimed runs before that")
    add("--threads", type=int, default=2)
    add(
        "--clock",
        choices=("wall", "process"),
        default="wall",
        help="process: CPU time, for a machine that others use; requires --threads 1",
    )
    add("--seed", type=int, default=0)
    add(
        "--output_dir",
        type=Path,
        help="a folder for bench.json, bench.txt and bench.png; by default only --parts_dir is written to",
    )
    add("--docs_file", type=Path, help="a page with the tables between markers, which are replaced")
    add("--report_only", action="store_true", help="measure nothing: text, figure and page from --output_dir's bench.json")
    add("--parts_dir", type=Path, default=ROOT / "build" / "bench", help="finished groups, for --resume")
    add(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure only groups that aren't in --parts_dir yet; default: --resume",
    )
    arguments = parser.parse_args(argv)
    if arguments.rounds is None:
        arguments.rounds = QUICK_ROUNDS if arguments.quick else 20
    if (arguments.report_only or arguments.docs_file) and not arguments.output_dir:
        parser.error("--report_only and --docs_file require --output_dir, where the results are")
    if arguments.against and arguments.output_dir:
        parser.error("--against prints what has changed. Omit --output_dir, --report_only, and --docs_file.")
    if min(arguments.rounds, arguments.threads) < 1 or arguments.warmup < 0:
        parser.error("--rounds and --threads must be at least 1, and --warmup at least 0")
    if arguments.against and arguments.rounds < QUICK_ROUNDS:
        few = f"intervals of --rounds {arguments.rounds} are too narrow to compare"
        parser.error(f"--against needs at least {QUICK_ROUNDS} rounds: {few}")
    if arguments.clock == "process" and arguments.threads > 1:
        parser.error("--clock process counts the seconds of all threads, so it requires --threads 1")
    return arguments


def settings_of(arguments: argparse.Namespace) -> Settings:
    given = {name: getattr(arguments, name) for name in ("rounds", "warmup", "threads", "clock", "seed")}
    chosen = tuple(arguments.encodings.split(",")) if arguments.encodings else ()
    modules = tuple(name for names in arguments.modules for name in names.split(",") if name)
    return Settings(**given, encodings=chosen, modules=modules)


def chosen_groups(arguments: argparse.Namespace) -> list[Group]:
    try:
        return grid.groups(arguments.quick, tuple(arguments.groups.split(",")) if arguments.groups else ())
    except ValueError as error:
        sys.exit(f"--groups: {error}")


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure the chosen groups. Returns all results, including earlier ones in --output_dir, and the groups that failed."""
    settings, chosen = settings_of(arguments), chosen_groups(arguments)
    try:
        terminals.import_modules(settings.modules)
    except ImportError as error:
        sys.exit(str(error))
    try:
        subjects.check(settings)
    except ValueError as error:
        sys.exit(f"--encodings: {error}")
    kept, found = results.Kept(arguments.parts_dir, settings), {}
    for group in ProgressBar(chosen, desc="groups", unit="group", position=0):
        record = kept.get(group) if arguments.resume else None
        if record is None:
            record = measured(group, settings)
            kept.add(group, record)
        else:
            time = kept.time(group)
            record = {**record, "date": time[:10]}
            ProgressBar.write(f"{group.name}: kept from {time}; --no-resume measures anew", file=sys.stderr)
        found[group.name] = record
    without = [name for name, record in found.items() if results.has_failed(record)]
    file = arguments.output_dir / "bench.json" if arguments.output_dir else None
    order = [group.name for group in grid.groups()]
    try:
        return results.together(found, settings, records.command(), file, order), without
    except ValueError as error:
        sys.exit(str(error))


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    if arguments.list:
        print(*report.listing(chosen_groups(arguments)), sep="\n")
        return
    if arguments.against:
        try:
            print(against.compare(arguments.against, shared_flags(arguments)), end="")
        except ValueError as error:
            sys.exit(str(error))
        return
    folder = arguments.output_dir
    file: Any = folder / "bench.json" if folder else None
    if arguments.report_only and file is not None and not file.exists():
        sys.exit(
            f"no results in {folder}: there is no {file.name}. Run `make bench`, or give the --output_dir of an earlier run"
        )
    everything, without = (records.read(file), []) if arguments.report_only else run(arguments)
    page = report.text(everything)
    print(page, end="")
    if file is not None:
        folder.mkdir(parents=True, exist_ok=True)
        records.write(file, everything)
        write_text(folder / "bench.txt", page)
        report.draw(everything, folder / "bench.png")
    if arguments.docs_file:
        report.write_tables(arguments.docs_file, everything)
    if without:
        sys.exit(f"nothing could be measured in {', '.join(without)}: the reasons are above; the same command tries again")


def shared_flags(arguments: argparse.Namespace) -> list[str]:
    """The flags that determine what is measured, and how, for another process."""
    names = ("groups", "encodings", "rounds", "warmup", "threads", "clock", "seed")
    flags = [each for name in names if (value := getattr(arguments, name)) is not None for each in (f"--{name}", str(value))]
    return [*flags, *(each for name in arguments.modules for each in ("--import", name)), *["--quick"] * arguments.quick]


if __name__ == "__main__":
    terminals.set_up()
    main()
