"""The flags that compare.py and extrapolation.py share."""

import argparse
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import hf_posenc
from experiments.length_extrapolation import models, study
from experiments.length_extrapolation.models import Encoding, Sizes
from experiments.length_extrapolation.tasks import Task
from hf_posenc.training.flags import at_least

Number = TypeVar("Number", int, float)
PER_TASK = {"length": 1, "steps": 0, "batch_size": 1}
"""Flags whose values belong to a task, and the least that is allowed."""


def parser(description: str | None, tasks: Mapping[str, Task]) -> argparse.ArgumentParser:
    """`tasks` are those of the command, all of them by default."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = made.add_argument
    add("--tasks", nargs="+", choices=tasks, default=[*tasks])
    add("--encodings", nargs="+", metavar="NAME|JSON", help="names, or objects with options; default: all that are registered")
    add("--import", dest="modules", nargs="+", default=[], metavar="MODULE", help="modules that define encodings of your own")
    add("--seeds", type=at_least(0), nargs="+", default=[0, 1, 2])
    defaults = {name: ", ".join(f"{task}={getattr(own, name)}" for task, own in tasks.items()) for name in PER_TASK}
    add("--length", nargs="+", default=[], metavar="[TASK=]N", help=f"L, the longest trained; default: {defaults['length']}")
    add("--steps", nargs="+", default=[], metavar="[TASK=]N", help=f"default: {defaults['steps']}")
    add("--batch_size", nargs="+", default=[], metavar="[TASK=]N", help=f"default: {defaults['batch_size']}")
    for name, value in vars(Sizes()).items():
        add(f"--{name}", type=at_least(1), default=value, help=f"of tiny hosts; default: {value}")
    add("--processes", type=at_least(1), default=1, help="runs at a time, each with one thread")
    add("--report_only", action="store_true", help="run nothing: tables and figures of what the folder has")
    add("--output_dir", type=Path, required=True)
    return made


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Each value once; those that belong to a task become dicts."""
    for name in ("tasks", "seeds", "encodings", "hosts"):
        given = getattr(arguments, name, None) or []
        if len(set(given)) != len(given):
            parser.error(f"--{name} {' '.join(map(str, given))}: give each once")
    for name, low in PER_TASK.items():
        try:
            setattr(arguments, name, by_key(getattr(arguments, name), arguments.tasks, integer(low)))
        except ValueError as error:
            parser.error(f"--{name} {error}")


def integer(low: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise ValueError(f"an integer from {low} on")
        return int(text)

    return number


def by_key(given: Sequence[str], keys: Collection[str], number: Callable[[str], Number]) -> dict[str, Number]:
    """Key -> number, of `N` for all keys, or `KEY=N`. Raises ValueError for anything else."""
    found: dict[str, Number] = {}
    said = [text.rpartition("=")[0] for text in given]
    for text in sorted(given, key=lambda text: "=" in text):  # one for a part goes before that for all
        key, equals, value = text.rpartition("=")
        if said.count(key) > 1:
            raise ValueError(f"{' '.join(given)}: {key or 'a number for all'} is given {said.count(key)} times; give it once")
        try:
            if equals and key not in keys:
                raise ValueError("a number")
            found |= dict.fromkeys([key] if equals else keys, number(value))
        except ValueError as error:
            first = next(iter(keys))
            allowed = f"{error}, or one for a part of the study, as {first}=N, of {', '.join(keys)}"
            raise ValueError(f"{text!r}: allowed is {allowed}") from None
    return found


def as_given(text: str) -> str | dict[str, Any]:
    """A name, or the object that a text is. Raises ValueError for no JSON."""
    return json.loads(text) if text.startswith("{") else text


def encodings(arguments: argparse.Namespace) -> list[Encoding]:
    """Those that were asked for, or all. Raises SystemExit for one that there isn't."""
    given = arguments.encodings or [*hf_posenc.list_encodings()]
    found: dict[str, Encoding] = {}
    for text in given:
        try:
            each = models.encoding(as_given(text))
        except ValueError as error:
            hint = " (here: --import MODULE)" if "import the module" in str(error) else ""
            raise SystemExit(f"--encodings {text}: {error}{hint}") from None
        if each.label in found:
            raise SystemExit(f"--encodings {text}: {each.label} is there already")
        found[each.label] = each
    return [*found.values()]


def begin(arguments: argparse.Namespace) -> None:
    """Import encodings of the user's own. Raises SystemExit where there is no such module."""
    try:
        study.begin(tuple(arguments.modules))
    except ImportError as error:
        raise SystemExit(str(error)) from None


def sizes(arguments: argparse.Namespace) -> Sizes:
    return Sizes(**{name: getattr(arguments, name) for name in vars(Sizes())})
