"""Finds the stacks of a stock model, with their sources of position, attentions and layers. Refuses hosts that an encoding
can't be put into. What is found is written into the config as a plan, by which the model is built and loaded from then on.
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
from hf_posenc.architectures.components.unhandled import OTHER_COMPONENTS, convolves, couples_submodels
from hf_posenc.architectures.components.vision import count_extra_tokens, cuts_into_windows, has_windows
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
    original_class,
    roles,
    rows_of,
    tokens_of,
)
from hf_posenc.attention import custom, known_models
from hf_posenc.configuration import StackPlan
from hf_posenc.encodings import did_you_mean, quoted
from hf_posenc.signatures import TOKEN_INPUTS, argument_names, codes_within, flattens_ids, reads_tokens

SEVERAL_MODELS = "composite model"
"""The reason of the refusal of a model which needs to be told the submodel."""
TOKEN_MIXING_ARGUMENTS = frozenset(
    ["attention_mask", "cache", "past_key_values", "cache_params", "position_ids", "position_embeddings", "mask"]
)
"""Arguments of modules that look at several tokens."""
MASKS = frozenset([*CAUSAL_MASKS, BIDIRECTIONAL_MASK, *CAUSAL_FLAGS])
UNKNOWN = "no known positional component"
"""The reason of a refusal."""


def plan_of(found: Mapping[str, Structure]) -> list[StackPlan]:
    """What was found in a model, as its config is to say it, outermost stack first."""
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
"""In names of settings of configs by which a stack may choose its positions."""


def _settings(config: Any) -> Iterator[tuple[str, bool | str | None]]:
    """Name and value of the settings that choose positions: flags, and names of types. Lengths and bases may change."""
    for name, value in vars(config).items():
        named = name.endswith("_type") and isinstance(value, str | None)
        if OF_POSITIONS.search(name) and (isinstance(value, bool) or named):
            yield name, value


def _patterns(paths: Iterable[str], modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Paths as a plan names them: with * for the numbers of layers, where it names no others."""
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
    """The names that the methods of a stack's own classes use."""
    classes = [cls for cls in stack.__mro__ if issubclass(cls, PreTrainedModel) and cls is not PreTrainedModel]
    functions = (inspect.unwrap(value) for cls in classes for value in vars(cls).values() if inspect.isfunction(value))
    return frozenset(name for function in functions for code in codes_within(function.__code__) for name in code.co_names)


