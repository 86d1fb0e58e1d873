"""Read a study from a YAML file. Keys are flags, lists are several values, and mappings are TASK=N or objects with options."""

import argparse
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from hf_posenc.encodings import did_you_mean
from hf_posenc.studies.flags import PER_TASK
from hf_posenc.studies.tasks import TASKS

OBJECTS = ("models", "encodings")
"""Flags whose values can be objects."""
ELSEWHERE = ("study", "help", "report_only", "save", "output_dir", "processes")
"""Flags of a command that are not part of a study."""


class Once(yaml.SafeLoader):
    """Raises an error for duplicate keys. YAML's loader would use the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [key for place, key in enumerate(keys) if key in keys[:place]]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


def as_flags(file: Path, parser: argparse.ArgumentParser, tasks: Collection[str] | None = None) -> list[str]:
    """The flags that a file specifies. If the command line has `tasks`, settings by task are limited to these tasks.

    Raises SystemExit if the file isn't a valid study.
    """
    try:
        found = yaml.load(file.read_text(encoding="utf-8"), Once)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SystemExit(f"{file} isn't a valid study: {error}") from None
    flags = vars(parser.parse_args(["--output_dir", "."]))
    known = {"import" if name == "modules" else name for name in flags if name not in ELSEWHERE}
    if not isinstance(found, dict):
        raise SystemExit(f"{file} isn't a valid study. Use a mapping with keys of {', '.join(sorted(known))}.")
    made, own_tasks = [], {*TASKS, *(found.get("tasks") or [])} if isinstance(found.get("tasks"), list) else {*TASKS}
    for key, value in found.items():
        if key not in known:
            hint = did_you_mean(key, known)
            raise SystemExit(f"{file}: {key!r} isn't a key of a study{hint}. Use {', '.join(sorted(known))}.")
        if value in ([], {}):
            raise SystemExit(f"{file}: {key} is empty. Give at least one value, or omit the key for its default.")
        if tasks is not None and key in PER_TASK and isinstance(value, dict):
            value = {task: each for task, each in value.items() if task in tasks or task not in own_tasks}
        if texts := _texts(file, key, value):  # settings of other tasks only
            made += [f"--{key}", *texts]
    return made


def _texts(file: Path, key: str, value: Any) -> list[str]:
    if isinstance(value, dict) and key not in OBJECTS:
        return [f"{name}={_text(file, key, each)}" for name, each in value.items()]
    return [_text(file, key, each) for each in (value if isinstance(value, list) else [value])]


def _text(file: Path, key: str, value: Any) -> str:
    if isinstance(value, dict) and key in OBJECTS:
        try:
            return json.dumps(value)
        except TypeError:  # a date, for example
            raise SystemExit(f"{file}: {key} is {value!r}. Use texts, numbers, lists, and objects.") from None
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or str(value).startswith("--"):
        raise SystemExit(f"{file}: {key} is {value!r}. Use names, numbers, and lists of them.")
    return str(value)
