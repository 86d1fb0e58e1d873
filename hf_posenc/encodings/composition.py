"""Several encodings in one model, "sinusoidal+alibi": each acts by its own verbs, and what they add is summed."""

import weakref
from typing import Any, ClassVar

from torch import Tensor, nn

from hf_posenc.encodings.base import Geometry, PositionContext, PositionEncoding, compose, encoding_class, shown


class Composition(PositionEncoding):
    """Vectors and biases of all parts are summed; rotations follow one another in the order of the name.

    A part is a child under its canonical name, so its weights are `posenc.<part>.*`. Its options are the dict under that
    name, or keywords `<part>__<option>`.
    """

    parts: ClassVar[dict[str, type[PositionEncoding]]] = {}

    def __init__(self, geometry: Geometry, **options: Any) -> None:
        nn.Module.__init__(self)
        self.geometry, self.blend = geometry, 1.0
        for name, own in self.checked_options(options).items():
            self.add_module(name, self.parts[name](geometry, **own))

    def members(self) -> list[Any]:
        """The parts that are here: all of them, or those which a stack or an attention owns."""
        return [child for child in self.children() if isinstance(child, PositionEncoding)]

    @property
    def blend(self) -> float:  # type: ignore[override]
        return self._blend

    @blend.setter
    def blend(self, value: float) -> None:
        self._blend = value
        for part in self.members():
            part.blend = value

    def embed(self, positions: Tensor) -> Tensor | None:
        return _sum(part.embed(positions) for part in self.members())

    def rotate(self, query: Tensor | None, key: Tensor | None, context: PositionContext) -> tuple[Tensor | None, Tensor | None]:
        for part in self.members():
            query, key = part.rotate(query, key, context)
        return query, key

    def distance_bias(self, distance: Tensor) -> Tensor | None:
        return _sum(part.distance_bias(distance) for part in self.members())

    def score_bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor | None:
        return _sum(part.score_bias(query, key, context) for part in self.members())

    def adopt(self, table: Tensor) -> None:
        for part in self.members():
            part.adopt(table)

    @classmethod
    def for_stack(cls, geometry: Geometry, **options: Any) -> PositionEncoding:
        return cls._of_parts(geometry, options, per_layer=False)

    @classmethod
    def for_attention(cls, geometry: Geometry, **options: Any) -> PositionEncoding | None:
        return cls._of_parts(geometry, options, per_layer=True) if any(part.per_layer for part in cls.parts.values()) else None

    @classmethod
    def _of_parts(cls, geometry: Geometry, options: dict[str, Any], per_layer: bool) -> PositionEncoding:
        whole = cls(geometry, **options)
        for name, part in cls.parts.items():
            if part.per_layer != per_layer:
                delattr(whole, name)
        return whole

    @classmethod
    def needs_max_length(cls, geometry: Geometry) -> bool:
        return any(part.needs_max_length(geometry) for part in cls.parts.values())

    @classmethod
    def acts_by(cls) -> tuple[str, ...]:
        theirs = {verb for part in cls.parts.values() for verb in part.acts_by()}
        return tuple(verb for verb in super().acts_by() if verb in theirs)

    @classmethod
    def preset(cls, name: str) -> dict[str, Any]:
        return {part: kind.preset(called) for (part, kind), called in zip(cls.parts.items(), name.split("+"), strict=True)}

    @classmethod
    def component_classes(cls) -> list[Any]:
        return [Composition, *(kind for part in cls.parts.values() for kind in part.component_classes())]

    @classmethod
    def option_types(cls) -> dict[str, Any]:
        return dict.fromkeys(cls.parts, dict)

    @classmethod
    def checked_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Part -> its checked options. Raises ValueError for what belongs to no part."""
        given: dict[str, dict[str, Any]] = {name: {} for name in cls.parts}
        for key, value in options.items():
            called, _, option = key.partition("__")
            part = next((name for name, kind in cls.parts.items() if called in (name, *kind.aliases)), None)
            if part is None:
                raise ValueError(
                    f"{cls.type!r} has no part {shown(called)}; options are named by part: "
                    f"{' or '.join(f'{name}__option=…' for name in cls.parts)}"
                )
            if option:
                given[part][option] = value
            elif isinstance(value, dict):
                given[part] = {**value, **given[part]}
            else:
                raise ValueError(f"{cls.type}[{called!r}]={shown(value)}: allowed is a dict of that part's options")
        return {name: kind.checked_options(given[name]) for name, kind in cls.parts.items()}

    def extra_repr(self) -> str:
        return ""


_MADE: weakref.WeakValueDictionary[str, type[PositionEncoding]] = weakref.WeakValueDictionary()
"""By canonical name, as long as there is a module of the class: of a refused config nothing stays."""


def composed(name: str) -> type[PositionEncoding]:
    """The class of a composition, by the names or aliases of its parts joined with "+"; picklable by name.

    Raises ValueError for an unknown part, or one that is given twice.
    """
    parts = {kind.type: kind for kind in map(encoding_class, name.split("+"))}
    if len(parts) != name.count("+") + 1:
        raise ValueError(f"{shown(name)} has the same encoding twice: each part of a composition has a type of its own")
    canonical = "+".join(parts)
    known: Any = _MADE.get(canonical)
    # A notebook cell that is run again replaces its class, and so the compositions with it.
    if known is None or list(known.parts.values()) != list(parts.values()):
        body = {"__module__": __name__, "__doc__": Composition.__doc__, "type": canonical, "parts": parts}
        known = _MADE[canonical] = type(canonical, (Composition,), body)
    return known


compose[:] = [composed]


def __getattr__(name: str) -> Any:
    if "+" in name:
        return composed(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _sum(terms: Any) -> Tensor | None:
    total = None
    for term in terms:
        if term is not None:
            total = term if total is None else total + term
    return total
