"""Reads, parses, and writes the `position_encoding` of config.json. No other module does.

The JSON form is a dict with the encoding's canonical type, its options, and its placement (`layers`, `inject`, `max_length`,
`original`, `calibration`).
"""

import copy
import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, get_type_hints

from torch import nn
from transformers import PreTrainedConfig

from hf_posenc.encodings import (
    canonical,
    checked_max_length,
    checked_value,
    did_you_mean,
    encoding_class,
    options_of,
    overridden,
    short_repr,
)

INJECT = ("input", "every_layer", "after_attention")
"""Where vectors are added: to the token embeddings, the input of each layer, or the output of each attention block."""
WHERE = ("encoder", "decoder", "cross")
"""Where an encoding applies in an encoder-decoder model: in the self-attention of either stack, or in cross-attention."""
PLACEMENT = ("inject", "max_length", "original", "calibration", "submodel", "submodels", "where", "windows")
"""The keys of `position_encoding` that aren't options of an encoding. `layers` is next to the options of each part."""
PARSED = "_position_spec"
"""The attribute of a config with its `position_encoding`, before and after parsing. It isn't saved."""
PLAN = "position_plan"
"""The attribute of a config with its plans."""
LENGTH_FIELD = "max_position_embeddings"
"""The config field for a model's maximum length. Configs with another name for it map it (GPT-2's n_positions)."""
ROPE = "rope_parameters"
"""The config field of rotary positions. It contains the parameters of one rule, or one rule for each layer type."""
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
"""A model's ID on the Hub. A path with one directory looks the same."""

V4_RELATIVE = ("relative_key", "relative_key_query")
"""Values of `position_embedding_type` in Transformers v4 configs. Transformers 5 ignores them and their vectors."""

SUBMODEL = re.compile(r"\w+(\.\w+)*", re.ASCII)

Layers = str | tuple[int, ...]
"""Indices of layers: a slice as a string ("3::4"), or integers."""


def length_of(config: Any) -> Any:
    """The value of a config's length field. None if it has none, or if it is -1 for no limit (XLNet)."""
    value = getattr(config, LENGTH_FIELD, None)
    return None if value == -1 and isinstance(getattr(type(config), LENGTH_FIELD, None), property) else value


def dropped_v4_relative(config: Any) -> str | None:
    """The kind of relative positions that a v4 model of this config has lost. None for other configs."""
    kind = getattr(config, "position_embedding_type", None)
    return kind if kind in V4_RELATIVE else None


def dropped_v4_relative_within(model: nn.Module) -> list[str]:
    """The kinds of relative positions that a v4 model and its submodules have lost."""
    kinds = dict.fromkeys(dropped_v4_relative(getattr(module, "config", None)) for module in model.modules())
    return [kind for kind in kinds if kind is not None]


def raise_if_v4_relative(model: nn.Module, so: str) -> None:
    """Raises ValueError if a model has lost relative positions. `so` is the consequence for the caller."""
    if kinds := dropped_v4_relative_within(model):
        raise ValueError(
            f"This model's config has position_embedding_type={kinds[0]!r}. Transformers 5 dropped the relative position "
            f"vectors that it was trained with, so {so}. To load them, call hf_posenc.from_v4(path_or_id, auto_class), or run "
            f"`hf-posenc patch PATH_OR_ID {kinds[0]}` in a shell."
        )


