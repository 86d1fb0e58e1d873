"""Measure length extrapolation: tiny decoders with every encoding, trained at lengths up to L and tested up to 8 L.

    python -m experiments.extrapolation --processes 2 --output_dir extrapolation    # the study of scripts/results, resumable
    python -m experiments.extrapolation --tasks copy --encodings t5 alibi none rope+alibi --seeds 0 1 2 --output_dir OUT
    python -m experiments.extrapolation --tasks copy lm --length copy=16 lm=128 --steps copy=2000 --output_dir OUT
    python -m experiments.extrapolation --encodings none '{"type": "rope", "theta": 500000.0}' --output_dir OUT
    python -m experiments.extrapolation --report_only --output_dir OUT

Tasks: copy, reverse, and addition of digits (Kazemnejad et al., 2023: https://arxiv.org/abs/2305.19466), and language modeling
on the bytes of Python's help texts (Press et al., 2022: https://arxiv.org/abs/2108.12409). For a given seed, all encodings
start from the same model weights and see the same examples in the same order. Answers are scored by exact match (as greedy
decoding would get them) and by token accuracy, and the language model by perplexity. At the end, a verdict compares the figures
with the papers' findings.

Each finished run has a file in --output_dir/llama/runs. If a command is interrupted, the same command resumes it, also with
more tasks, encodings, and seeds. When all runs are done, extrapolation.json, .txt, and .png are written to --output_dir.
"""

import argparse
import io
from pathlib import Path

from rich.console import Console

from experiments import extrapolation_figures as figures
from experiments import extrapolation_report as report
from experiments import extrapolation_verdict as verdict
from hf_posenc import compare
from hf_posenc.evaluation import records, terminals
from hf_posenc.serialization.atomic import write_text
from hf_posenc.studies import tables
from hf_posenc.studies.record import Part
from hf_posenc.studies.record import as_record as study_record
from hf_posenc.studies.runs import MULTIPLES, Setup
from hf_posenc.studies.tasks import TASKS

MODULE = "experiments.extrapolation"
"""This module, which the processes of a study import."""
NAMES = ("copy", "reverse", "addition", "lm")
TEST_ROWS = 128

TASKS.setdefault("lm", TASKS["clm"])  # its name in the record, from which its data are drawn


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = compare.parser_of(__doc__)
    parser.set_defaults(models=[Setup().model], tasks=[*NAMES], multiples=[*MULTIPLES], test_rows=TEST_ROWS)
    parser.add_argument("--docs_file", type=Path, help="page whose tables between markers are replaced")
    arguments = compare.parse_arguments(argv, parser)
    arguments.modules = [MODULE, *arguments.modules]
    if len(arguments.models) > 1:
        parser.error(
            f"--models {' '.join(arguments.models)}: the verdict needs a single model. Use hf-posenc compare for several."
        )
    return arguments


def write(arguments: argparse.Namespace, parts: list[Part], left_out: dict[str, list[str]], failed: dict[str, str]) -> None:
    """Print the tables, and write the tables, the record, and the figure to files."""
    (part,) = parts
    found, output = verdict.findings(part.results), arguments.output_dir
    printed = [*tables.for_terminal(study_record(parts, left_out, failed, None)), report.learned_table(part.results)]
    printed += [report.verdict_table(found)] if any(each.answer != verdict.MISSING for each in found) else []
    text = io.StringIO()
    for console in (Console(width=compare.WIDTH), Console(file=text, width=compare.WIDTH)):
        for table in printed:
            console.print(table)
        console.print(verdict.summary(found), soft_wrap=True)
    write_text(output / "extrapolation.txt", text.getvalue())
    records.write(output / "extrapolation.json", report.as_record(part, found, failed))
    figures.draw_curves(part.study, part.results, output / "extrapolation.png")
    if arguments.docs_file:
        report.write_tables(arguments.docs_file, records.read(output / "extrapolation.json"))


def main(argv: list[str] | None = None) -> None:
    compare.run(parse_arguments(argv), write)


if __name__ == "__main__":
    terminals.set_up()
    main()
