"""The `position_encoding` of config.json, parsed once. Its only reader and writer.

The JSON form is a dict: the encoding's canonical type and options, and the placement beside them (`layers`, `inject`,
`max_length`, `original`, `calibration`).
"""

import copy
import json
import re
from collections.abc import Collection, Mapping
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
    refuse_oversized,
    short_repr,
)

INJECT = ("input", "every_layer", "after_attention")
"""Where vectors are added: to the token embeddings, to the input of each layer, to the output of each attention block."""
WHERE = ("encoder", "decoder", "cross")
"""Where an encoding acts in a model of an encoder and a decoder: in the self-attention of each, and between them."""
PLACEMENT = ("inject", "max_length", "original", "calibration", "submodel", "where")
"""The keys of `position_encoding` which are no options of an encoding; `layers` stands beside the options of each part."""
PARSED = "_position_spec"
"""The attribute of a config that holds its `position_encoding` parsed; not saved."""
PLAN = "position_plan"
"""The attribute of a config that holds its plans."""
LENGTH_FIELD = "max_position_embeddings"
"""The config field that holds a host's longest length; hosts with another name for it map it (GPT-2's n_positions)."""
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
"""A model's id on the Hub. A path with one folder looks the same."""

V4_RELATIVE = ("relative_key", "relative_key_query")
"""Values of `position_embedding_type` in configs of Transformers v4. Transformers 5 ignores them and the vectors they name."""

SUBMODEL = re.compile(r"\w+(\.\w+)*", re.ASCII)

Layers = str | tuple[int, ...]
"""Indices of layers: a slice as text ("3::4"), or the numbers themselves."""


def length_of(config: Any) -> Any:
    """What a config's length field says. None for configs without one, or that answer -1 for no limit (XLNet)."""
    value = getattr(config, LENGTH_FIELD, None)
    return None if value == -1 and isinstance(getattr(type(config), LENGTH_FIELD, None), property) else value


def dropped_v4_relative(config: Any) -> str | None:
    """The kind of relative positions that the model of a config was made with in v4 and has lost; None for all others."""
    kind = getattr(config, "position_embedding_type", None)
    return kind if kind in V4_RELATIVE else None


def dropped_v4_relative_within(model: nn.Module) -> list[str]:
    """Those of a model and of all that it is made of."""
    kinds = dict.fromkeys(dropped_v4_relative(getattr(module, "config", None)) for module in model.modules())
    return [kind for kind in kinds if kind is not None]


def raise_if_v4_relative(model: nn.Module, so: str) -> None:
    """Raises ValueError for a model that has lost some, which for the caller means `so`."""
    if kinds := dropped_v4_relative_within(model):
        raise ValueError(
            f"position_embedding_type={kinds[0]!r} in this model's config: Transformers 5 dropped the vectors of distances "
            f"that it was trained with, so {so}: hf_posenc.from_v4(path_or_id, auto_class) loads them, in a shell "
            f"`hf-posenc patch PATH_OR_ID {kinds[0]}`"
        )


@dataclass(frozen=True)
class StackPlan:
    """What was found in one stack of a stock model when it was patched: config.json's `position_plan` is a list of these.

    Paths are dotted, and relative to the stack. `*` in them stands for the numbers of all layers that have such a part.

    stack: the name of its class. path: its own path in the model that was patched. role: "encoder" or "decoder".
    components: kind and path of each of its position components.
    attentions, cross_attentions: its attentions to its own states, and to another stack's.
    order_sensitive: what else sees the order of tokens in its layers, and stays as it is.
    masks: names of the functions, and of the flags of its config, by which its code makes masks, causal or not.
    custom_attentions: whether an attention doesn't go through Transformers' attention interface.
    axes: number of coordinates of a token. extra_tokens: number of tokens before and after the patches of an image.
    windows: whether attentions see windows of the image. patch_projection: path of the convolution whose outputs are the
        patches.
    flattens_ids: whether it takes ids of more dimensions than `[B, L]` as one text in each row.
    settings: name and value of what its config says of positions, by which its code may choose others (Falcon's `alibi`).
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

    @classmethod
    def parse(cls, given: Any) -> "StackPlan":
        """Raises ValueError for anything that `to_dict` doesn't write."""
        kinds, needed = get_type_hints(cls), {each.name for each in fields(cls) if each.default is MISSING}
        if not isinstance(given, dict) or not needed <= {*given} <= {*kinds}:
            raise ValueError(
                f"position_plan is written by patch and not to be edited, but has {short_repr(given)}: restore it "
                f"({', '.join(kinds)}), or set it to None: hf_posenc finds the parts again"
            )
        return cls(**{name: checked_value(f"position_plan.{name}", value, kinds[name]) for name, value in given.items()})

    def to_dict(self) -> dict[str, Any]:
        """What differs from the defaults, as JSON has it."""
        return {
            each.name: json.loads(json.dumps(value))
            for each in fields(self)
            if (value := getattr(self, each.name)) != each.default
        }

    @property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        return self.attentions, self.cross_attentions, self.order_sensitive


