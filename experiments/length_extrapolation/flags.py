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
"""Flags with a value per task -> minimum value."""


def parser(description: str | None, tasks: Mapping[str, Task]) -> argparse.ArgumentParser:
    """The shared parser. `tasks`: the tasks of the command, all of which are the default."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = made.add_argument
    add("--tasks", nargs="+", choices=tasks, default=[*tasks])
    add("--encodings", nargs="+", metavar="NAME|JSON", help="names, or objects with options; default: all registered encodings")
    add("--import", dest="modules", nargs="+", default=[], metavar="MODULE", help="modules that define custom encodings")
    add("--seeds", type=at_least(0), nargs="+", default=[0, 1, 2])
    defaults = {name: ", ".join(f"{task}={getattr(own, name)}" for task, own in tasks.items()) for name in PER_TASK}
    add("--length", nargs="+", default=[], metavar="[TASK=]N", help=f"maximum training length L; default: {defaults['length']}")
    add("--steps", nargs="+", default=[], metavar="[TASK=]N", help=f"default: {defaults['steps']}")
    add("--batch_size", nargs="+", default=[], metavar="[TASK=]N", help=f"default: {defaults['batch_size']}")
    for name, value in vars(Sizes()).items():
        add(f"--{name}", type=at_least(1), default=value, help=f"size of tiny models; default: {value}")
    add("--processes", type=at_least(1), default=1, help="number of parallel runs, each with one thread")
    add("--report_only", action="store_true", help="only tables and figures of the finished runs")
    add("--output_dir", type=Path, required=True)
    return made


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Check that values are unique, and convert values per task to dicts."""
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
    """Key -> number, from `N` for all keys or `KEY=N`. Raises ValueError for other values."""
    found: dict[str, Number] = {}
    said = [text.rpartition("=")[0] for text in given]
    for text in sorted(given, key=lambda text: "=" in text):  # KEY=N overrides N
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
    """A name, or the object that the text encodes. Raises ValueError for invalid JSON."""
    return json.loads(text) if text.startswith("{") else text


def encodings(arguments: argparse.Namespace) -> list[Encoding]:
    """The requested encodings, or all. Raises SystemExit for unknown or duplicate ones."""
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
    """Import modules with custom encodings. Raises SystemExit if a module can't be imported."""
    try:
        study.begin(tuple(arguments.modules))
    except ImportError as error:
        raise SystemExit(str(error)) from None


def sizes(arguments: argparse.Namespace) -> Sizes:
    return Sizes(**{name: getattr(arguments, name) for name in vars(Sizes())})
