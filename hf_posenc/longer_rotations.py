"""Stock models whose rotary positions get other rules."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.encodings import Geometry, encoding_class, listed
from hf_posenc.encodings.frequency_rules import ALL, EXTENDING, extended
from hf_posenc.encodings.stretching import DYNAMIC, GROUPED
from hf_posenc.longer_hosts import Host
from hf_posenc.patching import patch
from hf_posenc.sources import HostRefused
from hf_posenc.spec import LENGTH_FIELD
from hf_posenc.transfer import share, shell, twin_of

ROPE = "rope_parameters"
"""The config field of rotary positions: one rule's parameters, or those of each type of layer by its name."""
NEARBY = ("sliding", "chunked")
"""How the types of layers begin whose tokens see few others, and need no longer positions."""
ROTARY = (*EXTENDING, GROUPED)
"""The methods for rotary positions."""
SAME = 1e-3
"""The part of what positions change at all by which two ways of computing them may differ in float32."""


def with_other_rotations(host: Host) -> Any:
    """A model of the same class whose config has other parameters of its rotations; a patched one with `rope` where no config
    says them, or where tokens far away are to be grouped. Raises ValueError, HostRefused."""
    name, asked = type(host.model).__name__, host.asked
    if asked.method not in ROTARY:
        raise ValueError(
            f"method={asked.method!r} is one of learned tables, and {name} has rotary positions: allowed is {listed(ROTARY)}"
        )
    given = getattr(host.inner.config, ROPE, None)
    modules = {
        f"{path}.{source.path}".lstrip("."): source.module
        for path, found in host.stacks.items()
        for source in found.sources
        if source.follows_rope_parameters and found.stack.config is host.inner.config
    }
    if asked.method != GROUPED and given and len(modules) == len(host.stacks):
        return _with_other_parameters(host, given, modules)
    options, rope = _own_rotations(host, given), encoding_class("rope")
    if asked.method == GROUPED:
        asked.refuse_other_settings("window", "group")
        encoding = {"type": "self_extend", **options, **asked.settings}
    else:
        (geometry,) = {found.geometry(asked.after, "input") for found in host.stacks.values()}
        encoding = {"type": "rope", **(rope.extended(rope.checked_options(options), asked, geometry) or {})}
    return patch(host.model, encoding, max_length=asked.after, submodel=host.submodel)


def _with_other_parameters(host: Host, given: dict[str, Any], modules: Mapping[str, nn.Module]) -> Any:
    asked, rotary = host.asked, next(iter(modules.values()))
    config, own = host.config()
    if _by_layer(given):
        turning = [kind for kind, each in given.items() if each is not None and hasattr(rotary, f"{kind}_inv_freq")]
        far = [kind for kind in turning if not kind.startswith(NEARBY)] or turning
        longer = {kind: _checked(given[kind], host, _rotated(rotary, f"{kind}_")) for kind in far}
        setattr(own, ROPE, {**given, **longer})
    else:
        setattr(own, ROPE, _checked(given, host, _rotated(rotary, "")))
    if asked.method != DYNAMIC:  # which starts from the length that the config says
        setattr(own, LENGTH_FIELD, asked.after)
    try:
        if hasattr(own, "validate"):
            own.validate()
        twin = shell(type(host.model), config)
    except Exception as error:  # a host that doesn't have this rule may raise anything
        raise HostRefused(
            f"{type(host.model).__name__} can't be made with {ROPE}={getattr(own, ROPE)}: {' '.join(str(error).split())}",
            reason="a rule that this host doesn't have",
            remedy=f"take another of {listed(ROTARY)}",
        ) from error
    share(host.model, twin, anew=modules)
    return twin


def _checked(given: dict[str, Any], host: Host, rotated: int) -> dict[str, Any]:
    """`rope_parameters` for longer inputs. Raises ValueError for settings that `rope` would refuse as well."""
    longer, rope = extended(given, host.asked, rotated), encoding_class("rope")
    options = {name: longer[name] for name in ALL[longer["rope_type"]] if longer.get(name) is not None}
    options = rope.checked_options({"rope_type": longer["rope_type"], "theta": longer["rope_theta"], **options})
    rope(Geometry(rotated, 1, rotated, trained_length=host.asked.before), **options)
    return {**longer, **{name: options[name] for name in host.asked.settings if name in options}}


def _by_layer(parameters: dict[str, Any]) -> bool:
    """Whether `rope_parameters` are those of each type of layer."""
    return all(isinstance(each, dict) or each is None for each in parameters.values())


def _rotated(rotary: Any, prefix: str) -> int:
    """How many features of each head a rotary module turns."""
    return 2 * len(getattr(rotary, f"{prefix}inv_freq"))


def _own_rotations(host: Host, given: dict[str, Any] | None) -> dict[str, Any]:
    """The options of `rope` by which a model turns as it does by itself, found by asking both.

    Raises HostRefused where there are none.
    """
    config, options = host.inner.config, dict[str, Any]()
    known = {"rope_type", "rope_theta", "partial_rotary_factor", *(name for names in ALL.values() for name in names)}
    if given:
        rule = given.get("rope_type", "default")
        options = {"rope_type": rule, **{name: given[name] for name in ALL.get(rule, ()) if given.get(name) is not None}}
        options |= {"theta": given.get("rope_theta"), "partial_rotary_factor": given.get("partial_rotary_factor", 1.0)}
    elif size := getattr(config, "rotary_dim", None):  # GPT-J, CodeGen
        options = {"partial_rotary_factor": size / (config.hidden_size // config.num_attention_heads)}
    if not given or {*given} <= known:
        without = patch(host.model, "none", submodel=host.submodel)
        expected = _answer(host, twin_of(host.model))
        changed = (_answer(host, without) - expected).abs().max()
        tolerance = max(SAME, 16 * torch.finfo(expected.dtype).eps)
        for layout in ("half", "interleaved"):
            answer = _answer(host, patch(host.model, "rope", **options, layout=layout, submodel=host.submodel))
            if (answer - expected).abs().max() < tolerance * changed:
                return {**options, "layout": layout}
    raise HostRefused(
        f"no options of 'rope' turn queries and keys as {type(host.model).__name__} does in all its layers",
        reason="rotations of its own kind",
        remedy=f"take one of {listed(EXTENDING)} where its config has {ROPE}",
    )


def _answer(host: Host, model: Any) -> Tensor:
    """The states of a model, or of the one within it, for a few tokens, without dropout."""
    inner = model.get_submodule(host.path).eval().base_model
    with torch.no_grad():
        return inner(input_ids=torch.arange(1, 9, device=inner.device)[None])[0]
