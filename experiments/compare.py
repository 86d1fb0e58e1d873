"""Compare encodings on several models and tasks, all else equal, trained at lengths up to L and tested beyond L.

    python scripts/compare.py experiments/studies/six_encodings.yaml --processes 2 --output_dir six     # a study as a file
    python scripts/compare.py --encodings none rope alibi '{"type": "t5", "num_buckets": 16}' \\
        --tasks mlm clm --length 64 --multiples 1 2 4 --seeds 0 1 2 --output_dir OUT
    accelerate launch --config_file scripts/accelerate/multi_gpu.yaml scripts/compare.py STUDY.yaml --output_dir OUT

Models (`--hosts bert llama` by default) are tiny models with random weights (bert, llama, or gpt2) or checkpoints. A model can
have config options, as in '{"type": "llama", "num_key_value_heads": 2}'. `--hosts checkpoint:all-MiniLM-L6-v2` keeps the
weights of a checkpoint directory and replaces its positions. `--steps 0` trains nothing.

Models run the tasks that they have a head for: encoders run mlm, and decoders run clm, copy, reverse, and addition. Both run
classification (which of two markers comes first). Texts are from Python's help. For a given seed, all encodings start from the
same model weights and see the same examples in the same order. Digests in the records confirm this. Unsupported combinations
are listed with their reasons, and the others run.

A YAML file has the flags as keys. A flag on the command line overrides its key. Each finished run has a file in
--output_dir/MODEL/runs. If a command is interrupted, the same command resumes it, also with more models, tasks, encodings, and
seeds. At the end, compare.txt (one table: mean ± interval over seeds, by length), compare.json, and compare.png are written.
"""

import argparse
import io
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are tiny: use --processes for more cores

from rich.console import Console

from experiments.length_extrapolation import flags, hosts, models, several, study, study_files
from experiments.length_extrapolation.results import Results
from experiments.length_extrapolation.runs import Setup, process_state
from experiments.length_extrapolation.several import Part
from experiments.length_extrapolation.study import Study
from experiments.length_extrapolation.tasks import ALL, COMPARED, Task
from hf_posenc.diagnostics.figures import require_matplotlib
from hf_posenc.evaluation import records, terminals
from hf_posenc.serialization.atomic import write_text
from hf_posenc.training.flags import at_least, positive, positive_or_0

WIDTH = 140
MULTIPLES = ("1", "1.5", "2", "4")
TEST_ROWS = 256


def flags_of(description: str | None, tasks: Mapping[str, Task]) -> argparse.ArgumentParser:
    """The flags of a study. `tasks`: the allowed tasks, all of which are the default."""
    made, setup = flags.parser(description, tasks), Setup()
    add = made.add_argument
    add("study", nargs="?", type=Path, metavar="STUDY.yaml", help="file with these flags as keys; must come first")
    add("--hosts", nargs="+", default=["bert", "llama"], metavar="NAME|JSON", help="default: bert llama")
    add(
        "--multiples",
        type=positive,
        nargs="+",
        default=[*map(positive, MULTIPLES)],
        help="test lengths as multiples of L; default: 1 1.5 2 4",
    )
    add("--test_rows", type=at_least(1), default=TEST_ROWS, help=f"test examples of tasks that draw them; default: {TEST_ROWS}")
    rates = ", ".join(f"{name}={host.learning_rate}" for name, host in models.HOSTS.items())
    rates += f", checkpoint={hosts.CHECKPOINT_LEARNING_RATE}"
    add("--learning_rate", nargs="+", default=[], metavar="[HOST=]X", help=f"default: {rates}")
    add("--weight_decay", type=positive_or_0, default=setup.weight_decay, help=f"default: {setup.weight_decay}")
    add("--warmup_steps", type=at_least(0), default=setup.warmup_steps, help=f"default: {setup.warmup_steps}")
    return made


