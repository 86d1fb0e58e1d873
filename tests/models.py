"""The architectures and encodings of the tests: each tiny config once, and the models created from them."""

import copy
import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import masking_utils

import hf_posenc
from tools.hosts.tiny import sizes_of

LENGTH = 24
"""The maximum length of every model, in tokens."""
BERT = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=LENGTH,
    pad_token_id=0,
)
CACHE = "cache" if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters else "past_key_values"
"""The name of the cache argument of models, which was renamed in Transformers 5.24."""
LLAMA = dict(BERT, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
DECODER: dict[str, Any] = dict(
    head="ForCausalLM",
    causal=True,
    tables=(),
    layers="layers",
    block="self_attn",
    no_dropout={"attention_dropout": 0.0},
)
"""The structure of decoders with RoPE."""
ROBERTA = dict(BERT, max_position_embeddings=LENGTH + 2, pad_token_id=1)


@dataclass(frozen=True)
class Host:
    """A tiny model of one architecture, and the facts by which tests select models and arguments.

    prefix: prefix of its class names.
    sizes: arguments of its config.
    head: suffix of its language model's class name.
    head_prefix: prefix of the names of classes with a head, if it differs.
    offset: position ID of the first token.
    causal: whether it is a decoder, in which tokens attend to previous tokens, with a KV cache.
    tables, biases: paths of its absolute position embeddings and its relative biases in the base model. Models with neither
        have other positional components.
    layers: path of its layers in the base model.
    block: path of the attention block in a layer.
    one_layer: config changes that leave one layer.
    no_dropout: config changes that disable all dropout.
    `written_out`: whether it has custom attention code, without Transformers' attention interface.
    own_rows: whether its attention weights don't sum to 1.
    kind: encoder, decoder, encoder-decoder, vision, or audio.
    """

    prefix: str
    sizes: dict[str, Any]
    head: str = "ForMaskedLM"
    head_prefix: str = ""
    offset: int = 0
    causal: bool = False
    tables: tuple[str, ...] = ("embeddings.position_embeddings.weight",)
    biases: tuple[str, ...] = ()
    layers: str = "encoder.layer"
    block: str = "attention"
    one_layer: dict[str, Any] = field(default_factory=lambda: {"num_hidden_layers": 1})
    no_dropout: dict[str, float] = field(
        default_factory=lambda: {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    )
    written_out: bool = False
    own_rows: bool = False
    kind: str = ""

    @property
    def windowed(self):
        return any(name in self.sizes for name in WINDOWS)

    @property
    def structure(self):
        """The facts that tests depend on, and the config's fields besides those of most models."""
        fields = frozenset(self.sizes) - frozenset(LLAMA | BART | T5)
        return self.kind, self.head, self.layers, self.block, self.tables, self.biases, self.written_out, self.own_rows, fields

    def __post_init__(self):
        object.__setattr__(self, "kind", self.kind or ("decoder" if self.causal else "encoder"))


HOSTS = {
    "bert": Host("Bert", BERT),
    "distilbert": Host(
        "DistilBert",
        dict(dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=LENGTH),
        layers="transformer.layer",
        one_layer={"n_layers": 1},
        no_dropout={"dropout": 0.0, "attention_dropout": 0.0},
    ),
    "roberta": Host("Roberta", dict(ROBERTA, type_vocab_size=2), offset=2),
    "xlm-roberta": Host("XLMRoberta", dict(ROBERTA, type_vocab_size=2), offset=2),
    "camembert": Host("Camembert", dict(ROBERTA, type_vocab_size=2), offset=2),
    "electra": Host("Electra", dict(BERT, embedding_size=16)),
    "albert": Host("Albert", dict(BERT, embedding_size=16), layers="encoder.albert_layer_groups.0.albert_layers"),
    "mpnet": Host("MPNet", ROBERTA, offset=2, biases=("encoder.relative_attention_bias.weight",), written_out=True),
    "ernie": Host("Ernie", BERT),
    "data2vec-text": Host("Data2VecText", ROBERTA, offset=2),
    "megatron-bert": Host("MegatronBert", BERT, written_out=True),
    "rembert": Host(
        "RemBert",
        dict(BERT, input_embedding_size=16, output_embedding_size=16, bos_token_id=1, eos_token_id=2),
        written_out=True,
    ),
    "layoutlm": Host("LayoutLM", dict(BERT, max_2d_position_embeddings=16)),
    "gpt2": Host(
        "GPT2",
        dict(n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, bos_token_id=1, eos_token_id=2, pad_token_id=0),
        head="LMHeadModel",
        causal=True,
        tables=("wpe.weight",),
        layers="h",
        block="attn",
        one_layer={"n_layer": 1},
        no_dropout={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "llama": Host("Llama", LLAMA, **DECODER),
    "modernbert": Host(
        "ModernBert",
        dict(BERT, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2),
        tables=(),
        layers="layers",
        block="attn",
        no_dropout={"attention_dropout": 0.0, "mlp_dropout": 0.0, "embedding_dropout": 0.0},
    ),
}
WINDOW = 6
"""The sliding window of models that have one."""
WINDOWS = ("sliding_window", "attention_chunk_size")
SLIDING = dict(sliding_window=WINDOW)
ALTERNATE = dict(SLIDING, layer_types=["sliding_attention", "full_attention"])
ROPE = dict(rope_type="default", rope_theta=10000.0)
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=2)
LATENT = dict(q_lora_rank=16, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=2)
CHUNKED = dict(attention_chunk_size=WINDOW, layer_types=["chunked_attention", "full_attention"], intermediate_size_mlp=48)


def _rotary(prefix, head_prefix="", own_rows=False, **more):
    short = {name: more[name][:1] for name in ("layer_types", "no_rope_layers") if name in more}
    short |= {name: LENGTH for name in WINDOWS if name in more}
    sizes = dict(LLAMA, head_dim=8, eos_token_id=None) | more
    facts = dict(one_layer={"num_hidden_layers": 1, **short}, head_prefix=head_prefix, own_rows=own_rows)
    return Host(prefix, sizes, **DECODER, **facts)


def _rotary_encoder(prefix, **more):
    return Host(prefix, BERT | more, tables=(), layers="layers", no_dropout={})


ROTARY_HOSTS = {
    "mistral": _rotary("Mistral", **SLIDING),
    "qwen3": _rotary("Qwen3"),
    "gemma3": _rotary("Gemma3Text", "Gemma3", query_pre_attn_scalar=8, **ALTERNATE),
    "gpt-neox": _rotary("GPTNeoX", rotary_pct=0.25),
    "stablelm": _rotary("StableLm", partial_rotary_factor=0.5),
    "gpt-oss": _rotary("GptOss", rope_parameters=ROPE, **ALTERNATE, **EXPERTS, own_rows=True),
    "deepseek": _rotary("DeepseekV3", num_key_value_heads=4, **LATENT),
    "qwen2": _rotary("Qwen2"),
    "gemma": _rotary("Gemma"),
    "gemma2": _rotary("Gemma2", query_pre_attn_scalar=8, **ALTERNATE),
    "nomic-bert": _rotary_encoder("NomicBert"),
    "eurobert": _rotary_encoder("EuroBert", num_key_value_heads=2, bos_token_id=1, eos_token_id=2, mask_token_id=4),
    "gte": _rotary_encoder("Gte"),
    "jina-embeddings-v3": _rotary_encoder("JinaEmbeddingsV3", pad_token_id=1),
    "phi": _rotary("Phi", partial_rotary_factor=0.5),
    "phi3": _rotary("Phi3"),
    "nemotron": _rotary("Nemotron", partial_rotary_factor=0.5),
    "olmo": _rotary("Olmo"),
    "olmo2": _rotary("Olmo2"),
    "olmo3": _rotary("Olmo3", **ALTERNATE),
    "smollm3": _rotary("SmolLM3", no_rope_layers=[1, 0]),
    "granite": _rotary("Granite"),
    "cohere": _rotary("Cohere"),
    "cohere2": _rotary("Cohere2", **ALTERNATE),
    "helium": _rotary("Helium"),
    "diffllama": _rotary("DiffLlama"),
    "starcoder2": _rotary("Starcoder2"),
    "mixtral": _rotary("Mixtral", **EXPERTS),
    "llama4": _rotary("Llama4Text", "Llama4", no_rope_layers=[1, 0], **EXPERTS, **CHUNKED),
    "exaone4": _rotary("Exaone4", **ALTERNATE),
}
"""Decoders and encoders with RoPE."""
BART: dict[str, Any] = dict(
    d_model=32,
    **{f"{half}_{name}": size for half in ("encoder", "decoder") for name, size in dict(layers=2, attention_heads=4).items()},
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=LENGTH,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=2,
    forced_eos_token_id=None,
)
T5: dict[str, Any] = dict(
    d_model=32,
    d_kv=6,
    d_ff=48,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=12,
    pad_token_id=0,
    eos_token_id=2,
    decoder_start_token_id=0,
)


def _pair(prefix, sizes=BART, head="ForConditionalGeneration", **more):
    if sizes is T5:
        facts = dict(tables=(), one_layer={"num_decoder_layers": 1}, no_dropout={"dropout_rate": 0.0})
    else:
        tables = ("encoder.embed_positions.weight", "decoder.embed_positions.weight")
        no_dropout = {"dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
        facts = dict(tables=tables, one_layer={"decoder_layers": 1}, no_dropout=no_dropout)
    return Host(prefix, sizes | more, head=head, kind="encoder-decoder", **facts)


MIXED = dict(num_sparse_encoder_layers=0, num_sparse_decoder_layers=0)
PAIR_HOSTS = {
    "bart": _pair("Bart"),
    "t5": _pair("T5", T5),
    "umt5": _pair("UMT5", T5),
    "blenderbot": _pair("Blenderbot"),
    "marian": _pair("Marian", head="MTModel", share_encoder_decoder_embeddings=True),
    "m2m-100": _pair("M2M100"),
    "nllb-moe": _pair("NllbMoe", num_experts=2, expert_capacity=64, encoder_sparse_step=0, decoder_sparse_step=0),
    "mbart": _pair("MBart"),
    "plbart": _pair("PLBart"),
    "blenderbot-small": _pair("BlenderbotSmall"),
    "pegasus": _pair("Pegasus"),
    "mt5": _pair("MT5", T5),
    "switch": _pair("SwitchTransformers", T5, **MIXED),
}
"""Encoder-decoders."""
WAVE = dict(
    layerdrop=0.0,
    conv_dim=(16, 16),
    conv_kernel=(10, 3),
    conv_stride=(5, 2),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=4,
    feat_extract_norm="layer",
)
FEATURES = dict(feature_projection_input_dim=16, conv_depthwise_kernel_size=5, output_hidden_size=32)
MEL = dict(layerdrop=0.0, subsampling_conv_channels=8, subsampling_factor=4, conv_kernel_size=5)
QUIET = dict(hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, mask_time_prob=0.0)


def sensed(prefix, kind="vision", **sizes):
    """An image or audio encoder with the sizes of `tools/hosts/tiny.py`. `sizes` override them."""
    sizes = sizes_of(getattr(transformers, f"{prefix}Config")) | sizes
    head = "" if prefix.endswith("Encoder") else "Model"
    return Host(prefix, sizes, head, tables=(), no_dropout=QUIET if kind == "audio" else {}, kind=kind)


VISION_HOSTS = {
    "vit": sensed("ViT"),
    "siglip": sensed("SiglipVision", vision_use_head=False),
    "dinov3": sensed("DINOv3ViT", num_register_tokens=4),
    "beit": sensed("Beit", use_relative_position_bias=True),
    "deit": sensed("DeiT"),
    "registers": sensed("Dinov2WithRegisters"),
    "yolos": sensed("Yolos", num_detection_tokens=3),
    "clip": sensed("CLIPVision"),
    "mlcd": sensed("MLCDVision"),
    "beit-all": sensed("Beit", use_shared_relative_position_bias=True, use_absolute_position_embeddings=True),
    "data2vec": sensed("Data2VecVision", use_relative_position_bias=True),
    "sam3": sensed("Sam3ViT", window_size=2, global_attn_indexes=[1], pretrain_image_size=32),
}
AUDIO_HOSTS = {
    "wav2vec2": sensed("Wav2Vec2", "audio", **WAVE, do_stable_layer_norm=True),
    "wav2vec2-bert": sensed("Wav2Vec2Bert", "audio", **FEATURES, position_embeddings_type="relative_key"),
    "hubert": sensed("Hubert", "audio", **WAVE),
    "unispeech": sensed("UniSpeech", "audio", **WAVE),
    "unispeech-sat": sensed("UniSpeechSat", "audio", **WAVE),
    "data2vec-audio": sensed("Data2VecAudio", "audio", **WAVE | dict(num_conv_pos_embeddings=2, conv_pos_kernel_size=7)),
    "sew": sensed("SEW", "audio", **WAVE, squeeze_factor=2),
    "sew-d": sensed("SEWD", "audio", **WAVE, squeeze_factor=2, max_position_embeddings=32, position_buckets=8),
    "wav2vec2-conformer": sensed(
        "Wav2Vec2Conformer", "audio", **WAVE, conv_depthwise_kernel_size=5, position_embeddings_type="relative"
    ),
    "wav2vec2-bert-relative": sensed("Wav2Vec2Bert", "audio", **FEATURES, position_embeddings_type="relative"),
    "parakeet": sensed("ParakeetEncoder", "audio", **MEL),
}
SENSED_HOSTS = {**VISION_HOSTS, **AUDIO_HOSTS}
"""Image and audio encoders."""
SINCE = {"wav2vec2-bert": "5.16", "wav2vec2-bert-relative": "5.16", "umt5": "5.18"}
"""The first Transformers release in which an architecture's attention can be replaced. For UMT5, it is the first one in which
the original model gives the same output with and without a cache."""
INSTALLED = Version(transformers.__version__)
ALL_HOSTS = {
    name: host
    for name, host in {**HOSTS, **ROTARY_HOSTS, **PAIR_HOSTS, **SENSED_HOSTS}.items()
    if INSTALLED.release >= Version(SINCE.get(name, "5")).release and hasattr(transformers, f"{host.prefix}Config")
}
TABLED = [name for name, host in HOSTS.items() if host.tables]
BIASED = [name for name, host in HOSTS.items() if host.biases]
CAUSAL = [name for name, host in HOSTS.items() if host.causal]
OFFSET = [name for name, host in HOSTS.items() if host.offset]
ROTARY = [name for name, host in HOSTS.items() if not host.tables]
WRITTEN_OUT = [name for name, host in HOSTS.items() if host.written_out]
REGISTERED = hf_posenc.list_encodings()
GRIDS = ("sinusoidal_2d", "rope_2d")
"""Encodings of rows and columns, for models of images."""
CAUSAL_ONLY = ("cope", "fox", "xpos")
"""Encodings for decoders."""
ENCODINGS = tuple(name for name in REGISTERED if name not in GRIDS)
"""All other encodings, by name."""
ALL_WAYS = "sinusoidal+rope+relative+shaw"
"""An encoding for each mechanism: additive, rotation, distance bias, and content bias."""
VARIANTS = (*ENCODINGS, "relative_key_query", "learned+shaw", "sinusoidal+alibi", ALL_WAYS)
"""All encodings, and some compositions."""
UNORDERED = ("logn", "none")
"""Encodings that don't represent order."""
CONFIGURED: dict[str, dict[str, Any]] = {
    "kerple, power, per layer": {"type": "kerple", "kernel": "power", "per_layer": True},
    "alibi, one side, learned": {"type": "alibi", "sides": "asymmetric", "slopes": "learned", "per_layer": True},
    "alibi, learned, per layer": {"type": "alibi", "slopes": "learned", "per_layer": True},
    "relative, per layer": {"type": "relative", "per_layer": True},
    "shaw, shared": {"type": "shaw", "per_layer": False},
    "tupe, class token": {"type": "tupe", "untie_cls": True},
    "deberta, shared": {"type": "deberta", "per_layer": False},
    "transformer_xl, shared": {"type": "transformer_xl", "per_layer": False},
    "cope, shared": {"type": "cope", "per_layer": False},
    "fox, shared": {"type": "fox", "per_layer": False},
    "sinusoidal, each layer": {"type": "sinusoidal", "inject": "every_layer", "layout": "concatenated"},
    "rope, part": {"type": "rope", "partial_rotary_factor": 0.5, "layout": "interleaved"},
    "rope, linear": {"type": "rope", "rope_type": "linear", "factor": 4.0},
    "rope, yarn": {"type": "rope", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    "rope_2d, mixed": {"type": "rope_2d", "frequencies": "mixed", "per_layer": True},
}
"""Encodings with options, by custom names."""
OPTIONS: dict[str, dict[str, Any]] = {
    "logn": {"trained_length": 5, "scale": "learned"},
    "rope+logn": {"logn__trained_length": 5},
    "fope": {"trained_length": LENGTH},
    "self_extend": {"trained_length": LENGTH},
}
"""Options with which an encoding affects the short inputs of tests, unlike its defaults. They also work in models without a
length limit."""


def slow(*values):
    """Parameters similar to others, which only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def suits(host, encoding):
    """Whether a model supports an encoding. Some are for decoders, and some for images."""
    if (host, encoding) == ("gemma2", "self_extend"):  # self_extend corrects scores, but Gemma 2 caps them before
        return False
    names = {part.partition(",")[0] for part in encoding.split("+")}
    if not ALL_HOSTS[host].causal and names & {*CAUSAL_ONLY}:
        return False
    if encoding == "alibi, one side, learned" and (ALL_HOSTS[host].causal or ALL_HOSTS[host].kind == "encoder-decoder"):
        return False
    return ALL_HOSTS[host].kind == "vision" or not names & {*GRIDS}


def spec_of(encoding):
    """An encoding as an argument of `patch`, with its options in tests."""
    if encoding in OPTIONS:
        return {"type": encoding, **OPTIONS[encoding]}
    return CONFIGURED.get(encoding, encoding)


def pairs(hosts=HOSTS, encodings=VARIANTS, on=("bert", "gpt2")):
    """All pairs of models and encodings as parameters of a test.

    `make test` runs every encoding with one of the models in `on`, in turn, and every model with ALL_WAYS. Other pairs are
    slow.
    """
    run = {(host, ALL_WAYS) for host in hosts}
    for turn, encoding in enumerate(encodings):
        suited = [host for host in on if host in hosts and suits(host, encoding)]
        run |= {(host, encoding) for host in (suited[turn % len(suited) :][:1] if suited else ())}
    return [
        pytest.param(host, encoding, marks=() if (host, encoding) in run else pytest.mark.slow)
        for host in hosts
        for encoding in encodings
        if suits(host, encoding)
    ]


def in_turn(parameters, *values):
    """Parameters combined with every value of another one. `make test` runs each with only one value, in turn."""
    chosen, found = 0, []
    for each in parameters:
        for number, value in enumerate(values):
            quick = not each.marks and number == chosen % len(values)
            found.append(pytest.param(*each.values, value, marks=() if quick else pytest.mark.slow))
        chosen += not each.marks
    return found


def by_structure(hosts):
    """Models as parameters of a test. Those with the same layer structure as an earlier one are slow."""
    seen, parameters = [], []
    for name in hosts:
        host = HOSTS[name]
        structure = host.layers, host.block, host.biases, host.written_out
        parameters.append(pytest.param(name, marks=pytest.mark.slow if structure in seen else ()))
        seen.append(structure)
    return parameters


VOCABULARY = 61


def randomize(model, std=0.3, seed=0):
    """Draw all parameters again, so that none keeps an initial value that would hide a fault."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model


def randomize_encoding(model, seed=1):
    """Draw the encoding's parameters from N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "posenc." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def stock(host, head="Model", seed=0, **changes):
    """A tiny model of an architecture (a name or a `Host`), in eval mode, with random weights."""
    host = ALL_HOSTS[host] if isinstance(host, str) else host
    config = getattr(transformers, f"{host.prefix}Config")(**{"vocab_size": VOCABULARY, **host.sizes, **changes})
    prefix = host.prefix if head == "Model" else host.head_prefix or host.prefix
    torch.manual_seed(seed)
    model = getattr(transformers, prefix + head)(config)
    kept = {name: each.clone() for name, each in model.named_parameters() if not each.requires_grad}
    randomize(model, seed=seed)
    with torch.no_grad():
        for name, each in kept.items():  # sinusoids, which checkpoints don't change
            model.get_parameter(name).copy_(each)
    return model.eval()


def patched(host, encoding, head="Model", seed=0, max_length=None, **changes):
    """The model of `stock`, patched. The encoding's parameters are drawn from N(0, 1)."""
    encoding = spec_of(encoding) if isinstance(encoding, str) else encoding
    return randomize_encoding(hf_posenc.patch(stock(host, head, seed, **changes), encoding, max_length=max_length))


def as_itself(model, host, max_length=None):
    """An original model patched with its original positions.

    Position embeddings become a learned encoding, relative biases become T5's, and rotations become `rope`.
    """
    if host in ROTARY:
        parameters = model.config.rope_parameters
        if "rope_theta" in parameters:
            return hf_posenc.patch(model, "rope", theta=parameters["rope_theta"], max_length=max_length)
        kinds = sorted(parameters)  # one rope per layer type
        options = {"max_length": max_length}
        for part, kind in zip(("rope", "rope_2"), kinds, strict=True):
            options[f"{part}__theta"] = parameters[kind]["rope_theta"]
            options[f"{part}__layers"] = [i for i, other in enumerate(model.config.layer_types) if other == kind]
        return hf_posenc.patch(model, "rope+rope", **options)
    if not HOSTS[host].biases:
        return hf_posenc.patch(model, "learned", init="host", max_length=max_length)
    new = hf_posenc.patch(model, "learned+t5", learned__init="host", max_length=max_length)
    with torch.no_grad():
        for name in HOSTS[host].biases:
            new.posenc.t5.weight.copy_(model.get_parameter(name))
    return new


def backends(model):
    """The attention implementations that a model supports in tests."""
    return ("eager", "sdpa") if model._supports_sdpa else ("eager",)


def checkpointing(model, enable=True, **options):
    """Turn checkpointing of activations on or off. Transformers 5.23 renamed its methods."""
    kinds = (kind for kind in ("activation", "gradient") if hasattr(model, f"{kind}_checkpointing_enable"))
    switch = getattr(model, f"{next(kinds)}_checkpointing_{'enable' if enable else 'disable'}")
    switch(options) if enable else switch()


def rebuilt(model):
    """A model of the same class, built from the config and the saved weights."""
    new = type(model)(copy.deepcopy(model.config)).eval()
    new.load_state_dict(model.state_dict())
    return new


def tokens(batch=2, length=11, seed=0):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def first(output):
    """The main tensor of a model's output: logits or hidden states."""
    return output[0]


def tiny(name, seed=0, **changes):
    """A tiny model of any Transformers class, in eval mode, with random weights.

    Its config has the sizes of `tools/hosts/tiny.py`, and `changes`. Example: `tiny("BartModel", pad_token_id=None)`.
    """
    kind = getattr(transformers, name)
    torch.manual_seed(seed)
    return randomize(kind(tiny_config(name, **changes)), seed=seed).eval()


def tiny_config(name, **changes):
    """The config of `tiny` for a model class."""
    kind = getattr(transformers, name).config_class
    return kind(**{**sizes_of(kind), **changes})


_shared: list[Any] = []


def _state(model):
    tensors = [each._version for each in model.state_dict(keep_vars=True).values()]  # models can replace derived tensors
    flags = [(module.training, len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    config = model.config._attn_implementation, repr(getattr(model.config, "position_encoding", None))
    return tensors, flags, [each.requires_grad for each in model.parameters()], config, type(model)


@functools.cache
def shared(host, encoding=None, head="Model", max_length=None):
    """The cached models of `stock` and `patched`, which must not be changed. A test module that changes one fails."""
    model = stock(host, head) if encoding is None else patched(host, encoding, head, max_length=max_length)
    _shared.append((model, _state(model)))
    return model


def assert_unchanged():
    changed = [type(model).__name__ for model, before in _shared if _state(model) != before]
    if changed:
        _shared.clear()
        shared.cache_clear()
    assert not changed, f"tests changed shared models: {changed}"


needs_inductor = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch 2.13's inductor writes C++ that doesn't compile without vector instructions (ATEN_CPU_CAPABILITY=default)",
)
