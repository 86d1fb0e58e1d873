"""Attentions which multiply queries and keys themselves, beside Transformers' attention interface: a row each.

Such an attention runs its host's own forward. While it runs, the product of queries and keys in it is intercepted: both are
rotated before it, and the bias of the encoding is added to it. What the encoding adds by the weights is added to their product
with the values, the first one of theirs behind a softmax. What else the host does stays as it is: how it projects and
splits, its cache, masks, dropout, terms of its own.

Shapes: B batch, Q queries, K keys, H heads, E head_dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache

from hf_posenc.attention import dispatch
from hf_posenc.attention.bias_backends import additive_mask, biased_mask
from hf_posenc.encodings import PositionContext
from hf_posenc.signatures import Call, argument_names

SOFTMAX = (torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax, torch.special.softmax)
PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm)
SUMS_OF_PRODUCTS = (torch.baddbmm, torch.Tensor.baddbmm)
SHARED = [True, True, False, False]
"""Which of B, H, Q, K queries and keys share."""
LAYER = ("layer_idx", "layer_id")
"""Attributes by which attentions know their layer."""


def by_head_dim(module: Any, head_dim: int) -> float:
    """1/√E, as most attentions scale."""
    return head_dim**-0.5


def not_at_all(module: Any, head_dim: int) -> float:
    """1: queries or keys are scaled before the product, or within it, or never."""
    return 1.0


def by_settings(module: Any, head_dim: int) -> float:
    """Of ImageGPT, which has GPT-2's two settings; in float32 it scales within the product."""
    if module.reorder_and_upcast_attn:
        return 1.0
    scaling = head_dim**-0.5 if module.scale_attn_weights else 1.0
    return scaling / (module.layer_idx + 1) if module.scale_attn_by_inverse_layer_idx else scaling


def by_softmax_scale(module: Any, head_dim: int) -> float:
    """A number of the config's (MPT)."""
    return module.softmax_scale


def by_logit_scale(module: Any, head_dim: int) -> Tensor:
    """A learned factor of each head, `[H, 1, 1]`, on cosines (Swin v2)."""
    return module.logit_scale.clamp(max=math.log(100)).exp()


def open_to_all(module: Any) -> str:
    """No reason: an encoding can act."""
    return ""


def sparse(module: Any) -> str:
    """Of attentions that never multiply all queries by all keys."""
    return "cuts its queries and keys into pieces"


@dataclass(frozen=True)
class WrittenOut:
    """What has to be known of an attention.

    scaling: module, E -> the factor by which its forward multiplies the product of queries and keys afterwards.
    is_causal: whether each query sees only the keys up to its own, where the module doesn't say it.
    closed: module -> why nothing can act in its product, so that vectors can be added to its inputs alone; "" where it can.
    alone: its arguments by which inputs beside the tokens would come in, with scores of their own.
    token_axis: of the hidden states that enter its layer.
    others: the number of products of weights and values that it makes before that of the tokens.
    """

    scaling: Callable[[Any, int], float | Tensor] = by_head_dim
    is_causal: bool = False
    closed: Callable[[Any], str] = open_to_all
    alone: tuple[str, ...] = ()
    token_axis: int = 1
    others: int = 0


