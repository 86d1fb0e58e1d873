"""Detects the encoders and decoders ("stacks") of an original model, with their positional components, attentions, and layers.

Unsupported models raise UnsupportedModelError. The detected structure is saved in the config as a plan, from which the patched
model is built and loaded.
"""

import functools
import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.architectures.components import (
    PositionComponent,
    UnsupportedModelError,
    is_order_sensitive,
    patch_projection,
    unhandled_position_modules,
)
from hf_posenc.architectures.components.component import HOSTS_PAGE, OWN_PAGE, is_transformers
from hf_posenc.architectures.components.convolutions import is_convolution
from hf_posenc.architectures.components.registered import declared_in
from hf_posenc.architectures.components.unhandled import OTHER_COMPONENTS, convolves, why_mixed
from hf_posenc.architectures.components.vision import count_extra_tokens, cuts_into_windows, has_square_windows, has_windows
from hf_posenc.architectures.registration import names_in_code
from hf_posenc.architectures.structure import (
    BIDIRECTIONAL_MASK,
    CAUSAL_FLAGS,
    CAUSAL_MASKS,
    CROSS_ATTENTION,
    Structure,
    is_patched,
    layers_and_blocks,
    matching,
    modules_by_path,
    original_class,
    parts_of,
    roles,
    rows_of,
    tokens_of,
)
from hf_posenc.attention import custom, known_models
from hf_posenc.configuration import StackPlan
from hf_posenc.encodings import did_you_mean, quoted
from hf_posenc.signatures import TOKEN_INPUTS, argument_names, codes_within, flattens_ids, reads_tokens

SEVERAL_MODELS = "composite model"
"""The reason for a composite model, for which `patch` needs a submodel."""
TOKEN_MIXING_ARGUMENTS = frozenset(
    ["attention_mask", "cache", "past_key_values", "cache_params", "position_ids", "position_embeddings", "mask"]
)
"""Arguments of modules that can mix tokens."""
MASKS = frozenset([*CAUSAL_MASKS, BIDIRECTIONAL_MASK, *CAUSAL_FLAGS])
UNKNOWN = "no known positional component"
NONE_FOUND = "no supported positions or attention"
"""The reason for a model without positional components and attentions."""


def plan_of(found: Mapping[str, Structure]) -> list[StackPlan]:
    """The plans of a model's structures for its config, outermost stack first."""
    return [_plan(path, structure) for path, structure in reversed([*found.items()])]


def _plan(path: str, structure: Structure) -> StackPlan:
    modules = structure.modules
    kinds: dict[str, list[str]] = {}
    for component in structure.components:
        kinds.setdefault(type(component).__name__, []).append(component.path)
    return StackPlan(
        stack=original_class(structure.stack).__name__,
        path=path,
        components=tuple((kind, each) for kind, paths in kinds.items() for each in _patterns(paths, modules)),
        attentions=_patterns(structure.attentions, modules),
        cross_attentions=_patterns(structure.cross_attentions, modules),
        order_sensitive=_patterns(structure.order_sensitive, modules),
        role=structure.role,
        masks=tuple(sorted(structure.masks)),
        custom_attentions=any(
            custom.row_of(module) for module in (*structure.attentions.values(), *structure.cross_attentions.values())
        ),
        axes=structure.axes,
        extra_tokens=structure.extra_tokens,
        windows=structure.windows,
        patch_projection=structure.patches,
        flattens_ids=structure.flattens,
        settings=tuple(sorted(_settings(structure.stack.config))),
    )


OF_POSITIONS = re.compile(r"alibi|absolute|relative|position|rotary|rope|(?<![^_])(abs|rel|pos)(?![^_])")
"""Matches names of config fields that can select other positions."""


def _settings(config: Any) -> Iterator[tuple[str, bool | str | None]]:
    """Name and value of the config fields that select positions: flags and type names. Lengths and bases can change."""
    for name, value in vars(config).items():
        named = name.endswith("_type") and isinstance(value, str | None)
        if OF_POSITIONS.search(name) and (isinstance(value, bool) or named):
            yield name, value


