"""Copies the complete files of custom encodings to the flat directory of a checkpoint.

The copies differ from the originals only in their imports. Imports of hf-posenc and of neighboring files
(`from .helpers import f`) name the copies in the same directory.
"""

import ast
import importlib.util
import re
import sys
import threading
import tokenize
import warnings
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

PACKAGE = __name__.rpartition(".")[0].removesuffix(".serialization")  # in a copy: its directory
ENCODINGS = f"{PACKAGE}.encodings"
CARRIED = (f"{ENCODINGS}.", f"{PACKAGE}.architectures.components.")
"""The prefixes of hf-posenc modules that users' files can import."""
PACKAGE_COPY = "posenc_package"
"""The name of the module that replaces the package itself."""


_PARSING = threading.Lock()


def parsed(source: str | bytes) -> ast.Module:
    """`ast.parse`, in one thread at a time.

    CPython 3.11 raises SystemError if two threads build trees (its issue 106905).
    """
    with _PARSING:
        return ast.parse(source)


def is_ours(module: str) -> bool:
    """Whether a module belongs to hf-posenc, not to the user or another package."""
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def flat(module: str) -> str:
    """The name of the copy of an hf-posenc module, or of the module that replaces an hf-posenc package."""
    _, *path = module.split(".")
    return "_".join(["posenc", *(name.strip("_") for name in path)]) if path else PACKAGE_COPY


class UserCode:
    """The files that define custom encodings, with the neighboring files that they import.

    texts: name of a copy -> its source. Packages come before their modules.
    paths: name of a copy -> path of the original.
    modules: name of a copy -> module name of the original.
    ours: the hf-posenc modules and packages that they import.
    """

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.paths: dict[str, Path] = {}
        self.modules: dict[str, str] = {}
        self.ours: set[str] = set()

    def add_class(self, cls: type) -> None:
        """Adds the file that defines a class. Raises ValueError if there is no file or it can't be copied."""
        started = cls.__module__ in ("__main__", "__mp_main__")  # multiprocessing uses the second
        path = None if started else file_of(cls.__module__)
        if path is None:
            place = "a notebook or a script that was started" if started else "no file"
            raise ValueError(
                f"{cls.__qualname__} is defined in {cls.__module__}, {place}, and can't be saved with the model. Write it to a "
                f"file and import it (from my_encodings import {cls.__name__})."
            )
        self._add(cls.__module__, path)
        self.texts = dict(sorted(self.texts.items()))

    def _add(self, module: str, path: Path) -> str:
        name = "posenc_own_" + re.sub(r"\W", "_", module, flags=re.ASCII)
        taken = next((other for other in self.paths if other.casefold() == name.casefold()), None)
        if taken and self.paths[taken] != path:
            raise ValueError(f"{self.paths[taken]} and {path} would both be saved as {name}.py. Rename one of them.")
        if taken is None:
            self.paths[name] = path
            self.modules[name] = module
            self.texts[name] = self._copy(module, path)
        return name

    def _copy(self, module: str, path: Path) -> str:
        try:
            with tokenize.open(path) as file:
                source = file.read()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python showed them when the file was imported.
                tree = parsed(source)
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(f"{path} can't be saved with the model, because it can't be read: {error}.") from error
        if edited := _edited(module, source):
            raise ValueError(
                f"{path} can't be saved with the model: its {edited} was edited after it was imported. Restart Python, and "
                "load the model again."
            )
        nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        imported += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
        tops = {name.partition(".")[0] for name in imported} - {PACKAGE}
        if own := sorted(top for top in tops if top == module.partition(".")[0] or is_own(top)):
            raise ValueError(
                f"{path} can't be saved with the model: it imports {', '.join(own)} by full name, which other machines don't "
                "have. Put the files into one directory, and import them relatively (from .helpers import …)."
            )
        lines = [line.encode() for line in source.split("\n")]
        for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset), reverse=True):
            end = (node.end_lineno or node.lineno) - 1
            before, after = lines[node.lineno - 1][: node.col_offset], lines[end][node.end_col_offset :]
            if statements := self._import(module, node):
                lines[node.lineno - 1 : end + 1] = [before + "; ".join(statements).encode() + after]
        if flat(PACKAGE) in (copies := b"\n".join(lines).decode()) or flat(ENCODINGS) in copies:
            self._add_attributes(tree)
        head, *rest = copies.split("\n", 2)
        return "\n".join([_in_utf8(head), *map(_in_utf8, rest[:1]), *rest[1:]])

    def _import(self, module: str, node: ast.Import | ast.ImportFrom) -> list[str]:
        """The statements that replace an import in the copy. Empty if it doesn't change."""
        if isinstance(node, ast.Import):
            ours = any(is_ours(alias.name) for alias in node.names)
            return [self._import_module(alias) for alias in node.names] if ours else []
        if not node.level:
            return [_from(self._ours(node.module or ""), node.names)] if is_ours(node.module or "") else []
        try:
            package = getattr(sys.modules.get(module), "__package__", None) or module.rpartition(".")[0]
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        except ImportError:
            return []
        path, modules, names = file_of(source), [], []
        for alias in node.names:
            found = file_of(f"{source}.{alias.name}") if _is_module(source, alias.name) else None
            if found is None:
                names.append(alias)
            else:
                copy = self._add(f"{source}.{alias.name}", found)
                modules.append(f"from . import {copy} as {alias.asname or alias.name}")
        if names and path is None:  # This import also fails in the original.
            return []
        return ([_from(self._add(source, path), names)] if names and path else []) + modules

    def _import_module(self, alias: ast.alias) -> str:
        if not is_ours(alias.name):
            return f"import {ast.unparse(alias)}"
        copy = self._ours(alias.name)
        return (
            f"from . import {copy} as {alias.asname}" if alias.asname else f"from . import {self._ours(PACKAGE)} as {PACKAGE}"
        )

    def _ours(self, module: str) -> str:
        """The copy from which an hf-posenc module is imported. Elsewhere than in CARRIED, it is that of the whole package."""
        if module != ENCODINGS and not (module.startswith(CARRIED) and file_of(module)):
            module = PACKAGE
        self.ours.add(module)
        return flat(module)

    def _add_attributes(self, tree: ast.AST) -> None:
        """Adds hf-posenc modules that a file accesses as attributes of packages, such as hf_posenc.encodings.alibi."""
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.alias):
                names.update(node.name.split("."))
        self.ours |= {ENCODINGS} if "encodings" in names else set()
        self.ours |= {f"{ENCODINGS}.{name}" for name in names if f"{ENCODINGS}.{name}" in sys.modules}


