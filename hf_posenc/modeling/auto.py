"""Registers the names of all derived classes with the Auto classes of Transformers.

A checkpoint lists its own classes in `auto_map`.
"""

from typing import Any

from hf_posenc import _compat
from hf_posenc.modeling import derived as derived_classes
from hf_posenc.modeling.derived import PREFIX, TYPE_PREFIX, derive, prefixed


def register_auto_classes() -> None:
    """Register the names of all derived classes with the Auto classes. No class is built or imported."""
    from transformers.models.auto import configuration_auto, modeling_auto

    configs = configuration_auto.CONFIG_MAPPING_NAMES
    derived = {TYPE_PREFIX + kind: PREFIX + name for kind, name in configs.items() if not kind.startswith(TYPE_PREFIX)}
    modules = {configuration_auto.model_type_to_module_name(kind): derived_classes for kind in derived}
    derived["posenc-embedding"] = "PositionEmbeddingConfig"
    modules["posenc_embedding"] = derived_classes
    modeling_auto.MODEL_MAPPING_NAMES["posenc-embedding"] = "PositionEmbedding"

    def renamed(kind: str, name: Any, is_tokenizer: bool) -> tuple[str, Any] | None:
        return (TYPE_PREFIX + kind, name if is_tokenizer else prefixed(name, PREFIX)) if TYPE_PREFIX + kind in derived else None

    _compat.add_to_auto_classes(derived, modules, renamed, Registered)


class Registered(dict):
    """Classes that users have registered with an Auto class, and their derived classes, which are created on access."""

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key) or super().__contains__(_host_of(key))

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if super().__contains__(key) else derive(super().__getitem__(_host_of(key)))


def _host_of(key: Any) -> Any:
    """The original model type or config class of a derived one. Other keys are returned unchanged."""
    return key.removeprefix(TYPE_PREFIX) if isinstance(key, str) else getattr(key, "original_class", key)
