"""`inspect`: a report on the positions of a model."""

import copy
import itertools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import MODEL_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER
from transformers.utils import CONFIG_NAME, find_adapter_config_file

from hf_posenc.architectures import detection, structure
from hf_posenc.architectures.components import UnsupportedModelError
from hf_posenc.attention.dispatch import AttentionState
from hf_posenc.configuration import Calibration, PositionSpec, Windows, dropped_v4_relative_within
from hf_posenc.encodings import options_of, portable, short_repr, without_values
from hf_posenc.modeling.embedding import PositionEmbedding
from hf_posenc.modeling.position_ids import longest_input
from hf_posenc.modeling.sentence_transformers import is_sentence_transformer
from hf_posenc.serialization.saved_files import explained, load_config, read_config, read_json_object
from hf_posenc.signatures import reads_tokens


@dataclass(frozen=True)
class Place:
    """The encoding in one place of an encoder-decoder: its canonical name, its options, and the layers of its parts."""

    encoding: str
    options: dict[str, Any]
    layers: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Report:
    """The result of `inspect`.

    model_class: name of the model's class.
    encoding: canonical name of the encoding. For an original model, the equivalent of its positions ("learned"; MPNet has
        "learned+t5").
    options: options of the encoding. For an original model with RoPE, its `rope_parameters`.
    locations: mechanism -> dotted paths of the modules where it applies.
    layers: encoding, or part of a composition -> its layers. Empty if it applies in all layers.
    max_length: maximum input length in tokens. None: no limit.
    can_unpatch: whether `unpatch` can restore the original positions.
    ignored: settings of the config that Transformers ignores.
    calibration: for a model from `convert`, how closely it matches the original. None for other models.
    order_sensitive: class -> paths of other modules that depend on token order: linear attention, state spaces, convolutions.
        `patch` doesn't change them.
    where: "encoder", "decoder", or "cross" -> its encoding, if `patch` was called with `where`. Empty otherwise.
    windows: the windows in which longer inputs are read. None if there are none.
    places: "encoder", "decoder", or "cross" -> its encoding, if these differ. Empty otherwise.
    calibrated: path of a stack -> number of its attentions in the `calibration`, if there are several stacks.
    submodels: path -> report on each patched submodel, if there are several. The fields above are those of the first, except
        `can_unpatch`.
    """

    model_class: str
    encoding: str
    options: dict[str, Any]
    locations: dict[str, tuple[str, ...]]
    max_length: int | None
    can_unpatch: bool
    ignored: tuple[str, ...]
    layers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    calibration: Calibration | None = None
    order_sensitive: dict[str, tuple[str, ...]] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    windows: Windows | None = None
    places: dict[str, Place] = field(default_factory=dict)
    calibrated: dict[str, int] = field(default_factory=dict)
    submodels: dict[str, "Report"] = field(default_factory=dict)

    @property
    def model_max_length(self) -> int:
        """The `model_max_length` for a tokenizer of this model."""
        return VERY_LARGE_INTEGER if self.max_length is None else self.max_length

    def __str__(self) -> str:
        rows = self._rows()
        if self.submodels:
            rows = [row for path, each in self.submodels.items() for row in [("submodel", path), *each._rows()]]
        width = max(len(label) for label, _ in rows) + 1
        return "\n".join([self.model_class, *(f"  {f'{label}:':{width}} {value}" for label, value in rows)])

    def _rows(self) -> list[tuple[str, str]]:
        """The labels and values of the printed report."""
        layers = {f"{part} layers": numbers for part, numbers in self.layers.items()}
        rows = [("encoding", _described(self.encoding, self.options))]
        if self.places:
            rows = [(f"{name} encoding", _described(each.encoding, each.options)) for name, each in self.places.items()]
            of_places = ((f"{name} {part}", each.layers[part]) for name, each in self.places.items() for part in each.layers)
            layers = {f"{label} layers": numbers for label, numbers in of_places}
        rows += [
            ("maximum length", "no limit" if self.max_length is None else f"{self.max_length} tokens"),
            *(("applied in", f"{_first(paths)} ({mechanism})") for mechanism, paths in self.locations.items()),
            *((label, ", ".join(map(str, numbers))) for label, numbers in layers.items()),
        ]
        if self.windows is not None:
            rows.append(("windows", f"{self.windows.window} tokens, stride {self.windows.stride}"))
        if self.where and not self.places:
            rows.append(("parts", ", ".join(f"{name} ({kind})" for name, kind in self.where.items())))
        if found := self.calibration:
            where = f"{found.held_out} held-out inputs" if found.held_out else "the same inputs"
            rows += [
                ("calibrated on", f"{found.texts} inputs of up to {found.length} tokens, {found.tokens:,} in total"),
                *self._divergences(found),
                ("cosine", f"{found.agreement_before:.3f} before, {found.agreement:.3f} after (hidden states of {where})"),
            ]
        rows += [
            ("order-sensitive", f"{kind} in {_first(paths)} (not changed)") for kind, paths in self.order_sensitive.items()
        ]
        rows += [("config ignored", note) for note in self.ignored]
        if self.can_unpatch:
            rows.append(("unpatch", "available (original positions saved)"))
        return rows

    def _divergences(self, found: Calibration) -> list[tuple[str, str]]:
        """The rows with the divergences of each stack."""
        values = iter(zip(found.kl_before, found.kl_after, strict=True))
        counts = self.calibrated or {"": len(found.kl_before)}
        by_stack = {path: [*zip(*itertools.islice(values, count), strict=True)] for path, count in counts.items()}
        return [
            (
                "divergence",
                f"{_listed(before)} before, {_listed(after)} after (attention{f' in {path}' if path else ''}, by layer)",
            )
            for path, (before, after) in by_stack.items()
        ]


