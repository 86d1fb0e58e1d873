"""Derived config and model classes, made when they are first asked for, and patch / unpatch between them and the host's.

`PosEnc<HostClass>` is a subclass of the host's class which lends a position encoding to every stack in it. The module's
`__getattr__` makes these classes by name; the Auto classes know the names only.
"""

import copy
import functools
import hashlib
import os
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc import attention, lending, ports
from hf_posenc.embedding import EncodingConfigMixin, EncodingModelMixin
from hf_posenc.embedding import PositionEmbedding as PositionEmbedding  # the Auto classes look it up here
from hf_posenc.embedding import PositionEmbeddingConfig as PositionEmbeddingConfig
from hf_posenc.encodings import PositionEncoding, canonical, checked_max_length, encoding_class

PREFIX, TYPE_PREFIX = "PosEnc", "posenc-"
PLACEMENT = ("inject", "max_length", "host")
"""What stands beside the options in `position_encoding`: where vectors are added, the promised length, and what to
restore of the host."""


# The config.


def split(position_encoding: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """`position_encoding` as given -> (canonical encoding, placement). Raises ValueError for anything malformed."""
    if isinstance(position_encoding, dict):
        placement = {key: position_encoding[key] for key in PLACEMENT if key in position_encoding}
        position_encoding = {key: value for key, value in position_encoding.items() if key not in PLACEMENT}
    else:
        placement = {}
    placement["max_length"] = checked_max_length(placement.get("max_length"))
    inject = placement.setdefault("inject", "input")
    if inject not in lending.INJECT:
        raise ValueError(f"inject={inject!r}: allowed is {', '.join(map(repr, lending.INJECT))}")
    host = placement.setdefault("host", None)
    keys = {"name_or_path": str, "max_length": int, "kept": bool, "fingerprint": str}
    if host is not None and (not isinstance(host, dict) or {key: type(value) for key, value in host.items()} != keys):
        raise ValueError(f"position_encoding['host'] is written by patch and not to be edited, but reads {host!r}")
    chosen = canonical(position_encoding)
    if inject != "input" and "embed" not in encoding_class(chosen["type"]).acts_by():
        raise ValueError(
            f"inject={inject!r} says where vectors are added, but {chosen['type']!r} makes none: leave it out, or take an "
            "encoding which embeds"
        )
    return chosen, {key: placement[key] for key in PLACEMENT}


class PosEncConfigMixin(EncodingConfigMixin):
    """What a derived config adds to the host's: `position_encoding`, checked and canonical."""

    if TYPE_CHECKING:
        position_encoding: Any

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.position_encoding is not None:
            encoding, placement = split(self.position_encoding)
            self.position_encoding = {**encoding, **placement}


# The models.


class HostState(nn.Module):
    """The host's own tables of positions, kept as buffers under their original keys, for `unpatch`."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for key, shape in shapes.items():
            *path, name = key.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_buffer(name, torch.empty(shape))

    def reset_parameters(self) -> None:
        """From scratch the host has no positions yet: what BERT would start with."""
        for table in self.buffers():
            nn.init.normal_(table, std=0.02)


class PosEncModelMixin(EncodingModelMixin):
    """What a derived model adds to the host's class."""

    host_class: type[PreTrainedModel]
    config: Any

    def post_init(self) -> None:
        # Before the host's post_init, so that new parameters are initialised, tied and counted with the others.
        self._lend_encoding()
        super().post_init()

    def _lend_encoding(self) -> None:
        if ports.is_patched(self):
            return
        if self.config.position_encoding is None:
            raise ValueError(
                f"{type(self).__name__} needs config.position_encoding, a name or a dict; "
                "to give a pretrained model another encoding, load it and call hf_posenc.patch(model, encoding)"
            )
        found = ports.find(self)
        if found:
            encoding, placement = split(self.config.position_encoding)
            geometry = ports.geometry(self, found, placement["max_length"], placement["inject"])
            if geometry.max_length is None and encoding_class(encoding["type"]).needs_max_length(geometry):
                length = getattr(self.config, ports.LENGTH_FIELD) - found.offset
                geometry = replace(geometry, max_length=length)
                self.config.position_encoding["max_length"] = length
            lending.lend(self, found, encoding, geometry, placement["inject"])
            host = placement["host"]
            if host and host["kept"]:
                tables = {f"{key}.weight": (host["max_length"], table.embedding_dim) for key, table in found.tables.items()}
                biases = {f"{key}.weight": tuple(table.weight.shape) for key, table in found.biases.items()}
                self.posenc.host = HostState({**tables, **biases})
            self._check_attention()
        elif not any(map(ports.is_patched, self.modules())):
            raise ports.none_found(self.host_class)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, HostState):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a patched checkpoint; or a stock one with `position_encoding=…`, the same as `patch` after loading."""
        if "position_encoding" in kwargs and not isinstance(kwargs.get("config"), PreTrainedConfig):
            stock, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **_hub_kwargs(kwargs))
            if stock.get("model_type") == cls.host_class.config_class.model_type:
                encoding = kwargs.pop("position_encoding")
                loaded = cls.host_class.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
                model, *info = loaded if isinstance(loaded, tuple) else (loaded,)
                return (patch(model, encoding), *info) if info else patch(model, encoding)
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        before = self.config._attn_implementation
        super().set_attn_implementation(attn_implementation, *args, **kwargs)
        try:
            self._check_attention()
        except ValueError:
            super().set_attn_implementation(before)
            raise

    def _check_attention(self) -> None:
        for module in self.modules():
            if ports.is_patched(module):
                implementation = module.config._attn_implementation
                encoding = encoding_class(module.config.position_encoding["type"])
                if reason := attention.refusal(implementation, encoding):
                    raise ValueError(reason)
                attention.register(implementation)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # Judged by the source of the host's module, which this class is not in.
        return cls.host_class._can_set_attn_implementation()


def _hub_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    names = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
    return {name: kwargs[name] for name in names if name in kwargs}


# Classes by name.


def __getattr__(name: str) -> Any:
    """`PosEnc<HostClass>` for any config or model class of Transformers, made once and then an ordinary attribute."""
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    host = getattr(transformers, name.removeprefix(PREFIX), None)
    if isinstance(host, type) and issubclass(host, (PreTrainedConfig, PreTrainedModel)):
        return derive(host)
    raise AttributeError(f"there is no class {name.removeprefix(PREFIX)!r} in Transformers to derive {name!r} from")


def derive(host: Any) -> Any:
    """The derived class of a host's config or model class, published here under its name so that it can be pickled."""
    name = PREFIX + host.__name__
    if name not in globals():
        make = _derive_config if issubclass(host, PreTrainedConfig) else _derive_model
        globals()[name] = make(name, host)
    return globals()[name]


