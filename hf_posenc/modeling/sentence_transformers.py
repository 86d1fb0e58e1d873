"""Finds the model inside a SentenceTransformer, and replaces it in a copy."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from hf_posenc import _compat
from hf_posenc import configuration as specs
from hf_posenc.architectures.detection import find_all
from hf_posenc.architectures.structure import is_patched, patched_parts
from hf_posenc.modeling.derived import PosEncModelMixin
from hf_posenc.modeling.position_ids import longest_input
from hf_posenc.serialization.tokenizer_files import copied


def is_sentence_transformer(model: Any) -> bool:
    """Whether `model` is a SentenceTransformer, a sequence of modules whose first contains a Transformers model."""
    return isinstance(model, nn.Sequential) and len(model) > 0 and isinstance(getattr(model[0], "model", None), PreTrainedModel)


def apply_to_sentence_transformer(
    outer: Any, change: Callable[[PreTrainedModel], PreTrainedModel], longer: bool = False
) -> Any:
    """Copy a SentenceTransformer with a changed model and a separate tokenizer. The copy shares everything else.

    Its max_seq_length, which is its tokenizer's model_max_length, becomes the patched model's maximum length. Without a limit,
    it is Transformers' VERY_LARGE_INTEGER, so that no text is truncated. The previous value is kept with the model, and
    `unpatch` restores it. If there is none, `unpatch` limits max_seq_length to the original model's maximum length. For an
    extended original model, it becomes the new maximum length.
    """
    first = outer[0]
    model = change(first.model)
    twin, holder = copy.copy(outer), copy.copy(first)
    holder._modules = {**first._modules, "model": model}
    twin._modules = {**outer._modules, next(iter(outer._modules)): holder}
    holder.processor = copied(first.processor)
    if isinstance(model, PosEncModelMixin):
        usable = next(longest_input(stack) for stack in model.modules() if is_patched(stack))
        holder.max_seq_length = VERY_LARGE_INTEGER if usable is None else usable
        # Without this key, sentence-transformers limits the tokenizer's length to config.max_position_embeddings on loading,
        # which keeps the original value if the encoding has no limit.
        holder.config_keys = [*type(first).config_keys, "max_seq_length"]
        spec = model.config.position_spec
        if spec.original is not None and not isinstance(first.model, PosEncModelMixin):
            specs.write(model.config, replace(spec, original=replace(spec.original, max_seq_length=first.max_seq_length)))
    else:
        vars(holder).pop("config_keys", None)
        spec = first.model.config.position_spec if isinstance(first.model, PosEncModelMixin) else None
        inner = [model] if spec is None else [part for part, _ in patched_parts(model, spec)]
        lengths = [found.usable_length for each in inner for found in find_all(each).values() if found.usable_length]
        known = [] if spec is None else [each.original for each in spec.by_submodel.values() if each.original is not None]
        before = next((original.max_seq_length for original in known if original.max_seq_length is not None), None)
        if before is not None:
            holder.max_seq_length = before
        else:
            holder.max_seq_length = min(lengths if longer else [first.max_seq_length, *lengths])
        if longer:  # With dynamic RoPE of Transformers, config.max_position_embeddings stays at the trained length
            holder.config_keys = [*type(first).config_keys, "max_seq_length"]
    # The merge of sentence-transformers does the same, because the given model's card doesn't describe this one.
    _compat.drop_card_text(twin)
    twin.model_card_data = twin.model_card_data_class(local_files_only=True)
    twin.model_card_data.register_model(twin)
    return twin
