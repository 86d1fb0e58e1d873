"""Measures a model's attention function where the model calls it.

The function is found under the name in the attention module's config. In an original model it is that of Transformers. In a
patched model it is the function that applies the encoding and then calls that of Transformers. Each timed call is in a separate
forward pass, so it includes a bias that is computed once per forward pass.

Shapes: B batch, H heads, L tokens, E head_dim.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.comparing import STOCK, Record, compared
from benchmarks.grid import HEAD_DIM, Group, Settings
from benchmarks.memory import Peak
from benchmarks.subjects import about, encodings, inputs, patched, stock
from benchmarks.timing import CLOCKS, Run


class Alone:
    """Measures the time and memory of the attention function in a model with one layer.

    trained: whether the backward pass is included, to queries, keys, values, and the encoding's parameters.
    """

    def __init__(self, model: Any, group: Group, settings: Settings) -> None:
        self.model, self.trained = model, group.kind == "attention-train"
        self.inputs, self.now = inputs(group, settings), CLOCKS[settings.clock]
        module = model.encoder.layer[0].attention.self
        self.name = module.config._attn_implementation
        shape = (group.batch, group.length, group.heads, HEAD_DIM)
        generator = torch.Generator().manual_seed(settings.seed)
        self.gradient = torch.randn(shape, generator=generator).to(getattr(torch, group.dtype))
        self.seconds = self.bytes = 0.0

    def run(self) -> float:
        self._forward(self._timed)
        return self.seconds

    def peak_mb(self) -> float:
        """Peak memory in MB without queries, keys, values, the output, and in training the gradients of the inputs."""
        self._forward(self._counted)
        return round(self.bytes / 1e6, 2)

    def context(self) -> Any:
        """The PositionContext that the attention of a patched model receives in a forward pass."""
        seen = []

        def look(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            seen.append(kwargs["position_context"])
            return function(*args, **kwargs)

        self._forward(look)
        return seen[0]

    def _forward(self, within: Callable[..., Any]) -> None:
        ALL_ATTENTION_FUNCTIONS[self.name] = functools.partial(within, ALL_ATTENTION_FUNCTIONS[self.name])
        try:
            with torch.set_grad_enabled(self.trained):
                self.model(**self.inputs)
        finally:
            del ALL_ATTENTION_FUNCTIONS[self.name]
        self.model.zero_grad(set_to_none=True)

    def _timed(self, function: Callable[..., Any], module: Any, *states: Tensor, **kwargs: Any) -> Any:
        states = self._leaves(states)
        started = self.now()
        result = self._called(function, module, *states, **kwargs)
        self.seconds = self.now() - started
        return result

    def _counted(self, function: Callable[..., Any], module: Any, *states: Tensor, **kwargs: Any) -> Any:
        states = self._leaves(states)
        with Peak() as peak:
            result = self._called(function, module, *states, **kwargs)
        made = [result[0], *(state.grad for state in states[:3])]
        self.bytes = max(0, peak.bytes - sum(each.numel() * each.element_size() for each in made if each is not None))
        return result

    def _leaves(self, states: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs with queries, keys, and values detached from the graph. The mask after them is unchanged."""
        return (*(state.detach().requires_grad_(self.trained) for state in states[:3]), *states[3:])

    def _called(self, function: Callable[..., Any], module: Any, *states: Tensor, **kwargs: Any) -> Any:
        result = function(module, *states, **kwargs)
        if self.trained:
            result[0].backward(self.gradient)
        return (result[0].detach(), *result[1:])


def compare(group: Group, settings: Settings) -> dict[str, Record]:
    """Compare the attention of the original model with that of each encoding."""
    host, abouts = stock(group, settings, intermediate_size=HEAD_DIM), {}
    subjects: dict[str, Alone] = {}

    def build(name: str) -> Run:
        model = host
        if name != STOCK:
            model = patched(host, name, group, settings)
            abouts[name] = about(model)
        subjects[name] = Alone(model, group, settings)
        return subjects[name].run

    records, timed = compared([STOCK, *encodings(group, settings)], build, group, settings)
    for name in timed.runs:
        records[name]["peak_mb"] = subjects[name].peak_mb()
    return {name: {**abouts.get(name, {}), **record} for name, record in records.items()}
