"""The code that travels with a saved model: with `trust_remote_code=True` it loads where only torch and transformers are.

Flat copies of this package's own modules, their imports made relative and nothing else changed (Transformers fetches no
code from subfolders), and what an encoding of one's own needs of the module which defines it. In such a copy, this module
hands the same files on.
"""

import ast
import functools
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ENTRY = "modeling_posenc"
PACKAGE, _, _OWN_NAME = __name__.rpartition(".")
COPIED = "posenc_portable"


def files(root: str, encodings: Iterable[type]) -> dict[str, str]:
    """File name -> source of all that a model of module `root` with these encodings runs, itself included.

    Raises ValueError where an encoding's own source is not to be found, or needs what can't be taken along.
    """
    classes = list(encodings)
    if _OWN_NAME == COPIED:
        if strangers := [cls.__qualname__ for cls in classes if not _is_ours(cls.__module__)]:
            raise ValueError(f"{strangers[0]} can't be added to a model's own code: pip install hf-posenc, and patch with it")
        return {path.name: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*posenc*.py"))}
    found: dict[str, str] = {}
    _copy(f"{PACKAGE}.requirements", found)
    _copy(f"{PACKAGE}.{root}", found)
    own = _Extract(found)
    for cls in classes:
        if _is_ours(cls.__module__):
            _copy(cls.__module__, found)
        else:
            own.take(cls.__module__, cls.__qualname__)
    version = sys.modules[PACKAGE].__version__
    header = (
        f"# From hf-posenc {version} (Apache-2.0): what this model needs where that package isn't installed, with "
        "trust_remote_code=True.\n# Where it is installed, `import hf_posenc` loads the model without this file.\n"
    )
    authors = own.texts()
    # Transformers fetches what the entry imports. Encodings register themselves; __getattr__ makes the classes.
    imports = "".join(f"from .{name} import __name__ as _\n" for name in sorted([*found, *authors]))
    names = "__getattr__" if hasattr(sys.modules[f"{PACKAGE}.{root}"], "__getattr__") else "*"
    entry = f"from .{_flat('requirements')} import check\n\ncheck()\n{imports}from .{_flat(root)} import {names}\n"
    texts = {name: header + text for name, text in {ENTRY: entry, **found}.items()}
    return {f"{name}.py": text for name, text in {**texts, **authors}.items()}


def without_code(encoding: str, remedy: str) -> dict[str, str]:
    """The entry of a model whose encoding can't travel: it says so, since Transformers would advise to upgrade itself."""
    said = f"the class of this model's position encoding {encoding!r} isn't with it: pip install hf-posenc; {remedy}"
    return {f"{ENTRY}.py": f"raise ImportError({said!r})\n"}


def _is_ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def _flat(module: str) -> str:
    """The name of a module's copy. The package of encodings only hands on what is in its base."""
    name = module.rpartition(".")[2]
    return f"posenc_{'base' if name == 'encodings' else name}"


def _copy(module: str, found: dict[str, str]) -> None:
    """One of our modules, and those it imports."""
    if _flat(module) not in found:
        found[_flat(module)], needed = _copied(module)
        for each in needed:
            _copy(each, found)


@functools.cache
def _copied(module: str) -> tuple[str, list[str]]:
    """The source of a flat copy, and which of our modules it imports."""
    source = Path(sys.modules[module].__file__ or "").read_text(encoding="utf-8")
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    needed: list[str] = []
    for node in reversed([node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]):
        if node.module and _is_ours(node.module):
            texts, owners = zip(*(_relative(node.module, alias) for alias in node.names), strict=True)
            lines[node.lineno - 1 : node.end_lineno] = [f"{' ' * node.col_offset}{text}\n" for text in texts]
            needed += owners
    return "".join(lines), needed


def _relative(module: str, alias: ast.alias) -> tuple[str, str]:
    """`from <one of ours> import name`, as a flat copy says it, and the module where that name is defined."""
    value = getattr(sys.modules[module], alias.name)
    if isinstance(value, ModuleType):
        return f"from . import {_flat(value.__name__)} as {alias.asname or alias.name}", value.__name__
    # A package hands on what is defined elsewhere.
    owner = value.__module__ if hasattr(sys.modules[module], "__path__") else module
    return f"from .{_flat(owner)} import {alias.name}" + (f" as {alias.asname}" if alias.asname else ""), owner


class _Extract:
    """What encodings of one's own need of the modules that define them: one file for each, with only what is used."""

    def __init__(self, found: dict[str, str]) -> None:
        self.found = found
        self.statements: dict[str, dict[str, list[tuple[ast.stmt, str]]]] = {}
        self.imports: dict[str, dict[str, str]] = {}
        self.definitions: dict[str, dict[str, str]] = {}

    def texts(self) -> dict[str, str]:
        header = "# What this model's author defined, with what it needs; hf-posenc took it from its module.\n"
        return {_own_name(module): header + self._text(module) for module in self.definitions}

    def _text(self, module: str) -> str:
        future, _ = self.statements[module].get("annotations", [(None, "")])[0]
        first = ["from __future__ import annotations"] if getattr(future, "module", None) == "__future__" else []
        imports = "\n".join([*first, *self.imports.get(module, {}).values()])
        return "\n\n\n".join([imports, *self.definitions[module].values()]) + "\n"

    def take(self, module: str, name: str) -> None:
        """A top-level name of a module, after all that it needs."""
        if module not in self.statements:
            self.statements[module] = _statements(module)
        known = self.statements[module]
        if name not in known:
            raise ValueError(
                f"the source of {module}.{name} is not to be found, so it can't travel with the model: define it at the top "
                "level of a file or of a notebook's cell"
            )
        first, _ = known[name][0]
        if isinstance(first, (ast.Import, ast.ImportFrom)):
            imports = self.imports.setdefault(module, {})
            if name not in imports:
                imports[name] = self._import(module, name, first)
            return
        definitions = self.definitions.setdefault(module, {})
        text = "\n".join(text for _, text in known[name])
        if text in definitions:
            return
        definitions[text] = ""  # two functions may need each other
        used = {each.id for node, _ in known[name] for each in ast.walk(node) if isinstance(each, ast.Name)}
        for other in sorted(used - {name}):
            if other in known and known[other][0][0] is not first:
                self.take(module, other)
        del definitions[text]
        definitions[text] = text

    def _import(self, module: str, name: str, node: Any) -> str:
        alias = next(each for each in node.names if (each.asname or each.name.partition(".")[0]) == name)
        bound = f" as {alias.asname}" if alias.asname else ""
        if isinstance(node, ast.Import):
            if alias.name == PACKAGE:
                return self._namespace(module, name)
            if _is_ours(alias.name) or not _is_installed(alias.name):
                raise ValueError(
                    f"`import {alias.name}` in {module} can't travel with the model: from {alias.name} import the names "
                    "that its encoding uses"
                )
            return f"import {alias.name}{bound}"
        source = importlib.util.resolve_name("." * node.level + (node.module or ""), sys.modules[module].__package__)
        if _is_ours(source):
            return self._ours(source, alias)
        if _is_installed(source):
            return f"from {source} import {alias.name}{bound}"
        self.take(source, alias.name)
        return f"from .{_own_name(source)} import {alias.name}{bound}"

    def _ours(self, source: str, alias: ast.alias) -> str:
        text, owner = _relative(source, alias)
        _copy(owner, self.found)
        return text

    def _namespace(self, module: str, name: str) -> str:
        """`import hf_posenc` for those of its names which this module uses anywhere."""
        package = sys.modules[PACKAGE]
        used = {
            node.attr
            for statements in self.statements[module].values()
            for statement, _ in statements
            for node in ast.walk(statement)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
        }
        carried = sorted(
            each for each in used if getattr(getattr(package, each, None), "__module__", "").startswith(f"{PACKAGE}.encodings.")
        )
        lines = [self._ours(PACKAGE, ast.alias(each)) for each in carried]
        return "\n".join(["import types", *lines, f"{name} = types.SimpleNamespace({', '.join(f'{c}={c}' for c in carried)})"])


def _own_name(module: str) -> str:
    return f"posenc_own_{module.replace('.', '_').strip('_')}"


def _is_installed(module: str) -> bool:
    """Whether others get a module from the standard library or from a distribution, rather than from this user's disk."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return True
    spec = importlib.util.find_spec(top) if top != "__main__" else None
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
    return any(
        place and Path(place).is_relative_to(sysconfig.get_path(kind)) for place in places for kind in ("purelib", "platlib")
    )


def _statements(module: str) -> dict[str, list[tuple[ast.stmt, str]]]:
    """Name -> the last top-level statement which binds it, and those after it which change what it holds; with texts."""
    found: dict[str, list[tuple[ast.stmt, str]]] = {}
    for source in _sources(sys.modules.get(module)):
        try:
            tree = ast.parse(source)
        except SyntaxError:  # a notebook's cell with magics
            continue
        lines = source.splitlines()
        for node in tree.body:
            if isinstance(node, ast.If) and any(getattr(each, "id", "") == "__name__" for each in ast.walk(node.test)):
                continue  # what a script does when it is run
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
            statement = (node, "\n".join(lines[first - 1 : node.end_lineno]))
            for name in _bound(node):
                kept = found.get(name, []) if isinstance(node, ast.AugAssign) else []
                found[name] = [*kept, statement]
            for name in _changed(node):
                if name in found:
                    found[name].append(statement)
    return found


def _sources(module: ModuleType | None) -> list[str]:
    """A file, or the cells of a notebook."""
    path = getattr(module, "__file__", None)
    if path and Path(path).is_file():
        return [Path(path).read_text(encoding="utf-8")]
    cells = getattr(module, "In", None)
    return [cell for cell in cells if isinstance(cell, str)] if isinstance(cells, list) else []


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a statement binds in its module."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Store):
            yield node.id
    else:
        for child in ast.iter_child_nodes(node):
            yield from _bound(child)


def _changed(node: ast.AST) -> Iterator[str]:
    """The names whose values a statement changes in place: `name.append(…)`, `name[…] = …`, `name.attribute = …`."""
    places = [node.value.func] if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else []
    places += getattr(node, "targets", [getattr(node, "target", None)])
    for place in places:
        if isinstance(place, (ast.Attribute, ast.Subscript)) and isinstance(place.value, ast.Name):
            yield place.value.id