@dataclass(frozen=True)
class StackPlan:
    """The structure of one encoder or decoder ("stack") of an original model, found when it was patched.

    The `position_plan` of config.json is a list of plans. Paths are dotted and relative to the stack. `*` in a path stands for
    the indices of all layers with such a part.

    stack: class name of the stack. path: its path in the patched model. role: "encoder" or "decoder".
    components: kind and path of each positional component.
    attentions, cross_attentions: paths of self-attentions and cross-attentions.
    order_sensitive: paths of other order-sensitive modules in the layers, which aren't changed.
    masks: names of the functions and config flags that determine whether its masks are causal.
    custom_attentions: whether an attention doesn't use the Transformers attention interface.
    axes: number of coordinates of a token. extra_tokens: number of tokens before and after the patches of an image.
    windows: whether attentions see windows of the image. patch_projection: path of the convolution that computes the patches.
    flattens_ids: whether IDs with more dimensions than `[B, L]` are flattened to one text per row.
    settings: name and value of config fields with which the code may choose other positions (Falcon's `alibi`).
    submodel: path of the submodel with the stack, if several submodels are patched.
    """

    stack: str
    path: str
    components: tuple[tuple[str, str], ...]
    attentions: tuple[str, ...]
    cross_attentions: tuple[str, ...] = ()
    order_sensitive: tuple[str, ...] = ()
    role: str = "encoder"
    masks: tuple[str, ...] = ()
    custom_attentions: bool = False
    axes: int = 1
    extra_tokens: tuple[int, int] = (0, 0)
    windows: bool = False
    patch_projection: str | None = None
    flattens_ids: bool = False
    settings: tuple[tuple[str, bool | str | None], ...] = ()
    submodel: str | None = None

    @classmethod
    def parse(cls, given: Any) -> "StackPlan":
        """Raises ValueError for anything that `to_dict` doesn't write."""
        kinds, needed = get_type_hints(cls), {each.name for each in fields(cls) if each.default is MISSING}
        if not isinstance(given, dict) or not needed <= {*given} <= {*kinds}:
            raise ValueError(
                f"position_plan, which patch writes, must not be edited, but contains {short_repr(given)}. Restore it "
                f"({', '.join(kinds)}), or set it to None, and hf_posenc detects the structure again."
            )
        return cls(**{name: checked_value(f"position_plan.{name}", value, kinds[name]) for name, value in given.items()})

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as JSON values."""
        return {
            each.name: json.loads(json.dumps(value))
            for each in fields(self)
            if (value := getattr(self, each.name)) != each.default
        }

    @property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        return self.attentions, self.cross_attentions, self.order_sensitive


def plans_of(config: Any, submodel: str | None = None) -> tuple[StackPlan, ...]:
    """The plans of a config, or of one of its submodels. A config created from scratch or saved by version 0.1 has none.

    Raises ValueError for malformed plans.
    """
    given = getattr(config, PLAN, None)
    if given is not None and not isinstance(given, list):
        raise ValueError(f"position_plan={short_repr(given)} isn't valid. It must be a list, as written by patch, or None.")
    plans = map(StackPlan.parse, given or ())
    return tuple(plan for plan in plans if submodel is None or plan.submodel in (None, submodel))


def write_plans(config: Any, plans: Mapping[str | None, Iterable[StackPlan]]) -> None:
    """Set a config's plans, which are given by submodel. Their submodel is written only if there are several."""
    placed = [replace(plan, submodel=path if len(plans) > 1 else None) for path, each in plans.items() for plan in each]
    setattr(config, PLAN, [plan.to_dict() for plan in placed])


@dataclass(frozen=True)
class OriginalSpec:
    """Facts about the original model that `unpatch` needs.

    name_or_path: the original model's ID on the Hub. Empty if it was loaded from elsewhere.
    rows: the length field of the original config: the number of position embeddings, if it has any.
    kept: whether the original learned positions are saved as `posenc.original.*`.
    max_seq_length: that of the patched SentenceTransformer. Omitted for other models.
    """

    name_or_path: str
    rows: int | None
    kept: bool
    max_seq_length: int | None = None

    @classmethod
    def parse(cls, given: Any) -> "OriginalSpec | None":
        """Raises ValueError for anything that `to_dict` doesn't write."""
        if given is None:
            return None
        kinds = {"name_or_path": (str,), "rows": (int, type(None)), "kept": (bool,)}
        optional = {"max_seq_length": (int,)}
        if (
            not isinstance(given, dict)
            or not {*kinds} <= {*given} <= {*kinds, *optional}
            or not all(type(value) in {**kinds, **optional}[key] for key, value in given.items())
        ):
            raise ValueError(
                f"position_encoding['original'], which patch writes, must not be edited, but contains {short_repr(given)}. "
                f"Restore it ({', '.join(kinds)}), or set it to None. Only unpatch needs it."
            )
        checked_max_length(given["rows"])
        # Earlier versions wrote local paths, which are useless elsewhere and may identify the user.
        return cls(**{**given, "name_or_path": given["name_or_path"] if HUB_ID.fullmatch(given["name_or_path"]) else ""})

    def to_dict(self) -> dict[str, Any]:
        written = asdict(self)
        if self.max_seq_length is None:
            del written["max_seq_length"]
        return written


