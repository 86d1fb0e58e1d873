"""Win a patched model's quality back: the unpatched original teaches the patched one, without labels.

    python scripts/distill.py --model_name_or_path bert-base-uncased --position_encoding alibi --output_dir bert-alibi
    torchrun --nproc_per_node 2 scripts/distill.py …        # several processes, CPU (gloo) or GPU

The student starts with its own old positions; over --fade_steps these fade out while the new encoding comes in. It learns
the teacher's token states and pooled embedding, on texts cut to lengths drawn anew for each step.
"""

import argparse
import hashlib
import json
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, get_scheduler
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

import hf_posenc


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model_name_or_path", required=True, help="folder or Hub id of an unpatched model: student and teacher")
    add("--position_encoding", required=True, help='name, or JSON such as \'{"type": "rope", "theta": 5000}\'')
    add("--max_length", type=int, help="longest input of the patched model; default: as hf_posenc.patch")
    add("--train_file", type=Path, help="text (a document a line), CSV or JSON with a column `text`; default: see corpus.py")
    add("--output_dir", type=Path, required=True)
    add("--per_device_train_batch_size", type=int, default=16)
    add("--learning_rate", type=float, default=4e-4)
    add("--weight_decay", type=float, default=0.01)
    add("--lr_scheduler_type", default="cosine")
    add("--num_warmup_steps", type=int, default=20)
    add("--max_train_steps", type=int, default=300)
    add("--fade_steps", type=int, default=200, help="steps over which the old positions fade out")
    add("--min_seq_length", type=int, default=48, help="shortest length that texts are cut to, in tokens")
    add("--max_seq_length", type=int, default=192, help="longest length that texts are cut to, in tokens")
    add("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.position_encoding.startswith("{"):
        arguments.position_encoding = json.loads(arguments.position_encoding)
    if not 0 <= arguments.fade_steps < arguments.max_train_steps:
        parser.error(f"--fade_steps {arguments.fade_steps} must be below --max_train_steps {arguments.max_train_steps}")
    if not 2 < arguments.min_seq_length <= arguments.max_seq_length:
        parser.error(
            f"--min_seq_length {arguments.min_seq_length} must be from 3 to --max_seq_length {arguments.max_seq_length}"
        )
    return arguments


def training_texts(train_file: Path | None) -> list[str]:
    """The texts of a file, or of the standard library. Raises SystemExit where there are none."""
    if train_file is None:
        from corpus import split

        return split()[1]
    from datasets import load_dataset

    kind = {".csv": "csv", ".json": "json", ".jsonl": "json"}.get(train_file.suffix, "text")
    data = load_dataset(kind, data_files=str(train_file), split="train")
    if "text" not in data.column_names:
        raise SystemExit(f"{train_file} has the columns {data.column_names}, but no `text`")
    texts = [text for text in data["text"] if text and text.strip()]
    if not texts:
        raise SystemExit(f"{train_file} has no text in it")
    return texts


def checksum(model: torch.nn.Module) -> str:
    """SHA-256 over all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def distillation_loss(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Token states and pooled embedding, both by direction: `[B, L, D]` twice and `[B, L]` -> a number.

    1 - cosine of each real token's states, plus 1 - cosine of their means.
    """
    tokens = (1 - F.cosine_similarity(student, teacher, dim=-1)) * mask
    weights = mask[..., None]
    ours, theirs = ((hidden * weights).sum(1) / weights.sum(1) for hidden in (student, teacher))
    return tokens.sum() / mask.sum() + (1 - F.cosine_similarity(ours, theirs, dim=-1)).mean()


def set_strength(model: PreTrainedModel, strength: float) -> None:
    """How far the new encoding is in force, in every stack: 0 (the old positions) to 1."""
    for module in model.modules():
        if isinstance(module, hf_posenc.PositionEncoding):
            module.strength = strength


def main() -> None:
    arguments = parse_arguments()
    set_seed(arguments.seed)
    # A head that the loss doesn't reach (a pooler) is no error in several processes.
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[unused])
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    # Patched first: an unknown encoding shows before anything expensive.
    student = hf_posenc.patch(
        AutoModel.from_pretrained(arguments.model_name_or_path),
        arguments.position_encoding,
        max_length=arguments.max_length,
    )
    # A second load: parameters of a patched model are those of the model it was made from.
    teacher = AutoModel.from_pretrained(arguments.model_name_or_path).requires_grad_(False).eval()
    before = checksum(teacher)
    texts = training_texts(arguments.train_file)

    lengths = random.Random(arguments.seed)

    def collate(chosen: list[str]) -> dict[str, Tensor]:
        length = lengths.randint(arguments.min_seq_length, arguments.max_seq_length)
        return tokenizer(chosen, padding=True, truncation=True, max_length=length, return_tensors="pt").data

    batch_size = arguments.per_device_train_batch_size
    repeats = math.ceil(arguments.max_train_steps * batch_size * accelerator.num_processes / len(texts))
    loader = DataLoader(texts * repeats, batch_size=batch_size, shuffle=True, drop_last=True, collate_fn=collate)
    # Dropout would only blur what the student is to copy.
    student.eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=arguments.learning_rate, weight_decay=arguments.weight_decay)
    scheduler = get_scheduler(
        arguments.lr_scheduler_type,
        optimizer,
        num_warmup_steps=arguments.num_warmup_steps * accelerator.num_processes,
        num_training_steps=arguments.max_train_steps * accelerator.num_processes,
    )
    model, optimizer, loader, scheduler = accelerator.prepare(student, optimizer, loader, scheduler)
    teacher.to(accelerator.device)

    losses: list[float] = []
    started = time.perf_counter()
    batches = iter(loader)
    bar = tqdm(range(1, arguments.max_train_steps + 1), desc="distilling", disable=not accelerator.is_main_process)
    for step in bar:
        set_strength(student, min(1.0, step / arguments.fade_steps) if arguments.fade_steps else 1.0)
        batch = {key: value.to(accelerator.device) for key, value in next(batches).items()}
        with torch.no_grad():
            target = teacher(**batch).last_hidden_state
        loss = distillation_loss(model(**batch).last_hidden_state, target, batch["attention_mask"].to(target.dtype))
        if not loss.isfinite():
            raise SystemExit(f"the loss is {loss.item()} at step {step}: lower --learning_rate; nothing was saved")
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{sum(losses[-10:]) / len(losses[-10:]):.4f}", refresh=False)

    after = checksum(teacher)
    if before != after:
        raise SystemExit("the teacher changed while it taught: its parameters are shared with the student's")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
        student.save_pretrained(arguments.output_dir)
        tokenizer.model_max_length = hf_posenc.inspect(student).max_length or VERY_LARGE_INTEGER
        tokenizer.save_pretrained(arguments.output_dir)
        record = {
            "arguments": {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()},
            "processes": accelerator.num_processes,
            "texts": len(texts),
            "seconds": round(time.perf_counter() - started, 1),
            "teacher_checksum": {"before": before, "after": after},
            "losses": [round(loss, 5) for loss in losses],
        }
        (arguments.output_dir / "distillation.json").write_text(json.dumps(record, indent=2))
    accelerator.end_training()


if __name__ == "__main__":
    main()
