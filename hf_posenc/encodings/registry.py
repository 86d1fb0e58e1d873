"""Registered encodings by name."""

import importlib
import itertools
from collections.abc import Collection
from typing import Any

from hf_posenc.encodings.base import PositionEncoding
from hf_posenc.encodings.options import as_paths, did_you_mean, has_paths, has_strings, quoted, short_repr


def list_encodings() -> dict[str, type[PositionEncoding]]:
    """The class of each registered encoding, by canonical name in alphabetical order."""
    return {name: cls for name, cls in sorted(PositionEncoding.registered.items()) if name == cls.type}


def encoding_class(name: Any) -> type[PositionEncoding]:
    """The class registered under a name or alias, or the class of a composition `"a+b"`.

    Raises ValueError for an unknown name.
    """
    if isinstance(name, str) and "+" in name:
        from hf_posenc.encodings.composition import composed

        classes = [encoding_class(part) for part in name.split("+")]
        return composed(classes, module=__name__)
    if not isinstance(name, str) or name not in PositionEncoding.registered:
        raise ValueError(
            f"Unknown position encoding {short_repr(name)}{did_you_mean(name, PositionEncoding.registered)}. Registered: "
            f"{quoted(list_encodings())}. "
            "If it is a custom encoding, import the module that defines its class first. If its code came with a checkpoint, "
            "load the checkpoint with trust_remote_code=True in a program that doesn't import hf_posenc."
        )
    return PositionEncoding.registered[name]


def __getattr__(name: str) -> Any:
    """Classes of compositions, which pickle looks up by name."""
    if "+" in name:
        import_all()
        return encoding_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def import_all() -> None:
    """Import all modules that register encodings.

    In a new process, pickle imports single modules of a checkpoint's code, but not the module that imports the others."""
    package, _, name = __name__.rpartition(".")
    if name.startswith("posenc_"):  # a copy
        importlib.import_module(f"{package}.modeling_posenc")


def canonical(encoding: Any, layered: Collection[str] = (), in_code: bool = False) -> dict[str, Any]:
    """The canonical dict, with all options, of an encoding given by name or as `{"type": name, **options}`.

    layered: the parts with separate layers. Other parts can't have the same encoding.
    in_code: whether the encoding is an argument in a program. If so, strings that name files become `Path` objects. In a
        config, they raise an error.

    Raises ValueError for anything else, for unknown names, and for options that the encoding doesn't have.
    """
    if isinstance(encoding, str):
        encoding = {"type": encoding}
    if not isinstance(encoding, dict) or not isinstance(encoding.get("type"), str):
        raise ValueError(
            f'A position encoding must be a name or a dict {{"type": name, **options}}, not {short_repr(encoding)}. '
            f"Names: {quoted(list_encodings())}."
        )
    cls = encoding_class(encoding["type"])
    parts = cls.component_classes()
    repeated = [name for name, part in parts.items() if [*parts.values()].count(part) > 1]
    if not {*repeated} <= {*layered}:
        raise ValueError(
            f"{short_repr(encoding['type'])} has the same encoding twice. Give the parts of a composition different types, or "
            f"separate layers ({'=…, '.join(f'{name}__layers' for name in repeated[:4])}=…)."
        )
    for (name, part), (other, beside) in itertools.permutations(parts.items(), 2):
        if (why := part.conflict(beside)) and not {name, other} <= {*layered}:
            raise ValueError(
                f"{name!r} and {other!r} can't be combined in one layer: {why}. Use only one of them, or give each separate "
                f"layers ({name}__layers=…, {other}__layers=…)."
            )
    checked = cls.by_part(cls.checked_options(overridden(cls, cls.preset(encoding["type"]), options_of(encoding))))
    for name, part in parts.items():
        _check_files(part, checked[name], in_code)
    return {"type": cls.type, **checked.get(cls.type, checked)}


def _check_files(cls: type[PositionEncoding], options: dict[str, Any], in_code: bool) -> None:
    """Converts strings that name files to paths in code. Elsewhere, raises ValueError."""
    for name in cls.file_options() & options.keys():
        value = options[name]
        if value == getattr(cls, name) or not has_strings(value):
            continue
        if not in_code:
            raise ValueError(
                f"{cls.type}.{name}={short_repr(value)} names a file, and nothing was opened. A config can't name files, "
                f'because a checkpoint has the values in its weights. Set "{name}" to null in config.json, or pass the path in '
                "code, to hf_posenc.patch or from_pretrained, or as a pathlib.Path."
            )
        options[name] = as_paths(value)


def overridden(cls: type[PositionEncoding], options: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Options of an encoding, overridden by the given ones, in any spelling of their names."""
    before, after = cls.by_part(options), cls.by_part(given)
    parts = {name: {**before[name], **after[name]} for name in before}
    return parts.get(cls.type, parts)


def options_of(encoding: dict[str, Any]) -> dict[str, Any]:
    """A canonical dict without its type."""
    return {key: value for key, value in encoding.items() if key != "type"}


def portable(encoding: Any) -> Any:
    """`position_encoding`, or options of an encoding, for a file. Local paths become None."""
    if isinstance(encoding, dict):
        return {name: portable(value) for name, value in encoding.items()}
    return None if has_paths(encoding) else encoding