@dataclass(frozen=True)
class Calibration:
    """The measurements of `convert`. A calibrated model has an Offset wherever the original positions contributed.

    texts, tokens: number of calibration texts, and of their tokens without padding.
    length: number of tokens of the longest text.
    kl_before, kl_after: for each attention, the mean Kullback-Leibler divergence of a query's attention from that in the
        original model, in nats. It is measured on the same inputs with the encoding's initial values and after calibration.
    agreement_before, agreement: mean cosine between the hidden states of the model and of the original, patched only and
        calibrated.
    held_out: number of texts for the agreement that weren't used for calibration. 0 if it was measured on the same texts.
    ranges: number of ranges of positions that have separate vectors in place of position embeddings (`modeling/offsets.py`).
    """

    texts: int
    tokens: int
    length: int
    kl_before: tuple[float, ...]
    kl_after: tuple[float, ...]
    agreement_before: float
    agreement: float
    held_out: int
    ranges: int = 1

    @classmethod
    def parse(cls, given: Any) -> "Calibration | None":
        """Raises ValueError for anything that `to_dict` doesn't write."""
        if given is None:
            return None
        kinds = get_type_hints(cls)
        given = {"ranges": 1, **given} if isinstance(given, dict) else given  # saved before there were ranges
        if not isinstance(given, dict) or given.keys() != kinds.keys():
            raise ValueError(
                f"position_encoding['calibration'], which convert writes, must not be edited, but contains "
                f"{short_repr(given)}. Restore it ({', '.join(kinds)})."
            )
        return cls(**{name: checked_value(f"calibration.{name}", given[name], kind) for name, kind in kinds.items()})

    def to_dict(self) -> dict[str, Any]:
        return {name: [*value] if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Windows:
    """Overlapping windows in which an encoder reads inputs that are longer than one window.

    window: number of tokens in a window, with special tokens.
    stride: number of tokens between the starts of consecutive windows.
    prefix, suffix: number of tokens at the start and the end of an input that each window repeats: its special tokens.
    """

    window: int
    stride: int
    prefix: int = 1
    suffix: int = 1

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value) is not int or value < 0:
                raise ValueError(f"windows: {each.name}={short_repr(value)} isn't valid. It must be an integer from 0.")
        if self.room < 1:
            raise ValueError(
                f"window={self.window} leaves no room for text besides prefix={self.prefix} and suffix={self.suffix}. Pass "
                f"{self.prefix + self.suffix + 1} or more."
            )
        if not 1 <= self.stride <= self.room:
            raise ValueError(
                f"stride={self.stride} isn't valid. It must be from 1 to {self.room}, the tokens of a window without the "
                f"special ones; otherwise, windows would skip tokens. The default is {max(1, 3 * self.room // 4)}."
            )

    @property
    def room(self) -> int:
        """The number of tokens in a window without prefix and suffix."""
        return self.window - self.prefix - self.suffix

    @classmethod
    def parse(cls, given: Any) -> "Windows | None":
        """Raises ValueError for anything that `asdict` doesn't write."""
        if given is None:
            return None
        names = [each.name for each in fields(cls)]
        if not isinstance(given, dict) or {*given} != {*names}:
            raise ValueError(
                f"position_encoding['windows']={short_repr(given)} isn't valid. It must be a dict of {', '.join(names)}."
            )
        return cls(**given)


