"""Installs an encoding in a stack.

The original positional components are disabled, each attention gets the parts that apply in it, and vectors are added.
"""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching import PagedAttentionCache

from hf_posenc.architectures.components.component import UnsupportedModelError, is_transformers
from hf_posenc.architectures.structure import Structure
from hf_posenc.attention import custom, dispatch
from hf_posenc.attention.dispatch import AttentionState
from hf_posenc.configuration import PositionSpec
from hf_posenc.encodings import Geometry, PositionEncoding, build_within_limits
from hf_posenc.modeling import hooks
from hf_posenc.modeling.position_ids import PositionInputs, StackState
from hf_posenc.signatures import BoundCall, argument_names, token_argument

Parts = Mapping[str, tuple[str, ...]]
"""Path of an attention -> the parts of the encoding that apply in it."""


def acting_in(structure: Structure, spec: PositionSpec) -> tuple[PositionSpec | None, PositionSpec | None, Geometry]:
    """The encoding within a stack, the one of its cross-attention (either can be None), and the sizes for them."""
    own = spec.encoding_for(structure.role) if spec.where else spec
    across = spec.encoding_for("cross") if structure.role == "decoder" else None
    if own is not None and structure.role == "decoder":
        own = replace(own, windows=None)
    geometry = structure.geometry(spec.max_length if own is None else own.pass_length, spec.inject)
    hears = structure.tokens is None and structure.stack.config.is_encoder_decoder and spec.where != ("encoder",)
    if geometry.max_length and hears:
        # max_length is that of the decoder's tokens. The encoder of Whisper always reads 30 seconds.
        geometry = replace(geometry, max_length=max(geometry.max_length, structure.usable_length or 0))
    if own is not None and geometry.max_length is None and own.encoding.needs_max_length(geometry):
        geometry = replace(geometry, max_length=structure.usable_length)
    if own is not None and geometry.max_length is None:
        geometry = replace(geometry, max_length=structure.length_if_disabled)
    return own, across, geometry


def install(structure: Structure, spec: PositionSpec, geometry: Geometry) -> None:
    """Build an encoding, and install it as `posenc` of a stack and of its attentions.

    Raises UnsupportedModelError or ValueError. The stack is then unusable.
    """
    stack, encoding, options = structure.stack, spec.encoding, dict(spec.options)
    parts = parts_by_attention(structure, spec)
    own = {path: structure.geometry_of(module, geometry.max_length) for path, module in structure.attentions.items()}
    unlike = unlike_attentions(structure, spec, parts, geometry)
    stack.posenc, *owned = build_within_limits(
        encoding.type,
        lambda: [
            encoding.for_stack(geometry, **options),
            *(
                encoding.built(own[path], **options)
                if path in unlike
                else encoding.for_attention(own[path], parts[path], **options)
                for path in parts
            ),
        ],
    )
    at_input = spec.inject == "input"
    store_rotated = _cached_keys_are_final(structure) and not encoding.rotation_depends_on_length(options)
    rotated = _acted_in(spec, parts, "rotate")
    for component in structure.components:
        component.disable(stack, adds_vectors=at_input)
    for (path, module), posenc in zip(structure.attentions.items(), owned, strict=True):
        row = custom.row_of(module)
        eager = None
        if row is None and not is_transformers(type(module)):
            from hf_posenc.modeling import user_models

            eager = user_models.own_eager_function(module)
        _enter(module, posenc, AttentionState(parts[path], eager=eager, square_windows=path in structure.square_windows))
        if row is not None:
            custom.install(module)
        else:
            _view_config(module)
        # Custom attention code expects keys from a cache to have the original size.
        widened = row is not None and any(spec.parts[part].changes_head_dim for part in parts[path])
        if store_rotated and path in rotated and not widened:
            module.register_forward_pre_hook(partial(rotate_into_cache, argument_names(module)), with_kwargs=True)
    if joined := hooks.joined_at(stack):
        stack.get_submodule(joined).register_forward_hook(hooks.record_tokens_behind)
    locations = {
        verb: _add_vectors(structure, spec, parts) if verb == "embed" else _acted_in(spec, parts, verb)
        for verb in encoding.mechanisms(options)
    }
    inputs = PositionInputs(
        names=argument_names(stack),
        passes_keywords=any(a.kind is a.VAR_KEYWORD for a in inspect.signature(type(stack).forward).parameters.values()),
        tokens=token_argument(stack),
        offset=structure.offset,
        refused=tuple(name for component in structure.components for name in component.arguments),
        # BERT slices default token types from a buffer with the original length, so they are created from shapes instead.
        needs_token_types=any(name.endswith("token_type_ids") for name, _ in stack.named_buffers()),
        extra_tokens=structure.extra_tokens,
        windows=structure.windows or len(structure.embedding_outputs) > 1,
        flattens=structure.flattens,
        counts_shown=any(component.pads_rows for component in structure.components),
        causal_flags=structure.causal_flags,
    )
    stack.posenc_state = StackState(spec, inputs, locations)
    if structure.tokens is None:
        from hf_posenc.architectures import own_tokens

        own_tokens.install_hooks(structure)


