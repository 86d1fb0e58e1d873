"""Converts a model between its original class and the derived one. Parameter objects are shared, not copied."""

import copy
import inspect
import itertools
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions, meta_device_safe_creation_ops
from transformers.modeling_utils import local_torch_dtype

from hf_posenc import _compat
from hf_posenc import configuration as specs
from hf_posenc.architectures import detection, structure
from hf_posenc.architectures.components import Disabled, UnsupportedModelError, disabled_names
from hf_posenc.architectures.components.component import is_transformers
from hf_posenc.configuration import HUB_ID, LENGTH_FIELD, OriginalSpec, PositionSpec
from hf_posenc.encodings import (
    PositionEncoding,
    encoding_class,
    global_rng_lock,
    initialize_missing,
    mark,
    marked_as_loaded,
    placed,
)
from hf_posenc.modeling import encoding_checks, hooks


def refuse_wrapped(model: Any, call: str = "patch") -> None:
    """Raises ValueError unless `model` is a PreTrainedModel with loaded weights that isn't wrapped, quantized, or distributed.

    call: the function that the error names.
    """
    unchanged = "The model was not changed."
    order = f"Call {call} first, then wrap the model. {unchanged}"
    if _compat.is_compiled(model):
        raise ValueError(f"The model is wrapped by torch.compile. {order}")
    if isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is a {type(model).__name__}, but must be a PreTrainedModel. {order}")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model={model!r} isn't supported. Pass a PreTrainedModel of Transformers, such as AutoModel.from_pretrained "
            "returns, or a SentenceTransformer."
        )
    if _compat.is_quantized(model):
        raise ValueError(
            f"The model is quantized, so its parameters can't be shared. Call {call} first, then quantize. {unchanged}"
        )
    modules = structure.modules_by_path(model)
    if _compat.has_adapters(model) or any("lora_" in name for name in modules):
        raise ValueError(f"The model contains PEFT adapters. {order}")
    if any(_compat.accelerate_hook(module) is not None for module in modules.values()):
        raise ValueError(
            "The model is distributed by Accelerate's hooks (device_map, offload). Load it on one device, and call "
            f"{call} first. {unchanged}"
        )
    if any(each is not None and each.is_meta for module in modules.values() for each in module._parameters.values()):
        raise ValueError(f"The model has parameters on the meta device. Load its weights first. {unchanged}")


def to_derived(model: Any, derived: Any, spec: PositionSpec, keep_original: bool = True, just_loaded: bool = False) -> Any:
    """Create a patched model of the class `derived` from an original one, or from one with other patched submodels.

    `model` doesn't change, and nothing is calibrated.

    just_loaded: whether nobody else has `model`, which is as its class creates it. It may then be changed into the result.

    Raises ValueError (UnsupportedModelError) if the encoding can't be installed in it.
    """
    config = copy.deepcopy(model.config)
    already = specs.read(config).by_submodel if hasattr(config, "position_spec") else {}
    plans: dict[str | None, Iterable[specs.StackPlan]] = {path: specs.plans_of(config, path) for path in already}
    added, positions = dict[str | None, PositionSpec](), dict[int, tuple[Tensor | None, dict[str, Tensor]]]()
    stacks: list[structure.Structure] = []
    for path, each in spec.by_submodel.items():
        found, added[path] = _fitted(model, each, keep_original)
        plans[path] = detection.plan_of(found)
        encoding_checks.check(found.values(), added[path])
        stacks += found.values()
        positions |= {id(part.stack): _positions(part, added[path].original) for part in found.values()}
    combined = PositionSpec.joined({**already, **added}.values())
    specs.change_class(config, derived.config_class)
    specs.write(config, combined)
    specs.write_plans(config, {path: plans[path] for path in combined.by_submodel})
    rows = specs.length_of(model.config)
    if combined.max_length is not None and rows is not None and combined.replaces_all:
        setattr(config, LENGTH_FIELD, combined.max_length + stacks[0].offset)
    before = encodings_in(model)
    if just_loaded and _can_change(model, config):
        patched = _changed(model, derived, config)
    else:
        patched = build_on_meta(derived, config, like=model)
        share_parameters(model, patched)
        share_encodings(model, patched)
    like = next(next(iter(stacks[0].attentions.values())).parameters())
    new = {path: module for path, module in encodings_in(patched).items() if path not in before}
    for path, module in new.items():
        if path.endswith("posenc") and isinstance(module, PositionEncoding):
            owner = patched.get_submodule(path.removesuffix("posenc").rstrip("."))
            placed(module.to_empty(device=like.device), like.device, like.dtype).train(owner.training)
    initialize_missing(module for module in new.values() if isinstance(module, PositionEncoding))
    for name, stack in structure.modules_by_path(patched).items():
        if structure.is_patched(stack) and (original := positions.get(id(model.get_submodule(name)))):
            _copy_positions(*original, stack)
    return patched