@dataclass(frozen=True)
class PositionSpec:
    """A model's encoding and where it applies.

    type: canonical name of the encoding, "a+b" for a composition.
    options: all of its options, checked. For a composition, a dict for each part.
    layers: the layers of each part. Parts that aren't named apply to all layers.
    inject: where vectors are added, one of INJECT.
    max_length: maximum length in tokens. None: no limit for computed encodings, the original limit for learned ones.
    original: facts about the original model, for `unpatch`. None in a model created from scratch.
    calibration: the measurements of `convert`, or None.
    submodel: dotted path, within the base model, of the submodel with the encoding in a composite model.
    where: where the encoding applies in an encoder-decoder model, in the order of WHERE. Empty for the self-attention of both.
        Other places keep the original positions.
    others: the other encodings, or this one with other options, by the place in WHERE where they apply instead.
    windows: the windows in which encoders read longer inputs. None: inputs are read in one forward pass.
    submodels: the encodings of other submodels of a composite model, by path. `submodel` is the first path in the alphabet.
    """

    type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    layers: Mapping[str, Layers] = field(default_factory=dict)
    inject: str = "input"
    max_length: int | None = None
    original: OriginalSpec | None = None
    calibration: Calibration | None = None
    submodel: str | None = None
    where: tuple[str, ...] = ()
    others: Mapping[str, "PositionSpec"] = field(default_factory=dict)
    windows: Windows | None = None
    submodels: Mapping[str, "PositionSpec"] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: Any, in_code: bool = False) -> "PositionSpec":
        """The spec of a name or of a dict from config.json.

        in_code: whether it is an argument in a program, where strings may name files (see `canonical`).

        Raises ValueError for anything malformed and for a config that names a file.
        """
        placement = {key: given[key] for key in PLACEMENT if key in given} if isinstance(given, dict) else {}
        if isinstance(given, dict):
            given = {key: value for key, value in given.items() if key not in PLACEMENT}
            given, layers = _without_layers(given)
        else:
            layers = {}
        chosen = canonical(given, layered=layers, in_code=in_code)
        where = _checked_where(placement.get("where"))
        spec = cls(
            type=chosen["type"],
            options=options_of(chosen),
            layers={part: _checked_layers(part, value) for part, value in layers.items()},
            inject=placement.get("inject", "input"),
            max_length=checked_max_length(placement.get("max_length")),
            original=OriginalSpec.parse(placement.get("original")),
            calibration=Calibration.parse(placement.get("calibration")),
            submodel=placement.get("submodel"),
            where=tuple(name for name in WHERE if name in where),
            windows=Windows.parse(placement.get("windows")),
        )
        spec = replace(spec, others={name: spec._other(name, where[name], in_code) for name in spec.where if where[name]})
        if spec.type not in (each.type for each in spec.all_encodings):
            raise ValueError(
                f"{spec.type!r} applies nowhere, because where={short_repr(placement['where'])} sets other encodings for all "
                "places. Keep it in one place, where={'encoder': {}, …}, or use one of the other encodings instead of it."
            )
        spec._check_placement()
        return spec._with_submodels(placement.get("submodels", {}), in_code)

    def _other(self, name: str, given: Any, in_code: bool) -> "PositionSpec":
        """The encoding of a place in WHERE, from a name, a dict with "type", or other options for this encoding."""
        given = {"type": given} if isinstance(given, str) else given
        if not isinstance(given, dict):
            raise ValueError(
                f"where[{name!r}]={short_repr(given)} isn't valid. It must be a name, a dict of an encoding, or a dict of "
                "options for this encoding."
            )
        if placed := sorted({*PLACEMENT} & {*given}):
            raise ValueError(f"where[{name!r}] has {placed[0]!r}, which applies to the whole model. Set it outside of where.")
        if "type" not in given:
            given = {"type": self.type, **overridden(self.encoding, options_of(self._written()), given)}
        return PositionSpec.parse(given, in_code)

    def _with_submodels(self, given: Any, in_code: bool) -> "PositionSpec":
        """This spec with those of other submodels, from their `position_encoding` by path."""
        if not given:
            return self
        if not isinstance(given, dict) or not all(
            isinstance(each, dict) and "submodels" not in each for each in given.values()
        ):
            raise ValueError(
                f"submodels={short_repr(given)} isn't valid. It must map the paths of submodels to their encodings."
            )
        specs = [self, *(PositionSpec.parse({**each, "submodel": path}, in_code) for path, each in given.items())]
        paths = [str(each.submodel) for each in specs]
        if self.submodel is None or any(f"{one}.".startswith(f"{two}.") for one, two in itertools.permutations(paths, 2)):
            raise ValueError(
                f"position_encoding has submodel={short_repr(self.submodel)} and submodels {', '.join(map(repr, given))}. They "
                "must be different paths, none within another."
            )
        return PositionSpec.joined(specs)

    @classmethod
    def joined(cls, specs: Iterable["PositionSpec"]) -> "PositionSpec":
        """One spec for submodels with an encoding each, or the only spec unchanged. Their order doesn't matter."""
        first, *others = sorted(specs, key=lambda each: each.submodel or "")
        return replace(first, submodels={str(each.submodel): each for each in others})

    @property
    def by_submodel(self) -> dict[str | None, "PositionSpec"]:
        """Path of each patched submodel -> its spec. The path is None if the whole model is patched."""
        others: Mapping[Any, PositionSpec] = self.submodels
        return {self.submodel: replace(self, submodels={}), **others}

    def changed(self, spec: "PositionSpec") -> "PositionSpec":
        """This spec with another one for the submodel of `spec`."""
        return PositionSpec.joined({**self.by_submodel, spec.submodel: spec}.values())

    def _check_placement(self) -> None:
        if self.windows is not None and self.where and "encoder" not in self.where:
            raise ValueError(f"windows applies to encoders, but where={[*self.where]}. Add 'encoder', or omit windows.")
        if self.inject not in INJECT:
            raise ValueError(
                f"inject={short_repr(self.inject)}{did_you_mean(self.inject, INJECT)} isn't valid. It must be one of "
                f"{', '.join(map(repr, INJECT))}."
            )
        if self.submodel is not None and not (isinstance(self.submodel, str) and SUBMODEL.fullmatch(self.submodel)):
            raise ValueError(
                f"submodel={short_repr(self.submodel)} isn't valid. It must be the dotted path of a submodel in the base model."
            )
        between = self.encoding_for("cross")
        if between is not None and "embed" in between.encoding.mechanisms():
            raise ValueError(
                f"where='cross' isn't supported by {between.type!r}, which adds vectors to token embeddings. Use a "
                "rotary encoding or a bias there, where={'cross': 'alibi', …}."
            )
        embeds = "embed" in self.encoding.mechanisms()
        if self.inject != "input" and not embeds:
            raise ValueError(
                f"inject={self.inject!r} sets where vectors are added, but {self.type!r} adds no vectors. Omit it, or use an "
                "additive encoding."
            )
        for part in self.layers:
            verbs = self.parts[part].mechanisms()
            if not verbs:
                raise ValueError(f"layers of {part!r} can't be set, because it has no effect in any layer. Omit layers.")
            if "embed" in verbs and self.inject == "input":
                raise ValueError(
                    f"layers of {part!r} can't be set, because its vectors are added to the input, before all layers. Use "
                    "inject='every_layer' or inject='after_attention', or omit layers."
                )

    @property
    def encoding(self) -> Any:
        """The class of the encoding."""
        return encoding_class(self.type)

    @property
    def parts(self) -> Mapping[str, Any]:
        """The class of the encoding, or the classes of a composition's parts, by name."""
        return self.encoding.component_classes()

    def mechanisms(self, part: str) -> tuple[str, ...]:
        """The mechanisms of a part with its options."""
        return self.parts[part].mechanisms(self.encoding.by_part(dict(self.options))[part])

    @property
    def replaces_all(self) -> bool:
        """Whether all original positions are replaced, so that the config's length is that of this encoding."""
        return self.submodel is None and (not self.where or {"encoder", "decoder"} <= {*self.where})

    @property
    def pass_length(self) -> int | None:
        """The maximum number of tokens in a forward pass, which is that of a window if there are windows."""
        return self.max_length if self.windows is None else self.windows.window

    def encoding_for(self, where: str) -> "PositionSpec | None":
        """The spec for a place in WHERE, or None."""
        if where not in (self.where or ("encoder", "decoder")):
            return None
        other = self.others.get(where)
        if other is None:
            return self
        return replace(self, type=other.type, options=other.options, layers=other.layers, where=(), others={})

    @property
    def all_encodings(self) -> tuple["PositionSpec", ...]:
        """This encoding, unless others replace it everywhere, the others, and those of other submodels."""
        own = () if self.others and {*self.others} == {*self.where} else (self,)
        return (*own, *self.others.values(), *(part for each in self.submodels.values() for part in each.all_encodings))

    def _written(self) -> dict[str, Any]:
        """The encoding with `layers`, but without the rest of its placement."""
        written: dict[str, Any] = {"type": self.type, **copy.deepcopy(dict(self.options))}
        for part, layers in self.layers.items():
            (written if part == self.type else written[part])["layers"] = layers if isinstance(layers, str) else [*layers]
        return written

    def to_dict(self) -> dict[str, Any]:
        """The form for config.json, which `parse` reads."""
        where: Any = [*self.where]
        if self.others:
            where = {name: self.others[name]._written() if name in self.others else {} for name in self.where}
        return {
            **self._written(),
            "inject": self.inject,
            "max_length": self.max_length,
            "original": None if self.original is None else self.original.to_dict(),
            **({} if self.calibration is None else {"calibration": self.calibration.to_dict()}),
            **({} if self.submodel is None else {"submodel": self.submodel}),
            **({"where": where} if where else {}),
            **({} if self.windows is None else {"windows": asdict(self.windows)}),
            **(
                {"submodels": {path: _without_path(each.to_dict()) for path, each in self.submodels.items()}}
                if self.submodels
                else {}
            ),
        }

    def parts_by_layer(self, count: int, attentions: Collection[int]) -> list[tuple[str, ...]]:
        """The parts that apply to each of `count` layers. `attentions` are the layers with an attention.

        Raises ValueError for layers that don't exist or have no attention, and for overlapping layers of parts.
        """
        chosen = {part: _resolved(part, layers, count) for part, layers in self.layers.items()}
        for part, indices in chosen.items():
            if missing := [index for index in indices if index not in attentions]:
                raise ValueError(
                    f"layers of {part!r} include {', '.join(map(str, missing))}, where this model has no attention. Layers "
                    f"with attention, counted from 0: {', '.join(map(str, sorted(attentions)))}."
                )
        owners: dict[int, str] = {}
        for part, indices in chosen.items():
            for index in indices:
                if owners.setdefault(index, part) != part:
                    raise ValueError(
                        f"layers overlap: {owners[index]!r} and {part!r} both include layer {index}. Assign each layer to one "
                        "of them, or omit layers to combine the two."
                    )
        return [tuple(part for part in self.parts if index in chosen.get(part, (index,))) for index in range(count)]