def find_all(model: Any, where: Collection[str] = ()) -> dict[str, Structure]:
    """Path -> structure of each stack of a model, innermost first: BART has an encoder and a decoder. Stacks which are patched
    already are passed over.

    where: of a spec; a stack in which nothing acts is passed over, too.

    Raises UnsupportedModelError where an encoding can't be put into all of the others, or where there is none. ValueError
    where the model has no such stack.
    """
    refuse_several_models(model)
    wanted = roles(where)
    passed: list[str] = []
    models = {path: module for path, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    taken = [path for path, module in models.items() if is_patched(module)]
    found: dict[str, Structure] = {}
    for path, module in reversed(models.items()):
        inside = f"{path}." if path else ""
        if not is_patched(module):
            inner = [other for other in found if other.startswith(inside)]
            patched = [other.removeprefix(inside) for other in (*taken, *passed) if other.startswith(inside)]
            around = [*patched, *(other.removeprefix(inside) for other in inner)]
            try:
                structure = _find(module, around)
            except UnsupportedModelError:
                if not wanted or _role(module, _attentions(dict(module.named_modules()))[1]) in wanted:
                    raise
                passed.append(path)
                continue
            if structure is None and inner and _has_sources_around(module, around):
                # Swin's encoder has biases, and the model around it a table: one stack.
                structure = _find(module, patched)
                found = {other: each for other, each in found.items() if other not in inner}
            if structure is not None and wanted and structure.role not in wanted:
                passed.append(path)
            elif structure is not None:
                found[path] = structure
    _check_where(model, where, found)
    left = {*_attentions(dict(model.named_modules()))[0]}
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


def _role(stack: Any, cross_attentions: Collection[str]) -> str:
    """Which stack of an encoder and a decoder one is."""
    return "decoder" if cross_attentions or getattr(stack.config, "is_decoder", False) else "encoder"


def _attentions(modules: Mapping[str, nn.Module]) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Path -> module of self-attentions, and of attentions to another stack's states."""
    found: tuple[dict[str, nn.Module], dict[str, nn.Module]] = ({}, {})
    for path, module in modules.items():
        if _is_attention(module):
            found[_is_cross_attention(path, module)][path] = module
    return found


def _modules_outside(stack: Any, paths: Iterable[str]) -> dict[str, nn.Module]:
    """Path -> module of a stack, except for the modules at some paths and what is in them."""
    inside = tuple(f"{path}." for path in paths)
    return {path: module for path, module in stack.named_modules() if not f"{path}.".startswith(inside)}


def _axes(stack: Any, components: Collection[PositionComponent], modules: Mapping[str, nn.Module]) -> int:
    """How many coordinates a token has: of a patch as many as the convolution that cuts it out. Of patches that lie by windows,
    not row by row, the number in that order alone."""
    path = patch_projection(modules)
    if tokens_of(stack) is not None or cuts_into_windows(modules) or path is None:
        return 1
    by_cell = any(each.verb == "rotate" and "position_ids" in argument_names(each.module) for each in components)
    return 2 if by_cell or isinstance(modules[path], nn.Conv2d) else 3


def _find(stack: Any, taken: Iterable[str]) -> Structure | None:
    """The structure of a stack, but for those within it that are taken. None where it has no attention, or no source of
    position: DINOv3's encoder gets its angles from the model around it.

    Raises UnsupportedModelError where not all of its sources of position can be taken over.
    """
    modules = _modules_outside(stack, taken := [*taken])
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
    all_modules = dict(stack.named_modules())
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
    # A stack of tokens without positions of its own has other layers to know order by. One whose layers are all attentions gets
    # its positions elsewhere.
    if not components and (not structure.order_sensitive or structure.tokens is None):
        return None
    _refuse_unreachable(structure, modules)
    return structure


def others_in_layers(modules: Mapping[str, nn.Module], attentions: Collection[str]) -> dict[str, nn.Module]:
    """Path -> module of what sees order by itself in the numbered layers of a stack, outside of its attentions."""
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
    """Whether a module makes one token of several, for a layer of fewer tokens (adapters of speech encoders)."""
    return convolves(path, module) and max(getattr(module, "stride", (1,))) > 1


def _conv_stems(stack: Any, modules: Mapping[str, nn.Module], attentions: Collection[str]) -> dict[str, nn.Module]:
    """Path -> module of the convolutions outside the numbered layers of a stack that makes its tokens itself, of an image or a
    sound."""
    names = {*argument_names(stack)}
    if not TOKEN_INPUTS.isdisjoint(names) and stack.main_input_name not in names - TOKEN_INPUTS:
        return {}
    rows = tuple(f"{row}." for row in rows_of(modules, attentions))
    # Convolutions of positions are sources, or nothing calls them.
    elsewhere = (*rows, *(f"{path}." for path, module in modules.items() if is_convolution(module)))
    return {path: module for path, module in modules.items() if convolves(path, module) and not path.startswith(elsewhere)}


def _claimed(structure: Structure) -> set[str]:
    """The paths of what the sources of position are made of."""
    return {path for component in structure.components for path in component.claimed}


def _unclaimed_fronts(structure: Structure, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    claimed = tuple(f"{path}." for path in _claimed(structure))
    conv_stems = _conv_stems(structure.stack, modules, structure.attentions)
    return {path: module for path, module in conv_stems.items() if not path.startswith(claimed)}


def order_aware_modules_of(structure: Structure) -> dict[str, nn.Module]:
    """Path -> module of what sees order by itself in a stock stack: in its layers, and before them."""
    return {**structure.order_sensitive, **_unclaimed_fronts(structure, structure.modules)}


def order_aware_modules(stack: nn.Module) -> dict[str, nn.Module]:
    """Path -> module of what sees order by itself in a patched stack: in its layers, and before them."""
    models = (path for path, module in stack.named_modules() if path and isinstance(module, PreTrainedModel))
    modules = _modules_outside(stack, models)
    attentions, _ = _attentions(modules)
    return {**others_in_layers(modules, attentions), **_conv_stems(stack, modules, attentions)}


def _refuse_modules(stack: Any, modules: Mapping[str, nn.Module]) -> None:
    """Raises UnsupportedModelError where a module is one in which order stays visible, or which tokens alone don't reach."""
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
    """Whether a model has sources of position outside of the stacks within it."""
    modules = _modules_outside(stack, taken)
    return any(next(iter(kind.find(stack, modules)), None) is not None for kind in PositionComponent.kinds)


def refuse_several_models(model: Any) -> None:
    """Raises UnsupportedModelError for a model that joins others (LLaVA). The halves of one model (BART) have its config."""
    for path, module in model.named_modules():
        if path and isinstance(module, PreTrainedModel) and type(module.config) is not type(model.config):
            raise _several_models(model, path)


def _several_models(model: Any, inner: str) -> UnsupportedModelError:
    submodels = submodels_of(model)
    named = " or ".join(f"submodel={path!r}" for path in submodels)
    return UnsupportedModelError(
        f"{type(model).__name__} contains several models with their own position encodings, such as {inner}",
        SEVERAL_MODELS,
        f"Choose one: {named}." if named else f"None of them is supported by itself. {HOSTS_PAGE}",
        submodels=submodels,
    )


def submodel(model: Any, path: str) -> Any:
    """The model at a dotted path within the base model of one that is made of several.

    Raises ValueError if there is none, and UnsupportedModelError where the model mixes what its parts compute.
    """
    base = model.base_model
    inner = dict(base.named_modules()).get(path)
    if not isinstance(inner, PreTrainedModel) or type(inner.config) is type(base.config):
        there = submodels_of(model)
        supported = f"Supported submodels: {quoted(there)}." if there else "It has no supported submodels; omit the argument."
        raise ValueError(f"{type(base).__name__} has no submodel {path!r}{did_you_mean(path, there)}. {supported}")
    _refuse_mixed(model, inner, path)
    return inner


def submodels_of(model: Any) -> tuple[str, ...]:
    """The paths, relative to the base model, of the models within that an encoding can be put into: none lies within another,
    and those that read tokens come first."""
    found: dict[str, bool] = {}
    for path, module in model.base_model.named_modules():
        inside = any(path.startswith(f"{other}.") for other in found)
        if path and not inside and isinstance(module, PreTrainedModel) and type(module.config) is not type(model.config):
            try:
                _refuse_mixed(model, module, path)
                find_all(module)
            except UnsupportedModelError:
                continue
            found[path] = reads_tokens(module)
    return tuple(sorted(found, key=lambda path: not found[path]))


def _refuse_mixed(model: Any, inner: Any, path: str) -> None:
    """Raises UnsupportedModelError for a part of a model that mixes what its parts compute."""
    for module in model.modules():
        if (why := couples_submodels(module)) and any(part is inner for part in module.modules()):
            raise UnsupportedModelError(
                f"{type(module).__name__} {why}, so {path} isn't supported by itself", "interleaved submodels"
            )


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
    """Raises UnsupportedModelError where the encoding could not act in all layers."""
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
    """Raises UnsupportedModelError for a user's own attention that doesn't look its function up as Transformers' own do, by
    which an encoding would be lost."""
    if not {"config", "_attn_implementation"} <= names_in_code(type(module)) or not hasattr(module, "config"):
        raise UnsupportedModelError(
            f"{path} ({type(module).__name__}) doesn't read self.config._attn_implementation in its forward method to choose a "
            "function from ALL_ATTENTION_FUNCTIONS, so the encoding would be lost",
            reason="attention function chosen elsewhere",
            remedy=OWN_PAGE,
        )


def none_found(host: type[PreTrainedModel]) -> UnsupportedModelError:
    """The refusal of a host in which `find` found nothing."""
    return UnsupportedModelError(
        f"hf-posenc doesn't support {host.__name__}: it found neither positional components nor attention layers that use the "
        "Transformers attention interface",
        "no supported positions or attention",
    )


def _layers_without_attention(structure: Structure, modules: Mapping[str, nn.Module]) -> list[str]:
    """The layers in a row with attentions that have none, and of which nothing else is known either: neither what sees order
    by itself, nor that it treats each token alone."""
    with_attention = {layer for layer, _ in layers_and_blocks(modules, structure.attentions).values()}
    rows = {layer.rpartition(".")[0] for layer in with_attention}
    layers = (path for path in modules if path.rpartition(".")[0] in rows and path.rpartition(".")[2].isdigit())
    known = [*with_attention, *structure.order_sensitive]
    left = [path for path in layers if not any(f"{other}.".startswith(f"{path}.") for other in known)]
    return [path for path in left if any(_may_mix(module) for module in modules[path].modules() if module is not modules[path])]


def _may_mix(module: nn.Module) -> bool:
    """Whether a module within a layer may look at several tokens: it takes more than hidden states, or is named so. (A
    feed-forward block or a choice of experts takes hidden states alone; an expert which tokens are its own.)"""
    return bool(TOKEN_MIXING_ARGUMENTS & {*argument_names(module)}) or "attention" in type(module).__name__.lower()


def _is_attention(module: nn.Module) -> bool:
    return custom.uses_interface(type(module)) or bool(custom.row_of(module))


def _is_cross_attention(path: str, module: nn.Module) -> bool:
    """Whether an attention's keys are another stack's states."""
    return bool(CROSS_ATTENTION.search(path)) or bool(getattr(module, "is_cross_attention", False))
