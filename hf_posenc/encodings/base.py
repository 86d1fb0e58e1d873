"""What a position is worth: the base class of all encodings, their options and their registry.

Shapes: B batch, L tokens, Q queries, K keys, H heads, D hidden_size, E head_dim, N any number of distances.
"""

import contextlib
import inspect
import math
import re
import reprlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

MAX_INTEGER = 2**24
"""The largest integer that an option, a length or a width may be: sixteen million positions."""
MAX_VALUES = 2**30
"""How many values the parameters and buffers of all modules of an encoding in one stack may have together, and a table of
the host's that is kept or made for positions: 4 GiB in float32."""
MAX_ENTRIES, MAX_DEPTH = 2**16, 8
"""How many characters and values `position_encoding` may have in all, and how deep it may be nested."""


@dataclass(frozen=True)
class Above:
    """The open lower bound of a numeric option: `base: Annotated[float, Above(1)] = 10000.0`."""

    bound: float


@dataclass(frozen=True)
class Geometry:
    """The sizes which an encoding is built for. Beside no attention the heads are 0; max_length None is no limit."""

    hidden_size: int
    num_attention_heads: int = 0
    head_dim: int = 0
    max_length: int | None = None
    is_causal: bool = False


@dataclass
class PositionContext:
    """The positions of one forward pass, handed from the stack to each of its attentions.

    positions: `[1 or B, L]`, the positions of the new tokens (the queries, and the keys that enter the cache).
    past: how many keys were cached before them; an int, or a 0-dim tensor for static caches.
    start: `[1 or B, 1]`, the index of the key at position 0; cached keys are taken to rise by one from there.
    consecutive: True when the new positions rise by one too, so that distances follow from indices alone.
    scaling: the factor on QKᵀ in the attention that asks.
    """

    encoding: "PositionEncoding"
    positions: Tensor
    past: int | Tensor
    start: Tensor
    consecutive: bool
    computed: dict[Any, Any] = field(default_factory=dict)
    scaling: float = 1.0

    def scaled(self, scaling: float) -> "PositionContext":
        """The same forward pass as an attention with this scaling sees it."""
        return replace(self, scaling=scaling)

    def cached(self, key: Any, compute: Callable[[], Any]) -> Any:
        """`compute()`, evaluated once in this forward pass. Only for what needs no gradient."""
        if key not in self.computed:
            self.computed[key] = compute()
        return self.computed[key]

    def key_positions(self, length: int) -> Tensor:
        """`[1 or B, K]`; negative for keys before position 0, which are padding."""
        keys = torch.arange(length, device=self.positions.device) - self.start
        if self.consecutive:
            return keys
        new = torch.arange(self.positions.shape[1], device=keys.device) + self.past
        return keys.expand(self.positions.shape[0], -1).index_copy(1, new, self.positions.to(keys.dtype))

    def distances(self, keys: int) -> Tensor:
        """`[1 or B, Q, K]`: key position - query position."""
        return self.key_positions(keys)[:, None, :] - self.positions[:, :, None]


