"""The two processes of test_contract.py. They run sharded, copied, and tensor-parallel models on the same inputs."""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

from checks.registry import Subject

HOSTS = ("llama", "mistral", "gemma3", "bart", "vit")
ENCODINGS = ("rope", "alibi", "sinusoidal")


def gradient(model):
    """The gradient of the last parameter that reads the inputs, so that all later parameters contribute to it."""
    ends = ("embed_tokens.weight", "shared.weight", "patch_embedding.weight", "patch_embeddings.projection.weight")
    return [parameter for name, parameter in model.named_parameters() if name.endswith(ends)][-1].grad


def outputs_and_gradient(it, model, inner):
    output = it.plain(model)
    output.square().mean().backward()
    found = gradient(inner)
    return output.detach(), found.full_tensor() if isinstance(found, DTensor) else found


def sharded(it, folder):
    model = it.twin()
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer)
    fully_shard(model)
    return outputs_and_gradient(it, model, model)


def copied(it, folder):
    model = it.twin()
    return outputs_and_gradient(it, DistributedDataParallel(model, find_unused_parameters=True), model)


@torch.no_grad()
def tensor_parallel(it, folder):
    path = folder / f"{it.name}-{it.encoding}"
    if dist.get_rank() == 0:
        it.model.save_pretrained(path)
    dist.barrier()
    model = type(it.model).from_pretrained(path, distributed_config=DistributedConfig(tp_size=2)).eval()
    return (it.plain(model),)


WAYS = {"FSDP2": sharded, "DDP": copied, "tensor parallel": tensor_parallel}


def main(argv):
    folder, found = Path(argv[0]), {}
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    for name, way in WAYS.items():
        for host in HOSTS:
            for encoding in ENCODINGS:
                try:
                    found[name, host, encoding] = way(Subject(host, encoding), folder)
                except Exception as error:  # both processes raise the same error
                    found[name, host, encoding] = f"{type(error).__name__}: {error}"
                dist.barrier()
    if dist.get_rank() == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
