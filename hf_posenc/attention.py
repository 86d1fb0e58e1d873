"""How a score bias reaches the attention function that the host has chosen.

Transformers' attention modules look their function up by `self.config._attn_implementation`. A lent module gets a view
of its config in which that name carries a prefix; under the prefixed name stands the host's own function with the
positions in front of it. The model's config stays as it is, so masks, caches, backends and saving do too.

Shapes: B batch, Q queries, K keys, H heads, E head_dim.
"""

import copy
import functools
import hashlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from hf_posenc.encodings import PositionContext, PositionEncoding

PREFIX = f"hf_posenc_{hashlib.sha256(__name__.encode()).hexdigest()[:8]}_"
"""Another one in each copy of this module that came with a model's own code (`remote_code`)."""
CONTEXT = "position_context"
"""The one keyword argument which carries the positions from the stack to its attentions."""


class AttentionConfigView:
    """A config seen by one attention module: everything of the original, live, but the implementation's name."""

    def __init__(self, config: Any) -> None:
        self.__dict__["config"] = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "config" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["config"], name, value)

    @property
    def _attn_implementation(self) -> str:
        return PREFIX + self.__dict__["config"]._attn_implementation


class KeyRotatingCache:
    """A cache as one attention module sees it: keys are turned by their positions as they enter, once for all steps."""

    def __init__(self, cache: Cache, module: nn.Module, context: PositionContext) -> None:
        self.cache, self.module, self.context = cache, module, context

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "cache":
            raise AttributeError(name)
        return getattr(self.cache, name)

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rotated: Any
        _, rotated = rotate(self.module, None, key, self.context)
        return self.cache.update(rotated, value, *args, **kwargs)


def rotating(cache: Any, module: nn.Module, context: PositionContext) -> Any:
    """The cache, such that new self-attention keys are rotated before they are stored."""
    if isinstance(cache, EncoderDecoderCache):
        twin = copy.copy(cache)
        twin.self_attention_cache = KeyRotatingCache(cache.self_attention_cache, module, context)  # type: ignore[assignment]
        return twin
    return KeyRotatingCache(cache, module, context)


def encodings_of(module: nn.Module, context: PositionContext) -> list[PositionEncoding]:
    """What acts in one attention: the stack's encoding, and the attention's own."""
    own = getattr(module, "posenc", None)
    return [context.encoding] if own is None else [context.encoding, own]


def rotate(module: nn.Module, query: Any, key: Any, context: PositionContext) -> tuple[Any, Any]:
    """Queries and new keys, turned by all that acts in this attention."""
    for encoding in encodings_of(module, context):
        query, key = encoding.rotate(query, key, context)
    return query, key


def register(implementation: str) -> None:
    """Make an attention implementation of Transformers (eager, sdpa, …) available to lent modules."""
    if PREFIX + implementation not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(PREFIX + implementation, functools.partial(attend, implementation))


def biases(encoding: PositionEncoding | type[PositionEncoding]) -> bool:
    """Whether an encoding adds anything to scores."""
    return not {"distance_bias", "score_bias"}.isdisjoint(encoding.acts_by())


def refusal(implementation: str, encoding: type[PositionEncoding]) -> str | None:
    """Why an implementation can't carry an encoding, or None."""
    if biases(encoding) and not implementation.startswith(("eager", "sdpa", "flex_attention")):
        return (
            f"attn_implementation={implementation!r} takes no score bias, so the encoding would be lost: "
            "use 'sdpa', 'flex_attention' or 'eager'"
        )
    return None


