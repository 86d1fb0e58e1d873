"""Encodings in attentions over local windows or blocks and global tokens: Longformer, LED, LongT5, Pegasus-X.

The original models compute scores in chunks, which have no place for a bias of all pairs. If an encoding acts in such an
attention, it compares all pairs of tokens instead. A mask hides the pairs that the original model doesn't compare. Time and
memory then grow with the square of the length. With other encodings, the forward method of the original model runs.

Shapes: B batch, L tokens, G global tokens of Pegasus-X, H heads, E head_dim, D hidden_size.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_posenc.attention import dispatch
from hf_posenc.attention.bias_backends import additive_mask
from hf_posenc.attention.dispatch import AttentionCall
from hf_posenc.encodings import PatchLayout, PositionContext
from hf_posenc.signatures import BoundCall, argument_names


def longformer(module: Any, *args: Any, position_context: PositionContext | None = None, **kwargs: Any) -> Any:
    """The forward method of Longformer's and LED's attention, with encodings."""
    return _forward(_longformer, module, args, kwargs, position_context)


def longt5(module: Any, *args: Any, position_context: PositionContext | None = None, **kwargs: Any) -> Any:
    """The forward method of LongT5's local attention, with encodings."""
    return _forward(_longt5, module, args, kwargs, position_context)


def pegasus_x(module: Any, *args: Any, position_context: PositionContext | None = None, **kwargs: Any) -> Any:
    """The forward method of Pegasus-X's attention in its encoder, with encodings."""
    return _forward(_pegasus_x, module, args, kwargs, position_context)


def _forward(
    dense: Callable[[Any, BoundCall, PositionContext], Any], module: Any, args: Any, kwargs: Any, given: PositionContext | None
) -> Any:
    """Call `dense` if an encoding acts in this attention, and the original forward method otherwise."""
    context = dispatch.context_for(module, given)
    encodings = dispatch.active_encodings(module, context)
    if all({*encoding.mechanisms()} <= {"embed"} for encoding in encodings):
        return type(module).forward(module, *args, **kwargs)
    call = BoundCall(argument_names(module), args, kwargs)
    if call["output_attentions"] or kwargs.get("output_attentions"):
        raise ValueError(
            f"{type(module).__name__} doesn't return attention weights with {encodings[0].type!r}, because it compares all "
            "pairs of tokens. Omit output_attentions, or use an additive encoding."
        )
    return dense(module, call, context)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, context: PositionContext, scaling: float
) -> Tensor:
    """The output `[B, L, D]` of an attention, with encodings.

    query, key, value: `[B, H, L, E]`. visible: `[B, 1, L, L]`, whether a query sees a key. scaling: the factor that queries
    already have.
    """
    if query.shape[2] != context.length:
        raise ValueError(
            f"{type(module).__name__} received {query.shape[2]} tokens, but the positions of {context.length} are known. Call "
            "the model without cached keys, and pass only tokens."
        )
    context = context.for_attention(scaling)
    encodings = dispatch.active_encodings(module, context)
    (query, key), states = dispatch.rotate_scaled(module, query, key, context, before=scaling)
    mask = torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, torch.finfo(query.dtype).min)
    scores = query @ key.mT + additive_mask(AttentionCall(module, *states, value, mask, encodings, context))
    weights = F.dropout(scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype), module.dropout, module.training)
    output = weights @ value
    if any(encoding.needs_attention_weights() for encoding in encodings):
        output = output + dispatch.value_bias(encodings, weights, value.shape[-1], context).to(output.dtype)
    return output.transpose(1, 2).flatten(2)


def _longformer(module: Any, call: BoundCall, context: PositionContext) -> tuple[Tensor]:
    """Longformer and LED: a window around each token, and global tokens, which see all and which all see.

    The model pads its input on the right to whole windows.
    """
    hidden, length = call["hidden_states"], context.length
    kinds = call["attention_mask"][:, :length]  # below 0: padding, above 0: global

    def heads(name: str) -> Tensor:
        return getattr(module, name)(hidden[:, :length]).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)

    index = torch.arange(length, device=hidden.device)
    near = (index - index[:, None]).abs() <= module.one_sided_attn_window_size
    visible = (near & (kinds == 0)[:, None]) | (kinds > 0)[:, None]
    scaling = math.sqrt(module.head_dim)
    output = _attend(module, heads("query") / scaling, heads("key"), heads("value"), visible[:, None], context, 1 / scaling)
    output = output.masked_fill((kinds < 0)[..., None], 0.0)
    if call["is_global_attn"]:
        everywhere = (kinds >= 0)[:, None, None].expand(-1, -1, length, -1)
        query, key, value = heads("query_global") / scaling, heads("key_global"), heads("value_global")
        output = torch.where(
            (kinds > 0)[..., None], _attend(module, query, key, value, everywhere, context, 1 / scaling), output
        )
    return (F.pad(output, (0, 0, 0, hidden.shape[1] - length)),)


def _longt5(module: Any, call: BoundCall, context: PositionContext) -> tuple[Tensor, Any]:
    """LongT5: a window around each token. The mask `[B, 1, blocks, block, 3 * block]` has the pairs of adjacent blocks."""
    hidden, block = call["hidden_states"], module.block_len
    index = torch.arange(hidden.shape[1], device=hidden.device)
    visible = ((index - index[:, None]).abs() < block).expand(len(hidden), -1, -1)
    if (mask := call["mask"]) is not None:
        within = torch.arange(block, device=hidden.device)
        shown = mask[:, 0, :, within, block + within].bool().flatten(1)[:, : hidden.shape[1]]  # whether a token sees itself
        visible = visible & shown[:, None]
    query, key, value = (
        each(hidden).unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for each in (module.q, module.k, module.v)
    )
    return module.o(_attend(module, query, key, value, visible[:, None], context, 1.0)), call["position_bias"]


def _pegasus_x(module: Any, call: BoundCall, context: PositionContext) -> tuple[Tensor, Tensor, None]:
    """Pegasus-X: the tokens of a block, and global tokens, which have no position.

    The model pads its input on the right to whole blocks. In every other layer, it adds half a block on both sides.
    """
    tokens, others, size = call["token_hidden_states"], call["global_hidden_states"], module.block_size
    length, count = context.length, others.shape[1]
    start = size // 2 if tokens.shape[1] > math.ceil(length / size) * size else 0
    hidden = torch.cat([others, tokens[:, start : start + length]], dim=1)
    shown = F.pad(call["attention_mask"][:, start : start + length] >= 0, (count, 0), value=True)
    block = F.pad((torch.arange(length, device=tokens.device) + start) // size, (count, 0), value=-1)
    visible = (block == block[:, None]) | (block < 0) | (block[:, None] < 0)
    context = context.cached(
        ("behind global tokens", count), lambda: replace(context, patches=PatchLayout(extra_tokens=(count, 0)), computed={})
    )
    query, key, value = (
        each(hidden).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        for each in (module.q_proj, module.k_proj, module.v_proj)
    )
    visible = (visible & shown[:, None])[:, None]
    output = module.out_proj(_attend(module, query * module.scaling, key, value, visible, context, module.scaling))
    others, hidden = output.split([count, length], dim=1)
    return F.pad(hidden, (0, 0, start, tokens.shape[1] - start - length)), others, None
