"""Applies rotations and biases in the attention function that the original model has chosen.

Transformers' attention modules look up their function by `self.config._attn_implementation`. In a patched model, each
module has a view of its config in which this name has a prefix. The function registered under the prefixed name applies the
encoding, then calls the original function. The model's own config doesn't change, so masks, caches, backends, and saving
work as before.

Shapes: B batch, Q queries, K keys, H heads, E head_dim.
"""

import copy
import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from hf_posenc.encodings import PositionContext, PositionEncoding
from hf_posenc.encodings.context import CURRENT, context_for, current

PREFIX = f"hf_posenc_{hashlib.sha256(__name__.encode()).hexdigest()[:8]}_"
"""Differs in each copy of this module that was saved with a checkpoint (`remote_code`)."""
CONTEXT = "position_context"
"""The keyword argument with which a stack passes its `PositionContext` to its layers, if its code forwards keyword arguments.

Layers in checkpoint wrappers, such as those of FSDP, need it. The backward pass runs these layers again outside of the model's
forward pass, with their arguments only. All other code reads the current context.
"""
TAKE_A_BIAS = ("eager", "sdpa", "flex_attention")
"""Prefixes of the names of attention implementations that add a mask or bias to the scores."""
EAGER_WITHOUT_MASK = ("transformers.models.vjepa2.modeling_vjepa2",)
"""Modules whose eager function ignores its mask, and would ignore a bias."""