def positions_of(length: int, past: int | Tensor, attention_mask: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """The positions `[1 or B, L]` of new tokens without explicit ids, and the index `[1 or B, 1]` of position 0.

    Position 0 is the first token that a 2-D attention mask `[B, K]` shows, and the last shown one has the last position,
    so that padding on either side changes nothing. No mask, or a 4-D one, means positions from the start.
    """
    index = (torch.arange(length, device=device) + past)[None]
    if attention_mask is None or attention_mask.ndim == 4:
        return index, index.new_zeros(1, 1)
    shown = (attention_mask.reshape(-1, attention_mask.shape[-1]) != 0).int()
    first = shown.argmax(dim=-1, keepdim=True)
    last = shown.shape[-1] - 1 - shown.flip(-1).argmax(dim=-1, keepdim=True)
    return torch.minimum(index.clamp(min=first), last) - first, first


class PositionEncoding(nn.Module):
    """Base class of all position encodings. A subclass registers itself under `type` (and `aliases`) by existing:

        class Window(hf_posenc.PositionEncoding, type="window"):
            \"\"\"Nothing further than `width` tokens away is seen.\"\"\"
            width: Annotated[int, Above(0)] = 128

            def distance_bias(self, distance):
                return torch.where(distance.abs() > self.width, -torch.inf, 0.0)[None]

    Options are class annotations with defaults; they arrive as attributes of the same name, checked. Sizes are in
    `self.geometry`. Parameters are made in `__init__` (after `super().__init__`) and filled in `reset_parameters`,
    with functions of `torch.nn.init` or with `fill_`, so that loaded weights are left alone; `__init__` runs on the meta
    device first, to see how much memory it asks for. A subclass overrides one or more of the verbs `embed`, `rotate`,
    `distance_bias`, `score_bias`; each does nothing here.

    With `per_layer = True` each attention gets an instance, and parameters, of its own; else all share the stack's.
    Aliases may carry options: `aliases={"near": {"width": 8}}`.
    """

    type: ClassVar[str] = ""  # type: ignore[assignment]  # shadows Module.type(dtype), which only a whole model is asked for
    aliases: ClassVar[dict[str, dict[str, Any]]] = {}
    per_layer: ClassVar[bool] = False
    geometry: Geometry
    blend: float
    """How far the encoding is in force: 1.0, except while a model is being converted (see `PositionPort`)."""

    def __init_subclass__(
        cls, type: str | None = None, aliases: tuple[str, ...] | dict[str, dict[str, Any]] = (), **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if type is None:
            return
        own = (cls.__module__, cls.__qualname__)
        for name in (type, *aliases):
            if not re.fullmatch(r"[A-Za-z0-9]+([_-][A-Za-z0-9]+)*", name) or name in RESERVED:
                raise ValueError(
                    f"{name!r} can't be the name of an encoding: allowed are letters, digits and single _ or - between them, "
                    f"but not {_listed(sorted(RESERVED))}"
                )
            taken = _REGISTRY.get(name)
            if taken and (taken.__module__, taken.__qualname__) != own:
                raise ValueError(
                    f"the encoding name {name!r} is taken by {taken.__module__}.{taken.__qualname__}: "
                    f"give {cls.__qualname__} another `type`"
                )
        cls.type = type
        cls.aliases = aliases if isinstance(aliases, dict) else {name: {} for name in aliases}
        if reserved := RESERVED & set(cls.option_types()):
            raise ValueError(f"{cls.__qualname__} can't name an option {_listed(sorted(reserved))}: those are hf_posenc's own")
        # A notebook cell that is run again replaces its class, under all names it had.
        for name in [name for name, taken in _REGISTRY.items() if (taken.__module__, taken.__qualname__) == own]:
            del _REGISTRY[name]
        _REGISTRY.update(dict.fromkeys((type, *aliases), cls))

    def __init__(self, geometry: Geometry, **options: Any) -> None:
        super().__init__()
        self.geometry = geometry
        self.blend = 1.0
        for name, value in self.checked_options(options).items():
            setattr(self, name, value)

    # The verbs.

    def embed(self, positions: Tensor) -> Tensor | None:
        """Vectors to add to token embeddings: `[..., L]` integers -> `[..., L, D]`."""
        return None

    def rotate(self, query: Tensor | None, key: Tensor | None, context: PositionContext) -> tuple[Tensor | None, Tensor | None]:
        """Queries and *new* keys, `[B, H, L, E]`, turned by their positions before keys enter the cache.

        Where a host stores its keys before its queries are at hand, the two come in separate calls: either may be None.
        """
        return query, key

    def distance_bias(self, distance: Tensor) -> Tensor | None:
        """What to add to scaled scores: 1-D distances (key position - query position) `[N]` -> `[H or 1, N]`."""
        return None

    def score_bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor | None:
        """What to add to scaled scores where content or absolute position matter: broadcastable to `[B, H, Q, K]`."""
        return None

    def reset_parameters(self) -> None:
        """Fill all parameters and buffers of this module anew."""

    def adopt(self, table: Tensor) -> None:
        """Take what is wanted of the host's own position table, `[rows, D]`, after `reset_parameters`."""

    @classmethod
    def for_stack(cls, geometry: Geometry, **options: Any) -> "PositionEncoding":
        """What the stack owns of this encoding, and all its attentions share; it may do nothing."""
        return PositionEncoding(geometry) if cls.per_layer else cls(geometry, **options)

    @classmethod
    def for_attention(cls, geometry: Geometry, **options: Any) -> "PositionEncoding | None":
        """What each attention owns of this encoding, if anything."""
        return cls(geometry, **options) if cls.per_layer else None

    @classmethod
    def needs_max_length(cls, geometry: Geometry) -> bool:
        """True where positions beyond a longest length have no meaning (a table, say)."""
        return False

    @classmethod
    def acts_by(cls) -> tuple[str, ...]:
        """Which verbs this class has of its own, a subset of embed, rotate, distance_bias, score_bias."""
        verbs = ("embed", "rotate", "distance_bias", "score_bias")
        return tuple(verb for verb in verbs if getattr(cls, verb) is not getattr(PositionEncoding, verb))

    # Options.

    @classmethod
    def preset(cls, name: str) -> dict[str, Any]:
        """The options that a name stands for: those of an alias, or none."""
        return cls.aliases.get(name, {})

    @classmethod
    def component_classes(cls) -> list[Any]:
        """The classes this encoding is made of: itself, or the parts of a composition."""
        return [cls]

    @classmethod
    def option_types(cls) -> dict[str, Any]:
        """Option name -> annotation, base classes first."""
        names: dict[str, None] = {}
        for base in reversed(cls.__mro__):
            if issubclass(base, PositionEncoding) and base is not PositionEncoding:
                names.update(dict.fromkeys(inspect.get_annotations(base)))
        hints = get_type_hints(cls, include_extras=True)
        return {name: hints[name] for name in names if ClassVar not in (hints[name], get_origin(hints[name]))}

    @classmethod
    def checked_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """All options with their defaults. Raises ValueError for an unknown name, a wrong type or range."""
        allowed = cls.option_types()
        if unknown := sorted(set(options) - set(allowed)):
            raise ValueError(
                f"{cls.type!r} has no option {', '.join(map(shown, unknown[:4]))}; it takes {_listed(allowed) or 'no options'}"
            )
        missing = [name for name in allowed if name not in options and not hasattr(cls, name)]
        if missing:
            raise ValueError(f"{cls.type!r} needs the option {_listed(missing)}")
        values = {name: options.get(name, getattr(cls, name, None)) for name in allowed}
        return {name: checked_value(f"{cls.type}.{name}", values[name], allowed[name]) for name in allowed}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.option_types())


_REGISTRY: dict[str, type[PositionEncoding]] = {}
compose: list[Callable[[str], type[PositionEncoding]]] = []
"""Makes the class of a composition `"a+b"`; given by composition.py, which builds on this module."""
RESERVED = {"type", "aliases", "geometry", "blend", "max_length", "host", "inject", "where", "keep_host", "submodel"}


def list_encodings() -> dict[str, type[PositionEncoding]]:
    """Every registered encoding, canonical name -> class, in alphabetical order."""
    return {name: cls for name, cls in sorted(_REGISTRY.items()) if name == cls.type}


def canonical(encoding: Any) -> dict[str, Any]:
    """The canonical dict, all options written out, of an encoding given by name or as `{"type": name, **options}`.

    Raises ValueError for anything else, for unknown names, and for options which the encoding doesn't take.
    """
    refuse_oversized(encoding)
    if isinstance(encoding, str):
        encoding = {"type": encoding}
    if not isinstance(encoding, dict) or not isinstance(encoding.get("type"), str):
        raise ValueError(
            f'a position encoding is a name or a dict {{"type": name, **options}}, not {shown(encoding)}; '
            f"names: {_listed(list_encodings())}"
        )
    cls = encoding_class(encoding["type"])
    return {"type": cls.type, **cls.checked_options({**cls.preset(encoding["type"]), **options_of(encoding)})}


def encoding_class(name: Any) -> type[PositionEncoding]:
    """The class registered under a name or alias, or of a composition `"a+b"`. Raises ValueError with the names there are."""
    if isinstance(name, str) and "+" in name and compose:
        return compose[0](name)
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ValueError(
            f"unknown position encoding {shown(name)}; registered: {_listed(list_encodings())}. "
            "If it is one of your own, import the module that defines its class first; if its code came with a checkpoint, "
            "load that with trust_remote_code=True where hf_posenc isn't imported"
        )
    return _REGISTRY[name]


def build(encoding: dict[str, Any], geometry: Geometry) -> PositionEncoding:
    """The module for a canonical dict, all in one. Raises ValueError for one beyond MAX_VALUES."""
    (module,) = build_within_limits(
        encoding["type"], lambda: [encoding_class(encoding["type"])(geometry, **options_of(encoding))]
    )
    return module


def build_within_limits(kind: str, make: Callable[[], list[Any]]) -> list[Any]:
    """The modules that `make` makes, once they are known to have no more than MAX_VALUES values together.

    They are made on the meta device first, where a tensor has a shape and takes no memory.
    """
    with torch.device("meta"):
        trial = nn.ModuleList(make())
    tensors = [*trial.parameters(), *trial.buffers()]
    largest = max((tensor.shape for tensor in tensors), key=math.prod, default=())
    checked_values(f"the {kind!r} encoding, with tables of up to {tuple(largest)},", sum(t.numel() for t in tensors))
    return make()


def checked_values(what: str, values: int) -> int:
    """The number of values, or a ValueError where `what` asks for more than MAX_VALUES."""
    if values > MAX_VALUES:
        raise ValueError(
            f"{what} would take {values} values of memory, and at most {MAX_VALUES} are allowed: choose smaller options or a "
            "shorter max_length; of a checkpoint from elsewhere, see who made it"
        )
    return values


def options_of(encoding: dict[str, Any]) -> dict[str, Any]:
    """A canonical dict without its type."""
    return {key: value for key, value in encoding.items() if key != "type"}


def fill_(tensor: Tensor, values: Tensor) -> None:
    """Copy values into a parameter or buffer, unless Transformers has marked it as loaded from a checkpoint."""
    if not getattr(tensor, "_is_hf_initialized", False):
        with torch.no_grad():
            tensor.copy_(values)


def refuse_oversized(given: Any) -> None:
    """Raises ValueError for a `position_encoding` beyond MAX_ENTRIES or MAX_DEPTH, with keys that aren't strings, or with
    text that isn't Unicode. What holds itself is too deep, too."""
    level, entries = [given], 0
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                if odd := [key for key in value if not isinstance(key, str)]:
                    raise ValueError(f"{shown(odd[0])} can't be a key in position_encoding: allowed are strings")
                below += [*value, *value.values()]
            elif isinstance(value, (list, tuple)):
                below += value
            entries += 1
            if isinstance(value, str):
                entries += len(value)
                if re.search("[\ud800-\udfff]", value):
                    raise ValueError(f"{shown(value)} in position_encoding is no text: it has half of a surrogate pair")
            if entries + len(below) > MAX_ENTRIES:
                raise ValueError(f"position_encoding has more than {MAX_ENTRIES} values and characters: nothing needs so many")
        level = below
    if level:
        raise ValueError(f"position_encoding is nested deeper than {MAX_DEPTH} levels: nothing needs so many")


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxdict = self.maxlist = self.maxtuple = 12
        self.maxstring = self.maxother = 100

    def repr_int(self, number: int, level: int) -> str:
        # Python itself refuses to write out very long ones.
        return repr(number) if number.bit_length() < 2000 else f"an integer of {number.bit_length()} bits"


def shown(value: Any) -> str:
    """`repr(value)` for an error, cut where it is long: values may come from a checkpoint of anybody's."""
    text = _Short().repr(value)
    return text if len(text) <= 600 else f"{text[:600]}…"


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))


