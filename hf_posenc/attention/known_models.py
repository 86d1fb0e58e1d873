"""Descriptions of Transformers' own attentions that don't use its attention interface, one row each.

It also lists modules that make their models unsupported, with alternatives. Importing this module registers the rows.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from hf_posenc.attention import custom, intercept, local
from hf_posenc.attention.custom import CustomAttention, inverse_sqrt_head_dim, name_of, unscaled


def deberta_scaling(module: Any, head_dim: int) -> float:
    """The scaling of DeBERTa's scores, which has a part for each type of position scores, also if they are disabled."""
    return (head_dim * (1 + len({"c2p", "p2c"} & {*module.pos_att_type}))) ** -0.5


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


_PLAIN, _SCALED_BEFORE = CustomAttention(), CustomAttention(unscaled, inverse_sqrt_head_dim)
_LONGFORMER = CustomAttention(unscaled, forward=local.longformer)
_DEBERTA = CustomAttention(unscaled, deberta_scaling)
_DEBERTA_V2 = replace(_DEBERTA, scales_keys=True)
_COSINES = CustomAttention(learned_scaling)
_CAUSAL, _CAUSAL_UNSCALED = CustomAttention(is_causal=True), CustomAttention(unscaled, is_causal=True)
"""The second scales within the product, or not at all."""
KNOWN = {
    "bark.BarkSelfAttention": _PLAIN,
    "bigbird_pegasus.BigBirdPegasusSelfAttention": _PLAIN,
    "informer.InformerAttention": _SCALED_BEFORE,
    "lxmert.LxmertAttention": _PLAIN,
    "pegasus_x.PegasusXGlobalLocalAttention": CustomAttention(unscaled, forward=local.pegasus_x),
    "pvt.PvtEfficientSelfAttention": _PLAIN,
    "seggpt.SegGptAttention": _SCALED_BEFORE,
    "speecht5.SpeechT5Attention": _SCALED_BEFORE,
    "trocr.TrOCRAttention": _SCALED_BEFORE,
    "vilt.ViltSelfAttention": _PLAIN,
    "vitdet.VitDetAttention": replace(_SCALED_BEFORE, token_axis=2, block_token_axis=1),
    "big_bird.BigBirdSelfAttention": _PLAIN,
    "blip.BlipAttention": _PLAIN,
    "blip.BlipTextSelfAttention": _PLAIN,
    "bloom.BloomAttention": _CAUSAL_UNSCALED,
    "bros.BrosSelfAttention": _PLAIN,
    "clap.ClapAudioSelfAttention": _PLAIN,
    "clvp.ClvpSelfAttention": _SCALED_BEFORE,
    "codegen.CodeGenAttention": _PLAIN,
    "dab_detr.DetrAttention": _SCALED_BEFORE,
    "data2vec.Data2VecVisionSdpaSelfAttention": _PLAIN,
    "data2vec.Data2VecVisionSelfAttention": _PLAIN,
    "deberta.DisentangledSelfAttention": _DEBERTA,
    "deberta_v2.DisentangledSelfAttention": _DEBERTA_V2,
    "donut.DonutSwinSelfAttention": _PLAIN,
    "falcon.FalconAttention": _PLAIN,
    "flaubert.MultiHeadAttention": _SCALED_BEFORE,
    "flava.FlavaSelfAttention": _PLAIN,
    "gpt_neo.GPTNeoSelfAttention": _CAUSAL_UNSCALED,
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": _CAUSAL_UNSCALED,
    "gptj.GPTJAttention": _PLAIN,
    "groupvit.GroupViTAttention": _SCALED_BEFORE,
    "granite_speech.GraniteSpeechConformerAttention": _PLAIN,
    "granite_speech_plus.GraniteSpeechPlusConformerAttention": _PLAIN,
    "ibert.IBertSelfAttention": _PLAIN,
    "imagegpt.ImageGPTAttention": CustomAttention(imagegpt_scaling, is_causal=True),
    "layoutlmv3.LayoutLMv3SelfAttention": _SCALED_BEFORE,
    "led.LEDDecoderAttention": _SCALED_BEFORE,
    "led.LEDEncoderSelfAttention": _LONGFORMER,
    "lilt.LiltSelfAttention": CustomAttention(num_earlier_value_matmuls=1),
    "longt5.LongT5LocalAttention": CustomAttention(unscaled, forward=local.longt5),
    "longformer.LongformerSelfAttention": _LONGFORMER,
    "luke.LukeSelfAttention": CustomAttention(unsupported_inputs=("entity_hidden_states",)),
    "maskformer.MaskFormerSwinSelfAttention": _PLAIN,
    "megatron_bert.MegatronBertSelfAttention": _PLAIN,
    "mgp_str.MgpstrAttention": _PLAIN,
    "mpnet.MPNetSelfAttention": _PLAIN,
    "mpt.MptAttention": CustomAttention(config_scaling, is_causal=True),
    "mvp.MvpAttention": replace(_SCALED_BEFORE, unsupported_inputs=("attn_prompt",)),
    "openai.Attention": _CAUSAL,
    "rembert.RemBertSelfAttention": _PLAIN,
    "roformer.RoFormerSelfAttention": _PLAIN,
    "sam.SamVisionAttention": _SCALED_BEFORE,
    "sam.SamVisionSdpaAttention": _SCALED_BEFORE,
    "sam_hq.SamHQVisionAttention": _SCALED_BEFORE,
    "sam_hq.SamHQVisionSdpaAttention": _SCALED_BEFORE,
    "sew_d.DisentangledSelfAttention": _DEBERTA_V2,
    "slanext.SLANeXtVisionAttention": _SCALED_BEFORE,
    "squeezebert.SqueezeBertSelfAttention": CustomAttention(token_axis=2),
    "swin2sr.Swin2SRSelfAttention": _COSINES,
    "swinv2.Swinv2SelfAttention": _COSINES,
    "table_transformer.TableTransformerAttention": _SCALED_BEFORE,
    "tapas.TapasSelfAttention": _PLAIN,
    "timesformer.TimesformerSelfAttention": _PLAIN,
    "timm.layers.attention.Attention": _SCALED_BEFORE,
    "visual_bert.VisualBertSelfAttention": _PLAIN,
    "vits.VitsAttention": _SCALED_BEFORE,
    "wavlm.WavLMAttention": _SCALED_BEFORE,
    "xglm.XGLMAttention": replace(_SCALED_BEFORE, is_causal=True),
    "xlm.MultiHeadAttention": _SCALED_BEFORE,
    "xlnet.XLNetRelativeAttention": CustomAttention(unsupported_inputs=("g",), token_axis=0),
}
"""Keys are directory and class, or module and class outside Transformers. In each attention, the first product of two
activations is that of queries and keys."""

