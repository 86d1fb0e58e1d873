"""Several encodings in one model, such as "sinusoidal+alibi"."""

import itertools
import weakref
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import PositionContext
from hf_posenc.encodings.options import did_you_mean, short_repr

if TYPE_CHECKING:
    from hf_posenc.encodings.table_interpolation import Extension


class Composition(PositionEncoding):
    """The sum of the vectors and biases of all parts. Rotations are applied in the order of the name.

    Each part is a child module under its canonical name, so its weights are `posenc.<part>.*`. Its options are the dict under
    that name, or the keywords `<part>__<option>`.
    """

    parts: ClassVar[dict[str, type[PositionEncoding]]] = {}

    def __init__(self, geometry: Geometry, **options: Any) -> None:
        nn.Module.__init__(self)
        self.geometry = geometry
        self._options = checked = self.checked_options(options)
        for name, own in checked.items():
            self.add_module(name, self.parts[name].built(geometry, **own))

    def rebuilt(self) -> None:
        return None

    @classmethod
    def component_classes(cls) -> dict[str, Any]:
        return dict(cls.parts)

    def named_parts(self) -> dict[str, PositionEncoding]:
        children: Any = self.named_children()
        return {name: child for name, child in children if name in self.parts}  # FSDP may have wrapped them

    def embed(self, positions: Tensor) -> Tensor | None:
        return _sum(part("embed", positions) for part in self.named_parts().values())

    def rotate(self, query: Tensor | None, key: Tensor | None, context: PositionContext) -> tuple[Tensor | None, Tensor | None]:
        for part in self.named_parts().values():
            query, key = part("rotate", query, key, context)
        return query, key

    def distance_bias(self, distance: Tensor) -> Tensor | None:
        return _sum(part("distance_bias", distance) for part in self.named_parts().values())

    def score_bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor | None:
        return _sum(part("score_bias", query, key, context) for part in self.named_parts().values())

    def value_bias(self, weights: Tensor, context: PositionContext) -> Tensor | None:
        return _sum(part("value_bias", weights, context) for part in self.named_parts().values())

    def init_from_original_table(self, table: Tensor | None) -> None:
        for part in self.named_parts().values():
            part.init_from_original_table(table)

    @classmethod
    def for_stack(cls, geometry: Geometry, **options: Any) -> PositionEncoding:
        return cls._of_parts(geometry, options, {*cls.parts} - cls.per_layer_parts(options))

    @classmethod
    def for_attention(cls, geometry: Geometry, parts: Collection[str], **options: Any) -> PositionEncoding | None:
        own = cls.per_layer_parts(options) & {*parts}
        return cls._of_parts(geometry, options, own) if own else None

    @classmethod
    def per_layer_parts(cls, options: dict[str, Any]) -> set[str]:
        return {name for name, part in cls.parts.items() if part.per_layer_parts(options.get(name, {}))}

    @classmethod
    def _of_parts(cls, geometry: Geometry, options: dict[str, Any], kept: Collection[str]) -> PositionEncoding:
        whole = cls(geometry, **options)
        for name in cls.parts.keys() - kept:
            delattr(whole, name)
        return whole

    @classmethod
    def needs_max_length(cls, geometry: Geometry) -> bool:
        return any(part.needs_max_length(geometry) for part in cls.parts.values())

    @classmethod
    def with_explicit_defaults(cls, geometry: Geometry, options: dict[str, Any]) -> dict[str, Any]:
        return {name: part.with_explicit_defaults(geometry, options[name]) for name, part in cls.parts.items()}

    @classmethod
    def extended(cls, options: dict[str, Any], asked: "Extension", geometry: Geometry) -> dict[str, Any] | None:
        longer = {name: part.extended(options[name], asked, geometry) for name, part in cls.parts.items()}
        if all(found is None for found in longer.values()):
            return None
        return {name: options[name] if found is None else found for name, found in longer.items()}

    @classmethod
    def rotation_depends_on_length(cls, options: dict[str, Any]) -> bool:
        return any(part.rotation_depends_on_length(options.get(name, {})) for name, part in cls.parts.items())

    @classmethod
    def mechanisms(cls, options: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        given = dict.fromkeys(cls.parts) if options is None else options
        theirs = {verb for name, part in cls.parts.items() for verb in part.mechanisms(given[name])}
        return tuple(verb for verb in super().mechanisms() if verb in theirs)

    @classmethod
    def preset(cls, name: str) -> dict[str, Any]:
        return {part: kind.preset(called) for (part, kind), called in zip(cls.parts.items(), name.split("+"), strict=True)}

    @classmethod
    def option_types(cls) -> dict[str, Any]:
        return dict.fromkeys(cls.parts, dict)

    @classmethod
    def by_part(cls, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
        given: dict[str, dict[str, Any]] = {name: {} for name in cls.parts}
        for key, value in options.items():
            called, _, option = key.partition("__")
            part = next((name for name, kind in cls.parts.items() if called in (name, *kind.aliases)), None)
            if part is None:
                names = (name for part, kind in cls.parts.items() for name in (part, *kind.aliases))
                raise ValueError(
                    f"{cls.type!r} has no part {short_repr(called)}{did_you_mean(called, names)}. Name options by part: "
                    f"{' or '.join(f'{name}__option=…' for name in cls.parts)}."
                )
            if option:
                given[part][option] = value
            elif isinstance(value, dict):
                given[part] = {**value, **given[part]}
            else:
                raise ValueError(f"{cls.type}[{called!r}]={short_repr(value)} isn't valid. It must be a dict of options.")
        return given

    @classmethod
    def checked_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """The checked options of each part, by name."""
        return {name: cls.parts[name].checked_options(given) for name, given in cls.by_part(options).items()}

    def extra_repr(self) -> str:
        return ""


_CLASSES: weakref.WeakValueDictionary[str, type[PositionEncoding]] = weakref.WeakValueDictionary()
"""Classes by canonical name. References are weak, so that classes of rejected configs are garbage-collected."""


def composed(classes: list[type[PositionEncoding]], module: str) -> type[PositionEncoding]:
    """The class that composes these encodings, in this order. A second "rope" is the part "rope_2".

    The class is pickled by its name "a+b", which the `__getattr__` of the given module resolves.
    """
    whole = "+".join(cls.type for cls in classes)
    known: Any = _CLASSES.get(whole)
    # Running a notebook cell again replaces its class, and therefore its compositions.
    if known is None or list(known.parts.values()) != classes:
        parts: dict[str, type[PositionEncoding]] = {}
        for cls in classes:
            names = itertools.chain([cls.type], (f"{cls.type}_{number}" for number in itertools.count(2)))
            parts[next(name for name in names if name not in parts)] = cls
        body = {"__module__": module, "__doc__": Composition.__doc__, "type": whole, "parts": parts}
        known = _CLASSES[whole] = type(whole, (Composition,), body)
    return known


def _sum(terms: Any) -> Tensor | None:
    total = None
    for term in terms:
        if term is not None:
            total = term if total is None else total + term
    return total
