"""The figure of bench.json, the record of scripts/bench.py: throughput relative to the original model."""

from collections.abc import Mapping
from typing import Any

from hf_posenc.diagnostics.figures import MARKERS, NORMAL, WIDTH, Sheet, error_bars, panels
from hf_posenc.diagnostics.registry import Dark, Path

STOCK, NONE = "stock", "none"
KINDS = {
    "forward": "whole model, forward",
    "train": "whole model, forward and backward",
    "attention": "attention alone, forward",
}
"""Kinds of groups that have a panel for each dtype."""


def bench(record: Mapping[str, Any], *, dark: Dark = False, path: Path = None) -> Any:
    """Draw throughput compared with the stock model, as measured by scripts/bench.py.

    The figure shows the throughput of BERT with every encoding as a ratio to the original model, with the intervals of the
    record. Each kind of measurement and dtype has a panel, and each length has a color and marker.

    Args:
        record: bench.json of scripts/bench.py.

    Raises:
        ValueError: this isn't such a record, or it has none of KINDS for BERT.
    """
    chosen = groups_by_panel(record)
    if not chosen:
        raise ValueError(f"The record has none of the groups {', '.join(KINDS)} for BERT, which this figure shows.")
    found = {name for in_panel in chosen.values() for group in in_panel for name in group["subjects"]} - {STOCK, NONE}
    names = [NONE, *sorted(found)]
    columns = min(2, len(chosen))
    rows = -(-len(chosen) // columns)
    sheet = Sheet(
        (WIDTH * columns / 2, rows * (0.8 + 0.25 * len(names))), rows, columns, dark=dark, path=path, sharex=True, sharey=True
    )
    lengths = sorted({group["length"] for in_panel in chosen.values() for group in in_panel})
    entries: dict[int, Any] = {}
    for axis, ((kind, dtype), in_panel) in zip(panels(sheet.axes, len(chosen)), chosen.items(), strict=True):
        for place, group in enumerate(in_panel):
            shift = (place - (len(in_panel) - 1) / 2) * 0.24
            ratios = {
                names.index(name) + shift: subject["ratios"][STOCK]
                for name, subject in group["subjects"].items()
                if name in names and STOCK in subject.get("ratios", {})
            }
            number = lengths.index(group["length"])
            entries[group["length"]] = axis.errorbar(
                [value for value, *_ in ratios.values()],
                list(ratios),
                xerr=error_bars(ratios.values()),
                fmt=MARKERS[number],
                markersize=3.5,
                elinewidth=1.2,
                color=sheet.theme.lines[number % len(sheet.theme.lines)],
            )
        sheet.reference(axis, x=1, linestyle="--")
        sheet.title(axis, f"{KINDS[kind]}, {dtype}")
        axis.set_xlim(left=0)
        sheet.grid(axis, "y")
        axis.tick_params(axis="y", length=0)
    sheet.axes[0, 0].set_yticks(range(len(names)), names)
    sheet.axes[0, 0].set_ylim(len(names) - 0.5, -0.5)
    label = "throughput as a ratio to the stock model, with intervals over rounds"
    sheet.figure.supxlabel(label, fontsize=NORMAL, color=sheet.theme.ink)
    sheet.legend({f"{length} tokens": entries[length] for length in lengths}, len(lengths), loc="outside upper center")
    return sheet.finish()


def groups_by_panel(record: Mapping[str, Any]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """(kind, dtype) -> the groups of a record that `bench` shows. Raises ValueError if this isn't such a record."""
    groups = record.get("groups") if isinstance(record, Mapping) else None
    if not isinstance(groups, Mapping) or not all("subjects" in group for group in groups.values()):
        raise ValueError("This isn't a record of scripts/bench.py. Pass the bench.json that it wrote.")
    chosen: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for group in groups.values():
        if group["kind"] in KINDS and group["host"] == "bert" and not group.get("padded") and not group.get("dropout"):
            chosen.setdefault((group["kind"], group["dtype"]), []).append(group)
    return chosen
