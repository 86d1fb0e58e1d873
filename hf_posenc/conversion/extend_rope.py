"""Extends original models with rotary positions by changing their RoPE rule."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_posenc.architectures.components import UnsupportedModelError
from hf_posenc.configuration import LENGTH_FIELD, ROPE
from hf_posenc.conversion.extend_target import ExtensionTarget
from hf_posenc.conversion.patching import patch
from hf_posenc.encodings import Geometry, encoding_class, quoted
from hf_posenc.encodings.frequency_rules import ALL, EXTENDING, ORIGINAL, extended
from hf_posenc.encodings.table_interpolation import DYNAMIC, GROUPED, WINDOWS
from hf_posenc.modeling.parameter_sharing import build_on_meta, clone_sharing_parameters, share_parameters

NEARBY = ("sliding", "chunked")
"""Prefixes of layer types with local attention, which don't need longer positions."""
ROTARY = (*EXTENDING, GROUPED)
"""The methods for rotary positions."""
FEW = 8
"""Number of tokens on which two computations of rotations are compared."""
SAME = 1e-3
"""Maximum difference between two computations of positions in float32, relative to the total effect of positions."""


def with_other_rotations(host: ExtensionTarget) -> Any:
    """A model of the same class whose config has other RoPE parameters.

    If the config has no such parameters, or the method is "grouped" or "windows", the result is a patched model. Raises
    ValueError, UnsupportedModelError."""
    name, asked = type(host.model).__name__, host.asked
    if asked.method not in (*ROTARY, WINDOWS):
        raise ValueError(
            f"method={asked.method!r} applies to learned position embeddings, but {name} has rotary positions. Choose one of "
            f"{quoted(ROTARY)}."
        )
    given = getattr(host.inner.config, ROPE, None)
    modules = {
        f"{path}.{component.path}".lstrip("."): component.module
        for path, found in host.stacks.items()
        for component in found.components
        if component.follows_rope_parameters and found.stack.config is host.inner.config
    }
    if asked.method == WINDOWS:
        encoding = {**_as_it_turns(host, {"rope": _options(host.inner.config, given)}), "windows": asked.windows()}
        return patch(host.model, encoding, max_length=asked.after, submodel=host.submodel)
    if asked.method != GROUPED and given and len(modules) == len(host.stacks):
        return _with_other_parameters(host, given, modules)
    if asked.method == GROUPED:
        encoding = _as_it_turns(host, _by_type_of_layer(host, given))
    else:
        own, rope = _as_it_turns(host, {"rope": _options(host.inner.config, given)}), encoding_class("rope")
        options = rope.checked_options({name: value for name, value in own.items() if name != "type"})
        encoding = {"type": "rope", **(rope.extended(options, asked, host.geometry) or {})}
    return patch(host.model, encoding, max_length=asked.after, submodel=host.submodel)


def _with_other_parameters(host: ExtensionTarget, given: dict[str, Any], modules: Mapping[str, nn.Module]) -> Any:
    asked, rotary = host.asked, next(iter(modules.values()))
    config, own = host.config()
    if _by_layer(given):
        turning = [kind for kind, each in given.items() if each is not None and hasattr(rotary, f"{kind}_inv_freq")]
        far = [kind for kind in turning if not kind.startswith(NEARBY)] or turning
        longer = {kind: _checked(given[kind], host, _rotated(rotary, f"{kind}_")) for kind in far}
        setattr(own, ROPE, {**given, **longer})
    else:
        setattr(own, ROPE, _checked(given, host, _rotated(rotary, "")))
    if asked.method != DYNAMIC:  # "dynamic" scales from the length in the config
        setattr(own, LENGTH_FIELD, asked.after)
    try:
        if hasattr(own, "validate"):
            own.validate()
        twin = build_on_meta(type(host.model), config, like=host.model)
    except Exception as error:  # an architecture without this rule may raise anything
        raise UnsupportedModelError(
            f"{type(host.model).__name__} can't be built with {ROPE}={getattr(own, ROPE)} ({' '.join(str(error).split())})",
            reason="unsupported RoPE rule",
            remedy=f"Choose another method: {quoted(ROTARY)}.",
        ) from error
    share_parameters(host.model, twin, rebuilt=modules)
    return twin


