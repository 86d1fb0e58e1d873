"""Distill a patched model from its unpatched original, without labels.

Examples:
    python -m hf_posenc.training.distill --model_name_or_path bert-base-uncased --position_encoding alibi \\
        --output_dir bert-alibi
    python -m hf_posenc.training.distill --model_name_or_path bert-alibi --teacher bert-base-uncased \\
        --output_dir bert-alibi-distilled
    accelerate launch --multi_gpu -m hf_posenc.training.distill …

The student is the model with --position_encoding, or a model that is already patched. With --position_encoding,
hf_posenc.convert calibrates it against the original before the first step, unless --no-calibrate is set. The student learns
the teacher's hidden states and embeddings.

The texts come from --train_file or --dataset_name. Without these, they are the documentation of Python's standard library.
Each step truncates them to a random length, each at a random place. With --long_text_length, some steps have texts longer
than the teacher's maximum length, which the teacher reads in overlapping windows. Such a step leaves texts out, so that it has
at most as many tokens as a step with texts of --text_length.

Embeddings are pooled by the modules of a SentenceTransformer, or otherwise by the mean over tokens. The command writes the
model with these modules, its tokenizer, and distillation.json to --output_dir.
"""

import argparse
import functools
import hashlib
import random
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor
from transformers import AutoConfig, AutoModel, DataCollatorWithPadding, PreTrainedModel

import hf_posenc
from hf_posenc.evaluation import retrieval, stdlib_corpus, terminals
from hf_posenc.serialization.tokenizer_files import required_tokenizer
from hf_posenc.training import data, flags, loop, models, sentences, teaching
from hf_posenc.training.task import Task


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = flags.argument_parser(
        __doc__,
        per_device_train_batch_size=16,
        learning_rate=2e-4,
        weight_decay=0.01,
        lr_scheduler_type="cosine",
        num_warmup_steps=20,
        max_train_steps=150,
    )
    add = parser.add_argument_group("distillation").add_argument
    add("--teacher", help="original of an already patched model (default: the unpatched model itself)")
    add("--packing", action="store_true", help="pack texts into blocks of --text_length without masks between them")
    add(
        "--calibrate",
        action=argparse.BooleanOptionalAction,
        help="calibrate with hf_posenc.convert first (default: if --position_encoding acts in attention)",
    )
    add("--min_text_length", type=flags.at_least(3), default=16, help="minimum text length in tokens")
    add("--text_length", type=flags.at_least(3), default=256, help="maximum text length in tokens")
    add("--long_text_length", type=flags.at_least(3), help="maximum text length in long steps (default: no long steps)")
    add(
        "--long_steps",
        type=flags.at_least(1),
        default=35,
        metavar="PERCENT",
        help="percentage of steps with texts beyond --text_length",
    )
    arguments = flags.parse(parser, argv)
    needing = (
        "validation_file",
        "validation_split_percentage",
        "streaming",
        "load_best_model_at_end",
        "early_stopping_patience",
    )
    for name in needing:
        if getattr(arguments, name) and not (arguments.train_file or arguments.dataset_name):
            parser.error(f"--{name} needs --train_file or --dataset_name.")
    if arguments.min_text_length > arguments.text_length:
        parser.error(f"--min_text_length {arguments.min_text_length} must be from 3 to --text_length {arguments.text_length}.")
    if arguments.long_text_length and arguments.long_text_length <= arguments.text_length:
        parser.error(f"--long_text_length {arguments.long_text_length} must be above --text_length {arguments.text_length}.")
    if arguments.long_text_length and arguments.packing:
        parser.error("--packing makes blocks of --text_length and doesn't support --long_text_length. Omit one of them.")
    if arguments.calibrate and not arguments.position_encoding:
        parser.error("--calibrate needs --position_encoding. A model that is already patched is trained without calibration.")
    return arguments


