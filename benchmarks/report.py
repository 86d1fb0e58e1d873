"""What bench.py prints: the results as text, as the tables of docs/speed.md, and as a figure."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.comparing import NONE, STOCK, Record
from benchmarks.grid import Group
from benchmarks.targets import TARGETS, Verdict, verdicts
from hf_posenc import plots
from hf_posenc.evaluation import records
from hf_posenc.plots.speed_records import groups_by_panel

MARKERS = "<!-- tables by scripts/bench.py: begin -->", "<!-- tables by scripts/bench.py: end -->"
LEGEND = (
    "ms: the median. x stock, x none: throughput as a ratio to theirs, taken within rounds; below 1 is slower than they are, "
    "above 1 faster; [its 95 % interval]. Targets say what they compare: throughput, time or memory."
)
HOSTS = {"bert": "BERT", "gpt2": "GPT-2", "llama": "Llama", "vit": "ViT"}
MODELS = ("forward", "train", "decode", "attention", "attention-train")
"""Kinds of groups that have every encoding."""
SHOWN = 6
"""Subjects that a row of the page's table of targets names."""
HEADINGS = {
    "forward": "Whole model, forward",
    "train": "Whole model, forward and backward",
    "decode": "One step of decoding",
    "attention": "Attention alone, forward",
    "attention-train": "Attention alone, forward and backward",
    "x-transformers": "Beside x-transformers",
    "rotation": "Beside rotary-embedding-torch: one tensor of queries rotated",
    "v4": "Shaw's encoding beside Transformers 4.57: forward",
    "v4-train": "Shaw's encoding beside Transformers 4.57: forward and backward",
    "patch": "patch() of 12 layers",
    "import": "Import, in new processes",
    "encode": "SentenceTransformer.encode",
    "train_mlm": "train_mlm.py, a step",
    "distill": "distill.py, a step",
    "load": "A model of 1 GB: loaded and patched",
}
Groups = dict[str, Record]


def title(name: str, group: Record) -> str:
    """What a group is, in a line."""
    if "layers" not in group:
        return f"{name}: {group['what']}"
    host = HOSTS[group["host"]]
    shape = f"{group['layers']} layer{'s' * (group['layers'] > 1)} x {group['heads']} heads, {group['dtype']}"
    more = [f"batch {group['batch']} x {group['length']}" if group["kind"] != "decode" else f"{group['length']} tokens cached"]
    more += ["half of the rows a quarter padded"] * bool(group.get("padded"))
    more += [f"dropout {group['dropout']}"] if group.get("dropout") else []
    return f"{name}: {host}, {shape}, {', '.join(more)}"


def listing(groups: Iterable[Group]) -> Iterator[str]:
    """The kinds of groups, and under each its groups, in the order in which they are measured."""
    last = ""
    for group in groups:
        if group.what:
            yield title(group.name, group.about())
        else:
            if group.kind != last:
                yield f"{group.kind}: {HEADINGS[group.kind]}"
            yield f"  {title(group.name, group.about())}"
        last = group.kind