_PLAIN, _SCALED_BEFORE, _SPARSE = WrittenOut(), WrittenOut(not_at_all), WrittenOut(closed=sparse)
_COSINES = WrittenOut(by_logit_scale)
_CAUSAL, _CAUSAL_SCALED_BEFORE = WrittenOut(is_causal=True), WrittenOut(not_at_all, is_causal=True)
ROWS = {
    "big_bird.BigBirdSelfAttention": _PLAIN,
    "blip.BlipAttention": _PLAIN,
    "blip.BlipTextSelfAttention": _PLAIN,
    "bloom.BloomAttention": _CAUSAL_SCALED_BEFORE,
    "bros.BrosSelfAttention": _PLAIN,
    "clap.ClapAudioSelfAttention": _PLAIN,
    "clvp.ClvpSelfAttention": _SCALED_BEFORE,
    "codegen.CodeGenAttention": _PLAIN,
    "data2vec.Data2VecVisionSdpaSelfAttention": _PLAIN,
    "data2vec.Data2VecVisionSelfAttention": _PLAIN,
    "deberta.DisentangledSelfAttention": _SCALED_BEFORE,
    "deberta_v2.DisentangledSelfAttention": _SCALED_BEFORE,
    "donut.DonutSwinSelfAttention": _PLAIN,
    "falcon.FalconAttention": _PLAIN,
    "flaubert.MultiHeadAttention": _SCALED_BEFORE,
    "flava.FlavaSelfAttention": _PLAIN,
    "gpt_neo.GPTNeoSelfAttention": _CAUSAL_SCALED_BEFORE,
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": _CAUSAL_SCALED_BEFORE,
    "gptj.GPTJAttention": _PLAIN,
    "groupvit.GroupViTAttention": _SCALED_BEFORE,
    "granite_speech.GraniteSpeechConformerAttention": _PLAIN,
    "granite_speech_plus.GraniteSpeechPlusConformerAttention": _PLAIN,
    "ibert.IBertSelfAttention": _PLAIN,
    "imagegpt.ImageGPTAttention": WrittenOut(by_settings, is_causal=True),
    "layoutlmv3.LayoutLMv3SelfAttention": _SCALED_BEFORE,
    "led.LEDDecoderAttention": _SCALED_BEFORE,
    "led.LEDEncoderSelfAttention": _SPARSE,
    "lilt.LiltSelfAttention": WrittenOut(others=1),
    "longformer.LongformerSelfAttention": _SPARSE,
    "luke.LukeSelfAttention": WrittenOut(alone=("entity_hidden_states",)),
    "maskformer.MaskFormerSwinSelfAttention": _PLAIN,
    "megatron_bert.MegatronBertSelfAttention": _PLAIN,
    "mgp_str.MgpstrAttention": _PLAIN,
    "mpnet.MPNetSelfAttention": _PLAIN,
    "mpt.MptAttention": WrittenOut(by_softmax_scale, is_causal=True),
    "mvp.MvpAttention": WrittenOut(not_at_all, alone=("attn_prompt",)),
    "openai.Attention": _CAUSAL,
    "rembert.RemBertSelfAttention": _PLAIN,
    "roformer.RoFormerSelfAttention": _PLAIN,
    "sam.SamVisionAttention": _SCALED_BEFORE,
    "sam.SamVisionSdpaAttention": _SCALED_BEFORE,
    "sam_hq.SamHQVisionAttention": _SCALED_BEFORE,
    "sam_hq.SamHQVisionSdpaAttention": _SCALED_BEFORE,
    "sew_d.DisentangledSelfAttention": _SCALED_BEFORE,
    "squeezebert.SqueezeBertSelfAttention": WrittenOut(token_axis=2),
    "swin2sr.Swin2SRSelfAttention": _COSINES,
    "swinv2.Swinv2SelfAttention": _COSINES,
    "tapas.TapasSelfAttention": _PLAIN,
    "timesformer.TimesformerSelfAttention": _PLAIN,
    "visual_bert.VisualBertSelfAttention": _PLAIN,
    "wavlm.WavLMAttention": _SCALED_BEFORE,
    "xglm.XGLMAttention": _CAUSAL_SCALED_BEFORE,
    "xlm.MultiHeadAttention": _SCALED_BEFORE,
    "xlnet.XLNetRelativeAttention": WrittenOut(alone=("g",), token_axis=0),
}
"""By folder and class. The first product of two activations that is made by each is that of its queries and keys."""


OWN_ROWS: dict[str, WrittenOut] = {}
"""Rows of users' own attentions, by module and class."""


@dataclass(frozen=True)
class Refusal:
    """Why a module keeps an encoding out of its host, and what its user can do instead."""

    why: str
    remedy: str


