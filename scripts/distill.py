"""Win a patched model's quality back: the unpatched original teaches the patched one, without labels.

    python scripts/distill.py --model_name_or_path bert-base-uncased --position_encoding alibi --output_dir bert-alibi
    accelerate launch --config_file scripts/accelerate/multi_gpu.yaml scripts/distill.py …

The student starts with its own old positions; over --fade_steps these fade out while the new encoding comes in. It learns
the teacher's token states and pooled embedding, on texts cut to a length drawn anew for each step. The model, its tokenizer
and distillation.json are written to --output_dir.
"""

import argparse
import hashlib
import random
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModel, DataCollatorWithPadding, PreTrainedModel

import hf_posenc
from evaluation import corpus
from training import data, flags, loop, models
from training.task import Task


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = flags.argument_parser(
        __doc__,
        per_device_train_batch_size=16,
        learning_rate=4e-4,
        weight_decay=0.01,
        lr_scheduler_type="cosine",
        num_warmup_steps=20,
        max_train_steps=300,
    )
    add = parser.add_argument_group("distillation").add_argument
    add("--max_length", type=flags.at_least(1), help="longest input of the patched model; default: as hf_posenc.patch")
    add("--packing", action="store_true", help="join texts to rows of --max_seq_length; they see each other")
    add("--fade_steps", type=flags.at_least(0), default=200, help="steps over which the old positions fade out")
    add("--min_seq_length", type=flags.at_least(3), default=48, help="shortest length that texts are cut to, in tokens")
    add("--max_seq_length", type=flags.at_least(3), default=192, help="longest length that texts are cut to, in tokens")
    arguments = flags.parse(parser, argv)
    if not arguments.position_encoding:
        parser.error("--position_encoding is missing: the one that the student is to get")
    if arguments.fade_steps >= arguments.max_train_steps:
        parser.error(f"--fade_steps {arguments.fade_steps} must be below --max_train_steps {arguments.max_train_steps}")
    if arguments.min_seq_length > arguments.max_seq_length:
        parser.error(
            f"--min_seq_length {arguments.min_seq_length} must be from 3 to --max_seq_length {arguments.max_seq_length}"
        )
    return arguments


def checksum(model: torch.nn.Module) -> str:
    """SHA-256 over all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def distillation_losses(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Hidden states `[B, L, D]` of student and teacher, mask `[B, L]` -> losses `[B]`.

    The mean of 1 - cosine over a text's real tokens, plus 1 - cosine of the two mean-pooled embeddings.
    """
    weights = mask / mask.sum(1, keepdim=True)
    tokens = ((1 - F.cosine_similarity(student, teacher, dim=-1)) * weights).sum(1)
    ours, theirs = ((hidden * weights[..., None]).sum(1) for hidden in (student, teacher))
    return tokens + 1 - F.cosine_similarity(ours, theirs, dim=-1)


def set_blend(model: PreTrainedModel, blend: float) -> None:
    """Set every stack's blend, from 0 (the old positions) to 1 (the new encoding)."""
    for module in model.modules():
        if isinstance(module, hf_posenc.PositionEncoding):
            module.blend = blend


class Distillation(Task):
    dropout = False
    """Off: it would add noise to the states that the student learns from."""

    def __init__(
        self, arguments: argparse.Namespace, student: PreTrainedModel, teacher: PreTrainedModel, tokenizer: Any
    ) -> None:
        self.arguments, self.student, self.teacher = arguments, student, teacher
        self.cut, self.pad = data.Cut(tokenizer), DataCollatorWithPadding(tokenizer)

    def collate(self, rows: data.Rows, step: int | None = None) -> Any:
        longest = self.arguments.max_seq_length
        drawn = random.Random(f"{self.arguments.seed} {step}").randint(self.arguments.min_seq_length, longest)
        length = longest if step is None else drawn
        return self.pad([{"input_ids": self.cut(row["input_ids"], length)} for _, row in rows])

    def items(self, batch: Any) -> int:
        return len(batch["input_ids"])

    def loss(self, model: torch.nn.Module, batch: Any, step: int) -> Tensor:
        set_blend(self.student, min(1.0, step / self.arguments.fade_steps) if self.arguments.fade_steps else 1.0)
        return self._losses(model, batch).mean()

    def evaluate(self, accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> dict[str, float]:
        """The mean loss of texts cut to --max_seq_length tokens, with the new encoding alone."""
        set_blend(self.student, 1.0)
        losses: list[float] = []
        for batch in tqdm(loader, desc="evaluating", leave=False, disable=not accelerator.is_main_process):
            losses += accelerator.gather_for_metrics(self._losses(model, batch)).tolist()
        return {"eval_loss": sum(losses) / len(losses), "eval_samples": len(losses)}

    def _losses(self, model: torch.nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.teacher(**batch).last_hidden_state
        return distillation_losses(model(**batch).last_hidden_state, target, batch["attention_mask"].to(target.dtype))


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    accelerator = flags.start(arguments)
    tokenizer = models.load_tokenizer(arguments.model_name_or_path)
    # Patched first, so that an unknown encoding fails before anything expensive.
    student = models.load_model(arguments, AutoModel, tokenizer)
    # Loaded separately: a patched model shares its parameters with the model that it was made from.
    teacher = AutoModel.from_pretrained(arguments.model_name_or_path, dtype=torch.float32).requires_grad_(False).eval()
    if hasattr(teacher.config, "position_encoding"):
        raise SystemExit(f"{arguments.model_name_or_path} is patched already: distil from the model that it was made from")
    teacher.to(accelerator.device)
    before = checksum(teacher)
    if arguments.train_file or arguments.dataset_name:
        splits = data.check_texts(data.load_splits(accelerator, arguments), arguments.text_column)
    else:
        splits = {"train": Dataset.from_dict({arguments.text_column: corpus.split(progress=accelerator.is_main_process)[1]})}
    length, report = arguments.max_seq_length, hf_posenc.inspect(student)
    rows = data.tokenized(
        accelerator, splits, tokenizer, arguments.text_column, length, packing=arguments.packing, usable=report.max_length
    )
    task = Distillation(arguments, student, teacher, tokenizer)

    def teachers() -> dict[str, dict[str, str]]:
        after = checksum(teacher)
        if before != after:
            raise SystemExit("the teacher changed while it taught: its parameters are shared with the student's")
        return {"teacher_checksum": {"before": before, "after": after}}

    loop.train(accelerator, arguments, task, student, tokenizer, rows, "distillation", teachers)


if __name__ == "__main__":
    main()
