"""The results of bench.py as text, as the summary of docs/results/speed.md, and as a figure."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.comparing import NONE, STOCK, Record
from benchmarks.grid import Group
from benchmarks.targets import TARGETS, Verdict, verdicts
from hf_posenc.evaluation import records

MARKERS = "<!-- tables by scripts/bench.py: begin -->", "<!-- tables by scripts/bench.py: end -->"
LEGEND = (
    "ms: the median. x stock, x none: throughput relative to theirs in the same rounds; below 1 is slower. [bounds]: order "
    "statistics that contain the median with 95% probability, or for 5 rounds their range, with 94%. A target "
    "is a bound on throughput, unless it says time or memory."
)
HOSTS = {"bert": "BERT", "gpt2": "GPT-2", "llama": "Llama", "swin": "Swin", "vit": "ViT"}
COLUMNS = {
    "512": ("forward-512-fp32", "forward-gpt2-512-fp32"),
    "2,048": ("forward-2048-fp32", "forward-gpt2-2048-fp32"),
    "512, bf16": ("forward-512-bf16", "forward-gpt2-512-bf16"),
    "2,048, bf16": ("forward-2048-bf16", "forward-gpt2-2048-bf16"),
    "training, 512": ("train-512-fp32",),
    "decoding": ("decode-gpt2-4096-fp32",),
    "ViT": ("forward-vit-576-fp32",),
}
"""Heading in the page's table of encodings -> groups, of which the first that measured an encoding is shown."""
SHOWN = (
    "Throughput relative to the original model: forward passes by number of tokens, a training step, a step of GPT-2 after "
    "4,096 tokens, and ViT with 576 patches. `cope`, `fox`, and `xpos` are measured in GPT-2, all others in BERT. MB: peak "
    "memory of a forward pass of 2,048 tokens without the weights{originals}. –: not measured."
)
HEADINGS = {
    "forward": "Whole model, forward",
    "train": "Whole model, forward and backward",
    "decode": "One step of decoding",
    "generate": "Greedy generation",
    "compile": "Whole model, compiled: forward",
    "attention": "Attention alone, forward",
    "attention-train": "Attention alone, forward and backward",
    "x-transformers": "Compared with x-transformers",
    "rotation": "Compared with rotary-embedding-torch: one tensor of queries rotated",
    "patch": "patch() of 12 layers",
    "import": "Import, in new processes",
    "encode": "SentenceTransformer.encode",
    "load": "A model of 1 GB: loaded and patched",
}
Groups = dict[str, Record]


def title(name: str, group: Record) -> str:
    """The name and the settings of a group in one line."""
    if "layers" not in group:
        return f"{name}: {group['what']}"
    host = HOSTS[group["host"]]
    shape = f"{group['layers']} layer{'s' * (group['layers'] > 1)} x {group['heads']} heads, {group['dtype']}"
    batch = f"batch {group['batch']} x {group['length']}"
    more = [{"decode": f"{group['length']} tokens cached", "generate": f"{batch} new tokens"}.get(group["kind"], batch)]
    more += ["half of the rows a quarter padded"] * bool(group.get("padded"))
    more += [f"dropout {group['dropout']}"] if group.get("dropout") else []
    return f"{name}: {host}, {shape}, {', '.join(more)}"


def listing(groups: Iterable[Group]) -> Iterator[str]:
    """The groups in the order of measurement, under the heading of each kind."""
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
    """All results and targets as text."""
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
                "met" if each.met else "MISSED" if each.missed else "undecided",
            ]
            for each in found
        ]
        met = sum(each.met for each in found)
        lines += ["", f"targets: {met} of {len(found)} met", *_table(rows)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


CLOCKS = {"wall": "wall clock", "process": "CPU time"}


def machine(about: dict[str, Any]) -> str:
    counts = ", ".join(f"{about[name + 's']} {name}{'s' * (about[name + 's'] != 1)}" for name in ("core", "thread"))
    shown = f"{about['cpu']}, {counts}, {CLOCKS[about.get('clock', 'wall')]}"
    return f"{shown}; torch {about['torch']}, transformers {about['transformers']}, Python {about['python']}"


def _rows(group: Record) -> list[list[str]]:
    """Header and rows of a group's table."""
    done = {name: record for name, record in group["subjects"].items() if "failed" not in record}
    named = dict.fromkeys(other for record in done.values() for other in record.get("ratios", {}))
    references = [*(name for name in (STOCK, NONE) if name in named), *(name for name in named if name not in (STOCK, NONE))]
    more = [name for name in FURTHER if any(name in record for record in done.values())]
    rows = [["", "ms", *(f"x {other} [bounds]" for other in references), *(FURTHER[name] for name in more)]]
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
    "graph_breaks": "graph breaks",
    "recompilations": "recompilations",
}
"""Optional field of a record -> the heading of its column."""


