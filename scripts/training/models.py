"""Models and tokenizers, loaded as the flags say."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, PreTrainedModel

import hf_posenc
from hf_posenc import tokenizer_files
from training.flags import DEFAULT_TEXT_LENGTH


def load_tokenizer(name: str) -> Any:
    """The tokenizer, with a padding token. Raises SystemExit if there is none."""
    try:
        tokenizer = tokenizer_files.load_tokenizer(name)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{name} has no tokenizer that can be loaded: {error}") from None
    if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_ids):
        raise SystemExit(
            f"{name} has no tokenizer, or one of special tokens alone: save that of the model which it was made from, "
            f"AutoTokenizer.from_pretrained(ORIGINAL).save_pretrained({name!r})"
        )
    return with_padding(tokenizer, name)


def with_padding(tokenizer: Any, name: str) -> Any:
    """The tokenizer of a model, with a padding token. Raises SystemExit if it has no token for that."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise SystemExit(f"the tokenizer of {name} has neither a pad_token nor an eos_token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    arguments: argparse.Namespace,
    kind: Any,
    tokenizer: Any,
    adapt: Callable[[Any], None] = lambda config: None,
    patch: Callable[..., Any] = hf_posenc.patch,
) -> PreTrainedModel:
    """The model with --position_encoding, by `patch`; `adapt` changes its config first.

    Raises SystemExit for bad combinations.
    """
    chosen, name, longest = arguments.position_encoding, arguments.model_name_or_path, arguments.model_max_length
    try:
        # The config of a patched model refuses another encoding here; a stock config ignores the key.
        config = AutoConfig.from_pretrained(name, **({"position_encoding": chosen} if chosen else {}))
        if longest and hasattr(config, "position_encoding"):
            raise ValueError(f"--model_max_length {longest} is of a model that is patched now, and this one is already")
        from_scratch = getattr(arguments, "from_scratch", False)
        if from_scratch:
            without_origin(config)
        adapt(config)
        if config.pad_token_id is None:
            config.pad_token_id = tokenizer.pad_token_id
        # Always float32: half-precision weights lose small updates (--mixed_precision computes in half precision and
        # updates in full).
        if from_scratch:
            model = kind.from_config(config, dtype=torch.float32)
            new = list(model.parameters())
        else:
            model, loading = kind.from_pretrained(name, config=config, dtype=torch.float32, output_loading_info=True)
            new = [parameter for key, parameter in model.named_parameters() if key in loading["missing_keys"]]
        if chosen and not hasattr(config, "position_encoding"):
            # The positions of a model from scratch are random, so `unpatch` has nothing to restore.
            model = patch(model, chosen, max_length=longest, **({"keep_host": False} if from_scratch else {}))
        elif lost := [said for said in hf_posenc.inspect(model).ignored if said.startswith("position_embedding_type")]:
            raise ValueError(f"its outputs are wrong. {lost[0]}; `hf-posenc patch {name} relative_key` saves it as it was")
    except (OSError, ValueError) as error:
        raise SystemExit(f"{name}: {error}") from None
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise SystemExit(
            f"the tokenizer knows {len(tokenizer)} tokens, the model {model.get_input_embeddings().num_embeddings}: "
            "take the tokenizer it was trained with"
        )
    if arguments.train_positions_only:
        train_positions_only(model, new)
    if arguments.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return model


def without_origin(config: Any) -> None:
    """Remove from a config what describes the weights it came with: a model from scratch has no base model."""
    config.name_or_path = ""
    if hasattr(config, "position_encoding"):
        kept = {name: value for name, value in config.position_encoding.items() if name not in ("host", "calibration")}
        config.position_encoding = kept


def train_positions_only(model: PreTrainedModel, new: list[Tensor]) -> None:
    """Freeze all parameters but those of the encoding and the `new` ones, such as a new classifier's."""
    encoding = [parameter for name, parameter in model.named_parameters() if "posenc." in name]
    if not encoding:
        raise SystemExit(
            f"--train_positions_only: {hf_posenc.inspect(model).encoding!r} has no parameters that could be trained alone; "
            "--position_encoding learned, t5, relative or shaw has"
        )
    trained = {id(parameter) for parameter in (*encoding, *new)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def shard(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Shard a model's layers, then the rest of it (FSDP2). Accelerate's own wrapping fails with tied biases, as BERT has."""
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


def text_length(given: int | None, model: PreTrainedModel, tokenizer: Any) -> int:
    """The tokens that texts are cut to. Raises SystemExit for a --text_length that doesn't fit the model."""
    report, special = hf_posenc.inspect(model), tokenizer.num_special_tokens_to_add()
    if given is None:
        return DEFAULT_TEXT_LENGTH if report.max_length is None else report.max_length
    if report.max_length is not None and given > report.max_length:
        raise SystemExit(
            f"--text_length {given} is above the usable length of {report.model_class} ({report.encoding}), "
            f"{report.max_length} tokens: lower it, or give an unpatched model a --position_encoding"
        )
    if given <= special:
        raise SystemExit(f"--text_length {given} leaves no room for text beside {special} special tokens")
    return given
