"""The source of a user's own encoding classes, with everything they need of their modules, to be saved with a checkpoint.

Of each module of the user's, only the names that are used. Functions and classes are saved as source, imports as imports,
other values as a literal of their present value.
"""

import ast
import importlib.util
import inspect
import math
import symtable
import sys
import tokenize
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

PACKAGE = __name__.rpartition(".")[0]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
FORMULAS = (type, FunctionType, BuiltinFunctionType, torch.dtype)
"""Values reproducible by re-evaluating their assignment: other names of classes and functions, lambdas, dtypes."""
MAX_TENSOR = 4096
"""Maximum elements of a tensor saved as a literal."""


def is_ours(module: str) -> bool:
    """Whether a module belongs to this package, rather than to the user or another package."""
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def sources(classes: Iterable[type]) -> dict[str, str]:
    """Name of a module to be saved -> its source. Raises ValueError, with a remedy, for anything that can't be saved."""
    collected = _Collected()
    for cls in classes:
        collected.add(cls.__module__, cls.__qualname__)
    return collected.texts()


class _Collected:
    """The top-level names collected so far, by module: their imports and their definitions, in order."""

    def __init__(self) -> None:
        self.bindings: dict[str, dict[str, list[_Binding]]] = {}
        self.imports: dict[str, dict[str, str]] = {}
        self.definitions: dict[str, dict[str, str]] = {}

    def texts(self) -> dict[str, str]:
        header = "# What this model's author defined, with what it needs; hf-posenc took it from its module.\n"
        return {_saved_name(module): header + self._text(module) for module in self.definitions}

    def _text(self, module: str) -> str:
        futures = [binding.node for binding in self.bindings[module].get("annotations", ())]
        first = ["from __future__ import annotations"] * any(getattr(node, "module", "") == "__future__" for node in futures)
        imports = "\n".join([*first, *self.imports.get(module, {}).values()])
        return "\n\n\n".join([imports, *self.definitions[module].values()]) + "\n"

    def add(self, module: str, name: str) -> None:
        """Adds a top-level name of a module, after everything it uses."""
        if module not in self.bindings:
            self.bindings[module] = _bindings(sys.modules.get(module))
        if name in self.imports.get(module, {}) or name in self.definitions.setdefault(module, {}):
            return
        scope = vars(sys.modules[module]) if module in sys.modules else {}
        bindings = self.bindings[module].get(name, [])
        if name == "__file__":
            raise ValueError(
                f"{module} opens files beside itself, which can't be saved with the model: write their content into it"
            )
        if name in scope and _is_plain(scope[name]):
            self.definitions[module][name] = f"{name} = {_literal(scope[name])}"
            return
        if name not in scope or not bindings:
            raise ValueError(
                f"the source of {module}.{name} is not to be found, so it can't be saved with the model: define it at the top "
                "level of a file or of a notebook's cell, and import it by its name"
            )
        value, last = scope[name], bindings[-1]
        imports = [binding.node for binding in bindings if isinstance(binding.node, (ast.Import, ast.ImportFrom))]
        if imports:
            self.imports.setdefault(module, {})[name] = self._import(module, name, imports[-1])
        elif isinstance(value, torch.Tensor) and value.numel() <= MAX_TENSOR:
            self.imports.setdefault(module, {})["torch"] = "import torch"
            self.definitions[module][name] = f"{name} = torch.tensor({_literal(value.tolist())}, dtype={value.dtype})"
        elif isinstance(last.node, DEFINITIONS) or isinstance(value, FORMULAS) or typing.get_origin(value) is not None:
            self._define(module, name, value, [last, *self.bindings[module].get(f"{name}.", [])])
        else:
            raise ValueError(
                f"{name!r} in {module} is a {type(value).__name__}, which can't be saved with the model: what its encoding "
                "uses may be classes, functions, imported names, plain values and small tensors"
            )

    def _define(self, module: str, name: str, value: Any, statements: list["_Binding"]) -> None:
        """Adds a class, a function or a type by its source, after the names it uses."""
        self.definitions[module][name] = ""  # ends recursion where two use each other
        for node, text, _ in statements:
            quoted = [each.annotation for each in ast.walk(node) if isinstance(each, ast.AnnAssign)]
            strings = [str(each.value) for each in quoted if isinstance(each, ast.Constant)]  # evaluated with the options
            for each in (text, *strings):
                for other in sorted(_global_names(symtable.symtable(each, module, "exec")) - {name}):
                    if other == "__file__" or (other in vars(sys.modules[module]) and not other.startswith("__")):
                        self.add(module, other)
            for inner in ast.walk(node):
                if isinstance(inner, (ast.Import, ast.ImportFrom)):
                    _refuse_inner(module, name, inner)
        _refuse_edited(module, name, value, statements[0])
        if isinstance(value, type):
            stated = {"type", "aliases", *_bound(ast.Module(getattr(statements[0].node, "body", []), []))}
            stated |= {target.attr for node, _, _ in statements[1:] for target in getattr(node, "targets", ())}
            if extra := sorted(each for each in vars(value).keys() - stated if not each.startswith("_")):
                raise ValueError(
                    f"{module}.{name}.{extra[0]} was set from outside the class, which can't be saved: set it in its body"
                )
        del self.definitions[module][name]
        self.definitions[module][name] = "\n".join(text for _, text, _ in statements)

    def _import(self, module: str, name: str, node: Any) -> str:
        alias = next(each for each in node.names if (each.asname or each.name.partition(".")[0]) == name)
        bound = f" as {alias.asname}" if alias.asname else ""
        source = alias.name if isinstance(node, ast.Import) else _source(module, node)
        if isinstance(node, ast.Import) and source == PACKAGE:
            return self._namespace(module, name, PACKAGE)
        if (source, alias.name) == (PACKAGE, "encodings"):
            return self._namespace(module, name, f"{PACKAGE}.encodings")
        whole = isinstance(node, ast.Import) or isinstance(sys.modules.get(f"{source}.{alias.name}"), ModuleType)
        names = f"import {alias.name}{bound}"
        if not is_ours(source) and _is_installed(source):
            return names if isinstance(node, ast.Import) else f"from {source} {names}"
        if whole and not (isinstance(node, ast.ImportFrom) and source == PACKAGE):
            raise ValueError(
                f"`{ast.unparse(node)}` in {module} can't be saved with the model: from {source} import the names that its "
                "encoding uses"
            )
        if is_ours(source):
            return f"from {source} {names}"
        self.add(source, alias.name)
        return f"from .{_saved_name(source)} {names}"

    def _namespace(self, module: str, name: str, source: str) -> str:
        """One of our packages, imported as `name`, reduced to the names of encodings/ that this module uses anywhere."""
        package = sys.modules[source]
        used = {
            node.attr
            for bindings in self.bindings[module].values()
            for binding in bindings
            for node in ast.walk(binding.node)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
        }
        values = {each: getattr(package, each, None) for each in sorted(used)}
        if modules := [each for each, value in values.items() if isinstance(value, ModuleType)]:
            raise ValueError(
                f"`{name}.{modules[0]}` in {module} can't be saved with the model: from {source}.{modules[0]} import the names "
                "that its encoding uses"
            )
        names = [each for each, value in values.items() if getattr(value, "__module__", "").startswith(f"{PACKAGE}.encodings.")]
        lines = [f"from {source} import {each}" for each in names]
        return "\n".join(["import types", *lines, f"{name} = types.SimpleNamespace({', '.join(f'{c}={c}' for c in names)})"])