_TOGETHER = "take a model of the same size whose attention compares all tokens with each other, as BERT"
REFUSED = {
    "big_bird.BigBirdBlockSparseAttention": Refusal(
        "gives way to another one as soon as the model reads a short text", "load it with attention_type='original_full'"
    ),
    "canine.CanineSelfAttention": Refusal(
        "attends within stretches of characters, which convolutions join", "take a model of byte-level tokens, as ByT5"
    ),
    "convbert.ConvBertSelfAttention": Refusal("joins its answer with that of convolutions, which see order", _TOGETHER),
    "cpmant.CpmAntAttention": Refusal(
        "sees a prompt before the tokens, which has no positions of its own", "take a decoder that reads its tokens alone"
    ),
    "eomt.EomtForUniversalSegmentation": Refusal(
        "joins queries to the patches between its layers", "take a model that reads patches alone, as DINOv2"
    ),
    "eomt_dinov3.EomtDinov3ForUniversalSegmentation": Refusal(
        "joins queries to the patches between its layers", "take a model that reads patches alone, as DINOv3"
    ),
    "fnet.FNetBasicFourierTransform": Refusal("mixes tokens by a Fourier transform, which sees their order", _TOGETHER),
    "fsmt.Attention": Refusal(
        "serves an encoder and a decoder whose model doesn't tell one's positions from the other's",
        "take a translation model with an encoder and a decoder of their own, as Marian",
    ),
    "funnel.FunnelRelMultiheadAttention": Refusal("reads means of neighbouring tokens, which see their order", _TOGETHER),
    "lxmert.LxmertAttention": Refusal(
        "attends to tokens in one layer and to regions of an image in the next",
        "take a model whose text encoder can be taken by itself, as CLIP",
    ),
    "mra.MraSelfAttention": Refusal("compares means of neighbouring tokens, which see their order", _TOGETHER),
    "nystromformer.NystromformerSelfAttention": Refusal(
        "compares means of neighbouring tokens, which see their order", _TOGETHER
    ),
    "prophetnet.ProphetNetNgramSelfAttention": Refusal(
        "predicts several tokens at once, each with relative positions of its own",
        "take an encoder-decoder that predicts one, as BART",
    ),
    "rf_detr.RfDetrDinov2Embeddings": Refusal(
        "cuts its patches into windows with class tokens, which some of its layers join again",
        "take a model that reads patches alone, as DINOv2",
    ),
    "videomt.VideomtForUniversalSegmentation": Refusal(
        "joins queries to the patches between its layers", "take a model that reads patches alone, as DINOv2"
    ),
    "yoso.YosoSelfAttention": Refusal("compares hashes of queries and keys, to which nothing can be added", _TOGETHER),
}
"""By folder and class: modules in which order stays visible, or which tokens alone don't reach."""


def refusal_of(module: nn.Module) -> Refusal | None:
    """Why a module keeps an encoding out of its host, or None."""
    return REFUSED.get(_name(module))


def add_row(cls: type[nn.Module], row: WrittenOut) -> None:
    """Add the row of a user's own attention."""
    OWN_ROWS[f"{cls.__module__}.{cls.__qualname__}"] = row


def row_of(module: nn.Module) -> WrittenOut | None:
    """The row of an attention of Transformers' own, where a class of the same name elsewhere is another one; or of a user's."""
    return ROWS.get(_name(module)) or OWN_ROWS.get(f"{type(module).__module__}.{type(module).__qualname__}")


def _name(module: nn.Module) -> str:
    """Folder and class of a module of Transformers' own."""
    package, *path = type(module).__module__.split(".")
    return f"{path[1]}.{type(module).__name__}" if package == "transformers" and path[0] == "models" else ""


def is_causal(module: nn.Module) -> bool:
    """Whether each query of such an attention sees only the keys up to its own."""
    row = row_of(module)
    return row is not None and row.is_causal


def token_axis(module: nn.Module) -> int:
    """The axis of tokens in the hidden states that enter the layer of an attention."""
    row = row_of(module)
    return 1 if row is None else row.token_axis


def closed(module: nn.Module) -> str:
    """Why nothing can act in an attention, or ""."""
    row = row_of(module)
    return "" if row is None else row.closed(module)


def install(module: Any) -> None:
    """Let the encoding act in such an attention."""
    module.forward = partial(forward, module)


def forward(
    module: Any, *args: Any, position_context: PositionContext | None = None, keys_are_rotated: bool = False, **kwargs: Any
) -> Any:
    """The forward of such an attention, with the encoding in its product of queries and keys."""
    row = row_of(module)
    assert row is not None, f"{type(module).__name__} has no row"
    if row.alone:
        call = Call(argument_names(module), args, kwargs)
        if beside := [name for name in row.alone if call[name] is not None]:
            raise ValueError(f"{type(module).__name__} got {beside[0]!r}, {BESIDE}")
    has_cache = any(isinstance(value, (Cache, dispatch.KeyRotatingCache)) for value in (*args, *kwargs.values()))
    product = Product(row, module, dispatch.context_for(module, position_context), keys_are_rotated, has_cache)
    with product:
        output = type(module).forward(module, *args, **kwargs)
    if not product.met:
        raise RuntimeError(f"{type(module).__name__} made no product of queries and keys: the encoding could not act in it")
    if product.weighing is not None:
        raise RuntimeError(f"{type(module).__name__} made no product of weights and values: the encoding could not act on it")
    return output


BESIDE = (
    "inputs beside the tokens (an image, entities, a prompt, memories, targets), whose positions aren't known: leave them out"
)