def checkpointed(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run gradient checkpointing so that a layer has the same context when the backward pass runs it again."""
    return checkpoint(functools.partial(_within, CURRENT.context, function), *args, **kwargs)


def _within(context: PositionContext | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with current(context):
        return function(*args, **kwargs)


Function = Callable[..., tuple[Tensor, Tensor | None]]
"""An attention function of Transformers: module, query, key, value, mask -> output `[B, Q, H, E]`, probabilities or None."""


@dataclass(frozen=True)
class AttentionState:
    """The `posenc_state` of an attention to which an encoding applies.

    parts: the names of the parts of the stack's encoding that apply to it.
    is_cross: whether its keys are hidden states of another stack.
    eager: the eager function of a custom attention.
    square_windows: whether its tokens are those of a square window of an image, row by row.
    """

    parts: tuple[str, ...]
    is_cross: bool = False
    eager: Function | None = None
    square_windows: bool = False


@dataclass
class AttentionCall:
    """One call of an attention, with rotated queries and keys.

    query: `[B, H, Q, E]`. key, value: `[B, 1 or more, K, E]`, with fewer heads in grouped-query attention.
    mask: the mask that the model creates for its attention implementation.
    encodings: the encodings that apply to this attention.
    is_causal: whether the attention function masks the future itself if it receives no mask. With a bias, it doesn't.
    options: the other arguments of the attention function.
    biasing: the encodings that add a bias to scores.
    scoring: those of them that compute it from queries, keys, or positions, not only from distance.
    """

    module: Any
    query: Tensor
    key: Tensor
    value: Any
    mask: Any
    encodings: Sequence[PositionEncoding]
    context: PositionContext
    is_causal: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    biasing: list[PositionEncoding] = field(init=False)
    scoring: list[PositionEncoding] = field(init=False)

    def __post_init__(self) -> None:
        self.biasing = [encoding for encoding in self.encodings if adds_score_bias(encoding)]
        self.scoring = [encoding for encoding in self.biasing if "score_bias" in encoding.mechanisms()]

    @property
    def own_bias(self) -> Tensor | None:
        """The original model's bias, if it has one besides its disabled positions."""
        return self.options.get("position_bias")

    @property
    def dropout(self) -> float:
        return self.options.get("dropout", 0.0)

    def run(self, function: Function, mask: Any) -> tuple[Tensor, Tensor | None]:
        return function(self.module, self.query, self.key, self.value, mask, **self.options)


class PrefixedImplementation(str):
    """A prefixed name that is looked up as such, and also equals the name without its prefix."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or str.__eq__(self.removeprefix(PREFIX), other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class AttentionConfigView:
    """A live view of a config for one attention module. Only the name of the implementation differs.

    branches: whether the module's forward method depends on the implementation. Only under "eager" and "sdpa",
        DeepSeek-V3.2 masks keys that its indexer didn't choose.
    """

    def __init__(self, config: Any, branches: bool = False) -> None:
        self.__dict__.update(config=config, branches=branches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "config" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["config"], name, value)

    @property
    def _attn_implementation(self) -> str:
        # The name is registered on access, because a parent may have set it in this config without calling hf-posenc.
        name = register(self.__dict__["config"]._attn_implementation)
        return PrefixedImplementation(name) if self.__dict__["branches"] else name


class KeyRotatingCache:
    """A view of a cache for one attention module. Keys are rotated by their positions once, when they enter the cache."""

    def __init__(self, cache: Cache, module: nn.Module, context: PositionContext) -> None:
        self.cache, self.module, self.context = cache, module, context

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "cache":
            raise AttributeError(name)
        return getattr(self.cache, name)

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rotated: Any
        _, rotated = rotate(self.module, None, key, self.context)
        try:
            return self.cache.update(rotated, value, *args, **kwargs)
        except RuntimeError as error:
            if rotated.shape[-1] == key.shape[-1]:
                raise
            raise ValueError(
                f"This encoding makes keys of {rotated.shape[-1]} features, but the cache holds keys of another size from "
                "elsewhere, such as prefix tuning. Use an encoding that keeps the size of keys."
            ) from error


def cache_rotating_new_keys(cache: Any, module: nn.Module, context: PositionContext) -> Any:
    """A view of the cache that rotates new self-attention keys before it stores them."""
    if isinstance(cache, EncoderDecoderCache):
        twin = copy.copy(cache)
        twin.self_attention_cache = KeyRotatingCache(cache.self_attention_cache, module, context)  # type: ignore[assignment]
        return twin
    return KeyRotatingCache(cache, module, context)


def active_encodings(module: Any, context: PositionContext) -> list[PositionEncoding]:
    """The encodings that apply to one attention: those of the stack that apply to this layer, and the attention's own."""
    own, parts = module._modules.get("posenc"), module.posenc_state.parts
    shared, own = context.encoding.named_parts(), own.named_parts() if own is not None else {}
    return [
        *(shared[name] for name in parts if name in shared and name not in own),
        *(part for name, part in own.items() if name not in shared or name in parts),
    ]


def rotate(module: nn.Module, query: Any, key: Any, context: PositionContext) -> tuple[Any, Any]:
    """Queries and new keys, rotated by all encodings that apply to this attention.

    Those of extra tokens don't change. If an encoding changes the width, extra tokens are rotated as at position 0.
    """
    context = context.on((key if query is None else query).device)
    rotated = _rotated_by_all(module, context.strip_extra(query), context.strip_extra(key), context)
    given = [(new, old) for new, old in zip(rotated, (query, key), strict=True) if new is not None]
    if context.has_extra_tokens and given and given[0][0].shape[-1] != given[0][1].shape[-1]:
        length = given[0][1].shape[2]
        query, key = _rotated_by_all(module, query, key, context.at_zero(length))
    return context.restore_extra(rotated[0], query), context.restore_extra(rotated[1], key)


def _rotated_by_all(module: nn.Module, query: Any, key: Any, context: PositionContext) -> tuple[Any, Any]:
    device = context.positions.device
    for encoding in active_encodings(module, context):
        if "rotate" in encoding.mechanisms():
            query, key = encoding("rotate", query, key, context)
    return tuple(states if states is None else states.to(device) for states in (query, key))  # type: ignore[return-value]


def rotate_all(module: Any, query: Any, key: Any, context: PositionContext, keys_are_rotated: bool) -> tuple[Any, Any]:
    """Queries and all keys, rotated by all encodings that apply to this attention.

    Keys that were rotated when they entered the cache aren't rotated again.
    """
    if not any("rotate" in encoding.mechanisms() for encoding in active_encodings(module, context)):
        return query, key
    if not keys_are_rotated and key.shape[2] == context.length and not module.posenc_state.is_cross:
        return rotate(module, query, key, context)
    query, _ = rotate(module, query, None, context)
    if not keys_are_rotated:
        _, key = rotate(module, None, key, context.for_keys(key.shape[2]))
    return query, key


def rotate_scaled(
    module: Any,
    query: Tensor,
    key: Tensor,
    context: PositionContext,
    keys_are_rotated: bool = False,
    before: float = 1.0,
    scales_keys: bool = False,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Rotated queries and keys for their product, and for biases. For biases, they don't have the factor `before`.

    before: the factor that queries already have, or keys if `scales_keys`. Not all encodings are linear in queries and keys.
    """

    def times(factor: float, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return (query, key * factor) if scales_keys else (query * factor, key)

    encodings = active_encodings(module, context)
    if before != 1.0 and any(encoding.changes_head_dim for encoding in encodings):
        states = rotate_all(module, *times(1 / before, query, key), context, keys_are_rotated)
        return times(before, *states), states
    states = rotate_all(module, query, key, context, keys_are_rotated)
    reads = any("score_bias" in encoding.mechanisms() and encoding.reads_content for encoding in encodings)
    return states, times(1 / before, *states) if before != 1.0 and reads else states


def register(implementation: str) -> str:
    """Register an attention implementation of Transformers (eager, sdpa, …) for patched modules. Returns the prefixed name."""
    name = PREFIX + implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, functools.partial(attend, implementation))
    return name


def adds_score_bias(encoding: PositionEncoding | type[PositionEncoding]) -> bool:
    """Whether an encoding adds a bias to scores."""
    return not {"distance_bias", "score_bias"}.isdisjoint(encoding.mechanisms())


def touches_scores(encoding: PositionEncoding | type[PositionEncoding]) -> bool:
    """Whether an encoding adds a bias to scores or needs the attention weights, which fused kernels don't return."""
    return adds_score_bias(encoding) or "value_bias" in encoding.mechanisms()


def refusal(implementation: str, encodings: Iterable[PositionEncoding | type[PositionEncoding]]) -> str | None:
    """Why an attention implementation doesn't support encodings, or None."""
    if not implementation.startswith(TAKE_A_BIAS) and any(map(touches_scores, encodings)):
        return (
            f"attn_implementation={implementation!r} doesn't support score biases, so the encoding would have no effect. "
            "Use 'sdpa', 'flex_attention', or 'eager'."
        )
    return None


def attend(
    implementation: str,
    module: Any,
    query: Any,
    key: Any,
    value: Tensor,
    attention_mask: Any,
    *,
    position_context: PositionContext | None = None,
    keys_are_rotated: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run the model's own attention function with rotated queries and keys, and with the encoding's bias in its mask."""
    of_stack = context_for(module, position_context)
    scaling = query.shape[-1] ** -0.5 if kwargs.get("scaling") is None else kwargs["scaling"]
    context = of_stack.with_length(query.shape[2], query.device, module.posenc_state.square_windows)
    if query.shape[2] != context.length:
        raise ValueError(
            f"{type(module).__name__} received {query.shape[2]} tokens, but its model received {context.length}, so the "
            "positions of the others are unknown. Add tokens to inputs_embeds before you call the model."
        )
    if module.posenc_state.is_cross:
        context = context.for_cross_attention(key.shape[2])
    elif context is not of_stack and key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{type(module).__name__} compares {query.shape[2]} queries with {key.shape[2]} keys of other tokens, so the "
            "distances between them are unknown. Use an additive encoding, or another model."
        )
    context = context.for_attention(scaling, getattr(module, "layer_idx", None))
    encodings = active_encodings(module, context)
    paged = kwargs.get("read_index") is not None
    if reason := refusal(implementation, encodings) or (
        continuous_batching_error(encodings, any(each.rotation_depends_on_length(each._options or {}) for each in encodings))
        if paged
        else None
    ):
        raise ValueError(reason)
    # Since Transformers 5.24, the keys enter the paged cache before this function is called. Earlier, the cache is an argument.
    if paged and not (keys_are_rotated or "cache" in kwargs) and any("rotate" in each.mechanisms() for each in encodings):
        raise ValueError(
            f"Continuous batching (generate_batch) doesn't support rotary encodings in {type(module).__name__}, because the "
            "keys enter the paged cache unrotated. Use model.generate with a padded batch."
        )
    width = query.shape[-1]
    query, key = rotate_all(module, query, key, context, keys_are_rotated)
    if query.shape[-1] != width:
        kwargs["scaling"] = scaling  # Otherwise, it would be computed from the new width.
    own_bias = kwargs.get("position_bias")
    if isinstance(own_bias, float) or (isinstance(own_bias, Tensor) and own_bias.numel() == 1):  # disabled
        kwargs["position_bias"] = None
    # Without the attribute, Transformers' SDPA function masks the future, and the mask of all other functions does.
    default = getattr(module, "is_causal", implementation == "sdpa")
    is_causal = default if kwargs.get("is_causal") is None else kwargs["is_causal"]
    is_causal = bool(is_causal) and implementation != "flex_attention"  # Its mask already includes the causal mask.
    call = AttentionCall(module, query, key, value, attention_mask, encodings, context, is_causal, kwargs)
    if any(encoding.needs_attention_weights() for encoding in encodings):
        return with_weights(call)
    function = host_function(module, implementation)
    if not call.biasing and (implementation != "sdpa" or query.shape[-1] == width):
        return call.run(function, call.mask)
    if implementation == "eager" and type(module).__module__ in EAGER_WITHOUT_MASK:
        function = bert_eager()
    from hf_posenc.attention import bias_backends

    if implementation == "flex_attention":
        return bias_backends.run_flex_attention(function, call)
    if not call.biasing:
        return bias_backends.padded_attention(function, call)
    return bias_backends.biased_attention(function, call)


def with_weights(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The output `[B, Q, H, E]` and the weights `[B, H, Q, K]` of the model's eager function.

    The output includes the terms that encodings compute from these weights.
    """
    from hf_posenc.attention.bias_backends import additive_mask

    query, key, value = call.query, call.key, call.value
    mask = additive_mask(call)
    function = host_function(call.module, "eager")
    if function is bert_eager():  # The model has no eager function.
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    options = {name: value for name, value in call.options.items() if name != "position_bias"}
    output, weights = function(call.module, query, key, value, mask, **options)
    if not isinstance(weights, Tensor) or weights.shape != (*query.shape[:3], key.shape[2]):
        raise ValueError(
            f"The eager attention of {type(call.module).__name__} doesn't return its weights, which "
            f"{', '.join(repr(each.type) for each in call.encodings if each.needs_attention_weights())} needs to change "
            "its output. Use an encoding without value vectors."
        )
    added = value_bias(call.encodings, weights, value.shape[-1], call.context)
    return output + added.transpose(1, 2).to(output.dtype), weights


def value_bias(encodings: Iterable[PositionEncoding], weights: Tensor, value_head_dim: int, context: PositionContext) -> Tensor:
    """The sum `[B, H, Q, E]` of the terms that encodings add to the output of an attention with weights `[B, H, Q, K]`.

    Extra tokens don't contribute to it, and their terms are 0. Raises ValueError if the size of the vectors differs from that
    of the values.
    """
    context = context.on(weights.device)
    weights = cast(Tensor, context.strip_extra(context.strip_extra(weights), dim=3))
    wanted = (*weights.shape[:3], value_head_dim)
    total = weights.new_zeros(())
    for encoding in encodings:
        term = encoding("value_bias", weights, context) if encoding.needs_attention_weights() else None
        if term is not None and term.shape != wanted:
            raise ValueError(
                f"value_bias of {encoding.type!r} returned shape {tuple(term.shape)}, but must return {wanted} (batch, heads, "
                "queries, size of the values). If the values of this model have another size than its keys, use an encoding "
                "without value vectors."
            )
        total = total if term is None else total + term.to(weights.device)
    return context.pad_extra(total.expand(wanted).mT, dims=1).mT


def continuous_batching_error(encodings: Iterable[PositionEncoding | type[PositionEncoding]], rotate_anew: bool) -> str | None:
    """Why continuous batching doesn't support encodings, or None.

    rotate_anew: whether an encoding rotates all keys at every step.
    """
    if rotate_anew:
        return (
            "Continuous batching (generate_batch) keeps the rotated keys of several texts in one paged cache, but this "
            "encoding rotates all keys again at every step. Use model.generate with a padded batch."
        )
    encodings = list(encodings)
    if any(each.changes_head_dim for each in encodings):
        return (
            "Continuous batching (generate_batch) allocates its paged cache for keys of the model's own head_dim, but this "
            "encoding makes wider keys. Use model.generate with a padded batch."
        )
    if any(map(touches_scores, encodings)):
        return (
            "Continuous batching (generate_batch) keeps the keys of several texts in one paged cache, which doesn't support "
            "biases. Use model.generate with a padded batch."
        )
    return None


def host_function(module: nn.Module, implementation: str) -> Function:
    """The attention function that the original model would call."""
    if implementation != "eager":
        if implementation not in ALL_ATTENTION_FUNCTIONS:
            raise ValueError(
                f"attn_implementation={implementation!r} is unknown to Transformers. Use 'sdpa' or 'eager', or register it "
                "with transformers.AttentionInterface.register."
            )
        return ALL_ATTENTION_FUNCTIONS[implementation]
    if getattr(module, "reorder_and_upcast_attn", False):
        return _upcast_eager
    state = getattr(module, "posenc_state", None)
    own = (state.eager if state is not None else None) or getattr(
        sys.modules[type(module).__module__], "eager_attention_forward", None
    )
    return bert_eager() if own is None else own


def bert_eager() -> Function:
    """The eager function for models that don't define one."""
    from transformers.models.bert import modeling_bert

    return modeling_bert.eager_attention_forward


def _upcast_eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor]:
    """GPT-2's attention with float32 scores. GPT-2 chooses it if the implementation's name is exactly "eager"."""
    return module._upcast_and_reordered_attn(query, key, value, mask)
