"""The tables of a study's record (`hf_posenc.studies.record`)."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from hf_posenc.evaluation.metrics import UNCORRECTED
from hf_posenc.studies.record import HOLM, Record
from hf_posenc.studies.tasks import EXACT_MATCH

UNSUPPORTED = "unsupported"
ENDS = "†"
"""Marks encodings with a maximum length, which was set to the longest test length."""
NAMES = {"exact": f"{EXACT_MATCH} of the whole answer", "tokens": "token accuracy of the answer"}
"""Metric -> its name in headings, if it differs."""


@dataclass(frozen=True)
class Section:
    """The rows of one model, task, and metric. A row has a name and a cell for each multiple of L."""

    heading: str
    rows: list[tuple[str, list[str]]]


def multiples_of(record: Record) -> list[float]:
    return sorted({row["multiple"] for row in record["table"]})


def sections(record: Record, differences: bool = False) -> Iterator[Section]:
    """The means of a record, or the differences from its baseline. Significant differences are bold.

    Rows are sorted from the best at 2 L, or at the last length. Unsupported encodings come last.
    """
    multiples, found = multiples_of(record), dict[tuple[str, str, str], dict[str, dict[float, Record]]]()
    for row in record["table"]:
        encodings = found.setdefault((row["model"], row["task"], row["metric"]), {})
        encodings.setdefault(row["encoding"], {})[row["multiple"]] = row
    tried = 2.0 if 2.0 in multiples else multiples[-1]
    most = max(row["seeds"] for row in record["table"])
    for (model, task, metric), encodings in found.items():
        own = record["models"][model]
        about = own["tasks"][task]
        sign = 1 if about["lower_is_better"] else -1
        heading = ", ".join(filter(None, (model, task, f"L = {about['length']:,} {about['unit']}")))
        rows = []
        for label in sorted(encodings, key=lambda label: _order(encodings[label][tried], sign)):
            cells = [_cell(encodings[label][multiple], differences) for multiple in multiples]
            if any(cells) or not differences:
                rows.append((label + _marks(encodings[label][tried], most), cells))
        if not differences:
            rows += [(label, [UNSUPPORTED, *[""] * (len(multiples) - 1)]) for label in own["unsupported"]]
        if rows:
            yield Section(f"{heading}: {NAMES.get(metric, metric)}", rows)


def _order(row: Record, sign: int) -> float:
    return float("inf") if row["mean"] is None else sign * row["mean"]


def _cell(row: Record, differences: bool) -> str:
    name = "difference" if differences else "mean"
    value, half = row[name], row["difference_half_width" if differences else "half_width"]
    if value is None:
        return "" if differences and row["p"] is None else "inf"
    text = f"{value:{'+' if differences else ''}.2f}" + ("" if half is None else f" ± {half:.2f}")
    return f"[bold]{text}[/bold]" if row["significant"] else text


def _marks(row: Record, most: int) -> str:
    missing, diverged = most - row["seeds"], row["diverged"]
    marks = [ENDS] if row["max_length"] is not None else []
    marks += [f"({missing} {'seed' if missing == 1 else 'seeds'} fewer)"] if missing else []
    marks += [f"({diverged} {'run' if diverged == 1 else 'runs'} diverged)"] if diverged else []
    return "".join(f" {mark}" for mark in marks)


def caption(record: Record) -> str:
    """What the numbers and marks of a table mean."""
    counts = sorted({row["seeds"] for row in record["table"]})
    if counts == [1]:
        text = "Results of one seed."
    else:
        text = f"Mean over {' to '.join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))} seeds "
        text += "± half the width of Student's 95% interval. Differences are paired by seed."
        if record["correction"] == HOLM:
            tested = sum(row["p"] is not None for row in record["table"])
            text += f" Bold: the difference from {record['baseline']} is significant"
            text += f" (p < 0.05, Holm's correction for {tested} tests)."
        else:
            text += f" Bold: the interval of the difference from {record['baseline']} excludes 0 ({UNCORRECTED})."
    if any(row["max_length"] is not None for row in record["table"]):
        text += f" {ENDS} has a maximum length, set to the longest test length. Its positions beyond L are untrained."
    return text


def for_terminal(record: Record) -> list[Table]:
    """The tables of means, of differences, and of unsupported encodings, if any."""
    found = []
    for differences in (False, True):
        title = f"difference from {record['baseline']}" if differences else None
        table = Table(
            "", *(f"{each:g} L" for each in multiples_of(record)), title=title, caption=None if differences else caption(record)
        )
        for column in table.columns[1:]:
            column.justify, column.no_wrap = "right", True
        for section in sections(record, differences):
            table.add_section()
            table.add_row(f"[bold]{escape(section.heading)}[/bold]")
            for name, cells in section.rows:
                table.add_row(escape(name), *cells)
        found += [table] if table.row_count else []
    return [*found, *unsupported(record)]


def unsupported(record: Record) -> list[Table]:
    """A table of the reasons why models don't support encodings. Empty if all are supported."""
    made = Table("model", "encoding", "reason", title="not supported, and left out", show_lines=True)
    for model, own in record["models"].items():
        for label, reason in own["unsupported"].items():
            made.add_row(*map(escape, (model, label, reason)))
    return [made] if made.row_count else []
