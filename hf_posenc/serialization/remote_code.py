"""The code saved with a checkpoint. With `trust_remote_code=True`, it loads the model with only torch and transformers.

It consists of flat copies of hf-posenc modules, because Transformers fetches no code from subdirectories. They differ from the
originals only in their imports, which are relative. `user_code` adds the source of custom encodings. Only modules that run a
model are saved: those that others import at their top level, the model's encodings, and its plan's positional components.
"""

import ast
import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_posenc._versions import INSTALL
from hf_posenc.architectures.components import PositionComponent
from hf_posenc.configuration import part_names, plans_of
from hf_posenc.encodings import Geometry
from hf_posenc.progress import DELAY, ProgressBar
from hf_posenc.serialization.copies import ENTRY
from hf_posenc.serialization.import_check import refusal
from hf_posenc.serialization.user_code import PACKAGE, UserCode, flat, is_ours, parsed

logger = logging.getLogger(__name__)


def files(root: str, encodings: Iterable[tuple[Any, dict[str, Any]]], config: Any) -> dict[str, str]:
    """File name -> source of all code that a model of module `root` with these encodings needs.

    encodings: (class, options) of each encoding.

    Raises ValueError if a custom encoding can't be copied, or if its copy can't be imported.
    """
    encodings = list(encodings)
    classes = [cls for cls, _ in encodings]
    users = [cls for cls in classes if not is_ours(cls.__module__)]
    code = UserCode()
    kinds = _kinds(config)
    for cls in (*users, *(kind for kind in kinds if not is_ours(kind.__module__))):
        code.add_class(cls)
    ours = [cls.__module__ for cls in classes if cls not in users]
    if len(classes) > 1:
        ours.append(f"{PACKAGE}.encodings.composition")
    ours += _backends(encodings, config)
    carried: dict[str, str] = {}
    roots = (f"{PACKAGE}._versions", root, *_planned(config), *ours, *sorted(code.ours))
    added = (each for module in roots for each in _carry(module, code.ours, carried))
    for _ in ProgressBar(added, desc="reading the code to save", unit=" files", delay=DELAY, leave=False):
        pass
    found = {flat(module): _linked(source, carried) for module, source in carried.items()}
    version = sys.modules[PACKAGE].__version__
    header = (
        f"# From hf-posenc {version} (Apache-2.0): what this model needs where that package isn't installed, with "
        "trust_remote_code=True.\n# Where it is installed, `import hf_posenc` loads the model without this file.\n"
    )
    # Transformers fetches the modules that the entry imports. Encodings register themselves. __getattr__ creates the classes.
    imports = "".join(f"from .{name} import __name__ as _\n" for name in [*sorted(found), *code.texts])
    names = "__getattr__" if hasattr(sys.modules[root], "__getattr__") else "*"
    entry = f"from .{flat('hf_posenc._versions')} import warn\n\nwarn()\n{imports}from .{flat(root)} import {names}\n"
    texts = {name: header + text for name, text in {ENTRY: entry, **found}.items()}
    saved = {f"{name}.py": text for name, text in {**texts, **code.texts}.items()}
    if users:
        own = [(cls, options) for cls, options in encodings if cls in users]
        made = [{"type": cls.type, "options": options, "geometry": asdict(_geometry(cls, config))} for cls, options in own]
        if reason := refusal(code, saved, made):
            raise ValueError(f"{', '.join(map(str, code.paths.values()))} can't be saved with the model: {reason}")
        for path in code.paths.values():
            _announce(path)
    return saved


def _backends(encodings: Iterable[tuple[Any, dict[str, Any]]], config: Any) -> list[str]:
    """The hf-posenc modules that compute the attention of these encodings.

    Additive and most rotary encodings need none. `blockwise` is needed only if biases have parameters or depend on content.
    """
    found: list[str] = []
    for cls, options in encodings:
        found += [f"{PACKAGE}.attention.bias_backends"] * cls.changes_head_dim
        if not {"distance_bias", "score_bias", "value_bias"}.isdisjoint(cls.mechanisms()):
            found.append(f"{PACKAGE}.attention.bias_backends")
            try:
                with torch.device("meta"):
                    module = cls(_geometry(cls, config), **options)
                in_blocks = module.has_distance_vectors() or any(True for _ in module.parameters())
            except Exception:  # A custom class may need values.
                in_blocks = True
            found += [f"{PACKAGE}.attention.blockwise"] * in_blocks
    return found