def _without_path(written: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in written.items() if key != "submodel"}


def read(config: Any) -> PositionSpec:
    """The spec of a config with `position_encoding`, parsed again only if it has changed."""
    known = vars(config).get(PARSED)
    if known is None or known[0] != config.position_encoding:
        known = vars(config)[PARSED] = copy.deepcopy(config.position_encoding), PositionSpec.parse(config.position_encoding)
    return known[1]


def write(config: Any, spec: PositionSpec) -> None:
    """Set a config's `position_encoding`."""
    config.position_encoding, vars(config)[PARSED] = spec.to_dict(), (spec.to_dict(), spec)


def change_class(config: Any, cls: Any) -> None:
    """Change a config's class and model type.

    A loaded config has its model type as an attribute, which Transformers uses to rename weights when a model is saved.
    """
    config.__class__ = cls
    vars(config).pop("model_type", None)


def make_stock(config: Any) -> None:
    """Restore the original class and length of a config and its sub-configs, and remove `position_encoding`."""
    make_parts_stock(config)
    if not hasattr(type(config), "position_spec"):
        return
    if config.position_encoding is not None:
        spec = read(config)
        if spec.original is not None and spec.original.rows is not None and spec.submodel is None:
            setattr(config, LENGTH_FIELD, spec.original.rows)
    change_class(config, type(config).original_class)
    for name in ("position_encoding", PLAN, PARSED, "auto_map"):
        vars(config).pop(name, None)