def install_across(structure: Structure, spec: PositionSpec, geometry: Geometry) -> None:
    """Build an encoding, and install it in the cross-attentions of a decoder.

    The shared encoding is `posenc.cross` of the stack, and separate encodings are `posenc` of their attentions. If the decoder
    keeps its original positions, it gets a `posenc` that does nothing.

    Raises UnsupportedModelError or ValueError. The stack is then unusable.
    """
    stack, encoding, options, across = structure.stack, spec.encoding, dict(spec.options), structure.cross_attentions
    if "posenc" not in stack._modules:
        stack.posenc = PositionEncoding(geometry)
        inputs = PositionInputs(
            argument_names(stack),
            tokens=token_argument(stack),
            offset=structure.offset,
            replaces=False,
            flattens=structure.flattens,
        )
        stack.posenc_state = StackState(spec, inputs, {})
    looking = replace(structure, attentions=across)
    parts = parts_by_attention(looking, spec)
    sizes = {
        path: replace(structure.geometry_of(module, geometry.max_length), is_causal=False) for path, module in across.items()
    }
    shared, *owned = build_within_limits(
        encoding.type,
        lambda: [
            encoding.for_stack(next(iter(sizes.values())), **options),
            *(encoding.for_attention(sizes[path], parts[path], **options) for path in parts),
        ],
    )
    stack.posenc.cross = shared
    for (path, module), posenc in zip(across.items(), owned, strict=True):
        _enter(module, posenc, AttentionState(parts[path], is_cross=True))
        _view_config(module)
    locations = stack.posenc_state.locations
    across_too = {verb: (*locations.get(verb, ()), *_acted_in(spec, parts, verb)) for verb in encoding.mechanisms(options)}
    stack.posenc_state = replace(stack.posenc_state, locations={**locations, **across_too})


def _enter(module: Any, posenc: PositionEncoding | None, state: AttentionState) -> None:
    """Give an attention its state, and its separate encoding if it has one."""
    module.posenc_state = state
    if posenc is not None:
        module.posenc = posenc


def _view_config(module: Any) -> None:
    """Make an attention look up its function under the name that applies the encoding."""
    module.config = dispatch.AttentionConfigView(module.config, _branches_by_implementation(module))


def parts_by_attention(structure: Structure, spec: PositionSpec) -> Parts:
    if not spec.layers:
        return dict.fromkeys(structure.attentions, tuple(spec.parts))
    numbers, count = structure.layers, structure.stack.config.num_hidden_layers
    own = sorted(numbers.values())
    if not {*own} <= {*range(count)} or len({*own}) < len(own) or (len(own) < count and not structure.order_sensitive):
        raise UnsupportedModelError(
            f"{type(structure.stack).__name__} has {count} layers, but its attention modules are in layers "
            f"{sorted(numbers.values())}: none is one layer's own",
            reason="no attention for each layer",
            remedy="Omit layers.",
        )
    by_layer = spec.parts_by_layer(count, own)
    return {path: by_layer[number] for path, number in numbers.items()}