def _described(encoding: str, options: dict[str, Any]) -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return encoding + (f" ({given})" if given else "")


def _first(paths: tuple[str, ...]) -> str:
    return paths[0] + (f" and {len(paths) - 1} more" if paths[1:] else "")


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def inspect(model: nn.Module | PreTrainedConfig | str | os.PathLike[str], *, submodel: str | None = None) -> Report:
    """Report a model's encoding, where it applies, its maximum length, and the settings that Transformers ignores.

    Args:
        model: an original or patched model, a SentenceTransformer, a PEFT model, or another wrapper of a model. Or a config, a
            local path, or a Hub ID, whose weights aren't read. For a PEFT adapter, the base model is reported.
        submodel: in a composite model (CLIP, LLaVA, an EncoderDecoderModel), the dotted path of the submodel to report on, as
            in `patch`. The paths in the report are relative to it. Without it, the error for a composite model lists the paths.

    Raises:
        ValueError: the model has positional components that hf_posenc can't replace. It is a composite model, and `submodel` is
            missing or doesn't exist.
    """
    whole = _unwrapped(model) if isinstance(model, nn.Module) else without_weights(model)
    return _report(whole if submodel is None else detection.submodel(whole, submodel))


def supported_length(model: PreTrainedModel) -> int | None:
    """The maximum length of a model in tokens. None: no limit, or hf-posenc doesn't support the model."""
    try:
        return inspect(model).max_length
    except UnsupportedModelError:
        return None


def _report(model: PreTrainedModel) -> Report:
    config = model.config
    if isinstance(model, PositionEmbedding):
        options = options_of(portable(config.position_encoding))
        kind = config.position_encoding["type"]
        return Report(type(model).__name__, kind, options, {"embed": ("posenc",)}, config.max_length, False, ())
    stacks = {name: module for name, module in model.named_modules() if structure.is_patched(module)}
    if not stacks:
        return _stock_report(model)
    if not hasattr(config, "position_spec"):
        raise _several_models(model, detection.submodels_of(model))
    parts = structure.patched_parts(model, config.position_spec)
    parts.sort(key=lambda each: not reads_tokens(each[0]))
    if len(parts) > 1:
        # By name, because a model may share its submodels.
        of_part = {id(each): str(own.submodel) for inner, own in parts for each in inner.modules()}
        reports = {
            str(own.submodel): _patched_report(
                model, {name: stack for name, stack in stacks.items() if of_part[id(stack)] == own.submodel}
            )
            for _, own in parts
        }
        can_unpatch = all(each.can_unpatch for each in reports.values())
        return replace(next(iter(reports.values())), submodels=reports, can_unpatch=can_unpatch)
    return _patched_report(model, stacks)


