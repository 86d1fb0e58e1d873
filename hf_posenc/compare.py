"""Compare encodings on several models and tasks, all else equal, trained at lengths up to L and tested beyond L.

    hf-posenc compare study.yaml --processes 2 --output_dir OUT
    hf-posenc compare --encodings none rope alibi '{"type": "t5", "num_buckets": 16}' \\
        --tasks mlm clm --length 64 --multiples 1 2 4 --seeds 0 1 2 --output_dir OUT
    hf-posenc compare --import my_task --tasks my_task --save --output_dir OUT
    accelerate launch --multi_gpu -m hf_posenc.compare study.yaml --output_dir OUT

Models (`--models bert llama` by default) are tiny models with random weights (bert, llama, or gpt2), models of a config file,
or checkpoints. A tiny model can have config options, as in '{"type": "llama", "num_key_value_heads": 2}'. `config:FILE` takes
a config.json, with random weights. `checkpoint:MODEL`, a directory or Hub ID, keeps the weights of a checkpoint and replaces
its positions. `--steps 0` trains nothing.

Models run the tasks that they have a head for: encoders run mlm, and decoders run clm, copy, reverse, and addition. Both run
classification (which of two markers comes first). Texts are from Python's help, or from --texts. A module that calls
`hf_posenc.studies.register_task` adds a task; pass it to --import. For a given seed, all encodings start from the same model
weights and see the same rows in the same order. Digests in the records confirm this. Unsupported combinations are listed with
their reasons, and the others run.

A YAML file has the flags as keys. A flag on the command line overrides its key. Each finished run has a file in
--output_dir/MODEL/runs, and with --save, its model is saved in the directory of the same name. If a command is interrupted, the
same command resumes it, also with more models, tasks, encodings, and seeds. At the end, compare.txt (one table: mean ± interval
over seeds, by length), compare.json, and compare.png are written.
"""

import argparse
import io
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from hf_posenc.diagnostics.figures import require_matplotlib
from hf_posenc.evaluation import records, terminals, text_files
from hf_posenc.plots.study_curves import study as draw
from hf_posenc.serialization.atomic import write_text
from hf_posenc.studies import files, flags, models, selection, study, tables, tasks
from hf_posenc.studies.record import Part, as_record
from hf_posenc.studies.results import Results
from hf_posenc.studies.runs import Setup, process_state
from hf_posenc.studies.study import Study
from hf_posenc.training.flags import at_least, positive, positive_or_0

WIDTH = 140
MULTIPLES = ("1", "1.5", "2", "4")
TEST_ROWS = 256

Write = Callable[[argparse.Namespace, list[Part], dict[str, list[str]], dict[str, str]], None]


def parser_of(description: str | None = __doc__) -> argparse.ArgumentParser:
    """The flags of a study."""
    made, setup = flags.parser(description), Setup()
    add = made.add_argument
    add("study", nargs="?", type=Path, metavar="STUDY.yaml", help="file with these flags as keys; must come first")
    add("--models", nargs="+", default=["bert", "llama"], metavar="NAME|JSON", help="default: bert llama")
    add(
        "--multiples",
        type=positive,
        nargs="+",
        default=[*map(positive, MULTIPLES)],
        help="test lengths as multiples of L; default: 1 1.5 2 4",
    )
    add("--test_rows", type=at_least(1), default=TEST_ROWS, help=f"test rows of tasks that draw them; default: {TEST_ROWS}")
    rates = {name: kind.learning_rate for name, kind in models.MODELS.items()}
    rates |= {"config": models.CONFIG_LEARNING_RATE, "checkpoint": selection.CHECKPOINT_LEARNING_RATE}
    shown = ", ".join(f"{name}={rate}" for name, rate in rates.items())
    add("--learning_rate", nargs="+", default=[], metavar="[MODEL=]X", help=f"default: {shown}")
    add("--weight_decay", type=positive_or_0, default=setup.weight_decay, help=f"default: {setup.weight_decay}")
    add("--warmup_steps", type=at_least(0), default=setup.warmup_steps, help=f"default: {setup.warmup_steps}")
    return made


