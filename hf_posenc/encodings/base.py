"""The base class of all position encodings.

Shapes: B batch, L tokens, Q queries, K keys, H heads, D hidden_size, E head_dim, N any number of distances.
"""

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from hf_posenc._compat import accelerate_hook
from hf_posenc.encodings.context import PositionContext
from hf_posenc.encodings.options import checked_value, did_you_mean, names_files, quoted, short_repr

if TYPE_CHECKING:
    from hf_posenc.encodings.mapped_tables import StoredTensor
    from hf_posenc.encodings.table_interpolation import Extension

RESERVED = {
    "type",
    "aliases",
    "geometry",
    "calibration",
    "cross",
    "max_length",
    "layers",
    "host",
    "original",
    "inject",
    "where",
    "keep_original",
    "submodel",
}
"""Names that neither an encoding nor an option may have."""


MECHANISMS = ("embed", "rotate", "distance_bias", "score_bias", "value_bias")


BESIDE = ("inject", "keep_original", "layers", "max_length", "where")
"""The arguments of `patch` that stand beside an encoding's options."""


@dataclass(frozen=True)
class Geometry:
    """The sizes that an encoding is built for.

    num_attention_heads, head_dim: 0 for an encoding outside of any attention.
    max_length: None for no limit.
    is_causal: True if queries attend to no later keys.
    num_key_value_heads: key and value heads of grouped-query attention; without it, as many as num_attention_heads.
    trained_length: the longest input in tokens that the host's own positions were made for; None where nothing tells it.
    value_head_dim: the size of each head's values where it is another than head_dim, as in latent attention; else 0.
    axes: how many coordinates a token has: 1 in a text, 2 (row, column) in an image, 3 (frame, row, column) in a video.
    """

    hidden_size: int
    num_attention_heads: int = 0
    head_dim: int = 0
    max_length: int | None = None
    is_causal: bool = False
    num_key_value_heads: int = 0
    trained_length: int | None = None
    value_head_dim: int = 0
    axes: int = 1


