"""Determines whether `from_pretrained` of a derived class loads a patched checkpoint, or an original one to be patched."""

import copy
import os
from dataclasses import replace
from typing import Any

from hf_posenc import configuration as specs
from hf_posenc.configuration import PositionSpec
from hf_posenc.encodings import short_repr
from hf_posenc.serialization.saved_files import read_config

HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token", "_commit_hash")
"""Arguments of `from_pretrained` that specify where a config is read from."""


def resolved(cls: Any, path: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], PositionSpec | None]:
    """The keyword arguments for loading, and the encoding for an original checkpoint, which is None for a patched one.

    Raises ValueError if the checkpoint, `config`, and `position_encoding` are incompatible.
    """
    config, encoding = kwargs.get("config"), kwargs.get("position_encoding")
    source = {name: kwargs[name] for name in HUB if name in kwargs}
    saved = _described(cls, path, source)
    patched = _is_patched(cls, saved)
    if isinstance(config, (str, os.PathLike)):
        if _is_patched(cls, _described(cls, config, source)):
            if patched:
                return kwargs, None  # Transformers reads it
            config = cls.config_class.from_pretrained(config, **source)
    elif config is not None and not isinstance(config, cls.original_class.config_class):
        raise ValueError(
            f"config={short_repr(config) if isinstance(config, dict) else type(config).__name__} isn't supported by "
            f"{cls.__name__}. Pass a {cls.config_class.__name__}, a {cls.original_class.config_class.__name__}, or a path. "
            "Pass single settings as keyword arguments of from_pretrained."
        )
    derived = isinstance(config, cls.config_class)
    if patched:
        if config is None:
            return kwargs, None  # the class reads it, and merges the given values
        if not derived:
            raise ValueError(
                f"{path} was saved with an encoding, but this config has none. Omit config, or pass "
                f"hf_posenc.{cls.config_class.__name__}.from_pretrained({str(path)!r}, …)."
            )
        given = [each for each in (saved.get("position_encoding"), config.position_encoding, encoding) if each is not None]
        if given and (merged := _as_saved(*given)) != config.position_encoding:
            config = copy.deepcopy(config)
            specs.write(config, PositionSpec.parse(merged, in_code=True))
        return _with(kwargs, config), None
    if derived:
        if not saved and encoding is None:
            return kwargs, None  # only a state_dict, whose config has the encoding
        from hf_posenc.modeling.parameter_sharing import stock_config

        spec, config = _agreed(encoding, config.position_encoding), stock_config(config, cls.original_class)
    else:
        spec = None if encoding is None else PositionSpec.parse(encoding, in_code=True)
    if spec is None:
        if not saved and config is None:
            return kwargs, None  # Transformers reports what is missing
        raise ValueError(
            f"{path} is an unpatched model, and {cls.__name__} needs an encoding for it. Pass position_encoding=…, or load it "
            "with its own class and call hf_posenc.patch(model, encoding)."
        )
    return _with(kwargs, config), spec


def _described(cls: Any, path: Any, source: dict[str, Any]) -> dict[str, Any]:
    """The part of a checkpoint's config.json that a derived class loads. It is empty if there is no such file.

    Raises ValueError for a checkpoint of another model type, because the class wouldn't find its weights.
    """
    if path is None:
        return {}
    saved = read_config(path, **source)
    stock = cls.original_class.config_class
    encoding = saved.get("position_encoding")
    if isinstance(encoding, dict) and encoding.get("submodel") and not _is_patched(cls, saved):
        raise ValueError(
            f"{path} is a patched composite model of type {short_repr(saved.get('model_type'))}, which {cls.__name__} can't "
            f"load. Load it with AutoModel.from_pretrained, and use its submodel, model.{encoding['submodel']}."
        )
    if stock.base_config_key and isinstance(saved.get(stock.base_config_key), dict):
        return saved[stock.base_config_key]
    kind = saved.get("model_type", stock.model_type)
    for part in (saved, *(value for value in saved.values() if isinstance(value, dict))):
        if part.get("model_type", kind) in (stock.model_type, cls.config_class.model_type):
            return part
    raise ValueError(
        f"{path} is a {kind!r} model, but {cls.__name__} loads {stock.model_type!r} models, original or patched. Load it with "
        "the Auto class, then call hf_posenc.patch."
    )


def _is_patched(cls: Any, saved: dict[str, Any]) -> bool:
    return saved.get("model_type") == cls.config_class.model_type


def _as_saved(saved: Any, *given: Any) -> Any:
    """The saved encoding, updated with the values given on loading. Raises ValueError if their type isn't the saved one."""
    encoding = saved
    for each in given:
        encoding = specs.merged(encoding, each)
    original = saved.get("original") if isinstance(saved, dict) else None
    return encoding if encoding.get("original") else {**encoding, "original": original}


def _agreed(encoding: Any, in_config: Any) -> PositionSpec | None:
    """The encoding from the argument or the config. Raises ValueError if they differ."""
    given = None if encoding is None else PositionSpec.parse(encoding, in_code=True)
    configured = None if in_config is None else PositionSpec.parse(in_config)
    if given is None or configured is None:
        return configured if given is None else given
    if replace(given, original=None) != replace(configured, original=None):
        raise ValueError(
            f"position_encoding={short_repr(encoding)} differs from config.position_encoding={short_repr(in_config)}. Pass "
            "only one of them."
        )
    return given


def _with(kwargs: dict[str, Any], config: Any) -> dict[str, Any]:
    """The keyword arguments with this config, and without a separate encoding."""
    others = {name: value for name, value in kwargs.items() if name not in ("config", "position_encoding")}
    return others if config is None else {**others, "config": config}