def _checked(given: dict[str, Any], host: ExtensionTarget, rotated: int) -> dict[str, Any]:
    """`rope_parameters` for longer inputs. Raises ValueError for settings that `rope` doesn't accept."""
    longer, rope = extended(given, host.asked, rotated), encoding_class("rope")
    options = {name: longer[name] for name in ALL[longer["rope_type"]] if longer.get(name) is not None}
    options = rope.checked_options({"rope_type": longer["rope_type"], "theta": longer["rope_theta"], **options})
    rope(Geometry(rotated, 1, rotated, trained_length=host.asked.before), **options)
    if longer["rope_type"] == DYNAMIC:  # Transformers uses the config's length field, and warns if the rule sets a length
        longer.pop(ORIGINAL)
    checked = {name: options[name] for name in host.asked.settings if name in options}
    return {**longer, **{name: [*value] if isinstance(value, tuple) else value for name, value in checked.items()}}


def _by_layer(parameters: dict[str, Any]) -> bool:
    """Whether `rope_parameters` contains one rule for each layer type."""
    return all(isinstance(each, dict) or each is None for each in parameters.values())


def _rotated(rotary: Any, prefix: str) -> int:
    """The number of features per head that a rotary module rotates."""
    return 2 * len(getattr(rotary, f"{prefix}inv_freq"))


Parts = dict[str, dict[str, Any] | None]
"""Encoding -> its options, for encodings that together rotate all layers. None if no options express the config."""


def _options(config: Any, given: dict[str, Any] | None) -> dict[str, Any] | None:
    """The options of `rope` for the parameters of one rule, or for a config without them. None if `rope` lacks a parameter."""
    if given is None:  # GPT-J, CodeGen
        size = getattr(config, "rotary_dim", None)
        return {"partial_rotary_factor": size / (config.hidden_size // config.num_attention_heads)} if size else {}
    known = {"rope_type", "rope_theta", "partial_rotary_factor", *(name for names in ALL.values() for name in names)}
    if not {*given} <= known:
        return None
    rule = given.get("rope_type", "default")
    options = {"rope_type": rule, **{name: given[name] for name in ALL.get(rule, ()) if given.get(name) is not None}}
    return {**options, "theta": given.get("rope_theta"), "partial_rotary_factor": given.get("partial_rotary_factor", 1.0)}


def _by_type_of_layer(host: ExtensionTarget, given: dict[str, Any] | None) -> Parts:
    """SelfExtend for layers with full attention, and `rope` for layers with local attention."""
    config = host.inner.config
    if given is None or not _by_layer(given):
        turning = [layer for layer, turns in enumerate(getattr(config, "no_rope_layers", None) or ()) if turns]  # SmolLM3
        return {"self_extend": _grouped(host, _options(config, given), {"layers": turning} if turning else {})}
    parts: Parts = {}
    for kind, parameters in given.items():
        layers = {"layers": [layer for layer, each in enumerate(config.layer_types) if each == kind]}
        if parameters is None or not layers["layers"]:
            continue
        name = "rope" if kind.startswith(NEARBY) else "self_extend"
        options = None if name in parts else _options(config, parameters)  # an encoding can't have two sets of parameters
        parts[name] = {**options, **layers} if name == "rope" and options is not None else _grouped(host, options, layers)
    return parts


def _grouped(host: ExtensionTarget, options: dict[str, Any] | None, layers: dict[str, Any]) -> dict[str, Any] | None:
    longer = None if options is None else encoding_class("self_extend").extended(options, host.asked, host.geometry)
    return None if longer is None else {**longer, **layers}


def _as_it_turns(host: ExtensionTarget, parts: Parts) -> dict[str, Any]:
    """The encoding, including its layout, with which a patched model reproduces the original's output for a few tokens.

    Raises UnsupportedModelError if no layout does.
    """
    if parts and None not in parts.values():
        without = patch(host.model, "none", submodel=host.submodel)
        expected = host.answer(clone_sharing_parameters(host.model), FEW)
        changed = (host.answer(without, FEW) - expected).abs().max()
        tolerance = max(SAME, 16 * torch.finfo(expected.dtype).eps)
        for layout in ("half", "interleaved"):
            each = {name: {**(options or {}), "layout": layout} for name, options in parts.items()}
            encoding = {"type": "+".join(each), **(each if len(each) > 1 else next(iter(each.values())))}
            answer = host.answer(patch(host.model, encoding, submodel=host.submodel), FEW)
            if (answer - expected).abs().max() < tolerance * changed:
                return encoding
    raise UnsupportedModelError(
        f"no options of {quoted([*parts])} reproduce the rotation of {type(host.model).__name__} in all layers",
        reason="unknown rotation",
        remedy=f"If its config has {ROPE}, choose {quoted(EXTENDING)}.",
    )
