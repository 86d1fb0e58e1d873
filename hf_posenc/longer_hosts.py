"""Stock models for longer inputs: their own learned tables stretched, or other rules for their rotary positions."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import local_torch_dtype

from hf_posenc import spec as specs
from hf_posenc.encodings import (
    encoding_class,
    listed,
)
from hf_posenc.encodings.frequency_rules import ALL, EXTENDING
from hf_posenc.encodings.frequency_rules import extended as extended_rope_parameters
from hf_posenc.encodings.stretching import DYNAMIC, GROUPED, STATIC, Extension
from hf_posenc.patching import patch
from hf_posenc.sources import HostRefused
from hf_posenc.spec import LENGTH_FIELD
from hf_posenc.structure import Structure, find_all
from hf_posenc.transfer import share, shell

ROPE = "rope_parameters"
"""The config field of rotary positions: one rule's parameters, or those of each type of layer by its name."""
NEARBY = ("sliding", "chunked")
"""How the types of layers begin whose tokens see few others, and need no longer positions."""
ROTARY = (*EXTENDING, GROUPED)
"""The methods for rotary positions."""
SAME = 1e-3
"""The part of what positions change at all by which two ways of computing them may differ."""
UNEXTENDED = "positions that no method makes longer"
"""The reason of a refusal."""


def extended_host(model: Any, max_length: int, method: str, settings: dict[str, Any]) -> Any:
    """A stock model for inputs of `max_length` tokens, by a method of `extend`.

    Raises ValueError, HostRefused; the model is left as it is.
    """
    stacks = find_all(model)
    limits = [
        (source, length)
        for found in stacks.values()
        for source in found.sources
        if (length := source.usable_length(found.stack.config)) is not None
    ]
    if not limits:
        raise HostRefused(
            f"the positions of {type(model).__name__} have no end, so there are none to add",
            reason="positions without an end",
            remedy="give it longer inputs as it is",
        )
    before = min(length for _, length in limits)
    if max_length < before:
        raise ValueError(f"max_length={max_length} would make the longest input shorter: give {before} or more")
    asked = Extension(method, before, max_length, settings)
    reads_tokens = all(found.tokens is not None for found in stacks.values())
    if reads_tokens and all(source.learned_table is not None for source, _ in limits):
        if method == DYNAMIC:
            return _stretched_by_length(model, stacks, asked)
        return _with_longer_tables(model, stacks, asked)
    if reads_tokens and all(source.encoding == "rope" for source, _ in limits):
        return _with_other_rotations(model, stacks, asked)
    kinds = listed(sorted({source.encoding for source, _ in limits}))
    raise HostRefused(
        f"{type(model).__name__} has neither a learned table of the positions of tokens nor rotations alone ({kinds})",
        reason=UNEXTENDED,
        remedy="computed positions go on by hf_posenc.patch(model, 'sinusoidal'); images of other sizes are the host's own "
        "interpolate_pos_encoding=True",
    )


def _with_longer_tables(model: Any, stacks: Mapping[str, Structure], asked: Extension) -> Any:
    """A model of the same class with longer tables."""
    if asked.method not in STATIC:
        raise ValueError(
            f"method={asked.method!r} is one of rotary positions, and {type(model).__name__} has a learned table: allowed is "
            f"{listed((*STATIC, DYNAMIC))}"
        )
    config, longer = copy.deepcopy(model.config), dict[str, nn.Parameter]()
    for path, found in stacks.items():
        for source in found.sources:
            if source.learned_table is not None:
                key, first = source.learned_table
                old = found.stack.get_parameter(key)
                rows = torch.cat([old.detach()[:first], asked.stretched(old.detach()[first : first + asked.before])])
                longer[f"{path}.{key}".lstrip(".")] = nn.Parameter(rows, requires_grad=old.requires_grad)
    if specs.length_of(config) is not None:
        setattr(config, LENGTH_FIELD, getattr(config, LENGTH_FIELD) + asked.after - asked.before)
    twin = shell(type(model), config)
    for name, parameter in longer.items():
        if (there := twin.get_parameter(name).shape) != parameter.shape:
            raise HostRefused(
                f"{name} of {type(model).__name__} would have {len(parameter)} rows, and its config makes {there[0]}",
                reason="a table whose length no config says",
                remedy="take method='dynamic' where it is an encoder, or hf_posenc.patch(model, 'alibi')",
            )
        path, _, key = name.rpartition(".")
        twin.get_submodule(path)._parameters[key] = parameter
    share(model, twin, anew={name.rpartition(".")[0] for name in longer})
    return twin


