"""Win a patched model's quality back: the unpatched original teaches the patched one, without labels.

    python -m hf_posenc.training.distill --model_name_or_path bert-base-uncased --position_encoding alibi \\
        --output_dir bert-alibi
    python -m hf_posenc.training.distill --model_name_or_path bert-alibi --teacher bert-base-uncased \\
        --output_dir bert-alibi-distilled
    accelerate launch --multi_gpu -m hf_posenc.training.distill …

The student is the model with --position_encoding, calibrated against its original before the first step (hf_posenc.convert;
--no-calibrate leaves that out), or one that was patched before, as it is. It learns the teacher's token states and embeddings,
on texts cut to a length drawn anew for each step, each at a random place: those of --train_file or --dataset_name, or else the
documentation of Python's standard library. With --long_text_length some steps have texts longer than the teacher reads: it
reads those in overlapping windows. A step has at most --per_device_train_batch_size x --text_length tokens, so longer texts
come in smaller batches. Embeddings are pooled by the modules of a SentenceTransformer, or else by the mean over tokens. The
model with these modules, its tokenizer and distillation.json are written to --output_dir.
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
    add("--teacher", help="the original of a model that is patched already; default: the model itself, unpatched")
    add("--packing", action="store_true", help="join texts to rows of --text_length; they see each other")
    add(
        "--calibrate",
        action=argparse.BooleanOptionalAction,
        help="begin with hf_posenc.convert; default: where --position_encoding acts in attention",
    )
    add("--min_text_length", type=flags.at_least(3), default=16, help="shortest length that texts are cut to, in tokens")
    add("--text_length", type=flags.at_least(3), default=256, help="longest length that texts are cut to, in tokens")
    add("--long_text_length", type=flags.at_least(3), help="the same in the long steps; default: there are none")
    add(
        "--long_steps",
        type=flags.at_least(1),
        default=35,
        metavar="PERCENT",
        help="how many steps have texts beyond --text_length",
    )
    arguments = flags.parse(parser, argv)
    validated = arguments.validation_file or arguments.validation_split_percentage
    if (validated or arguments.streaming) and not (arguments.train_file or arguments.dataset_name):
        parser.error("--validation_file, --validation_split_percentage and --streaming go with --train_file or --dataset_name")
    if arguments.min_text_length > arguments.text_length:
        parser.error(f"--min_text_length {arguments.min_text_length} must be from 3 to --text_length {arguments.text_length}")
    if arguments.long_text_length and arguments.long_text_length <= arguments.text_length:
        parser.error(f"--long_text_length {arguments.long_text_length} must be above --text_length {arguments.text_length}")
    if arguments.long_text_length and arguments.packing:
        parser.error("--packing makes blocks of --text_length: leave out --long_text_length")
    if arguments.calibrate and not arguments.position_encoding:
        parser.error("--calibrate goes with --position_encoding: a model that is patched already is trained as it is")
    return arguments


def checksum(model: torch.nn.Module) -> str:
    """SHA-256 over all parameters and buffers."""
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
    """Hidden states `[B, L, D]` of student and teacher, their batch, and how each is pooled -> losses `[B]`.

    The mean of 1 - cosine over a text's real tokens, plus 1 - cosine of the two embeddings.
    """
    mask = batch["attention_mask"].to(teacher.dtype)
    tokens = ((1 - F.cosine_similarity(student, teacher, dim=-1)) * (mask / mask.sum(1, keepdim=True))).sum(1)
    ours, theirs = (pool(hidden, batch) for pool, hidden in zip(pools, (student, teacher), strict=True))
    return tokens + 1 - F.cosine_similarity(ours, theirs, dim=-1)


class Distillation(Task):
    dropout = False
    """Off: it would add noise to the states that the student learns from."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        tokenizer: Any,
        modules: Any,
        pools: tuple[retrieval.Pool, retrieval.Pool],
    ) -> None:
        """`modules` is the student's SentenceTransformer, or None; `pools` are how student and teacher are pooled."""
        self.arguments, self.student, self.teacher, self.tokenizer = arguments, student, teacher, tokenizer
        self.modules, self.pools = modules, pools
        self.cut, self.pad = data.Cut(tokenizer), DataCollatorWithPadding(tokenizer)
        self.usable = hf_posenc.inspect(teacher).max_length

    def collate(self, rows: data.Rows, step: int | None = None) -> Any:
        arguments = self.arguments
        if step is None:
            return self.pad([{"input_ids": self.cut(row["input_ids"], arguments.text_length)} for _, row in rows])
        draw, longest = random.Random(f"{arguments.seed} {step}"), arguments.long_text_length
        if longest and draw.randrange(100) < arguments.long_steps:
            length = draw.randint(arguments.text_length + 1, longest)
        else:
            length = draw.randint(arguments.min_text_length, arguments.text_length)
        kept = max(1, min(len(rows), arguments.per_device_train_batch_size * arguments.text_length // length))
        return self.pad([{"input_ids": self._piece(row["input_ids"], length, number)} for number, row in rows[:kept]])

    def _piece(self, ids: list[int], length: int, number: int) -> list[int]:
        """`length` tokens from a random place of a text, special tokens included."""
        inner = len(ids) - self.cut.head - self.cut.tail
        left_out = len(ids) - length
        start = random.Random(f"{self.arguments.seed} {number} {length}").randint(0, left_out) if left_out > 0 else 0
        kept = ids[self.cut.head + start : self.cut.head + inner]
        return self.cut([*ids[: self.cut.head], *kept, *ids[self.cut.head + inner :]], length)

    def items(self, batch: Any) -> int:
        return len(batch["input_ids"])

    def loss(self, model: torch.nn.Module, batch: Any, step: int) -> Tensor:
        return self._losses(model, batch).mean()

    def evaluate(self, accelerator: Accelerator, model: torch.nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """The mean loss of texts cut to --text_length tokens."""
        losses: list[float] = []
        for batch in batches:
            losses += accelerator.gather_for_metrics(self._losses(model, batch)).tolist()
        return {"eval_loss": sum(losses) / len(losses), "eval_samples": len(losses)}

    def _losses(self, model: torch.nn.Module, batch: Any) -> Tensor:
        target = teaching.states(self.teacher, batch, self.cut, self.usable)
        return distillation_losses(model(**batch).last_hidden_state, target, batch, self.pools)

    def save_beside(self, folder: Path) -> None:
        if self.modules is not None:
            sentences.save(self.modules, self.tokenizer, folder)


def check_student(arguments: argparse.Namespace, given: list[str]) -> None:
    """Raises SystemExit if flags and model don't say what the student's encoding is, and who teaches it."""
    name, chosen = arguments.model_name_or_path, arguments.position_encoding
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{name}: {error}") from None
    if not hasattr(config, "position_encoding"):
        if not chosen:
            raise SystemExit(
                f"--position_encoding is missing: the one that {name} is to get. For a model that is patched already, its "
                "original is the --teacher"
            )
        return
    if arguments.calibrate:
        raise SystemExit(f"{name} is patched already: --calibrate goes with a model that isn't, and --position_encoding")
    if not arguments.teacher:
        host = config.position_spec.original
        original = (host and host.name_or_path) or "ORIGINAL"
        command = shlex.join(["python", "-m", "hf_posenc.training.distill", *given, "--teacher", original])
        raise SystemExit(f"{name} is patched already: name the model that it was made from,\n  {command}")


def load_teacher(
    arguments: argparse.Namespace, student: PreTrainedModel, tokenizer: Any, modules: Any
) -> tuple[PreTrainedModel, Any]:
    """The teacher, and its SentenceTransformer or None; `modules` is the student's. Raises SystemExit if it can't teach."""
    name = arguments.teacher or arguments.model_name_or_path
    try:
        # Loaded separately: a patched model shares its parameters with the model that it was made from.
        found = sentences.load(name) if arguments.teacher else modules
        teacher = AutoModel.from_pretrained(name, dtype=torch.float32) if found is None else found[0].model
        report = hf_posenc.inspect(teacher)
        if report.can_unpatch:
            raise ValueError("it is patched: a teacher has the positions that it was trained with")
        if report.ignored:
            raise ValueError(
                f"its outputs are wrong. {report.ignored[0]}, and `hf-posenc patch {name} relative_key` saves it as a teacher"
            )
        known = (required_tokenizer(name) if found is None else found.tokenizer).get_vocab()
        if known != tokenizer.get_vocab():
            raise ValueError(f"its tokenizer knows other tokens ({len(known)}) than the student's ({len(tokenizer)})")
        ours, theirs = student.config.hidden_size, teacher.config.hidden_size
        if ours != theirs:
            raise ValueError(f"its hidden states are {theirs} wide, the student's {ours}")
        if found is not None and modules is not None:
            ours, theirs = modules.get_embedding_dimension(), found.get_embedding_dimension()
            if ours != theirs:
                raise ValueError(f"its embeddings have {theirs} dimensions, the student's {ours}")
        usable = report.max_length
        if usable is not None and usable < arguments.text_length:
            raise ValueError(f"its usable length is {usable} tokens: lower --text_length {arguments.text_length}")
    except (OSError, ValueError) as error:
        raise SystemExit(f"the teacher {name}: {error}") from None
    return teacher.requires_grad_(False).eval(), found


def load_texts(accelerator: Accelerator, arguments: argparse.Namespace) -> dict[str, Any]:
    """The splits of --train_file or --dataset_name, or else the documentation of the standard library."""
    if arguments.train_file or arguments.dataset_name:
        return data.check_texts(data.load_splits(accelerator, arguments), arguments.text_column)
    texts = stdlib_corpus.split(progress=accelerator.is_main_process)[1]
    texts = stdlib_corpus.joined(texts) if arguments.long_text_length else texts
    accelerator.print(
        f"neither --train_file nor --dataset_name: training on {len(texts)} passages of the documentation of Python's "
        "standard library"
    )
    return {"train": Dataset.from_dict({arguments.text_column: texts})}


def calibrating(arguments: argparse.Namespace, texts: Any, tokenizer: Any) -> dict[str, Any]:
    """The argument by which `load_model` converts the student instead of patching it; none where it is only to be patched.

    Raises SystemExit for --calibrate with an encoding that doesn't act in attention.
    """
    chosen = arguments.position_encoding
    if not chosen or arguments.calibrate is False:
        return {}
    spec = hf_posenc.PosEncBertConfig.from_dict({}, position_encoding=chosen).position_spec
    if {*spec.encoding.mechanisms()} <= {"embed"}:
        if arguments.calibrate:
            raise SystemExit(f"--calibrate: {spec.type!r} doesn't act in attention, so there is nothing to fit; leave it out")
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
    # If one of them is a SentenceTransformer, its modules pool the other, too.
    ours, theirs = theirs if ours is None else ours, ours if theirs is None else theirs
    if ours is not None and arguments.push_to_hub:
        raise SystemExit(
            "--push_to_hub sends no modules of sentence-transformers: leave it out, and push by "
            f"SentenceTransformer({str(arguments.output_dir)!r}).push_to_hub({arguments.hub_model_id!r})"
        )
    accelerator.print(f"embeddings are pooled by {sentences.described(ours)}")
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
            raise SystemExit("the teacher changed while it taught: its parameters are shared with the student's")
        return {"teacher_checksum": {"before": before, "after": after}}

    loop.train(accelerator, arguments, task, student, tokenizer, rows, "distillation", teachers)


if __name__ == "__main__":
    terminals.set_up()
    main()
