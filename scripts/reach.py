"""Which of Transformers' model types can be patched: a tiny random model of each that common sizes build, checked by running.

    python scripts/reach.py --output_file scripts/results/reach.txt     # five minutes on two cores
    python scripts/reach.py --types llama,bert

Prints the types that are taken, by the positions that the stock model has, with how each check of `hosts/checks.py` went;
then those refused, by reason.
"""

import argparse
import logging
import multiprocessing
import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from tqdm.auto import tqdm
from transformers import CONFIG_MAPPING, MODEL_MAPPING

import hf_posenc
from hosts import checks, tiny

WIDTH = 128


@dataclass(frozen=True)
class Verdict:
    """The verdict on a model type.

    source: the positions of the stock model, if it is taken; reason, message: of the refusal, if it is refused; crash:
        another error. checks: check -> how it went; empty where the model doesn't run on token ids alone.
    """

    kind: str
    source: str = ""
    reason: str = ""
    message: str = ""
    crash: str = ""
    checks: dict[str, str] = field(default_factory=dict)

    @property
    def verified(self) -> bool:
        return bool(self.checks) and all(result in (checks.PASSED, checks.NOT_APPLICABLE) for result in self.checks.values())


def judge(kind: str) -> Verdict | None:
    """The verdict on a model type, or None where these sizes make no model of it."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny.build(kind)
        if model is None:
            return None
        try:
            hf_posenc.patch(model, "none")
            source = hf_posenc.inspect(model).encoding
        except hf_posenc.HostRefused as error:
            return Verdict(kind, reason=error.reason or "no reason", message=str(error).partition(". It was left")[0])
        except Exception as error:  # a bug: every host is taken or refused
            return Verdict(kind, crash=f"{type(error).__name__}: {error}")
        return Verdict(kind, source=source, checks=checks.checked(kind, model) if tiny.reads(model) else {})


def model_types() -> list[str]:
    """Transformers' own model types that AutoModel makes."""
    return [kind for kind in sorted(CONFIG_MAPPING) if not kind.startswith("posenc-") and CONFIG_MAPPING[kind] in MODEL_MAPPING]


def judged(kinds: list[str], processes: int) -> Iterator[Verdict]:
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for verdict in tqdm(pool.map(judge, kinds), total=len(kinds), unit="type"):
            if verdict is not None:
                yield verdict


def report(verdicts: Iterable[Verdict]) -> str:
    """The printed page."""
    verdicts = sorted(verdicts, key=lambda verdict: verdict.kind)
    taken = [verdict for verdict in verdicts if verdict.source]
    verified = [verdict for verdict in taken if verdict.verified]
    models = Path(transformers.__file__).parent / "models"
    folders = {_folder(verdict.kind) for verdict in verified}
    lines = [
        f"{len(taken)} of {len(verdicts)} model types that build are taken, {len(verified)} verified by every check that "
        f"applies; {len(folders)} of {len({path.parent for path in models.glob('*/modeling_*.py')})} modeling folders"
    ]
    for source, group in _grouped(taken, "source"):
        lines += ["", f"{source} ({len(group)})", " " * 26 + "".join(f"{name:>12}" for name in checks.CHECKS)]
        for each in group:
            results = (
                "".join(f"{each.checks[name]:>12}" for name in checks.CHECKS)
                if each.checks
                else " doesn't run on token ids alone"
            )
            lines.append(f"{each.kind:26}" + results)
    refused = [verdict for verdict in verdicts if verdict.reason]
    lines += ["", f"{len(refused)} refused"]
    for reason, group in _grouped(refused, "reason"):
        lines += ["", f"{reason} ({len(group)}), as", f"    {group[0].message}"]
        lines += _wrapped([each.kind for each in group])
    if crashed := [verdict for verdict in verdicts if verdict.crash]:
        lines += ["", f"{len(crashed)} crashed", *(f"    {each.kind}: {each.crash}" for each in crashed)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _grouped(verdicts: list[Verdict], by: str) -> list[tuple[str, list[Verdict]]]:
    """The largest group first."""
    groups = defaultdict(list)
    for verdict in verdicts:
        groups[getattr(verdict, by)].append(verdict)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))


def _wrapped(names: list[str]) -> list[str]:
    lines = ["   "]
    for name in names:
        if len(lines[-1]) + len(name) + 2 > WIDTH:
            lines.append("   ")
        lines[-1] += f" {name}," if name != names[-1] else f" {name}"
    return lines


def _folder(kind: str) -> str:
    return CONFIG_MAPPING[kind].__module__.split(".")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="model types, separated by commas; all by default")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output_file", type=Path, help="a file for the page, which is printed, too")
    args = parser.parse_args()
    page = report(judged(args.types.split(",") if args.types else model_types(), args.processes))
    print(page, end="")
    if args.output_file:
        args.output_file.write_text(page)


if __name__ == "__main__":
    main()