def _stretched_by_length(model: Any, stacks: Mapping[str, Structure], asked: Extension) -> Any:
    """A patched model whose `learned` encoding has the host's table, over which it stretches longer texts."""
    asked.refuse_other_settings()
    others = [source for found in stacks.values() for source in found.sources if not source.takes_vectors]
    if others:
        raise HostRefused(
            f"{type(model).__name__} has positions beside its table, {others[0].path}, which method={DYNAMIC!r} would take out",
            reason=UNEXTENDED,
            remedy="take a static method, such as 'linear'",
        )
    where = "encoder" if getattr(model.config, "is_encoder_decoder", False) else None
    return patch(model, {"type": "learned", "init": "host", "trained_rows": asked.before}, max_length=asked.after, where=where)


def _with_other_rotations(model: Any, stacks: Mapping[str, Structure], asked: Extension) -> Any:
    """A model of the same class whose config has other parameters of its rotations; a patched one with `rope` where no config
    says them, or where tokens far away are to be grouped."""
    if asked.method not in ROTARY:
        raise ValueError(
            f"method={asked.method!r} is one of learned tables, and {type(model).__name__} has rotary positions: allowed is "
            f"{listed(ROTARY)}"
        )
    given = getattr(model.config, ROPE, None)
    modules = {
        f"{path}.{source.path}".lstrip("."): source.module
        for path, found in stacks.items()
        for source in found.sources
        if source.follows_rope_parameters and found.stack.config is model.config
    }
    if asked.method != GROUPED and given and len(modules) == len(stacks):
        return _with_other_parameters(model, given, modules, asked)
    options = _own_rotations(model, given)
    (geometry,) = {found.geometry(asked.after, "input") for found in stacks.values()}
    if asked.method == GROUPED:
        asked.refuse_other_settings("window", "group")
        return patch(model, {"type": "self_extend", **options, **asked.settings}, max_length=asked.after)
    rope = encoding_class("rope")
    longer = rope.extended(rope.checked_options(options), asked, geometry) or {}
    return patch(model, {"type": "rope", **longer}, max_length=asked.after)


def _with_other_parameters(model: Any, given: dict[str, Any], modules: Mapping[str, nn.Module], asked: Extension) -> Any:
    config, rotary = copy.deepcopy(model.config), next(iter(modules.values()))
    if _by_layer(given):
        turning = [name for name, each in given.items() if each is not None and hasattr(rotary, f"{name}_inv_freq")]
        far = [name for name in turning if not name.startswith(NEARBY)] or turning
        longer = {name: extended_rope_parameters(given[name], asked, _rotated(rotary, f"{name}_")) for name in far}
        setattr(config, ROPE, {**given, **longer})
    else:
        setattr(config, ROPE, extended_rope_parameters(given, asked, _rotated(rotary, "")))
    if asked.method != DYNAMIC:  # which starts from the length that the config says
        setattr(config, LENGTH_FIELD, asked.after)
    twin = shell(type(model), config)
    share(model, twin, anew=modules)
    return twin


def _by_layer(parameters: dict[str, Any]) -> bool:
    """Whether `rope_parameters` are those of each type of layer."""
    return all(isinstance(each, dict) or each is None for each in parameters.values())


def _rotated(rotary: Any, prefix: str) -> int:
    """How many features of each head a rotary module turns."""
    return 2 * len(getattr(rotary, f"{prefix}inv_freq"))


def _own_rotations(model: Any, given: dict[str, Any] | None) -> dict[str, Any]:
    """The options of `rope` by which a model turns as it does by itself: asked of a small model of the same config.

    Raises HostRefused where there are none.
    """
    options: dict[str, Any] = {}
    if given and not _by_layer(given):
        rule = given.get("rope_type", "default")
        options = {"rope_type": rule, **{name: given[name] for name in ALL.get(rule, ()) if given.get(name) is not None}}
        options |= {"theta": given["rope_theta"], "partial_rotary_factor": given.get("partial_rotary_factor", 1.0)}
    elif size := getattr(model.config, "rotary_dim", None):  # GPT-J, CodeGen
        options = {"partial_rotary_factor": size / (model.config.hidden_size // model.config.num_attention_heads)}
    if not given or not _by_layer(given):
        small, tokens = _small(model), torch.arange(1, 9)[None]
        expected = _answer(small, tokens)
        without = (_answer(patch(small, "none"), tokens) - expected).abs().max()
        for layout in ("half", "interleaved"):
            answer = _answer(patch(small, "rope", **options, layout=layout), tokens)
            if (answer - expected).abs().max() < SAME * without:
                return {**options, "layout": layout}
    raise HostRefused(
        f"no options of 'rope' turn queries and keys as {type(model).__name__} does",
        reason="rotations of its own kind",
        remedy=f"take one of {listed(EXTENDING)} where its config has {ROPE}",
    )


def _small(model: Any) -> Any:
    """A random model of the class and config of another, but for one layer and few tokens."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, 16, 0
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    with torch.random.fork_rng(), local_torch_dtype(torch.float32):
        return type(model)(config).eval()


def _answer(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens)[0]
