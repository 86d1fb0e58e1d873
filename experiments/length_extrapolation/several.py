"""Outputs of compare.py and extrapolation.py over models: a table, a record, and curves with a panel per model and task."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from experiments.length_extrapolation import figures, report
from experiments.length_extrapolation.results import Results
from experiments.length_extrapolation.runs import task_of, times
from experiments.length_extrapolation.study import Study
from experiments.length_extrapolation.tasks import ALL
from hf_posenc.diagnostics.figures import NORMAL, Sheet, panels
from hf_posenc.evaluation.metrics import UNCORRECTED

REFUSED = "refused"
COLUMNS = 3
"""Panels per row of a figure."""


@dataclass(frozen=True)
class Part:
    """The study of one model, and the results of its runs."""

    study: Study
    results: Results

    def heading(self, task: str) -> str:
        unit = task_of(self.study.setup.host, task).unit
        return ", ".join(filter(None, (self.study.label, task, f"L = {self.study.trainings[task].length} {unit}")))


def table(parts: Sequence[Part]) -> Table:
    """The means over seeds with intervals: a section per model, task, and metric, and a column per test length."""
    multiples = parts[0].study.setup.multiples
    seeds = {len(part.results.seeds(*key)) for part in parts for key in _keys(part)}
    several = "one seed" if seeds == {1} else f"{report.shown_range(seeds)} seeds"
    caption = f"mean over {several}" + (f" ± half of Student's interval; {UNCORRECTED}" if seeds != {1} else "")
    if any(part.results.ends(*key) is not None for part in parts for key in _keys(part)):
        caption += f"\n{report.ENDS} ends at a length: it was given that of the longest test; positions behind L are untrained"
    made = Table("", *(f"{multiple:g} L" for multiple in multiples), caption=caption)
    for column in made.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for part in parts:
        for task in (task for task in ALL if task in part.study.trainings):
            for measure in report.MEASURES[ALL[task].measure]:
                made.add_section()
                made.add_row(f"[bold]{escape(part.heading(task))}: {report.NAMES[measure]}[/bold]")
                for label, cells in _rows(part, task, measure, multiples, max(seeds)):
                    made.add_row(escape(label), *cells)
    return made


def differences(parts: Sequence[Part]) -> Table | None:
    """The differences from the study's first encoding, paired by seed, laid out as in `table`. None if there are no pairs."""
    base = next(iter(dict.fromkeys(label for part in parts for _, label in _keys(part))), None)
    multiples = parts[0].study.setup.multiples
    title = f"difference from {base}, over the same seeds ± half of Student's interval"
    made = Table("", *(f"{multiple:g} L" for multiple in multiples), title=title, caption=UNCORRECTED)
    for column in made.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for part in parts:
        for task in part.results.tasks:
            others = [label for label in part.results.encodings(task) if label != base]
            if base not in part.results.encodings(task) or not others:
                continue
            for measure in report.MEASURES[ALL[task].measure]:
                made.add_section()
                made.add_row(f"[bold]{escape(part.heading(task))}: {report.NAMES[measure]}[/bold]")
                for label in others:
                    found = [
                        part.results.difference(task, label, base, length, measure)
                        for length in length_of(part, task, multiples).values()
                    ]
                    made.add_row(escape(label), *("" if each is None else each.shown() for each in found))
    return made if made.row_count else None


def _keys(part: Part) -> list[tuple[str, str]]:
    return [(task, label) for task in part.results.tasks for label in part.results.encodings(task)]


def _rows(part: Part, task: str, measure: str, multiples: Sequence[float], seeds: int) -> list[tuple[str, list[str]]]:
    """The rows of a section, sorted from the best at 2 L (or at the last length). Unsupported encodings come last."""
    results, lengths = part.results, length_of(part, task, multiples)
    tried = list(lengths).index(2.0) if 2.0 in lengths else -1
    means = {
        label: [results.mean(task, label, length, measure) for length in lengths.values()] for label in results.encodings(task)
    }
    sign = 1 if measure == "perplexity" else -1
    rows = []
    for label in sorted(means, key=lambda label: sign * means[label][tried].mean):
        missing = seeds - len(results.seeds(task, label))
        marks = [report.ENDS] if results.ends(task, label) is not None else []
        marks += [f"({missing} {'seed' if missing == 1 else 'seeds'} fewer)"] if missing else []
        diverged = report.diverged_mark(results, task, label)
        rows.append((" ".join([label, *marks]) + diverged, [mean.shown() for mean in means[label]]))
    return rows + [(label, [REFUSED] + [""] * (len(lengths) - 1)) for label in part.study.refused]


def length_of(part: Part, task: str, multiples: Sequence[float]) -> dict[float, int]:
    """Multiple of L -> test length."""
    return {multiple: times(part.study.trainings[task].length, multiple) for multiple in multiples}


def refused_table(parts: Sequence[Part]) -> Table | None:
    """The reasons why models don't support encodings. None if all are supported."""
    made = Table("host", "encoding", "reason", title="refused by a host, the rest runs on", show_lines=True)
    for part in parts:
        for label, reason in part.study.refused.items():
            made.add_row(*map(escape, (part.study.label, label, reason)))
    return made if made.row_count else None


def as_record(parts: Sequence[Part], left_out: dict[str, list[str]], failed: dict[str, str]) -> dict[str, Any]:
    """All settings and scores by model, with digests of what all encodings share: model weights, training and test examples.

    left_out: model -> tasks that it has no head for.
    """
    hosts = {}
    for part in parts:
        digests: dict[str, dict[str, Any]] = {}
        for (task, _, seed), record in part.results.records.items():
            digests.setdefault(task, {}).setdefault(str(seed), record["digests"])
        hosts[part.study.label] = {
            **report.record_of(part.study, part.results),
            "tasks_left_out": left_out.get(part.study.label, []),
            "same_for_all_encodings": digests,
        }
    versions = {name: version(name) for name in ("hf-posenc", "torch", "transformers")}
    return {"versions": versions, "hosts": hosts, "failed": failed}


def draw(parts: Sequence[Part], path: Path) -> None:
    """Plot a panel per model and task. Each encoding has the same line style in all panels. The baseline is gray."""
    shown = [(part, task) for part in parts for task in part.results.tasks]
    labels = list(dict.fromkeys(label for part in parts for _, label in _keys(part)))
    columns = min(COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    size = (max(4.5, 3.6 * columns), 0.5 + 2.7 * rows + 0.25 * math.ceil(len(labels) / (2 * columns)))
    sheet = Sheet(size, rows, columns, path=path)
    styles = styles_of(sheet, labels)
    for axis, (part, task) in zip(panels(sheet.axes, len(shown)), shown, strict=True):
        here = part.results.encodings(task)
        figures.draw_lines(axis, part.results, task, {label: style for label, style in styles.items() if label in here})
        figures.scale(axis, part.results, task, here)
        sheet.title(axis, part.heading(task), NORMAL)
        axis.set(ylabel=figures.NAMES[figures.CURVES[ALL[task].measure]], xlabel="test length")
    sheet.heading("lines: mean over seeds; shaded: range over seeds; vertical line: training length L; dotted: chance", NORMAL)
    sheet.legend(columns=2 * columns)
    sheet.finish()


def styles_of(sheet: Sheet, labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The line style of each encoding. The baseline is last and gray."""
    others = [label for label in labels if label != figures.BASELINE]
    styles = {label: sheet.line(place, markers=True) for place, label in enumerate(others)}
    return styles | ({figures.BASELINE: figures.GREY} if figures.BASELINE in labels else {})