def parse_arguments(argv: list[str] | None = None, parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Parse the command line, which overrides the study file."""
    parser = parser or flags_of(__doc__, COMPARED)
    arguments = parser.parse_args(argv)
    if arguments.study:
        narrowed = arguments.tasks if _is_given("--tasks", argv) else None
        said = [*study_files.as_flags(arguments.study, parser, narrowed), "--output_dir", str(arguments.output_dir)]
        arguments = parser.parse_args(argv, namespace=parser.parse_args(said))
    flags.check(parser, arguments)
    return arguments


def _is_given(flag: str, argv: list[str] | None) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in (sys.argv[1:] if argv is None else argv))


def studies_of(arguments: argparse.Namespace) -> tuple[dict[Path, Study], dict[str, list[str]]]:
    """Directory -> study of a model, and model -> tasks that it has no head for. Raises SystemExit for invalid arguments."""
    common = Setup(
        weight_decay=arguments.weight_decay,
        warmup_steps=arguments.warmup_steps,
        test_rows=arguments.test_rows,
        multiples=tuple(sorted(set(arguments.multiples))),
    )
    sizes, found = flags.sizes(arguments), []
    for text in arguments.hosts:
        try:
            found.append(hosts.chosen(flags.as_given(text), sizes, common))
        except ValueError as error:
            raise SystemExit(f"--hosts {text}: {error}") from None
    labels = [host.label for host in found]
    if len(set(labels)) < len(labels):
        raise SystemExit(f"--hosts {' '.join(labels)}: give each once")
    try:
        rates = flags.by_key(
            arguments.learning_rate, list(dict.fromkeys(name for host in found for name in host.names)), positive
        )
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise SystemExit(f"--learning_rate {error}") from None
    encodings, made, left_out = flags.encodings(arguments), {}, {}
    given = {name: getattr(arguments, name) for name in flags.PER_TASK}
    for host in found:
        host = hosts.at_rate(host, rates)
        try:
            own = hosts.study_of(host, arguments.tasks, given, encodings, arguments.seeds)
        except ValueError as error:
            raise SystemExit(f"{host.label}: {error}") from None
        if own is None:
            raise SystemExit(f"--hosts {host.label}: it has no head for any of --tasks {' '.join(arguments.tasks)}")
        made[arguments.output_dir / models.file_name(host.label)] = own
        left_out[host.label] = [task for task in arguments.tasks if task not in own.trainings]
    for task in arguments.tasks:
        if all(task in of for of in left_out.values()):
            raise SystemExit(f"--tasks {task}: none of the hosts, {', '.join(labels)}, has a head for it")
    return made, left_out


def tell(studies: dict[Path, Study], left_out: dict[str, list[str]]) -> None:
    """Print what is not run, and which weights of checkpoints are new."""
    for own in studies.values():
        if tasks := left_out[own.label]:
            print(f"{own.label} has no head for {', '.join(tasks)}: other hosts run on", file=sys.stderr)
        for label, reason in own.refused.items():
            print(f"{own.label}: {label} is left out: {reason}", file=sys.stderr)
        if folder := models.folder_of(own.setup.host):
            for head in sorted({ALL[task].head for task in own.trainings}):
                if new := models.new_weights(folder, head):
                    print(f"{own.label} lacks weights, which are drawn at random: {', '.join(new)}", file=sys.stderr)


def write(output: Path, parts: list[Part], left_out: dict[str, list[str]], failed: dict[str, str]) -> None:
    text = io.StringIO()
    for console in (Console(width=WIDTH), Console(file=text, width=WIDTH)):
        for table in filter(None, (several.table(parts), several.differences(parts), several.refused_table(parts))):
            console.print(table)
    write_text(output / "compare.txt", text.getvalue())
    records.write(output / "compare.json", several.as_record(parts, left_out, failed))
    several.draw(parts, output / "compare.png")


def run(arguments: argparse.Namespace, write: Callable[[Path, list[Part], dict[str, list[str]], dict[str, str]], None]) -> None:
    """Carry out the studies of all models, and call `write` with the results of all finished runs."""
    try:
        require_matplotlib()
    except ImportError as error:  # before hours of training
        raise SystemExit(str(error)) from None
    flags.begin(arguments)
    studies, left_out = studies_of(arguments)
    if process_state().is_main_process:
        tell(studies, left_out)
    if not any(own.encodings for own in studies.values()):
        raise SystemExit("--encodings: the hosts can have none of them")
    failed = {} if arguments.report_only else study.carry_out(studies, arguments.processes, tuple(arguments.modules))
    if not process_state().is_main_process:
        return
    parts = [Part(own, Results(study.records_of(folder, own))) for folder, own in studies.items()]
    if not any(part.results.records for part in parts):
        raise SystemExit("\n".join([f"{arguments.output_dir} has no finished run of this study", *study.told(failed)]))
    write(arguments.output_dir, parts, left_out, failed)
    study.stop_for(failed)


def main(argv: list[str] | None = None) -> None:
    run(parse_arguments(argv), write)


if __name__ == "__main__":
    terminals.set_up()
    study.quiet()
    main()
