"""The options of all training commands. They are checked before any expensive step."""

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
"""Maximum text length in tokens if the model has no length limit."""
LARGEST_RATE = torch.finfo(torch.float32).max / 10
"""The largest learning rate. AdamW multiplies the rate of its first step by 10 (1 / (1 - beta1))."""
TEXT_LENGTH_HELP = (
    f"maximum text length in tokens (default: the model's maximum length, or {DEFAULT_TEXT_LENGTH} without a limit)"
)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Appends the default to the help text of each option that doesn't state it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if action.required or default is argparse.SUPPRESS or "(default:" in text:
            return text
        shown = "off" if default is False else "none" if default in (None, []) else default
        return f"{text} (default: {shown})"


def position_encoding(text: str) -> Any:
    """The argparse type of --position_encoding: a name or a JSON object."""
    try:
        chosen = json.loads(text) if text.startswith("{") else text
        hf_posenc.PosEncBertConfig.from_dict({}, position_encoding=chosen)  # validates it; the config's class doesn't matter
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} isn't valid JSON: {error}") from None
    except ValueError as error:
        hint = " In this command, pass --import MODULE." if "import the module" in str(error).lower() else ""
        raise argparse.ArgumentTypeError(f"{error}{hint}") from None
    return chosen


def number(kind: Callable[[str], Any], allowed: str, holds: Callable[[Any], bool]) -> Callable[[str], Any]:
    """The argparse type of numbers for which a condition holds. `allowed` describes the condition."""

    def parsed(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text[:20]!r} must be {allowed}.")
        return value

    return parsed


def at_least(low: int) -> Callable[[str], int]:
    return number(int, f"an integer of at least {low}", lambda value: value >= low)


seed = number(int, "an integer from 0 to 2^32 - 1 (the range of NumPy's generators)", lambda value: 0 <= value < 2**32)
positive = number(float, "a number above 0", lambda value: 0 < value < math.inf)
positive_or_0 = number(float, "a number of at least 0", lambda value: 0 <= value < math.inf)
rate = number(
    float,
    f"a number above 0 and at most {LARGEST_RATE:.2g}, because AdamW's steps overflow beyond it",
    lambda value: 0 < value <= LARGEST_RATE,
)


def steps_or_epoch(text: str) -> int | str:
    return text if text == "epoch" else at_least(1)(text)


