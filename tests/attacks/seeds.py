"""The same seed gives the same host, whatever encoding its config has."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

import hf_posenc
from attacks.cases import Case, Comparison, Settings, no_grad
from attacks.subjects import HOSTS, ITSELF, stock

AUTOS: dict[str, tuple[Any, ...]] = {
    "bert": (AutoModel, AutoModelForMaskedLM),
    "gpt2": (AutoModel, AutoModelForCausalLM),
    "llama": (AutoModel, AutoModelForCausalLM),
    "mpnet": (AutoModel, AutoModelForMaskedLM),
    "distilbert": (AutoModel, AutoModelForMaskedLM),
}


def cases(settings: Settings) -> Iterator[Case]:
    for host, autos in AUTOS.items():
        for auto in autos:
            for encoding in (name for name in settings.encodings if name != ITSELF):
                yield Case(f"from_config, {auto.__name__}", host, encoding, no_grad(seeded, host, auto, encoding))


def seeded(host: str, auto: Any, encoding: str) -> Iterator[Comparison]:
    expected, actual = (made(host, auto, each) for each in ("none", encoding))
    for name, value in actual.items():
        if "posenc." not in name:
            yield value, expected[name]


def made(host: str, auto: Any, encoding: str) -> dict[str, torch.Tensor]:
    config_class: Any = type(hf_posenc.patch(stock(host), "none").config)
    config = config_class(**HOSTS[host], position_encoding=encoding)
    torch.manual_seed(5)
    return dict(auto.from_config(config).named_parameters())