def _derive_config(name: str, host: type[PreTrainedConfig]) -> type:
    body = {
        "__module__": __name__,
        "__doc__": f"{host.__name__} with `position_encoding`: a name, or a dict of its type and options.",
        "__annotations__": {"position_encoding": Any},
        "position_encoding": None,
        "model_type": TYPE_PREFIX + host.model_type,
    }
    return type(name, (PosEncConfigMixin, host), body)


def _derive_model(name: str, host: type[PreTrainedModel]) -> type:
    body = {
        "__module__": __name__,
        "__doc__": f"{host.__name__} with the position encoding of its config (see `hf_posenc.patch`).",
        "__init__": _with_derived_children(host),
        "forward": _with_positions(host),
        "config_class": derive(host.config_class),
        "host_class": host,
    }
    return type(name, (PosEncModelMixin, host), body)


def _with_derived_children(host: type[PreTrainedModel]) -> types.FunctionType:
    """The host's `__init__`, in which the names of its sibling model classes mean the derived ones.

    `BertForMaskedLM.__init__` says `BertModel(config)`; here it gets a PosEncBertModel. A copy of the function with
    globals of its own: nothing of the host's is changed, not even for a moment.
    """
    init = host.__init__
    siblings = {}
    for name in init.__code__.co_names:
        value = init.__globals__.get(name)
        if isinstance(value, type) and issubclass(value, PreTrainedModel) and value.config_class is host.config_class:
            siblings[name] = derive(value)
    copied = types.FunctionType(
        init.__code__, {**init.__globals__, **siblings}, init.__name__, init.__defaults__, init.__closure__
    )
    copied.__kwdefaults__, copied.__doc__, copied.__annotations__ = init.__kwdefaults__, init.__doc__, init.__annotations__
    return copied


