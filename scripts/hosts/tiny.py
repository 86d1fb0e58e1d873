"""Tiny random models of Transformers' model types, from a few sizes that most configs know by one name or another."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel

LENGTH, VOCABULARY, MOST_VALUES = 11, 61, 3_000_000
"""Tokens of an input, below every sliding window; token ids; elements of the parameters and buffers of a model."""


def _named(value: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, value)


LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
SIZES: dict[str, Any] = {
    **_named(32, "hidden_size", "embedding_size", "n_embd", "dim", "d_model", "emb_dim", "word_embed_proj_dim", "embed_dim"),
    **_named(32, "projection_dim", "hidden_dim", "input_embedding_size", "output_embedding_size", "n_inner"),
    **_named(2, *LAYERS, "num_encoder_layers", "num_decoder_layers", "depth", "num_blocks"),
    **_named(4, "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
    **_named(2, "num_key_value_heads", "num_kv_heads"),
    **_named(48, "intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "ffn_hidden_size"),
    **_named(16, "moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size", "router_hidden_size"),
    **_named(4, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    **_named(2, "num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "experts_per_token"),
    **_named(1, "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "num_shared_experts"),
    **_named(16, "q_lora_rank"),
    **_named(24, "kv_lora_rank"),  # no head's width, so that what is cached can't be taken for keys
    **_named(8, "head_dim", "global_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "attention_head_dim"),
    **_named(24, "max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx"),
    **_named(64, "sliding_window", "attention_chunk_size", "local_attention"),
    **_named(32, "image_size"),
    **_named(8, "patch_size"),
    **_named(8, "d_kv", "hidden_size_per_layer_input", "laurel_rank"),
    **_named(48, "mlp_hidden_size"),
    **_named(VOCABULARY, "vocab_size", "vocab_size_per_layer_input"),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
"""A config takes those that it knows."""
WITHOUT: tuple[tuple[str, ...], ...] = (
    (),
    ("head_dim",),
    ("head_dim", "num_key_value_heads"),
    ("hidden_dim",),
    ("image_size",),
)
"""Sizes left at their defaults, tried in turn until a model runs."""
MORE: dict[str, dict[str, Any]] = {
    "modernbert": {"global_attn_every_n_layers": 2},
    "modernbert-decoder": {"global_attn_every_n_layers": 2},
    "xmod": {"default_language": "en_XX"},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global"], 1], [["local"], 1]]},
    "big_bird": {"attention_type": "original_full"},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_buckets": 8,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    },
    "funnel": {"block_sizes": [1, 1]},
    "layoutlmv3": {"coordinate_size": 5, "shape_size": 6},
    "lilt": {"channel_shrink_ratio": 2, "hidden_size": 48},
    "luke": {"entity_vocab_size": 8, "entity_emb_size": 8},
    "roc_bert": {"pronunciation_vocab_size": 8, "shape_vocab_size": 8, "pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "longcat_flash": {"num_key_value_heads": 4},
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
    "kyutai_speech_to_text": {"pad_token_id": 3, "audio_pad_token_id": 3},
}
"""Model type -> arguments of its own by which it builds, or is cheaper."""


def config_of(config_class: type[PreTrainedConfig], without: tuple[str, ...] = (), only: int | None = None) -> Any:
    """A config of these sizes, with one layer of each kind; or with the one layer `only`, counted among those."""
    default: Any = config_class()
    return config_class(**_arguments(default, without, only))


def _arguments(default: Any, without: tuple[str, ...], only: int | None) -> dict[str, Any]:
    kind = type(default)
    known = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    more = MORE.get(kind.model_type, {})
    sizes = {name: copy.copy(value) for name, value in SIZES.items() if name in known and name not in without}
    if "kv_lora_rank" in sizes and "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]  # latent attention has keys for each head
    sizes.update(_rotary(default, sizes))
    count = next((value for name in LAYERS if isinstance(value := _value(default, name), int)), None)
    types = _value(default, "layer_types")
    if "layer_types" in more:
        chosen = [*range(len(more["layer_types"]))]
    elif count and isinstance(types, (list, tuple)) and len(types) == count:
        chosen = sorted({types.index(each) for each in types})
        chosen = chosen if len(chosen) > 1 else [0, count - 1]
    else:
        chosen = [0, count - 1] if count else []
    chosen = chosen if only is None else chosen[only : only + 1]
    for name in known & {*LAYERS}:
        sizes[name] = len(chosen) if count else sizes[name]
    for name in known:
        value = None if isinstance(getattr(kind, name, None), property) else _value(default, name)
        if isinstance(value, (list, tuple)) and count and len(value) == count and count > 2:
            sizes[name] = [value[index] for index in chosen]
    by_layer = slice(None) if only is None else slice(only, only + 1)
    sizes.update({name: value[by_layer] if isinstance(value, list) else value for name, value in more.items()})
    for name in default.sub_configs:
        part = _value(default, name)
        if isinstance(part, PreTrainedConfig):
            sizes[name] = {"model_type": part.model_type, **_arguments(part, without, only)}
    return sizes


def _rotary(default: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """The default's rope_parameters, with sections of M-RoPE that fit the size of a head."""
    given = _value(default, "rope_parameters")
    if not isinstance(given, dict) or "mrope_section" not in getattr(default, "ignore_keys_at_rope_validation", ()):
        return {}
    head = sizes.get("head_dim") or (sizes.get("hidden_size", 32) // sizes.get("num_attention_heads", 4))
    angles = int(head * given.get("partial_rotary_factor", 1.0)) // 2
    return {"rope_parameters": {**given, "mrope_section": [angles - 2 * (angles // 3), angles // 3, angles // 3]}}


def _value(config: Any, name: str) -> Any:
    """An attribute of a config, or None; some configs raise for one that differs by layer."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def build(kind: str, only: int | None = None) -> PreTrainedModel | None:
    """A tiny random model of a type in eval mode, one that reads token ids alone if these sizes make one; else None.

    only: the one layer that it has, counted among those of the model without it.
    """
    first = None
    for model in _candidates(kind, only):
        if reads(model):
            return model
        first = first or model
    return first


def _candidates(kind: str, only: int | None) -> Iterator[PreTrainedModel]:
    tried: list[Any] = []
    for without in WITHOUT:
        try:
            config = config_of(CONFIG_MAPPING[kind], without, only)
            if config.to_dict() in tried:
                continue
            tried.append(config.to_dict())
            with init_empty_weights(include_buffers=True):
                empty = AutoModel.from_config(copy.deepcopy(config))
            if sum(tensor.numel() for tensor in (*empty.parameters(), *empty.buffers())) > MOST_VALUES:
                continue
            torch.manual_seed(0)
            yield randomized(AutoModel.from_config(config).eval())
        except Exception:  # whatever a host makes of sizes that aren't its own
            continue


def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """Draw all parameters anew: zeros and ones at the start would hide what a layer does."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                centre = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
                parameter.copy_(centre + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reads(model: PreTrainedModel) -> bool:
    """Whether the model turns token ids, and nothing else, into a vector for each."""
    try:
        answer = model(input_ids=tokens(0))[0]
        return answer.shape[:2] == (1, LENGTH) and bool(answer.isfinite().all())
    except Exception:  # a host that wants more than token ids
        return False
