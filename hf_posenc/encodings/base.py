"""The base class of all position encodings.

Shapes: B batch, L tokens, Q queries, K keys, H heads, D hidden_size, E head_dim, N any number of distances.
"""

import contextlib
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from hf_posenc._compat import InFloat32, accelerate_hook, is_in_forward_mode, lacks_float64
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
    "submodels",
}
"""Names that neither an encoding nor an option may have."""


MECHANISMS = ("embed", "rotate", "distance_bias", "score_bias", "value_bias")


BESIDE = ("inject", "keep_original", "layers", "max_length", "where")
"""The arguments of `patch` that aren't options of an encoding."""


@dataclass(frozen=True)
class Geometry:
    """The sizes that an encoding is built for.

    num_attention_heads, head_dim: 0 for an encoding outside of any attention.
    max_length: maximum length in tokens. None for no limit.
    is_causal: True if queries attend to no later keys.
    num_key_value_heads: number of key and value heads. Equals num_attention_heads without grouped-query attention.
    trained_length: maximum length in tokens of the model's original positions. None if unknown.
    value_head_dim: head dimension of the values if it differs from head_dim, as in latent attention. Otherwise 0.
    axes: number of coordinates of a token: 1 in a text, 2 (row, column) in an image, 3 (frame, row, column) in a video.
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
            \"\"\"Masks tokens more than `width` positions away.\"\"\"
            width: Annotated[int, GreaterThan(0)] = 128

            def distance_bias(self, distance):
                return torch.where(distance.abs() > self.width, -torch.inf, 0.0)[None]

    Options are class annotations with defaults. They are checked and set as attributes of the same name. An option that names
    a file has the type `pathlib.Path`. It is set in code, and is never saved or read from a config. Sizes are in
    `self.geometry`. Create parameters, buffers, and modules in `__init__` (after `super().__init__`). Set their values there or
    in `reset_parameters`, which is called if `__init__` leaves memory uninitialized. Unsaved values, such as non-persistent
    buffers, are computed again when a model is loaded, and must be the same each time. A subclass overrides one or more of the
    mechanisms `embed`, `rotate`, `distance_bias`, `score_bias`, and `value_bias`. Each is a no-op here.

    Mechanisms are called through the module, `encoding("embed", positions)`, so that hooks run: those of Accelerate load
    offloaded weights, and those of FSDP gather shards.

    With `per_layer = True`, each attention has a separate instance and parameters. Otherwise all attentions of an encoder or
    decoder share one. For encodings with a bias, `per_layer` is also an option, and the class may set its default.

    Aliases may set options: `aliases={"near": {"width": 8}}`. `title` and `paper` (URLs) appear in listings and model cards.
    """

    registered: ClassVar[dict[str, Any]] = {}
    """The class of each encoding, by name and alias."""
    type: ClassVar[str] = ""  # type: ignore[assignment]  # shadows Module.type(dtype), which is called on whole models only
    aliases: ClassVar[dict[str, dict[str, Any]]] = {}
    title: ClassVar[str] = ""
    paper: ClassVar[tuple[str, ...]] = ()
    per_layer: bool = False
    translation_invariant: ClassVar[bool | None] = None
    """Whether scores stay the same when all positions of a text shift by the same number. None: True if `distance_bias` is the
    only mechanism."""
    observes: ClassVar[bool] = False
    """Whether the mechanisms only observe and may return None. `score_bias` then gets queries and keys of extra tokens, too."""
    causal_only: ClassVar[bool] = False
    """Whether the encoding requires causal attention."""
    reads_content: ClassVar[bool] = True
    """Whether `score_bias` depends on queries and keys. If not, all layers that share the encoding have the same bias."""
    corrects_scores: ClassVar[bool] = False
    """Whether `score_bias` subtracts part of the product of queries and keys, which must not be modified before."""
    rotates_keys: ClassVar[bool] = True
    """Whether `rotate` changes keys as well as queries."""
    changes_head_dim: ClassVar[bool] = False
    """Whether `rotate` changes the head dimension of queries and keys."""
    axes: ClassVar[int] = 1
    """Number of coordinates of a token that the encoding uses. If it isn't 1, it must equal `Geometry.axes`."""
    geometry: Geometry
    _option_types: ClassVar[dict[str, Any]]
    """The result of `option_types`, cached per class, because each attention can have a separate instance."""
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
                    f"{name!r} can't be the name of an encoding. Use letters and digits, with single _ or - between them. "
                    f"Reserved names: {quoted(sorted(RESERVED))}."
                )
            if hasattr(PositionEncoding, name):  # a composition has its parts as attributes
                raise ValueError(f"{name!r} can't be the name of an encoding, because all encodings have this attribute.")
            taken = registered.get(name)
            # The file that a class was written to replaces the class of a notebook.
            if taken and taken.__module__ != "__main__" and (taken.__module__, taken.__qualname__) != own:
                raise ValueError(
                    f"The encoding name {name!r} is already used by {taken.__module__}.{taken.__qualname__}. "
                    f"Give {cls.__qualname__} another `type`."
                )
        cls.type = type
        cls.aliases = aliases if isinstance(aliases, dict) else {name: {} for name in aliases}
        if reserved := RESERVED & set(cls.option_types()):
            raise ValueError(f"{cls.__qualname__} can't have options with reserved names: {quoted(sorted(reserved))}.")
        if required := sorted(name for name in cls.file_options() if not hasattr(cls, name)):
            raise ValueError(
                f"{cls.__qualname__}.{required[0]} names a file, and paths aren't saved with a model. Give the option a "
                f"default, such as `{required[0]}: Path | None = None`."
            )
        accepted = inspect.signature(cls.__init__, follow_wrapped=False).parameters
        refused = sorted({*cls.option_types()} - {*accepted})
        if refused and all(each.kind is not each.VAR_KEYWORD for each in accepted.values()):
            raise ValueError(
                f"{cls.__qualname__}.__init__ takes no {quoted(refused)}. Define it as __init__(self, geometry, **options), "
                "and pass both to super().__init__."
            )
        if "forward" in vars(cls):
            raise ValueError(f"{cls.__qualname__} can't define forward, which hf_posenc uses. Choose another name.")
        if "distance_vectors" in vars(cls) and "score_bias" not in cls.mechanisms():
            raise ValueError(
                f"{cls.__qualname__} defines distance_vectors without score_bias, so it has no effect. Define score_bias too."
            )
        if not callable(getattr(cls, "conflict", None)):
            raise ValueError(
                f"{cls.__qualname__}.conflict is a {cls.conflict.__class__.__name__}. It must be a classmethod that takes "
                "another class and returns why the two can't be combined in one layer, or None."
            )
        methods = [name for name, value in vars(cls).items() if callable(value) and not hasattr(PositionEncoding, name)]
        for name in methods if not cls.mechanisms() else ():
            if hint := did_you_mean(name, MECHANISMS):
                raise ValueError(f"{cls.__qualname__}.{name} is never called{hint}.")
        checked_value(f"{cls.__qualname__}.title", cls.title, str)
        checked_value(f"{cls.__qualname__}.paper", cls.paper, tuple[str, ...])
        # Running a notebook cell again replaces its class under all of its names.
        for name in [name for name, taken in registered.items() if (taken.__module__, taken.__qualname__) == own]:
            del registered[name]
        registered.update(dict.fromkeys((type, *aliases), cls))

    def __init__(self, geometry: Geometry, **options: Any) -> None:
        super().__init__()
        if self.causal_only and not geometry.is_causal:
            raise ValueError(
                f"{self.type!r} requires causal attention, but this attention is bidirectional. Use it for a decoder's "
                "self-attention, or choose another encoding."
            )
        if self.axes not in (1, geometry.axes):
            coordinates = " and ".join(("frame", "row", "column")[-self.axes :])
            raise ValueError(
                f"{self.type!r} requires {self.axes}-D positions ({coordinates}), but this model has {geometry.axes}-D "
                "positions. Use a vision model with a patch grid, or choose another encoding."
            )
        if geometry.max_length is None and self.needs_max_length(geometry):
            raise ValueError(
                f"{self.type!r} needs max_length, the maximum length in tokens, because the model's original positions have no "
                "limit. Pass max_length."
            )
        self.geometry = geometry
        self._options = checked = self.checked_options(options)
        for name, value in checked.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        # A method of the same name hides the modules and parameters that torch.nn.Module stores.
        if isinstance(value, (nn.Module, nn.Parameter)) and hasattr(PositionEncoding, name):
            raise ValueError(
                f"{type(self).__qualname__}.{name} can't be a module or a parameter: PositionEncoding has an attribute of this "
                f"name. Choose another, such as {name}_table."
            )
        super().__setattr__(name, value)

    def forward(self, verb: str, *args: Any) -> Any:
        """Calls a mechanism by name and returns its result, on the device of the parameters."""
        # Accelerate loads offloaded weights when a module is called. Some submodules, such as a ParameterList, are only read.
        within: list[Any] = [module for module in self.modules() if module is not self] if self._modules else []
        read = [(module, accelerate_hook(module)) for module in within if accelerate_hook(module) is not None]
        for module, hook in read:
            hook.pre_forward(module)
        try:
            home = next((each.device for each in itertools.chain(self.parameters(), self.buffers(recurse=False))), None)
            if home is not None:
                args = tuple(
                    each.to(home) if isinstance(each, Tensor) else each.on(home) if isinstance(each, PositionContext) else each
                    for each in args
                )
            narrow = any(isinstance(each, Tensor) and lacks_float64(each.device) for each in args)
            with InFloat32() if narrow else contextlib.nullcontext():
                result = getattr(self, verb)(*args)
        finally:
            for module, hook in read:
                hook.post_forward(module, None)
        if not torch.compiler.is_compiling() and self.is_custom() and verb in self.mechanisms() and not self.observes:
            self._check_result(verb, args, result)
        return result

    def _check_result(self, verb: str, args: tuple[Any, ...], result: Any) -> None:
        """Raises ValueError if a mechanism of a custom encoding returns something that would have no effect or a wrong one."""
        wanted, size = "a tensor", self.geometry.hidden_size
        if verb == "rotate":
            wanted, valid = "a pair, (query, key)", isinstance(result, tuple) and len(result) == 2
        elif verb == "embed":
            wanted, axes = f"[..., L, {size}]", args[0].ndim + (self.axes == 1)
            valid = isinstance(result, Tensor) and result.ndim == axes and result.shape[-1] == size
        else:
            valid = isinstance(result, Tensor)
        if not valid:
            given = tuple(result.shape) if isinstance(result, Tensor) else short_repr(result)
            raise ValueError(f"{verb} of {self.type!r} returned {given}. Return {wanted}.")

    def rebuilt(self) -> "PositionEncoding | None":
        """A new module with the same options. None for a composition, because its parts are built separately."""
        return type(self)(self.geometry, **(self._options or {}))

    def embed(self, positions: Tensor) -> Tensor | None:
        """Vectors to add to token embeddings: `[..., L]` integers (with two `axes`, `[..., L, 2]`) -> `[..., L, D]`."""
        return None

    def rotate(self, query: Tensor | None, key: Tensor | None, context: PositionContext) -> tuple[Tensor | None, Tensor | None]:
        """Queries and *new* keys, `[B, H, L, E]`, rotated by their positions before keys enter the cache.

        Either may be None, because a model that caches its keys before it computes its queries passes them in separate calls.
        """
        return query, key

    def distance_bias(self, distance: Tensor) -> Tensor | None:
        """Bias on the scaled scores, from 1-D distances (key position - query position): `[N]` -> `[H or 1, N]`."""
        return None

    def score_bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor | None:
        """Bias on the scaled scores that depends on content or absolute position, broadcastable to `[B, H, Q, K]`."""
        return None

    def value_bias(self, weights: Tensor, context: PositionContext) -> Tensor | None:
        """Term added to the attention output, `[B, H, Q, E]` with E the head dimension of the values.

        It is computed from the weights `[B, H, Q, K]`, after softmax and dropout, of all tokens that have positions. Every
        attention implementation then computes all weights, as "eager" does.
        """
        return None

    def distance_vectors(self, distance: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The vectors for queries and for keys, `[N]` -> `[1 or H, N, E]` each, if `score_bias` consists of products with them.

        `score_bias` must equal the scaled products of queries, and of keys, with one vector per distance. Distances with the
        same index in `rows` have equal vectors. Attention then needs no `[H, Q, K]` tensor.
        """
        return None, None

    def query_offsets(self) -> tuple[Tensor, Tensor] | None:
        """Two vectors `[H, E]` that are added to queries before the products with keys, and with `distance_vectors`.

        `score_bias` then also has the products of the first one with keys, and of the second one with `distance_vectors`.
        None if queries have no such vectors. Return copies, not parameters, because FSDP frees parameters after the call.
        """
        return None

    def reset_parameters(self) -> None:
        """Initialize all parameters and buffers of this module."""

    def init_from_original_table(self, table: Tensor | None) -> None:
        """Copy the model's original position embeddings, `[rows, D]`, if it has any. Called after `reset_parameters`."""

    @classmethod
    def extended(cls, options: dict[str, Any], asked: "Extension", geometry: Geometry) -> dict[str, Any] | None:
        """Checked options that extend this encoding to longer inputs, or None if it doesn't support the method."""
        return None

    def load_from_shorter(self, shorter: Any, asked: "Extension") -> None:
        """Set the tensors whose sizes have changed from a module that was built for shorter inputs."""

    def restore(self, find: Callable[[str], "StoredTensor | None"]) -> dict[str, Tensor]:
        """Values of tensors that Transformers can't load directly, by name. Called after it has loaded the others.

        find: returns the checkpoint's tensor with a given name within this module, or None. A tensor that was found isn't
        reported as unexpected.
        """
        return {}

    def stored(self) -> dict[str, "StoredTensor"]:
        """Memory-mapped tensors of the state_dict, by name."""
        return {}

    def check_values(self) -> None:
        """Raises ValueError if values are missing that this class can't compute. Called when a model needs them."""

    def rows(self, distance: Tensor) -> Tensor | None:
        """Parameter index for each signed distance, `[N] -> [N]` integers. None if no parameters belong to distances."""
        return None

    def rows_of_vectors(self, distance: Tensor) -> Tensor | None:
        """`rows`, or None if a subclass overrides `distance_vectors` but inherits `rows`."""
        last = next(base for base in type(self).__mro__ if {"rows", "distance_vectors"} & {*vars(base)})
        return self.rows(distance) if "rows" in vars(last) else None

    def add_to_bias_rows(self, amounts: Tensor) -> bool:
        """Add amounts `[H, rows]` to the biases of the distances of each of `rows`.

        Returns False, and changes nothing, unless each head has one free parameter per index. Calibration then needs no
        gradients."""
        return False

    def angular_frequencies(self, length: int) -> Tensor | None:
        """Radians per position of this encoding's sinusoids, `[R]`, float64, in a text of `length` tokens. None if it has none.

        Diagnostics show them."""
        return None

    def is_trained(self) -> bool:
        """Whether gradients, or forward-mode derivatives, of the current computation may reach the parameters."""
        # Replicas of nn.DataParallel have tensors instead of parameters.
        own = (getattr(module, "_former_parameters", module._parameters) for module in self.modules())
        parameters = [each for tensors in own for each in tensors.values() if each is not None]
        if is_in_forward_mode():
            return bool(parameters)
        return torch.is_grad_enabled() and any(each.requires_grad for each in parameters)

    def _is_shared(self) -> bool:
        """Whether all layers of a forward pass have the same bias, without gradients."""
        return not (self.is_trained() or self.per_layer)

    def _once_per_pass(self, what: str, compute: Callable[[], Any], keys: int, context: PositionContext) -> Any:
        """The result of `compute` for a number of keys, evaluated once for all layers that share it."""
        if not self._is_shared():
            return compute()
        known: list[tuple[int, Any]] = context.cached((self, what, context.first_key), list)
        for number, result in known:  # Traced numbers can be compared, but can't be keys.
            if number == keys:
                return result
        known.append((keys, compute()))
        return known[-1][1]

    @classmethod
    def built(cls, geometry: Geometry, **options: Any) -> "PositionEncoding":
        """A new module. Raises ValueError if a custom `__init__` doesn't pass its options on."""
        made = cls(geometry, **options)
        if cls.is_custom() and made._options != (wanted := cls.checked_options(options)):
            names = [name for name, value in wanted.items() if (made._options or {}).get(name) != value]
            raise ValueError(
                f"{cls.__qualname__}.__init__ doesn't pass {quoted(names)} on, so the value would be ignored. Call "
                "super().__init__(geometry, **options)."
            )
        return made

    @classmethod
    def is_custom(cls) -> bool:
        """Whether this class isn't part of this library. In the code saved with a checkpoint, all classes are."""
        return cls.__module__.rpartition(".")[0] != __name__.rpartition(".")[0]

    @classmethod
    def for_stack(cls, geometry: Geometry, **options: Any) -> "PositionEncoding":
        """The module that all attentions of an encoder or decoder share. It is a no-op if each attention has its own module."""
        return PositionEncoding(geometry) if cls.per_layer_parts(options) else cls.built(geometry, **options)

    @classmethod
    def for_attention(cls, geometry: Geometry, parts: Collection[str], **options: Any) -> "PositionEncoding | None":
        """The module that belongs to one attention with these parts, if any."""
        return cls.built(geometry, **options) if cls.per_layer_parts(options) & {*parts} else None

    @classmethod
    def per_layer_parts(cls, options: dict[str, Any]) -> set[str]:
        """The parts that each attention has separately."""
        return {cls.type} if options.get("per_layer", cls.per_layer) else set()

    @classmethod
    def needs_max_length(cls, geometry: Geometry) -> bool:
        """Whether positions from max_length on are undefined, for example in a table."""
        return False

    @classmethod
    def with_explicit_defaults(cls, geometry: Geometry, options: dict[str, Any]) -> dict[str, Any]:
        """Checked options with explicit values for those that default to the trained length, which `extend` may change."""
        return options

    @classmethod
    def file_options(cls) -> set[str]:
        """The options that name local files."""
        return {name for name, kind in cls.option_types().items() if names_files(kind)}

    @classmethod
    def mechanisms(cls, options: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """The mechanisms that this class overrides: embed, rotate, distance_bias, score_bias, value_bias.

        options: checked options. If given, only the mechanisms that are active with them are returned."""
        return tuple(verb for verb in MECHANISMS if getattr(cls, verb) is not getattr(PositionEncoding, verb))

    def needs_attention_weights(self) -> bool:
        """Whether it uses `value_bias`, which requires the attention weights."""
        return "value_bias" in self.mechanisms(self._options)

    @classmethod
    def is_relative(cls) -> bool:
        """Whether the encoding depends only on distances between tokens."""
        return cls.mechanisms() == ("distance_bias",) if cls.translation_invariant is None else cls.translation_invariant

    @classmethod
    def conflict(cls, other: Any) -> str | None:
        """Why this encoding can't be combined with another in one layer, or None. Called for both."""
        return None

    @classmethod
    def rotation_depends_on_length(cls, options: dict[str, Any]) -> bool:
        """Whether the rotation of a key depends on the length of its text.

        If so, a cache stores unrotated keys, and all of them are rotated at every step."""
        return False

    @classmethod
    def has_distance_vectors(cls) -> bool:
        """Whether `distance_vectors` describes `score_bias`, that is, no subclass overrides only the latter."""
        last = next(base for base in cls.__mro__ if {"distance_vectors", "score_bias"} & {*vars(base)})
        return last is not PositionEncoding and "distance_vectors" in vars(last)

    @classmethod
    def preset(cls, name: str) -> dict[str, Any]:
        """The options that an alias sets. Empty for other names."""
        return cls.aliases.get(name, {})

    @classmethod
    def component_classes(cls) -> dict[str, Any]:
        """This class, or the classes of a composition's parts, by name."""
        return {cls.type: cls}

    def named_parts(self) -> dict[str, "PositionEncoding"]:
        """This module, or the parts of a composition, by name. Empty for the no-op of `for_stack`."""
        return {self.type: self} if self.type else {}

    @classmethod
    def by_part(cls, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Unchecked options by part. Raises ValueError for an unknown part."""
        return {cls.type: dict(options)}

    @classmethod
    def option_types(cls) -> dict[str, Any]:
        """The annotation of each option, base classes first. Encodings with a bias also have `per_layer`."""
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
        """All options with their defaults. A class may omit options that have no effect.

        Raises ValueError for an unknown name, a wrong type, or a value out of range."""
        allowed = cls.option_types()
        if unknown := sorted(set(options) - set(allowed)):
            names = ", ".join(f"{short_repr(name)}{did_you_mean(name, (*allowed, *BESIDE))}" for name in unknown[:4])
            raise ValueError(f"{cls.type!r} has no option {names}. Its options: {quoted(allowed) or 'none'}.")
        missing = [name for name in allowed if name not in options and not hasattr(cls, name)]
        if missing:
            raise ValueError(f"{cls.type!r} requires the option {quoted(missing)}.")
        values = {name: options.get(name, getattr(cls, name, None)) for name in allowed}
        if "embed" in cls.mechanisms() and cls.per_layer_parts(options):
            raise ValueError(f"{cls.type!r} adds vectors once for all layers, so per_layer must be False.")
        return {name: checked_value(f"{cls.type}.{name}", values[name], allowed[name]) for name in allowed}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.option_types())
