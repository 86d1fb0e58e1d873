"""Applies encodings in attentions that multiply queries and keys themselves, without Transformers' attention interface.

Such an attention runs the forward method of the original model, in which the product of queries and keys is intercepted.
Queries and keys are rotated before it, and the bias of the encoding is added to it. Terms that the encoding computes from the
weights are added to the first product of weights and values after a softmax. Everything else is unchanged: projections,
splitting into heads, cache, masks, dropout, and the model's own terms.

Shapes: B batch, Q queries, K keys, H heads, E head_dim.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear, multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache

from hf_posenc.attention import dispatch
from hf_posenc.attention.bias_backends import additive_mask, biased_mask
from hf_posenc.attention.custom import CustomAttention, row_of
from hf_posenc.attention.dispatch import AttentionCall
from hf_posenc.encodings import PositionContext
from hf_posenc.signatures import BoundCall, argument_names

SOFTMAX = (torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax, torch.special.softmax)
PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm)
SUMS_OF_PRODUCTS = (torch.baddbmm, torch.Tensor.baddbmm)
SHARED = [True, True, False, False]
"""Whether queries and keys share each of the axes B, H, Q, K."""
LAYER = ("layer_idx", "layer_id")
"""Attributes in which attentions store their layer index."""


def forward(
    module: Any, *args: Any, position_context: PositionContext | None = None, keys_are_rotated: bool = False, **kwargs: Any
) -> Any:
    """The forward method of such an attention, with the encoding applied to its product of queries and keys."""
    row = row_of(module)
    assert row is not None, f"{type(module).__name__} has no row"
    if row.unsupported_inputs:
        call = BoundCall(argument_names(module), args, kwargs)
        if beside := [name for name in row.unsupported_inputs if call[name] is not None]:
            raise ValueError(f"{type(module).__name__} received {beside[0]!r}. {BESIDE}")
    if any(isinstance(value, Tensor) and value.is_nested for value in (*args, *kwargs.values())):
        raise ValueError(
            f"{type(module).__name__} received a nested tensor, whose tokens have unknown positions. Pass "
            "enable_nested_tensor=False to nn.TransformerEncoder."
        )
    has_cache = any(isinstance(value, (Cache, dispatch.KeyRotatingCache)) for value in (*args, *kwargs.values()))
    product = InterceptQK(row, module, dispatch.context_for(module, position_context), keys_are_rotated, has_cache)
    with product:
        output = type(module).forward(module, *args, **kwargs)
    if not product.qk_intercepted:
        raise RuntimeError(f"{type(module).__name__} didn't multiply queries by keys, so the encoding had no effect.")
    if product.pending is not None:
        raise RuntimeError(f"{type(module).__name__} didn't multiply weights by values, so the encoding had no effect.")
    return output


BESIDE = "Inputs other than tokens (an image, entities, a prompt, memories, targets) have unknown positions. Omit these inputs."


class InterceptQK(TorchFunctionMode):
    """Applies the encoding to the first product of queries and keys computed in its context, and to that of weights and values.

    keys_are_rotated: whether the keys were rotated when they entered a cache.
    has_cache: whether keys may come from a cache.
    """

    def __init__(
        self, row: CustomAttention, module: Any, context: PositionContext, keys_are_rotated: bool, has_cache: bool
    ) -> None:
        super().__init__()
        self.module, self.context, self.keys_are_rotated, self.has_cache = module, context, keys_are_rotated, has_cache
        self.scaling, self.qk_intercepted = partial(row.scaling, module), False
        self.scaled_before, self.scales_keys = partial(row.scaled_before, module), row.scales_keys
        self.pending: PendingValueTerm | None = None
        self.num_earlier_value_matmuls = row.num_earlier_value_matmuls

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.qk_intercepted:
            return self._after_scores(function, args, kwargs) if self.pending is not None else function(*args, **kwargs)
        if function in PRODUCTS:
            return self._product(function, *args, **kwargs)
        if function in SUMS_OF_PRODUCTS:
            return self._sum(function, *args, **kwargs)
        if function is torch.einsum:
            return self._einsum(*args, **kwargs)
        if function is scaled_dot_product_attention:
            return self._sdpa(*args, **kwargs)
        if function is multi_head_attention_forward:
            return self._multi_head_attention(*args, **kwargs)
        return function(*args, **kwargs)

    def _product(self, function: Any, query: Tensor, key: Tensor) -> Tensor:
        """The product of `[B, H, Q, E]` and `[B, H, E, K]`, or of both with B and H merged."""
        if query.ndim != key.ndim or query.ndim < 3:
            return function(query, key)  # a projection
        query, key, bias, factor = self._encoded(query, key.mT)
        return _plus(function(query, key.mT), bias, factor)

    def _sum(
        self, function: Any, there: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1.0, alpha: float = 1.0
    ) -> Tensor:
        """The same product, scaled by alpha, plus a tensor scaled by beta."""
        query, key, bias, factor = self._encoded(batch1, batch2.mT, alpha)
        return _plus(function(there, query, key.mT, beta=beta, alpha=alpha), bias, factor)

    def _einsum(self, equation: str, *operands: Any) -> Tensor:
        """The product of queries and keys with any order of axes, identified by the axes `[B, H, Q, K]` of the output."""
        parts = equation.replace(" ", "").replace("->", ",").split(",")
        summed = {*parts[0]} & {*parts[1]} - {*parts[-1]}
        if len(parts) != 3 or len(summed) != 1 or [letter in parts[0] and letter in parts[1] for letter in parts[2]] != SHARED:
            return torch.einsum(equation, *operands)  # a projection
        left, right, out = parts
        batch, head, row, column = [*out]
        of_query, of_key = (f"{batch}{head}{each}{next(iter(summed))}" for each in (row, column))
        query, key = torch.einsum(f"{left}->{of_query}", operands[0]), torch.einsum(f"{right}->{of_key}", operands[1])
        query, key, bias, factor = self._encoded(query, key)
        return _plus(torch.einsum(f"{of_query},{of_key}->{out}", query, key), bias, factor)

    def _sdpa(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *, is_causal: bool = False, **kwargs: Any
    ) -> Tensor:
        """A whole attention in one call."""
        scaling = query.shape[-1] ** -0.5 if kwargs.get("scale") is None else kwargs["scale"]
        call = self._call(query, key, scaling, attn_mask, is_causal)
        query, key = call.query, call.key
        if self.pending is not None:
            weights = dropout((query * scaling @ key.mT + additive_mask(call)).softmax(dim=-1), kwargs.get("dropout_p", 0.0))
            return self._weighed(weights, value)
        mask = biased_mask(call)
        causal = is_causal and mask is None
        kwargs["scale"] = scaling  # An encoding may have changed the width, which determines the default.
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, **kwargs)

    def _multi_head_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim_to_check: int,
        num_heads: int,
        in_proj_weight: Tensor | None,
        in_proj_bias: Tensor | None,
        bias_k: Tensor | None,
        bias_v: Tensor | None,
        add_zero_attn: bool,
        dropout_p: float,
        out_proj_weight: Tensor,
        out_proj_bias: Tensor | None,
        training: bool = True,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        *,
        use_separate_proj_weight: bool = False,
        q_proj_weight: Tensor | None = None,
        k_proj_weight: Tensor | None = None,
        v_proj_weight: Tensor | None = None,
        is_causal: bool = False,
        static_k: None = None,
        static_v: None = None,
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """A whole attention with its projections in one call, for inputs `[L, B, D]`.

        Returns outputs `[L, B, D]` and probabilities `[B, Q, K]`, averaged over heads, or `[B, H, Q, K]`.
        """
        if bias_k is not None or bias_v is not None or add_zero_attn:
            raise ValueError(
                f"{type(self.module).__name__} adds a key to those of the tokens, which has no position. Create it without "
                "add_bias_kv and add_zero_attn."
            )
        if query is not key and not torch.equal(query, key):
            raise ValueError(
                f"{type(self.module).__name__} compares tokens with those of another input, whose positions are unknown. "
                "Register a subclass that only your self-attention uses."
            )
        packed: Any = (None,) * 3 if in_proj_weight is None else in_proj_weight.chunk(3)
        weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else packed
        biases: Any = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        given = zip((query, key, value), weights, biases, strict=True)
        # [L, B, D] -> [B, H, L, E]
        query, key, value = (linear(*each).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for each in given)
        scaling = query.shape[-1] ** -0.5
        call = self._call(query, key, scaling)
        scores = _plus(call.query * scaling @ call.key.mT, biased_mask(call), 1.0)
        if attn_mask is not None:
            scores = _masked(scores, attn_mask.unflatten(0, (-1, num_heads)) if attn_mask.ndim == 3 else attn_mask)
        if key_padding_mask is not None:
            scores = _masked(scores, key_padding_mask[:, None, None])
        probabilities = dropout(scores.softmax(dim=-1), dropout_p, training)
        output = probabilities @ value if self.pending is None else self._weighed(probabilities, value)
        output = linear(output.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
        averaged = probabilities.mean(dim=1) if average_attn_weights else probabilities
        return output, averaged if need_weights else None

    def _after_scores(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Handle a call after the product of queries and keys.

        The first product after a softmax is that of weights `[B, H, Q, K]`, possibly with B and H merged, and values.
        """
        pending = self.pending
        assert pending is not None
        if function in SOFTMAX:
            result = function(*args, **kwargs)
            pending.is_normalized |= result.shape[-2:] == pending.shape[-2:]
            return result
        if not pending.is_normalized:
            return function(*args, **kwargs)
        if function in PRODUCTS and len(args) == 2 and args[0].shape[-2:] == pending.shape[-2:]:
            weights, value = args
            if pending.num_earlier_value_matmuls:
                pending.num_earlier_value_matmuls -= 1
                return function(weights, value)
            added = self._added(weights.reshape(pending.shape), value.shape[-1])
            output = function(weights, value)
            return output + added.reshape(output.shape).to(output.dtype)
        if function is torch.einsum and len(args) == 3:
            left, right, out = args[0].replace(" ", "").replace("->", ",").split(",")
            if len(left) == len(out) == 4 and args[1].numel() == math.prod(pending.shape):
                query, key = ({*left} & {*out} - {*right}).pop(), ({*left} & {*right} - {*out}).pop()
                value = ({*out} - {*left}).pop()
                batch, head = (letter for letter in left if letter not in (query, key))
                weights = torch.einsum(f"{left}->{batch}{head}{query}{key}", args[1])
                added = self._added(weights, args[2].shape[right.index(value)])
                output = torch.einsum(*args)
                return output + torch.einsum(f"{batch}{head}{query}{value}->{out}", added).to(output.dtype)
        return function(*args, **kwargs)

    def _weighed(self, weights: Tensor, value: Tensor) -> Tensor:
        """The product of weights and values, plus the term of the encoding."""
        output = weights @ value
        return output + self._added(weights, value.shape[-1]).to(output.dtype)

    def _added(self, weights: Tensor, value_head_dim: int) -> Tensor:
        """The term that the encoding adds to the output of an attention with weights `[B, H, Q, K]`."""
        pending, self.pending = self.pending, None
        assert pending is not None
        return dispatch.value_bias(
            dispatch.active_encodings(self.module, pending.context), weights, value_head_dim, pending.context
        )

    def _encoded(self, query: Tensor, key: Tensor, within: float = 1.0) -> tuple[Tensor, Tensor, Tensor | None, float]:
        """Rotated queries and keys, the bias to add to their product, and a factor for the bias that undoes later scaling.

        within: the factor by which the product itself is scaled.
        """
        after = self.scaling(query.shape[-1])
        joined = query.ndim == 3
        if joined:
            heads = getattr(self.module, "num_attention_heads", self.context.encoding.geometry.num_attention_heads)
            query, key = query.unflatten(0, (-1, heads)), key.unflatten(0, (-1, heads))
        call = self._call(query, key, after * within, before=self.scaled_before(query.shape[-1]))
        (query, key), bias = self.factors, biased_mask(call)
        factor = 1 / after if isinstance(after, float) else 1.0
        if bias is not None:
            bias = (bias if isinstance(after, float) else bias / after).expand(*query.shape[:3], key.shape[2])
        if joined:
            query, key = query.flatten(0, 1), key.flatten(0, 1)
            bias = bias if bias is None else bias.flatten(0, 1)
        return query, key, bias, factor

    def _call(
        self, query: Tensor, key: Tensor, scaling: Any, mask: Any = None, is_causal: bool = False, before: float = 1.0
    ) -> AttentionCall:
        """The call of this attention with rotated queries and keys. Those of their product are `self.factors`.

        before: the factor that queries or keys already have.

        Raises ValueError if some positions are unknown.
        """
        self.qk_intercepted = True
        layer = next((number for name in LAYER if (number := getattr(self.module, name, None)) is not None), None)
        context = self.context.with_length(query.shape[2], query.device, self.module.posenc_state.square_windows)
        context = context.for_attention(scaling * before, layer)
        if query.shape[2] != context.length or (key.shape[2] != context.length and not self.has_cache):
            raise ValueError(
                f"{type(self.module).__name__} compares {query.shape[2]} queries with {key.shape[2]} keys, but only the "
                f"positions of {context.length} new and {context.past} cached tokens are known. {BESIDE}"
            )
        encodings = dispatch.active_encodings(self.module, context)
        if any(encoding.needs_attention_weights() for encoding in encodings):
            self.pending = PendingValueTerm(context, (*query.shape[:3], key.shape[2]), self.num_earlier_value_matmuls)
        self.factors, (query, key) = dispatch.rotate_scaled(
            self.module, query, key, context, self.keys_are_rotated, before, self.scales_keys
        )
        return AttentionCall(self.module, query, key, None, mask, encodings, context, is_causal)


@dataclass
class PendingValueTerm:
    """The state of the weights `[B, H, Q, K]` of an attention between its two products.

    num_earlier_value_matmuls: the number of products with other values that come first.
    is_normalized: whether a softmax has been applied to them.
    """

    context: PositionContext
    shape: tuple[int, ...]
    num_earlier_value_matmuls: int
    is_normalized: bool = False


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores with torch's mask, which is added, or True for keys that are hidden."""
    return scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def _plus(product: Tensor, bias: Tensor | None, factor: float) -> Tensor:
    return product if bias is None else torch.add(product, bias, alpha=factor)
