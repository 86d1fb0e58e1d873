"""Length generalisation, the papers' way: tiny decoders trained at lengths up to L and tested to 8 L, with every encoding.

    python -m experiments.generalise --processes 2 --output_dir generalisation    # the study of scripts/results, resumable
    python -m experiments.generalise --tasks copy --encodings t5 alibi none rope+alibi --seeds 0 1 2 --output_dir OUT
    python -m experiments.generalise --tasks copy lm --length copy=16 lm=128 --steps copy=2000 --output_dir OUT
    python -m experiments.generalise --encodings none '{"type": "rope", "theta": 500000.0}' --output_dir OUT
    python -m experiments.generalise --report_only --output_dir OUT

Tasks: copy, reverse and addition of digits (Kazemnejad et al., 2023: https://arxiv.org/abs/2305.19466), and a language model of
the bytes of Python's help texts (Press et al., 2022: https://arxiv.org/abs/2108.12409). For a seed, all encodings have the same
host weights and the same rows in the same order. Answers are scored as wholes (exact match, as greedy decoding would get them)
and by tokens, the language model by its perplexity. At the end a verdict compares the figures with what the papers found.

Each finished run has a file in --output_dir/runs: a command that was killed goes on where it was, and takes in more tasks,
encodings and seeds. generalise.json, .txt and .png are written there when all runs are done.
"""

import argparse
import io
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors; processes are what more cores are for

from rich.console import Console

from experiments.generalisation import figures, flags, models, report, several, study, verdict
from experiments.generalisation.results import Results
from experiments.generalisation.runs import Setup, process_state, training_of
from experiments.generalisation.study import Study
from experiments.generalisation.tasks import CAUSAL, TASKS
from hf_posenc.evaluation import records, terminals
from hf_posenc.serialization.atomic import write_text
from hf_posenc.training.flags import positive

WIDTH = 140


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser, setup = flags.parser(__doc__, TASKS), Setup()
    add = parser.add_argument
    add("--host", choices=[name for name, host in models.HOSTS.items() if CAUSAL in host.heads], default=setup.host)
    add("--learning_rate", type=positive, default=setup.learning_rate)
    add("--docs_file", type=Path, help="a page with the tables between markers, which are replaced")
    arguments = parser.parse_args(argv)
    flags.check(parser, arguments)
    return arguments


def study_of(arguments: argparse.Namespace) -> Study:
    flags.begin(arguments)
    sizes = flags.sizes(arguments)
    setup = Setup(host=arguments.host, sizes=sizes, learning_rate=arguments.learning_rate)
    try:
        models.stock(setup.host, sizes, 4, 8, seed=0)
    except Exception as error:  # of its config, whatever checks that has
        raise SystemExit(f"{setup.host} can't be made with {sizes}: {error}") from None
    trainings = {
        task: training_of(task, *(getattr(arguments, name).get(task) for name in flags.PER_TASK))
        for task in TASKS
        if task in arguments.tasks
    }
    return study.planned(setup, trainings, flags.encodings(arguments), arguments.seeds)


def write(output: Path, planned: Study, results: Results, failed: dict[str, str]) -> None:
    """Tables to the terminal, and all that is shown to files."""
    found = verdict.findings(results)
    parts = [several.Part(planned, results)]
    tables = [several.table(parts), report.learned_table(results), several.refused_table(parts)]
    tables += [report.verdict_table(found)] if any(each.answer != verdict.MISSING for each in found) else []
    text = io.StringIO()
    for console in (Console(width=WIDTH), Console(file=text, width=WIDTH)):
        for table in filter(None, tables):
            console.print(table)
        console.print(verdict.summary(found), soft_wrap=True)
    write_text(output / "generalise.txt", text.getvalue())
    records.write(output / "generalise.json", report.as_record(planned, results, found, failed))
    figures.draw_curves(planned, results, output / "generalise.png")


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    planned, output = study_of(arguments), arguments.output_dir
    for label, reason in planned.refused.items():
        print(f"{label} is left out: {reason}", file=sys.stderr)
    if not planned.encodings:
        raise SystemExit("--encodings: the host can have none of them")
    failed = {} if arguments.report_only else study.carry_out({output: planned}, arguments.processes, tuple(arguments.modules))
    if not process_state().is_main_process:
        return
    found = study.records_of(output, planned)
    if not found:
        raise SystemExit("\n".join([f"{output} has no finished run of this study", *study.told(failed)]))
    write(output, planned, Results(found), failed)
    if arguments.docs_file:
        report.write_tables(arguments.docs_file, records.read(output / "generalise.json"))
    study.stop_for(failed)


if __name__ == "__main__":
    terminals.escape_unprintable()
    main()