def _planned(config: Any) -> list[str]:
    """The hf-posenc modules that a model needs according to its plan and spec.

    They support positional components, custom attention code, calibration, windows, and stacks that create their own tokens.
    """
    plans = plans_of(config)
    needed = {kind.__module__ for kind in _kinds(config) if is_ours(kind.__module__)}
    needed |= {f"{PACKAGE}.attention.known_models"} if any(plan.custom_attentions for plan in plans) else set()
    needed |= set() if all(_reads_tokens(plan.stack, config) for plan in plans) else {f"{PACKAGE}.architectures.own_tokens"}
    specs = config.position_spec.by_submodel.values() if plans else ()
    needed |= {f"{PACKAGE}.architectures.contributions"} if any(each.calibration for each in specs) else set()
    needed |= {f"{PACKAGE}.modeling.windows"} if any(each.windows for each in specs) else set()
    return sorted(needed)


def _kinds(config: Any) -> list[type[PositionComponent]]:
    """The kinds of positional components in the config's plans."""
    names = {name for plan in plans_of(config) for name, _ in plan.components}
    return [kind for kind in PositionComponent.kinds if kind.__name__ in names]


def _reads_tokens(stack: str, config: Any) -> bool:
    """Whether the main input of a Transformers class, built from this config or one of its sub-configs, is token IDs."""
    origin = getattr(config, "original_class", type(config)).__module__
    cls = getattr(importlib.import_module(origin.replace(".configuration_", ".modeling_")), stack, None)
    if cls is None:
        parts = (getattr(config, name, None) for name in part_names(config))
        return any(_reads_tokens(stack, part) for part in parts if isinstance(part, PreTrainedConfig))
    return cls.main_input_name == "input_ids" and "input_ids" in inspect.signature(cls.forward).parameters