def checked_max_length(max_length: Any) -> int | None:
    """The value, or a ValueError which says what is allowed."""
    if max_length is None or (type(max_length) is int and 0 < max_length <= MAX_INTEGER):
        return max_length
    raise ValueError(f"max_length={shown(max_length)}: allowed is None (no limit) or an integer above 0, up to {MAX_INTEGER}")


def merged(saved: Any, given: Any) -> Any:
    """`position_encoding` as saved, with what was given on loading. Raises ValueError for another type than was saved."""
    given = {"type": given} if isinstance(given, str) else given
    if not isinstance(given, dict) or not isinstance(saved, dict):
        return saved if given is None else given
    there, wanted = encoding_class(saved.get("type")).type, encoding_class(given.get("type")).type
    if there != wanted:
        raise ValueError(
            f"this checkpoint was saved with the {there!r} encoding, not {wanted!r}: load it as it is, "
            f"then model = hf_posenc.patch(hf_posenc.unpatch(model), {wanted!r})"
        )
    both = [key for key in given if isinstance(given[key], dict) and isinstance(saved.get(key), dict)]
    parts = {key: {**saved[key], **given[key]} for key in both}
    return {**saved, **given, **parts}


def checked_value(name: str, value: Any, annotation: Any) -> Any:
    """The value, in the annotated type (ints become floats, lists tuples). Raises ValueError with what is allowed."""
    for candidate in _readings(value):
        if _fits(candidate, annotation):
            return candidate
    within = max(-MAX_INTEGER, min(value, MAX_INTEGER)) if type(value) is int else value
    limit = f", up to {MAX_INTEGER} in size" if within is not value and _fits(within, annotation) else ""
    raise ValueError(f"{name}={shown(value)}: allowed is {described(annotation)}{limit}")


def _readings(value: Any) -> Iterator[Any]:
    """The value, and what JSON or a hasty hand may have meant by it."""
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
        bounds = [extra.bound for extra in args[1:] if isinstance(extra, Above)]
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
    # bool is a subclass of int, but True is no length.
    return type(value) is annotation and (annotation is not int or abs(value) <= MAX_INTEGER)


def described(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [f" above {extra.bound:g}" for extra in args[1:] if isinstance(extra, Above)]
        return described(args[0]) + "".join(bounds)
    if origin in (Union, types.UnionType):
        return " or ".join(described(arg) for arg in args)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple:
        return f"a tuple of {', '.join(described(arg) for arg in args if arg is not Ellipsis)}"
    plain = {float: "a finite number", int: "an integer", bool: "True or False", str: "a string", type(None): "None"}
    return plain.get(annotation, str(annotation))
