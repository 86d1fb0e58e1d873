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
import functools
import io
from pathlib import Path

from rich.console import Console

from experiments import compare
from experiments.length_extrapolation import figures, report, several, verdict
from experiments.length_extrapolation.runs import Setup
from experiments.length_extrapolation.several import Part
from experiments.length_extrapolation.tasks import TASKS
from hf_posenc.evaluation import records, terminals
from hf_posenc.serialization.atomic import write_text


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser, setup = compare.flags_of(__doc__, TASKS), Setup()
    parser.set_defaults(hosts=[setup.host], multiples=[*setup.multiples], test_rows=setup.test_rows)
    parser.add_argument("--docs_file", type=Path, help="page whose tables between markers are replaced")
    arguments = compare.parse_arguments(argv, parser)
    if len(arguments.hosts) > 1:
        parser.error(f"--hosts {' '.join(arguments.hosts)}: the verdict is of one; compare.py takes several")
    return arguments


def write(page: Path | None, output: Path, parts: list[Part], left_out: dict[str, list[str]], failed: dict[str, str]) -> None:
    """Print the tables, and write the tables, the record, and the figure to files."""
    (part,) = parts
    found = verdict.findings(part.results)
    tables = [several.table(parts), report.learned_table(part.results), several.refused_table(parts)]
    tables += [report.verdict_table(found)] if any(each.answer != verdict.MISSING for each in found) else []
    text = io.StringIO()
    for console in (Console(width=compare.WIDTH), Console(file=text, width=compare.WIDTH)):
        for table in filter(None, tables):
            console.print(table)
        console.print(verdict.summary(found), soft_wrap=True)
    write_text(output / "extrapolation.txt", text.getvalue())
    records.write(output / "extrapolation.json", report.as_record(part.study, part.results, found, failed))
    figures.draw_curves(part.study, part.results, output / "extrapolation.png")
    if page:
        report.write_tables(page, records.read(output / "extrapolation.json"))


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    compare.run(arguments, functools.partial(write, arguments.docs_file))


if __name__ == "__main__":
    terminals.set_up()
    main()