def _geometry(cls: Any, config: Any) -> Geometry:
    """Sizes similar to a model's.

    Only the shapes of an encoding's tensors depend on them. Which tensors and files it has doesn't.
    """

    def size(name: str, default: int) -> int:
        value = getattr(config.get_text_config(), name, None)
        return value if isinstance(value, int) and value > 0 else default

    width, heads = size("hidden_size", 64), size("num_attention_heads", 4)
    length = config.position_encoding.get("max_length") or size("max_position_embeddings", 512)
    return Geometry(width, heads, size("head_dim", max(width // heads, 1)), length, trained_length=length, axes=cls.axes)


@functools.cache
def _announce(path: Path) -> None:
    logger.warning("%s is saved with the model in full. Anyone who loads the model can read it.", path)


def without_code(message: str) -> dict[str, str]:
    """The entry of a model whose code can't be saved. Its error replaces that of Transformers, which recommends an upgrade."""
    return {f"{ENTRY}.py": f"raise ImportError({message!r})\n"}


def _carry(module: str, wanted: Iterable[str], carried: dict[str, str]) -> Iterator[str]:
    """Adds the source of an hf-posenc module, and of the modules that it imports at its top level, to `carried`.

    It yields the name of each module that it adds. A package is replaced by a module. `wanted` are the modules of a package
    that users' files access through it.
    """
    if module in carried:
        return
    code = importlib.import_module(module)
    if hasattr(code, "__path__"):
        carried[module], imported = _stand_in(module, wanted)
    else:
        carried[module] = Path(code.__file__ or "").read_text(encoding="utf-8")
        imported = [owner for _, owners in _imports(carried[module], within=False) for _, owner in owners]
    yield module
    for each in imported:
        yield from _carry(each, wanted, carried)


def _stand_in(package: str, wanted: Iterable[str]) -> tuple[str, list[str]]:
    """A flat module with the public names of a package that come from encodings/. Other names raise an error."""
    values = {name: getattr(sys.modules[package], name) for name in sys.modules[package].__all__}  # type: ignore[attr-defined]
    owners = {
        name: value.__module__
        for name, value in values.items()
        if getattr(value, "__module__", "").startswith(f"{PACKAGE}.encodings.")
    }
    modules = sorted(module for module in wanted if module.rpartition(".")[0] == package)
    lines = [f"from .{flat(owner)} import {name}\n" for name, owner in owners.items()]
    lines += [f"from . import {flat(module)} as {module.rpartition('.')[2]}\n" for module in modules]
    message = f"{package}.{{name}} is not saved with a model."
    lines += [
        f"\n__all__ = {sorted(owners)}\n",
        "\n\ndef __getattr__(name):\n    # Not AttributeError, which `from … import …` replaces with its own message.\n",
        f'    raise (AttributeError if name.startswith("__") else ImportError)(f"{message}")\n',
    ]
    return "".join(lines), [*owners.values(), *modules]


Statement = tuple[ast.ImportFrom, list[tuple[ast.alias, str]]]
"""An import from hf-posenc, and for each of its names, the module that defines it."""


@functools.cache
def _imports(source: str, within: bool) -> list[Statement]:
    """The imports of hf-posenc modules in a source, either at its top level or within functions, which run later."""
    found = (node for node, inner in _import_nodes(source) if inner == within)
    return [(node, [(alias, _owner(node, alias)) for alias in node.names]) for node in found]


@functools.cache
def _import_nodes(source: str) -> list[tuple[ast.ImportFrom, bool]]:
    """Each import of hf-posenc modules, and whether it is within a function. Only statements are searched, for speed."""
    found = list[tuple[ast.ImportFrom, bool]]()

    def search(parent: ast.AST, within: bool) -> None:
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            for node in getattr(parent, part, ()):
                if isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
                    found.append((node, within))
                elif not isinstance(node, ast.expr):
                    function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                    search(node, within or function or (isinstance(parent, ast.Module) and _is_for_checkers(node)))

    search(parsed(source), False)
    return found


def _is_for_checkers(statement: ast.stmt) -> bool:
    """Whether a statement is `if TYPE_CHECKING:`, which never runs."""
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"


def _owner(node: ast.ImportFrom, alias: ast.alias) -> str:
    """The module that an import names or that defines the name. A package re-exports names of its modules."""
    module = importlib.import_module(node.module or "")
    value = getattr(module, alias.name, None)
    if not hasattr(module, "__path__"):
        return module.__name__
    if value is None or isinstance(value, ModuleType):
        return f"{module.__name__}.{alias.name}"
    return str(value.__module__)


def _linked(source: str, carried: Collection[str]) -> str:
    """A source whose imports of hf-posenc modules name the copies in its directory.

    Imports of modules that aren't saved, within functions, raise an ImportError, because they need hf-posenc.
    """
    lines = source.splitlines(keepends=True)
    statements = [(node, owners, within) for within in (False, True) for node, owners in _imports(source, within)]
    for node, owners, _ in sorted(statements, key=lambda each: each[0].lineno, reverse=True):
        if missing := [owner for _, owner in owners if owner not in carried]:
            texts = [f"raise ImportError({NEEDED.format(missing[0])!r})"]
        else:
            texts = [_relative(node, alias, owner) for alias, owner in owners]
        lines[node.lineno - 1 : node.end_lineno] = [f"{' ' * node.col_offset}{text}\n" for text in texts]
    return "".join(lines)


NEEDED = f"This needs {{}}, which is not saved with the model. Run {INSTALL}, import hf_posenc, and load the model again."


def _relative(node: ast.ImportFrom, alias: ast.alias, owner: str) -> str:
    """The import of a name or of a whole hf-posenc module in a copy."""
    if owner == f"{node.module}.{alias.name}":
        return f"from . import {flat(owner)} as {alias.asname or alias.name}"
    return f"from .{flat(owner)} import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