class Product(TorchFunctionMode):
    """Puts the encoding into the first product of queries and keys that is made under it, and into that of weights and values.

    keys_are_rotated: whether the keys were rotated as they entered a cache. has_cache: whether keys may come from one.
    """

    def __init__(self, row: WrittenOut, module: Any, context: PositionContext, keys_are_rotated: bool, has_cache: bool) -> None:
        super().__init__()
        self.module, self.context, self.keys_are_rotated, self.has_cache = module, context, keys_are_rotated, has_cache
        self.scaling, self.met = partial(row.scaling, module), False
        self.weighing: Weighing | None = None
        self.others = row.others

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.met:
            return self._behind(function, args, kwargs) if self.weighing is not None else function(*args, **kwargs)
        if function in PRODUCTS:
            return self._product(function, *args, **kwargs)
        if function in SUMS_OF_PRODUCTS:
            return self._sum(function, *args, **kwargs)
        if function is torch.einsum:
            return self._einsum(*args, **kwargs)
        if function is scaled_dot_product_attention:
            return self._whole(*args, **kwargs)
        if function is multi_head_attention_forward:
            return self._projected(*args, **kwargs)
        return function(*args, **kwargs)

    def _product(self, function: Any, query: Tensor, key: Tensor) -> Tensor:
        """`[B, H, Q, E]` by `[B, H, E, K]`, or both with B and H in one."""
        if query.ndim != key.ndim or query.ndim < 3:
            return function(query, key)  # a projection
        query, key, bias, factor = self._encoded(query, key.mT)
        return _plus(function(query, key.mT), bias, factor)

    def _sum(
        self, function: Any, there: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1.0, alpha: float = 1.0
    ) -> Tensor:
        """The same, scaled within, plus a tensor."""
        query, key, bias, factor = self._encoded(batch1, batch2.mT, alpha)
        return _plus(function(there, query, key.mT, beta=beta, alpha=alpha), bias, factor)

    def _einsum(self, equation: str, *operands: Any) -> Tensor:
        """Queries and keys in an order of their own, of which the product's `[B, H, Q, K]` tells the meaning."""
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

    def _whole(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *, is_causal: bool = False, **kwargs: Any
    ) -> Tensor:
        """All of an attention in one call."""
        scaling = query.shape[-1] ** -0.5 if kwargs.get("scale") is None else kwargs["scale"]
        context = self._context_of(query, key, scaling)
        query, key = dispatch.rotated(self.module, query, key, context, self.keys_are_rotated)
        if self.weighing is not None:
            merged = additive_mask(dispatch.acting(self.module, context), query, key, attn_mask, None, context, is_causal)
            weights = dropout((query * scaling @ key.mT + merged).softmax(dim=-1), kwargs.get("dropout_p", 0.0))
            return self._weighed(weights, value)
        mask = biased_mask(dispatch.acting(self.module, context), query, key, attn_mask, context, is_causal)
        causal = is_causal and mask is None
        kwargs["scale"] = scaling  # an encoding may have changed the width that it would be taken from
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, **kwargs)

    def _projected(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim_to_check: int,
        num_heads: int,
        in_proj_weight: Tensor,
        in_proj_bias: Tensor,
        bias_k: None,
        bias_v: None,
        add_zero_attn: bool,
        dropout_p: float,
        out_proj_weight: Tensor,
        out_proj_bias: Tensor,
        training: bool = True,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        *,
        use_separate_proj_weight: bool,
        q_proj_weight: Tensor,
        k_proj_weight: Tensor,
        v_proj_weight: Tensor,
        is_causal: bool = False,
        static_k: None = None,
        static_v: None = None,
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """All of an attention with its projections in one call, of inputs `[L, B, D]`: outputs `[L, B, D]`, and probabilities
        `[B, Q, K]`, which are the heads' mean."""
        inputs = (query, key, value)
        given = zip(inputs, (q_proj_weight, k_proj_weight, v_proj_weight), in_proj_bias.chunk(3), strict=True)
        # [L, B, D] -> [B, H, L, E]
        query, key, value = (linear(*each).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for each in given)
        scaling = query.shape[-1] ** -0.5
        query, key, bias, factor = self._encoded(query, key, scaling)
        scores = _plus(query * scaling @ key.mT, bias, factor)
        if attn_mask is not None:
            scores = scores + attn_mask.unflatten(0, (-1, num_heads))
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], -torch.inf)
        probabilities = dropout(scores.softmax(dim=-1), dropout_p, training)
        output = probabilities @ value if self.weighing is None else self._weighed(probabilities, value)
        output = linear(output.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
        return output, probabilities.mean(dim=1)

    def _behind(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A call behind the product of queries and keys: of weights `[B, H, Q, K]`, or with B and H in one, the product with
        values is the first one behind a softmax."""
        weighing = self.weighing
        assert weighing is not None
        if function in SOFTMAX:
            result = function(*args, **kwargs)
            weighing.is_normalized |= result.shape[-2:] == weighing.shape[-2:]
            return result
        if not weighing.is_normalized:
            return function(*args, **kwargs)
        if function in PRODUCTS and len(args) == 2 and args[0].shape[-2:] == weighing.shape[-2:]:
            weights, value = args
            if weighing.others:
                weighing.others -= 1
                return function(weights, value)
            added = self._added(weights.reshape(weighing.shape), value.shape[-1])
            output = function(weights, value)
            return output + added.reshape(output.shape).to(output.dtype)
        if function is torch.einsum and len(args) == 3:
            left, right, out = args[0].replace(" ", "").replace("->", ",").split(",")
            if len(left) == len(out) == 4 and args[1].numel() == math.prod(weighing.shape):
                query, key = ({*left} & {*out} - {*right}).pop(), ({*left} & {*right} - {*out}).pop()
                value = ({*out} - {*left}).pop()
                batch, head = (letter for letter in left if letter not in (query, key))
                weights = torch.einsum(f"{left}->{batch}{head}{query}{key}", args[1])
                added = self._added(weights, args[2].shape[right.index(value)])
                output = torch.einsum(*args)
                return output + torch.einsum(f"{batch}{head}{query}{value}->{out}", added).to(output.dtype)
        return function(*args, **kwargs)

    def _weighed(self, weights: Tensor, value: Tensor) -> Tensor:
        """The product of weights and values, with what the encoding adds."""
        output = weights @ value
        return output + self._added(weights, value.shape[-1]).to(output.dtype)

    def _added(self, weights: Tensor, value_head_dim: int) -> Tensor:
        """What the encoding adds to the output of an attention with weights `[B, H, Q, K]`."""
        weighing, self.weighing = self.weighing, None
        assert weighing is not None
        return dispatch.value_bias(dispatch.acting(self.module, weighing.context), weights, value_head_dim, weighing.context)

    def _encoded(self, query: Tensor, key: Tensor, within: float = 1.0) -> tuple[Tensor, Tensor, Tensor | None, float]:
        """Queries and keys, rotated, and what to add to their product: the bias, and the factor that undoes the scaling which
        comes afterwards.

        within: the factor by which the product itself is scaled.
        """
        after = self.scaling(query.shape[-1])
        joined = query.ndim == 3
        if joined:
            heads = getattr(self.module, "num_attention_heads", self.context.encoding.geometry.num_attention_heads)
            query, key = query.unflatten(0, (-1, heads)), key.unflatten(0, (-1, heads))
        context = self._context_of(query, key, after * within)
        query, key = dispatch.rotated(self.module, query, key, context, self.keys_are_rotated)
        bias = biased_mask(dispatch.acting(self.module, context), query, key, None, context, is_causal=False)
        factor = 1 / after if isinstance(after, float) else 1.0
        if bias is not None:
            bias = (bias if isinstance(after, float) else bias / after).expand(*query.shape[:3], key.shape[2])
        if joined:
            query, key = query.flatten(0, 1), key.flatten(0, 1)
            bias = bias if bias is None else bias.flatten(0, 1)
        return query, key, bias, factor

    def _context_of(self, query: Tensor, key: Tensor, scaling: Any) -> PositionContext:
        """The context of this attention. Raises ValueError for queries or keys which are not those that it has positions of."""
        self.met = True
        layer = next((number for name in LAYER if (number := getattr(self.module, name, None)) is not None), None)
        context = self.context.placed(query.shape[2], query.device).for_attention(scaling, layer)
        if query.shape[2] != context.length or (key.shape[2] != context.length and not self.has_cache):
            raise ValueError(
                f"{type(self.module).__name__} compares {query.shape[2]} queries with {key.shape[2]} keys, but there are "
                f"positions of {context.length} new tokens and {context.past} cached ones; it got {BESIDE}"
            )
        if any(encoding.needs_weights() for encoding in dispatch.acting(self.module, context)):
            self.weighing = Weighing(context, (*query.shape[:3], key.shape[2]), self.others)
        return context


@dataclass
class Weighing:
    """What is known of the weights `[B, H, Q, K]` of an attention between its two products.

    others: the number of products with other values that come first.
    is_normalized: whether a softmax has been made of them.
    """

    context: PositionContext
    shape: tuple[int, ...]
    others: int
    is_normalized: bool = False


def _plus(product: Tensor, bias: Tensor | None, factor: float) -> Tensor:
    return product if bias is None else torch.add(product, bias, alpha=factor)