def _fitted(model: Any, spec: PositionSpec, keep_original: bool) -> tuple[dict[str, structure.Structure], PositionSpec]:
    """The stacks of an original model, or of a submodel, for an encoding, and its spec with facts about the original model."""
    inner = model if spec.submodel is None else detection.submodel(model, spec.submodel)
    try:
        found = detection.find_all(inner, spec.where)
    except UnsupportedModelError as refused:
        if refused.reason == detection.UNKNOWN:  # ESM without its relative position vectors
            specs.raise_if_v4_relative(inner, "it has no positions to replace")
        raise
    stacks = list(found.values())
    _raise_if_v4_relative(stacks, spec)
    if spec.max_length is None:
        acting = [(found, spec.encoding_for(found.role) if spec.where else spec) for found in stacks]
        sized = [found for found, own in acting if own and own.encoding.needs_max_length(found.geometry(None, own.inject))]
        lengths = {found.usable_length for found in sized} | {found.length_if_disabled for found, own in acting if own} - {None}
        # Stacks with different lengths keep separate lengths.
        spec = replace(spec, max_length=lengths.pop() if len(lengths) == 1 else None)
    rows = specs.length_of(inner.config)
    kept = keep_original or not any(found.saved_shapes(rows) for found in stacks)
    host = OriginalSpec(_public_name(model.config.name_or_path or ""), rows, kept)
    return found, replace(spec, original=host, calibration=None)


def _can_change(model: Any, config: Any) -> bool:
    """Whether an original model differs from one that is built from a derived config only by the encoding.

    Buffers can depend on the maximum length. Composite models have several configs.
    """
    same_length = specs.length_of(config) == specs.length_of(model.config)
    placed_whole = not ({"hf_quantizer", "hf_device_map"} & vars(model).keys())
    return same_length and placed_whole and is_transformers(type(model)) and not specs.part_names(config)


def _changed(model: Any, derived: Any, config: Any) -> Any:
    """Change an original model into a patched one with a derived config, on the meta device as in `build_on_meta`."""
    stock, device = type(model.config), model.device
    modules = structure.modules_by_path(model).values()
    configs = {id(each): each for module in modules if type(each := vars(module).get("config")) is stock}
    for each in configs.values():  # T5's encoder and decoder have their own
        specs.change_class(each, derived.config_class)
        vars(each).update({name: vars(config)[name] for name in ("position_encoding", specs.PARSED, specs.PLAN)})
        _compat.forget_gguf(each)
    _compat.drop_weight_conversions(model)
    with global_rng_lock(), torch.device("meta"):
        derived.change(model)
    for module in structure.modules_by_path(model).values():
        module.training = model.training
        mark(module)
    compute_buffers(model, device)
    return model


def _raise_if_v4_relative(stacks: Iterable[structure.Structure], spec: PositionSpec) -> None:
    """Raises ValueError for the encoding that a model had in Transformers v4, because its vectors would now be random."""
    for found in stacks:
        kind = specs.dropped_v4_relative(found.stack.config)
        if kind and any(part is encoding_class(kind) for each in spec.all_encodings for part in each.parts.values()):
            raise ValueError(
                f"The config has position_embedding_type={kind!r} of Transformers v4. Transformers 5 dropped the vectors that "
                "its checkpoint has for that, so new ones would be random. Load it with hf_posenc.from_v4(path_or_id, "
                "auto_class). If the checkpoint has no such vectors, del config.position_embedding_type. The model was not "
                "changed."
            )


