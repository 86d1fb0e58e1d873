"""Checks of option values against their annotations, and limits on the size of configs."""

import contextlib
import difflib
import json
import math
import os
import reprlib
import types
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

MAX_INTEGER = 2**24
"""Maximum absolute value of an integer option, a length, or a width: 16 million positions."""
MAX_VALUES = 2**30
"""Maximum elements of an encoding per encoder or decoder, and of the original position embeddings: 4 GiB in float32."""


_ALLOWED: ContextVar[float] = ContextVar("_ALLOWED", default=math.inf)


@dataclass(frozen=True)
class GreaterThan:
    """The open lower bound of a numeric option: `base: Annotated[float, GreaterThan(1)] = 10000.0`."""

    bound: float


def names_files(annotation: Any) -> bool:
    """Whether options of this type name local files: the type is, or contains, `pathlib.Path`."""
    origin = get_origin(annotation) or annotation
    return (isinstance(origin, type) and issubclass(origin, os.PathLike)) or any(map(names_files, get_args(annotation)))


def has_paths(value: Any) -> bool:
    """Whether an option's value is a path object, or a list with one."""
    return any(map(has_paths, value)) if isinstance(value, (list, tuple)) else isinstance(value, os.PathLike)


def has_strings(value: Any) -> bool:
    """Whether an option's value is a string, or a list with one."""
    return any(map(has_strings, value)) if isinstance(value, (list, tuple)) else isinstance(value, str)


def as_paths(value: Any) -> Any:
    """An option's value with its strings as paths."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(as_paths, value))
    return Path(value) if isinstance(value, str) else value


def checked_value(name: str, value: Any, annotation: Any) -> Any:
    """The value in the annotated type (ints become floats, lists tuples). Raises ValueError if it isn't allowed."""
    for candidate in _readings(value):
        if _fits(candidate, annotation):
            return candidate
    within = max(-MAX_INTEGER, min(value, MAX_INTEGER)) if type(value) is int else value
    limit = f", up to {MAX_INTEGER} in absolute value" if within is not value and _fits(within, annotation) else ""
    raise ValueError(f"{name}={short_repr(value)} isn't valid. It must be {described(annotation)}{limit}.")


def parse_value(text: str) -> Any:
    """The value of a text: parsed JSON, a list of comma-separated numbers, or the text itself."""
    for written in (text, f"[{text.rstrip().removesuffix(',')}]"):
        try:
            value = json.loads(written)
        except json.JSONDecodeError:
            continue
        except RecursionError:
            raise ValueError(f"{short_repr(text)} is nested too deeply. Use fewer levels.") from None
        except ValueError:  # Python reads no more digits
            raise ValueError(f"{short_repr(text)} is an integer with too many digits. Use a smaller number.") from None
        if written == text or ("," in text and all(type(each) in (int, float) for each in value)):
            return value
    return text


def checked_max_length(max_length: Any) -> int | None:
    """A positive integer, or None for no limit. Raises ValueError for anything else."""
    return checked_value("max_length", max_length, Annotated[int, GreaterThan(0)] | None)


def described(annotation: Any) -> str:
    """The values that an annotation allows, in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [f" above {extra.bound:g}" for extra in args[1:] if isinstance(extra, GreaterThan)]
        return described(args[0]) + "".join(bounds)
    if origin in (Union, types.UnionType):
        # Lists last, so that the alternatives don't read as elements of the list.
        return " or ".join(described(arg) for arg in sorted(args, key=lambda arg: get_origin(arg) is tuple))
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple:
        if args[1:] == (Ellipsis,):
            return f"a list in which each value is {described(args[0])}"
        return f"a list of {len(args)} values: {', '.join(map(described, args))}"
    if names_files(annotation):
        return "a path"
    plain = {float: "a finite number", int: "an integer", bool: "True or False", str: "a string", type(None): "None"}
    return plain.get(annotation, str(annotation))


def _readings(value: Any) -> Iterator[Any]:
    """Yields the value and its conversions: an int as a float, a list as a tuple."""
    yield value
    if type(value) is int:
        with contextlib.suppress(OverflowError):
            yield float(value)
    if isinstance(value, (list, tuple)):
        yield tuple(value)
        yield tuple(reading for item in value for reading in list(_readings(item))[-1:])


def _fits(value: Any, annotation: Any) -> bool:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return True
    if origin is Annotated:
        bounds = [extra.bound for extra in args[1:] if isinstance(extra, GreaterThan)]
        return _fits(value, args[0]) and (not isinstance(value, (int, float)) or all(value > bound for bound in bounds))
    if origin in (Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is Literal:
        return any(type(value) is type(arg) and value == arg for arg in args)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = args[:1] * len(value) if args[1:] == (Ellipsis,) else args
        return len(kinds) == len(value) and all(map(_fits, value, kinds))
    if annotation is float:
        return type(value) is float and math.isfinite(value)
    if annotation is None:
        return value is None
    if names_files(annotation):
        return isinstance(value, (str, os.PathLike))
    # Not isinstance: bool is a subclass of int, but True isn't a valid integer.
    return type(value) is annotation and (annotation is not int or abs(value) <= MAX_INTEGER)


@contextlib.contextmanager
def at_most(values: int) -> Iterator[None]:
    """Replaces MAX_VALUES with a smaller limit inside the `with` block, for the current thread."""
    token = _ALLOWED.set(min(values, _ALLOWED.get()))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def check_size(what: str, values: int) -> None:
    """Raises ValueError if `what` has more than MAX_VALUES elements, or more than `at_most` allows."""
    if values > (limit := min(MAX_VALUES, _ALLOWED.get())):
        raise ValueError(
            f"{what} would take {values} values of memory, but at most {limit} are allowed. Choose smaller options or a "
            "smaller max_length. If you downloaded the checkpoint, check who created it."
        )


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxdict = self.maxlist = self.maxtuple = 12
        self.maxstring = self.maxother = 100

    def repr_int(self, number: int, level: int) -> str:
        # repr raises ValueError for integers with more than 4,300 digits.
        return repr(number) if number.bit_length() < 2000 else f"an integer of {number.bit_length()} bits"


def short_repr(value: Any) -> str:
    """`repr(value)` for an error message, shortened because values may come from an untrusted checkpoint."""
    text = _Short().repr(value)
    return text if len(text) <= 600 else f"{text[:600]}…"


def quoted(names: Iterable[str]) -> str:
    """Quoted names, separated by commas."""
    return ", ".join(map(repr, names))


def did_you_mean(name: Any, names: Iterable[str]) -> str:
    """ " (did you mean 'x'?)", for an error about an unknown name. Empty if no name is similar."""
    near = difflib.get_close_matches(name, [each for each in names if each != name], n=1) if isinstance(name, str) else []
    return f" (did you mean {near[0]!r}?)" if near else ""
