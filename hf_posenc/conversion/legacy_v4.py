"""`from_v4` loads checkpoints with Transformers v4's relative positions, which Transformers 5 drops.

v4 adds q_i · w[i - j + M - 1] to the product of query i and key j before scaling (relative_key). With relative_key_query, it
also adds k_j · w[i - j + M - 1]. M is max_position_embeddings, and w `[2M - 1, head_dim]` is the `distance_embedding.weight` of
an attention. The encodings of the same names in hf_posenc count j - i, so they have the rows of w in reverse order.
"""

import os
from typing import Any

import torch
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, has_file

from hf_posenc import _compat
from hf_posenc import configuration as specs
from hf_posenc._versions import DOCS
from hf_posenc.architectures import detection
from hf_posenc.architectures.components import UnsupportedModelError
from hf_posenc.configuration import LENGTH_FIELD, V4_RELATIVE, PositionSpec
from hf_posenc.encodings import encoding_class, short_repr
from hf_posenc.modeling import parameter_sharing
from hf_posenc.modeling.derived import derive
from hf_posenc.serialization.mixins import EncodingModelMixin
from hf_posenc.serialization.saved_files import load_config, read_config

TABLE = "distance_embedding.weight"
VERIFIED_TYPES = (
    *("albert", "bert", "bert-generation", "bros", "camembert", "data2vec-text", "dpr", "electra", "ernie", "esm"),
    *("megatron-bert", "roberta", "roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
"""Model types whose outputs and gradients are compared with those of Transformers 4.57 (tests/v4_checkpoints.py)."""
WITH_ABSOLUTE_TABLE = ("bert-generation",)
"""Model types for which v4 also adds the absolute position embeddings. For all others, it doesn't use them."""
AFTER_SCALING = ("albert",)
"""Model types for which v4 adds the products to scaled scores. Here, their vectors are multiplied by sqrt(head_dim)."""
NATIVE = ("seamless_m4t_v2", "wav2vec2-bert")
"""Model types that have the same distance_embedding in Transformers 5 as in v4."""


def from_v4(
    path_or_id: str | os.PathLike[str],
    auto_class: Any = AutoModel,
    *,
    max_length: int | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: Any = None,
    attn_implementation: str | None = None,
    revision: str = "main",
    subfolder: str = "",
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Any:
    """Load a Transformers v4 model with position_embedding_type "relative_key" or "relative_key_query", with v4's outputs.

    Transformers 5 ignores this setting and drops the relative position vectors of the checkpoint, so the outputs are wrong.
    Here the vectors become the encoding of the same name, in a model of class `PosEnc<OriginalClass>` that trains, saves, and
    loads like any patched model. `unpatch` isn't available, because v4 didn't use the absolute positions in such a checkpoint.

    Args:
        path_or_id: local path or Hub ID of a checkpoint with safetensors.
        auto_class: an Auto class (AutoModelForMaskedLM) or a model class (BertForMaskedLM).
        max_length: maximum input length in tokens, checked on every forward pass. None: the original length. In longer inputs,
            distances beyond the last vector use the last vector. v4 raised an error.
        dtype, device_map, attn_implementation, revision, subfolder, token, cache_dir, local_files_only: as in
            `auto_class.from_pretrained`.

    Raises:
        ValueError: the checkpoint has absolute positions, has missing tables or tables of other sizes, has no safetensors, or
            is for another class.
        UnsupportedModelError: a ValueError for a model type whose outputs haven't been verified against v4.
    """
    if not isinstance(path_or_id, (str, os.PathLike)):
        raise ValueError(
            f"from_v4 requires a local path or Hub ID, not a {type(path_or_id).__name__}. A model loaded by Transformers 5 has "
            "already lost its relative vectors."
        )
    source: dict[str, Any] = {
        "revision": revision,
        "token": token,
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
    }
    kind = _checked_kind(path_or_id, read_config(path_or_id, subfolder=subfolder, **source))
    files = [os.path.join(subfolder, name) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)]
    if not any(has_file(path_or_id, file, **source) for file in files):
        raise ValueError(
            f"{path_or_id} has no {SAFE_WEIGHTS_NAME}. Other formats can run code and aren't loaded. Load and save the model "
            "with Transformers v4, because Transformers 5 drops the relative vectors."
        )
    config = load_config(path_or_id, subfolder=subfolder, **source)
    host = _model_class(auto_class, config)
    cls = derive(host)
    _make_absolute(config)
    spec = _spec(kind, config, host, max_length)
    config.__class__ = cls.config_class
    specs.write(config, spec)
    given = {"dtype": dtype, "device_map": device_map, "attn_implementation": attn_implementation}
    # The derived class's own from_pretrained would patch an original checkpoint. It is skipped, except for its check that
    # rejects pickle files.
    model, info = super(EncodingModelMixin, cls).from_pretrained(
        path_or_id,
        config=config,
        key_mapping=_renamed(kind, spec),
        ignore_mismatched_sizes=True,  # reported below
        output_loading_info=True,
        use_safetensors=True,
        subfolder=subfolder,
        **source,
        **{name: value for name, value in given.items() if value is not None},
    )
    _compat.drop_weight_conversions(model)  # otherwise save_pretrained would use the old names
    _check_loaded(path_or_id, kind, info)
    _as_ours(model, kind)
    return model


def _make_absolute(config: Any) -> None:
    """Remove the setting that Transformers 5 ignores."""
    del config.position_embedding_type
    if hasattr(type(config), "position_embedding_type"):  # ESM, which uses this field for rotary positions also
        config.position_embedding_type = "absolute"


def _checked_kind(path: Any, saved: dict[str, Any]) -> str:
    """The position_embedding_type in a config.json. Raises ValueError or UnsupportedModelError if it isn't supported."""
    if not saved:
        raise ValueError(f"{path} has no {CONFIG_NAME}. Pass the local path or Hub ID of a saved model, or set subfolder.")
    if "position_encoding" in saved:
        raise ValueError(f"{path} is already patched. Load it with AutoModel.from_pretrained.")
    kind, model_type = saved.get("position_embedding_type", "absolute"), saved.get("model_type")
    if model_type in NATIVE:
        raise ValueError(
            f"{path}: Transformers 5 supports the relative positions of {model_type!r}. Load it with from_pretrained."
        )
    parts = {name: part.get("position_embedding_type") for name, part in saved.items() if isinstance(part, dict)}
    if part := next((name for name, inner in parts.items() if inner in V4_RELATIVE), None):
        raise UnsupportedModelError(
            f"{path} has position_embedding_type={parts[part]!r} in its {part}. from_v4 doesn't support composite models (see "
            f"{DOCS}/guides/v4.md). Run it with Transformers 4.57."
        )
    if kind not in V4_RELATIVE:
        raise ValueError(
            f"{path} has position_embedding_type={short_repr(kind)}, but from_v4 restores only "
            f"{' and '.join(map(repr, V4_RELATIVE))}. Load it with from_pretrained."
        )
    if model_type not in VERIFIED_TYPES:
        raise UnsupportedModelError(
            f"{path} is a {short_repr(model_type)} model. from_v4 supports only {', '.join(VERIFIED_TYPES)} (see "
            f"{DOCS}/guides/v4.md). Run it with Transformers 4.57."
        )
    if (model_type, kind) == ("esm", "relative_key_query"):
        raise UnsupportedModelError(
            f"{path}: for ESM, v4 scales queries but not keys before it adds the vectors, so its {kind} follows a different "
            "formula. Run it with Transformers 4.57."
        )
    return str(kind)


def _model_class(auto_class: Any, config: PreTrainedConfig) -> Any:
    """The original class that an Auto class loads for a config, or the given model class. Raises ValueError if none fits."""
    if isinstance(auto_class, type) and issubclass(auto_class, PreTrainedModel):
        auto_class = getattr(auto_class, "original_class", auto_class)
        if auto_class.config_class is type(config):
            return auto_class
        raise ValueError(
            f"{auto_class.__name__} doesn't support {config.model_type!r} models. Pass a class that does, or an Auto class."
        )
    mapping = _compat.model_mapping(auto_class)
    if mapping is None:
        raise ValueError(f"auto_class={auto_class!r} must be an Auto class, such as AutoModelForMaskedLM, or a model class.")
    if type(config) not in mapping:
        raise ValueError(
            f"{auto_class.__name__} has no class for {config.model_type!r} models. Pass another Auto class, or a model class."
        )
    return _compat.model_class(config, mapping)


def _spec(kind: str, config: Any, host: Any, max_length: int | None) -> PositionSpec:
    """The encoding for a checkpoint's relative vectors."""
    rows = getattr(config, LENGTH_FIELD)
    usable = next(iter(detection.find_all(parameter_sharing.build_on_meta(host, config)).values())).usable_length
    if config.model_type not in WITH_ABSOLUTE_TABLE:
        length = usable if max_length is None else max_length
        return PositionSpec.parse({"type": kind, "max_distance": rows - 1, "max_length": length})
    if max_length not in (None, usable):
        raise ValueError(
            f"max_length={max_length} isn't supported, because the {config.model_type!r} model also has position embeddings "
            f"for {usable} positions. Omit it."
        )
    return PositionSpec.parse({"type": f"absolute+{kind}", f"{kind}__max_distance": rows - 1, "max_length": usable})


def _renamed(kind: str, spec: PositionSpec) -> dict[str, str]:
    """Weight names in a v4 checkpoint -> names in the patched model."""
    relative, absolute = encoding_class(kind).type, encoding_class("absolute").type
    if spec.type == relative:
        return {TABLE: "posenc.weight"}
    return {TABLE: f"posenc.{relative}.weight", "embeddings.position_embeddings.weight": f"posenc.{absolute}.weight"}


def _check_loaded(path: Any, kind: str, info: Any) -> None:
    """Raises ValueError if the vectors in a checkpoint don't match its config."""
    if wrong := sorted(info["mismatched_keys"]):
        name, found, wanted = wrong[0]
        raise ValueError(
            f"{path}: {_in_v4(name)} has shape {tuple(found)}, but the config specifies {tuple(wanted)} (2 * "
            "max_position_embeddings - 1 distances). Restore the config.json that was saved with it."
        )
    if missing := sorted(name for name in info["missing_keys"] if "posenc." in name):
        raise ValueError(
            f"{path} has no {_in_v4(missing[0])}, although its config has {kind!r}. Transformers 5 drops it when such a model "
            "is loaded and saved. Use the checkpoint that v4 saved."
        )
    if more := sorted(name for name in info["unexpected_keys"] if "posenc." in name):
        raise ValueError(
            f"{path} has {_in_v4(more[0])}, but the model has no self-attention of that name (in v4, some cross-attentions "
            "also had relative positions). Run it with Transformers 4.57."
        )


def _in_v4(name: str) -> str:
    path, found, _ = name.partition("posenc.")
    return path + TABLE if found else name


def _as_ours(model: Any, kind: str) -> None:
    """Convert loaded vectors to the encoding, which counts distances in the opposite direction."""
    after_scaling = type(model.config).original_class.model_type in AFTER_SCALING
    tables: list[Any] = [module.weight for module in model.modules() if type(module) is encoding_class(kind)]
    with torch.no_grad():
        for table in tables:
            if table.is_meta:
                raise ValueError(
                    "device_map leaves weights on disk. Load the model, save it, and load the result with device_map."
                )
            table.copy_(table.flip(0) * (table.shape[-1] ** 0.5 if after_scaling else 1))
