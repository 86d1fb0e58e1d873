"""The code saved with a checkpoint, which loads by `trust_remote_code=True` with torch and transformers alone.

Flat copies of this package's modules, since Transformers fetches no code from subfolders. They differ from the originals in
their imports alone, which are relative. `user_code` adds the source of a user's own encodings. A copy of this module saves
the files beside it.
"""

import ast
import functools
import logging
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_posenc.encodings import Geometry
from hf_posenc.serialization import probe
from hf_posenc.serialization.user_code import PACKAGE, UserCode, flat, is_ours, parsed

ENTRY = "modeling_posenc"
COPIED = __name__.rpartition(".")[2] != "remote_code"
"""Whether this module is a copy, saved with a model."""


logger = logging.getLogger(__name__)


def files(root: str, encodings: Iterable[tuple[Any, dict[str, Any]]], config: Any) -> dict[str, str]:
    """File name -> source of all code needed by a model of module `root` with these encodings, (class, options) each.

    Raises ValueError if a user's encoding can't be copied, or if its copy doesn't do the same.
    """
    encodings = list(encodings)
    classes = [cls for cls, _ in encodings]
    users = [cls for cls in classes if not is_ours(cls.__module__)]
    if COPIED:
        if users:
            raise ValueError(
                f"{users[0].__qualname__} can't be added to a model's own code: pip install hf-posenc, and patch with it"
            )
        return {path.name: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*posenc*.py"))}
    code = UserCode()
    for cls in users:
        code.add_class(cls)
    found: dict[str, str] = {}
    # Sources register themselves: no module imports each of them by name.
    components = f"{PACKAGE}.architectures.components."
    is_model = root == f"{PACKAGE}.modeling.derived"
    registered = sorted(name for name in sys.modules if is_model and name.startswith(components))
    ours = [cls.__module__ for cls in classes if cls not in users]
    for module in (f"{PACKAGE}._versions", root, *registered, *ours, *sorted(code.ours)):
        _copy(module, code.ours, found)
    version = sys.modules[PACKAGE].__version__
    header = (
        f"# From hf-posenc {version} (Apache-2.0): what this model needs where that package isn't installed, with "
        "trust_remote_code=True.\n# Where it is installed, `import hf_posenc` loads the model without this file.\n"
    )
    # Transformers fetches the modules that the entry imports. Encodings register themselves; __getattr__ makes the classes.
    imports = "".join(f"from .{name} import __name__ as _\n" for name in [*sorted(found), *code.texts])
    names = "__getattr__" if hasattr(sys.modules[root], "__getattr__") else "*"
    entry = f"from .{flat('hf_posenc._versions')} import check\n\ncheck()\n{imports}from .{flat(root)} import {names}\n"
    texts = {name: header + text for name, text in {ENTRY: entry, **found}.items()}
    saved = {f"{name}.py": text for name, text in {**texts, **code.texts}.items()}
    if users:
        _try(code, saved, [(cls, options) for cls, options in encodings if cls in users], config)
    return saved


def _try(code: UserCode, saved: dict[str, str], encodings: Iterable[tuple[Any, dict[str, Any]]], config: Any) -> None:
    """Raises ValueError if the saved code doesn't do what the classes here do; says which files are saved if it does."""
    jobs = [{"type": cls.type, "options": options, "geometry": asdict(_geometry(cls, config))} for cls, options in encodings]
    blocked = {PACKAGE, *(module.partition(".")[0] for module in code.modules)}
    if reason := probe.difference(saved, jobs, sys.modules[f"{PACKAGE}.encodings.base"], blocked):
        raise ValueError(f"{', '.join(map(str, code.paths.values()))} can't be saved with the model: {reason}")
    for path in code.paths.values():
        _announce(path)


def _geometry(cls: Any, config: Any) -> Geometry:
    """The sizes of a model as its config says them; building it would take its memory."""
    text = config.get_text_config()

    def size(name: str, default: int) -> int:
        value = getattr(text, name, None)
        return value if isinstance(value, int) and value > 0 else default

    width, heads = size("hidden_size", 64), size("num_attention_heads", 0)
    geometry = Geometry(
        hidden_size=width,
        num_attention_heads=heads,
        head_dim=size("head_dim", width // max(heads, 1)),
        max_length=config.position_encoding.get("max_length") or getattr(config, "max_length", None),
        num_key_value_heads=size("num_key_value_heads", heads),
        trained_length=size("max_position_embeddings", 512),
        axes=cls.axes,
    )
    if geometry.max_length is None and cls.needs_max_length(geometry):
        return replace(geometry, max_length=size("max_position_embeddings", 512))
    return geometry


@functools.cache
def _announce(path: Path) -> None:
    logger.warning("%s is saved with the model, whole: whoever loads it can read it", path)


def without_code(message: str) -> dict[str, str]:
    """The entry of a model of which code can't be saved. Its error replaces Transformers' own, which advises an upgrade."""
    return {f"{ENTRY}.py": f"raise ImportError({message!r})\n"}


def _copy(module: str, wanted: Iterable[str], found: dict[str, str]) -> None:
    """Adds a flat copy of one of our modules, and of those it imports, to `found`.

    Of a package, a module that stands for it; `wanted` are the modules of a package that users' files reach through it.
    """
    if flat(module) not in found:
        package = hasattr(sys.modules[module], "__path__")
        found[flat(module)], imported = _stand_in(module, wanted) if package else _copied(module)
        for each in imported:
            _copy(each, wanted, found)


def _stand_in(package: str, wanted: Iterable[str]) -> tuple[str, list[str]]:
    """A flat module with the public names of a package that come from encodings/; other names are errors."""
    values = {name: getattr(sys.modules[package], name) for name in sys.modules[package].__all__}  # type: ignore[attr-defined]
    owners = {
        name: value.__module__
        for name, value in values.items()
        if getattr(value, "__module__", "").startswith(f"{PACKAGE}.encodings.")
    }
    modules = sorted(module for module in wanted if module.rpartition(".")[0] == package)
    lines = [f"from .{flat(owner)} import {name}\n" for name, owner in owners.items()]
    lines += [f"from . import {flat(module)} as {module.rpartition('.')[2]}\n" for module in modules]
    message = f"{package}.{{name}} is not saved with a model"
    lines += [
        f"\n__all__ = {sorted(owners)}\n",
        "\n\ndef __getattr__(name):\n    # Not AttributeError, from which `from … import …` makes a message of its own.\n",
        f'    raise (AttributeError if name.startswith("__") else ImportError)(f"{message}")\n',
    ]
    return "".join(lines), [*owners.values(), *modules]


@functools.cache
def _copied(module: str) -> tuple[str, list[str]]:
    return _flattened(Path(sys.modules[module].__file__ or "").read_text(encoding="utf-8"))


def _flattened(source: str) -> tuple[str, list[str]]:
    """The source with imports of our modules replaced by relative ones of flat copies, and the names of these modules."""
    lines, tree = source.splitlines(keepends=True), parsed(source)
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
        return f"from . import {flat(value.__name__)} as {alias.asname or alias.name}", value.__name__
    # A package re-exports names of its modules.
    owner = value.__module__ if hasattr(sys.modules[module], "__path__") else module
    return f"from .{flat(owner)} import {alias.name}" + (f" as {alias.asname}" if alias.asname else ""), owner
