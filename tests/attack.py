"""Attack the library: every encoding × what was once found to break some, and count how it ends.

    python tests/attack.py --output_file scripts/results/attack.txt     # a quarter of an hour on two cores
    python tests/attack.py --attacks gaps,offload --encodings rope,alibi
    python tests/attack.py --only "gaps/ids that jump/gpt2/rope"        # one case; what a fault is reported with

A case ends "equal" to an oracle (a stock model, or one forward pass over whole texts without padding), "refused" by an error
of hf-posenc that says what to do instead, or "stock too" where a stock model fails alike. WRONG, CRASH and HANG are faults,
with which the exit status is 1.
"""

import argparse
import importlib
import multiprocessing
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/ and experiments/ are not installed

from attacks.cases import FAULTS, OUTCOMES, REFUSED, STOCK_TOO, Settings, Verdict, end_elsewhere, judge, quiet
from attacks.subjects import encodings
from hf_posenc.evaluation import terminals
from hf_posenc.progress import ProgressBar
from hf_posenc.serialization.atomic import write_text

FAMILIES = (
    "own",
    "decoding",
    "gaps",
    "offload",
    "threads",
    "surgery",
    "masks",
    "seeds",
    "generation",
    "batching",
    "backends",
    "kills",
    "stalls",
    "training",
    "seq2seq",
    "graphs",
    "speech",
    "memories",
    "vision",
    "legacy",
    "generations",
    "processes",
)
"""The modules of `attacks/` with `cases`."""
PARTS = 6
"""Into how many jobs each family is split."""


def judged(family: str, settings: Settings, part: int = 0, parts: int = 1, only: str = "") -> list[Verdict]:
    """Verdicts on one of so many parts of a family's cases, of those whose name contains `only`."""
    with warnings.catch_warnings():
        quiet()
        cases = list(importlib.import_module(f"attacks.{family}").cases(settings))
        cases = [case for case in cases if only in case.name_in(family)]
        try:
            return [judge(family, case) for case in cases[len(cases) * part // parts : len(cases) * (part + 1) // parts]]
        finally:
            end_elsewhere()


def all_judged(families: list[str], settings: Settings, only: str, processes: int) -> Iterator[Verdict]:
    with TemporaryDirectory() as folder, ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        os.environ["TMPDIR"] = folder  # of the workers, which are started now; killed ones don't tidy up
        jobs = [pool.submit(judged, family, settings, part, PARTS, only) for part in range(PARTS) for family in families]
        for job in ProgressBar(as_completed(jobs), total=len(jobs), unit="job"):
            yield from job.result()


def report(verdicts: list[Verdict], settings: Settings) -> str:
    """The printed page."""
    attacks = list(dict.fromkeys((verdict.family, verdict.attack) for verdict in sorted(verdicts, key=_order)))
    total = Counter(verdict.outcome for verdict in verdicts)
    lines = [f"{len(verdicts)} cases: " + ", ".join(f"{total[outcome]} {outcome}" for outcome in OUTCOMES), ""]
    lines.append(f"{'attack':56}" + "".join(f"{outcome:>11}" for outcome in OUTCOMES))
    for family, attack in attacks:
        counts = Counter(each.outcome for each in verdicts if (each.family, each.attack) == (family, attack))
        row = "".join(f"{counts[outcome] or '-':>11}" for outcome in OUTCOMES)
        lines.append(f"{family + ': ' + attack:56}" + row)
    lines += ["", *_by_encoding(verdicts, settings)]
    for outcome in (REFUSED, STOCK_TOO):
        said = Counter((each.family, _alike(each.note)) for each in verdicts if each.outcome == outcome)
        lines += ["", f"{sum(said.values())} {outcome}"]
        lines += [f"{count:6} {family}: {note[:110]}" for (family, note), count in sorted(said.items())]
    faults = sorted((each for each in verdicts if each.outcome in FAULTS), key=_order)
    lines += ["", f"{len(faults)} faults" + ("; to see one again: python tests/attack.py --only NAME" if faults else "")]
    lines += [f"{each.outcome:6} {each.name}: {each.note[:160]}" for each in faults]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _by_encoding(verdicts: list[Verdict], settings: Settings) -> Iterator[str]:
    """Encoding × family: the cases without a fault, of how many where those aren't all."""
    families = [family for family in FAMILIES if any(each.family == family for each in verdicts)]
    yield f"{'without a fault':32}" + "".join(f"{family:>12}" for family in families)
    for encoding in (name for name in settings.encodings if any(each.encoding == name for each in verdicts)):
        cells = []
        for family in families:
            outcomes = [each.outcome for each in verdicts if (each.family, each.encoding) == (family, encoding)]
            good = sum(outcome not in FAULTS for outcome in outcomes)
            cells.append("" if not outcomes else str(good) if good == len(outcomes) else f"{good} of {len(outcomes)}")
        yield f"{encoding:32}" + "".join(f"{cell:>12}" for cell in cells)


def _alike(note: str) -> str:
    """A note without its numbers and the random names of folders."""
    return re.sub(r"\d+", "0", re.sub(r"\S*/tmp\w{8}/", "", note))


def _order(verdict: Verdict) -> tuple[int, str]:
    return FAMILIES.index(verdict.family), verdict.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", help=f"families, separated by commas, of {', '.join(FAMILIES)}; all by default")
    parser.add_argument("--encodings", help="separated by commas; all by default")
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments, weights and inputs")
    parser.add_argument("--kills", type=int, default=100, help="random moments at which a save is killed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output_file", type=Path, help="a file for the page, which is printed, too")
    args = parser.parse_args()
    families = args.attacks.split(",") if args.attacks else [*FAMILIES]
    if unknown := sorted({*families} - {*FAMILIES}):
        parser.error(f"--attacks: {', '.join(unknown)} must be of {', '.join(FAMILIES)}")
    if unknown := sorted({*(args.encodings or "").split(",")} - {"", *encodings()}):
        parser.error(f"--encodings: {', '.join(unknown)} must be of {', '.join(encodings())}")
    settings = Settings(tuple(args.encodings.split(",")) if args.encodings else encodings(), args.seed, args.kills)
    verdicts = list(all_judged(families, settings, args.only, args.processes))
    if not verdicts:
        parser.error(f"no case has {args.only!r} in its name")
    page = report(verdicts, settings)
    print(page, end="")
    if args.output_file:
        write_text(args.output_file, page)
    sys.exit(any(verdict.outcome in FAULTS for verdict in verdicts))


if __name__ == "__main__":
    terminals.set_up()
    main()