def plans_of(config: Any) -> tuple[StackPlan, ...]:
    """The plans that a config has; none if it was made from scratch, or saved by version 0.1.

    Raises ValueError for malformed ones.
    """
    given = getattr(config, PLAN, None)
    if given is not None and not isinstance(given, list):
        raise ValueError(f"position_plan={short_repr(given)}: allowed is a list, as patch writes it, or None")
    refuse_oversized(given)
    return tuple(map(StackPlan.parse, given or ()))


@dataclass(frozen=True)
class OriginalSpec:
    """Facts of the stock model that `unpatch` needs.

    name_or_path: the stock model's id on the Hub; empty if it was loaded from elsewhere.
    rows: the stock config's own length field: the rows of its position table, if it has one.
    kept: whether the host's learned positions are kept as `posenc.original.*`.
    fingerprint: a hash of the weights that were patched.
    max_seq_length: of the SentenceTransformer in which it was patched; written only where it was one.
    """

    name_or_path: str
    rows: int | None
    kept: bool
    fingerprint: str
    max_seq_length: int | None = None

    @classmethod
    def parse(cls, given: Any) -> "OriginalSpec | None":
        """Raises ValueError for anything that `to_dict` doesn't write."""
        if given is None:
            return None
        kinds = {"name_or_path": (str,), "rows": (int, type(None)), "kept": (bool,), "fingerprint": (str,)}
        optional = {"max_seq_length": (int,)}
        if (
            not isinstance(given, dict)
            or not {*kinds} <= {*given} <= {*kinds, *optional}
            or not all(type(value) in {**kinds, **optional}[key] for key, value in given.items())
        ):
            raise ValueError(
                f"position_encoding['original'] is written by patch and not to be edited, but reads {short_repr(given)}: "
                f"restore it ({', '.join(kinds)}), or set it to None, which only unpatch needs"
            )
        checked_max_length(given["rows"])
        # A folder's name, as earlier versions wrote it, says something about a machine, and nothing elsewhere.
        return cls(**{**given, "name_or_path": given["name_or_path"] if HUB_ID.fullmatch(given["name_or_path"]) else ""})

    def to_dict(self) -> dict[str, Any]:
        written = asdict(self)
        if self.max_seq_length is None:
            del written["max_seq_length"]
        return written