def _positions(found: structure.Structure, host: OriginalSpec | None) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The original position embeddings, if any, and if they are kept, all learned tensors that `unpatch` needs, by key."""
    table = next((table for component in found.components if (table := component.table()) is not None), None)
    kept = found.saved_shapes(host.rows) if host is not None and host.kept else ()
    return table, {key: found.stack.get_parameter(key) for key in kept}


def _copy_positions(table: Tensor | None, kept: dict[str, Tensor], stack: Any) -> None:
    """Copy the original learned positions to the buffers that keep them, and to an encoding that starts from them."""
    with torch.no_grad():
        stack.posenc.init_from_original_table(table)
        if "cross" in stack.posenc._modules:
            stack.posenc.cross.init_from_original_table(None)
        if "original" in stack.posenc._modules:
            for key, buffer in stack.posenc.original.named_buffers():
                buffer.copy_(kept[key])


def to_stock(model: Any, stock: Any, submodel: str | None = None) -> Any:
    """Convert a patched model to its original class, `stock`, with its original positions.

    submodel: the only submodel to convert. If others stay patched, so does the class.

    Raises ValueError if the original positions weren't kept.
    """
    spec = specs.read(model.config)
    gone = spec.by_submodel if submodel is None else {submodel: spec.by_submodel[submodel]}
    for each in gone.values():
        if each.original is None:
            raise ValueError(
                "This model can't be unpatched: it was created with its encoding, from scratch or by from_v4, so it has no "
                f"original positions to restore. Create a new {stock.__name__} instead."
            )
        if not each.original.kept:
            base = repr(each.original.name_or_path) if each.original.name_or_path else "the model it was made from"
            raise ValueError(
                f"This model can't be unpatched: its original positions were not kept. Take them from {base}, or patch with "
                "keep_original=True. The model was not changed."
            )
    left = {path: each for path, each in spec.by_submodel.items() if path not in gone}
    config = copy.deepcopy(model.config) if left else stock_config(model.config, stock)
    if left:
        specs.write(config, PositionSpec.joined(left.values()))
        specs.write_plans(config, {path: specs.plans_of(config, path) for path in left})
    unpatched = build_on_meta(type(model) if left else stock, config, model.dtype, model)
    share_parameters(model, unpatched)
    share_encodings(model, unpatched)
    frozen = not any(parameter.requires_grad for parameter in unpatched.parameters() if not parameter.is_meta)
    done = set()
    for name, stack in model.named_modules():
        if not structure.is_patched(stack) or structure.is_patched(unpatched.get_submodule(name)):
            continue
        if "original" in stack.posenc._modules:
            for key, kept in stack.posenc.original.named_buffers():
                path, _, parameter = key.rpartition(".")
                owner = unpatched.get_submodule(name).get_submodule(path)
                trained = owner.get_parameter(parameter).requires_grad if parameter in owner._parameters else True
                owner.register_parameter(parameter, nn.Parameter(kept.clone(), requires_grad=trained and not frozen))
                done.add(f"{name}.{key}".lstrip("."))
    for key, other in unpatched.get_expanded_tied_weights_keys(all_submodels=True).items():
        if {key, other} <= done:  # UDOP ties tables of distances
            path, _, parameter = key.rpartition(".")
            unpatched.get_submodule(path).register_parameter(parameter, unpatched.get_parameter(other))
    return unpatched


def stock_config(config: Any, stock: Any) -> Any:
    """The original config, for the class `stock`, of a model with this derived config."""
    config = copy.deepcopy(config)
    specs.make_stock(config)
    specs.change_class(config, stock.config_class)
    return config


def _public_name(name_or_path: str) -> str:
    """A "namespace/name" that is in the Hub's cache, and "" for anything else.

    Transformers doesn't record whether a model came from the Hub. The relative path of a directory may look like an ID, even
    when the current directory has changed and the path no longer exists.
    """
    if not HUB_ID.fullmatch(name_or_path) or os.path.exists(name_or_path):
        return ""
    cached = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name_or_path, repo_type="model"), "snapshots")
    return name_or_path if cached.is_dir() else ""


INITIALIZERS = (nn.init.uniform_, nn.init.normal_, nn.init.constant_, nn.init.kaiming_uniform_)
"""The functions of torch's modules that a TorchFunctionMode can replace."""


