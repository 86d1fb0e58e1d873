"""patch and unpatch: the same model between its host's class and the derived one, with shared parameters."""

import copy
import functools
import hashlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedModel

from hf_posenc import install, ports
from hf_posenc.encodings import PositionEncoding
from hf_posenc.modeling import PLACEMENT, PosEncModelMixin, check_length, derive, patcher, split


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
        check_length(config)
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
            if isinstance(port, install.Port):
                (owner,) = port._stack
                if isinstance(port, install.PositionPort):
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
    vars(config).pop("auto_map", None)
    setattr(config, ports.LENGTH_FIELD, host["max_length"])
    stock = _shell(type(model).host_class, config)
    _share(model, stock)
    for module in model.modules():
        if isinstance(module, install.Port):
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
    if ports.is_patched(model.base_model) and not isinstance(model, PosEncModelMixin):
        raise ValueError(
            f"{type(model).__name__} is patched, but runs the code that came with its checkpoint (trust_remote_code): "
            "import hf_posenc first, then load it again"
        )
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
        if "posenc" in name.split(".") or isinstance(module, install.Port):
            continue
        other = theirs.get(name)
        if isinstance(other, install.Port):
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


patcher[:] = [patch]