def parse_arguments(argv: list[str] | None = None, parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Parse the command line, which overrides the study file."""
    parser = parser or parser_of()
    arguments = parser.parse_args(argv)
    if arguments.study:
        narrowed = arguments.tasks if _is_given("--tasks", argv) else None
        given = [*files.as_flags(arguments.study, parser, narrowed), "--output_dir", str(arguments.output_dir)]
        arguments = parser.parse_args(argv, namespace=parser.parse_args(given))
    flags.check(parser, arguments)
    return arguments


def _is_given(flag: str, argv: list[str] | None) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in (sys.argv[1:] if argv is None else argv))


def studies_of(arguments: argparse.Namespace) -> tuple[dict[Path, Study], dict[str, list[str]]]:
    """Directory -> study of a model, and model -> tasks that it has no head for. Raises SystemExit for invalid arguments."""
    if arguments.texts:
        try:
            text_files.rows(arguments.texts)
        except ValueError as error:
            raise SystemExit(f"--texts: {error}") from None
    common = Setup(
        weight_decay=arguments.weight_decay,
        warmup_steps=arguments.warmup_steps,
        test_rows=arguments.test_rows,
        multiples=tuple(sorted(set(arguments.multiples))),
        texts=str(arguments.texts) if arguments.texts else None,
    )
    sizes, found = flags.sizes(arguments), []
    for text in arguments.models:
        try:
            found.append(selection.chosen(flags.as_given(text), sizes, common))
        except ValueError as error:
            raise SystemExit(f"--models {text}: {error}") from None
    labels = [model.label for model in found]
    if len(set(labels)) < len(labels):
        raise SystemExit(f"--models {' '.join(labels)}: a model occurs twice. Give each once.")
    try:
        names = list(dict.fromkeys(name for model in found for name in model.names))
        rates = flags.by_key(arguments.learning_rate, names, positive)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise SystemExit(f"--learning_rate {error}") from None
    encodings, made, left_out = flags.encodings(arguments), {}, {}
    given = {name: getattr(arguments, name) for name in flags.PER_TASK}
    for model in found:
        model = selection.at_rate(model, rates)
        try:
            own = selection.study_of(model, arguments.tasks, given, encodings, arguments.seeds, arguments.save)
        except ValueError as error:
            raise SystemExit(f"{model.label}: {error}") from None
        if own is None:
            raise SystemExit(f"--models {model.label}: the model has no head for any of --tasks {' '.join(arguments.tasks)}.")
        made[arguments.output_dir / models.file_name(model.label)] = own
        left_out[model.label] = [task for task in arguments.tasks if task not in own.trainings]
    for task in arguments.tasks:
        if all(task in names for names in left_out.values()):
            raise SystemExit(f"--tasks {task}: none of the models, {', '.join(labels)}, has a head for this task.")
    return made, left_out


def announce(studies: dict[Path, Study], left_out: dict[str, list[str]]) -> None:
    """Print what is not run, and which weights of checkpoints are new."""
    for own in studies.values():
        if missing := left_out[own.label]:
            print(f"{own.label} has no head for {', '.join(missing)}. Other models run on.", file=sys.stderr)
        for label, reason in own.unsupported.items():
            print(f"{own.label}: {label} is left out: {reason}", file=sys.stderr)
        if directory := models.directory_of(own.setup.model):
            for task in (tasks.TASKS[name] for name in own.trainings):
                if new := models.new_weights(directory, task.head, task.classes):
                    print(f"{own.label} lacks weights, which are initialized at random: {', '.join(new)}", file=sys.stderr)


def write(arguments: argparse.Namespace, parts: list[Part], left_out: dict[str, list[str]], failed: dict[str, str]) -> None:
    """Print the tables, and write the tables, the record, and the figure to files."""
    output, text = arguments.output_dir, io.StringIO()
    records.write(output / "compare.json", as_record(parts, left_out, failed, arguments.correction))
    record = records.read(output / "compare.json")
    for console in (Console(width=WIDTH), Console(file=text, width=WIDTH)):
        for table in tables.for_terminal(record):
            console.print(table)
    write_text(output / "compare.txt", text.getvalue())
    draw(record, path=output / "compare.png")


def run(arguments: argparse.Namespace, write: Write) -> None:
    """Carry out the studies of all models, and call `write` with the results of all finished runs."""
    try:
        require_matplotlib()
    except ImportError as error:  # before hours of training
        raise SystemExit(str(error)) from None
    study.begin()
    studies, left_out = studies_of(arguments)
    if process_state().is_main_process:
        announce(studies, left_out)
    if not any(own.encodings for own in studies.values()):
        raise SystemExit("--encodings: the models support none of them.")
    failed = {} if arguments.report_only else study.carry_out(studies, arguments.processes, tuple(arguments.modules))
    if not process_state().is_main_process:
        return
    parts = [Part(own, Results(study.records_of(directory, own))) for directory, own in studies.items()]
    if not any(part.results.records for part in parts):
        raise SystemExit("\n".join([f"{arguments.output_dir} has no finished run of this study.", *study.failures(failed)]))
    write(arguments, parts, left_out, failed)
    study.stop_for(failed)


def main(argv: list[str] | None = None) -> None:
    run(parse_arguments(argv), write)


if __name__ == "__main__":
    terminals.set_up()
    study.quiet()
    main()