class PositionEncoding(nn.Module):
    """Base class of all position encodings. Defining a subclass registers it under `type` and `aliases`:

        class Window(hf_posenc.PositionEncoding, type="window"):
            \"\"\"Tokens further than `width` away are masked.\"\"\"
            width: Annotated[int, GreaterThan(0)] = 128

            def distance_bias(self, distance):
                return torch.where(distance.abs() > self.width, -torch.inf, 0.0)[None]

    Options are class annotations with defaults; they are checked and set as attributes of the same name. An option that names
    a file has the type `pathlib.Path`: it is set in code, is never saved, and is never read from a config. Sizes are in
    `self.geometry`. Parameters, buffers and modules are created in `__init__` (after `super().__init__`), with their values or
    filled in `reset_parameters`, which is called if `__init__` leaves memory uninitialised. What isn't saved, such as a
    non-persistent buffer, is made again when a model is loaded, so it must come out the same each time. A subclass
    overrides one or more of the verbs `embed`, `rotate`, `distance_bias`, `score_bias`, `value_bias`; each is a no-op here.

    The verbs are called through the module, `encoding("embed", positions)`, so that hooks see the call: those of Accelerate
    bring offloaded weights, those of FSDP gather shards.

    With `per_layer = True` each attention has an instance, and parameters, of its own; otherwise all attentions share the
    stack's. Of encodings that bias it is an option, whose default the class may set.

    Aliases may set options: `aliases={"near": {"width": 8}}`. `title` and `paper` (URLs) appear in listings and model cards.
    """

    registered: ClassVar[dict[str, Any]] = {}
    """Name or alias -> class, of all encodings."""
    type: ClassVar[str] = ""  # type: ignore[assignment]  # shadows Module.type(dtype), which is called on whole models only
    aliases: ClassVar[dict[str, dict[str, Any]]] = {}
    title: ClassVar[str] = ""
    paper: ClassVar[tuple[str, ...]] = ()
    per_layer: bool = False
    translation_invariant: ClassVar[bool | None] = None
    """Whether scores change nothing when all positions of a text move by one number. None: they do so in what acts by
    `distance_bias` alone."""
    causal_only: ClassVar[bool] = False
    """Whether it is defined for attention to earlier tokens alone, so that other stacks refuse it."""
    reads_content: ClassVar[bool] = True
    """Whether its `score_bias` depends on queries and keys; one of positions alone is the same in all layers that share it."""
    corrects_scores: ClassVar[bool] = False
    """Whether its `score_bias` takes back a part of the product of queries and keys, to which nothing may be done before."""
    rotates_keys: ClassVar[bool] = True
    """Whether its `rotate` changes keys as well as queries."""
    changes_head_dim: ClassVar[bool] = False
    """Whether its `rotate` changes the number of features of queries and keys."""
    axes: ClassVar[int] = 1
    """How many coordinates of a token it takes: 1, or those of `Geometry.axes`, so that other stacks refuse it."""
    geometry: Geometry
    _option_types: ClassVar[dict[str, Any]]
    """What `option_types` returns, read once per class: each attention may have an instance of its own."""
    _options: dict[str, Any] | None = None

    def __init_subclass__(
        cls, type: str | None = None, aliases: tuple[str, ...] | dict[str, dict[str, Any]] = (), **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if type is None:
            return
        own, registered = (cls.__module__, cls.__qualname__), PositionEncoding.registered
        for name in (type, *aliases):
            if not re.fullmatch(r"[A-Za-z0-9]+([_-][A-Za-z0-9]+)*", name) or name in RESERVED:
                raise ValueError(
                    f"{name!r} can't be the name of an encoding: allowed are letters, digits and single _ or - between them, "
                    f"but not {quoted(sorted(RESERVED))}"
                )
            if hasattr(PositionEncoding, name):  # as which a composition would hold it
                raise ValueError(f"{name!r} can't be the name of an encoding: it is an attribute of all encodings")
            taken = registered.get(name)
            # A class of a notebook gives way to the file that it was written to.
            if taken and taken.__module__ != "__main__" and (taken.__module__, taken.__qualname__) != own:
                raise ValueError(
                    f"the encoding name {name!r} is taken by {taken.__module__}.{taken.__qualname__}: "
                    f"give {cls.__qualname__} another `type`"
                )
        cls.type = type
        cls.aliases = aliases if isinstance(aliases, dict) else {name: {} for name in aliases}
        if reserved := RESERVED & set(cls.option_types()):
            raise ValueError(f"{cls.__qualname__} can't name an option {quoted(sorted(reserved))}: those are hf_posenc's own")
        if required := sorted(name for name in cls.file_options() if not hasattr(cls, name)):
            raise ValueError(
                f"{cls.__qualname__}.{required[0]} names a file, and paths aren't saved with a model. Give the option a "
                f"default, such as `{required[0]}: Path | None = None`"
            )
        if "forward" in vars(cls):
            raise ValueError(f"{cls.__qualname__} can't define forward, by which hf_posenc calls its verbs: name it otherwise")
        if "distance_vectors" in vars(cls) and "score_bias" not in cls.mechanisms():
            raise ValueError(
                f"{cls.__qualname__} defines distance_vectors without score_bias, the verb by which it acts: define that too"
            )
        if not callable(getattr(cls, "conflict", None)):
            raise ValueError(
                f"{cls.__qualname__}.conflict is a {cls.conflict.__class__.__name__}: give a classmethod that takes another "
                "class and returns why both can't act in one layer, or None"
            )
        methods = [name for name, value in vars(cls).items() if callable(value) and not hasattr(PositionEncoding, name)]
        for name in methods if not cls.mechanisms() else ():
            if hint := did_you_mean(name, MECHANISMS):
                raise ValueError(f"{cls.__qualname__}.{name} is called by nothing{hint}")
        checked_value(f"{cls.__qualname__}.title", cls.title, str)
        checked_value(f"{cls.__qualname__}.paper", cls.paper, tuple[str, ...])
        # Running a notebook cell again replaces its class, under all names that it had.
        for name in [name for name, taken in registered.items() if (taken.__module__, taken.__qualname__) == own]:
            del registered[name]
        registered.update(dict.fromkeys((type, *aliases), cls))

    def __init__(self, geometry: Geometry, **options: Any) -> None:
        super().__init__()
        if self.causal_only and not geometry.is_causal:
            raise ValueError(
                f"{self.type!r} is defined for attention to earlier tokens alone, and here tokens see later ones, too: take it "
                "for a decoder's own attention, or another encoding"
            )
        if self.axes not in (1, geometry.axes):
            coordinates = " and ".join(("frame", "row", "column")[-self.axes :])
            raise ValueError(
                f"{self.type!r} takes {self.axes} coordinates of each token, {coordinates}, and here a token has "
                f"{geometry.axes}: take it for a model of images or videos whose patches lie in such a grid, or take another"
            )
        if geometry.max_length is None and self.needs_max_length(geometry):
            raise ValueError(
                f"{self.type!r} needs max_length, the longest input in tokens, and the model's own positions have no limit to "
                "take it from: give max_length"
            )
        self.geometry = geometry
        self._options = checked = self.checked_options(options)
        for name, value in checked.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        # torch.nn.Module keeps these where a method of the same name hides them.
        if isinstance(value, (nn.Module, nn.Parameter)) and hasattr(PositionEncoding, name):
            raise ValueError(
                f"{type(self).__qualname__}.{name} can't be a module or a parameter: PositionEncoding has an attribute of this "
                f"name. Choose another, such as {name}_table."
            )
        super().__setattr__(name, value)

    def forward(self, verb: str, *args: Any) -> Any:
        """The result of one of the verbs."""
        # Accelerate brings offloaded weights to a module that is called. Some within are only read, such as a ParameterList.
        within: list[Any] = [module for module in self.modules() if module is not self]
        read = [(module, accelerate_hook(module)) for module in within if accelerate_hook(module) is not None]
        for module, hook in read:
            hook.pre_forward(module)
        try:
            return getattr(self, verb)(*args)
        finally:
            for module, hook in read:
                hook.post_forward(module, None)

    def rebuilt(self) -> "PositionEncoding | None":
        """Another module as the class makes it, or None for one whose parts are made by themselves."""
        return type(self)(self.geometry, **(self._options or {}))

    def embed(self, positions: Tensor) -> Tensor | None:
        """Vectors to add to token embeddings: `[..., L]` integers (of two `axes`, `[..., L, 2]`) -> `[..., L, D]`."""
        return None

    def rotate(self, query: Tensor | None, key: Tensor | None, context: PositionContext) -> tuple[Tensor | None, Tensor | None]:
        """Queries and *new* keys, `[B, H, L, E]`, rotated by their positions before keys enter the cache.

        Either may be None: a host that caches its keys before it computes its queries passes them in separate calls.
        """
        return query, key

    def distance_bias(self, distance: Tensor) -> Tensor | None:
        """Bias on scaled scores, from 1-D distances (key position - query position): `[N]` -> `[H or 1, N]`."""
        return None

    def score_bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor | None:
        """Bias on scaled scores that depends on content or absolute position: broadcastable to `[B, H, Q, K]`."""
        return None

    def value_bias(self, weights: Tensor, context: PositionContext) -> Tensor | None:
        """What is added to the output of an attention, from its weights `[B, H, Q, K]` (behind softmax and dropout), of all
        tokens that have positions: `[B, H, Q, E]`, E the size of the values.

        An attention computes all of its weights for it, as "eager" does, under each implementation.
        """
        return None

    def distance_vectors(self, distance: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Where `score_bias` is all products of queries, and of keys, with a vector for each distance, times the scaling: these
        vectors, `[N]` -> `[1 or H, N, E]` each. Equal ones come from one of `rows`. Attention then needs no `[H, Q, K]` tensor.
        """
        return None, None

    def reset_parameters(self) -> None:
        """Initialize all parameters and buffers of this module."""

    def init_from_original_table(self, table: Tensor | None) -> None:
        """Copy values from the host's own position table, `[rows, D]`, if it has one; called after `reset_parameters`."""

    @classmethod
    def extended(cls, options: dict[str, Any], asked: "Extension", geometry: Geometry) -> dict[str, Any] | None:
        """Checked options by which this encoding serves longer inputs in the way that was asked for; None where it can't."""
        return None

    def load_from_shorter(self, shorter: Any, asked: "Extension") -> None:
        """Take the values of tensors that have other sizes here from a module that was made for shorter inputs."""

    def restore(self, find: Callable[[str], "StoredTensor | None"]) -> dict[str, Tensor]:
        """Take from a checkpoint what Transformers can't load as it is; called after it has loaded the others.

        find: the tensor that the checkpoint has under a name within this module, in its file, if any. One that was found isn't
        reported as unexpected. Returns values for tensors of this module, by name.
        """
        return {}

    def stored(self) -> dict[str, "StoredTensor"]:
        """Tensors of the state_dict, by name, that are mapped from files."""
        return {}

    def check_values(self) -> None:
        """Raises ValueError where values are missing that this class can't make, when a model is made that needs them."""

    def rows(self, distance: Tensor) -> Tensor | None:
        """The row of parameters that serves each signed distance, `[N] -> [N]` integers; None where no row is of a distance."""
        return None

    def add_to_bias_rows(self, amounts: Tensor) -> bool:
        """Add amounts `[H, rows]` to the biases of all distances that a row serves, where each head has one free number for
        each row: calibration then needs no gradients. Returns whether that is so."""
        return False

    def angular_frequencies(self, length: int) -> Tensor | None:
        """Radians per position of the sines that this encoding is made of, `[R]`, float64, in a text of `length` tokens; None
        for one that isn't. Diagnostics show them."""
        return None

    def is_trained(self) -> bool:
        """Whether its parameters get gradients from what is computed now."""
        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())

    @classmethod
    def for_stack(cls, geometry: Geometry, **options: Any) -> "PositionEncoding":
        """The module that the stack owns and all its attentions share; a no-op where each attention has its own."""
        return PositionEncoding(geometry) if cls.per_layer_parts(options) else cls(geometry, **options)

    @classmethod
    def for_attention(cls, geometry: Geometry, parts: Collection[str], **options: Any) -> "PositionEncoding | None":
        """The module that an attention owns in which these parts act, if any."""
        return cls(geometry, **options) if cls.per_layer_parts(options) & {*parts} else None

    @classmethod
    def per_layer_parts(cls, options: dict[str, Any]) -> set[str]:
        """The parts of which each attention has one of its own."""
        return {cls.type} if options.get("per_layer", cls.per_layer) else set()

    @classmethod
    def needs_max_length(cls, geometry: Geometry) -> bool:
        """True if positions from max_length on are undefined (beyond a table, say)."""
        return False

    @classmethod
    def with_explicit_defaults(cls, geometry: Geometry, options: dict[str, Any]) -> dict[str, Any]:
        """Checked options, with those written out that default to the trained length, which a config may lose (`extend`)."""
        return options

    @classmethod
    def file_options(cls) -> set[str]:
        """The options that name files of this machine."""
        return {name for name, kind in cls.option_types().items() if names_files(kind)}

    @classmethod
    def mechanisms(cls, options: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """The verbs that this class overrides, a subset of embed, rotate, distance_bias, score_bias, value_bias; given checked
        options, those by which it acts under them."""
        return tuple(verb for verb in MECHANISMS if getattr(cls, verb) is not getattr(PositionEncoding, verb))

    def needs_attention_weights(self) -> bool:
        """Whether it acts by `value_bias`, for which attention has to compute its weights."""
        return "value_bias" in self.mechanisms(self._options)

    @classmethod
    def is_relative(cls) -> bool:
        """Whether only the distances of tokens count."""
        return cls.mechanisms() == ("distance_bias",) if cls.translation_invariant is None else cls.translation_invariant

    @classmethod
    def conflict(cls, other: Any) -> str | None:
        """Why this encoding and another can't act in one layer, or None; asked of both."""
        return None

    @classmethod
    def rotation_depends_on_length(cls, options: dict[str, Any]) -> bool:
        """Whether the rotation of a key changes as its text grows: a cache then stores keys as they are, and all of them are
        rotated at every step."""
        return False

    @classmethod
    def has_distance_vectors(cls) -> bool:
        """Whether `distance_vectors` tells all that `score_bias` does: no subclass has changed the latter alone."""
        last = next(base for base in cls.__mro__ if {"distance_vectors", "score_bias"} & {*vars(base)})
        return last is not PositionEncoding and "distance_vectors" in vars(last)

    @classmethod
    def preset(cls, name: str) -> dict[str, Any]:
        """The options that an alias sets; empty for other names."""
        return cls.aliases.get(name, {})

    @classmethod
    def component_classes(cls) -> dict[str, Any]:
        """Name -> class: this class, or the parts of a composition."""
        return {cls.type: cls}

    def named_parts(self) -> dict[str, "PositionEncoding"]:
        """Name -> module: this module, or the parts that a composition owns; none for the no-op of `for_stack`."""
        return {self.type: self} if self.type else {}

    @classmethod
    def by_part(cls, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Options, unchecked, by the name of the part that they belong to. Raises ValueError for an unknown part."""
        return {cls.type: dict(options)}

    @classmethod
    def option_types(cls) -> dict[str, Any]:
        """Option name -> annotation, base classes first; of encodings that bias `per_layer`, too."""
        if "_option_types" not in vars(cls):
            cls._option_types = cls._read_option_types()
        return dict(cls._option_types)

    @classmethod
    def _read_option_types(cls) -> dict[str, Any]:
        names: dict[str, None] = {}
        for base in reversed(cls.__mro__):
            if issubclass(base, PositionEncoding) and base is not PositionEncoding:
                names.update(dict.fromkeys(inspect.get_annotations(base)))
        hints = get_type_hints(cls, include_extras=True)
        types = {name: hints[name] for name in names if ClassVar not in (hints[name], get_origin(hints[name]))}
        return {**types, "per_layer": bool} if {"distance_bias", "score_bias", "value_bias"} & {*cls.mechanisms()} else types

    @classmethod
    def checked_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """All options with their defaults; a class may leave out those that change nothing so.

        Raises ValueError for an unknown name, a wrong type or range."""
        allowed = cls.option_types()
        if unknown := sorted(set(options) - set(allowed)):
            names = ", ".join(f"{short_repr(name)}{did_you_mean(name, (*allowed, *BESIDE))}" for name in unknown[:4])
            raise ValueError(f"{cls.type!r} has no option {names}; it takes {quoted(allowed) or 'no options'}")
        missing = [name for name in allowed if name not in options and not hasattr(cls, name)]
        if missing:
            raise ValueError(f"{cls.type!r} needs the option {quoted(missing)}")
        values = {name: options.get(name, getattr(cls, name, None)) for name in allowed}
        if "embed" in cls.mechanisms() and cls.per_layer_parts(options):
            raise ValueError(f"{cls.type!r} embeds, which the stack does once for all layers: per_layer has to be False")
        return {name: checked_value(f"{cls.type}.{name}", values[name], allowed[name]) for name in allowed}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.option_types())
