"""Saving the finished model with a record of its training, and pushing it to the Hub."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from huggingface_hub import is_offline_mode
from transformers import PreTrainedModel

import hf_posenc
from hf_posenc.evaluation import records
from hf_posenc.training import checkpoints


def save_model(accelerator: Accelerator, model: torch.nn.Module, tokenizer: Any, folder: Path) -> None:
    """Save a prepared model and its tokenizer for AutoModel and AutoTokenizer. All processes must call it."""
    weights = accelerator.get_state_dict(model)
    weights = {name.replace("_orig_mod.", ""): weight for name, weight in weights.items()}  # torch.compile's prefix
    if not accelerator.is_main_process:
        return
    bare = accelerator.unwrap_model(model, keep_torch_compile=False)
    bare.save_pretrained(folder, state_dict=weights)
    if tokenizer.is_fast:
        # Otherwise, tokenizer.json contains the last truncation.
        tokenizer.backend_tokenizer.no_truncation()
    tokenizer.model_max_length = hf_posenc.inspect(bare).model_max_length
    tokenizer.save_pretrained(folder)


def finish(
    accelerator: Accelerator,
    arguments: argparse.Namespace,
    save: Callable[[Path], None],
    kind: type[PreTrainedModel],
    tokenizer: Any,
    best: Path | None,
    record: dict[str, Any],
    name: str,
) -> None:
    """Write the model and `{name}.json` to --output_dir, and push them to the Hub with --push_to_hub.

    The model, of the class `kind`, is a copy of the directory `best`. Without `best`, `save` writes it on all processes.
    """
    output_dir = arguments.output_dir

    def fill(folder: Path) -> None:
        if best is None:
            save(folder)
        elif accelerator.is_main_process:
            shutil.copytree(best, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(checkpoints.MANIFEST))
        if accelerator.is_main_process:
            records.write(folder / records.FILE, records.of_training(record, kind.__name__))

    checkpoints.replace(accelerator, output_dir, fill)
    if accelerator.is_main_process:
        records.write(output_dir / f"{name}.json", record)  # the last file, so it shows that the model is complete
    speed = f"{record['tokens_per_second']:,} tokens per second" if record["tokens_per_second"] else "already finished"
    accelerator.print(f"{record['steps']} steps in {record['seconds']} s ({speed})")
    accelerator.print(f"Model, tokenizer, and {name}.json were saved to {output_dir}.")
    if accelerator.is_main_process and arguments.push_to_hub:
        hf_posenc.push_to_hub(
            kind.from_pretrained(output_dir),
            arguments.hub_model_id,
            tokenizer=tokenizer,
            evaluation=output_dir / records.FILE,
            figures=sorted(output_dir.glob("*.png")),
            private=True if arguments.hub_private_repo else None,
            save_directory=output_dir / "to_push" if is_offline_mode() else None,
        )
