"""Derived config and model classes, which are created on first access.

`PosEnc<OriginalClass>` is a subclass of the original class that installs a position encoding in each of its stacks. The
module's `__getattr__` creates these classes by name. The Auto classes know only the names.
"""

import contextlib
import copy
import functools
import math
import re
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.cache_utils import Cache

from hf_posenc import _compat, _versions
from hf_posenc import configuration as specs
from hf_posenc.architectures import structure
from hf_posenc.architectures.components.component import Disabled, is_transformers
from hf_posenc.attention import dispatch
from hf_posenc.encodings import PositionEncoding, check_size, did_you_mean, registry
from hf_posenc.modeling import hooks, offsets
from hf_posenc.modeling.install import acting_in, install, install_across
from hf_posenc.modeling.position_ids import recorded_outer_call
from hf_posenc.serialization.copies import IS_COPY, PREFIX, TYPE_PREFIX, prefixed
from hf_posenc.serialization.mixins import EncodingConfigMixin, EncodingModelMixin
from hf_posenc.signatures import BoundCall


class PosEncConfigMixin(EncodingConfigMixin):
    """Adds `position_encoding`, validated and in canonical form, to an original config class."""

    if TYPE_CHECKING:
        position_encoding: Any

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.position_encoding is not None:
            specs.write(self, specs.PositionSpec.parse(self.position_encoding))

    @property
    def position_spec(self) -> specs.PositionSpec:
        """The parsed `position_encoding`."""
        return specs.read(self)

    def to_dict(self) -> dict[str, Any]:
        written = super().to_dict()
        written.pop(specs.PARSED, None)
        if written.get(specs.PLAN) is None:
            written.pop(specs.PLAN, None)
        if self.position_encoding is not None and self.position_spec.submodel is not None:
            # The submodel's config is saved in its original form. `position_encoding` of this config has the rest.
            stock = copy.deepcopy(self)
            specs.make_stock(stock)
            written.update({name: value for name, value in stock.to_dict().items() if name in specs.part_names(self)})
        return written

    @classmethod
    def _from_code(cls, encoding: Any) -> dict[str, Any]:
        return specs.PositionSpec.parse(encoding, in_code=True).to_dict()

    def complete(self) -> None:
        if getattr(self, specs.PLAN) or self._not_saved():
            return
        from hf_posenc.architectures import detection
        from hf_posenc.modeling.parameter_sharing import build_on_meta, stock_config

        name, spec = auto_classes(self.model_type).get("AutoModel", ""), self.position_spec
        with contextlib.suppress(ValueError, AttributeError):  # no model can be built from this config
            host = getattr(sys.modules[__name__], name).original_class
            model = build_on_meta(host, stock_config(self, host))
            parts = structure.patched_parts(model, spec)
            plans = {own.submodel: detection.plan_of(detection.find_all(inner, own.where)) for inner, own in parts}
            specs.write_plans(self, plans)

    def _auto_classes(self) -> dict[str, str]:
        return {"AutoConfig": type(self).__name__, **auto_classes(self.model_type)}

    def _not_saved(self) -> str:
        host = type(self).original_class  # type: ignore[attr-defined]
        if is_transformers(host):
            return ""
        return (
            f"The class of this model is defined in {host.__module__}, which is not saved with it. Run {_versions.INSTALL}, "
            f"and import hf_posenc and {host.__module__}. Then load the model with the Auto class that its original class is "
            f"registered with, or with hf_posenc.{PREFIX}<its original class>.from_pretrained."
        )