def _ratio(found: list[float] | None) -> str:
    return "" if found is None else f"{found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}]"


def _number(value: float | None) -> str:
    """A number with three significant digits, or all digits of its integer part from 100 on."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _measured(verdict: Verdict) -> str:
    digits = 2 if verdict.target.unit[0] == "x" and verdict.value >= 0.1 else 3 if verdict.target.unit[0] == "x" else 1
    between = ""
    if verdict.interval is not None:
        between = f" [{verdict.interval[0]:.{digits}f}, {verdict.interval[1]:.{digits}f}]"
    return f"{verdict.value:.{digits}f}{between}"


def _table(rows: list[list[str]]) -> Iterator[str]:
    """Lines of a table with aligned columns, text to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = [
        all(not cell or cell[0].isdigit() or cell[0] == "-" for cell in column[1:]) for column in zip(*rows, strict=True)
    ]
    for row in rows:
        cells = zip(row, widths, numbers, strict=True)
        yield "  " + "  ".join(cell.rjust(width) if number else cell.ljust(width) for cell, width, number in cells)


def tables(results: dict[str, Any]) -> str:
    """The summary in docs/results/speed.md: the speed of every encoding, and missed targets."""
    groups = results["groups"]
    lines = ["## On a CPU", "", f"{machine(results['machine'])}; {results['date']}."]
    if any(name in groups for names in COLUMNS.values() for name in names):
        peaks = [
            f"{_number(groups[name]['subjects'][STOCK]['peak_mb'])} in the original {title(name, groups[name]).split()[1][:-1]}"
            for name in COLUMNS["2,048"]
            if name in groups
        ]
        shown = SHOWN.format(originals=f" ({', '.join(peaks)})" if peaks else "")
        lines += ["", "### Every encoding", "", shown, "", *_markdown(_by_encoding(groups))]
    lines += ["", "### Targets that aren't met", "", *_target_rows(list(verdicts(groups)))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _target_rows(found: list[Verdict]) -> list[str]:
    """The number of targets that are met, and one row for each other target with its worst subject."""
    rows, met, measured, undecided = [["target", "bound", "worst", "what takes the time"]], 0, 0, 0
    for target in TARGETS:
        mine = [each for each in found if each.target is target]
        measured += bool(mine)
        if all(each.met for each in mine):
            met += bool(mine)
            continue
        missed = [each for each in mine if each.missed]
        undecided += not missed
        worst = (min if target.at_least else max)(missed or mine, key=lambda each: each.value)
        shown = f"{_measured(worst)} ({worst.subject}, {worst.group})"
        rows.append([target.what, target.shown_bound, shown, target.limit if missed else "undecided"])
    left = len(TARGETS) - measured
    lines = [
        f"{met} of {measured} targets of this project are met by all subjects{f'; {left} were not measured' if left else ''}. "
        f"Undecided, because the interval contains the bound: {undecided}. stock: the original model. none: the `none` "
        "encoding."
    ]
    return [*lines, *(["", *_markdown(rows)] if len(rows) > 1 else [])]


def _by_encoding(groups: Groups) -> Iterator[list[str]]:
    """A row for each encoding with its throughput relative to the original model, and the peak memory of a forward pass."""
    shown = {heading: [groups[name]["subjects"] for name in names if name in groups] for heading, names in COLUMNS.items()}
    shown = {heading: found for heading, found in shown.items() if found}
    yield ["encoding", *shown, "MB"]
    subjects = (subjects for found in shown.values() for subjects in found)
    for encoding in dict.fromkeys(name for each in subjects for name in each if name != STOCK):
        measured: Groups = {
            heading: next((each[encoding] for each in found if encoding in each), {}) for heading, found in shown.items()
        }
        peak = measured.get("2,048", {}).get("peak_mb")
        yield [f"`{encoding}`", *map(_to_stock, measured.values()), _number(peak) or "–"]


def _to_stock(record: Record) -> str:
    """The throughput relative to the original model, why the measurement failed, or a dash if there is none."""
    if "failed" in record:
        return f"failed: {record['failed']}"
    return f"{record['ratios'][STOCK][0]:.2f}" if STOCK in record.get("ratios", {}) else "–"


def _markdown(rows: Iterable[list[str]]) -> Iterator[str]:
    header, *others = rows
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for row in others:
        yield f"| {' | '.join(row)} |"


def write_tables(page: Path, results: dict[str, Any]) -> None:
    """Replace the text between the markers of a page. Raises ValueError if it lacks a marker."""
    records.fill(page, MARKERS, tables(results))


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the figure of benchmarks.figures.bench if the results contain any group that it shows."""
    if figures.groups_by_panel(results):
        figures.bench(results, path=path)
