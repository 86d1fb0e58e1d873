"""Descriptions of Transformers' own attentions that don't use its attention interface, one row each.

It also lists modules that make their models unsupported, with alternatives. Importing this module registers the rows.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from hf_posenc.attention import custom, intercept
from hf_posenc.attention.custom import CustomAttention, name_of


def unscaled(module: Any, head_dim: int) -> float:
    """1, because queries or keys are scaled before the product or within it, or not at all."""
    return 1.0


def imagegpt_scaling(module: Any, head_dim: int) -> float:
    """The scaling of ImageGPT, which has GPT-2's two settings. With float32 scores, it scales within the product."""
    if module.reorder_and_upcast_attn:
        return 1.0
    scaling = head_dim**-0.5 if module.scale_attn_weights else 1.0
    return scaling / (module.layer_idx + 1) if module.scale_attn_by_inverse_layer_idx else scaling


def config_scaling(module: Any, head_dim: int) -> float:
    """A number from the config (MPT)."""
    return module.softmax_scale


def learned_scaling(module: Any, head_dim: int) -> Tensor:
    """A learned factor `[H, 1, 1]` on cosines, one for each head (Swin v2)."""
    return module.logit_scale.clamp(max=math.log(100)).exp()


def sparse(module: Any) -> str:
    """The reason for attentions that never multiply all queries by all keys."""
    return "splits its queries and keys into chunks"


_PLAIN, _SCALED_BEFORE, _SPARSE = CustomAttention(), CustomAttention(unscaled), CustomAttention(closed=sparse)
_COSINES = CustomAttention(learned_scaling)
_CAUSAL, _CAUSAL_SCALED_BEFORE = CustomAttention(is_causal=True), CustomAttention(unscaled, is_causal=True)
KNOWN = {
    "bark.BarkSelfAttention": _PLAIN,
    "big_bird.BigBirdSelfAttention": _PLAIN,
    "blip.BlipAttention": _PLAIN,
    "blip.BlipTextSelfAttention": _PLAIN,
    "bloom.BloomAttention": _CAUSAL_SCALED_BEFORE,
    "bros.BrosSelfAttention": _PLAIN,
    "clap.ClapAudioSelfAttention": _PLAIN,
    "clvp.ClvpSelfAttention": _SCALED_BEFORE,
    "codegen.CodeGenAttention": _PLAIN,
    "dab_detr.DetrAttention": _SCALED_BEFORE,
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
    "imagegpt.ImageGPTAttention": CustomAttention(imagegpt_scaling, is_causal=True),
    "layoutlmv3.LayoutLMv3SelfAttention": _SCALED_BEFORE,
    "led.LEDDecoderAttention": _SCALED_BEFORE,
    "led.LEDEncoderSelfAttention": _SPARSE,
    "lilt.LiltSelfAttention": CustomAttention(num_earlier_value_matmuls=1),
    "longformer.LongformerSelfAttention": _SPARSE,
    "luke.LukeSelfAttention": CustomAttention(unsupported_inputs=("entity_hidden_states",)),
    "maskformer.MaskFormerSwinSelfAttention": _PLAIN,
    "megatron_bert.MegatronBertSelfAttention": _PLAIN,
    "mgp_str.MgpstrAttention": _PLAIN,
    "mpnet.MPNetSelfAttention": _PLAIN,
    "mpt.MptAttention": CustomAttention(config_scaling, is_causal=True),
    "mvp.MvpAttention": CustomAttention(unscaled, unsupported_inputs=("attn_prompt",)),
    "openai.Attention": _CAUSAL,
    "rembert.RemBertSelfAttention": _PLAIN,
    "roformer.RoFormerSelfAttention": _PLAIN,
    "sam.SamVisionAttention": _SCALED_BEFORE,
    "sam.SamVisionSdpaAttention": _SCALED_BEFORE,
    "sam_hq.SamHQVisionAttention": _SCALED_BEFORE,
    "sam_hq.SamHQVisionSdpaAttention": _SCALED_BEFORE,
    "sew_d.DisentangledSelfAttention": _SCALED_BEFORE,
    "slanext.SLANeXtVisionAttention": _SCALED_BEFORE,
    "squeezebert.SqueezeBertSelfAttention": CustomAttention(token_axis=2),
    "swin2sr.Swin2SRSelfAttention": _COSINES,
    "swinv2.Swinv2SelfAttention": _COSINES,
    "table_transformer.TableTransformerAttention": _SCALED_BEFORE,
    "tapas.TapasSelfAttention": _PLAIN,
    "timesformer.TimesformerSelfAttention": _PLAIN,
    "visual_bert.VisualBertSelfAttention": _PLAIN,
    "wavlm.WavLMAttention": _SCALED_BEFORE,
    "xglm.XGLMAttention": _CAUSAL_SCALED_BEFORE,
    "xlm.MultiHeadAttention": _SCALED_BEFORE,
    "xlnet.XLNetRelativeAttention": CustomAttention(unsupported_inputs=("g",), token_axis=0),
}
"""Keys are directory and class. In each attention, the first product of two activations is that of queries and keys."""