@dataclass(frozen=True)
class Calibration:
    """What `convert` measured. A model with it has an Offset wherever the host's positions contributed something.

    texts, tokens: how many the model was calibrated on; tokens without padding.
    length: the longest of the texts in tokens.
    kl_before, kl_after: by attention, in order, the mean Kullback-Leibler divergence of a query's attention in the model from
        that in the original, in nats; before with the encoding's initial values, on the same inputs.
    agreement_before, agreement: the mean cosine of the model's token states with the original's, just patched and calibrated.
    held_out: number of texts that the agreement was measured on, which the model was not calibrated on; 0: on the same texts.
    """

    texts: int
    tokens: int
    length: int
    kl_before: tuple[float, ...]
    kl_after: tuple[float, ...]
    agreement_before: float
    agreement: float
    held_out: int

    @classmethod
    def parse(cls, given: Any) -> "Calibration | None":
        """Raises ValueError for anything that `to_dict` doesn't write."""
        if given is None:
            return None
        kinds = get_type_hints(cls)
        if not isinstance(given, dict) or given.keys() != kinds.keys():
            raise ValueError(
                f"position_encoding['calibration'] is written by convert and not to be edited, but reads {short_repr(given)}: "
                f"restore it ({', '.join(kinds)})"
            )
        return cls(**{name: checked_value(f"calibration.{name}", given[name], kind) for name, kind in kinds.items()})

    def to_dict(self) -> dict[str, Any]:
        return {name: [*value] if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class PositionSpec:
    """A model's encoding and where it acts.

    type: canonical name of the encoding, "a+b" for a composition.
    options: its options, checked, all written out; of a composition a dict for each part.
    layers: part -> the layers in which it acts. A part that isn't named acts in all.
    inject: where vectors are added, one of INJECT.
    max_length: the promised longest input in tokens; None: no limit for computed encodings, the host's own for tables.
    original: of the stock model, for `unpatch`; None in a model made from scratch.
    calibration: of a model made by `convert`; else None.
    submodel: the dotted path, within the base model, of the one model that has the encoding in a host made of several.
    where: in a model of an encoder and a decoder where the encoding acts, in the order of WHERE; empty: in the self-attention
        of both. What isn't named keeps the host's own positions.
    others: where in place of this encoding another one acts, or this one with other options -> that one.
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

    @classmethod
    def parse(cls, given: Any, in_code: bool = False) -> "PositionSpec":
        """The spec of a name, or of a dict as it stands in config.json.

        in_code: whether it is an argument in a program, where strings may name files (see `canonical`).

        Raises ValueError for anything malformed, and for a config that names a file.
        """
        refuse_oversized(given)
        given = with_current_keys(given)
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
        )
        spec = replace(spec, others={name: spec._other(name, value, in_code) for name, value in where.items() if value})
        if spec.type not in (each.type for each in spec.all_encodings):
            raise ValueError(
                f"{spec.type!r} acts nowhere, since where={short_repr(placement['where'])} names another encoding for each "
                "place: leave it one of them, where={'encoder': {}, …}, or give one of theirs in its place"
            )
        spec._check_placement()
        return spec

    def _other(self, name: str, given: Any, in_code: bool) -> "PositionSpec":
        """The encoding of one of WHERE, from a name, a dict with "type", or other options for this encoding."""
        given = {"type": given} if isinstance(given, str) else given
        if not isinstance(given, dict):
            raise ValueError(
                f"where[{name!r}]={short_repr(given)}: give a name, a dict of an encoding, or options for this one"
            )
        if placed := sorted({*PLACEMENT} & {*given}):
            raise ValueError(f"where[{name!r}] has {placed[0]!r}, which stands beside where: it holds for the whole model")
        if "type" not in given:
            given = {"type": self.type, **overridden(self.encoding, options_of(self._written()), given)}
        return PositionSpec.parse(given, in_code)

    def _check_placement(self) -> None:
        if self.inject not in INJECT:
            raise ValueError(
                f"inject={short_repr(self.inject)}{did_you_mean(self.inject, INJECT)}: allowed is "
                f"{', '.join(map(repr, INJECT))}"
            )
        if self.submodel is not None and not (isinstance(self.submodel, str) and SUBMODEL.fullmatch(self.submodel)):
            raise ValueError(
                f"submodel={short_repr(self.submodel)}: allowed is the dotted path of a model within the base model"
            )
        between = self.encoding_for("cross")
        if between is not None and "embed" in between.encoding.mechanisms():
            raise ValueError(
                f"where='cross': {between.type!r} adds vectors to the tokens of a stack, and none between two stacks: take an "
                "encoding that rotates or biases there, where={'cross': 'alibi', …}"
            )
        embeds = "embed" in self.encoding.mechanisms()
        if self.inject != "input" and not embeds:
            raise ValueError(
                f"inject={self.inject!r} says where vectors are added, but {self.type!r} makes none: leave it out, or take an "
                "encoding which embeds"
            )
        for part in self.layers:
            verbs = self.parts[part].mechanisms()
            if not verbs:
                raise ValueError(f"layers of {part!r}: it does nothing in any layer; leave layers out")
            if "embed" in verbs and self.inject == "input":
                raise ValueError(
                    f"layers of {part!r}: its vectors are added to the input, before any layer; take inject='every_layer' or "
                    "inject='after_attention', or leave layers out"
                )

    @property
    def encoding(self) -> Any:
        """The class of the encoding."""
        return encoding_class(self.type)

    @property
    def parts(self) -> Mapping[str, Any]:
        """The classes which the encoding is made of, by name: itself, or the parts of a composition."""
        return self.encoding.component_classes()

    def mechanisms(self, part: str) -> tuple[str, ...]:
        """The verbs by which a part acts under its options."""
        return self.parts[part].mechanisms(self.encoding.by_part(dict(self.options))[part])

    @property
    def replaces_all(self) -> bool:
        """Whether no stack keeps positions of the host's own, so that the config's length is this encoding's."""
        return self.submodel is None and (not self.where or {"encoder", "decoder"} <= {*self.where})

    def encoding_for(self, where: str) -> "PositionSpec | None":
        """What acts in one of WHERE, or None."""
        if where not in (self.where or ("encoder", "decoder")):
            return None
        other = self.others.get(where)
        if other is None:
            return self
        return replace(self, type=other.type, options=other.options, layers=other.layers, where=(), others={})

    @property
    def all_encodings(self) -> tuple["PositionSpec", ...]:
        """This encoding, unless another one is in its place everywhere, and the others."""
        own = () if self.others and {*self.others} == {*self.where} else (self,)
        return (*own, *self.others.values())

    def _written(self) -> dict[str, Any]:
        """The encoding without its placement, but for `layers`."""
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
        }

    def parts_by_layer(self, count: int, attentions: Collection[int]) -> list[tuple[str, ...]]:
        """Which parts act in each of a stack's `count` layers, of which `attentions` have an attention.

        Raises ValueError for layers that don't exist or have no attention, and where parts with layers of their own overlap.
        """
        chosen = {part: _resolved(part, layers, count) for part, layers in self.layers.items()}
        for part, indices in chosen.items():
            if missing := [index for index in indices if index not in attentions]:
                raise ValueError(
                    f"layers of {part!r} name {', '.join(map(str, missing))}, in which this model has no attention: it has one "
                    f"in {', '.join(map(str, sorted(attentions)))}, counted from 0"
                )
        owners: dict[int, str] = {}
        for part, indices in chosen.items():
            for index in indices:
                if owners.setdefault(index, part) != part:
                    raise ValueError(
                        f"layers overlap: {owners[index]!r} and {part!r} both name layer {index}; give each layer to one of "
                        "them, or leave layers out where two should act together"
                    )
        return [tuple(part for part in self.parts if index in chosen.get(part, (index,))) for index in range(count)]


