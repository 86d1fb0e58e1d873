"""Imports the copies of a user's files, under other names in this process, before they are saved with a model."""

import ast
import functools
import importlib
import inspect
import json
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.dynamic_module_utils import check_imports

from hf_posenc.encodings.determinism import comparable
from hf_posenc.progress import ProgressBar
from hf_posenc.serialization.user_code import UserCode, flat

BASE = flat("hf_posenc.encodings.base")
PLAIN = (bool, int, float, complex, str, bytes)


def refusal(code: UserCode, files: dict[str, str], encodings: list[dict[str, Any]]) -> str | None:
    """Why the files of a checkpoint don't reproduce this process's custom encodings. None if they do.

    encodings: type, options, and geometry of each encoding.
    """
    try:
        found = _imported(tuple(files.items()), tuple(code.texts), json.dumps(encodings))
    except OSError as error:  # This isn't cached, because a later attempt may succeed.
        return f"the copies can't be tested in a temporary directory: {error}."
    if isinstance(found, str):
        return found
    for name, module in code.modules.items():
        here = _constants(sys.modules.get(module), code.texts[name])
        for constant in sorted(here.keys() & found[name].keys()):
            (ours, shown), (theirs, there) = here[constant], found[name][constant]
            if ours != theirs:
                return (
                    f"{module}.{constant} is {shown:.80} here, and {there:.80} where the file is imported again. Set it in the "
                    "file, and restart Python."
                )
    return None


Constants = dict[str, tuple[Any, str]]
"""Maps dotted names to values, each in a comparable form and as text."""


@functools.lru_cache(maxsize=32)
def _imported(files: tuple[tuple[str, str], ...], users: tuple[str, ...], encodings: str) -> dict[str, Constants] | str:
    """The constants of each of the user's files, from its imported copy, or why a copy can't be imported."""
    with tempfile.TemporaryDirectory(prefix="posenc_copies_") as folder, _generators_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python showed them when the files were first imported.
        package = ModuleType(Path(folder).name)
        package.__path__ = [folder]
        for file, text in files:
            Path(folder, file).write_text(text, encoding="utf-8")
        sys.modules[package.__name__] = package
        try:
            for name in users:  # Transformers also finds imports in strings.
                if missing := {f"{each}.py" for each in check_imports(Path(folder, f"{name}.py"))} - {*dict(files)}:
                    return f"Transformers would look for {', '.join(sorted(missing))} in the same directory."
            bar = ProgressBar(users, desc="importing the copied encodings", unit="file", leave=False)
            modules = {name: importlib.import_module(f"{package.__name__}.{name}") for name in bar}
            base = sys.modules[f"{package.__name__}.{BASE}"]
            for each in json.loads(encodings):
                if each["type"] not in base.PositionEncoding.registered:
                    return f"it defines no encoding {each['type']!r} when it is imported."
                _make(base, **each)
            return {name: _constants(module, dict(files)[f"{name}.py"]) for name, module in modules.items()}
        except (Exception, SystemExit) as error:
            # Transformers recommends installing missing modules, but these may be the user's own files.
            said = re.sub(r"\.? Run `pip install .*", "", str(error).replace(folder, ""), flags=re.DOTALL)
            return (
                f"the copy can't be imported: {type(error).__name__}: {said}. It can't open files. It can import installed "
                "packages, hf_posenc.PositionEncoding, hf_posenc.encodings, and neighboring files (from .helpers import …)."
            )
        finally:
            for name in [name for name in list(sys.modules) if name.partition(".")[0] == package.__name__]:
                del sys.modules[name]


def _make(base: ModuleType, type: str, options: dict[str, Any], geometry: dict[str, Any]) -> None:
    """Create an encoding without values.

    Raises only errors of imports and files, because these sizes or the missing values can cause other errors.
    """
    try:
        with torch.device("meta"):
            base.PositionEncoding.registered[type](base.Geometry(**geometry), **options)
    except (ImportError, OSError):
        raise
    except Exception:
        pass


def _constants(module: ModuleType | None, source: str) -> Constants:
    """The plain values of a module, its classes, and its functions' defaults, by dotted name.

    Globals that functions reassign, the module's name, and paths in its directory are omitted.
    """
    if module is None:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python showed them when the file was first imported.
        nodes = ast.walk(ast.parse(source))
        changing = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    own = {
        value.__name__: value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    }
    found: Constants = {}
    for prefix, holder in (("", module), *((f"{name}.", cls) for name, cls in own.items())):
        for name, value in vars(holder).items():
            function = value.fget if isinstance(value, property) else value
            function = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                value = [inspect.unwrap(function).__defaults__, inspect.unwrap(function).__kwdefaults__]
            elif name.startswith("__") or (not prefix and name in changing):
                continue
            if _is_plain(value) and not _names(value, module):
                found[f"{prefix}{name}"] = comparable(value), repr(value)
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return _is_plain([*value, *value.values()])
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return value is None or type(value) in PLAIN or isinstance(value, (Tensor, np.ndarray, np.generic))


def _names(value: Any, module: ModuleType) -> bool:
    """Whether a value is the name of its module or a path in its directory. Both differ in a copy."""
    folder = str(Path(module.__file__).parent) if module.__file__ else module.__name__
    return isinstance(value, str) and (value == module.__name__ or value.startswith(folder))


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Preserves the states of all random number generators."""
    drawn = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