def _patterns(paths: Iterable[str], modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Paths in the form of a plan, with `*` for layer indices wherever the pattern matches no other paths."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", path), []).append(path)
    return tuple(
        each
        for pattern, group in groups.items()
        for each in ([pattern] if {*matching(pattern, modules)} == {*group} else group)
    )


@functools.cache
def _named_in(stack: Any) -> frozenset[str]:
    """The names that the methods of a model class use, including those of its base classes below PreTrainedModel."""
    classes = [cls for cls in stack.__mro__ if issubclass(cls, PreTrainedModel) and cls is not PreTrainedModel]
    functions = (inspect.unwrap(value) for cls in classes for value in vars(cls).values() if inspect.isfunction(value))
    return frozenset(name for function in functions for code in codes_within(function.__code__) for name in code.co_names)


def find_all(model: Any, where: Collection[str] = ()) -> dict[str, Structure]:
    """The structure of each stack of a model by path, innermost first. BART has an encoder and a decoder.

    Patched stacks are skipped.

    where: the placement of a spec. If it isn't empty, stacks that it doesn't name are skipped.

    Raises UnsupportedModelError if one of the other stacks is unsupported, or if there is none. Raises ValueError if `where`
    names a stack that the model lacks.
    """
    front_ends = _front_ends(model)
    try:
        return _stacks_of(model, where, front_ends)
    except UnsupportedModelError:
        if front_ends and _submodels(model)[0]:
            raise _several_models(model) from None
        raise


def _stacks_of(model: Any, where: Collection[str], front_ends: Collection[str]) -> dict[str, Structure]:
    """`find_all` for a model with submodels without positions and attention, at the paths `front_ends`."""
    wanted = roles(where)
    passed: list[str] = []
    models = {
        path: module for path, module in _modules_outside(model, front_ends).items() if isinstance(module, PreTrainedModel)
    }
    taken = [path for path, module in models.items() if is_patched(module)]
    found: dict[str, Structure] = {}
    for path, module in reversed(models.items()):
        inside = f"{path}." if path else ""
        if not is_patched(module):
            inner = [other for other in found if other.startswith(inside)]
            patched = [other.removeprefix(inside) for other in (*taken, *passed) if other.startswith(inside)]
            around = [*patched, *(other.removeprefix(inside) for other in inner)]
            before = [other.removeprefix(inside) for other in front_ends if other.startswith(inside)]
            try:
                structure = _find(module, around, before)
            except UnsupportedModelError:
                if not wanted or role_of(module) in wanted:
                    raise
                passed.append(path)
                continue
            if structure is None and inner and _has_sources_around(module, [*around, *before]):
                # Swin's encoder has biases, and the model that contains it has position embeddings. They form one stack.
                structure = _find(module, patched, before)
                found = {other: each for other, each in found.items() if other not in inner}
            if structure is not None and wanted and structure.role not in wanted:
                passed.append(path)
            elif structure is not None:
                found[path] = structure
    _check_where(model, where, found)
    left = {*_attentions(modules_by_path(model))[0]}
    if not left:
        raise none_found(type(model))
    left -= {f"{path}.{name}".lstrip(".") for path, structure in found.items() for name in structure.attentions}
    left = {path for path in left if not any(f"{path}.".startswith(f"{stack}.") for stack in (*taken, *passed))}
    if left:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no known positional component for {min(left)}",
            UNKNOWN,
        )
    return found


def _check_where(model: Any, where: Collection[str], found: Mapping[str, Structure]) -> None:
    if not where:
        return
    there = {structure.role for structure in found.values()}
    there |= {"cross" for structure in found.values() if structure.cross_attentions and structure.role == "decoder"}
    if not (getattr(model.config, "is_encoder_decoder", False) and {*where} <= there):
        missing = ", ".join(map(repr, where))
        raise ValueError(
            f"where={missing}: {type(model).__name__} isn't an encoder-decoder with supported attention in each of these. "
            "Omit where, or name only parts that it has."
        )


def role_of(stack: Any) -> str:
    """The role of an original or patched stack, "encoder" or "decoder"."""
    return _role(stack, _attentions(dict(stack.named_modules()))[1])