def argument_parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The options of all commands. Their names are those of Transformers' `*_no_trainer.py` scripts."""
    # Without abbreviations, an option of another command is an error instead of a match for a longer name.
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("model").add_argument
    add("--model_name_or_path", required=True, help="local path or Hub ID of a model, patched or not")
    add(
        "--position_encoding",
        type=position_encoding,
        help='encoding name, or JSON such as \'{"type": "rope", "theta": 5000}\' (default: the model\'s encoding)',
    )
    add("--import", dest="modules", nargs="+", default=[], metavar="MODULE", help="modules that define custom encodings")
    add(
        "--model_max_length",
        type=at_least(1),
        help="maximum length with --position_encoding or --extend (default: that of hf_posenc.patch)",
    )
    add("--extend", choices=METHODS, metavar="METHOD", help="extend the model to --model_max_length by this method first")
    add("--train_positions_only", action="store_true", help="train only the parameters of the encoding and new ones")

    add = parser.add_argument_group(
        "data (a file or a directory of CSV, JSON, text, or Parquet files, or a dataset)"
    ).add_argument
    add("--train_file", type=Path, help="training file, or directory of files")
    add("--validation_file", type=Path, help="validation file; without validation data, nothing is evaluated")
    percentage = number(int, "an integer from 1 to 99, so that examples remain for training", lambda value: 1 <= value <= 99)
    add(
        "--validation_split_percentage",
        type=percentage,
        help="percentage of the training examples to use for validation instead",
    )
    add(
        "--dataset_name", help="Hub ID or local path of a dataset, instead of --train_file; its `validation` split is also used"
    )
    add("--dataset_config_name", help="config of the dataset")
    add("--streaming", action="store_true", help="read training examples on demand, for data larger than the disk")
    add("--shuffle_buffer", type=at_least(1), default=10_000, help="number of examples in the shuffle buffer of a stream")
    add("--text_column", default="text", help="column that contains the texts")

    add = parser.add_argument_group("training").add_argument
    add("--per_device_train_batch_size", type=at_least(1), default=8, help="training batch size per process")
    add("--per_device_eval_batch_size", type=at_least(1), default=8, help="evaluation batch size per process")
    add("--gradient_accumulation_steps", type=at_least(1), default=1, help="batches per step on each process")
    add("--learning_rate", type=rate, default=5e-5, help="maximum learning rate of AdamW")
    add("--weight_decay", type=positive_or_0, default=0.0, help="weight decay of AdamW")
    add(
        "--max_grad_norm",
        type=number(float, "a number above 0", lambda value: value > 0),
        default=1.0,
        help="maximum gradient norm for clipping",
    )
    add("--num_train_epochs", type=at_least(1), default=3, help="number of epochs")
    add("--max_train_steps", type=at_least(1), help="total number of steps; overrides --num_train_epochs")
    schedulers = [kind.value for kind in SchedulerType]
    add("--lr_scheduler_type", choices=schedulers, default="linear", metavar="TYPE", help="scheduler of Transformers")
    add("--num_warmup_steps", type=at_least(0), default=0, help="number of warmup steps")
    add("--eval_steps", type=at_least(1), help="steps between evaluations (default: one epoch)")
    add(
        "--early_stopping_patience",
        type=at_least(1),
        metavar="N",
        help="number of evaluations without improvement before training stops",
    )
    add("--load_best_model_at_end", action="store_true", help="save the best model at the end (always with early stopping)")
    add("--seed", type=seed, default=0, help="random seed")

    add = parser.add_argument_group("hardware").add_argument
    add(
        "--mixed_precision",
        choices=("no", "fp16", "bf16"),
        help="mixed precision (default: the setting of `accelerate launch`, or no)",
    )
    add("--gradient_checkpointing", action="store_true", help="trade compute time for memory")
    add(
        "--dataloader_num_workers",
        type=at_least(0),
        help="subprocesses of each process that prepare batches, none with --streaming (default: 2, or 0 on a CPU)",
    )
    add("--torch_compile", action="store_true", help="compile the model")
    add("--torch_compile_backend", default="inductor", help="backend of torch.compile")

    add = parser.add_argument_group("output").add_argument
    add("--output_dir", type=Path, required=True, help="directory for the finished model and its checkpoints")
    add("--checkpointing_steps", type=steps_or_epoch, metavar="N|epoch", help="steps between checkpoints, or epoch")
    add("--keep_last", type=at_least(1), metavar="N", help="number of checkpoints to keep (default: all)")
    add("--resume_from_checkpoint", metavar="latest|PATH", help="checkpoint to resume from; latest: the newest complete one")
    add("--with_tracking", action="store_true", help="log to experiment trackers")
    add("--report_to", default="all", help="trackio, tensorboard, wandb, or all installed trackers")
    add("--push_to_hub", action="store_true", help="push the model to the Hub with HF_TOKEN or the login")
    add("--hub_model_id", help="repository to push to, such as me/bert-alibi")
    add("--hub_private_repo", action="store_true", help="make a new repository private")
    parser.set_defaults(**defaults)
    return parser


