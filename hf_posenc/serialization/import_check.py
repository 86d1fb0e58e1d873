"""Imports the copies of a user's files, under another name in this process, before they are saved with a model."""

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
from hf_posenc.serialization.user_code import UserCode, flat

BASE = flat("hf_posenc.encodings.base")
PLAIN = (bool, int, float, complex, str, bytes)


def refusal(code: UserCode, files: dict[str, str], encodings: list[dict[str, Any]]) -> str | None:
    """Why the files of a checkpoint don't give the user's encodings of this process. None if they do.

    encodings: of each, its type, options and geometry.
    """
    try:
        found = _imported(tuple(files.items()), tuple(code.texts), json.dumps(encodings))
    except OSError as error:  # not remembered: another time it may work
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
"""By dotted name: a value in a form that can be compared, and as text."""


@functools.lru_cache(maxsize=32)
def _imported(files: tuple[tuple[str, str], ...], users: tuple[str, ...], encodings: str) -> dict[str, Constants] | str:
    """The constants of each of the user's files once its copy is imported, or why it can't be."""
    with tempfile.TemporaryDirectory(prefix="posenc_copies_") as folder, _generators_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python gave them when the files were imported first
        package = ModuleType(Path(folder).name)
        package.__path__ = [folder]
        for file, text in files:
            Path(folder, file).write_text(text, encoding="utf-8")
        sys.modules[package.__name__] = package
        try:
            for name in users:  # Transformers takes what looks like an import in a string for one, too
                if missing := {f"{each}.py" for each in check_imports(Path(folder, f"{name}.py"))} - {*dict(files)}:
                    return f"Transformers would look for {', '.join(sorted(missing))} in the same directory."
            modules = {name: importlib.import_module(f"{package.__name__}.{name}") for name in users}
            base = sys.modules[f"{package.__name__}.{BASE}"]
            for each in json.loads(encodings):
                if each["type"] not in base.PositionEncoding.registered:
                    return f"it defines no encoding {each['type']!r} when it is imported."
                _make(base, **each)
            return {name: _constants(module, dict(files)[f"{name}.py"]) for name, module in modules.items()}
        except (Exception, SystemExit) as error:
            # Transformers advises to install what is missing, though it may be the user's own.
            said = re.sub(r"\.? Run `pip install .*", "", str(error).replace(folder, ""), flags=re.DOTALL)
            return (
                f"the copy can't be imported: {type(error).__name__}: {said}. It can't open files. It can import installed "
                "packages, hf_posenc.PositionEncoding, hf_posenc.encodings, and neighboring files (from .helpers import …)."
            )
        finally:
            for name in [name for name in list(sys.modules) if name.partition(".")[0] == package.__name__]:
                del sys.modules[name]


def _make(base: ModuleType, type: str, options: dict[str, Any], geometry: dict[str, Any]) -> None:
    """Make an encoding without values. Raises errors of imports and files, since others can be of these sizes or no values."""
    try:
        with torch.device("meta"):
            base.PositionEncoding.registered[type](base.Geometry(**geometry), **options)
    except (ImportError, OSError):
        raise
    except Exception:
        pass


def _constants(module: ModuleType | None, source: str) -> Constants:
    """The plain values that a module, its classes, and the defaults of its functions have, by dotted name, in a form that can
    be compared, and as text. Without those that functions assign again, and the module's own name and file."""
    if module is None:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the file, which gave them when it was imported first
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
    """Whether a value is the name of its module, or a path in its folder: both differ in a copy."""
    folder = str(Path(module.__file__).parent) if module.__file__ else module.__name__
    return isinstance(value, str) and (value == module.__name__ or value.startswith(folder))


@contextmanager
def _generators_kept() -> Iterator[None]:
    """The state of all random numbers stays as it is."""
    drawn = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