class OriginalState(nn.Module):
    """The original learned positions, stored as buffers under their original keys for `unpatch`."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        check_size("position_encoding['original'], the original positions,", sum(map(math.prod, shapes.values())))
        for key, shape in shapes.items():
            *path, name = key.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_buffer(name, torch.empty(shape))

    def reset_parameters(self) -> None:
        """Initialize the positions like BERT, because a model created from scratch has no trained positions to keep."""
        for table in self.buffers():
            nn.init.normal_(table, std=0.02)


class _Building(threading.local):
    """The derived model that this thread is building, as `model`."""

    model: Any = None


BUILDING = _Building()


def _is_built_within_another(config: Any) -> bool:
    """Whether a derived model with this config is built by an Auto class within the original code of another derived model.

    That model has the same kind of config (ShieldGemma 2), and installs the encoding in all of its submodels.
    """
    return BUILDING.model is not None and type(getattr(BUILDING.model, "config", None)) is type(config)


class PosEncModelMixin(EncodingModelMixin):
    """Installs an encoding in each stack of an original class when a model is built."""

    original_class: type[PreTrainedModel]
    _token_stack: tuple[Any, ...] = ()
    """The stack within this model that reads its tokens. The tuple keeps it from becoming a child module."""
    initialized_whole = (PositionEncoding, OriginalState, offsets.MeanOffset)
    config: Any

    def __init__(self, config: Any = None, *args: Any, **kwargs: Any) -> None:
        if _is_built_within_another(config):
            super().__init__(config, *args, **kwargs)
            return
        if isinstance(config, PosEncConfigMixin) and specs.part_names(config):
            # This model changes the sub-configs into derived ones. They may come from a model with another encoding.
            config = copy.deepcopy(config)
            specs.make_parts_stock(config)
        outer = BUILDING.model
        BUILDING.model = self
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            BUILDING.model = outer

    @classmethod
    def change(cls, model: Any) -> None:
        """Change an original model, whose config is already derived, into one of this class."""
        outer = BUILDING.model
        model.__class__, BUILDING.model = cls, model
        try:
            model.post_init()
        finally:
            BUILDING.model = outer

    def post_init(self) -> None:
        if BUILDING.model is not self and _is_built_within_another(self.config):
            super().post_init()
            return
        if (calls := vars(self).get(DEFERRED_POST_INIT)) is not None:
            calls.append(self)
            return
        # The encoding precedes the original post_init, which initializes, ties, and counts all parameters.
        self._install_encoding()
        super().post_init()

    def _install_encoding(self) -> None:
        """Install the encoding in all stacks of this model, which its original code has built from original submodels."""
        if self.config.position_encoding is None:
            raise ValueError(
                f"{type(self).__name__} needs config.position_encoding, a name or a dict. "
                "To give a pretrained model another encoding, load it and call hf_posenc.patch(model, encoding)."
            )
        spec = self.config.position_spec
        stacks, within = dict[int, structure.Structure](), dict[int, specs.PositionSpec]()
        modules = structure.modules_by_path(self).values()
        parts = structure.patched_parts(self, spec)
        if absent := [str(path) for path in spec.by_submodel if path not in [own.submodel for _, own in parts]]:
            ignored = getattr(self, "_keys_to_ignore_on_load_unexpected", None) or ()
            self._keys_to_ignore_on_load_unexpected = [*ignored, *(rf"(^|\.){re.escape(path)}\." for path in absent)]
        for inner, own in parts:
            stacks |= {id(found.stack): found for found in self._stacks(inner, own).values()}
            within |= dict.fromkeys(map(id, modules if inner is self else inner.modules()), replace(own, submodel=None))
        models: list[Any] = [module for module in modules if isinstance(module, PreTrainedModel)]
        for module in reversed(models):
            # A model around a submodel becomes derived if its config class is this model's, as the base model's is.
            ours = id(module) in within or type(module.config) is type(self.config)
            if ours and (id(module) in stacks or any(id(part) in stacks for part in module.modules())):
                # DETR's encoder has the whole model's config, which has the encoding already.
                if id(module) in within and module is not self and type(module.config) is not type(self.config):
                    module.config.__class__ = derive(type(module.config))
                    specs.write(module.config, within[id(module)])
                module.__class__ = derive(type(module))
                _compat.record_outputs(module)  # by class: __init__ registered the original class
                if id(module) in stacks:
                    _install(stacks[id(module)], within[id(module)])
                module._token_stack = () if id(module) in stacks else _token_stack_of(module, stacks.values())
                if module is not self:
                    module.original_class.post_init(module)
        self._check_attention()

    def _stacks(self, inner: Any, spec: specs.PositionSpec) -> dict[str, structure.Structure]:
        """The stacks by path, as described by the config's plan. If the config has no plan, they are detected.

        A config without a plan gets one when it is saved. A plan may not fit because it was made with another version of
        Transformers, whose modules differ, or for another class with the same config (Dinov2Model for Dinov2Backbone). With
        hf-posenc, they are detected again.

        Raises ValueError if a plan doesn't fit and hf-posenc is missing, or if the config records no other version.
        """
        if plans := specs.plans_of(self.config, spec.submodel):
            try:
                return structure.planned_in(inner, plans, spec.where)
            except ValueError as misfit:
                made_with = self.config.transformers_version
                if made_with in (None, transformers.__version__) and (IS_COPY or not isinstance(misfit, structure.OtherStack)):
                    raise
                if IS_COPY:
                    raise ValueError(
                        f"The model was saved with Transformers {made_with}, whose {type(inner).__name__} has other modules "
                        f"than that of {transformers.__version__}. Install hf_posenc ({_versions.INSTALL}) and import it "
                        f"before loading the model; it finds the modules again. Or pip install transformers=={made_with}."
                    ) from misfit
                setattr(self.config, specs.PLAN, None)
        from hf_posenc.architectures import detection
        from hf_posenc.modeling import encoding_checks

        stacks = detection.find_all(inner if spec.submodel is None else detection.submodel(self, spec.submodel), spec.where)
        encoding_checks.check(stacks.values(), spec)
        return stacks

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """The names of tied weights, without those of disabled positions, which UDOP ties."""
        tied: Any = getattr(self, "_tied_weights_keys", None)
        if isinstance(tied, dict):
            modules = structure.modules_by_path(self)
            gone = {name for name in (*tied, *tied.values()) if isinstance(modules.get(name.rpartition(".")[0]), Disabled)}
            self._tied_weights_keys = {name: other for name, other in tied.items() if gone.isdisjoint((name, other))}
        return super().get_expanded_tied_weights_keys(all_submodels)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (OriginalState, offsets.MeanOffset)):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a patched checkpoint, or an original one with `position_encoding=…`, which is the same as `patch` after loading.

        A derived `config` can also contain the encoding.
        """
        if IS_COPY:  # this class was saved with a checkpoint, and loads only that one
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        from hf_posenc.modeling import loading

        kwargs, spec = loading.resolved(cls, pretrained_model_name_or_path, kwargs)
        if spec is None:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        kwargs.setdefault("use_safetensors", True)
        from hf_posenc.modeling import parameter_sharing

        with parameter_sharing.WithoutInitialization():
            loaded = cls.original_class.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model, *info = loaded if isinstance(loaded, tuple) else (loaded,)
        parameter_sharing.refuse_wrapped(model)
        patched = parameter_sharing.to_derived(model, cls, spec, just_loaded=True)
        return (patched, *info) if info else patched

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        super()._set_gradient_checkpointing(*args, **kwargs)
        hooks.wrap_gradient_checkpointing(self)

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        configs = {id(module.config): module.config for module in self.modules() if isinstance(module, PreTrainedModel)}
        before = {key: config._attn_implementation for key, config in configs.items()}
        super().set_attn_implementation(attn_implementation, *args, **kwargs)
        try:
            self._check_attention()
        except ValueError:
            for key, config in configs.items():
                _compat.set_attention_implementation(config, before[key])
            raise

    def _check_attention(self) -> None:
        for module in self.modules():
            if structure.is_patched(module):
                encodings = [part for spec in module.config.position_spec.all_encodings for part in spec.parts.values()]
                if reason := dispatch.refusal(module.config._attn_implementation, encodings):
                    raise ValueError(reason)
                # Otherwise, the first compiled forward pass would register it, and would then be compiled again.
                dispatch.register(module.config._attn_implementation)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Initialize continuous batching, as Transformers does.

        Raises ValueError for encodings that add a bias, because a paged cache doesn't indicate distances. It also raises for
        encodings that rotate all keys at every step, or that widen them.
        """
        every = self.config.position_spec.all_encodings
        if reason := dispatch.continuous_batching_error(
            (part for spec in every for part in spec.parts.values()),
            any(spec.encoding.rotation_depends_on_length(dict(spec.options)) for spec in every),
        ):
            raise ValueError(reason)
        return super().init_continuous_batching(*args, **kwargs)

    def _prepare_position_ids_for_generation(self, inputs_tensor: Any, model_kwargs: dict[str, Any]) -> Any:
        """The position IDs that `generate` creates by default, counted as the original model counts them (RoBERTa: from 2)."""
        if self.config.position_spec.submodel is not None and not self._token_stack:
            return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
        stack: Any = next(iter(self._token_stack), None) or next(filter(structure.is_patched, self.modules()))
        # The original model's method isn't called, because it may turn them into positions in images.
        ids = GenerationMixin._prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs)  # type: ignore[arg-type]
        return ids + stack.posenc_state.inputs.offset

    def create_masks_for_generate(self, config: Any, inputs_embeds: Any, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        """Create masks as the original model does.

        If its forward takes no position_ids (T5, BART), return the 2-D mask, padded to the length of the static cache. The 4-D
        mask that `generate` creates for static caches doesn't distinguish padding from tokens hidden for another reason. The
        positions of a padded target would therefore count the padding.
        """
        if attention_mask is not None and attention_mask.ndim == 2 and kwargs.get("position_ids") is None:
            cache = next(value for value in kwargs.values() if isinstance(value, Cache))
            return F.pad(attention_mask, (0, max(0, cache.get_max_length() - attention_mask.shape[1])))
        make = getattr(super(), "create_masks_for_generate", masking_utils.create_masks_for_generate)
        return make(config, inputs_embeds, attention_mask, **kwargs)

    def _prepare_decoder_input_ids_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare the IDs as for the original model type.

        Transformers prepends `decoder_start_token_id` to the prompts of every model except Whisper and Donut.
        """
        config, twin = copy.copy(self.config), copy.copy(self)
        vars(config)["model_type"] = self.original_class.config_class.model_type  # type: ignore[attr-defined]
        twin.config = config
        return super(PosEncModelMixin, twin)._prepare_decoder_input_ids_for_generation(*args, **kwargs)  # type: ignore[misc]

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Raises ValueError, because the original position embeddings, which this method would recreate, aren't used."""
        raise ValueError(
            f"{type(self).__name__} has the {self.config.position_spec.type!r} encoding instead of position embeddings. Call "
            f"hf_posenc.extend(model, max_length={new_num_position_embeddings}), or resize the original model and then patch "
            "it. The model was not changed."
        )

    @classmethod
    def is_custom_code(cls) -> bool:
        # For custom code, Transformers skips modules without tensors on loading. Some of these fill unsaved tensors of other
        # modules (FalconH1). Our `_initialize_weights` initializes encodings, and checks each tensor.
        return cls.original_class.is_custom_code()

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # Transformers checks the source of the original class's module, which doesn't contain this class.
        return cls.original_class._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls.original_class._can_set_experts_implementation()