class WithoutInitialization(TorchFunctionMode):
    """Skips torch's initialization of tensors on the meta device, which have no values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in INITIALIZERS and given["tensor"].is_meta:
            return given["tensor"]
        return func(*args, **given)


def build_on_meta(cls: Any, config: Any, dtype: torch.dtype | None = None, like: nn.Module | None = None) -> Any:
    """Build a model on the meta device, where it takes no memory, as Transformers does for models that it loads.

    dtype: dtype of tensors that don't specify one, such as sinusoids in buffers. None for torch's default.
    like: a model with the parts to build. Its config doesn't record `__init__` arguments that omit or add parts
        (`add_pooling_layer=False`), so they are found by trial. If none fit, the model is built without arguments.
    """
    default = nullcontext() if dtype is None else local_torch_dtype(dtype)
    random = torch.random.fork_rng(devices=[])  # for original models that draw values on the CPU nevertheless
    with global_rng_lock(), random, default, torch.device("meta"), meta_device_safe_creation_ops(), WithoutInitialization():
        built = cls(config)
        for arguments in _arguments(cls) if like is not None and difference(like, built) else ():
            other = cls(config, **arguments)
            if not difference(like, other):  # type: ignore[arg-type]
                return other
    return built


def _arguments(cls: Any) -> Iterator[dict[str, bool]]:
    """Boolean arguments for the `__init__` of a class, besides its config, which may determine what parts a model has.

    At most two are changed. Models of Transformers have no more.
    """
    init = getattr(cls, "original_class", cls).__init__
    known = [each for each in list(inspect.signature(init).parameters.values())[2:] if isinstance(each.default, bool)]
    for number in (1, 2):
        for changed in itertools.combinations(known, number):
            yield {each.name: not each.default for each in changed}


def clone_sharing_parameters(model: PreTrainedModel) -> Any:
    """Rebuild a model from its class and config, with the same parameters. Attributes set on one don't affect the other."""
    twin = build_on_meta(type(model), copy.deepcopy(model.config), like=model)
    share_parameters(model, twin)
    share_encodings(model, twin)
    return twin


def encodings_in(model: nn.Module) -> dict[str, Any]:
    """Path -> module, for all encodings in a model and their submodules."""
    return {path: module for path, module in model.named_modules() if "posenc" in path.split(".")}


def share_encodings(source: nn.Module, target: nn.Module) -> None:
    """Give the encodings that both models have the tensors and attributes of the source's."""
    theirs = encodings_in(source)
    for path, module in encodings_in(target).items():
        if (other := theirs.get(path)) is not None:
            tensors = {"_parameters": {**other._parameters}, "_buffers": {**other._buffers}}
            vars(module).update({name: value for name, value in vars(other).items() if name[0] != "_"} | tensors)


def difference(source: nn.Module, target: nn.Module, rebuilt: Collection[str] = ()) -> str | None:
    """A description of the first part that only one of two models has, regardless of their encodings. None if there is none.

    rebuilt: the paths of modules that may differ.
    """
    theirs, ours = (structure.modules_by_path(each, remove_duplicate=False) for each in (source, target))
    for name, module in _in_common(ours, theirs):
        other = theirs.get(name)
        if name in rebuilt:
            continue
        if type(other) is not type(module) and (other is None or _class_name(module) != _class_name(other)):
            return f"{name!r} is a {type(other).__name__}, but the config of this model describes a {type(module).__name__}"
        if not (module._parameters or other._parameters):  # type: ignore[union-attr]
            continue
        silent = {*disabled_names(module), *disabled_names(other)}
        described, given = ({key for key, each in one._parameters.items() if each is not None} for one in (module, other))
        if differing := sorted((described ^ given) - silent):
            key = f"{name}.{differing[0]}".lstrip(".")
            return f"This model has {'no ' if differing[0] in described else ''}{key}, unlike what its config describes"
    added = (name for name, module in _in_common(theirs, ours) if name not in ours and [*module.parameters()])
    return next((f"This model has {name}, unlike what its config describes" for name in added), None)