class _Binding(NamedTuple):
    """A top-level statement that binds a name, its text, and the text of the whole file or notebook cell."""

    node: ast.stmt
    text: str
    source: str


def _saved_name(module: str) -> str:
    return "posenc_main" if module == "__main__" else f"posenc_own_{module.replace('_', '__').replace('.', '_')}"


def _source(module: str, node: ast.ImportFrom) -> str:
    """The absolute name of the module in `from … import`."""
    return importlib.util.resolve_name("." * node.level + (node.module or ""), sys.modules[module].__package__)


def _is_installed(module: str) -> bool:
    """Whether a module is part of the standard library or of an installed distribution, not a file of the user's."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return True
    spec = importlib.util.find_spec(top) if top != "__main__" else None
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
    return any(place and {"site-packages", "dist-packages"} & set(Path(place).parts) for place in places)


def _is_plain(value: Any) -> bool:
    """Whether a literal reproduces a value."""
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        return type(value) in (list, tuple, set, frozenset, dict) and all(map(_is_plain, inner))
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def _literal(value: Any) -> str:
    """Like `repr`, with NaN and infinity as calls of float."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, (tuple, set, frozenset)):
        return f"{type(value).__name__}([{', '.join(map(_literal, value))}])"
    return f"float({str(value)!r})" if isinstance(value, float) and not math.isfinite(value) else repr(value)