def __getattr__(name: str) -> Any:
    """Return `PosEnc<OriginalClass>` for a config or model class of Transformers, or for an imported custom class.

    A class derived from one of Transformers is created once and is then an ordinary attribute.
    """
    if name in ("PositionEmbedding", "PositionEmbeddingConfig"):  # the Auto classes look them up here
        from hf_posenc.modeling import embedding

        return getattr(embedding, name)
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    registry.import_all()
    called = name.removeprefix(PREFIX)
    host = getattr(transformers, called, None)
    if isinstance(host, type) and issubclass(host, (PreTrainedConfig, PreTrainedModel)):
        return derive(host)
    if IS_COPY:
        raise AttributeError(f"Transformers has no class {called!r} to derive {name!r} from.")
    from hf_posenc.modeling import user_models

    owns = user_models.named(called)
    if len(owns) == 1:
        return derive(next(iter(owns.values())))
    if owns:
        raise AttributeError(f"{called} is defined in {' and in '.join(sorted(owns))}. Use the class of a patched model.")
    near = did_you_mean(called, dir(transformers))
    raise AttributeError(
        f"Neither Transformers nor your imported modules have a class {called!r}{near} to derive {name!r} from."
    )


def derive(host: Any) -> Any:
    """The derived class of an original config or model class. It is an attribute of this module, so that it can be pickled.

    A derived class is returned unchanged.
    """
    if issubclass(host, (PosEncConfigMixin, PosEncModelMixin)):
        return host
    name = PREFIX + host.__name__
    make = _derive_config if issubclass(host, PreTrainedConfig) else _derive_model
    if not is_transformers(host):
        from hf_posenc.modeling import user_models

        return user_models.derived_once(host, functools.partial(make, name))
    if name not in globals():
        globals()[name] = make(name, host)
    return globals()[name]


