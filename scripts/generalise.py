"""Length generalisation, the papers' way: tiny decoders trained at lengths up to L and tested to 8 L, with every encoding.

    python scripts/generalise.py --processes 2 --output_dir generalisation          # the study of scripts/results, resumable
    python scripts/generalise.py --tasks copy --encodings t5 alibi none rope+alibi --seeds 0 1 2 --output_dir OUT
    python scripts/generalise.py --tasks copy lm --length copy=16 lm=128 --steps copy=2000 --output_dir OUT
    python scripts/generalise.py --encodings none '{"type": "rope", "theta": 500000.0}' --output_dir OUT
    python scripts/generalise.py --report_only --output_dir OUT

Tasks: copy, reverse and addition of digits (Kazemnejad et al., 2023: https://arxiv.org/abs/2305.19466), and a language model of
the bytes of Python's help texts (Press et al., 2022: https://arxiv.org/abs/2108.12409). For a seed, all encodings have the same
host weights and the same rows in the same order. Answers are scored as wholes (exact match, as greedy decoding would get them)
and by tokens, the language model by its perplexity. At the end a verdict compares the figures with what the papers found.

Each finished run has a file in --output_dir/runs: a command that was killed goes on where it was, and takes in more tasks,
encodings and seeds. generalise.json, .txt, .png and -map.png are written there when all runs are done.
"""

import argparse
import io
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors; processes are what more cores are for

from rich.console import Console

import hf_posenc
from evaluation import records
from generalisation import figures, models, report, study, verdict
from generalisation.models import HOSTS, Encoding, Sizes
from generalisation.results import Results
from generalisation.runs import Setup, training_of
from generalisation.study import Study
from generalisation.tasks import TASKS
from training.flags import at_least

WIDTH = 140
PER_TASK = ("length", "steps", "batch_size")
"""Flags whose values belong to a task."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add, sizes, setup = parser.add_argument, Sizes(), Setup()
    add("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    add("--encodings", nargs="+", metavar="NAME|JSON", help="names, or objects with options; default: all that are registered")
    add("--import", dest="modules", nargs="+", default=[], metavar="MODULE", help="modules that define encodings of your own")
    add("--seeds", type=at_least(0), nargs="+", default=[0, 1, 2])
    defaults = {name: ", ".join(f"{task}={getattr(own, name)}" for task, own in TASKS.items()) for name in PER_TASK}
    add("--length", nargs="+", default=[], metavar="[TASK=]N", help=f"L, the longest trained; default: {defaults['length']}")
    add("--steps", nargs="+", default=[], metavar="[TASK=]N", help=f"default: {defaults['steps']}")
    add("--batch_size", nargs="+", default=[], metavar="[TASK=]N", help=f"default: {defaults['batch_size']}")
    add("--host", choices=HOSTS, default=setup.host)
    for name, value in vars(sizes).items():
        add(f"--{name}", type=at_least(1), default=value)
    add("--learning_rate", type=float, default=setup.learning_rate)
    add("--processes", type=at_least(1), default=1, help="runs at a time, each with one thread")
    add("--report_only", action="store_true", help="run nothing: tables and figures of what the folder has")
    add("--output_dir", type=Path, required=True)
    add("--docs_file", type=Path, help="a page with the tables between markers, which are replaced")
    arguments = parser.parse_args(argv)
    for name in ("tasks", "seeds", "encodings"):
        given = getattr(arguments, name) or []
        if len(set(given)) != len(given):
            parser.error(f"--{name} {' '.join(map(str, given))}: give each once")
    for name in PER_TASK:
        try:
            setattr(arguments, name, per_task(getattr(arguments, name), arguments.tasks))
        except ValueError as error:
            parser.error(f"--{name} {error}")
    return arguments


def per_task(given: list[str], tasks: list[str]) -> dict[str, int]:
    """Task -> number, of `N` for all tasks, or `TASK=N`. Raises ValueError for anything else."""
    found: dict[str, int] = {}
    for text in given:
        task, equals, number = text.rpartition("=")
        if not number.isdecimal() or int(number) < 1 or (equals and task not in tasks):
            raise ValueError(
                f"{text!r}: allowed is an integer from 1 on, or one for a task, as {tasks[0]}=20, of {', '.join(tasks)}"
            )
        found |= dict.fromkeys([task] if equals else tasks, int(number))
    return found


def encodings_of(arguments: argparse.Namespace) -> list[Encoding]:
    """Those that were asked for, or all. Raises SystemExit for one that there isn't."""
    given = arguments.encodings or [*hf_posenc.list_encodings()]
    found = {}
    for text in given:
        try:
            each = models.encoding(json.loads(text) if text.startswith("{") else text)
        except ValueError as error:
            raise SystemExit(f"--encodings {text}: {error}") from None
        if each.label in found:
            raise SystemExit(f"--encodings {text}: {each.label} is there already")
        found[each.label] = each
    return [*found.values()]