def attend(
    implementation: str,
    module: nn.Module,
    query: Any,
    key: Any,
    value: Tensor,
    attention_mask: Any,
    *,
    position_context: PositionContext | None = None,
    keys_are_rotated: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The host's attention function, with queries and keys rotated and the bias of the encoding in its mask."""
    if position_context is None:
        raise RuntimeError(f"{type(module).__name__} was called without positions: call the model itself, not a part of it")
    if keys_are_rotated:
        query, _ = rotate(module, query, None, position_context)
    else:
        query, key = rotate(module, query, key, position_context)
    context = position_context.scaled(query.shape[-1] ** -0.5 if kwargs.get("scaling") is None else kwargs["scaling"])
    if implementation == "flex_attention":
        bias = score_bias(module, query, key, context)
        if bias is not None:
            # flex reads position_bias[b, h, q, k] without broadcasting.
            shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
            kwargs["position_bias"] = bias.to(query.dtype).expand(shape)
    else:
        attention_mask = biased_mask(module, query, key, attention_mask, context, kwargs.get("is_causal"))
    return host_function(module, implementation)(module, query, key, value, attention_mask, **kwargs)


def host_function(module: nn.Module, implementation: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function which the host itself would have called."""
    if implementation != "eager":
        return ALL_ATTENTION_FUNCTIONS[implementation]
    if getattr(module, "reorder_and_upcast_attn", False):
        return _upcast_eager
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is not None:
        return own
    from transformers.models.bert import modeling_bert  # for a host that wrote its attention out

    return modeling_bert.eager_attention_forward


def _upcast_eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor]:
    """GPT-2's float32 scores, which it picks by comparing the implementation's name with "eager" itself."""
    return module._upcast_and_reordered_attn(query, key, value, mask)


def score_bias(module: nn.Module, query: Tensor, key: Tensor, context: PositionContext) -> Tensor | None:
    """All that is added to the scaled scores of this attention, broadcastable to `[B, H, Q, K]`, or None."""
    total = None
    for encoding in encodings_of(module, context):
        if encoding.blend == 0.0:
            continue
        bias = _distance_bias(encoding, query.shape[2], key.shape[2], context)
        content = encoding.score_bias(query, key, context)
        for term in (bias, content):
            if term is not None:
                term = term if encoding.blend == 1.0 else term * encoding.blend
                total = term if total is None else total + term
    return total


def _distance_bias(encoding: PositionEncoding, queries: int, keys: int, context: PositionContext) -> Tensor | None:
    if context.consecutive:
        return _toeplitz_bias(encoding, queries, keys, context)
    return _general_bias(encoding, keys, context)


def _toeplitz_bias(encoding: PositionEncoding, queries: int, keys: int, context: PositionContext) -> Tensor | None:
    """`[1, H, Q, K]` from one value for each of the Q + K - 1 distances."""
    distance = torch.arange(1 - queries, keys, device=context.positions.device) - context.past
    bias = encoding.distance_bias(distance)
    if bias is None:
        return None
    if torch.compiler.is_compiling():
        # unfold takes its length as a plain int, which would make a traced graph one for this length only.
        index = torch.arange(keys, device=distance.device) - torch.arange(queries, device=distance.device)[:, None]
        return bias[:, index + (queries - 1)][None]
    return bias.unfold(-1, keys, 1).flip(1)[None]


def _general_bias(encoding: PositionEncoding, keys: int, context: PositionContext) -> Tensor | None:
    """`[1 or B, H, Q, K]` for positions which jump: packed sequences, ids given by hand."""
    distance = context.distances(keys)
    bias = encoding.distance_bias(distance.flatten())
    return None if bias is None else bias.unflatten(-1, distance.shape).movedim(0, 1)


def biased_mask(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, context: PositionContext, is_causal: bool | None
) -> Tensor | None:
    """The additive mask `[1 or B, 1 or H, Q, K]` with the encoding's bias in it; the mask as it was if there is none.

    Built once per forward pass where no gradient flows through it; else in each layer anew, inside that layer's own
    (re)computation, as gradient checkpointing and sharded training expect.
    """

    def compute() -> Tensor | None:
        bias = score_bias(module, query, key, context)
        return mask if bias is None else _merged(bias.to(query.dtype), mask, causal, context)

    # Without a mask, an implementation masks the future by itself; beside a bias it would not.
    causal = (
        mask is None and query.shape[2] > 1 and bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    )
    biasing = [encoding for encoding in encodings_of(module, context) if biases(encoding)]
    if not biasing:
        return mask
    trained = torch.is_grad_enabled() and any(p.requires_grad for encoding in biasing for p in encoding.parameters())
    shared = biasing == [context.encoding] and "score_bias" not in context.encoding.acts_by()
    if trained or not shared:
        return compute()
    # The mask is compared by identity: hosts hand the same one to all layers of a kind.
    seen = context.cached("masks", list)
    for other, wanted, merged in seen:
        if other is mask and wanted == (causal, query.dtype):
            return merged
    merged = compute()
    seen.append((mask, (causal, query.dtype), merged))
    return merged


def _merged(bias: Tensor, mask: Tensor | None, causal: bool, context: PositionContext) -> Tensor:
    lowest = torch.finfo(bias.dtype).min
    if mask is None and not causal:
        return bias
    if mask is None:
        queries, keys = bias.shape[-2:]
        index = torch.arange(keys, device=bias.device) - torch.arange(queries, device=bias.device)[:, None]
        return bias.masked_fill(index > context.past, lowest)
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, lowest)
    # A sum below the lowest number would be -inf, and a row of those is NaN.
    return (bias + mask.to(bias.dtype)).clamp(min=lowest)
