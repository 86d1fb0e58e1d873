"""Encodings of one's own, whose values are made in `__init__`: patched, copied, saved, loaded, made from a config."""

import copy
import functools
import os
import pickle
import subprocess
import sys
import tempfile
import unittest.mock
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel

import hf_posenc
from attacks.cases import Case, Comparison, Settings, elsewhere, new_folder, no_grad
from attacks.own_kinds import DRAWN, FIXED, Own, Reference
from attacks.subjects import stock, tokens

IDS = tokens(12)[None]
WITHOUT = """
import sys, torch
sys.modules["hf_posenc"] = None
from transformers import AutoModel
ids, results = torch.load(sys.argv[1]), {}
for folder in sys.argv[2:]:
    try:
        with torch.no_grad():
            results[folder] = AutoModel.from_pretrained(folder, trust_remote_code=True)(ids)[0]
    except Exception as error:
        results[folder] = f"{type(error).__name__}: {error}"
torch.save(results, sys.argv[1])
"""
"""Loads models by the code in their folders."""


def cases(settings: Settings) -> Iterator[Case]:
    attacks: dict[str, Any] = {
        "patch": lambda model: model,
        "deepcopy": copy.deepcopy,
        "pickle": lambda model: pickle.loads(pickle.dumps(model)),
        "double": lambda model: model.double().float(),
        "save, load": lambda model: load(saved(model)),
        "save, load, save, load": lambda model: load(saved(load(saved(model)))),
        "save, load as bf16": lambda model: load(saved(model), dtype=torch.bfloat16).float(),
        "save, load in parts": lambda model: load(saved(model), device_map={"": "cpu"}),
        "load_state_dict": restored,
        "unpatch, patch": lambda model: hf_posenc.patch(hf_posenc.unpatch(model), model.config.position_encoding["type"]),
    }
    for attack, change in attacks.items():
        same = 5e-2 if "bf16" in attack else 1e-4
        for kind in (*FIXED, *DRAWN):
            yield Case(attack, "bert", kind.type, no_grad(changed, kind, change), same=same)
    for kind in (*FIXED, *DRAWN):
        yield Case("from_config", "bert", kind.type, no_grad(from_config, kind))
        yield Case("from_pretrained of a stock model", "bert", kind.type, no_grad(from_stock, kind))
    for kind in (*FIXED, *DRAWN):
        yield Case("save, load in another process", "bert", kind.type, no_grad(in_another_process, kind))
        yield Case("save, load without hf-posenc", "bert", kind.type, no_grad(without_hf_posenc, kind), limit=300)


@functools.cache
def patched(encoding: str) -> Any:
    return hf_posenc.patch(stock("bert"), encoding)


def changed(kind: type[Own], change: Any) -> Iterator[Comparison]:
    """The model gives what it gave, which is what the reference gives; drawn values are finite, and not nothing."""
    model = hf_posenc.patch(stock("bert"), kind.type)
    before = model(IDS)[0]
    if kind in FIXED:
        yield before, patched(Reference.type)(IDS)[0]
    else:
        yield sound(model), True
    yield change(model)(IDS)[0], before


def sound(model: Any) -> bool:
    values = model.base_model.posenc.slopes()
    return bool(values.isfinite().all()) and 1e-3 < float(values.abs().max()) < 100


def from_config(kind: type[Own]) -> Iterator[Comparison]:
    config = hf_posenc.PosEncBertConfig(**{**stock("bert").config.to_dict(), "model_type": "posenc-bert"})  # type: ignore[attr-defined]
    config.position_encoding = {"type": kind.type}
    with poisoned():
        yield from right(AutoModel.from_config(config), kind)


def from_stock(kind: type[Own]) -> Iterator[Comparison]:
    with tempfile.TemporaryDirectory() as folder, poisoned():
        stock("bert").save_pretrained(folder)
        yield from right(hf_posenc.PosEncBertModel.from_pretrained(folder, position_encoding=kind.type), kind)  # type: ignore[attr-defined]


def right(model: Any, kind: type[Own]) -> Iterator[Comparison]:
    if kind in FIXED:
        yield model.posenc.slopes().float(), torch.linspace(0.1, 0.4, 4)
    else:
        yield sound(model), True


def restored(model: Any) -> Any:
    """The weights in a model made from the same config."""
    twin = AutoModel.from_config(copy.deepcopy(model.config)).eval()
    twin.load_state_dict(model.state_dict())
    return twin


def saved(model: Any) -> str:
    folder = new_folder()
    model.save_pretrained(folder)
    return folder


def load(folder: str, **more: Any) -> Any:
    with poisoned():
        return AutoModel.from_pretrained(folder, **more)


def output(folder: str) -> Tensor:
    with torch.no_grad():
        return load(folder)(IDS)[0]


def in_another_process(kind: type[Own]) -> Iterator[Comparison]:
    model = patched(kind.type)
    yield elsewhere(output, saved(model)), model(IDS)[0]


@functools.cache
def all_without_hf_posenc() -> dict[str, Any]:
    """Name of an encoding -> the output of its model in a process that can't import hf-posenc, or the error there."""
    folders = {saved(patched(kind.type)): kind.type for kind in (*FIXED, *DRAWN)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "ids.pt")
        torch.save(IDS, file)
        environment = {**os.environ, "HF_MODULES_CACHE": str(Path(folder, "modules")), "PYTHONPATH": ""}
        subprocess.run([sys.executable, "-c", WITHOUT, file, *folders], check=True, capture_output=True, env=environment)
        return {folders[folder]: result for folder, result in torch.load(file).items()}


def without_hf_posenc(kind: type[Own]) -> Iterator[Comparison]:
    result = all_without_hf_posenc()[kind.type]
    if isinstance(result, str):
        raise RuntimeError(result)
    yield result, patched(kind.type)(IDS)[0]


@contextmanager
def poisoned() -> Iterator[None]:
    """Makes uninitialised memory NaN, so that whoever reads it is found out."""
    make = torch.empty_like

    def empty_like(*args: Any, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -7) if tensor.device.type != "meta" else tensor

    with unittest.mock.patch.object(torch, "empty_like", empty_like):
        yield
