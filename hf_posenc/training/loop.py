"""The training loop with Accelerate. A killed and resumed run has the same results as an uninterrupted run."""

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, get_scheduler

from hf_posenc import _compat
from hf_posenc.progress import ProgressBar
from hf_posenc.training import checkpoints, output
from hf_posenc.training.data import Batches, Numbered
from hf_posenc.training.models import shard
from hf_posenc.training.task import Task

FREE_TO_CHANGE = {
    "output_dir", "resume_from_checkpoint", "checkpointing_steps", "keep_last", "with_tracking", "report_to", "push_to_hub",
    "hub_model_id", "hub_private_repo", "per_device_train_batch_size", "per_device_eval_batch_size",
    "gradient_accumulation_steps", "num_train_epochs", "gradient_checkpointing", "torch_compile", "torch_compile_backend",
    "dataloader_num_workers",
}  # fmt: skip
"""Options that a resumed run can change. Instead of those that determine them, the global batch and the steps are compared."""


@dataclass
class Progress:
    """The state of a run, without the states of the model, optimizer, scheduler, and random generators."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
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
    """Train, evaluate, write checkpoints, and save the best or last model with `{name}.json` to --output_dir.

    splits: examples that the task can collate. Returns the record, which contains the result of `about` after training.
    """
    run = Run(accelerator, arguments, task, model, tokenizer, splits)
    run.resume()
    run.train()
    record = {**run.progress.best, **run.figures(), **about()}
    best = run.best_folder() if run.keeps_best() else None
    output.finish(accelerator, arguments, run.save_model, run.kind, tokenizer, best, record, name)
    # DDP must be freed before the process group. If it holds the last reference, gloo's destructor can deadlock.
    del run
    accelerator.free_memory()
    accelerator.end_training()
    return record


class Run:
    """A training run, with its parts prepared by Accelerate."""

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
        self.global_batch = arguments.global_batch
        # The number of examples in a stream is unknown.
        self.steps_per_epoch = 0 if arguments.streaming else math.ceil(len(self.data) / self.global_batch)
        self.steps = arguments.max_train_steps or arguments.num_train_epochs * self.steps_per_epoch
        if accelerator.distributed_type == "FSDP":
            shard(accelerator, model)
        decayed = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim > 1]
        spared = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=arguments.learning_rate, weight_decay=arguments.weight_decay)
        # Not prepared, so that it advances once per step with any number of processes, which can change on resuming.
        self.scheduler = get_scheduler(
            arguments.lr_scheduler_type, optimizer, arguments.num_warmup_steps, num_training_steps=self.steps
        )
        if accelerator.state.deepspeed_plugin:
            accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = per_device
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.validation: DataLoader | None = None
        if "validation" in splits:
            batch_size = arguments.per_device_eval_batch_size
            loader = self._loader(Numbered(splits["validation"]), batch_size=batch_size, collate_fn=task.collate)
            self.validation = accelerator.prepare(loader)
        accelerator.register_for_checkpointing(self.progress, self.scheduler)
        # Dropout differs between processes.
        set_seed(arguments.seed, device_specific=True)
        if arguments.with_tracking:
            shown = {
                key: value if isinstance(value, (int, float, str, bool)) else str(value) for key, value in self._said().items()
            }
            accelerator.init_trackers("hf-posenc", config=shown)
        processes = f"{accelerator.num_processes} process{'es' * (accelerator.num_processes > 1)}"
        accelerator.print(
            f"{processes} on {accelerator.device.type}, precision {accelerator.mixed_precision}: "
            f"{self.steps} steps of {self.global_batch} examples ({per_device} x {accelerator.num_processes} x "
            f"{arguments.gradient_accumulation_steps} accumulated)"
        )

    def _said(self) -> dict[str, Any]:
        said = {key: str(value) if isinstance(value, Path) else value for key, value in vars(self.arguments).items()}
        return {**said, "steps": self.steps}

    def _loader(self, data: Any, **options: Any) -> DataLoader:
        device, workers = self.accelerator.device.type, self.arguments.dataloader_num_workers
        if workers is None:
            workers = 0 if device == "cpu" else 2
        if self.arguments.streaming:  # `datasets` shuffles streams differently in workers
            workers = 0
        # Its own generator keeps the random state of the training unchanged.
        generator = torch.Generator()
        return DataLoader(data, num_workers=workers, generator=generator, pin_memory=device == "cuda", **options)

    def batches(self) -> DataLoader:
        """The batches of this process from the current step on, in an endless stream."""
        arguments, accelerator = self.arguments, self.accelerator
        stream = Batches(
            self.data,
            self.task.collate,
            arguments.seed,
            arguments.shuffle_buffer,
            self.progress.step * self.global_batch,
            arguments.per_device_train_batch_size,
            self.global_batch,
            accelerator.process_index,
            accelerator.num_processes,
        )
        return self._loader(stream, batch_size=None)

    def resume(self) -> None:
        """Load the checkpoint of --resume_from_checkpoint. Raises SystemExit if changed options would change the results."""
        chosen = self.arguments.resume_from_checkpoint
        if not chosen:
            return
        folder = checkpoints.newest(self.output_dir) if chosen == "latest" else Path(chosen)
        self.accelerator.wait_for_everyone()
        if folder is None:
            self.accelerator.print(f"{self.output_dir} has no complete checkpoint, so training starts from the beginning.")
            return
        before = (checkpoints.manifest(folder) or {})["arguments"]
        now = json.loads(json.dumps(self._said()))
        for key in sorted((before.keys() | now.keys()) - FREE_TO_CHANGE):
            if before.get(key) != now.get(key):
                raise SystemExit(
                    f"{folder} was written with {key} {before.get(key)}, and this run has {key} {now.get(key)}. Resume with "
                    "the same value, or start a new run with another --output_dir."
                )
        self.accelerator.load_state(str(folder))
        self.accelerator.print(f"Resumed from {folder} after step {self.progress.step}.")

    def train(self) -> None:
        arguments, progress, accelerator = self.arguments, self.progress, self.accelerator
        bar = ProgressBar(
            total=self.steps, initial=progress.step, desc="training", unit="step", disable=not accelerator.is_main_process
        )
        batches = iter(self.batches())
        while progress.step < self.steps and not self._stopped():
            started = time.perf_counter()
            self.model.train(self.task.dropout)
            self._step(batches)
            progress.seconds += time.perf_counter() - started
            recent = progress.losses[-10:]
            bar.update()
            bar.set_postfix(
                loss=f"{sum(recent) / len(recent):.4f}", tokens_per_s=f"{progress.tokens / progress.seconds:.0f}", refresh=False
            )
            rate, norm = self.scheduler.get_last_lr()[0], progress.gradient_norms[-1]
            accelerator.log({"train_loss": recent[-1], "gradient_norm": norm, "learning_rate": rate}, step=progress.step)
            if self.validation and self._due(arguments.eval_steps or "epoch"):
                self._evaluate(self.validation)
            if self._due(arguments.checkpointing_steps):
                self._checkpoint()
        bar.close()
        self._check_weights()
        if self.validation and not (progress.evaluations and progress.evaluations[-1]["step"] == progress.step):
            self._evaluate(self.validation)

    def _step(self, batches: Iterator[Any]) -> None:
        accelerator, progress, task = self.accelerator, self.progress, self.task
        window = list(itertools.islice(batches, self.arguments.gradient_accumulation_steps))
        items = torch.tensor([[task.items(batch), task.tokens(batch)] for batch in window], device=accelerator.device)
        all_items, all_tokens = accelerator.reduce(items.sum(0), reduction="sum").tolist()
        total = torch.zeros((), device=accelerator.device)
        for batch, mine in zip(window, items[:, 0].tolist(), strict=True):
            batch = send_to_device(batch, accelerator.device, non_blocking=True)
            with accelerator.accumulate(self.model):
                # The mean over zero items is NaN.
                loss = task.loss(self.model, batch, progress.step + 1)
                share = (loss if mine else loss.nan_to_num()) * (mine / max(all_items, 1))
                total += share.detach()
                # Accelerate averages over accumulated batches, and DDP over processes. The shares must be summed.
                accelerator.backward(share * (accelerator.num_processes * len(window)))
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), self.arguments.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
        if not accelerator.optimizer_step_was_skipped:  # by fp16's gradient scaler
            self.scheduler.step()
        loss = accelerator.reduce(total, reduction="sum").item()
        if not math.isfinite(loss):
            self._stop(f"The loss is {loss} at step {progress.step + 1}")
        progress.step += 1
        progress.tokens += all_tokens
        progress.losses.append(loss)
        progress.gradient_norms.append(_compat.whole_tensor(norm).item())

    def _stop(self, what: str) -> None:
        last = checkpoints.newest(self.output_dir)
        kept = f"The last good checkpoint is {last}." if last else "Nothing was saved."
        raise SystemExit(f"{what}. Lower --learning_rate, or check the training data. {kept}")

    def _check_weights(self) -> None:
        parameters = map(_compat.local_tensor, self.model.parameters())
        wrong = torch.tensor(not all(parameter.isfinite().all() for parameter in parameters), device=self.accelerator.device)
        if self.accelerator.reduce(wrong.int(), reduction="sum"):
            self._stop(f"The weights are not finite after step {self.progress.step}")

    def _due(self, every: int | str | None) -> bool:
        steps = self.steps_per_epoch if every == "epoch" else int(every or 0)
        return bool(steps) and self.progress.step % steps == 0

    def _stopped(self) -> bool:
        return self.progress.without_gain >= (self.arguments.early_stopping_patience or math.inf)

    @torch.no_grad()
    def _evaluate(self, validation: DataLoader) -> None:
        """Evaluate. If the run keeps the best model and this one is better, save it."""
        progress, task = self.progress, self.task
        self.model.eval()
        batches = ProgressBar(validation, desc="evaluating", leave=False, disable=not self.accelerator.is_main_process)
        metrics = {"step": progress.step, **task.evaluate(self.accelerator, self.model, batches)}
        # All metrics are checked, because accuracy and F1 are finite even if the model's outputs aren't.
        for name, value in metrics.items():
            if not math.isfinite(value):
                self._stop(f"{name} is {value} at step {progress.step}")
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
        if not self.keeps_best():
            progress.best = metrics
        elif better:
            self._check_weights()
            progress.best, progress.best_step = metrics, progress.step
            checkpoints.write(self.accelerator, self.best_folder(), self.save_model, {"step": progress.step})
            self._prune()

    def keeps_best(self) -> bool:
        return self.arguments.load_best_model_at_end or bool(self.arguments.early_stopping_patience)

    def best_folder(self) -> Path:
        return self.output_dir / f"best_{self.progress.best_step}"

    def save_model(self, folder: Path) -> None:
        """Save the model with all its files. All processes must call it."""
        output.save_model(self.accelerator, self.model, self.tokenizer, folder)
        if self.accelerator.is_main_process:
            self.task.save_beside(folder)

    def _checkpoint(self) -> None:
        """Write everything that is needed to resume the run."""
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

    def figures(self) -> dict[str, Any]:
        """The part of a record that describes the run."""
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
            # Before clipping. They are infinite if fp16's gradient scaler skipped a step, which JSON can't represent.
            "gradient_norms": [norm if math.isfinite(norm) else None for norm in progress.gradient_norms],
            "evaluations": progress.evaluations,
        }
