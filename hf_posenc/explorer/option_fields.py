"""An encoding's options as the fields of a form, and the values of the fields as options."""

from dataclasses import dataclass
from typing import Any, get_args

from hf_posenc.encodings import canonical, described, encoding_class, parse_value
from hf_posenc.encodings.catalog import named_values
from hf_posenc.encodings.options import names_files

Encoding = dict[str, Any]
"""`{"type": name, option: value}`; of a part of a composition `part__option`."""


@dataclass(frozen=True)
class Field:
    """
    option: its name; of a part of a composition `part__option`.
    default: None if there is none.
    allowed: in words.
    values: all that are allowed, empty if they can't be listed.
    """

    option: str
    default: Any
    allowed: str
    values: tuple[Any, ...]


def fields(name: str) -> list[Field]:
    """All options of an encoding, an alias or a composition "a+b", except those that name local files.

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
    """The encoding with the value of a field. An empty field is the default."""
    value = parse_value(written.strip()) if isinstance(written, str) and not field.values else written
    rest = {name: value for name, value in encoding.items() if name != field.option}
    return rest if value in ("", None) or value == field.default else rest | {field.option: value}
