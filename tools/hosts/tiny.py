"""Tiny random models of Transformers' model types.

Most configs have the sizes in SIZES, under one of their names. `recipes.json` has the sizes for other types.
"""

import copy
import dataclasses
import functools
import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

LENGTH, VOCABULARY = 11, 61
"""Tokens of an input, fewer than in a sliding window of SIZES, and the vocabulary size."""
FEW_VALUES, MOST_VALUES = 3_000_000, 12_000_000
"""Elements of parameters and buffers. Models up to the first number are preferred, and models above the second aren't built."""


def _named(value: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, value)


LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    *("num_encoder_layers", "num_decoder_layers"),
)
SIZES: dict[str, Any] = {
    **_named(32, "hidden_size", "embedding_size", "n_embd", "dim", "d_model", "emb_dim", "word_embed_proj_dim", "embed_dim"),
    **_named(32, "projection_dim", "hidden_dim", "input_embedding_size", "output_embedding_size", "n_inner"),
    **_named(2, *LAYERS, "depth", "num_blocks"),
    **_named(4, "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
    **_named(2, "num_key_value_heads", "num_kv_heads"),
    **_named(48, "intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "ffn_hidden_size"),
    **_named(16, "moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size", "router_hidden_size"),
    **_named(4, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    **_named(2, "num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "experts_per_token"),
    **_named(1, "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "num_shared_experts"),
    **_named(16, "q_lora_rank"),
    **_named(24, "kv_lora_rank"),  # differs from head dimensions, so that cached latents can't be mistaken for keys
    **_named(8, "head_dim", "global_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "attention_head_dim"),
    **_named(24, "max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx"),
    **_named(24, "max_source_positions", "max_target_positions"),
    **_named(64, "sliding_window", "attention_chunk_size", "local_attention"),
    **_named(32, "image_size"),
    **_named(8, "patch_size"),
    **_named(8, "d_kv", "hidden_size_per_layer_input", "laurel_rank"),
    **_named(48, "mlp_hidden_size"),
    **_named(16, "num_mel_bins", "input_feat_per_channel"),
    **_named(32, "condition_dim", "out_hidden_size", "audio_hidden_size", "text_hidden_size", "adapter_in_dim"),
    **_named(VOCABULARY, "vocab_size", "vocab_size_per_layer_input"),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
"""Field of a config -> size. A config uses those that it has."""
WIDTHS = re.compile(r"(hidden_size|hidden_dim|embed_dim|_dim|dims?|channels|widths?|hidden_sizes|filters|intermediate_size)$")
DEPTHS = re.compile(r"(depths|num_layers|layers_per_\w+|num_blocks|layer_depths)$")
WIDE = 48
"""In a second attempt, fields that match WIDTHS and DEPTHS are also reduced: widths above WIDE to 32, depths above 1 to 1."""
WITHOUT: tuple[tuple[str, ...], ...] = (
    (),
    ("head_dim",),
    ("head_dim", "num_key_value_heads"),
    ("hidden_dim",),
    ("image_size",),
    ("num_experts_per_tok",),
)
"""Sizes to leave at their defaults, tried in this order until a model runs."""
RECIPES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "recipes.json").read_text())
"""Model type -> settings that can't be derived.

- `config`: arguments of the config or its subconfigs that are required or make the model cheaper.
- `inputs`: the inputs, see `inputs.py`.
- `class`: name of the class that builds the model.
- `vectors`: path of the module that returns one vector per position, if the model returns fewer.
- `entrance`: path of the module that receives the content.
- `kernel_std`: standard deviation of kernels, if deep convolutions would give vectors beside which positions don't show.
- `architectures`: the config's field, if AutoModel selects a class by it.
- `stock_fails`: check -> why the original model fails it. It applies only if the original model does fail.
"""


def config_of(
    kind: str,
    without: tuple[str, ...] = (),
    only: int | None = None,
    narrow: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> Any:
    """A config with SIZES and one layer of each type.

    without: sizes to leave at their defaults.
    only: index of the only layer to keep, among those of the config without it.
    narrow: whether to reduce fields that match WIDTHS and DEPTHS.
    changes: replace SIZES in every config and subconfig that has these fields.
    """
    return CONFIG_MAPPING[kind](**_Sizes(without, only, narrow, changes or {}).of(CONFIG_MAPPING[kind]))


def sizes_of(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """The arguments for a config class to create a config with SIZES and one layer of each type."""
    return _Sizes((), None, False, {}).of(kind)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    without: tuple[str, ...]
    only: int | None
    narrow: bool
    changes: Mapping[str, Any]

    def of(self, kind: type[PreTrainedConfig], default: Any = None) -> dict[str, Any]:
        """The arguments of a config."""
        more = {key: value for key, value in RECIPES.get(kind.model_type, {}).get("config", {}).items()}
        default = _default(kind, more) if default is None else default
        known = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
        known = {name for name in known if not _is_property(kind, kind.attribute_map.get(name, name))}
        sizes = {name: copy.copy(value) for name, value in SIZES.items() if name in known and name not in self.without}
        if "kv_lora_rank" in sizes and "num_key_value_heads" in sizes:
            sizes["num_key_value_heads"] = sizes["num_attention_heads"]  # latent attention has keys for each head
        sizes.update(_rotary(default, sizes, more))
        sizes.update({name: value for name, value in self.changes.items() if name in known and _value(default, name)})
        for name, value in list(sizes.items()):
            given = _value(default, name)
            if isinstance(given, (list, tuple)) and isinstance(value, int):
                sizes[name] = [value] * len(given)
        if self.narrow:
            sizes.update(self._narrowed(default, known - {*sizes}))
        count = next((value for name in LAYERS if isinstance(value := _value(default, name), int)), None)
        types = _value(default, "layer_types")
        if "layer_types" in more:
            chosen = [*range(len(more["layer_types"]))]
        elif count and isinstance(types, (list, tuple)) and len(types) == count:
            chosen = sorted({types.index(each) for each in types})
            chosen = chosen if len(chosen) > 1 else [0, count - 1]
        else:
            chosen = [0, count - 1] if count else []
        chosen = chosen if self.only is None else chosen[self.only : self.only + 1]
        for name in known & {*LAYERS}:
            sizes[name] = len(chosen) if count else sizes[name]
        for name in known:
            value = None if isinstance(getattr(kind, name, None), property) else _value(default, name)
            if isinstance(value, (list, tuple)) and count and len(value) == count and count > 2:
                sizes[name] = [value[index] for index in chosen]
        by_layer = slice(None) if self.only is None else slice(self.only, self.only + 1)
        for name in default.sub_configs:
            part = _value(default, name)
            if isinstance(part, PreTrainedConfig):
                sizes[name] = {"model_type": part.model_type, **self.of(type(part), part)}
        for name, value in more.items():
            if isinstance(value, dict) and "model_type" in value:
                inner = CONFIG_MAPPING[value["model_type"]]
                value = {**self.of(inner, _default(inner, value)), **value}
            elif isinstance(value, dict) and isinstance(sizes.get(name), dict):
                value = {**sizes[name], **value}
            elif isinstance(value, list) and BY_LAYER.search(name):
                value = value[by_layer]
            elif self.only is not None and name.endswith("layer_indices"):
                value = [0] if self.only in value else []
            elif self.only is not None and name in LAYERS:
                value = min(value, 1)
            same = {other for other in sizes if kind.attribute_map.get(other, other) == kind.attribute_map.get(name, name)}
            sizes = {other: size for other, size in sizes.items() if other not in same}
            sizes[name] = value
        return sizes

    def _narrowed(self, default: Any, names: set[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in names:
            value = _value(default, name)
            numbers = value if isinstance(value, (list, tuple)) else [value]
            if not numbers or not all(type(each) is int for each in numbers):
                continue
            if WIDTHS.search(name):
                new = [32 if each > WIDE else each for each in numbers]
            elif DEPTHS.search(name):
                new = [min(each, 1) for each in numbers]
            else:
                continue
            found[name] = type(value)(new) if isinstance(value, (list, tuple)) else new[0]
        return found


BY_LAYER = re.compile(r"layer_types|per_layer|block_type|attn_layers$|attention_types|sparsity_pattern")
"""Matches lists in recipes with one item per layer."""


def _default(kind: type[PreTrainedConfig], more: Mapping[str, Any]) -> Any:
    try:
        return kind()
    except Exception:  # The config has required arguments.
        return kind(**{name: value for name, value in more.items() if name != "model_type"})


def _is_property(kind: type, name: str) -> bool:
    attribute = inspect.getattr_static(kind, name, None)
    return isinstance(attribute, property) and attribute.fset is None


def _rotary(default: Any, sizes: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The rope_parameters of the default config, with M-RoPE sections that fit the head dimension."""
    given = _value(default, "rope_parameters")
    if not isinstance(given, dict) or "mrope_section" not in getattr(default, "ignore_keys_at_rope_validation", ()):
        return {}
    head = more.get("head_dim") or sizes.get("head_dim")
    head = head or (sizes.get("hidden_size", 32) // sizes.get("num_attention_heads", 4))
    if any(isinstance(value, dict) for value in given.values()):
        return {}
    angles = int(head * given.get("partial_rotary_factor", 1.0)) // 2
    sections = [angles - 2 * (angles // 3), angles // 3, angles // 3]
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **given, "mrope_section": sections}}


def _value(config: Any, name: str) -> Any:
    """An attribute of a config, or None. Some configs raise for an attribute that differs by layer."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def folder_of(kind: str) -> str:
    """The directory of a model type in Transformers."""
    return CONFIG_MAPPING[kind].__module__.split(".")[2]


def model_types() -> list[str]:
    """Transformers' model types that an Auto class supports, and all model types of directories without such a type."""
    kinds = [kind for kind in sorted(CONFIG_MAPPING) if CONFIG_MAPPING[kind].__module__.startswith("transformers.models.")]
    by_auto = [kind for kind in kinds if auto_class_of(kind) is not None]
    known = {folder_of(kind) for kind in by_auto}
    return sorted([*by_auto, *(kind for kind in kinds if folder_of(kind) not in known)])


@functools.cache
def auto_class_of(kind: str) -> Any:
    """The Auto class for a model type. The class in its recipe has priority, then AutoModel."""
    config_class, preferred = CONFIG_MAPPING[kind], RECIPES.get(kind, {}).get("class")
    heads = [getattr(modeling_auto, name) for name in sorted(dir(modeling_auto)) if name.startswith("AutoModelFor")]
    for auto in sorted([AutoModel, *heads], key=lambda each: each.__name__ != preferred):
        if auto._model_mapping is not None and config_class in auto._model_mapping:
            return auto
    return None


@functools.cache
def class_of(kind: str) -> Any:
    """The class that builds models of a type: an Auto class, or a class in the directory of the type. None if there is none."""
    auto, config_class, preferred = auto_class_of(kind), CONFIG_MAPPING[kind], RECIPES.get(kind, {}).get("class")
    if auto is not None and (preferred is None or preferred == auto.__name__):
        return auto
    try:
        module = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return auto
    own = [getattr(module, name) for name in getattr(module, "__all__", ())]
    own = [each for each in own if inspect.isclass(each) and issubclass(each, PreTrainedModel)]
    own = [each for each in own if each.config_class is config_class and not each.__name__.endswith("PreTrainedModel")]
    return next((each for each in own if each.__name__ == preferred), auto or (own[0] if own else None))


def made(kind: str, config: Any) -> PreTrainedModel:
    maker = class_of(kind)
    config.architectures = RECIPES.get(kind, {}).get("architectures")
    if maker is None:
        raise ValueError(f"{kind}: no class makes a model of this type")
    return maker.from_config(config) if hasattr(maker, "from_config") else maker(config)


def loader(kind: str, model: PreTrainedModel) -> Any:
    """The Auto class that loads a saved model of a type, or its own class if no Auto class supports it."""
    maker = class_of(kind)
    return maker if hasattr(maker, "from_config") else type(model)


def build(kind: str, only: int | None = None, **changes: Any) -> PreTrainedModel | None:
    """A tiny random model of a type in eval mode. None if none can be built.

    It is the first candidate that runs (see `inputs.reading`), or else the first one.

    only: index of the only layer to keep, among those of the model without it.
    changes: replace SIZES.
    """
    from tools.hosts.inputs import runs

    first = None
    for model in candidates(kind, only, changes):
        if runs(kind, model):
            return model
        first = first or model
    return first


def candidates(kind: str, only: int | None = None, changes: Mapping[str, Any] | None = None) -> Iterator[PreTrainedModel]:
    tried: list[Any] = []
    large: list[tuple[int, Any]] = []
    for narrow in (False, True):
        for without in WITHOUT:
            try:
                config = config_of(kind, without, only, narrow, changes)
                if config.to_dict() in tried:
                    continue
                tried.append(config.to_dict())
                with init_empty_weights(include_buffers=True):
                    empty = made(kind, copy.deepcopy(config))
                values = sum(tensor.numel() for tensor in (*empty.parameters(), *empty.buffers()))
                if values > FEW_VALUES:
                    large.append((values, config))
                    continue
                yield _filled(kind, config)
            except Exception:  # Models raise various errors for unsuitable sizes.
                continue
    for values, config in sorted(large, key=lambda each: each[0])[:1]:
        if values <= MOST_VALUES:
            try:
                yield _filled(kind, config)
            except Exception:
                continue


def _filled(kind: str, config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return randomized(made(kind, config).eval(), RECIPES.get(kind, {}).get("kernel_std", 0.3))


def randomized(model: PreTrainedModel, kernel_std: float = 0.3) -> PreTrainedModel:
    """Set all parameters to random values, because initial zeros and ones would hide the effect of a layer.

    kernel_std: the standard deviation of the kernels of 2-D convolutions.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                centre = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
                std = kernel_std if parameter.ndim == 4 else 0.3
                parameter.copy_(centre + std * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("embed_sum"):  # a codebook, from which all codes would get the same vector
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return model