def _patched_report(model: PreTrainedModel, stacks: Mapping[str, Any]) -> Report:
    """The report on the patched stacks of a model, or of one of its submodels, by path."""
    spec = next(iter(stacks.values())).config.position_spec
    where = {name: there for name in spec.where if (there := spec.encoding_for(name)) is not None}
    verbs = dict.fromkeys(verb for each in spec.all_encodings for verb in each.encoding.mechanisms(each.options))
    return Report(
        model_class=type(model).__name__,
        encoding=spec.type,
        options=portable(dict(spec.options)),
        locations={
            verb: tuple(
                f"{name}.{path}".lstrip(".")
                for name, stack in stacks.items()
                for path in stack.posenc_state.locations.get(verb, ())
            )
            for verb in verbs
        },
        max_length=min((length for stack in stacks.values() if (length := longest_input(stack))), default=None),
        can_unpatch=bool(spec.original and spec.original.kept),
        ignored=_ignored(model),
        layers=_layers_in(stacks.values(), next((name for name in where if name not in spec.others), ""), spec),
        calibration=spec.calibration,
        windows=spec.windows,
        where={name: there.type for name, there in where.items()},
        places={
            name: Place(there.type, portable(dict(there.options)), _layers_in(stacks.values(), name, there))
            for name, there in where.items()
            if spec.others
        },
        calibrated=_calibrated(stacks, spec.calibration),
        order_sensitive=_stays((name, detection.order_aware_modules(stack)) for name, stack in stacks.items()),
    )


def _unwrapped(module: nn.Module) -> PreTrainedModel:
    """The Transformers model within the wrappers of other libraries."""
    inner: Any = module
    while not isinstance(inner, PreTrainedModel):
        if is_sentence_transformer(inner):
            inner = inner[0].model
        elif hasattr(inner, "get_base_model"):  # PEFT
            inner = inner.get_base_model()
        else:  # torch.compile, DDP, our TokenPositionEmbedding
            parts = (getattr(inner, name, None) for name in ("_orig_mod", "module", "positions"))
            found = next((part for part in parts if isinstance(part, nn.Module)), None)
            if found is None:
                raise ValueError(
                    f"{type(module).__name__} neither is nor wraps a Transformers model. Inspect the model itself."
                )
            inner = found
    return inner


def without_weights(source: Any) -> PreTrainedModel:
    """Build the model of a config, a directory or a Hub id on the meta device. Unlike Accelerate's `init_empty_weights`, this
    has no effect on other threads."""
    whose: Any = "this config"
    if isinstance(source, (str, os.PathLike)):
        whose = source
        if not read_config(source):
            adapter = find_adapter_config_file(str(source))
            if adapter is None:
                raise ValueError(f"{source} has no {CONFIG_NAME}. Pass the local path or Hub ID of a saved model.")
            source = _base_of(Path(adapter))
        source = load_config(source)
    if not isinstance(source, PreTrainedConfig):
        raise ValueError(f"Pass a model, or the config, local path, or Hub ID of one, not {source!r}.")
    with torch.device("meta"), without_values(), explained(f"the model of {whose}"):
        if type(source) in MODEL_MAPPING:
            return AutoModel.from_config(source)
        # EncoderDecoderModel and its like are in no list of the Auto classes.
        built = next(filter(None, (getattr(transformers, name, None) for name in source.architectures or ())), None)
        if built is None:
            raise ValueError(f"Transformers has no class for {type(source).__name__}. Pass the model itself.")
        return built(source)


def _base_of(adapter: Path) -> str:
    """The model that an adapter's config names: a Hub id, or a directory."""
    base = read_json_object(adapter).get("base_model_name_or_path")
    if not isinstance(base, str) or os.path.exists(base) and not os.path.isdir(base):
        raise ValueError(
            f"{adapter} has base_model_name_or_path={short_repr(base)}, which must be a Hub ID or a directory. Restore the "
            "file, or inspect the base model."
        )
    return base


