"""The tables of a study's record (`hf_posenc.studies.record`): for a terminal, and as CSV, LaTeX, and Markdown."""

import csv
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

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
COLUMNS = (
    *("model", "task", "metric", "encoding", "length", "multiple", "seeds", "mean", "half_width"),
    *("difference", "difference_half_width", "p", "p_holm", "significant", "max_length", "diverged"),
)
"""The columns of the CSV table."""


@dataclass(frozen=True)
class Section:
    """The rows of one model, task, and metric. A row has a name and a cell for each multiple of L."""

    heading: str
    rows: list[tuple[str, list[str]]]


def multiples_of(record: Record) -> list[float]:
    return sorted({row["multiple"] for row in record["table"]})


def sections(
    record: Record, bold: Callable[[str], str], differences: bool = False, plus_minus: str = " ± "
) -> Iterator[Section]:
    """The means of a record, or the differences from its baseline. Significant differences are passed to `bold`.

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
            cells = [_cell(encodings[label][multiple], bold, differences, plus_minus) for multiple in multiples]
            if any(cells) or not differences:
                rows.append((label + _marks(encodings[label][tried], most), cells))
        if not differences:
            rows += [(label, [UNSUPPORTED, *[""] * (len(multiples) - 1)]) for label in own["unsupported"]]
        if rows:
            yield Section(f"{heading}: {NAMES.get(metric, metric)}", rows)


def titled_sections(record: Record, bold: Callable[[str], str], plus_minus: str = " ± ") -> Iterator[Section]:
    """The sections of means and then of differences, whose headings name the baseline."""
    yield from sections(record, bold, False, plus_minus)
    for section in sections(record, bold, True, plus_minus):
        yield replace(section, heading=f"{section.heading}, difference from {record['baseline']}")


def _order(row: Record, sign: int) -> float:
    return float("inf") if row["mean"] is None else sign * row["mean"]


def _cell(row: Record, bold: Callable[[str], str], differences: bool, plus_minus: str) -> str:
    name = "difference" if differences else "mean"
    value, half = row[name], row["difference_half_width" if differences else "half_width"]
    if value is None:
        return "" if differences and row["p"] is None else "inf"
    text = f"{value:{'+' if differences else ''}.2f}" + ("" if half is None else f"{plus_minus}{half:.2f}")
    return bold(text) if row["significant"] else text


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
        for section in sections(record, lambda text: f"[bold]{text}[/bold]", differences):
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


def as_csv(record: Record) -> str:
    """A line for each row of `record["table"]`, with all digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(record["table"])
    return text.getvalue()


def as_markdown(record: Record) -> str:
    headings = [f"{each:g} L" for each in multiples_of(record)]
    lines: list[str] = []
    for section in titled_sections(record, lambda text: f"**{text}**"):
        lines += [f"**{section.heading}**", "", f"| encoding | {' | '.join(headings)} |", "|---" * (len(headings) + 1) + "|"]
        lines += [f"| {' | '.join([f'`{name}`', *cells])} |" for name, cells in section.rows]
        lines.append("")
    return "\n".join([*lines, caption(record)]) + "\n"


def as_latex(record: Record) -> str:
    r"""A table with the rules of booktabs, for `\input`. Its caption states the intervals and the correction."""
    multiples = multiples_of(record)
    width = len(multiples) + 1
    lines = ["% Needs \\usepackage{booktabs}.", "\\begin{table}", "  \\centering", f"  \\caption{{{_tex(caption(record))}}}"]
    lines += [f"  \\begin{{tabular}}{{l{'r' * len(multiples)}}}", "    \\toprule"]
    lines.append(f"    {' & '.join(['', *(f'${each:g}L$' for each in multiples)])} \\\\")
    for section in titled_sections(record, _bold_tex, " \\pm "):
        lines += ["    \\midrule", f"    \\multicolumn{{{width}}}{{l}}{{\\emph{{{_tex(section.heading)}}}}} \\\\"]
        for name, cells in section.rows:
            shown = [cell if cell in ("", UNSUPPORTED) else f"${_math(cell)}$" for cell in cells]
            lines.append(f"    {' & '.join([_tex(name), *shown])} \\\\")
    return "\n".join([*lines, "    \\bottomrule", "  \\end{tabular}", "\\end{table}"]) + "\n"


def _math(cell: str) -> str:
    return cell.replace("inf", "\\infty")


def _bold_tex(text: str) -> str:
    return f"\\mathbf{{{text}}}"


def _tex(text: str) -> str:
    """A text with LaTeX's special characters escaped."""
    special = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        ENDS: r"$\dagger$",
        "±": r"$\pm$",
    }
    special |= {"<": "$<$", ">": "$>$"}
    return re.sub(r"[\\{}$&#_%~^<>†±]", lambda found: special.get(found[0], f"\\{found[0]}"), text)


WRITERS: dict[str, tuple[str, Callable[[Record], str]]] = {
    "csv": ("csv", as_csv),
    "latex": ("tex", as_latex),
    "markdown": ("md", as_markdown),
}
"""Format of --table -> suffix of its file, and its writer."""


def written(record: Record, form: str) -> tuple[str, str]:
    """The name of a table's file, and its content."""
    suffix, write = WRITERS[form]
    return f"compare.{suffix}", write(record)
