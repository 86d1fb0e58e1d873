"""The loop on Accelerate. Killed anywhere and resumed, a run goes on as if nothing had happened."""

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from huggingface_hub import is_offline_mode
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import PreTrainedModel, get_scheduler
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

import hf_posenc
from training import checkpoints, evaluation
from training.data import Numbered, Rows, endless

FREE_TO_CHANGE = {
    "output_dir", "resume_from_checkpoint", "checkpointing_steps", "keep_last", "with_tracking", "report_to", "push_to_hub",
    "hub_model_id", "hub_private_repo", "per_device_train_batch_size", "per_device_eval_batch_size",
    "gradient_accumulation_steps", "num_train_epochs", "gradient_checkpointing", "torch_compile", "torch_compile_backend",
}  # fmt: skip
"""Flags that a resumed run may have otherwise; the global batch and the number of steps are compared as such."""


class Task:
    """What a script adds to the loop. The losses of steps are means over `items`, however batches are cut."""

    best_by = "eval_loss"
    greater_is_better = False
    dropout = True

    def collate(self, rows: Rows, step: int | None = None) -> Any:
        """The batch of numbered rows, of a training step or of an evaluation."""
        raise NotImplementedError

    def items(self, batch: Any) -> int:
        """How many there are in a batch that its loss is the mean of."""
        return int((batch["labels"] != -100).sum())

    def loss(self, model: torch.nn.Module, batch: Any, step: int) -> Tensor:
        return model(**batch).loss

    def tokens(self, batch: Any) -> int:
        return int(batch["attention_mask"].sum())

    def evaluate(self, accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> dict[str, float]:
        """The metrics over all processes' rows."""
        raise NotImplementedError


def token_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """`[B, L, V]` and `[B, L]` with -100 where nothing is asked -> each row's sum of losses and its number of labels."""
    losses = F.cross_entropy(logits.float().mT, labels, reduction="none", ignore_index=-100)
    return losses.sum(1), (labels != -100).sum(1)


@dataclass
class Progress:
    """How far a run is: all of its state that lies in no model, optimizer, scheduler or random generator."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    best_step: int | None = None
    best: dict[str, float] = field(default_factory=dict)
    without_gain: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def train(
    accelerator: Accelerator,
    arguments: argparse.Namespace,
    task: Task,
    model: PreTrainedModel,
    tokenizer: Any,
    splits: dict[str, Any],
    name: str,
    about: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Train, evaluate, write checkpoints, and save the best or last model with `{name}.json` at --output_dir's root.

    `splits` have rows as the task collates them; what `about` says after training goes into the record, which is returned.
    """
    run = Run(accelerator, arguments, task, model, tokenizer, splits)
    run.resume()
    run.train()
    record = {**run.progress.best, **run.figures(), **about()}
    run.finish(record, name)
    accelerator.end_training()
    return record


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


class Run:
    """A training run, its parts prepared by Accelerate."""

    def __init__(
        self,
        accelerator: Accelerator,
        arguments: argparse.Namespace,
        task: Task,
        model: PreTrainedModel,
        tokenizer: Any,
        splits: dict[str, Any],
    ) -> None:
        self.accelerator, self.arguments, self.task, self.tokenizer = accelerator, arguments, task, tokenizer
        self.data, self.progress, self.output_dir = splits["train"], Progress(), arguments.output_dir
        self.kind = type(model)
        per_device = arguments.per_device_train_batch_size
        self.global_batch = per_device * accelerator.num_processes * arguments.gradient_accumulation_steps
        # A stream has no epochs that are known.
        self.steps_per_epoch = 0 if arguments.streaming else math.ceil(len(self.data) / self.global_batch)
        self.steps = arguments.max_train_steps or arguments.num_train_epochs * self.steps_per_epoch
        if accelerator.distributed_type == "FSDP":
            shard(accelerator, model)
        decayed = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim > 1]
        spared = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=arguments.learning_rate, weight_decay=arguments.weight_decay)
        # Not prepared: it then takes one step a step, however many processes there are, also after resuming with others.
        self.scheduler = get_scheduler(
            arguments.lr_scheduler_type, optimizer, arguments.num_warmup_steps, num_training_steps=self.steps
        )
        if accelerator.state.deepspeed_plugin:
            accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = per_device
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.validation: DataLoader | None = None
        if "validation" in splits:
            batch_size = arguments.per_device_eval_batch_size
            # Its own generator: evaluating draws nothing from what training draws from.
            loader = DataLoader(
                Numbered(splits["validation"]), batch_size=batch_size, collate_fn=task.collate, generator=torch.Generator()
            )
            self.validation = accelerator.prepare(loader)
        accelerator.register_for_checkpointing(self.progress, self.scheduler)
        # Dropout is to differ between processes.
        set_seed(arguments.seed, device_specific=True)
        if arguments.with_tracking:
            shown = {
                key: value if isinstance(value, (int, float, str, bool)) else str(value) for key, value in self._said().items()
            }
            accelerator.init_trackers("hf-posenc", config=shown)
        processes = f"{accelerator.num_processes} process{'es' * (accelerator.num_processes > 1)}"
        accelerator.print(
            f"{processes} on {accelerator.device.type}, precision {accelerator.mixed_precision}: "
            f"{self.steps} steps of {self.global_batch} rows ({per_device} x {accelerator.num_processes} x "
            f"{arguments.gradient_accumulation_steps} accumulated)"
        )

    def _bare(self, model: Any) -> Any:
        return self.accelerator.unwrap_model(model, keep_torch_compile=False)

    def _said(self) -> dict[str, Any]:
        said = {key: str(value) if isinstance(value, Path) else value for key, value in vars(self.arguments).items()}
        return {**said, "global_batch": self.global_batch, "steps": self.steps}

    def resume(self) -> None:
        """Go on from the checkpoint that is asked for. Raises SystemExit where the run would be another one."""
        chosen = self.arguments.resume_from_checkpoint
        if not chosen:
            return
        folder = checkpoints.newest(self.output_dir) if chosen == "latest" else Path(chosen)
        self.accelerator.wait_for_everyone()
        if folder is None:
            self.accelerator.print(f"{self.output_dir} has no complete checkpoint: from the start")
            return
        before = (checkpoints.manifest(folder) or {})["arguments"]
        now = json.loads(json.dumps(self._said()))
        for key in sorted((before.keys() | now.keys()) - FREE_TO_CHANGE):
            if before.get(key) != now.get(key):
                raise SystemExit(
                    f"{folder} was written with {key} {before.get(key)}, and this run has {now.get(key)}: resume with the "
                    "same, or start anew in another --output_dir"
                )
        self.accelerator.load_state(str(folder))
        self.accelerator.print(f"resumed from {folder}, after step {self.progress.step}")

    def train(self) -> None:
        arguments, progress, accelerator = self.arguments, self.progress, self.accelerator
        bar = tqdm(
            total=self.steps, initial=progress.step, desc="training", unit="step", disable=not accelerator.is_main_process
        )
        windows = self._windows()
        while progress.step < self.steps and not self._stopped():
            started = time.perf_counter()
            self.model.train(self.task.dropout)
            self._step(next(windows))
            progress.seconds += time.perf_counter() - started
            recent = progress.losses[-10:]
            bar.update()
            bar.set_postfix(
                loss=f"{sum(recent) / len(recent):.4f}", tokens_per_s=f"{progress.tokens / progress.seconds:.0f}", refresh=False
            )
            accelerator.log({"train_loss": recent[-1], "learning_rate": self.scheduler.get_last_lr()[0]}, step=progress.step)
            if self.validation and self._due(arguments.eval_steps or "epoch"):
                self._evaluate(self.validation)
            if self._due(arguments.checkpointing_steps):
                self._checkpoint()
        bar.close()
        self._check_weights()
        if self.validation and not (progress.evaluations and progress.evaluations[-1]["step"] == progress.step):
            self._evaluate(self.validation)

    def _windows(self) -> Iterator[list[Any]]:
        """The batches of this process that make a step, step after step."""
        size, processes = self.arguments.per_device_train_batch_size, self.accelerator.num_processes
        mine, window = [], []
        first = self.progress.step * self.global_batch
        for number, row in endless(self.data, self.arguments.seed, first, self.arguments.shuffle_buffer):
            if number // size % processes == self.accelerator.process_index:
                mine.append((number, row))
            if (number + 1) % (size * processes) == 0:
                window.append(self.task.collate(mine, number // self.global_batch + 1))
                mine = []
            if (number + 1) % self.global_batch == 0:
                yield window
                window = []

    def _step(self, window: list[Any]) -> None:
        accelerator, progress, task = self.accelerator, self.progress, self.task
        items = torch.tensor([[task.items(batch), task.tokens(batch)] for batch in window], device=accelerator.device)
        all_items, all_tokens = accelerator.reduce(items.sum(0), reduction="sum").tolist()
        total = torch.zeros((), device=accelerator.device)
        for batch, mine in zip(window, items[:, 0].tolist(), strict=True):
            batch = send_to_device(batch, accelerator.device)
            with accelerator.accumulate(self.model):
                # Where there is no item, its mean is NaN.
                loss = task.loss(self.model, batch, progress.step + 1)
                share = (loss if mine else loss.nan_to_num()) * (mine / max(all_items, 1))
                total += share.detach()
                # Accelerate takes the mean over accumulated batches, and DDP that over processes; ours are shares.
                accelerator.backward(share * (accelerator.num_processes * len(window)))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), self.arguments.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
        if not accelerator.optimizer_step_was_skipped:  # by fp16, where its scale was too large
            self.scheduler.step()
        loss = accelerator.reduce(total, reduction="sum").item()
        if not math.isfinite(loss):
            self._stop(f"the loss is {loss} at step {progress.step + 1}")
        progress.step += 1
        progress.tokens += all_tokens
        progress.losses.append(loss)

    def _stop(self, what: str) -> None:
        last = checkpoints.newest(self.output_dir)
        kept = f"{last} is the last good state" if last else "nothing was saved"
        raise SystemExit(f"{what}: lower --learning_rate, or look at the rows; {kept}")

    def _check_weights(self) -> None:
        parameters = (getattr(parameter, "_local_tensor", parameter) for parameter in self.model.parameters())
        wrong = torch.tensor(not all(parameter.isfinite().all() for parameter in parameters), device=self.accelerator.device)
        if self.accelerator.reduce(wrong.int(), reduction="sum"):
            self._stop(f"after step {self.progress.step} the weights are not finite")

    def _due(self, every: int | str | None) -> bool:
        steps = self.steps_per_epoch if every == "epoch" else int(every or 0)
        return bool(steps) and self.progress.step % steps == 0

    def _stopped(self) -> bool:
        return self.progress.without_gain >= (self.arguments.early_stopping_patience or math.inf)

    @torch.no_grad()
    def _evaluate(self, validation: DataLoader) -> None:
        """Measure, and keep the model if it is the best so far and the best is asked for."""
        progress, task = self.progress, self.task
        self.model.eval()
        metrics = {"step": progress.step, **task.evaluate(self.accelerator, self.model, validation)}
        if not math.isfinite(metrics[task.best_by]):
            self._stop(f"{task.best_by} is {metrics[task.best_by]} at step {progress.step}")
        self.accelerator.log(metrics, step=progress.step)
        progress.evaluations.append(metrics)
        better = not progress.best or (
            metrics[task.best_by] > progress.best[task.best_by]
            if task.greater_is_better
            else metrics[task.best_by] < progress.best[task.best_by]
        )
        progress.without_gain = 0 if better else progress.without_gain + 1
        shown = ", ".join(f"{key.removeprefix('eval_')} {value:.4f}" for key, value in metrics.items() if key != "step")
        self.accelerator.print(f"step {progress.step}: {shown}")
        if not self._keeps_best():
            progress.best = metrics
        elif better:
            self._check_weights()
            progress.best, progress.best_step = metrics, progress.step
            checkpoints.write(
                self.accelerator, self.output_dir / f"best_{progress.step}", self._save_model, {"step": progress.step}
            )
            self._prune()

    def _keeps_best(self) -> bool:
        return self.arguments.load_best_model_at_end or bool(self.arguments.early_stopping_patience)

    def _checkpoint(self) -> None:
        """Write all that going on needs."""
        self._check_weights()
        progress = self.progress
        epoch = self.arguments.checkpointing_steps == "epoch"
        name = f"epoch_{progress.step // self.steps_per_epoch}" if epoch else f"step_{progress.step}"
        about = {"step": progress.step, "best_step": progress.best_step, "arguments": self._said()}
        checkpoints.write(
            self.accelerator, self.output_dir / name, lambda folder: self.accelerator.save_state(str(folder)), about
        )
        self._prune()

    def _prune(self) -> None:
        if self.accelerator.is_main_process:
            checkpoints.prune(self.output_dir, self.arguments.keep_last, self.progress.best_step)
        self.accelerator.wait_for_everyone()

    def _save_model(self, folder: Path) -> None:
        """The model and its tokenizer, as AutoModel and AutoTokenizer read them."""
        model, tokenizer = self._bare(self.model), self.tokenizer
        weights = self.accelerator.get_state_dict(self.model)
        weights = {name.replace("_orig_mod.", ""): weight for name, weight in weights.items()}  # torch.compile's
        if not self.accelerator.is_main_process:
            return
        model.save_pretrained(folder, state_dict=weights)
        if tokenizer.is_fast:
            # Else the last cut would stay in tokenizer.json.
            tokenizer.backend_tokenizer.no_truncation()
        tokenizer.model_max_length = hf_posenc.inspect(model).max_length or VERY_LARGE_INTEGER
        tokenizer.save_pretrained(folder)

    def figures(self) -> dict[str, Any]:
        """What a record says of the run itself."""
        progress = self.progress
        return {
            "steps": progress.step,
            "epochs": progress.step / self.steps_per_epoch if self.steps_per_epoch else None,
            "seconds": round(progress.seconds, 1),
            "tokens_per_second": round(progress.tokens / progress.seconds) if progress.seconds else None,
            "processes": self.accelerator.num_processes,
            "device": self.accelerator.device.type,
            "best_step": progress.best_step,
            "arguments": self._said(),
            "losses": progress.losses,
            "evaluations": progress.evaluations,
        }

    def finish(self, record: dict[str, Any], name: str) -> None:
        """Put the best or last model and the record at the root of --output_dir, and push it if that is asked for."""
        accelerator, arguments = self.accelerator, self.arguments
        best = self.output_dir / f"best_{self.progress.best_step}"

        def fill(folder: Path) -> None:
            if not self._keeps_best():
                self._save_model(folder)
            elif accelerator.is_main_process:
                shutil.copytree(best, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(checkpoints.MANIFEST))
            if accelerator.is_main_process:
                (folder / f"{name}.json").write_text(json.dumps(record, indent=2))
                evaluation.write(folder, evaluation.of_training(record, self.kind.__name__))

        checkpoints.replace(accelerator, self.output_dir, fill, last=f"{name}.json")
        speed = f"{record['tokens_per_second']:,} tokens per second" if record["tokens_per_second"] else "done before"
        accelerator.print(f"{record['steps']} steps in {record['seconds']} s ({speed})")
        accelerator.print(f"model, tokenizer and {name}.json: {self.output_dir}")
        if accelerator.is_main_process and arguments.push_to_hub:
            private = True if arguments.hub_private_repo else None
            finished = self.kind.from_pretrained(self.output_dir)
            hf_posenc.push_to_hub(
                finished,
                arguments.hub_model_id,
                tokenizer=self.tokenizer,
                evaluation=self.output_dir / evaluation.FILE,
                figures=sorted(self.output_dir.glob("*.png")),
                private=private,
                save_directory=self.output_dir / "to_push" if is_offline_mode() else None,
            )