def read(config: Any) -> PositionSpec:
    """The spec of a config whose `position_encoding` is set, parsed only if it has changed since it was last read."""
    known = vars(config).get(PARSED)
    if known is None or known.to_dict() != config.position_encoding:
        known = vars(config)[PARSED] = PositionSpec.parse(config.position_encoding)
    return known


def write(config: Any, spec: PositionSpec) -> None:
    """Set a config's `position_encoding`."""
    config.position_encoding, vars(config)[PARSED] = spec.to_dict(), spec


def change_class(config: Any, cls: Any) -> None:
    """Make a config one of another class, with the model type of that. A config that was loaded has its own as an attribute,
    by which Transformers renames weights when a model is saved."""
    config.__class__ = cls
    vars(config).pop("model_type", None)


def make_stock(config: Any) -> None:
    """Make a config, and those within it, the host's own: of its class, with its length, without `position_encoding`."""
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


def make_parts_stock(config: Any) -> None:
    """Make the configs within a config the host's own."""
    for part in (getattr(config, name, None) for name in config.sub_configs):
        if isinstance(part, PreTrainedConfig):
            make_stock(part)


def with_current_keys(given: Any) -> Any:
    """A `position_encoding` with the keys of this version: version 0.1 wrote "host" where this one writes "original"."""
    if not isinstance(given, dict) or "host" not in given:
        return given
    if "original" in given:
        raise ValueError("position_encoding has 'host' and 'original', the old and the new name of one key: leave 'host' out")
    return {"original" if key == "host" else key: value for key, value in given.items()}


