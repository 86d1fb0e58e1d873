"""Digests of custom code: the files of a module and of the modules that it imports, outside installed packages."""

import ast
import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from hf_posenc.serialization.user_code import file_of, is_ours, is_own, parsed


def source_of(name: str) -> Path | None:
    """The file of an imported module of the user. None for installed modules, built-in ones, and those without a file."""
    if name not in sys.modules or is_ours(name) or not is_own(name.partition(".")[0]):
        return None
    return file_of(name)


def digest(*names: str) -> str:
    """A digest of modules and, recursively, of the modules that they import."""
    found: dict[str, bytes] = {}
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name not in found and (path := source_of(name)):
            found[name] = path.read_bytes()
            waiting += _imports(name, found[name])
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:16]


def _imports(name: str, source: bytes) -> list[str]:
    """The names in a module's import statements. Some may be attributes of modules."""
    package = getattr(sys.modules[name], "__package__", None) or ""
    found: list[str] = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(relative, package) if node.level else relative
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return found


def module_of(function: Any) -> str:
    """The module that defines a function, also of partial functions and objects with `__call__`."""
    while hasattr(function, "func"):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__
