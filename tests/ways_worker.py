"""The two processes of test_ways.py: sharded, copied and tensor-parallel models, each of which reads the same inputs."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

from test_ways import ENCODINGS, EVERY, HOSTS, Case, case, embeddings


def outputs_and_gradient(it: Case, model: Any, inner: Any) -> tuple[Any, Any]:
    """The outputs, and the gradient of what reads the inputs."""
    output = it.plain(model)
    output.square().mean().backward()
    gradient = embeddings(inner).grad
    return output.detach(), gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def sharded(it: Case, folder: Path) -> Any:
    model = it.twin
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer)
    fully_shard(model)
    return outputs_and_gradient(it, model, model)


def copied(it: Case, folder: Path) -> Any:
    model = it.twin
    return outputs_and_gradient(it, DistributedDataParallel(model, find_unused_parameters=True), model)


@torch.no_grad()
def tensor_parallel(it: Case, folder: Path) -> Any:
    path = folder / f"{it.host.name}-{it.encoding}"
    if dist.get_rank() == 0:
        it.model.save_pretrained(path)
    dist.barrier()
    model = type(it.model).from_pretrained(path, distributed_config=DistributedConfig(tp_size=2)).eval()
    return (it.plain(model),)


WAYS = {"FSDP2": sharded, "DDP": copied, "tensor parallel": tensor_parallel}


def main(argv: list[str]) -> None:
    folder = Path(argv[0])
    dist.init_process_group("gloo")
    found: dict[tuple[str, str, str], Any] = {}
    warnings.simplefilter("ignore")
    for name, way in WAYS.items():
        for host in [host for host, of in HOSTS.items() if of.kind in EVERY]:
            for encoding in ENCODINGS:
                try:
                    found[name, host, encoding] = way(case(host, encoding), folder)
                except Exception as error:  # the same in both processes
                    found[name, host, encoding] = f"{type(error).__name__}: {error}"
                dist.barrier()
    if dist.get_rank() == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