custom.ROWS.update({name: row if row.forward else replace(row, forward=intercept.forward) for name, row in KNOWN.items()})


@dataclass(frozen=True)
class Refusal:
    """Why a module doesn't support encodings, and what to do instead."""

    why: str
    remedy: str


_TOGETHER = "Use a model whose attention compares all pairs of tokens, such as BERT."
_ONE_MODEL = "is in an encoder and a decoder that are parts of one stack, because neither is a PreTrainedModel"
UNSUPPORTED = {
    "autoformer.AutoformerAttention": Refusal(
        "sums values that are shifted in time, chosen by a Fourier transform, so it compares no pairs of tokens",
        "Use a model with attention to time steps, such as TimeSeriesTransformer.",
    ),
    "big_bird.BigBirdBlockSparseAttention": Refusal(
        "is replaced by another one when the input is short", "Load the model with attention_type='original_full'."
    ),
    "bigbird_pegasus.BigBirdPegasusBlockSparseAttention": Refusal(
        "is replaced by another one when the input is short", "Load the model with attention_type='original_full'."
    ),
    "canine.CanineSelfAttention": Refusal(
        "attends within segments of characters that convolutions combine", "Use a model of bytes, such as ByT5."
    ),
    "convbert.ConvBertSelfAttention": Refusal("adds the output of convolutions, which depend on order", _TOGETHER),
    "cpmant.CpmAntAttention": Refusal(
        "sees a prompt before the tokens, which its cache counts as tokens", "Use a decoder without such a prompt."
    ),
    "decision_transformer.DecisionTransformerModel": Refusal(
        "adds embeddings of time steps, and passes position 0 for all tokens to its decoder",
        "Use another decoder, such as GPT-2.",
    ),
    "dory.DoryAttention": Refusal(
        "attends to the keys of other iterations of its layers", "Use a decoder that runs each layer once, such as Llama."
    ),
    "fastspeech2_conformer.FastSpeech2ConformerAttention": Refusal(
        _ONE_MODEL, "Use a text-to-speech model with a separate text encoder, such as VITS."
    ),
    "fnet.FNetBasicFourierTransform": Refusal("mixes tokens with a Fourier transform, which depends on order", _TOGETHER),
    "fsmt.Attention": Refusal(
        _ONE_MODEL,
        "Use a translation model with a separate encoder and decoder, such as Marian.",
    ),
    "funnel.FunnelRelMultiheadAttention": Refusal("reads averages of neighboring tokens, which depend on order", _TOGETHER),
    "hiera.HieraMaskUnitAttention": Refusal(
        "merges queries, and receives patches in the order of mask units", "Use a model that keeps all patches, such as ViT."
    ),
    "informer.InformerConvLayer": Refusal(
        "halves the number of tokens between two layers", "Load the model with distil=False."
    ),
    "informer.InformerProbSparseAttention": Refusal(
        "replaces the outputs of most queries by the mean of all values", "Load the model with attention_type='full'."
    ),
    "longt5.LongT5TransientGlobalAttention": Refusal(
        "also attends to sums of neighboring tokens, which depend on order",
        "Use a LongT5 with encoder_attention_type='local', or T5.",
    ),
    "mra.MraSelfAttention": Refusal("compares averages of neighboring tokens, which depend on order", _TOGETHER),
    "muse_glimmer_assistant.MuseGlimmerAssistantAttention": Refusal(
        "compares its tokens with those of another model, whose positions it doesn't know", "Patch the model that it assists."
    ),
    "nystromformer.NystromformerSelfAttention": Refusal(
        "compares averages of neighboring tokens, which depend on order", _TOGETHER
    ),
    "prophetnet.ProphetNetNgramSelfAttention": Refusal(
        "predicts several tokens at once, each with its own relative positions",
        "Use an encoder-decoder that predicts one token, such as BART.",
    ),
    "pvt.PvtEfficientSelfAttention": Refusal(
        "compares patches with merged patches, which have no single position",
        "Use a model that keeps all patches, such as ViT.",
    ),
    "reformer.LSHSelfAttention": Refusal("compares tokens that a hash puts in the same chunk, in sorted order", _TOGETHER),
    "reformer.LocalSelfAttention": Refusal("splits its queries and keys into chunks before it multiplies them", _TOGETHER),
    "rf_detr.RfDetrDinov2Embeddings": Refusal(
        "divides its patches into windows with class tokens, which some of its layers join",
        "Use a model that reads only patches, such as DINOv2.",
    ),
    "yoso.YosoSelfAttention": Refusal("compares hashes of queries and keys, to which no bias can be added", _TOGETHER),
}
"""Directory and class -> modules that would stay order-sensitive, or that receive more than tokens."""


def refusal_of(module: nn.Module) -> Refusal | None:
    """Why a module doesn't support encodings, or None."""
    return UNSUPPORTED.get(name_of(module))
