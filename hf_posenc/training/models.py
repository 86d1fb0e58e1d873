"""Loading models and tokenizers as set by the options."""

import argparse
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import IterableDataset
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, PreTrainedModel

import hf_posenc
from hf_posenc import _compat
from hf_posenc._versions import DOCS
from hf_posenc.serialization import tokenizer_files
from hf_posenc.training.flags import DEFAULT_TEXT_LENGTH

ROOM, PERCENTILE = 1.2, 95
"""Minimum ratio of the model's maximum length to this percentile of the training texts' lengths without a warning."""
METHODS = (None, "dynamic", "keep_first")
"""Methods of `hf_posenc.extend` in the order in which they are recommended.

None is for encodings without a length limit. "dynamic" is for RoPE and for learned positions of encoders, and "keep_first" is
for learned positions of decoders.
"""


def load_tokenizer(name: str) -> Any:
    """The tokenizer, with a padding token. Raises SystemExit if there is none."""
    try:
        return with_padding(tokenizer_files.required_tokenizer(name), name)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None


def with_padding(tokenizer: Any, name: str) -> Any:
    """The tokenizer with a padding token, or its end-of-text token as one. Raises SystemExit if it has neither."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise SystemExit(
                f"The tokenizer of {name} has neither a pad_token nor an eos_token. Set one of them in its config."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer_files.copied(tokenizer)


def load_model(
    arguments: argparse.Namespace,
    kind: Any,
    tokenizer: Any,
    adapt: Callable[[Any], None] = lambda config: None,
    patch: Callable[..., Any] = hf_posenc.patch,
) -> PreTrainedModel:
    """The model, patched by `patch` if --position_encoding is set. `adapt` changes its config first.

    Raises SystemExit for invalid combinations.
    """
    chosen, name, longest = arguments.position_encoding, arguments.model_name_or_path, arguments.model_max_length
    try:
        # The config of a patched model raises an error for another encoding. The original config ignores the key.
        config = AutoConfig.from_pretrained(name, **({"position_encoding": chosen} if chosen else {}))
        if longest and not arguments.extend and hasattr(config, "position_encoding"):
            raise ValueError(f"--model_max_length {longest} doesn't apply, because the model is already patched. Omit it.")
        from_scratch = getattr(arguments, "from_scratch", False)
        if from_scratch:
            without_origin(config)
        adapt(config)
        if config.pad_token_id is None:
            config.pad_token_id = tokenizer.pad_token_id
        # Always float32, because half-precision weights lose small updates. --mixed_precision computes in half precision and
        # updates in float32.
        if from_scratch:
            model = kind.from_config(config, dtype=torch.float32)
            new = list(model.parameters())
        else:
            model, loading = kind.from_pretrained(name, config=config, dtype=torch.float32, output_loading_info=True)
            new = [parameter for key, parameter in model.named_parameters() if key in loading["missing_keys"]]
        if chosen and not hasattr(config, "position_encoding"):
            # The positions of a model from scratch are random, so there is nothing to restore.
            model = patch(model, chosen, max_length=longest, **({"keep_original": False} if from_scratch else {}))
        elif arguments.extend:
            model = hf_posenc.extend(model, longest, arguments.extend)
        elif lost := [said for said in hf_posenc.inspect(model).ignored if said.startswith("position_embedding_type")]:
            raise ValueError(f"Its outputs are wrong. {lost[0]} `hf-posenc patch {name} relative_key` saves a correct copy.")
        known = torch.tensor([len(tokenizer) - 1])
        tokenizer_files.check_ids(known, model.get_input_embeddings(), "the tokenizer")
    except (OSError, ValueError) as error:
        raise SystemExit(f"{name}: {error}") from None
    if arguments.train_positions_only:
        train_positions_only(model, new)
    if arguments.gradient_checkpointing:
        _compat.enable_checkpointing(model)
    return model


def without_origin(config: Any) -> None:
    """Remove the origin of the weights from a config, because a model from scratch has no base model."""
    config.name_or_path = ""
    if hasattr(config, "position_encoding"):
        kept = {name: value for name, value in config.position_encoding.items() if name not in ("original", "calibration")}
        config.position_encoding = kept


def train_positions_only(model: PreTrainedModel, new: list[Tensor]) -> None:
    """Freeze all parameters except those of the encoding and the `new` ones, such as those of a new classifier."""
    encoding = [parameter for name, parameter in model.named_parameters() if "posenc." in name]
    if not encoding:
        raise SystemExit(
            f"--train_positions_only doesn't apply to {hf_posenc.inspect(model).encoding!r}, which has no parameters. Use it "
            "with --position_encoding learned, t5, relative, or shaw."
        )
    trained = {id(parameter) for parameter in (*encoding, *new)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def shard(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Shard a model's layers, then the rest of it (FSDP2). Accelerate's wrapping fails with tied biases, such as BERT's."""
    plugin = accelerator.state.fsdp_plugin
    how = {
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "offload_policy": plugin.cpu_offload,
        "reshard_after_forward": plugin.reshard_after_forward,
    }
    for layers in [module for module in model.base_model.modules() if isinstance(module, torch.nn.ModuleList)]:
        for layer in layers:
            fully_shard(layer, **how)
    fully_shard(model, **how)


