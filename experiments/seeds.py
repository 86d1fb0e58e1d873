"""Fine-tune several models with several seeds each, all else equal, and print the mean metrics with intervals.

    python -m experiments.seeds MiniLM=MODEL MiniLM-ALiBi=demo_output/minilm-alibi --seeds 0 1 2 --output_dir seeds -- \\
        --train_file reviews/train.csv --validation_file reviews/validation.csv …        # the flags of finetune.py

The intervals are Student's 95% intervals of the mean over seeds. They indicate how much a run depends on its seed, not how well
the validation examples represent others.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_posenc.evaluation import records, terminals
from hf_posenc.evaluation.metrics import UNCORRECTED, interval
from hf_posenc.progress import ProgressBar


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=PATH")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--metrics", nargs="+", default=["eval_accuracy", "eval_macro_f1"])
    parser.add_argument("--output_dir", type=Path, required=True)
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    arguments = parser.parse_args(argv[:split])
    arguments.flags = argv[split + 1 :]
    for model in arguments.models:
        if not all(model.partition("=")):
            parser.error(f"{model!r}: give NAME=PATH")
    if len(set(arguments.seeds)) != len(arguments.seeds) or len(arguments.seeds) < 2:
        parser.error(f"--seeds {arguments.seeds}: give two different ones or more")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    runs = [(*model.partition("=")[::2], seed) for model in arguments.models for seed in arguments.seeds]
    found: dict[str, list[dict[str, Any]]] = {}
    for name, path, seed in ProgressBar(runs, desc="runs"):
        folder = arguments.output_dir / f"{name}-{seed}"
        command = [sys.executable, "-m", "hf_posenc.training.finetune", "--model_name_or_path", path]
        command += ["--seed", str(seed), "--output_dir", str(folder), *arguments.flags]
        if code := subprocess.run(command).returncode:
            sys.exit(code)
        found.setdefault(name, []).append(records.read(folder / "all_results.json"))
    results: dict[str, Any] = {}
    table = Table("model", *arguments.metrics, title=f"{len(arguments.seeds)} seeds: mean and interval", caption=UNCORRECTED)
    for name, runs_of in found.items():
        values = {metric: [run[metric] for run in runs_of] for metric in arguments.metrics}
        means = {metric: interval(each) for metric, each in values.items()}
        kept = {"seeds": arguments.seeds, "steps": runs_of[0]["steps"], "seconds": [run["seconds"] for run in runs_of]}
        results[name] = {**kept, "values": values, "mean_and_half_width": means}
        table.add_row(name, *(f"{mean:.3f} ± {half:.3f}" for mean, half in means.values()))
    records.write(arguments.output_dir / "seeds.json", {"flags": arguments.flags, "models": results})
    Console().print(table)


if __name__ == "__main__":
    terminals.set_up()
    main()