def import_modules(argv: list[str] | None) -> None:
    """Import the modules of --import, before other options name their encodings. Raises SystemExit if one doesn't exist."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--import", dest="modules", nargs="+", default=[])
    try:
        terminals.import_modules(parser.parse_known_args(argv)[0].modules)
    except ImportError as error:
        raise SystemExit(str(error)) from None


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The parsed arguments.

    They are checked for contradictions, and for errors that would otherwise occur only after training.
    """
    import_modules(argv)
    parsed = parser.parse_args(argv)
    together = {
        "--dataset_config_name needs --dataset_name.": parsed.dataset_config_name and not parsed.dataset_name,
        "--validation_split_percentage and --validation_file exclude each other. Set one of them.": (
            parsed.validation_split_percentage and parsed.validation_file
        ),
        "--validation_split_percentage needs the number of examples, which a stream doesn't have. Set --validation_file.": (
            parsed.streaming and parsed.validation_split_percentage
        ),
        "--streaming needs --max_train_steps, because the length of a stream is unknown.": parsed.streaming
        and not parsed.max_train_steps,
        "--checkpointing_steps epoch doesn't support --streaming. Set a number of steps.": parsed.streaming
        and parsed.checkpointing_steps == "epoch",
        "--model_max_length needs --position_encoding or --extend. Set one of them, or omit it.": (
            parsed.model_max_length and not (parsed.position_encoding or parsed.extend)
        ),
        "--extend needs --model_max_length, the new maximum length in tokens.": parsed.extend and not parsed.model_max_length,
        "--extend keeps the encoding of a trained model. Remove --position_encoding or --extend.": (
            parsed.extend and parsed.position_encoding
        ),
        "--extend needs trained positions. Remove --from_scratch or --extend.": (
            parsed.extend and getattr(parsed, "from_scratch", False)
        ),
        "--keep_last needs --checkpointing_steps.": parsed.keep_last and not parsed.checkpointing_steps,
        "--push_to_hub and --hub_model_id belong together. Set both or neither.": parsed.push_to_hub
        != bool(parsed.hub_model_id),
        "--hub_private_repo needs --push_to_hub.": parsed.hub_private_repo and not parsed.push_to_hub,
    }
    for message, wrong in together.items():
        if wrong:
            parser.error(message)
    if parsed.with_tracking:
        installed = [str(tracker) for tracker in get_available_trackers()]
        if not installed or parsed.report_to not in ("all", *installed):
            parser.error(
                f"--report_to {parsed.report_to} isn't installed. Installed trackers: {', '.join(installed) or 'none'}."
            )
    if parsed.push_to_hub:
        try:
            validate_repo_id(parsed.hub_model_id)
        except HFValidationError as error:
            parser.error(f"--hub_model_id {parsed.hub_model_id}: {error}")
        if not (get_token() or is_offline_mode()):
            parser.error("No token for the Hub was found. Run `hf auth login`, or set HF_TOKEN.")
    chosen = parsed.resume_from_checkpoint
    if chosen and chosen != "latest" and "arguments" not in (checkpoints.manifest(Path(chosen)) or {}):
        parser.error(
            f"--resume_from_checkpoint {chosen} isn't a complete checkpoint. `latest` resumes from the newest complete one."
        )
    if not chosen and (left := checkpoints.newest(parsed.output_dir)):
        parser.error(f"{left} exists from an earlier run. Set --resume_from_checkpoint latest, or choose another --output_dir.")
    return parsed


def start(arguments: argparse.Namespace) -> Accelerator:
    """The Accelerator of a run. All processes have the same random state until training starts."""
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise SystemExit(
            "torchrun --max_restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment. Otherwise, restarted "
            "processes use old addresses and hang (https://github.com/pytorch/pytorch/issues/135712)."
        )
    set_seed(arguments.seed)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    accelerator = Accelerator(
        # Without this, processes of torchrun on CPUs would be runs of their own. MPS has no process groups.
        cpu=not torch.accelerator.is_available() or (torch.backends.mps.is_available() and several),
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
            raise SystemExit(
                f"Accelerate doesn't support {kind} on {accelerator.device.type}. Use scripts/accelerate/cpu.yaml."
            )
    if not accelerator.is_main_process:
        disable_progress_bars()
    batches = accelerator.num_processes * arguments.gradient_accumulation_steps
    arguments.global_batch = batches * arguments.per_device_train_batch_size
    return accelerator
