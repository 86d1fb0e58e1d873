"""The three processes of test_distributed.py.

Two of them train and write checkpoints. Then all three resume from the checkpoints. There is only one launch, because
starting processes takes the most time. The test also imports the model, the batch, and the loop, and runs them in one process.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import DeviceMesh
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from models import patched, tokens

STEPS, SAVED = 5, 2
"""The number of steps, and the step after which a checkpoint is written."""
ROWS = 6
"""The number of examples in the global batch, which 1, 2, or 3 processes can share equally."""


def build(encoding: str) -> Any:
    model = patched("bert", encoding, "ForMaskedLM", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return model.train()


def batch(rank: int = 0, processes: int = 1) -> dict[str, torch.Tensor]:
    """The examples of a process, padded alternately on the right and on the left.

    All examples have the same number of labels, so the mean of the means is the overall mean.
    """
    ids, labels = tokens(ROWS, 11), tokens(ROWS, 11, seed=1)
    mask = torch.ones_like(ids)
    mask[::2, -3:], mask[1::2, :3] = 0, 0
    rows = slice(rank * ROWS // processes, (rank + 1) * ROWS // processes)
    return {"input_ids": ids[rows], "attention_mask": mask[rows], "labels": labels.masked_fill(mask == 0, -100)[rows]}


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    # The gradient of a key's bias is only rounding error. With the default eps, that error would cause a full step.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def train(
    model: Any,
    optimizer: Any,
    inputs: dict[str, torch.Tensor],
    steps: range,
    group: dist.ProcessGroup | None = None,
    after: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    """Train, and return the losses of the global batch and the norms of the encoding's gradients, by step."""
    losses: list[float] = []
    gradients: dict[str, list[float]] = {}
    for step in steps:
        loss = model(**inputs).loss
        loss.backward()
        for name, parameter in model.named_parameters():
            if "posenc." in name:
                gradients.setdefault(name.removeprefix("module."), []).append(whole(parameter.grad).norm().item())
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if group is not None:
            dist.all_reduce(loss, group=group)
            loss /= group.size()
        losses.append(loss.item())
        after(step + 1)
    return {"losses": losses, "gradients": gradients}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded(encoding: str, mesh: DeviceMesh) -> Any:
    model = build(encoding)
    for layer in model.base_model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def load(model: Any, folder: Path) -> Any:
    """The optimizer of a checkpoint, for the current number of processes.

    The function also loads the weights of the checkpoint into `model`.
    """
    optimizer = adamw(model)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return optimizer


def train_in_two(encoding: str, folder: Path, pair: dist.ProcessGroup) -> dict[str, Any]:
    inputs, rank = batch(pair.rank(), pair.size()), pair.rank()
    copied = DistributedDataParallel(build(encoding), process_group=pair)
    ddp = train(copied, adamw(copied), inputs, range(STEPS), pair)

    model = sharded(encoding, DeviceMesh.from_group(pair, "cpu"))
    optimizer = adamw(model)

    def save(step: int) -> None:
        if step == SAVED:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments}
            dcp.save(state, checkpoint_id=folder / "checkpoint", process_group=pair)

    fsdp = train(model, optimizer, inputs, range(STEPS), pair, save)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    model.save_pretrained(folder / "model", state_dict=state, is_main_process=rank == 0)
    return {"processes": pair.size(), "ddp": ddp, "fsdp": fsdp}


def resume_in_three(encoding: str, folder: Path, everyone: dist.ProcessGroup) -> dict[str, Any]:
    model = sharded(encoding, DeviceMesh.from_group(everyone, "cpu"))
    optimizer = load(model, folder)
    found = train(model, optimizer, batch(everyone.rank(), everyone.size()), range(SAVED, STEPS), everyone)
    return {"processes": everyone.size(), "fsdp": found}


def main(argv: list[str]) -> None:
    folder, encoding = Path(argv[0]), argv[1]
    dist.init_process_group("gloo")
    pair, everyone, rank = dist.new_group([0, 1]), dist.group.WORLD, dist.get_rank()
    trained = train_in_two(encoding, folder, pair) if rank < 2 else None
    dist.barrier()
    results = {"trained": trained, "resumed": resume_in_three(encoding, folder, everyone)}
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    # Threads of the smaller groups may still run. They sometimes abort a process that exits normally.
    os._exit(0)