def _layers_in(stacks: Iterable[PreTrainedModel], place: str, spec: PositionSpec) -> dict[str, tuple[int, ...]]:
    """Part -> its layers in a place of an encoder-decoder, or if that is empty, in the first stack."""
    role = "decoder" if place == "cross" else place
    stack = next(each for each in stacks if not role or detection.role_of(each) == role)
    return {part: _layers_of(stack, part, place == "cross") for part in spec.layers}


def _calibrated(stacks: Mapping[str, Any], found: Calibration | None) -> dict[str, int]:
    """Path of each stack -> number of its self-attentions, encoders first, if there are several in a calibration."""
    order = sorted(stacks, key=lambda path: detection.role_of(stacks[path]) != "encoder")
    counts = {
        path: sum(isinstance(state, AttentionState) and not state.is_cross for state in _states(stacks[path]).values())
        for path in order
    }
    known = found is not None and len(counts) > 1 and sum(counts.values()) == len(found.kl_after)
    return counts if known else {}


def _states(stack: nn.Module) -> dict[str, Any]:
    """Path -> `posenc_state` of the modules that have one."""
    states = {path: getattr(module, "posenc_state", None) for path, module in stack.named_modules()}
    return {path: state for path, state in states.items() if state is not None}


def _layers_of(stack: PreTrainedModel, part: str, is_cross: bool) -> tuple[int, ...]:
    modules, states = dict(stack.named_modules()), _states(stack).items()
    parts = {path: state.parts for path, state in states if isinstance(state, AttentionState) and state.is_cross == is_cross}
    layers = structure.layers_and_blocks(modules, parts)
    return tuple(int(layer.rpartition(".")[2]) for path, (layer, _) in layers.items() if part in parts[path])


def _stays(stacks: Iterable[tuple[str, Mapping[str, nn.Module]]]) -> dict[str, tuple[str, ...]]:
    """Class -> paths of the order-sensitive modules of all stacks."""
    found: dict[str, tuple[str, ...]] = {}
    for name, modules in stacks:
        for path, module in modules.items():
            kind = type(module).__name__
            found[kind] = (*found.get(kind, ()), f"{name}.{path}".lstrip("."))
    return found


def _stock_report(model: PreTrainedModel) -> Report:
    try:
        stacks = detection.find_all(model)
    except UnsupportedModelError as refused:
        if refused.reason == detection.UNKNOWN and (ignored := _ignored(model)):  # ESM without its vectors ignores order
            return Report(type(model).__name__, "none", {}, {}, None, False, ignored)
        if not refused.submodels:
            raise
        raise _several_models(model, refused.submodels) from None
    locations: dict[str, tuple[str, ...]] = {}
    for path, found in reversed(stacks.items()):
        for component in found.components:
            locations[component.verb] = (*locations.get(component.verb, ()), f"{path}.{component.path}".lstrip("."))
    lengths = [found.usable_length for found in stacks.values() if found.usable_length is not None]
    return Report(
        model_class=type(model).__name__,
        encoding="+".join(sorted({each.encoding for found in stacks.values() for each in found.components})) or "none",
        options=copy.deepcopy(getattr(model.config, "rope_parameters", None) or {}),
        locations=locations,
        max_length=min(lengths, default=None),
        can_unpatch=False,
        ignored=_ignored(model),
        order_sensitive=_stays((path, detection.order_aware_modules_of(found)) for path, found in stacks.items()),
    )


def _several_models(model: PreTrainedModel, submodels: tuple[str, ...]) -> UnsupportedModelError:
    """The error for a composite model, whose submodels have positions of their own."""
    named = " or ".join(f"submodel={path!r}" for path in submodels)
    return UnsupportedModelError(
        f"{type(model).__name__} contains several models with their own position encodings. Choose one: {named} "
        "(`--submodel` of `hf-posenc inspect`).",
        submodels=submodels,
    )


def _ignored(model: PreTrainedModel) -> tuple[str, ...]:
    wrong = "" if hasattr(model.config, "position_spec") else ", so its outputs are wrong"
    return tuple(
        f"position_embedding_type={kind!r}: Transformers 5 drops the relative vectors that this model was trained "
        f"with{wrong}. Load them with hf_posenc.from_v4."
        for kind in dropped_v4_relative_within(model)
    )