def _role(stack: Any, cross_attentions: Collection[str]) -> str:
    """The role of a stack, "encoder" or "decoder"."""
    return "decoder" if cross_attentions or getattr(stack.config, "is_decoder", False) else "encoder"


def _attentions(modules: Mapping[str, nn.Module]) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The self-attentions and the cross-attentions, each by path."""
    found: tuple[dict[str, nn.Module], dict[str, nn.Module]] = ({}, {})
    kinds = {type(module): module for module in modules.values()}
    attending = {kind for kind, module in kinds.items() if _is_attention(module)}
    for path, module in modules.items():
        if type(module) in attending and custom.reads_tokens(path, module):
            layer = modules.get(path.rpartition(".")[0])
            found[_is_cross_attention(path, module) or _reads_memory(layer, module)][path] = module
    return found


def _modules_outside(stack: Any, paths: Iterable[str]) -> dict[str, nn.Module]:
    """The modules of a stack by path, without the modules at `paths` and their children."""
    inside = tuple(f"{path}." for path in paths)
    return {path: module for path, module in modules_by_path(stack).items() if not f"{path}.".startswith(inside)}


def _axes(stack: Any, components: Collection[PositionComponent], modules: Mapping[str, nn.Module]) -> int:
    """The number of coordinates of a token.

    A patch has as many as the convolution that computes it, and one of a square window has 2. If patches are ordered by window
    instead of row by row, only their index is known, so the result is 1.
    """
    path = patch_projection(modules)
    if tokens_of(stack) is not None or cuts_into_windows(modules):
        return 1
    if path is None:
        return 2 if any(map(has_square_windows, modules.values())) else 1
    by_cell = any(each.verb == "rotate" and "position_ids" in argument_names(each.module) for each in components)
    return 2 if by_cell or isinstance(modules[path], nn.Conv2d) else 3


def _find(stack: Any, taken: Collection[str], front_ends: Collection[str]) -> Structure | None:
    """The structure of a stack, without the inner stacks at the paths `taken`, and the models at the paths `front_ends`.

    None if it has no attention or no positional components. DINOv3's encoder gets its angles from the model that contains it.

    Raises UnsupportedModelError if a positional component can't be replaced.
    """
    all_modules = modules_by_path(stack)
    apart = (path for path, module in all_modules.items() if path and custom.name_of(module) in custom.OTHER_PARTS)
    taken = [*taken, *apart]
    modules = _modules_outside(stack, [*taken, *front_ends])
    _refuse_modules(stack, modules)
    attentions, _ = _attentions(modules)
    if not attentions:
        if taken or all(
            reason != OTHER_COMPONENTS for _, reason in unhandled_position_modules(stack, modules, claimed=frozenset())
        ):
            return None
        raise UnsupportedModelError(
            f"hf-posenc doesn't support {type(stack).__name__}: none of its attention layers use the Transformers attention "
            "interface",
            "attention outside the attention interface",
        )
    declared = declared_in(stack, modules)
    others = {path: module for path, module in modules.items() if path not in declared}
    found = (component for kind in PositionComponent.kinds for component in kind.find(stack, others))
    known = (component for component in found if component.path not in declared)
    components = (*declared.values(), *known)
    _, across = _attentions(all_modules)
    structure = Structure(
        *(stack, components, attentions, across, others_in_layers(modules, attentions)),
        role=_role(stack, across),
        masks=MASKS & _named_in(stack.__class__),
        axes=_axes(stack, components, all_modules),
        extra_tokens=count_extra_tokens(all_modules),
        windows=has_windows(all_modules),
        patches=patch_projection(all_modules),
        flattens=flattens_ids(stack),
    )
    _refuse_unclaimed(structure, modules)
    # A text model without positional components can learn order from order-sensitive layers. If it has only attention layers,
    # it gets its positions from elsewhere.
    if not components and (not structure.order_sensitive or structure.tokens is None):
        return None
    _refuse_unreachable(structure, modules)
    return structure


def others_in_layers(modules: Mapping[str, nn.Module], attentions: Collection[str]) -> dict[str, nn.Module]:
    """The order-sensitive modules in the numbered layers of a stack, outside of its attentions, by path."""
    rows = rows_of(modules, attentions)
    found: dict[str, nn.Module] = {}
    for path, module in modules.items():
        if not (is_order_sensitive(module) or _pools(path, module)):
            continue
        in_row = any(re.match(rf"{re.escape(row)}\.\d+\.", path) for row in rows)
        within = any(f"{path}.".startswith(f"{other}.") for other in (*attentions, *found))
        around = any(f"{attention}.".startswith(f"{path}.") for attention in attentions)
        if in_row and not within and not around:
            found[path] = module
    return found


def _pools(path: str, module: nn.Module) -> bool:
    """Whether a module is a strided convolution, which merges tokens (adapters of speech encoders)."""
    return convolves(path, module) and max(getattr(module, "stride", (1,))) > 1


def _conv_stems(stack: Any, modules: Mapping[str, nn.Module], attentions: Collection[str]) -> dict[str, nn.Module]:
    """The convolutions outside the numbered layers of a stack that computes its tokens from an image or audio, by path."""
    names = {*argument_names(stack)}
    # RT-DETR's encoder reads feature maps as `inputs_embeds`, and its main input is still that of the whole model.
    tokens = TOKEN_INPUTS if reads_tokens(stack) or stack.main_input_name in TOKEN_INPUTS else frozenset()
    if not tokens.isdisjoint(names) and stack.main_input_name not in names - tokens:
        return {}
    rows = tuple(f"{row}." for row in rows_of(modules, attentions))
    # Positional convolutions are positional components, or are never called.
    elsewhere = (*rows, *(f"{path}." for path, module in modules.items() if is_convolution(module)))
    return {path: module for path, module in modules.items() if convolves(path, module) and not path.startswith(elsewhere)}


def _claimed(structure: Structure) -> set[str]:
    """The paths of all modules and parameters of the positional components."""
    return {path for component in structure.components for path in component.claimed}


def _unclaimed_fronts(structure: Structure, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    claimed = tuple(f"{path}." for path in _claimed(structure))
    conv_stems = _conv_stems(structure.stack, modules, structure.attentions)
    return {path: module for path, module in conv_stems.items() if not path.startswith(claimed)}


def order_aware_modules_of(structure: Structure) -> dict[str, nn.Module]:
    """The order-sensitive modules of an original stack, in its layers and before them, by path."""
    return {**structure.order_sensitive, **_unclaimed_fronts(structure, structure.modules)}


def order_aware_modules(stack: nn.Module) -> dict[str, nn.Module]:
    """The order-sensitive modules of a patched stack, in its layers and before them, by path."""
    models = (path for path, module in modules_by_path(stack).items() if path and isinstance(module, PreTrainedModel))
    modules = _modules_outside(stack, models)
    attentions, _ = _attentions(modules)
    return {**others_in_layers(modules, attentions), **_conv_stems(stack, modules, attentions)}


def _refuse_modules(stack: Any, modules: Mapping[str, nn.Module]) -> None:
    """Raises UnsupportedModelError if a module belongs to a class that is known to be unsupported (known_models.py)."""
    for path, module in modules.items():
        if refusal := known_models.refusal_of(module):
            raise UnsupportedModelError(
                f"hf-posenc doesn't support {type(stack).__name__}: {path} is a {type(module).__name__}, which {refusal.why}"
                if path
                else f"{type(stack).__name__} {refusal.why}",
                reason="unsupported attention",
                remedy=refusal.remedy,
            )


def _has_sources_around(stack: Any, taken: Iterable[str]) -> bool:
    """Whether a model has positional components outside of its inner stacks."""
    modules = _modules_outside(stack, taken)
    return any(next(iter(kind.find(stack, modules)), None) is not None for kind in PositionComponent.kinds)


def _front_ends(model: Any) -> list[str]:
    """The paths of the submodels without positions and attention, such as a convolutional backbone, in a composite model.

    Raises UnsupportedModelError if other submodels have their own config (LLaVA). BART's encoder and decoder have the whole
    model's config.
    """
    found: list[str] = []
    for path, module in _with_own_config(model).items():
        if not path.startswith(tuple(f"{other}." for other in found)):
            if not _is_front_end(module):
                raise _several_models(model, path)
            found.append(path)
    return found


def _with_own_config(model: Any) -> dict[str, Any]:
    """The submodels that have another kind of config than the model, by path. Only composite models have such submodels."""
    inner = {path: module for path, module in modules_by_path(model).items() if path and isinstance(module, PreTrainedModel)}
    return {path: module for path, module in inner.items() if type(module.config) is not type(model.config)}


def _is_front_end(module: Any) -> bool:
    try:
        find_all(module)
    except UnsupportedModelError as refused:
        return refused.reason == NONE_FOUND
    return False


def _several_models(model: Any, inner: str = "") -> UnsupportedModelError:
    """The error for a composite model.

    inner: the path of a submodel with its own positions. Empty if only parts of the model itself have positions.
    """
    submodels, refused = _submodels(model)
    name = type(model).__name__
    if refused and not submodels:
        path, why = next(iter(refused.items()))
        return UnsupportedModelError(f"no submodel of {name} is supported. For {path}: {why.message}", why.reason, why.remedy)
    named = " or ".join(f"submodel={path!r}" for path in submodels)
    remedy = f"Choose one: {named}." if named else f"None of them is supported by itself. {HOSTS_PAGE}"
    if not inner:
        return UnsupportedModelError(f"hf-posenc supports only parts of {name}", SEVERAL_MODELS, remedy, submodels)
    return UnsupportedModelError(
        f"{name} contains several models with their own position encodings, such as {inner}", SEVERAL_MODELS, remedy, submodels
    )


def submodel(model: Any, path: str) -> Any:
    """The submodel at a dotted path in the base model of a composite model (see `structure.part`).

    Raises ValueError if there is none, and UnsupportedModelError if the composite model interleaves its submodels.
    """
    inner = parts_of(model).get(path)
    if inner is None or not _with_own_config(model):
        there, name = submodels_of(model), type(model.base_model).__name__
        supported = f"Supported submodels: {quoted(there)}." if there else "It has no supported submodels; omit the argument."
        raise ValueError(f"{name} has no submodel {path!r}{did_you_mean(path, there)}. {supported}")
    _refuse_mixed(model, inner, path)
    return inner


def submodels_of(model: Any) -> tuple[str, ...]:
    """The paths of the supported submodels of a composite model that isn't supported as a whole.

    They don't contain each other, and those that read token IDs come first.
    """
    try:
        find_all(model)
    except UnsupportedModelError as refused:
        return refused.submodels
    return ()


def _submodels(model: Any) -> tuple[tuple[str, ...], dict[str, UnsupportedModelError]]:
    """The paths of the supported submodels, and the errors for the others with positions or attention, if they aren't composite
    models.
    """
    found: dict[str, Any] = {}
    refused: dict[str, UnsupportedModelError] = {}
    for path, module in parts_of(model).items():
        if not any(module is each for outer in found.values() for each in outer.modules()):
            try:
                _refuse_mixed(model, module, path)
                find_all(module)
            except UnsupportedModelError as error:
                if error.reason not in (NONE_FOUND, SEVERAL_MODELS) and not _with_own_config(module):
                    refused[path] = error
                continue
            found[path] = module
    return tuple(sorted(found, key=lambda path: not reads_tokens(found[path]))), refused


def _refuse_mixed(model: Any, inner: Any, path: str) -> None:
    """Raises UnsupportedModelError if a model that contains this submodel interleaves its submodels."""
    for module in model.modules():
        if (mixed := why_mixed(module)) and any(part is inner for part in module.modules()):
            why, reason = mixed
            raise UnsupportedModelError(f"{type(module).__name__} {why}, so {path} isn't supported by itself", reason)


def _refuse_unclaimed(structure: Structure, modules: Mapping[str, nn.Module]) -> None:
    name = type(structure.stack).__name__
    claimed = {*_claimed(structure), *structure.order_sensitive, *_unclaimed_fronts(structure, modules)}
    if signs := sorted(unhandled_position_modules(structure.stack, modules, claimed)):
        reason = signs[0][1]
        raise UnsupportedModelError(
            f"hf-posenc can't replace positional components of {name}: {', '.join(path for path, _ in signs[:4])}", reason
        )
    offsets = {component.offset for component in structure.components if component.offset is not None}
    if len(offsets) > 1:
        raise UnsupportedModelError(
            f"the position embeddings of {name} start at different IDs: {offsets}", "position embeddings with different offsets"
        )


def _refuse_unreachable(structure: Structure, modules: Mapping[str, nn.Module]) -> None:
    """Raises UnsupportedModelError if the encoding would have no effect in some layers."""
    stack, name = structure.stack, type(structure.stack).__name__
    if reads_tokens(stack) and tokens_of(stack) is None:
        raise UnsupportedModelError(f"{name} has no token embeddings", "no token embeddings")
    for path, module in structure.attentions.items():
        if not is_transformers(type(module)) and not custom.row_of(module):
            _refuse_own_attention(f"{name}.{path}", module)
    if without := _layers_without_attention(structure, modules):
        raise UnsupportedModelError(
            f"hf-posenc doesn't support {name}: {without[0]} ({type(modules[without[0]]).__name__}) has no supported attention "
            "module, so the encoding would have no effect there",
            "layers without attention",
        )


def _refuse_own_attention(path: str, module: Any) -> None:
    """Raises UnsupportedModelError for a custom attention that doesn't choose its attention function as Transformers does."""
    if not {"config", "_attn_implementation"} <= names_in_code(type(module)) or not hasattr(module, "config"):
        raise UnsupportedModelError(
            f"{path} ({type(module).__name__}) doesn't read self.config._attn_implementation in its forward method to choose a "
            "function from ALL_ATTENTION_FUNCTIONS, so the encoding would be lost",
            reason="attention function chosen elsewhere",
            remedy=OWN_PAGE,
        )


