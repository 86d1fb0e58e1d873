"""The code that travels with a saved model: with `trust_remote_code=True` it loads where only torch and transformers are.

Flat copies of this package's own modules, their imports made relative and nothing else changed (Transformers fetches no
code from subfolders), and what an encoding of one's own needs of the module which defines it. In such a copy, this module
hands the same files on.
"""

import ast
import functools
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

ENTRY = "modeling_posenc"
PACKAGE, _, _OWN_NAME = __name__.rpartition(".")
COPIED = "posenc_remote_code"


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
    """The name of a module's copy."""
    return f"posenc_{module.rpartition('.')[2]}"


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


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FORMULAS = (type, FunctionType, BuiltinFunctionType, torch.dtype)
"""What an assignment's expression gives again whenever it is read: other names of classes and functions, lambdas, dtypes."""


class _Extract:
    """What encodings of one's own need of the modules that define them: one file for each, with only what is used.

    Functions and classes travel as source, everything else by its present value.
    """

    def __init__(self, found: dict[str, str]) -> None:
        self.found = found
        self.binders: dict[str, dict[str, list[_Binder]]] = {}
        self.imports: dict[str, dict[str, str]] = {}
        self.definitions: dict[str, dict[str, str]] = {}

    def texts(self) -> dict[str, str]:
        header = "# What this model's author defined, with what it needs; hf-posenc took it from its module.\n"
        return {_own_name(module): header + self._text(module) for module in self.definitions}

    def _text(self, module: str) -> str:
        futures = [binder.node for binder in self.binders[module].get("annotations", ())]
        first = ["from __future__ import annotations"] * any(getattr(node, "module", "") == "__future__" for node in futures)
        imports = "\n".join([*first, *self.imports.get(module, {}).values()])
        return "\n\n\n".join([imports, *self.definitions[module].values()]) + "\n"

    def take(self, module: str, name: str) -> None:
        """A top-level name of a module, after all that it needs."""
        if module not in self.binders:
            self.binders[module] = _binders(sys.modules.get(module))
        if name in self.imports.get(module, {}) or name in self.definitions.setdefault(module, {}):
            return
        scope = vars(sys.modules[module]) if module in sys.modules else {}
        binders = self.binders[module].get(name, [])
        if name == "__file__":
            raise ValueError(
                f"{module} opens files beside itself, which can't travel with the model: write their content into it"
            )
        if name in scope and _is_plain(scope[name]):
            self.definitions[module][name] = f"{name} = {_literal(scope[name])}"
            return
        if name not in scope or not binders:
            raise ValueError(
                f"the source of {module}.{name} is not to be found, so it can't travel with the model: define it at the top "
                "level of a file or of a notebook's cell, and import it by its name"
            )
        value, last = scope[name], binders[-1]
        imports = [binder.node for binder in binders if isinstance(binder.node, (ast.Import, ast.ImportFrom))]
        if imports:
            self.imports.setdefault(module, {})[name] = self._import(module, name, imports[-1])
        elif isinstance(value, torch.Tensor) and value.numel() <= 4096:
            self.imports.setdefault(module, {})["torch"] = "import torch"
            written = f"torch.tensor({_literal(value.tolist())}, dtype={value.dtype})"
            self.definitions[module][name] = f"{name} = {written}"
        elif isinstance(last.node, DEFINITIONS) or isinstance(value, FORMULAS) or typing.get_origin(value) is not None:
            self._define(module, name, value, [last, *self.binders[module].get(f"{name}.", [])])
        else:
            raise ValueError(
                f"{name!r} in {module} is a {type(value).__name__}, which can't travel with the model: what its encoding uses "
                "may be classes, functions, imported names, plain values and small tensors"
            )

    def _define(self, module: str, name: str, value: Any, statements: list["_Binder"]) -> None:
        """A class, a function or a type by its source, with what it uses; two may need each other."""
        self.definitions[module][name] = ""
        for node, text, _ in statements:
            quoted = [each.annotation for each in ast.walk(node) if isinstance(each, ast.AnnAssign)]
            strings = [str(each.value) for each in quoted if isinstance(each, ast.Constant)]  # read when options are checked
            for each in (text, *strings):
                for other in sorted(_global_names(symtable.symtable(each, module, "exec")) - {name}):
                    if other == "__file__" or (other in vars(sys.modules[module]) and not other.startswith("__")):
                        self.take(module, other)
            for inner in ast.walk(node):
                if isinstance(inner, (ast.Import, ast.ImportFrom)):
                    _refuse_inner(module, name, inner)
        _refuse_edited(module, name, value, statements[0])
        if isinstance(value, type):
            stated = {"type", "aliases", *_bound(ast.Module(getattr(statements[0].node, "body", []), []))}
            stated |= {target.attr for node, _, _ in statements[1:] for target in getattr(node, "targets", ())}
            if extra := sorted(each for each in vars(value).keys() - stated if not each.startswith("_")):
                raise ValueError(
                    f"{module}.{name}.{extra[0]} was set from outside the class, which can't travel: set it in its body"
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
        if not _is_ours(source) and _is_installed(source):
            return f"import {source}{bound}" if isinstance(node, ast.Import) else f"from {source} import {alias.name}{bound}"
        if whole and not (isinstance(node, ast.ImportFrom) and source == PACKAGE):
            raise ValueError(
                f"`{ast.unparse(node)}` in {module} can't travel with the model: from {source} import the names that its "
                "encoding uses"
            )
        if _is_ours(source):
            return self._ours(source, alias)
        self.take(source, alias.name)
        return f"from .{_own_name(source)} import {alias.name}{bound}"

    def _ours(self, source: str, alias: ast.alias) -> str:
        text, owner = _relative(source, alias)
        _copy(owner, self.found)
        return text

    def _namespace(self, module: str, name: str, source: str) -> str:
        """One of our packages, imported as `name`, reduced to the names that this module uses anywhere."""
        package = sys.modules[source]
        used = {
            node.attr
            for binders in self.binders[module].values()
            for binder in binders
            for node in ast.walk(binder.node)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
        }
        if modules := sorted(each for each in used if isinstance(getattr(package, each, None), ModuleType)):
            raise ValueError(
                f"`{name}.{modules[0]}` in {module} can't travel with the model: from {source}.{modules[0]} import the names "
                "that its encoding uses"
            )
        carried = sorted(
            each for each in used if getattr(getattr(package, each, None), "__module__", "").startswith(f"{PACKAGE}.encodings.")
        )
        lines = [self._ours(source, ast.alias(each)) for each in carried]
        return "\n".join(["import types", *lines, f"{name} = types.SimpleNamespace({', '.join(f'{c}={c}' for c in carried)})"])


class _Binder(NamedTuple):
    """A statement which binds a name at the top level of a module, its text, and the file or cell that it is in."""

    node: ast.stmt
    text: str
    source: str


def _own_name(module: str) -> str:
    return "posenc_main" if module == "__main__" else f"posenc_own_{module.replace('_', '__').replace('.', '_')}"


def _source(module: str, node: ast.ImportFrom) -> str:
    """The module that an import takes names from."""
    return importlib.util.resolve_name("." * node.level + (node.module or ""), sys.modules[module].__package__)


def _is_installed(module: str) -> bool:
    """Whether others get a module from the standard library or from a distribution, rather than from this user's disk."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return True
    spec = importlib.util.find_spec(top) if top != "__main__" else None
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
    return any(place and {"site-packages", "dist-packages"} & set(Path(place).parts) for place in places)


def _is_plain(value: Any) -> bool:
    """Whether a value is what its literal says."""
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        return type(value) in (list, tuple, set, frozenset, dict) and all(map(_is_plain, inner))
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def _literal(value: Any) -> str:
    """As in `repr`, but that floats which have no literal are written as calls."""
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
        if _is_ours(source) or not _is_installed(source):
            raise ValueError(
                f"{module}.{name} imports {source} when it runs, which can't travel with the model: import by name what it "
                "uses, at the top"
            )


def _refuse_edited(module: str, name: str, value: Any, binder: _Binder) -> None:
    """Raises ValueError where the functions of a definition are no longer those of its source."""
    written = _functions(compile(binder.source, module, "exec", dont_inherit=True))
    methods = [
        each.name for each in getattr(binder.node, "body", ()) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    for function in [vars(value).get(method) for method in methods] if isinstance(value, type) else [value]:
        function = inspect.unwrap(getattr(function, "__func__", function))  # type: ignore[arg-type]
        own = isinstance(function, FunctionType) and function.__module__ == module and function.__qualname__.startswith(name)
        if own and _essence(function.__code__) not in written:
            raise ValueError(
                f"the source of {module}.{name} has changed since it was imported, so it can't travel with the model: start "
                "again, then load and save the model"
            )


def _functions(code: CodeType) -> list[Any]:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return [*map(_essence, inner), *(found for each in inner for found in _functions(each))]


def _essence(code: CodeType) -> Any:
    """What a function does, wherever it stands."""
    consts = tuple(_essence(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts)
    return code.co_name, code.co_code, code.co_names, code.co_varnames, consts


def _global_names(table: symtable.SymbolTable) -> set[str]:
    """Names that a piece of source takes from its module, or from Python."""
    top = table.get_type() == "module"
    own = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (symbol.is_global() or (top and not symbol.is_assigned()))
    }
    return own.union(*map(_global_names, table.get_children()))


def _binders(module: ModuleType | None) -> dict[str, list[_Binder]]:
    """Name -> the statements that bind it at the top level, in order; "name." -> those that set its attributes."""
    found: dict[str, list[_Binder]] = {}
    for source in _sources(module):
        try:
            tree = ast.parse(source)
        except SyntaxError:  # a notebook's cell with magics
            continue
        for node in _simple(tree.body):
            plain = node.col_offset == 0 and not getattr(node, "decorator_list", ())
            text = (ast.get_source_segment(source, node) if plain else None) or ast.unparse(node)
            for name in _bound(node):
                found.setdefault(name, []).append(_Binder(node, text, source))
                found.pop(f"{name}.", None)
            for target in getattr(node, "targets", ()):
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    found.setdefault(f"{target.value.id}.", []).append(_Binder(node, text, source))
    return found


def _simple(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, with those within `if`, `try`, `with` and loops in place of these."""
    for node in body:
        inner = [getattr(node, field, []) for field in ("body", "orelse", "finalbody")]
        if any(inner) and not isinstance(node, DEFINITIONS):
            handlers = [handler.body for handler in getattr(node, "handlers", ())]
            for block in (*inner, *handlers):
                yield from _simple(block)
        else:
            yield node


def _sources(module: ModuleType | None) -> list[str]:
    """A file, or the cells of a notebook."""
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
    elif isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Store):
            yield node.id
    else:
        for child in ast.iter_child_nodes(node):
            yield from _bound(child)