def _in_common(modules: dict[str, nn.Module], others: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of one of two models, except encodings and original positional components that are disabled in either."""
    silenced = {name for each in (modules, others) for name, module in each.items() if isinstance(module, Disabled)}
    inside = tuple(f"{name}." for name in silenced)
    for name, module in modules.items():
        if name not in silenced and not name.startswith(inside) and not ("posenc" in name and "posenc" in name.split(".")):
            yield name, module


def share_parameters(
    source: PreTrainedModel, target: PreTrainedModel, rebuilt: Collection[str] = (), resized: bool = False
) -> None:
    """Give `target` all parameters and buffers that both models have in common, and the settings of the source's modules.

    rebuilt: the paths of modules that stay as the target's config creates them, and may already have parameters.
    resized: whether the configs describe other sizes. If so, or if there are rebuilt modules, numbers that follow from the
        config (a scaling by the RoPE factor) stay the target's.

    Raises ValueError if `source` no longer matches its config.
    """
    if found := difference(source, target, rebuilt):
        raise ValueError(
            f"{found}. A model with replaced parts can't be rebuilt from its config. Patch the model as its class creates it, "
            "and replace its parts afterwards. The model was not changed."
        )
    theirs = structure.modules_by_path(source, remove_duplicate=False)
    lengths = specs.length_of(source.config), specs.length_of(target.config)
    before = (
        dict(build_on_meta(type(source), source.config, source.dtype, source).named_modules()) if rebuilt or resized else {}
    )
    ours = structure.modules_by_path(target)
    for name, module in ours.items():
        if name in theirs:
            module.training = theirs[name].training
    for name, module in _in_common(ours, theirs):
        if name in rebuilt:
            continue
        other = theirs[name]
        silent = {*disabled_names(module), *disabled_names(other)}
        for key, parameter in other._parameters.items():
            if key in silent:
                continue
            there = module._parameters.get(key)
            if parameter is not None and there is not None and parameter.shape != there.shape:
                raise ValueError(
                    f"{name}.{key} has another shape than the config of this model describes. Update the config to match it "
                    "(resize_token_embeddings does so), then patch. The model was not changed."
                )
            module._parameters[key] = parameter
        for key, buffer in other._buffers.items():
            # Only ID buffers with the length of the original position embeddings differ in shape.
            if buffer is not None and key in module._buffers and buffer.shape == module._buffers[key].shape:
                module._buffers[key] = buffer
        for key, value in vars(other).items():
            # Users set dropout probabilities, the mode, and checkpointing. Names with _ are private to Transformers. A number
            # in a tensor is the longest length so far for which RoPE buffers were computed.
            if key == _compat.GRADIENT_CHECKPOINTING:
                setattr(module, key, value)
            if key[0] == "_" or key == _compat.QUANTIZED or (mine := getattr(module, key, None)) is value:
                continue
            number = type(value) in (bool, int, float, str) or (isinstance(value, torch.Tensor) and value.ndim == 0)
            # A length that follows from the config stays the target's.
            by_length = type(value) is int and (value, mine) == lengths
            by_length |= name in before and _differs(getattr(before[name], key, None), mine)
            if number and not by_length:
                setattr(module, key, value)
    if any(map(structure.is_patched, ours.values())):
        hooks.wrap_gradient_checkpointing(target)
    for module in ours.values():
        mark(module)  # otherwise, a model made from this one draws new weights
    for module in reversed(ours.values()):  # submodels initialize their own buffers first
        if isinstance(module, PreTrainedModel):
            _compat.forget_gguf(module.config)
            compute_buffers(module, source.device)
    if hasattr(source, "generation_config"):
        target.generation_config = copy.deepcopy(source.generation_config)
    target.name_or_path = source.name_or_path


def _differs(before: Any, after: Any) -> bool:
    """Whether a number differs between two configs."""
    return type(before) in (int, float) and type(after) in (int, float) and before != after


def _class_name(module: nn.Module) -> tuple[str, str]:
    """The Python module and name of a module's class, or of the original class of a derived one.

    A subclass with another name may store its weights differently, as 8-bit layers do. A parametrized module (weight norm) has
    a generated class, so its class before parametrization is used.
    """
    cls = type_before_parametrizations(module)
    cls = getattr(cls, "original_class", cls)
    return cls.__module__, cls.__qualname__


def compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that are still on the meta device, as Transformers does for a model that it loads."""
    for name, module in structure.modules_by_path(model).items():
        left = [key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if left and "posenc" not in name.split("."):
            for key in left:
                module._buffers[key] = torch.empty_like(module._buffers[key], device=device)  # type: ignore[arg-type]
            with global_rng_lock(), torch.no_grad(), guard_torch_init_functions(), marked_as_loaded(module.parameters()):
                model._init_weights(module)
