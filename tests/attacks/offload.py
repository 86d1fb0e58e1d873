"""Accelerate's offloading: parts of a model on disk, or in memory until they are used. A CPU stands for the accelerator."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from transformers import AutoModel

from attacks.cases import Case, Comparison, Settings, new_folder, no_grad
from attacks.subjects import stock, subject, tokens

CPU = torch.device("cpu")
IDS = tokens(20).view(2, 10)


def cases(settings: Settings) -> Iterator[Case]:
    layers, little = ("h", "layers", "encoder"), {"cpu": "40KB", "disk": "1GB"}
    attacks: dict[str, Callable[[Any], Any]] = {
        "cpu_offload": lambda model: cpu_offload(model, CPU),
        "cpu_offload of its modules": lambda model: cpu_offload(model, CPU, offload_buffers=True),
        "disk_offload": lambda model: disk_offload(model, new_folder(), CPU),
        "disk_offload with buffers": lambda model: disk_offload(model, new_folder(), CPU, offload_buffers=True),
        "dispatch_model, layers on disk": lambda model: dispatched(model, layers),
        "dispatch_model, all but layers on disk": lambda model: dispatched(model, layers, others=True),
        "from_pretrained, auto": lambda model: loaded(model, device_map="auto", max_memory={"cpu": "1GB"}),
        "from_pretrained, little memory": lambda model: loaded(model, device_map="auto", max_memory=little),
        "from_pretrained, on the CPU": lambda model: loaded(model, device_map={"": "cpu"}),
        "from_pretrained, encoding on disk": lambda model: loaded(model, device_map=mapped(model, ("posenc",))),
        "from_pretrained, layers on disk": lambda model: loaded(model, device_map=mapped(model, layers)),
        "disk_offload, save, load": lambda model: loaded(disk_offload(model, new_folder(), CPU)),
    }
    for attack, change in attacks.items():
        for host in ("bert", "gpt2", "llama"):
            for encoding in settings.encodings:
                run = no_grad(offloaded, host, encoding, change)
                yield Case(attack, host, encoding, run, stock=functools.partial(alone, host, change))


def alone(host: str, change: Callable[[Any], Any]) -> Any:
    return change(stock(host))(IDS)


def offloaded(host: str, encoding: str, change: Callable[[Any], Any]) -> Iterator[Comparison]:
    """It gives what it gives at rest, with padding, and a second time."""
    it = subject(host, encoding)
    mask = torch.ones_like(IDS)
    mask[0, 7:] = 0
    model = change(it.model)
    for _ in range(2):
        output = model(IDS, attention_mask=mask)[0]
        yield output[0, :7], it.expected(IDS[0, :7])
        yield output[1], it.expected(IDS[1])


def mapped(model: Any, names: tuple[str, ...], others: bool = False) -> dict[str, Any]:
    """Children of these names on disk, or all the others."""
    return {name: "disk" if (name in names) != others else "cpu" for name, _ in model.named_children()}


def dispatched(model: Any, names: tuple[str, ...], others: bool = False) -> Any:
    places = mapped(model, names, others)
    return dispatch_model(model, places, main_device="cpu", offload_dir=new_folder(), force_hooks=True)


def loaded(model: Any, **more: Any) -> Any:
    folder = new_folder()
    model.save_pretrained(folder)
    return AutoModel.from_pretrained(folder, offload_folder=new_folder(), **more)
