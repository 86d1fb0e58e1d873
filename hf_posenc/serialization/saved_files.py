"""Reads JSON files and model configs from untrusted sources. Damaged or hostile files raise one-line errors."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME, cached_file, has_file

DIGITS = 400
"""Maximum digits of an integer in a file. Longer integers exceed every float and are read as infinite."""
MAX_DEPTH = 64
"""Maximum depth of a config's nesting."""
MAX_MODULES = 1_000
"""Maximum number of modules in a sentence-transformers model, including those of its routers."""
LONGEST_ERROR = 600
"""Maximum number of characters of another library's error in an hf-posenc error."""


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises ValueError if it can't be read."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError("it isn't a regular file")  # Opening a FIFO would wait for a writer.
        return parsed_json(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as JSON: {error}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file that contains an object. Raises ValueError for other content or if it can't be read."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, but must hold a JSON object. Restore the file.")
    return found


def parsed_json(text: str) -> Any:
    """The value of a JSON text.

    Raises ValueError if the text isn't valid JSON, is nested too deeply, or has an object with a repeated entry.
    """

    def entries(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"an object has the entry {max(names, key=names.count)!r} twice")
        return found

    def integer(digits: str) -> int | float:
        return int(digits) if len(digits) <= DIGITS else float(digits)

    try:
        return json.loads(text, object_pairs_hook=entries, parse_int=integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_there(path: str | os.PathLike[str]) -> None:
    """Raises FileNotFoundError for a missing directory, and ValueError for a path that can't be read.

    A path can be read if it is a regular file, or a directory of regular files and directories. IDs of models on the Hub are
    accepted.
    """
    name = os.fspath(path)
    if os.path.isdir(name):
        with os.scandir(name) as entries:
            shown = [entry for entry in entries if entry.name[0] != "." and os.path.exists(entry.path)]
        if odd := [entry.path for entry in shown if not entry.is_file() and not entry.is_dir()]:
            raise ValueError(f"{odd[0]} isn't a regular file. Remove it, because reading it could wait forever.")
    elif os.path.exists(name) and not os.path.isfile(name):
        raise ValueError(f"{name} isn't a directory. {PLACE}")
    elif not os.path.exists(name) and (isinstance(path, os.PathLike) or os.path.islink(name) or not _is_id(name)):
        raise FileNotFoundError(f"The directory {name!r} doesn't exist. {PLACE}")


PLACE = "Pass the directory of a saved model, or its ID on the Hub, such as 'bert-base-uncased'."


def _is_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def read_config(path: str | os.PathLike[str], **source: Any) -> dict[str, Any]:
    """The config.json of a saved model. Empty if it has none.

    source: arguments of `from_pretrained` that specify where it is read from.

    Raises FileNotFoundError for a missing directory, OSError for a model that can't be fetched, and ValueError for a config
    that can't be read.
    """
    check_there(path)
    with explained(f"The {CONFIG_NAME} of {path}", every_error=True):
        config, _ = PreTrainedConfig.get_config_dict(path, **source)
    names = config.get("architectures") if isinstance(config, dict) else 0
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        wrong = f"it holds a {type(config).__name__}" if names == 0 else f"architectures={names!r:.80}"
        raise ValueError(f"The {CONFIG_NAME} of {path} isn't the config of a model: {wrong}. Restore the file.")
    level: list[Any] = [config]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for value in level
            if isinstance(value, (dict, list))
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise ValueError(f"The {CONFIG_NAME} of {path} is nested deeper than {MAX_DEPTH} levels. Restore the file.")
    return config


def load_config(path: str | os.PathLike[str], **source: Any) -> PreTrainedConfig:
    """The config of a saved model, as loaded by AutoConfig. Raises the errors of `read_config`."""
    read_config(path, **source)
    with explained(f"The {CONFIG_NAME} of {path}"):
        return AutoConfig.from_pretrained(path, **source)


def check_sentence_modules(model: str) -> None:
    """Raises ValueError for a sentence-transformers model that names classes from outside this package.

    Importing them runs code from the model's author. sentence-transformers before version 6 imports them without
    `trust_remote_code`.
    """
    quoted = read_json(Path(str(cached_file(model, "modules.json"))))
    modules = [module for module in quoted if isinstance(module, dict)] if isinstance(quoted, list) else []
    named = [(str(module.get("path", "")), module.get("type")) for module in modules]
    for folder, kind in named:  # The list grows, because routers contain modules and other routers.
        if not str(kind).startswith("sentence_transformers."):
            raise ValueError(
                f"{model} has a module of class {kind!r:.80}, which isn't part of sentence-transformers, so it was not loaded. "
                "Importing that class would run code that came with the model. If you trust it, load the model with "
                "SentenceTransformer(…, trust_remote_code=True) in Python, then call hf_posenc.patch or hf_posenc.convert."
            )
        for file in ("router_config.json", CONFIG_NAME):
            name = f"{folder}/{file}".lstrip("/")
            if len(named) > MAX_MODULES:  # A router may contain itself.
                raise ValueError(f"{model} lists more than {MAX_MODULES} modules of sentence-transformers. Restore the files.")
            if has_file(model, name):
                types = read_json_object(Path(str(cached_file(model, name)))).get("types")
                named += [(f"{folder}/{path}", each) for path, each in types.items()] if isinstance(types, dict) else []


@contextlib.contextmanager
def explained(what: str, every_error: bool = False) -> Iterator[None]:
    """Replaces the exceptions that a library raises for damaged files with a ValueError that names `what`.

    OSError, ImportError, and errors of the Hub are raised unchanged. ValueErrors also are, unless every_error is True, because
    their messages are meant for users. Errors of JSON and Unicode are always replaced, because they name no file.
    """
    try:
        yield
    except (OSError, ImportError, HTTPError):
        raise
    except Exception as error:
        if isinstance(error, ValueError) and not isinstance(error, (json.JSONDecodeError, UnicodeError)) and not every_error:
            raise
        raise ValueError(f"{what} can't be loaded: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, (UnpicklingError, EOFError)):  # torch's message recommends running code from the file.
        return "a file is damaged, or holds something other than tensors. Save the model again, as safetensors."
    words = " ".join(str(error).split())[:LONGEST_ERROR]
    return words if isinstance(error, (ValueError, RuntimeError)) else f"{type(error).__name__}: {words}"