def _with_positions(host: type[PreTrainedModel]) -> Callable[..., Any]:
    """The host's `forward`, which in a stack gets the positions. Not a hook: some tools call `model.forward` itself."""

    @functools.wraps(host.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "posenc" in self._modules:
            args, kwargs = self._posenc_begin(self, args, kwargs)
        return host.forward(self, *args, **kwargs)

    return forward


def register_auto_classes() -> None:
    """Tell the Auto classes the names of all derived classes. Builds and imports none of them.

    The mappings' own name tables are private to Transformers; this is the only place that touches them.
    """
    from transformers.models.auto import auto_factory, configuration_auto, modeling_auto, tokenization_auto

    configs = configuration_auto.CONFIG_MAPPING_NAMES
    derived = {TYPE_PREFIX + kind: PREFIX + name for kind, name in configs.items() if not kind.startswith(TYPE_PREFIX)}
    modules = {configuration_auto.model_type_to_module_name(kind): sys.modules[__name__] for kind in derived}
    derived["posenc-embedding"] = "PositionEmbeddingConfig"
    modules["posenc_embedding"] = sys.modules[__name__]
    modeling_auto.MODEL_MAPPING_NAMES["posenc-embedding"] = "PositionEmbedding"
    configs.update(derived)
    configuration_auto.CONFIG_MAPPING._modules.update(modules)
    mappings = [m for m in vars(modeling_auto).values() if isinstance(m, auto_factory._LazyAutoMapping)]
    for mapping in [*mappings, tokenization_auto.TOKENIZER_MAPPING]:
        names = mapping._model_mapping
        prefix = "" if mapping is tokenization_auto.TOKENIZER_MAPPING else PREFIX
        for kind in [kind for kind in names if TYPE_PREFIX + kind in derived]:
            names[TYPE_PREFIX + kind] = _prefixed(names[kind], prefix)
        mapping._reverse_config_mapping.update({name: kind for kind, name in derived.items()})
        mapping._modules.update(modules)


def _prefixed(name: Any, prefix: str) -> Any:
    return tuple(_prefixed(part, prefix) for part in name) if isinstance(name, tuple) else name and prefix + name


# patch and unpatch.


def patch(
    model: PreTrainedModel,
    encoding: str | dict[str, Any],
    *,
    max_length: int | None = None,
    inject: str = "input",
    keep_host: bool = True,
    **options: Any,
) -> PreTrainedModel:
    """The same model with another position encoding, of class `PosEnc<HostClass>`.

    Parameter objects are shared with `model`, not copied: training, freezing or moving one moves the other. `model`
    itself stays usable and unchanged. Mode, requires_grad, dtype, device, tied weights and generation_config carry over;
    hooks stay with `model`.

    Args:
        model: any Transformers model in which all sources of position can be taken over; or a SentenceTransformer with
            one, which comes back as a SentenceTransformer. A max_length is then its max_seq_length, too.
        encoding: a name or alias (`hf_posenc.list_encodings()`), a composition of several (`"sinusoidal+alibi"`), or
            `{"type": name, **options}`.
        max_length: the longest input in tokens, checked on every forward and written to the config's length field.
            None: no limit for computed encodings, the host's own length for tables.
        inject: where the vectors of an encoding which embeds are added: to the "input", to the hidden state that enters
            "every_layer", or to what leaves each layer's attention block ("after_attention").
        keep_host: keep the host's position table as non-trained buffers `posenc.host.*`, for `unpatch`.
        **options: of the encoding (`alibi` has none, `rope` has theta and layout, …); of a composition's part as
            `part__option`.

    Raises:
        ValueError: unknown encoding or option, a wrong value, or a host that can't be patched; `model` is untouched.
    """
    if _holds_a_model(model):
        change = functools.partial(
            patch, encoding=encoding, max_length=max_length, inject=inject, keep_host=keep_host, **options
        )
        return _changed_within(model, change)
    _refuse_wrapped(model)
    if isinstance(model, PosEncModelMixin):
        raise ValueError(
            f"this model has the {model.config.position_encoding['type']!r} encoding already: "
            "hf_posenc.patch(hf_posenc.unpatch(model), …)"
        )
    if not type(model).__module__.startswith("transformers."):
        raise ValueError(f"{type(model).__name__} is not a class of Transformers itself, so no class can be derived from it")
    if taken := sorted({"type", *PLACEMENT} & set(options)):
        raise ValueError(
            f"{taken[0]}={options[taken[0]]!r} is no option of an encoding; the encoding is patch's second argument"
        )
    given = {"type": encoding} if isinstance(encoding, str) else encoding
    if isinstance(given, dict) and inject != "input":
        given = {**given, "inject": inject}
    chosen, placement = split({**given, **options} if isinstance(given, dict) else given)
    max_length = placement["max_length"] if max_length is None else max_length
    stack = model.base_model
    found = ports.find(stack)
    if not found:
        raise ports.none_found(type(model))
    length = getattr(model.config, ports.LENGTH_FIELD)
    host = {
        "name_or_path": _public_name(model.config.name_or_path),
        "max_length": length,
        "kept": keep_host,
        "fingerprint": fingerprint(stack),
    }
    chosen, placement = split({**chosen, **placement, "max_length": max_length, "host": host})

    config = copy.deepcopy(model.config)
    config.__class__ = derive(type(model.config))
    config.position_encoding = {**chosen, **placement}  # a table's length is settled where it is built
    if max_length is not None:
        setattr(config, ports.LENGTH_FIELD, max_length + found.offset)
    patched = _shell(derive(type(model)), config)
    _share(model, patched)
    table = next(iter(found.tables.values())).weight
    for owner in patched.modules():
        if isinstance(vars(owner)["_modules"].get("posenc"), PositionEncoding):
            owner.posenc.to_empty(device=table.device)
            owner.posenc.to(table.dtype)
            with torch.no_grad():
                for module in owner.posenc.modules():
                    if isinstance(module, PositionEncoding):
                        module.reset_parameters()
            owner.posenc.train(owner.training)
    with torch.no_grad():
        for port in patched.modules():
            if isinstance(port, lending.Port):
                (owner,) = port._stack
                if isinstance(port, lending.PositionPort):
                    owner.posenc.adopt(model.base_model.get_parameter(port.key)[port.offset :])
                if keep_host:
                    port.kept.copy_(model.base_model.get_parameter(port.key))
    return patched


def unpatch(model: PreTrainedModel) -> PreTrainedModel:
    """The host's own class with its own positions again; parameter objects are shared, as in `patch`.

    Bit-equal to the model that was patched, unless it was trained in between: then it is the trained body with the old
    positions, and a UserWarning says so.

    Raises:
        ValueError: the model isn't patched, or its positions were not kept (the error names the base model).
    """
    if _holds_a_model(model):
        return _changed_within(model, unpatch)
    _refuse_wrapped(model)
    if not isinstance(model, PosEncModelMixin):
        raise ValueError(f"{type(model).__name__} is not patched: there is nothing to undo")
    host = model.config.position_encoding["host"]
    if not host or not host["kept"]:
        base = (host or {}).get("name_or_path") or "the model it was made from"
        raise ValueError(
            f"the host's own positions were not kept in this model: take them from {base!r}, or patch with keep_host=True"
        )
    config = copy.deepcopy(model.config)
    config.__class__ = type(model).host_class.config_class
    del config.position_encoding
    setattr(config, ports.LENGTH_FIELD, host["max_length"])
    stock = _shell(type(model).host_class, config)
    _share(model, stock)
    for module in model.modules():
        if isinstance(module, lending.Port):
            owner, _, name = module.key.rpartition(".")
            stock.base_model.get_submodule(owner).register_parameter(name, nn.Parameter(module.kept.clone()))
    if fingerprint(stock.base_model) != host["fingerprint"]:
        warnings.warn(
            "the weights are no longer those which were patched (trained, or cast to another dtype): this is the "
            "present body with the host's old positions, and its outputs are not those of the original",
            stacklevel=2,
        )
    return stock


def _holds_a_model(model: Any) -> bool:
    """Whether this is a row of modules whose first one holds a Transformers model: a SentenceTransformer."""
    return isinstance(model, nn.Sequential) and len(model) > 0 and isinstance(getattr(model[0], "model", None), PreTrainedModel)


def _changed_within(outer: Any, change: Callable[[PreTrainedModel], PreTrainedModel]) -> Any:
    """A twin of a SentenceTransformer with its model changed and a tokenizer of its own; it shares all else.

    Its max_seq_length is its tokenizer's model_max_length. A promised length is taken over, and one beyond the model's is
    cut; where the model has no limit, the length stays what it was.
    """
    first = outer[0]
    model = change(first.model)
    twin, holder = copy.copy(outer), copy.copy(first)
    holder._modules = {**first._modules, "model": model}
    twin._modules = {**outer._modules, next(iter(outer._modules)): holder}
    holder.processor = copy.deepcopy(first.processor)
    if isinstance(model, PosEncModelMixin):
        length = model.config.position_encoding["max_length"]
    else:
        length = min(first.max_seq_length, getattr(model.config, ports.LENGTH_FIELD) - ports.find(model).offset)
    if length is not None:
        holder.max_seq_length = length
    # As sentence-transformers' own merge does: what the card says of the given model isn't true of this one.
    twin._model_card_text = None
    twin.model_card_data = twin.model_card_data_class(local_files_only=True)
    twin.model_card_data.register_model(twin)
    return twin


def fingerprint(stack: Any) -> str:
    """A short hash of up to 64 values of each parameter of the body, which is what all heads have in common: the parts
    that hold a table or an attention, and the input embeddings. Another hash means that the body was changed."""
    found = ports.find(stack)
    parts = {path.partition(".")[0] for path in (*found.tables, *found.attentions)}
    digest = hashlib.sha256()
    for name, parameter in sorted(stack.named_parameters()):
        if name.partition(".")[0] in parts or parameter is stack.get_input_embeddings().weight:
            flat = parameter.detach().flatten()
            sample = flat[:: max(1, flat.numel() // 64)][:64].float().cpu()
            digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def _refuse_wrapped(model: Any) -> None:
    order = "patch first, then wrap"
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise ValueError(f"the model is wrapped by torch.compile: {order}")
    if isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel):
        raise ValueError(f"a PreTrainedModel of Transformers is needed, but this is a {type(model).__name__}: {order}")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"a PreTrainedModel of Transformers is needed, not {model!r}")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("the model is quantised, so its parameters can't be shared: patch it first, then quantise")
    if getattr(model, "_hf_peft_config_loaded", False) or any("lora_" in name for name, _ in model.named_modules()):
        raise ValueError(f"the model has PEFT adapters in it: {order}")
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError("the model is spread by Accelerate's hooks (device_map, offload): load it on one device, patch first")
    if any(p.device.type == "meta" for p in model.parameters()):
        raise ValueError("the model has parameters on the meta device: load its weights first")


def _public_name(name_or_path: Any) -> str:
    """A Hub id as it is; of a local folder its last part, since the path means nothing elsewhere."""
    return os.path.basename(os.path.normpath(name_or_path)) if os.path.isdir(name_or_path) else name_or_path


def _shell(cls: Any, config: Any) -> Any:
    """A model whose parameters are on the meta device and whose computed buffers are real."""
    with init_empty_weights(include_buffers=False):
        return cls(config)


def _share(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Give all parameters and buffers that the two have in common to `target`, with what can be set on a module.

    Raises ValueError where `source` is no longer what its config describes.
    """
    theirs = dict(source.named_modules())
    for name, module in target.named_modules():
        if "posenc" in name.split(".") or isinstance(module, lending.Port):
            continue
        other = theirs.get(name)
        if isinstance(other, lending.Port):
            continue
        if other is None or not (isinstance(module, type(other)) or isinstance(other, type(module))):
            raise ValueError(
                f"{name!r} is a {type(other).__name__}, where the config of this model describes a {type(module).__name__}: "
                "a model changed by hand can't be rebuilt from its config, so it was left as it is"
            )
        for key, parameter in other._parameters.items():
            there = module._parameters.get(key)
            if (parameter is None) != (there is None) or (parameter is not None and parameter.shape != there.shape):
                raise ValueError(
                    f"{name}.{key} has another shape than the config of this model describes: bring the config in line "
                    "with it (resize_token_embeddings does), then patch"
                )
            module._parameters[key] = parameter
        for key, buffer in other._buffers.items():
            # Id buffers as long as the old table are the only ones that differ.
            if buffer is not None and key in module._buffers and buffer.shape == module._buffers[key].shape:
                module._buffers[key] = buffer
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(source.device)
        for key, value in vars(other).items():
            # What users set: dropout probabilities, mode, checkpointing. Names with _ are Transformers' own books.
            if key == "_gradient_checkpointing_func" or (type(value) in (bool, int, float, str) and key[0] != "_"):
                setattr(module, key, value)
    if hasattr(source, "generation_config"):
        target.generation_config = copy.deepcopy(source.generation_config)
    target.name_or_path = source.name_or_path
