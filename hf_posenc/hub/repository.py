"""State of the Hub before a push: files that the push deletes, and metadata of the base model's card."""

import contextlib
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import DisabledRepoError, GatedRepoError, HFValidationError, RepositoryNotFoundError
from transformers import PreTrainedModel

from hf_posenc.hub.cards import INHERITED, host_name
from hf_posenc.hub.eval_results import EVALUATION, result_files
from hf_posenc.serialization.saved_files import parsed_json

WRITTEN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|(modeling_)?posenc(_\w+)?\.py")
"""Files that are deleted if the new push lacks them. An old model.safetensors would be loaded instead of new shards."""


def base_metadata(model: PreTrainedModel, api: HfApi | None = None) -> dict[str, Any]:
    """The card's metadata about the original model: its ID, license, and language.

    The name of a local directory may have the form of an ID. Therefore the ID is None unless the Hub has it, or, offline, the
    local cache.
    """
    name = host_name(model)
    if not name or not (api or isinstance(try_to_load_from_cache(name, "config.json"), str)):
        return {"base_model": None}
    inherited: dict[str, Any] = {}
    if api:
        try:
            inherited = _inherited(api, name)
        except (GatedRepoError, DisabledRepoError):
            pass
        except (HFValidationError, RepositoryNotFoundError):
            return {"base_model": None}
    return {"base_model": name, **inherited}


def _inherited(api: HfApi, name: str) -> dict[str, Any]:
    """The metadata that a card inherits from the base model's card. Only strings and lists of strings are inherited."""
    card = api.model_info(name).card_data
    found = {key: card.get(key) for key in INHERITED if card}
    lists = {key: value if isinstance(value, list) else [value] for key, value in found.items()}
    return {key: found[key] for key, values in lists.items() if all(isinstance(value, str) and value for value in values)}


def merged(base: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """Metadata of the original model, overridden by that of an earlier card. All license entries come from the same card."""
    inherited = {key: value for key, value in base.items() if not ("license" in kept and key.startswith("license"))}
    return {**inherited, **kept}


def left_over(present: Collection[str], read: Callable[[str], str], new: Iterable[str]) -> list[str]:
    """The files of earlier pushes to delete because the new one lacks them."""
    written = {path for path in present if WRITTEN.fullmatch(path)}
    with contextlib.suppress(ValueError):  # no evaluation.json, or one from another tool
        written |= {EVALUATION, *result_files(parsed_json(read(EVALUATION) if EVALUATION in present else "null"))}
    return sorted(written.intersection(present).difference(new))