def merged(saved: Any, given: Any) -> Any:
    """`position_encoding` as saved, with the keys given on loading.

    Raises ValueError for another type than was saved, and where what was saved names a file.
    """
    if saved == given:
        return saved
    if saved is not None:
        PositionSpec.parse(saved)
    saved, given = ({"type": each} if isinstance(each, str) else with_current_keys(each) for each in (saved, given))
    if not isinstance(given, dict) or not isinstance(saved, dict):
        return saved if given is None else given
    there, wanted = encoding_class(saved.get("type")).type, encoding_class(given.get("type")).type
    if there != wanted:
        raise ValueError(
            f"this checkpoint was saved with the {there!r} encoding, not {wanted!r}: load it as it is, "
            f"then model = hf_posenc.patch(hf_posenc.unpatch(model), {wanted!r})"
        )
    cls = encoding_class(there)
    options: dict[str, Any] = {}
    for each in (saved, given):
        own = {key: value for key, value in options_of(each).items() if key not in PLACEMENT}
        options = overridden(cls, options, overridden(cls, cls.preset(each["type"]), own))
    placement = {key: value for key, value in {**saved, **given}.items() if key in PLACEMENT}
    return {"type": there, **options, **placement}


def _checked_where(given: Any) -> dict[str, Any]:
    """One of WHERE -> its own encoding or options, or nothing. Raises ValueError for other names."""
    if given is None:
        return {}
    found = {given: None} if isinstance(given, str) else given
    if isinstance(found, (list, tuple)) and all(isinstance(name, str) for name in found):
        found = dict.fromkeys(found)
    if isinstance(given, dict) and None in given.values():
        raise ValueError(f"where={short_repr(given)}: None is no encoding; leave out what is to keep the host's own positions")
    if not isinstance(found, dict) or not found or not {*found} <= {*WHERE}:
        unknown = next((name for name in found if name not in WHERE), None) if isinstance(found, dict) else None
        near = did_you_mean(unknown, WHERE) if isinstance(unknown, str) else ""
        raise ValueError(
            f"where={short_repr(given)}{near}: allowed is one or more of {', '.join(map(repr, WHERE))}, or a dict of these "
            "with an encoding for each"
        )
    return found


def _without_layers(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The encoding without `layers`, and part -> layers."""
    if not isinstance(given.get("type"), str):
        return given, {}
    encoding = encoding_class(given["type"])
    if "layers" in given and encoding.component_classes().keys() != {encoding.type}:
        names = " or ".join(f"{part}__layers=…" for part in encoding.component_classes())
        raise ValueError(f"layers={short_repr(given['layers'])} of {given['type']!r}: name the part it belongs to, {names}")
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
            raise ValueError(f"layers={short_repr(given)} of {part!r} name a layer twice: name each once")
        return tuple(given)
    raise ValueError(
        f'layers={short_repr(given)} of {part!r}: allowed is a slice as text ("3::4": from layer 3 on, every fourth) or a '
        "list of layer indices"
    )


def _resolved(part: str, layers: Layers, count: int) -> tuple[int, ...]:
    """Indices from 0. Raises ValueError where they name no layer of a stack of `count`."""
    if isinstance(layers, str):
        indices = tuple(range(count)[slice(*(int(number) if number else None for number in layers.split(":")))])
        missing: Any = [] if indices else layers
    else:
        indices = tuple(sorted(index % count for index in layers if -count <= index < count))
        missing = [index for index in layers if not -count <= index < count]
        if not missing and len({*indices}) < len(indices):
            raise ValueError(f"layers={[*layers]} of {part!r} name a layer twice in a model of {count}: name each once")
    if missing:
        raise ValueError(f"layers={missing!r} of {part!r} name no layer: this model has {count}, from 0 to {count - 1}")
    return indices