def _edited(module: str, source: str) -> str | None:
    """The name of a function or method of a module that isn't in the current version of its file, or None."""
    loaded = sys.modules.get(module)
    if loaded is None or type(getattr(loaded, "__loader__", None)) is not SourceFileLoader:
        return None  # Other loaders rewrite functions.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        codes = [compile(source, "", "exec", dont_inherit=True)]
    for each in codes:  # The list grows.
        codes += [inner for inner in each.co_consts if isinstance(inner, CodeType)]
    classes = [value for value in vars(loaded).values() if isinstance(value, type) and value.__module__ == module]
    for name, value in (item for holder in (loaded, *classes) for item in vars(holder).items()):
        code = getattr(getattr(value, "__func__", value), "__code__", None)
        if isinstance(code, CodeType) and code.co_filename == loaded.__file__ and code not in codes:
            return name
    return None


def is_own(top: str) -> bool:
    """Whether a top-level module is a user's file, not part of Python or an installed package."""
    if top in (*sys.stdlib_module_names, "torch", "transformers"):
        return False
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:
        return True
    places = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec else []
    return bool(places) and all({"site-packages", "dist-packages"}.isdisjoint(Path(place).parts) for place in places)


def _from(name: str, names: list[ast.alias]) -> str:
    return ast.unparse(ast.ImportFrom(name, names, level=1))


def _is_module(package: str, name: str) -> bool:
    """Whether `from package import name` imports a module of the package, not a name that the package defines."""
    full = f"{package}.{name}"
    value = getattr(sys.modules.get(package), name, None)
    return file_of(full) is not None if value is None else value is sys.modules.get(full)


def file_of(module: str) -> Path | None:
    """The Python file of a module, which may not be imported yet. None if it has none."""
    try:
        found = sys.modules.get(module) or importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return None
    path = getattr(found, "__file__", None) or getattr(found, "origin", None)
    return Path(path) if path and Path(path).suffix == ".py" else None


def _in_utf8(line: str) -> str:
    """One of a file's first two lines, with a declared encoding replaced by utf-8, the encoding of the copy."""
    return re.sub(r"^([ \t\f]*#.*?coding[:=][ \t]*)[-\w.]+", r"\1utf-8", line)
