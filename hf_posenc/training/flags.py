"""The flags of all training scripts, checked before anything expensive."""

import argparse
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, set_seed
from datasets import disable_progress_bars
from huggingface_hub import get_token, is_offline_mode
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import SchedulerType

import hf_posenc
from hf_posenc.conversion.extension import METHODS
from hf_posenc.evaluation import terminals
from hf_posenc.training import checkpoints

DEFAULT_TEXT_LENGTH = 512
"""Tokens that texts are cut to if the model has no limit."""
LARGEST_RATE = torch.finfo(torch.float32).max / 10
"""AdamW multiplies the rate of its first step by 10 (1 / (1 - beta1))."""
TEXT_LENGTH_HELP = (
    f"tokens that texts are cut to; default: the model's usable length, or {DEFAULT_TEXT_LENGTH} where it has no limit"
)


def position_encoding(text: str) -> Any:
    """The argparse type of --position_encoding: a name, or a JSON object."""
    try:
        chosen = json.loads(text) if text.startswith("{") else text
        hf_posenc.PosEncBertConfig.from_dict({}, position_encoding=chosen)  # for its validation; any host's config does
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    except ValueError as error:
        hint = " (here: --import MODULE)" if "import the module" in str(error) else ""
        raise argparse.ArgumentTypeError(f"{error}{hint}") from None
    return chosen


def number(kind: Callable[[str], Any], allowed: str, holds: Callable[[Any], bool]) -> Callable[[str], Any]:
    """The argparse type of the numbers that a condition holds for; `allowed` describes them."""

    def parsed(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text[:20]!r}: allowed is {allowed}")
        return value

    return parsed


def at_least(low: int) -> Callable[[str], int]:
    return number(int, f"an integer from {low} on", lambda value: value >= low)


seed = number(int, "an integer from 0 to 2^32 - 1, as NumPy's generators take", lambda value: 0 <= value < 2**32)
positive = number(float, "a number above 0", lambda value: 0 < value < math.inf)
positive_or_0 = number(float, "a number from 0 on", lambda value: 0 <= value < math.inf)
rate = number(
    float,
    f"a number above 0, up to {LARGEST_RATE:.2g}, beyond which AdamW's steps overflow",
    lambda value: 0 < value <= LARGEST_RATE,
)


def steps_or_epoch(text: str) -> int | str:
    return text if text == "epoch" else at_least(1)(text)


def argument_parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The flags that all scripts have, named as in Transformers' `*_no_trainer.py`."""
    # Without abbreviations a flag of another script is an error, not the one flag here that begins like it.
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument_group("model").add_argument
    add("--model_name_or_path", required=True, help="folder or Hub id of a model, patched or not")
    add(
        "--position_encoding",
        type=position_encoding,
        help='name, or JSON such as \'{"type": "rope", "theta": 5000}\'; default: the positions that the model has',
    )
    add("--import", dest="modules", nargs="+", default=[], metavar="MODULE", help="modules that define encodings of your own")
    add("--model_max_length", type=at_least(1), help="longest input with --position_encoding; default: as hf_posenc.patch")
    add("--extend", choices=METHODS, metavar="METHOD", help="extend the model to --model_max_length by this method first")
    add("--train_positions_only", action="store_true", help="all that the model had before stays as it is")

    add = parser.add_argument_group("data: a file or a folder of files (CSV, JSON, text, parquet), or a data set").add_argument
    add("--train_file", type=Path)
    add("--validation_file", type=Path, help="without one, nothing is measured")
    percentage = number(int, "an integer from 1 to 99, which leaves rows to train on", lambda value: 1 <= value <= 99)
    add("--validation_split_percentage", type=percentage, help="instead: the part of the training rows kept for validation")
    add("--dataset_name", help="instead of --train_file: Hub id or folder of a data set; its split `validation` is used, too")
    add("--dataset_config_name")
    add("--streaming", action="store_true", help="read the training rows as they are needed, for data larger than the disk")
    add("--shuffle_buffer", type=at_least(1), default=10_000, help="rows that a stream is shuffled among")
    add("--text_column", default="text")

    add = parser.add_argument_group("training").add_argument
    add("--per_device_train_batch_size", type=at_least(1), default=8)
    add("--per_device_eval_batch_size", type=at_least(1), default=8)
    add("--gradient_accumulation_steps", type=at_least(1), default=1, help="batches on each process that make a step")
    add("--learning_rate", type=rate, default=5e-5)
    add("--weight_decay", type=positive_or_0, default=0.0)
    add(
        "--max_grad_norm",
        type=number(float, "a number above 0", lambda value: value > 0),
        default=1.0,
        help="gradients are scaled down to this norm",
    )
    add("--num_train_epochs", type=at_least(1), default=3)
    add("--max_train_steps", type=at_least(1), help="steps in all, whatever the epochs")
    add("--lr_scheduler_type", choices=[kind.value for kind in SchedulerType], default="linear", metavar="TYPE")
    add("--num_warmup_steps", type=at_least(0), default=0)
    add("--eval_steps", type=at_least(1), help="steps between evaluations; default: at the end of each epoch")
    add("--early_stopping_patience", type=at_least(1), metavar="N", help="stop after N evaluations without a better one")
    add("--load_best_model_at_end", action="store_true", help="finish with the best evaluation's model; early stopping does")
    add("--seed", type=seed, default=0)

    add = parser.add_argument_group("the machine").add_argument
    add("--mixed_precision", choices=("no", "fp16", "bf16"), help="default: as `accelerate launch` says, or no")
    add("--gradient_checkpointing", action="store_true", help="less memory for more time")
    add("--torch_compile", action="store_true")
    add("--torch_compile_backend", default="inductor")

    add = parser.add_argument_group("output").add_argument
    add("--output_dir", type=Path, required=True, help="the finished model lies at its root, checkpoints beside it")
    add("--checkpointing_steps", type=steps_or_epoch, metavar="N|epoch", help="write step_N folders, or epoch_N ones")
    add("--keep_last", type=at_least(1), metavar="N", help="checkpoints to keep; default: all")
    add("--resume_from_checkpoint", metavar="latest|PATH", help="latest: the newest complete one, or from the start")
    add("--with_tracking", action="store_true")
    add("--report_to", default="all", help="trackio, tensorboard, wandb, or all that are installed")
    add("--push_to_hub", action="store_true", help="with the account of HF_TOKEN or `hf auth login`")
    add("--hub_model_id", help="the repository to push to, such as me/bert-alibi")
    add("--hub_private_repo", action="store_true")
    parser.set_defaults(**defaults)
    return parser