def part_names(config: Any) -> list[str]:
    """The names of a config's sub-configs, also of those that its class doesn't declare (RAG)."""
    undeclared = (name for name, value in vars(config).items() if isinstance(value, PreTrainedConfig))
    return list(dict.fromkeys([*config.sub_configs, *undeclared]))


def make_parts_stock(config: Any) -> None:
    """Restore the original sub-configs of a config."""
    for part in (getattr(config, name, None) for name in part_names(config)):
        if isinstance(part, PreTrainedConfig):
            make_stock(part)


def merged(saved: Any, given: Any) -> Any:
    """The saved `position_encoding`, overridden by the keys passed on loading.

    Raises ValueError if the type differs from the saved one, or the saved encoding names a file.
    """
    if saved == given:
        return saved
    if saved is not None:
        PositionSpec.parse(saved)
    saved, given = ({"type": each} if isinstance(each, str) else each for each in (saved, given))
    if not isinstance(given, dict) or not isinstance(saved, dict):
        return saved if given is None else given
    there, wanted = encoding_class(saved.get("type")).type, encoding_class(given.get("type")).type
    if there != wanted:
        raise ValueError(
            f"This checkpoint was saved with the {there!r} encoding, not {wanted!r}. Load it without changes, "
            f"then call model = hf_posenc.patch(hf_posenc.unpatch(model), {wanted!r})."
        )
    cls = encoding_class(there)
    options: dict[str, Any] = {}
    for each in (saved, given):
        own = {key: value for key, value in options_of(each).items() if key not in PLACEMENT}
        options = overridden(cls, options, overridden(cls, cls.preset(each["type"]), own))
    placement = {key: value for key, value in {**saved, **given}.items() if key in PLACEMENT}
    return {"type": there, **options, **placement}


