"""Compares the speed of models by length. The models take turns, so that other load affects all of them equally.

Shapes: B texts in a batch, L tokens.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.benchmark import Timer

from hf_posenc.architectures.components import UnsupportedModelError
from hf_posenc.inspection import inspect
from hf_posenc.progress import ProgressBar
from hf_posenc.signatures import reads_tokens

LEAST = 0.05
"""Approximate minimum duration of a model's passes in a round, in seconds."""


@dataclass(frozen=True)
class Speed:
    """The speed of one model at one length.

    milliseconds: median time of a forward pass over all rounds.
    tokens_per_second: from the median time, with B · L tokens in a pass.
    ratio: median over rounds of the throughput, relative to the first model in the same round. None for the first model, and
        if the first model doesn't support the length.
    quartiles: first and third quartile of the ratios.
    """

    milliseconds: float
    tokens_per_second: float
    ratio: float | None
    quartiles: tuple[float, float] | None


@torch.inference_mode()
def speeds(
    models: Mapping[str, Any], lengths: Sequence[int], batch_size: int = 1, rounds: int = 10, seed: int = 0
) -> dict[int, dict[str, Speed]]:
    """Length -> name -> speed, for the models that support the length, on their devices.

    A forward pass has random input_ids `[B, L]`, no padding, and no cache. In an encoder-decoder, only the encoder is measured.

    Raises ValueError for a model that doesn't read token IDs, and for a length that no model supports.
    """
    found: dict[int, dict[str, Speed]] = {}
    reading = {name: _reader(name, model) for name, model in models.items()}
    with ProgressBar(total=len(lengths) * rounds, desc="rounds", leave=False) as bar:
        for length in lengths:
            timers = {
                name: _timer(model, length, batch_size, seed)
                for name, (model, usable) in reading.items()
                if usable is None or length <= usable
            }
            if not timers:
                raise ValueError(
                    f"length={length} is above the maximum length of {', '.join(models)}. Choose a smaller length."
                )
            passes = {name: _passes(timer) for name, timer in timers.items()}
            taken: dict[str, list[float]] = {name: [] for name in timers}
            for _ in range(rounds):
                for name, timer in timers.items():
                    taken[name].append(timer.timeit(passes[name]).mean)
                bar.update()
            base = taken.get(next(iter(models)))
            found[length] = {
                name: _speed(seconds, batch_size * length, None if seconds is base else base) for name, seconds in taken.items()
            }
    return found


def _reader(name: str, model: Any) -> tuple[Any, int | None]:
    """The model to measure, in eval mode and without its head, and its maximum length in tokens."""
    model = model.base_model
    model = model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model
    if not reads_tokens(model):
        raise ValueError(f"{name} doesn't read tokens. Choose a text model.")
    try:
        return model.eval(), inspect(model).max_length
    except UnsupportedModelError:  # Its maximum length is unknown.
        return model.eval(), None


def _timer(model: Any, length: int, batch_size: int, seed: int) -> Timer:
    size = len(model.get_input_embeddings().weight)
    ids = torch.randint(size, (batch_size, length), generator=torch.Generator().manual_seed(seed)).to(model.device)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if hasattr(model.config, "use_cache"):
        inputs["use_cache"] = False
    return Timer("model(**inputs)", globals={"model": model, "inputs": inputs}, num_threads=torch.get_num_threads())


def _passes(timer: Timer) -> int:
    """The number of passes in a round. It is estimated after a warm-up pass."""
    timer.timeit(1)
    return max(1, round(LEAST / timer.timeit(1).mean))


def _speed(seconds: list[float], tokens: int, base: list[float] | None) -> Speed:
    median = statistics.median(seconds)
    if base is None:
        return Speed(1000 * median, tokens / median, None, None)
    ratios = [theirs / ours for theirs, ours in zip(base, seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Speed(1000 * median, tokens / median, middle, (low, high))