def _acted_in(spec: PositionSpec, parts: Parts, verb: str) -> tuple[str, ...]:
    """The paths of the attentions in which a part of the encoding has this mechanism."""
    return tuple(path for path in parts if any(verb in spec.mechanisms(part) for part in parts[path]))


def shared_parts(spec: PositionSpec) -> set[str]:
    """The parts that apply in attentions, and whose parameters all attentions share."""
    acting = {part for part, kind in spec.parts.items() if {*kind.mechanisms()} - {"embed"}}
    return acting - spec.encoding.per_layer_parts(dict(spec.options))


def unlike_attentions(structure: Structure, spec: PositionSpec, parts: Parts, geometry: Geometry) -> set[str]:
    """The paths of attentions whose sizes differ from those of the first, as in Swin's stages.

    They get a separate encoding, if it has no weights (`encoding_checks.check`).
    """
    unlike: set[str] = set()
    shared = shared_parts(spec)
    for path, module in structure.attentions.items():
        its = replace(structure.geometry_of(module, geometry.max_length), hidden_size=geometry.hidden_size)
        if not shared & {*parts[path]} or its == geometry:
            continue
        unlike.add(path)
    return unlike


def _add_vectors(structure: Structure, spec: PositionSpec, parts: Parts) -> tuple[str, ...]:
    """Add the encoding's vectors. Returns the paths of the position embeddings, layers, or attention blocks that add them."""
    stack = structure.stack
    tables = tuple(component.path for component in structure.components if component.accepts_embeddings)
    if spec.inject == "input" and tables:
        return tables
    blocks = structure.blocks
    layers = structure.layer_paths
    embedding = {path: tuple(part for part in parts[path] if "embed" in spec.parts[part].mechanisms()) for path in parts}
    token_axis = structure.token_axis
    if spec.inject == "input" and structure.embedding_outputs:
        for path in structure.embedding_outputs:
            hooks.after(stack.get_submodule(path), embedding[next(iter(layers))], token_axis)
        return structure.embedding_outputs
    if spec.inject == "input":  # without position embeddings, add them to the first layer's input
        hooks.before(stack.get_submodule(structure.first_layer), embedding[next(iter(layers))], token_axis)
        return (structure.first_layer,)
    places = {(layers if spec.inject == "every_layer" else blocks)[path]: here for path, here in embedding.items() if here}
    for path, here in places.items():
        if spec.inject == "every_layer":
            hooks.before(stack.get_submodule(path), here, token_axis)
        else:
            square = any(blocks[each] == path for each in structure.square_windows)
            hooks.after(stack.get_submodule(path), here, structure.block_token_axis, square)
    return tuple(places)


def _cached_keys_are_final(structure: Structure) -> bool:
    """Whether each attention caches exactly the keys that it, and no other attention, multiplies queries by.

    Latent attention caches inputs from which keys are computed. In layers that share keys, different parts may rotate them.
    """
    modules = structure.attentions.values()
    return not any(hasattr(module, "expand_kv") or getattr(module, "is_kv_shared_layer", False) for module in modules)


def _branches_by_implementation(module: nn.Module) -> bool:
    """Whether an attention's forward compares the name of its implementation with several names."""
    constants = inspect.unwrap(type(module).forward).__code__.co_consts
    return any(isinstance(value, (tuple, frozenset)) and "sdpa" in value for value in constants)


def rotate_into_cache(names: list[str], module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Pre-hook of an attention that rotates new keys when they are cached, instead of all keys at every step.

    Since Transformers 5.24, the paged cache of continuous batching is an argument of the attention. Earlier versions pass it to
    the attention function, together with rotated keys.
    """
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    kinds = (Cache, PagedAttentionCache) if "cache" in names else Cache
    name = next((name for name, value in given.items() if isinstance(value, kinds)), None)
    if name is None:
        return None
    context = dispatch.context_for(module, kwargs.get(dispatch.CONTEXT))
    cache = dispatch.cache_rotating_new_keys(given[name], module, context)
    return BoundCall(names, args, kwargs).changed(**{name: cache}, keys_are_rotated=True)