def _checked_where(given: Any) -> dict[str, Any]:
    """The encoding or options, if any, for each given place in WHERE. Raises ValueError for other names."""
    if given is None:
        return {}
    found = {given: None} if isinstance(given, str) else given
    if isinstance(found, (list, tuple)) and all(isinstance(name, str) for name in found):
        found = dict.fromkeys(found)
    if isinstance(given, dict) and None in given.values():
        raise ValueError(f"where={short_repr(given)} has None as an encoding. Omit places that keep the original positions.")
    if not isinstance(found, dict) or not found or not {*found} <= {*WHERE}:
        unknown = next((name for name in found if name not in WHERE), None) if isinstance(found, dict) else None
        near = did_you_mean(unknown, WHERE) if isinstance(unknown, str) else ""
        raise ValueError(
            f"where={short_repr(given)}{near} isn't valid. It must be one or more of {', '.join(map(repr, WHERE))}, or a dict "
            "that maps them to encodings."
        )
    return found


def _without_layers(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The encoding without `layers`, and the layers of each part."""
    if not isinstance(given.get("type"), str):
        return given, {}
    encoding = encoding_class(given["type"])
    if "layers" in given and encoding.component_classes().keys() != {encoding.type}:
        names = " or ".join(f"{part}__layers=…" for part in encoding.component_classes())
        raise ValueError(f"layers={short_repr(given['layers'])} of {given['type']!r} must name a part. Use {names}.")
    parts = encoding.by_part(options_of(given))
    layers = {name: options["layers"] for name, options in parts.items() if options.get("layers") is not None}
    if not any("layers" in options for options in parts.values()):
        return given, {}
    parts = {name: {key: value for key, value in options.items() if key != "layers"} for name, options in parts.items()}
    return {"type": given["type"], **(parts.get(encoding.type, parts))}, layers


def _checked_layers(part: str, given: Any) -> Layers:
    if isinstance(given, str) and re.fullmatch(r"(-?\d{0,6}):(-?\d{0,6})(:(-?[1-9]\d{0,5})?)?", given.strip()):
        return given.strip()
    if isinstance(given, (list, tuple)) and given and all(type(index) is int for index in given):
        if len({*given}) < len(given):
            raise ValueError(f"layers={short_repr(given)} of {part!r} include a layer twice. Name each layer once.")
        return tuple(given)
    raise ValueError(
        f"layers={short_repr(given)} of {part!r} isn't valid. It must be a slice as a string "
        '("3::4": every fourth layer, starting at layer 3) or a list of layer indices.'
    )


def _resolved(part: str, layers: Layers, count: int) -> tuple[int, ...]:
    """Layer indices from 0. Raises ValueError for indices outside of `count` layers."""
    if isinstance(layers, str):
        indices = tuple(range(count)[slice(*(int(number) if number else None for number in layers.split(":")))])
        missing: Any = [] if indices else layers
    else:
        indices = tuple(sorted(index % count for index in layers if -count <= index < count))
        missing = [index for index in layers if not -count <= index < count]
        if not missing and len({*indices}) < len(indices):
            raise ValueError(f"layers={[*layers]} of {part!r} include a layer twice in a model of {count}. Name each once.")
    if missing:
        raise ValueError(f"layers={missing!r} of {part!r} don't exist. This model has {count} layers, from 0 to {count - 1}.")
    return indices