def _refuse_inner(module: str, name: str, node: Any) -> None:
    for alias in node.names:
        source = alias.name if isinstance(node, ast.Import) else _source(module, node)
        if is_ours(source) or not _is_installed(source):
            raise ValueError(
                f"{module}.{name} imports {source} when it runs, which can't be saved with the model: import by name what it "
                "uses, at the top"
            )


def _refuse_edited(module: str, name: str, value: Any, binding: _Binding) -> None:
    """Raises ValueError if the functions of a definition differ from its present source."""
    written = _functions(compile(binding.source, module, "exec", dont_inherit=True))
    methods = [each.name for each in getattr(binding.node, "body", ()) if isinstance(each, FUNCTIONS)]
    for function in [vars(value).get(method) for method in methods] if isinstance(value, type) else [value]:
        function = inspect.unwrap(getattr(function, "__func__", function))  # type: ignore[arg-type]
        own = isinstance(function, FunctionType) and function.__module__ == module and function.__qualname__.startswith(name)
        if own and _essence(function.__code__) not in written:
            raise ValueError(
                f"the source of {module}.{name} has changed since it was imported, so it can't be saved with the model: start "
                "again, then load and save the model"
            )


def _functions(code: CodeType) -> list[Any]:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return [*map(_essence, inner), *(found for each in inner for found in _functions(each))]


def _essence(code: CodeType) -> Any:
    """The parts of a code object that don't depend on its place in the file."""
    consts = tuple(_essence(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts)
    return code.co_name, code.co_code, code.co_names, code.co_varnames, consts


def _global_names(table: symtable.SymbolTable) -> set[str]:
    """Names that are global or built-in in a piece of source."""
    top = table.get_type() == "module"
    own = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (symbol.is_global() or (top and not symbol.is_assigned()))
    }
    return own.union(*map(_global_names, table.get_children()))


def _bindings(module: ModuleType | None) -> dict[str, list[_Binding]]:
    """Name -> the top-level statements that bind it, in order; "name." -> those that set its attributes."""
    found: dict[str, list[_Binding]] = {}
    for source in _sources(module):
        try:
            tree = ast.parse(source)
        except SyntaxError:  # a notebook cell with magics
            continue
        for node in _simple(tree.body):
            plain = node.col_offset == 0 and not getattr(node, "decorator_list", ())
            text = (ast.get_source_segment(source, node) if plain else None) or ast.unparse(node)
            for name in _bound(node):
                found.setdefault(name, []).append(_Binding(node, text, source))
                found.pop(f"{name}.", None)
            for target in getattr(node, "targets", ()):
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    found.setdefault(f"{target.value.id}.", []).append(_Binding(node, text, source))
    return found


def _simple(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, with `if`, `try`, `with` and loops replaced by the statements inside."""
    for node in body:
        inner = [getattr(node, field, []) for field in ("body", "orelse", "finalbody")]
        if any(inner) and not isinstance(node, DEFINITIONS):
            handlers = [handler.body for handler in getattr(node, "handlers", ())]
            for block in (*inner, *handlers):
                yield from _simple(block)
        else:
            yield node


def _sources(module: ModuleType | None) -> list[str]:
    """The text of a module's file, or of the cells of a notebook."""
    path = getattr(module, "__file__", None)
    if path and Path(path).is_file():
        with tokenize.open(path) as file:
            return [file.read()]
    cells = getattr(module, "In", None)
    return [cell for cell in cells if isinstance(cell, str)] if isinstance(cells, list) else []


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a statement binds in its module."""
    if isinstance(node, DEFINITIONS):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    else:
        for child in ast.iter_child_nodes(node):
            yield from _bound(child)