def study_of(arguments: argparse.Namespace) -> Study:
    try:
        study.begin(tuple(arguments.modules))
    except ImportError as error:
        raise SystemExit(
            f"--import: {error}. Modules are looked for in the current folder, {Path.cwd()}, and among what is installed"
        ) from None
    sizes = Sizes(**{name: getattr(arguments, name) for name in vars(Sizes())})
    setup = Setup(host=arguments.host, sizes=sizes, learning_rate=arguments.learning_rate)
    try:
        models.stock(setup.host, sizes, 4, 8, seed=0)
    except Exception as error:  # of its config, whatever checks that has
        raise SystemExit(f"{setup.host} can't be made with {sizes}: {error}") from None
    trainings = {
        task: training_of(task, *(getattr(arguments, name).get(task) for name in PER_TASK))
        for task in TASKS
        if task in arguments.tasks
    }
    return study.planned(setup, trainings, encodings_of(arguments), arguments.seeds)


def write(output: Path, planned: Study, results: Results, failed: dict[str, str]) -> None:
    """Tables to the terminal, and all that is shown to files."""
    found = verdict.findings(results)
    tables = [*report.tables(results), report.learned_table(results)]
    tables += [report.refused_table(planned.refused)] if planned.refused else []
    tables += [report.verdict_table(found)] if any(each.answer != verdict.MISSING for each in found) else []
    text = io.StringIO()
    for console in (Console(width=WIDTH), Console(file=text, width=WIDTH)):
        for table in tables:
            console.print(table)
        console.print(verdict.summary(found), soft_wrap=True)
    (output / "generalise.txt").write_text(text.getvalue(), encoding="utf-8")
    records.write(output / "generalise.json", report.as_record(planned, results, found, failed))
    figures.draw_curves(planned, results, output / "generalise.png")
    figures.draw_map(planned, results, output / "generalise-map.png")


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    planned, output = study_of(arguments), arguments.output_dir
    for label, reason in planned.refused.items():
        print(f"{label} is left out: {reason}", file=sys.stderr)
    if not planned.encodings:
        raise SystemExit("--encodings: the host can have none of them")
    failed = {} if arguments.report_only else study.carry_out(output, planned, arguments.processes, tuple(arguments.modules))
    done = study.finished(output, planned)
    if not done:
        raise SystemExit(
            f"{output} has no finished run of this study" + "".join(f"\n{name}: {why}" for name, why in failed.items())
        )
    ordered = [done[key] for key in ((task, each.label, seed) for task, each, seed in planned.runs()) if key in done]
    write(output, planned, Results(ordered), failed)
    if arguments.docs_file:
        report.write_tables(arguments.docs_file, records.read(output / "generalise.json"))
    if failed:
        raise SystemExit(
            "\n".join(
                ["These runs failed, and are tried again next time:", *(f"{name}: {why}" for name, why in failed.items())]
            )
        )


if __name__ == "__main__":
    main()