def none_found(host: type[PreTrainedModel]) -> UnsupportedModelError:
    """The error for a model without positional components and supported attentions."""
    return UnsupportedModelError(
        f"hf-posenc doesn't support {host.__name__}: it found neither positional components nor attention layers that use the "
        "Transformers attention interface",
        NONE_FOUND,
    )


def _layers_without_attention(structure: Structure, modules: Mapping[str, nn.Module]) -> list[str]:
    """The numbered layers that have no attention and no order-sensitive module, but could still mix tokens."""
    with_attention = {layer for layer, _ in layers_and_blocks(modules, structure.attentions).values()}
    rows = {layer.rpartition(".")[0] for layer in with_attention}
    layers = (path for path in modules if path.rpartition(".")[0] in rows and path.rpartition(".")[2].isdigit())
    known = [*with_attention, *structure.order_sensitive]
    left = [path for path in layers if not any(f"{other}.".startswith(f"{path}.") for other in known)]
    return [path for path in left if any(_may_mix(module) for module in modules[path].modules() if module is not modules[path])]


def _may_mix(module: nn.Module) -> bool:
    """Whether a module in a layer could mix tokens, by its arguments or its class name.

    A feed-forward block or a router takes only hidden states. An expert also takes the indices of its tokens.
    """
    return bool(TOKEN_MIXING_ARGUMENTS & {*argument_names(module)}) or "attention" in type(module).__name__.lower()


def _is_attention(module: nn.Module) -> bool:
    return custom.uses_interface(type(module)) or bool(custom.row_of(module))


def _reads_memory(layer: nn.Module | None, module: nn.Module) -> bool:
    """Whether an attention is the cross-attention of torch's decoder layer."""
    return isinstance(layer, nn.TransformerDecoderLayer) and module is layer.multihead_attn


def _is_cross_attention(path: str, module: nn.Module) -> bool:
    """Whether the keys of an attention are computed from another stack's hidden states."""
    return bool(CROSS_ATTENTION.search(path)) or bool(getattr(module, "is_cross_attention", False))