def checksum(model: torch.nn.Module) -> str:
    """The SHA-256 of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def distillation_losses(
    student: Tensor,
    teacher: Tensor,
    batch: dict[str, Tensor],
    pools: tuple[retrieval.Pool, retrieval.Pool] = (retrieval.mean, retrieval.mean),
) -> Tensor:
    """The losses `[B]` from the hidden states `[B, L, D]` of student and teacher, their batch, and the pooling of each.

    A loss is the mean of 1 - cosine over a text's tokens without padding, plus 1 - cosine of the two embeddings.
    """
    mask = batch["attention_mask"].to(teacher.dtype)
    tokens = ((1 - F.cosine_similarity(student, teacher, dim=-1)) * (mask / mask.sum(1, keepdim=True))).sum(1)
    ours, theirs = (pool(hidden, batch) for pool, hidden in zip(pools, (student, teacher), strict=True))
    return tokens + 1 - F.cosine_similarity(ours, theirs, dim=-1)


class Distillation(Task):
    dropout = False
    """Dropout would add noise to the hidden states that the student learns from."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        tokenizer: Any,
        modules: Any,
        pools: tuple[retrieval.Pool, retrieval.Pool],
    ) -> None:
        """modules: the student's SentenceTransformer, or None. pools: the pooling of student and teacher."""
        self.arguments, self.student, self.teacher, self.tokenizer = arguments, student, teacher, tokenizer
        self.modules, self.pools = modules, pools
        self.cut, self.pad = data.Cut(tokenizer), DataCollatorWithPadding(tokenizer)
        self.usable = hf_posenc.inspect(teacher).max_length

    def __getstate__(self) -> dict[str, Any]:
        """What workers that are spawned need to collate, without the models."""
        return {"arguments": self.arguments, "cut": self.cut, "pad": self.pad}

    def collate(self, rows: data.Rows, step: int | None = None) -> Any:
        arguments = self.arguments
        if step is None:
            return self.pad([{"input_ids": self.cut(row["input_ids"], arguments.text_length)} for _, row in rows])
        draw, longest = random.Random(f"{arguments.seed} {step}"), arguments.long_text_length
        if longest and draw.randrange(100) < arguments.long_steps:
            length = draw.randint(arguments.text_length + 1, longest)
        else:
            length = draw.randint(arguments.min_text_length, arguments.text_length)
        # Texts are left out by their place in the step, so that its division into batches changes no result.
        size = arguments.global_batch
        kept = max(1, min(size, size * arguments.text_length // length))
        chosen = [(number, row) for number, row in rows if number % size * kept % size < kept]
        # A batch whose texts are all left out has a short one that doesn't count.
        pieces = [self._piece(row["input_ids"], length if chosen else 3, number) for number, row in chosen or rows[:1]]
        return self.pad([{"input_ids": piece} for piece in pieces]) | {"items": len(chosen)}

    def _piece(self, ids: list[int], length: int, number: int) -> list[int]:
        """`length` tokens from a random place in a text, including special tokens."""
        inner = len(ids) - self.cut.head - self.cut.tail
        left_out = len(ids) - length
        start = random.Random(f"{self.arguments.seed} {number} {length}").randint(0, left_out) if left_out > 0 else 0
        kept = ids[self.cut.head + start : self.cut.head + inner]
        return self.cut([*ids[: self.cut.head], *kept, *ids[self.cut.head + inner :]], length)

    def items(self, batch: Any) -> int:
        return batch["items"]

    def loss(self, model: torch.nn.Module, batch: Any, step: int) -> Tensor:
        return self._losses(model, batch).mean()

    def evaluate(self, accelerator: Accelerator, model: torch.nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """The mean loss of texts truncated to --text_length tokens."""
        losses: list[float] = []
        for batch in batches:
            losses += accelerator.gather_for_metrics(self._losses(model, batch)).tolist()
        return {"eval_loss": sum(losses) / len(losses), "eval_samples": len(losses)}

    def _losses(self, model: torch.nn.Module, batch: Any) -> Tensor:
        batch = {name: each for name, each in batch.items() if name != "items"}
        target = teaching.states(self.teacher, batch, self.cut, self.usable)
        return distillation_losses(model(**batch).last_hidden_state, target, batch, self.pools)

    def save_beside(self, folder: Path) -> None:
        if self.modules is not None:
            sentences.save(self.modules, self.tokenizer, folder)


def check_student(arguments: argparse.Namespace, given: list[str]) -> None:
    """Raises SystemExit if the options and the model don't determine the student's encoding and its teacher."""
    name, chosen = arguments.model_name_or_path, arguments.position_encoding
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{name}: {error}") from None
    if not hasattr(config, "position_encoding"):
        if not chosen:
            raise SystemExit(
                f"--position_encoding is missing. Set the encoding for {name}. If it is already patched, set its original as "
                "--teacher."
            )
        return
    if arguments.calibrate:
        raise SystemExit(f"{name} is already patched. --calibrate needs an unpatched model and --position_encoding.")
    if not arguments.teacher:
        host = config.position_spec.original
        original = (host and host.name_or_path) or "ORIGINAL"
        command = shlex.join(["python", "-m", "hf_posenc.training.distill", *given, "--teacher", original])
        raise SystemExit(f"{name} is already patched. Set its original as --teacher:\n  {command}")


def load_teacher(
    arguments: argparse.Namespace, student: PreTrainedModel, tokenizer: Any, modules: Any
) -> tuple[PreTrainedModel, Any]:
    """The teacher, and its SentenceTransformer or None. modules: the student's. Raises SystemExit for an invalid teacher."""
    name = arguments.teacher or arguments.model_name_or_path
    try:
        # Loaded separately, because a patched model shares its parameters with its original.
        found = sentences.load(name) if arguments.teacher else modules
        teacher = AutoModel.from_pretrained(name, dtype=torch.float32) if found is None else found[0].model
        report = hf_posenc.inspect(teacher)
        if report.can_unpatch:
            raise ValueError("It is patched. A teacher must have the position encoding that it was trained with.")
        if report.ignored:
            raise ValueError(
                f"Its outputs are wrong. {report.ignored[0]} `hf-posenc patch {name} relative_key` saves a correct teacher."
            )
        known = (required_tokenizer(name) if found is None else found.tokenizer).get_vocab()
        if known != tokenizer.get_vocab():
            raise ValueError(
                f"Its tokenizer has a different vocabulary ({len(known)} tokens) from the student's ({len(tokenizer)})."
            )
        ours, theirs = student.config.hidden_size, teacher.config.hidden_size
        if ours != theirs:
            raise ValueError(f"Its hidden size is {theirs}, and the student's is {ours}. They must be equal.")
        if found is not None and modules is not None:
            ours, theirs = modules.get_embedding_dimension(), found.get_embedding_dimension()
            if ours != theirs:
                raise ValueError(f"Its embeddings have {theirs} dimensions, and the student's have {ours}. They must be equal.")
        usable = report.max_length
        if usable is not None and usable < arguments.text_length:
            raise ValueError(f"Its maximum length is {usable} tokens. Lower --text_length {arguments.text_length}.")
    except (OSError, ValueError) as error:
        raise SystemExit(f"{name} can't be the teacher. {error}") from None
    return teacher.requires_grad_(False).eval(), found


def load_texts(accelerator: Accelerator, arguments: argparse.Namespace) -> dict[str, Any]:
    """The splits of --train_file or --dataset_name, or otherwise the documentation of the standard library."""
    if arguments.train_file or arguments.dataset_name:
        return data.check_texts(accelerator, data.load_splits(accelerator, arguments), arguments.text_column)
    texts = stdlib_corpus.split(progress=accelerator.is_main_process)[1]
    texts = stdlib_corpus.joined(texts) if arguments.long_text_length else texts
    accelerator.print(
        f"Without --train_file and --dataset_name, training uses {len(texts)} passages of the documentation of Python's "
        "standard library."
    )
    return {"train": Dataset.from_dict({arguments.text_column: texts})}


def calibrating(arguments: argparse.Namespace, texts: Any, tokenizer: Any) -> dict[str, Any]:
    """The argument of `load_model` that makes it convert the student. Empty if the student is only patched.

    Raises SystemExit for --calibrate with an encoding that doesn't act in attention.
    """
    chosen = arguments.position_encoding
    if not chosen or arguments.calibrate is False:
        return {}
    spec = hf_posenc.PosEncBertConfig.from_dict({}, position_encoding=chosen).position_spec
    if {*spec.encoding.mechanisms()} <= {"embed"}:
        if arguments.calibrate:
            raise SystemExit(f"--calibrate doesn't apply to {spec.type!r}, which doesn't act in attention. Omit it.")
        return {}
    column = (row[arguments.text_column] for row in texts)
    return {"patch": functools.partial(hf_posenc.convert, texts=column, tokenizer=tokenizer)}


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    accelerator = flags.start(arguments)
    check_student(arguments, sys.argv[1:] if argv is None else argv)
    name = arguments.model_name_or_path
    ours = sentences.load(name)
    tokenizer = models.load_tokenizer(name) if ours is None else models.with_padding(ours.tokenizer, name)
    splits = load_texts(accelerator, arguments)
    student = models.load_model(arguments, AutoModel, tokenizer, **calibrating(arguments, splits["train"], tokenizer))
    teacher, theirs = load_teacher(arguments, student, tokenizer, ours)
    teacher.to(accelerator.device)
    # If only one of them is a SentenceTransformer, its modules also pool the other.
    ours, theirs = theirs if ours is None else ours, ours if theirs is None else theirs
    if ours is not None and arguments.push_to_hub:
        raise SystemExit(
            "--push_to_hub doesn't push the modules of sentence-transformers. Omit it, and call "
            f"SentenceTransformer({str(arguments.output_dir)!r}).push_to_hub({arguments.hub_model_id!r})."
        )
    accelerator.print(f"Embeddings are pooled by {sentences.described(ours)}.")
    before = checksum(teacher)
    longest = arguments.long_text_length or arguments.text_length
    length = models.text_length(arguments, longest, student, tokenizer)
    rows = data.tokenized(accelerator, splits, tokenizer, arguments.text_column, length, packing=arguments.packing)
    models.warn_of_length(accelerator, arguments, student, rows["train"], length)
    pools = retrieval.pooling(ours, accelerator.device), retrieval.pooling(theirs, accelerator.device)
    task = Distillation(arguments, student, teacher, tokenizer, ours, pools)

    def teachers() -> dict[str, dict[str, str]]:
        after = checksum(teacher)
        if before != after:
            raise SystemExit("The teacher changed during the distillation, because it shares its parameters with the student.")
        return {"teacher_checksum": {"before": before, "after": after}}

    loop.train(accelerator, arguments, task, student, tokenizer, rows, "distillation", teachers)


if __name__ == "__main__":
    terminals.set_up()
    main()