custom.ROWS.update({name: replace(row, forward=intercept.forward) for name, row in KNOWN.items()})


@dataclass(frozen=True)
class Refusal:
    """Why a module doesn't support encodings, and what to do instead."""

    why: str
    remedy: str


_TOGETHER = "Use a model whose attention compares all pairs of tokens, such as BERT."
UNSUPPORTED = {
    "big_bird.BigBirdBlockSparseAttention": Refusal(
        "is replaced by another one when the input is short", "Load the model with attention_type='original_full'."
    ),
    "canine.CanineSelfAttention": Refusal(
        "attends within segments of characters that convolutions combine", "Use a model of bytes, such as ByT5."
    ),
    "convbert.ConvBertSelfAttention": Refusal("adds the output of convolutions, which depend on order", _TOGETHER),
    "cpmant.CpmAntAttention": Refusal(
        "sees a prompt before the tokens, which has no positions", "Use a decoder without such a prompt."
    ),
    "dory.DoryAttention": Refusal(
        "attends to the keys of other iterations of its layers", "Use a decoder that runs each layer once, such as Llama."
    ),
    "eomt.EomtForUniversalSegmentation": Refusal(
        "adds queries to the patches between its layers", "Use a model that reads only patches, such as DINOv2."
    ),
    "eomt_dinov3.EomtDinov3ForUniversalSegmentation": Refusal(
        "adds queries to the patches between its layers", "Use a model that reads only patches, such as DINOv3."
    ),
    "fnet.FNetBasicFourierTransform": Refusal("mixes tokens with a Fourier transform, which depends on order", _TOGETHER),
    "fsmt.Attention": Refusal(
        "is used by an encoder and a decoder whose positions can't be distinguished",
        "Use a translation model with a separate encoder and decoder, such as Marian.",
    ),
    "funnel.FunnelRelMultiheadAttention": Refusal("reads averages of neighboring tokens, which depend on order", _TOGETHER),
    "lxmert.LxmertAttention": Refusal(
        "attends to tokens in one layer and to image regions in the next",
        "Use a model with a separate text encoder, such as CLIP.",
    ),
    "mra.MraSelfAttention": Refusal("compares averages of neighboring tokens, which depend on order", _TOGETHER),
    "nystromformer.NystromformerSelfAttention": Refusal(
        "compares averages of neighboring tokens, which depend on order", _TOGETHER
    ),
    "prophetnet.ProphetNetNgramSelfAttention": Refusal(
        "predicts several tokens at once, each with its own relative positions",
        "Use an encoder-decoder that predicts one token, such as BART.",
    ),
    "rf_detr.RfDetrDinov2Embeddings": Refusal(
        "divides its patches into windows with class tokens, which some of its layers join",
        "Use a model that reads only patches, such as DINOv2.",
    ),
    "videomt.VideomtForUniversalSegmentation": Refusal(
        "adds queries to the patches between its layers", "Use a model that reads only patches, such as DINOv2."
    ),
    "yoso.YosoSelfAttention": Refusal("compares hashes of queries and keys, to which no bias can be added", _TOGETHER),
}
"""Directory and class -> modules that would stay order-sensitive, or that receive more than tokens."""


def refusal_of(module: nn.Module) -> Refusal | None:
    """Why a module doesn't support encodings, or None."""
    return UNSUPPORTED.get(name_of(module))