def import_modules(argv: list[str] | None) -> None:
    """Import what --import names, before other flags name an encoding. Raises SystemExit where there is no such module."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--import", dest="modules", nargs="+", default=[])
    try:
        terminals.import_modules(parser.parse_known_args(argv)[0].modules)
    except ImportError as error:
        raise SystemExit(str(error)) from None


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The arguments, checked against each other and for what would otherwise fail only after training."""
    import_modules(argv)
    parsed = parser.parse_args(argv)
    evaluated = parsed.validation_file or parsed.validation_split_percentage or parsed.dataset_name
    together = {
        "--dataset_config_name goes with --dataset_name": parsed.dataset_config_name and not parsed.dataset_name,
        "--validation_split_percentage is for data without another validation file": parsed.validation_split_percentage
        and parsed.validation_file,
        "--validation_split_percentage needs the number of rows, which a stream doesn't have: give a --validation_file": (
            parsed.streaming and parsed.validation_split_percentage
        ),
        "--streaming goes with --max_train_steps: a stream has no known length": parsed.streaming
        and not parsed.max_train_steps,
        "--checkpointing_steps epoch: a stream has no known epochs, give a number": parsed.streaming
        and parsed.checkpointing_steps == "epoch",
        "--early_stopping_patience and --load_best_model_at_end need validation rows: give a --validation_file": (
            (parsed.early_stopping_patience or parsed.load_best_model_at_end) and not evaluated
        ),
        "--model_max_length needs --position_encoding or --extend": (
            parsed.model_max_length and not (parsed.position_encoding or parsed.extend)
        ),
        "--extend needs --model_max_length, the new maximum length in tokens": parsed.extend and not parsed.model_max_length,
        "--extend keeps the encoding of a trained model. Remove --position_encoding or --extend": (
            parsed.extend and parsed.position_encoding
        ),
        "--extend needs trained positions. Remove --from_scratch or --extend": (
            parsed.extend and getattr(parsed, "from_scratch", False)
        ),
        "--keep_last goes with --checkpointing_steps": parsed.keep_last and not parsed.checkpointing_steps,
        "--push_to_hub and --hub_model_id go together: give both or neither": parsed.push_to_hub != bool(parsed.hub_model_id),
        "--hub_private_repo goes with --push_to_hub": parsed.hub_private_repo and not parsed.push_to_hub,
    }
    for message, wrong in together.items():
        if wrong:
            parser.error(message)
    if parsed.with_tracking:
        installed = [str(tracker) for tracker in get_available_trackers()]
        if not installed or parsed.report_to not in ("all", *installed):
            parser.error(f"--report_to {parsed.report_to}: installed here is {', '.join(installed) or 'no tracker at all'}")
    if parsed.push_to_hub:
        try:
            validate_repo_id(parsed.hub_model_id)
        except HFValidationError as error:
            parser.error(f"--hub_model_id {parsed.hub_model_id}: {error}")
        if not (get_token() or is_offline_mode()):
            parser.error("there is no token for the Hub: run `hf auth login`, or set HF_TOKEN")
    chosen = parsed.resume_from_checkpoint
    if chosen and chosen != "latest" and "arguments" not in (checkpoints.manifest(Path(chosen)) or {}):
        parser.error(f"--resume_from_checkpoint {chosen}: there is no complete checkpoint; `latest` takes the newest that is")
    if not chosen and (left := checkpoints.newest(parsed.output_dir)):
        parser.error(f"{left} is there from an earlier run: --resume_from_checkpoint latest, or another --output_dir")
    return parsed


def start(arguments: argparse.Namespace) -> Accelerator:
    """The Accelerator of a run. Until training starts, the random generators of all processes are the same."""
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise SystemExit(
            "torchrun --max_restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment: restarted processes would "
            "look for each other under their old addresses, and hang (https://github.com/pytorch/pytorch/issues/135712)"
        )
    set_seed(arguments.seed)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=arguments.mixed_precision,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        dynamo_backend=arguments.torch_compile_backend if arguments.torch_compile else None,
        log_with=arguments.report_to if arguments.with_tracking else None,
        project_dir=arguments.output_dir,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=False),
        # Allows parameters that the loss doesn't depend on, such as those of some models' pooler.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    # Accelerate ignores these settings silently where it doesn't support them.
    for variable, kind in {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED"}.items():
        if os.environ.get(variable, "false").lower() == "true" and accelerator.distributed_type != kind:
            raise SystemExit(f"Accelerate offers no {kind} on {accelerator.device.type}: take scripts/accelerate/cpu.yaml")
    if not accelerator.is_main_process:
        disable_progress_bars()
    return accelerator