def text(results: dict[str, Any]) -> str:
    """The printed page."""
    lines = [results["command"], machine(results["machine"]), LEGEND]
    groups = results["groups"]
    for name, group in groups.items():
        lines += ["", title(name, group), *_table(_rows(group))]
        lines += [f"  {each}: {record['failed']}" for each, record in group["subjects"].items() if "failed" in record]
        lines += [f"  {group['note']}"] if "note" in group else []
    found = list(verdicts(groups))
    if found:
        rows = [["target", "bound", "group", "subject", "measured", ""]]
        rows += [
            [
                each.target.what,
                each.target.shown_bound,
                each.group,
                each.subject,
                _measured(each),
                "met" if each.met else "MISSED",
            ]
            for each in found
        ]
        met = sum(each.met for each in found)
        lines += ["", f"targets: {met} of {len(found)} met", *_table(rows)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


CLOCKS = {"wall": "wall clock", "process": "the process's own clock"}


def machine(about: dict[str, Any]) -> str:
    shown = f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads, {CLOCKS[about.get('clock', 'wall')]}"
    shown = f"{about['gpu']}; {shown}" if about.get("gpu") else shown
    return f"{shown}; torch {about['torch']}, transformers {about['transformers']}, Python {about['python']}"


def _rows(group: Record) -> list[list[str]]:
    """Header and rows of a group's table."""
    done = {name: record for name, record in group["subjects"].items() if "failed" not in record}
    named = dict.fromkeys(other for record in done.values() for other in record.get("ratios", {}))
    references = [*(name for name in (STOCK, NONE) if name in named), *(name for name in named if name not in (STOCK, NONE))]
    more = [name for name in FURTHER if any(name in record for record in done.values())]
    rows = [["", "ms", *(f"x {other} [95 %]" for other in references), *(FURTHER[name] for name in more)]]
    for name, record in done.items():
        ratios = [_ratio(record.get("ratios", {}).get(other)) for other in references]
        rows.append([name, _number(record.get("milliseconds")), *ratios, *(_number(record.get(each)) for each in more)])
    return rows


FURTHER = {
    "peak_mb": "peak MB",
    "first_ms": "ms, first call",
    "copied_mb": "MB copied",
    "texts_per_second": "texts per second",
    "resident_mb": "peak of resident MB",
}
"""What a record may have beside its time and ratios -> the heading of its column."""


def _ratio(found: list[float] | None) -> str:
    return "" if found is None else f"{found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}]"


def _number(value: float | None) -> str:
    """Three digits, or all of a larger one."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _measured(verdict: Verdict) -> str:
    digits = 2 if verdict.target.unit[0] == "x" and verdict.value >= 0.1 else 3 if verdict.target.unit[0] == "x" else 1
    between = ""
    if verdict.interval is not None:
        between = f" [{verdict.interval[0]:.{digits}f}, {verdict.interval[1]:.{digits}f}]"
    return f"{verdict.value:.{digits}f}{between}"


def _table(rows: list[list[str]]) -> Iterator[str]:
    """Rows in columns: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = [
        all(not cell or cell[0].isdigit() or cell[0] == "-" for cell in column[1:]) for column in zip(*rows, strict=True)
    ]
    for row in rows:
        cells = zip(row, widths, numbers, strict=True)
        yield "  " + "  ".join(cell.rjust(width) if number else cell.ljust(width) for cell, width, number in cells)


def tables(results: dict[str, Any], device: str) -> str:
    """The tables of docs/speed.md."""
    groups = results["groups"]
    lines = [f"{machine(results['machine'])}; {results['date']}:", "", "```", results["command"], "```", "", LEGEND]
    if device == "cpu":
        lines += ["", "### Targets", "", *_target_rows(list(verdicts(groups)))]
    for kind in dict.fromkeys(group["kind"] for group in groups.values()):
        chosen = {name: group for name, group in groups.items() if group["kind"] == kind}
        lines += ["", f"### {HEADINGS[kind]}", ""]
        if kind in MODELS:
            for host in dict.fromkeys(group["host"] for group in chosen.values()):
                lines += [*_by_length({name: group for name, group in chosen.items() if group["host"] == host}), ""]
            lines.pop()
        else:
            for name, group in chosen.items():
                lines += [title(name, group) + ":", "", *_markdown(_rows(group)), ""]
                lines += [f"{group['note']}", ""] if "note" in group else []
            lines.pop()
        for name, group in chosen.items():
            failed = {each: record["failed"] for each, record in group["subjects"].items() if "failed" in record}
            lines += [line for each, why in failed.items() for line in ("", f"`{each}` failed in {name}: {why}")]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _target_rows(found: list[Verdict]) -> list[str]:
    """One row for each target that was measured: the worst subject, and which missed it; how many others there are."""
    others = 0
    rows = [["what", "target", "worst", "met", "missed by"]]
    for target in TARGETS:
        mine = [each for each in found if each.target is target]
        if not mine:
            others += 1
            continue
        worst = (min if target.at_least else max)(mine, key=lambda each: each.value)
        missing = sorted((each for each in mine if not each.met), key=lambda each: each.value, reverse=not target.at_least)
        missed = ", ".join(f"{each.subject} ({each.group}) {_measured(each)}" for each in missing[:SHOWN])
        missed += f", and {len(missing) - SHOWN} more in bench.txt" if len(missing) > SHOWN else ""
        met = f"{sum(each.met for each in mine)} of {len(mine)}"
        shown = f"{_measured(worst)}: {worst.subject}"
        rows.append([target.what, target.shown_bound, shown, met, missed or "–"])
    lines = list(_markdown(rows)) if len(rows) > 1 else []
    count = f"{others} of {len(TARGETS)} targets were not measured."
    return [*lines, *([""] if lines and others else []), *([count] if others else [])]


def _by_length(groups: Groups) -> list[str]:
    """A row for each encoding, a column for each group: throughput as a ratio to the stock model, and to `none`'s time the
    first row's milliseconds."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group["subjects"]))
    heads = [_head(group) for group in groups.values()]
    rows = [["x stock [95 %]", *heads]]
    rows.append([f"{STOCK}, ms", *(_number(group["subjects"].get(STOCK, {}).get("milliseconds")) for group in groups.values())])
    for name in names:
        if name == STOCK:
            continue
        cells = [_ratio(group["subjects"].get(name, {}).get("ratios", {}).get(STOCK)) for group in groups.values()]
        rows.append([f"`{name}`", *(cell or "–" for cell in cells)])
    lines = list(_markdown(rows))
    peaks = [["peak MB", *heads]]
    for name in names:
        cells = [_number(group["subjects"].get(name, {}).get("peak_mb")) for group in groups.values()]
        peaks.append([name if name == STOCK else f"`{name}`", *(cell or "–" for cell in cells)])
    return [*lines, "", *_markdown(peaks)]


def _head(group: Record) -> str:
    dtype = {"float32": "fp32", "bfloat16": "bf16"}[group["dtype"]]
    shape = f"{group['batch']} x {group['length']}" if group["batch"] > 1 else f"{group['length']}"
    more = [part for part in ("padded", "dropout") if group.get(part)]
    host = [] if group["host"] == "bert" else [HOSTS[group["host"]]]
    small = [f"{group['heads']} heads"] if group["heads"] != 12 else []
    return ", ".join([*host, shape, dtype, *small, *more])


def _markdown(rows: Iterable[list[str]]) -> Iterator[str]:
    header, *others = rows
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for row in others:
        yield f"| {' | '.join(row)} |"


def write_tables(page: Path, by_device: dict[str, Any]) -> None:
    """Replace what lies between the markers of a page; of a device without results the page says so.

    Raises ValueError for a page without markers.
    """
    records.fill(page, MARKERS, both(by_device))


def both(by_device: dict[str, Any]) -> str:
    """The tables of a CPU, then those of a GPU."""
    parts = []
    for device, heading in (("cpu", "CPU"), ("cuda", "GPU")):
        command = "make bench" if device == "cpu" else "make bench-gpu"
        nothing = (
            f"Nothing yet: {'no GPU was at hand' if device == 'cuda' else 'it was not run'}. `{command}` fills this part.\n"
        )
        shown = tables(by_device[device], device) if device in by_device else nothing
        parts.append(f"## Measured on a {heading}\n\n{shown}")
    return "\n".join(parts)


def draw(results: dict[str, Any], path: Path) -> None:
    """The figure of hf_posenc.plots.bench, where there is something that it shows."""
    if groups_by_panel(results):
        plots.bench(results, path=path)
