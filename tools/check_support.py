"""Test with tiny random models which of Transformers' model types can be patched.

    python -m tools.check_support \\
        --output_file scripts/results/check_support.txt --csv_file scripts/results/check_support.csv \\
        --docs_file docs/reference/models.md --quoted_in README.md
    python -m tools.check_support --types llama,bert

A model family is a directory of Transformers with a model type. It counts if one of its model types passes every check of
`hosts/checks.py`. A check that doesn't apply, such as a cache for an encoder, is "-". A check that the original model fails
for a known reason is "stock fails", and the report lists the reason. A check that can't run is "skipped", and then the model
type doesn't count.

With --csv_file, it first prints what has changed since the file was written, for example with another version of Transformers.
With --types, the file isn't written.

If timm or torchaudio is installed, model types that need it are also tested (timm's image encoders, FastVLM, PerceptionLM, PE;
Higgs Audio's tokenizer). The report names the installed ones of these packages.

A run takes six minutes on two cores. Verdicts are stored by model type and hash of the code, so an interrupted run resumes.
"""

import argparse
import csv
import dataclasses
import hashlib
import io
import json
import multiprocessing
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers

from hf_posenc.evaluation import records, terminals
from hf_posenc.progress import ProgressBar
from hf_posenc.serialization.atomic import write_text
from tools.hosts import checks, tiny
from tools.hosts.checks import STOCK_FAILS
from tools.hosts.verdicts import Verdict, judge

WIDTH = 128
MARKERS = "<!-- tables by tools/check_support.py: begin -->", "<!-- tables by tools/check_support.py: end -->"
QUOTED = re.compile(r"> \d+ of \d+ model families")
OPTIONAL = ("detectron2", "natten", "timm", "torchaudio")
"""Packages that some model types need."""
HERE = Path(__file__).resolve().parent


def folders() -> set[str]:
    """The directories of all model types."""
    return {tiny.folder_of(kind) for kind in tiny.model_types()}


def installed() -> list[str]:
    """The installed ones of the optional packages."""
    return [name for name in OPTIONAL if find_spec(name) is not None]


def packages() -> str:
    """The second line of a report."""
    return f"with optional packages: {', '.join(installed()) or 'none'}"


def state_of_the_code() -> str:
    """A hash of the code, library versions, and optional packages that verdicts depend on."""
    files = [*(HERE.parent / "hf_posenc").rglob("*.py"), *(HERE / "hosts").glob("*.py"), HERE / "hosts" / "recipes.json"]
    digest = hashlib.sha256(f"{transformers.__version__} {torch.__version__} {installed()}".encode())
    for path in sorted(files):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Kept:
    """Verdicts stored as JSON Lines, by model type and state of the code."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.state = path, state_of_the_code()
        self.verdicts: dict[str, Verdict] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                if row.pop("state") == self.state:
                    self.verdicts[row["kind"]] = Verdict(**{**row, "encodings": tuple(row["encodings"])})

    def add(self, verdict: Verdict) -> None:
        self.verdicts[verdict.kind] = verdict
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"state": self.state, **dataclasses.asdict(verdict)}) + "\n")


def judged(kinds: list[str], processes: int, kept: Kept, limit: float) -> list[Verdict]:
    """The verdicts on model types. New ones are determined in parallel processes.

    limit: maximum seconds for a model type. A process that takes longer is killed.
    """
    waiting = [kind for kind in reversed(kinds) if kind not in kept.verdicts]
    workers: list[_Worker] = []
    progress = ProgressBar(total=len(waiting), unit="type")
    try:
        while waiting or any(worker.kind for worker in workers):
            while waiting and len(workers) < processes:
                workers.append(_Worker())
            for worker in workers:
                if waiting and not worker.kind:
                    worker.start(waiting.pop())
            for connection in wait([worker.connection for worker in workers if worker.kind], timeout=1):
                worker = next(worker for worker in workers if worker.connection is connection)
                kept.add(worker.verdict())
                progress.update()
            for worker in workers:
                if worker.kind and time.monotonic() - worker.since > limit:
                    kept.add(Verdict(worker.kind, tiny.folder_of(worker.kind), crash=f"not done within {limit:.0f} seconds"))
                    progress.update()
                    worker.stop()
            workers = [worker for worker in workers if worker.process.is_alive()]
    finally:
        progress.close()
        for worker in workers:
            worker.stop()
    return [kept.verdicts[kind] for kind in kinds]


class _Worker:
    """A process that determines the verdicts of model types one by one."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.kind, self.since = "", 0.0

    def start(self, kind: str) -> None:
        self.kind, self.since = kind, time.monotonic()
        self.connection.send(kind)

    def verdict(self) -> Verdict:
        """The verdict on the model type that was started last."""
        kind, self.kind = self.kind, ""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.stop()
            return Verdict(kind, tiny.folder_of(kind), crash="its process died")

    def stop(self) -> None:
        self.kind = ""
        self.process.kill()
        self.process.join()


