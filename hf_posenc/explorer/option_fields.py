"""Conversion between an encoding's options and the fields of a form."""

from dataclasses import dataclass
from typing import Any, get_args

from hf_posenc.encodings import canonical, described, encoding_class, parse_value
from hf_posenc.encodings.catalog import named_values
from hf_posenc.encodings.options import names_files

Encoding = dict[str, Any]
"""`{"type": name, option: value}`. Options of a composition's parts are named `part__option`."""


@dataclass(frozen=True)
class Field:
    """The form field of an option.

    option: name of the option, `part__option` for a part of a composition.
    default: None if there is none.
    allowed: description of the allowed values.
    values: all allowed values. Empty if they can't be listed.
    """

    option: str
    default: Any
    allowed: str
    values: tuple[Any, ...]


def fields(name: str) -> list[Field]:
    """The fields of all options of an encoding, an alias, or a composition "a+b", except options that name local files.

    Raises ValueError for an unknown name.
    """
    given = canonical(name)
    kind = encoding_class(given["type"])
    if "+" not in kind.type:
        return _fields(kind, given, "")
    return [field for part in kind.type.split("+") for field in _fields(encoding_class(part), given[part], f"{part}__")]


def _fields(kind: Any, defaults: Encoding, prefix: str) -> list[Field]:
    return [
        Field(prefix + option, defaults.get(option, getattr(kind, option, None)), described(annotation), _all_of(annotation))
        for option, annotation in kind.option_types().items()
        if not names_files(annotation)
    ]


def _all_of(annotation: Any) -> tuple[Any, ...]:
    named = tuple(named_values(annotation))
    others = {float, int, str, tuple} & {getattr(each, "__origin__", each) for each in get_args(annotation)}
    return () if others else named


def changed(encoding: Encoding, field: Field, written: Any) -> Encoding:
    """The encoding with the value of a field. An empty field means the default."""
    value = parse_value(written.strip()) if isinstance(written, str) and not field.values else written
    rest = {name: value for name, value in encoding.items() if name != field.option}
    return rest if value in ("", None) or value == field.default else rest | {field.option: value}