def text_length(arguments: argparse.Namespace, length: int | None, model: PreTrainedModel, tokenizer: Any) -> int:
    """The maximum text length in tokens. Raises SystemExit if the model doesn't support --text_length."""
    report, special = hf_posenc.inspect(model), tokenizer.num_special_tokens_to_add()
    if length is None:
        return DEFAULT_TEXT_LENGTH if report.max_length is None else report.max_length
    if report.max_length is not None and length > report.max_length:
        raise SystemExit(
            f"--text_length {length} is above the maximum length of {report.model_class} ({report.encoding}), "
            f"{report.max_length} tokens. Lower it, or extend the model: {longer(arguments, model, length)}"
        )
    if length <= special:
        raise SystemExit(
            f"--text_length {length} leaves no room for text, because there are {special} special tokens. Increase it."
        )
    return length


def longer(arguments: argparse.Namespace, model: PreTrainedModel, length: int) -> str:
    """How to get this model for inputs of `length` tokens without losing what it has learned."""
    if arguments.position_encoding:
        return f"set --model_max_length {length}."
    if getattr(arguments, "from_scratch", False):
        return f"set --position_encoding and --model_max_length {length}."
    for method in METHODS:
        try:
            hf_posenc.extend(model, length, method)
        except ValueError:
            continue
        name = arguments.model_name_or_path
        extend = ["hf-posenc", "extend", name, "--max-length", str(length), *(["--method", method] if method else [])]
        output = f"{Path(name).name}-{length}"
        command = shlex.join([*extend, "--output-dir", output])
        return f"`{command}` keeps what it has learned. Then set --model_name_or_path {shlex.quote(output)}."
    return f"see {DOCS}/reference/extend_methods.md for the methods."


def warn_of_length(
    accelerator: Accelerator, arguments: argparse.Namespace, model: PreTrainedModel, rows: Any, length: int
) -> None:
    """Print a warning if training texts are truncated, or if the length of most is close to the model's maximum length.

    rows: tokenized examples with their `length` before truncation. Without this column, and for streams, nothing is printed.
    """
    if isinstance(rows, IterableDataset) or "length" not in rows.column_names:
        return
    lengths, usable = sorted(rows["length"]), hf_posenc.inspect(model).max_length
    typical, cut = lengths[math.ceil(PERCENTILE / 100 * len(lengths)) - 1], sum(each > length for each in lengths)
    about = f"The {PERCENTILE}th percentile of their lengths is {typical} tokens."
    if cut:
        accelerator.print(f"Warning: {cut} of {len(lengths)} training texts are truncated to {length} tokens. {about}")
    if usable is not None and usable < ROOM * typical:
        wanted = math.ceil(ROOM * typical)
        accelerator.print(
            f"Warning: the model's maximum length is {usable} tokens, less than {ROOM} times the length of most texts. "
            f"{about} For longer texts: {longer(arguments, model, wanted)}"
        )