def _derive_config(name: str, host: type[PreTrainedConfig]) -> type:
    body = {
        "__module__": __name__,
        "__doc__": f"{host.__name__} with `position_encoding`: a name, or a dict of its type and options.",
        "__annotations__": {"position_encoding": Any, specs.PLAN: Any},
        "position_encoding": None,
        specs.PLAN: None,
        "model_type": TYPE_PREFIX + host.model_type,
        "original_class": host,
    }
    return type(name, (PosEncConfigMixin, host), body)


def _derive_model(name: str, host: type[PreTrainedModel]) -> type:
    body = {
        "__module__": __name__,
        "__doc__": f"{host.__name__} with the position encoding of its config (see `hf_posenc.patch`).",
        "__init__": _init_of(host),
        "forward": _with_positions(host),
        "config_class": derive(host.config_class),
        "original_class": host,
    }
    return type(name, (PosEncModelMixin, host), body)


DEFERRED_POST_INIT = "_posenc_postponed"
"""The attribute that lists the deferred calls of post_init while a model of a custom class is being built."""


def _init_of(host: type[PreTrainedModel]) -> Callable[..., None]:
    """The `__init__` of a derived class, with the signature of the original one."""

    @functools.wraps(host.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        PosEncModelMixin.__init__(self, *args, **kwargs)

    return __init__


def _install(found: structure.Structure, spec: specs.PositionSpec) -> None:
    """Install an encoding in one stack, with the modules that calibration and `unpatch` need."""
    own, across, geometry = acting_in(found, spec)
    limit = found.length_if_disabled
    if limit is not None and (geometry.max_length or 0) > limit:
        raise ValueError(
            f"max_length={geometry.max_length} is above {limit}, the number of rows of a registered tensor of "
            f"{type(found.stack).original_class.__name__}, which still adds zeros of that shape. Pass at most {limit}. Or "
            "compute the number of rows from config.max_position_embeddings. The model was not changed."
        )
    if own is not None:
        install(found, own, geometry)
    if across is not None:
        install_across(found, across, geometry)
    if own is None:
        return
    if spec.calibration is not None:
        from hf_posenc.architectures.contributions import contributions

        offsets.install(found.stack, contributions(found, spec.calibration.ranges))
    if spec.original and spec.original.kept and (kept := found.saved_shapes(spec.original.rows)):
        found.stack.posenc.original = OriginalState(kept)


def _token_stack_of(model: Any, stacks: Iterable[structure.Structure]) -> tuple[Any, ...]:
    """The stack that reads the input tokens of a composite model, in a tuple that is empty if there is none."""
    tokens = structure.tokens_of(model)
    if tokens is None or model.config.is_encoder_decoder:
        return ()
    return tuple(found.stack for found in stacks if found.tokens is tokens)[:1]


def _with_positions(host: type[PreTrainedModel]) -> Callable[..., Any]:
    """Wrap the original `forward`, so that it gets the positions in a stack.

    This isn't a hook, because some tools call `model.forward` directly.
    """

    names = list(signature(host.forward).parameters)[1:]

    @functools.wraps(host.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "posenc" not in self._modules:
            if not self._token_stack:
                return host.forward(self, *args, **kwargs)
            with recorded_outer_call(self._token_stack[0], BoundCall(names, args, kwargs)):
                return host.forward(self, *args, **kwargs)
        if self.posenc_state.spec.windows is not None:
            from hf_posenc.modeling import windows

            return windows.forward(self, partial(in_one_pass, self), BoundCall(names, args, kwargs))
        return in_one_pass(self, *args, **kwargs)

    def in_one_pass(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = self.posenc_state.inputs
        args, kwargs, context = inputs.prepare(self, args, kwargs)
        with dispatch.current(context):
            output = host.forward(self, *args, **kwargs)
        inputs.store_in_cache(args, kwargs, context, output)
        return output

    return forward


def auto_classes(model_type: str) -> dict[str, str]:
    """Auto class -> name of the derived class that it loads for a derived model type."""
    found: dict[str, Any] = {}
    for auto, names in _compat.auto_classes():
        name = names.get(model_type.removeprefix(TYPE_PREFIX))
        if name is not None:
            found[auto] = prefixed(name[0] if isinstance(name, tuple) else name, PREFIX)
    return found
