"""Registers the names of all derived classes with the Auto classes of Transformers, at once or when these are imported.

A checkpoint lists its own classes in `auto_map`. The mappings are private attributes, which only this module changes.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from hf_posenc.serialization.copies import PREFIX, TYPE_PREFIX, prefixed


def register() -> None:
    """Register the names with the Auto classes that are imported, and with the others when they are. No class is built."""
    sys.meta_path.insert(0, _Finder)
    for name, add in MODULES.items():
        if name in sys.modules:
            add(sys.modules[name])


class _Finder:
    """Finds the modules of the Auto classes, and registers the names after they are executed."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in MODULES or (spec := PathFinder.find_spec(name, path, target)) is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            MODULES[name](module)

        loader.exec_module = exec_module
        return spec


class _Derived:
    """The module of derived classes, imported when one is looked up."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("hf_posenc.modeling.derived"), name)


def _add_configs(configuration_auto: Any) -> None:
    names, mapping = configuration_auto.CONFIG_MAPPING_NAMES, configuration_auto.CONFIG_MAPPING
    names.update({TYPE_PREFIX + kind: PREFIX + name for kind, name in names.items()})
    names["posenc-embedding"] = "PositionEmbeddingConfig"
    mapping._modules.update(_modules(configuration_auto))
    mapping._extra_content = Registered(mapping._extra_content)


def _add_models(modeling_auto: Any) -> None:
    from transformers.models.auto import auto_factory

    modeling_auto.MODEL_MAPPING_NAMES["posenc-embedding"] = "PositionEmbedding"
    for mapping in [each for each in vars(modeling_auto).values() if isinstance(each, auto_factory._LazyAutoMapping)]:
        _add_names(mapping, lambda name: prefixed(name, PREFIX))
        mapping._extra_content = Registered(mapping._extra_content)


def _add_tokenizers(tokenization_auto: Any) -> None:
    _add_names(tokenization_auto.TOKENIZER_MAPPING, lambda name: name)


def _add_names(mapping: Any, name_of: Callable[[Any], Any]) -> None:
    """Add the derived types to a mapping. name_of: the name of the derived class for that of the original class."""
    from transformers.models.auto import configuration_auto

    configs = configuration_auto.CONFIG_MAPPING_NAMES
    names = {TYPE_PREFIX + kind: name_of(name) for kind, name in mapping._model_mapping.items()}
    mapping._model_mapping.update({kind: name for kind, name in names.items() if kind in configs})
    mapping._reverse_config_mapping.update({name: kind for kind, name in configs.items() if kind.startswith(TYPE_PREFIX)})
    mapping._modules.update(_modules(configuration_auto))


def _modules(configuration_auto: Any) -> dict[str, Any]:
    """Module name of a derived type -> the module that has its classes."""
    kinds = (kind for kind in configuration_auto.CONFIG_MAPPING_NAMES if kind.startswith(TYPE_PREFIX))
    return {configuration_auto.model_type_to_module_name(kind): _Derived() for kind in kinds}


MODULES: dict[str, Callable[[Any], None]] = {
    "transformers.models.auto.configuration_auto": _add_configs,
    "transformers.models.auto.modeling_auto": _add_models,
    "transformers.models.auto.tokenization_auto": _add_tokenizers,
}
"""The modules of the Auto classes -> what adds the names to them. The others import the first."""


class Registered(dict):
    """Classes that users have registered with an Auto class, and their derived classes, which are created on access."""

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key) or super().__contains__(_original_of(key))

    def __getitem__(self, key: Any) -> Any:
        if super().__contains__(key):
            return super().__getitem__(key)
        from hf_posenc.modeling.derived import derive

        return derive(super().__getitem__(_original_of(key)))


def _original_of(key: Any) -> Any:
    """The original model type or config class of a derived one. Other keys are returned unchanged."""
    return key.removeprefix(TYPE_PREFIX) if isinstance(key, str) else getattr(key, "original_class", key)
