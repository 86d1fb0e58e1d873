"""The code saved with a checkpoint, which loads by `trust_remote_code=True` with torch and transformers alone.

Flat copies of this package's modules, since Transformers fetches no code from subfolders. They differ from the originals in
their imports alone, which are relative. `user_code` adds the source of a user's own encodings. A copy of this module saves
the files beside it.
"""

import ast
import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from hf_posenc.user_code import PACKAGE, is_ours, sources

ENTRY = "modeling_posenc"
COPIED = "posenc_remote_code"
_OWN_NAME = __name__.rpartition(".")[2]


def files(root: str, encodings: Iterable[type]) -> dict[str, str]:
    """File name -> source of all code needed by a model of module `root` with these encodings.

    Raises ValueError if the source of a user's encoding isn't found, or needs something that can't be saved.
    """
    classes = list(encodings)
    users = [cls for cls in classes if not is_ours(cls.__module__)]
    if _OWN_NAME == COPIED:
        if users:
            raise ValueError(
                f"{users[0].__qualname__} can't be added to a model's own code: pip install hf-posenc, and patch with it"
            )
        return {path.name: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*posenc*.py"))}
    found: dict[str, str] = {}
    # Sources register themselves: no module imports each of them by name.
    registered = sorted(name for name in sys.modules if root == "modeling" and name.startswith(f"{PACKAGE}.sources."))
    ours = [cls.__module__ for cls in classes if cls not in users]
    for module in (f"{PACKAGE}.requirements", f"{PACKAGE}.{root}", *registered, *ours):
        _copy(module, found)
    authors = {}
    for name, source in sources(users).items():
        authors[name], imported = _flattened(source)
        for module in imported:
            _copy(module, found)
    version = sys.modules[PACKAGE].__version__
    header = (
        f"# From hf-posenc {version} (Apache-2.0): what this model needs where that package isn't installed, with "
        "trust_remote_code=True.\n# Where it is installed, `import hf_posenc` loads the model without this file.\n"
    )
    # Transformers fetches the modules that the entry imports. Encodings register themselves; __getattr__ makes the classes.
    imports = "".join(f"from .{name} import __name__ as _\n" for name in sorted([*found, *authors]))
    names = "__getattr__" if hasattr(sys.modules[f"{PACKAGE}.{root}"], "__getattr__") else "*"
    entry = f"from .{_flat('requirements')} import check\n\ncheck()\n{imports}from .{_flat(root)} import {names}\n"
    texts = {name: header + text for name, text in {ENTRY: entry, **found}.items()}
    return {f"{name}.py": text for name, text in {**texts, **authors}.items()}


def without_code(encoding: str, remedy: str) -> dict[str, str]:
    """The entry of a model whose encoding can't be saved. Its error replaces Transformers' own, which advises an upgrade."""
    message = f"the class of this model's position encoding {encoding!r} isn't with it: pip install hf-posenc; {remedy}"
    return {f"{ENTRY}.py": f"raise ImportError({message!r})\n"}


def _flat(module: str) -> str:
    """The name of a module's copy."""
    return f"posenc_{module.rpartition('.')[2]}"


def _copy(module: str, found: dict[str, str]) -> None:
    """Adds a flat copy of one of our modules, and of those it imports, to `found`."""
    if _flat(module) not in found:
        found[_flat(module)], imported = _copied(module)
        for each in imported:
            _copy(each, found)


@functools.cache
def _copied(module: str) -> tuple[str, list[str]]:
    return _flattened(Path(sys.modules[module].__file__ or "").read_text(encoding="utf-8"))


def _flattened(source: str) -> tuple[str, list[str]]:
    """The source with imports of our modules replaced by relative ones of flat copies, and the names of these modules."""
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    imported: list[str] = []
    for node in reversed([node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]):
        if node.module and is_ours(node.module):
            texts, owners = zip(*(_relative(node.module, alias) for alias in node.names), strict=True)
            lines[node.lineno - 1 : node.end_lineno] = [f"{' ' * node.col_offset}{text}\n" for text in texts]
            imported += owners
    return "".join(lines), imported


def _relative(module: str, alias: ast.alias) -> tuple[str, str]:
    """`from <one of our modules> import name` as written in a flat copy, and the module that defines the name."""
    value = getattr(sys.modules[module], alias.name)
    if isinstance(value, ModuleType):
        return f"from . import {_flat(value.__name__)} as {alias.asname or alias.name}", value.__name__
    # A package re-exports names of its modules.
    owner = value.__module__ if hasattr(sys.modules[module], "__path__") else module
    return f"from .{_flat(owner)} import {alias.name}" + (f" as {alias.asname}" if alias.asname else ""), owner
