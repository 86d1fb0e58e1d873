"""Imports the copies of a user's files, under another name in this process, before they are saved with a model."""

import functools
import importlib
import json
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from transformers.dynamic_module_utils import check_imports

from hf_posenc.serialization.user_code import UserCode, flat

BASE = flat("hf_posenc.encodings.base")
PLAIN = (bool, int, float, str)


def refusal(code: UserCode, files: dict[str, str], encodings: list[dict[str, Any]]) -> str | None:
    """Why the files of a checkpoint don't give the user's encodings of this process. None if they do.

    encodings: of each, its type, options and geometry.
    """
    try:
        found = _imported(tuple(files.items()), tuple(code.texts), json.dumps(encodings))
    except OSError as error:  # not remembered: another time it may work
        return f"the copies can't be tried in a temporary directory: {error}"
    if isinstance(found, str):
        return found
    for name, module in code.modules.items():
        here = _constants(sys.modules.get(module), code.texts[name])
        for constant in sorted(here.keys() & found[name].keys()):
            if (ours := repr(here[constant])) != (theirs := repr(found[name][constant])):
                return (
                    f"{module}.{constant} is {ours:.80} here, and {theirs:.80} where the file is imported again. Set it in the "
                    "file, and restart Python"
                )
    return None


@functools.lru_cache(maxsize=32)
def _imported(files: tuple[tuple[str, str], ...], users: tuple[str, ...], encodings: str) -> dict[str, dict[str, Any]] | str:
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
                    return f"Transformers would look for {', '.join(sorted(missing))} beside it"
            modules = {name: importlib.import_module(f"{package.__name__}.{name}") for name in users}
            base = sys.modules[f"{package.__name__}.{BASE}"]
            for each in json.loads(encodings):
                if each["type"] not in base.PositionEncoding.registered:
                    return f"it defines no encoding {each['type']!r} when it is imported"
                _make(base, **each)
            return {name: _constants(module, dict(files)[f"{name}.py"]) for name, module in modules.items()}
        except (Exception, SystemExit) as error:
            # Transformers advises to install what is missing, though it may be the user's own.
            said = re.sub(r"\.? Run `pip install .*", "", str(error).replace(folder, ""), flags=re.DOTALL)
            return (
                f"the copy can't be imported: {type(error).__name__}: {said}. It can't open files. It can import installed "
                "packages, hf_posenc.PositionEncoding, hf_posenc.encodings, and neighboring files (from .helpers import …)"
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


def _constants(module: ModuleType | None, source: str) -> dict[str, Any]:
    """The numbers and strings that a module assigns, without those that its functions assign again."""
    changing = {name for names in re.findall(r"\bglobal\s+(.+)", source) for name in re.findall(r"\w+", names)}
    values = {name: value for name, value in vars(module).items() if name not in changing} if module else {}
    return {name: value for name, value in values.items() if type(value) in PLAIN and not name.startswith("__")}


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