def _serve(connection: Connection) -> None:
    while True:
        try:
            kind = connection.recv()
        except EOFError:
            return
        connection.send(judge(kind))


def headline(verdicts: Iterable[Verdict]) -> str:
    verdicts = list(verdicts)
    verified = {verdict.folder for verdict in verdicts if verdict.verified}
    embedding = {verdict.folder for verdict in verdicts if verdict.embeds_only} - verified
    more = f", {len(embedding)} more with additive encodings only" if embedding else ""
    return f"{len(verified)} of {len(folders())} model families pass every check{more}"


def stock_failures(verdicts: Iterable[Verdict]) -> list[str]:
    """The checks that original models fail, for models that pass every other check: `name: check (reason)`."""
    passed = [verdict for verdict in verdicts if verdict.passed]
    return [f"{each.name}: {check} ({why})" for each in passed for check, why in each.stock_fails.items()]


def report(verdicts: Iterable[Verdict]) -> str:
    """The report as text."""
    verdicts = sorted(verdicts, key=lambda verdict: verdict.kind)
    lines = [headline(verdicts), packages()]
    verified, embedding, other = _taken(verdicts)
    for title, group in (
        ("verified", verified),
        ("additive encodings only", embedding),
        ("patched, but not every check passes", other),
    ):
        if not group:
            continue
        lines += ["", f"{title} ({len(group)})", " " * 44 + "".join(f"{name:>12}" for name in checks.CHECKS)]
        for source, each_source in _grouped(group, "source"):
            lines += ["", source]
            for each in each_source:
                refused = [encoding for encoding in checks.ENCODINGS if encoding not in each.encodings]
                without = f"   without {', '.join(refused)}" if refused and title != "additive encodings only" else ""
                results = [STOCK_FAILS if name in each.stock_fails else each.checks[name] for name in checks.CHECKS]
                lines.append(f"{each.name:44}" + "".join(f"{result:>12}" for result in results) + without)
    if failures := stock_failures(verdicts):
        lines += ["", f"checks that the original model fails ({len(failures)})", *(f"    {each}" for each in failures)]
    unsupported = [verdict for verdict in verdicts if verdict.reason]
    lines += ["", f"{len(unsupported)} unsupported"]
    for reason, group in _grouped(unsupported, "reason"):
        lines += ["", f"{reason} ({len(group)}), for example", f"    {group[0].message}"]
        lines += _wrapped([each.name for each in group])
    unbuilt = [verdict for verdict in verdicts if verdict.unbuilt]
    lines += ["", f"{len(unbuilt)} not tested"]
    for why, group in _grouped(unbuilt, "unbuilt"):
        lines += ["", f"{why} ({len(group)})", *_wrapped([each.kind for each in group])]
    if crashed := [verdict for verdict in verdicts if verdict.crash]:
        lines += ["", f"{len(crashed)} crashed", *(f"    {each.name}: {each.crash}" for each in crashed)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _taken(verdicts: Iterable[Verdict]) -> tuple[list[Verdict], list[Verdict], list[Verdict]]:
    """The supported models in three lists: verified, additive encodings only, and not passing every check."""
    taken = [verdict for verdict in verdicts if verdict.taken]
    verified = [verdict for verdict in taken if verdict.verified]
    embedding = [verdict for verdict in taken if verdict.embeds_only]
    return verified, embedding, [verdict for verdict in taken if not verdict.passed]


def families(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """The best verdict of each modeling directory."""
    best: dict[str, Verdict] = {}
    for verdict in sorted(verdicts, key=lambda verdict: (-verdict.rank, verdict.kind)):
        best.setdefault(verdict.folder, verdict)
    return sorted(best.values(), key=lambda verdict: verdict.folder)


def tables(verdicts: Iterable[Verdict]) -> str:
    """The lists in docs/reference/models.md, one for each level of support with names. The others are in the CSV file."""
    verdicts = list(verdicts)
    every = families(verdicts)
    _, embedding, other = _taken(every)
    lines = [f"> {headline(verdicts)}"]
    if embedding:
        lines += ["", "### Additive encodings only", "", f"{len(embedding)}: {_folders(embedding)}."]
    if failures := stock_failures(every):
        lines += ["", "### Checks that the original model fails", "", *(f"- {each}" for each in failures)]
    if other:
        partial = f"{len(other)} families. The CSV file shows the check that fails."
        lines += ["", "### Patched, but not every check passes", "", partial]
    lines += ["", "### Unsupported", "", "| reason | families | what to do |", "|---|---|---|"]
    unsupported = _grouped([verdict for verdict in every if verdict.reason], "reason")
    lines += [f"| {reason} | {len(group)} | {remedy_for(group[0])} |" for reason, group in unsupported]
    lines += ["", *(f"- {reason}: {_folders(group)}." for reason, group in unsupported)]
    if left := [verdict for verdict in every if verdict.unbuilt or verdict.crash]:
        lines += ["", "### Not tested", "", f"{len(left)} families, with the reason in the CSV file."]
    return "\n".join(lines) + "\n"


def _folders(group: list[Verdict]) -> str:
    """The modeling directories, each with the model type of its verdict if that has another name."""
    return ", ".join(each.folder if each.kind == each.folder else f"{each.folder} (`{each.kind}`)" for each in group)


COLUMNS = ("family", "model_type", "submodel", "support", "positions", *checks.CHECKS, "without", "reason")


def rows(verdicts: Iterable[Verdict]) -> list[dict[str, str]]:
    """One row per modeling directory, with the patched submodel, its original positions, and the results or the error."""
    found = []
    for each in families(verdicts):
        support = "all" if each.verified else "additive" if each.embeds_only else "not verified" if each.taken else ""
        support = support or ("unsupported" if each.reason else "not tested")
        results = [each.checks.get(name, "") for name in checks.CHECKS]
        without = " ".join(name for name in checks.ENCODINGS if name not in each.encodings) if each.taken else ""
        reason = each.reason or each.unbuilt or each.crash
        values = (each.folder, each.kind, each.part, support, each.source, *results, without, reason)
        found.append(dict(zip(COLUMNS, values, strict=True)))
    return found


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


def write_csv(path: Path, found: list[dict[str, str]]) -> None:
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    write_text(path, file.getvalue())


def changes(before: list[dict[str, str]], now: list[dict[str, str]]) -> str:
    """What differs between the rows of two runs: families that are new or gone, and values of the others."""
    old, new = ({row["family"]: row for row in found} for found in (before, now))
    lines = [f"    {family}: new, {new[family]['support']} {new[family]['reason']}" for family in sorted({*new} - {*old})]
    lines += [f"    {family}: no longer there, before: {old[family]['support']}" for family in sorted({*old} - {*new})]
    for family in sorted({*old} & {*new}):
        differing = [name for name in COLUMNS if (old[family].get(name) or "") != new[family][name]]
        if differing:
            values = (f"{name} {old[family].get(name) or 'nothing'!r} -> {new[family][name]!r}" for name in differing)
            lines.append(f"    {family}: {', '.join(values)}")
    return "\n".join([f"{len(lines)} families have changed", *(line.rstrip() for line in lines)])


def remedy_for(verdict: Verdict) -> str:
    """What the user of an unsupported model can do, from `remedies.json` or the error message."""
    remedies = json.loads((HERE / "hosts" / "remedies.json").read_text(encoding="utf-8"))
    return remedies.get(verdict.reason, verdict.remedy)


def write_tables(page: Path, verdicts: Iterable[Verdict]) -> None:
    """Replace the text between the markers of a page. Raises ValueError if the page lacks a marker."""
    records.fill(page, MARKERS, tables(verdicts))


def quote(page: Path, verdicts: Iterable[Verdict]) -> None:
    """Replace the headline in a page that quotes it."""
    lines = page.read_text(encoding="utf-8").splitlines()
    lines = [f"> {headline(verdicts)}" if QUOTED.match(line) else line for line in lines]
    write_text(page, "\n".join(lines) + "\n")


def _grouped(verdicts: list[Verdict], by: str) -> list[tuple[str, list[Verdict]]]:
    """Verdicts grouped by an attribute, the largest group first."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="comma-separated model types (default: all)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300, help="seconds per model type (default: %(default)s)")
    parser.add_argument("--output_file", type=Path, help="file for the report, which is also printed")
    parser.add_argument("--csv_file", type=Path, help="file for one row per family")
    parser.add_argument("--docs_file", type=Path, help="page whose lists, between markers, are replaced")
    parser.add_argument("--quoted_in", type=Path, nargs="*", default=[], help="pages that quote the first line")
    kept = HERE.parent / "build" / "check_support.jsonl"
    parser.add_argument("--verdicts_file", type=Path, default=kept, help="file of stored verdicts (default: %(default)s)")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="reuse stored verdicts")
    args = parser.parse_args()
    args.verdicts_file.parent.mkdir(parents=True, exist_ok=True)
    if not args.resume:
        args.verdicts_file.unlink(missing_ok=True)
    kinds = known = tiny.model_types()
    if args.types:
        kinds = args.types.split(",")
        if unknown := {*kinds} - {*known}:
            parser.error(f"--types {min(unknown)} is not a model type of Transformers (see transformers.CONFIG_MAPPING)")
    verdicts = judged(kinds, args.processes, Kept(args.verdicts_file), args.limit)
    page = report(verdicts)
    print(page, end="")
    if args.output_file:
        write_text(args.output_file, page)
    if args.csv_file:
        found = rows(verdicts)
        if args.csv_file.exists():
            judged_now = {row["family"] for row in found}
            kept_rows = [row for row in read_csv(args.csv_file) if not args.types or row["family"] in judged_now]
            print(changes(kept_rows, found))
        if not args.types:
            write_csv(args.csv_file, found)
    if args.docs_file:
        write_tables(args.docs_file, verdicts)
    for path in args.quoted_in:
        quote(path, verdicts)


if __name__ == "__main__":
    terminals.set_up()
    main()
