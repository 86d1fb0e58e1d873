"""Measures whole models: a forward pass, compiled or not, a training step, one step of decoding, and generation."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo
from torch._dynamo.utils import counters
from transformers import PreTrainedModel, masking_utils

from benchmarks.comparing import STOCK, Record, compared, peak
from benchmarks.grid import Group, Settings
from benchmarks.subjects import PROMPT, about, encoding_of, encodings, inputs, patched, scores_content, stock
from benchmarks.timing import Run, clocked

CACHE = "cache" if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters else "past_key_values"
"""The name of the cache argument of models, which Transformers 5.24 renamed."""
Step = Callable[[PreTrainedModel, Group, Settings], Run]


def compare(step: Step, group: Group, settings: Settings) -> dict[str, Record]:
    """Compare an original model with the same model with each encoding. They share parameters."""
    host, abouts = stock(group, settings), {}

    def build(name: str) -> Run:
        if name == STOCK:
            return step(host, group, settings)
        model = patched(host, name, group, settings)
        abouts[name] = about(model)
        return step(model, group, settings)

    names = [STOCK, *encodings(group, settings)]
    subjects, timed = compared(names, build, group, settings)
    for name, run in timed.runs.items():
        subjects[name]["peak_mb"] = peak(run, settings)
    return {name: {**abouts.get(name, {}), **record} for name, record in subjects.items()}


def forward(model: PreTrainedModel, group: Group, settings: Settings) -> Run:
    """A forward pass without gradients."""
    given = inputs(group, settings)

    def run() -> None:
        with torch.no_grad():
            model(**given)

    return clocked(run, settings.clock)


def train(model: PreTrainedModel, group: Group, settings: Settings) -> Run:
    """A forward and backward pass. It omits the optimizer, which is the same for all models and would hide differences."""
    given = inputs(group, settings)
    model.train()

    def run() -> None:
        model(**given).last_hidden_state.float().square().mean().backward()

    return clocked(run, settings.clock, after=lambda: model.zero_grad(set_to_none=True))


def generate(model: Any, group: Group, settings: Settings) -> Run:
    """Greedy generation of as many tokens as the group's length, after prompts of PROMPT tokens."""
    prompts = inputs(group, settings)["input_ids"][:, :PROMPT]
    given = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "pad_token_id": 0}
    return clocked(lambda: model.generate(prompts, max_new_tokens=group.length, **given), settings.clock)


def compare_compiled(group: Group, settings: Settings) -> dict[str, Record]:
    """Compare forward passes of compiled models, and count graph breaks, and the recompilations for two further lengths."""
    counts: dict[str, Record] = {}

    def step(model: PreTrainedModel, group: Group, settings: Settings) -> Run:
        given = inputs(group, settings)
        compiled: Any = torch.compile(model)
        counters.clear()
        graphs = []
        for length in (group.length, group.length // 2, group.length // 4):
            with torch.no_grad():
                compiled(**{name: tensor[:, :length] for name, tensor in given.items()})
            graphs.append(counters["stats"]["unique_graphs"])
        breaks = sum(counters["graph_break"].values())
        counts[encoding_of(model) or STOCK] = {"graph_breaks": breaks, "recompilations": graphs[-1] - graphs[0]}
        return forward(compiled, group, settings)

    # All models run the same code, and torch limits how often one function is compiled.
    with dynamo.patch(recompile_limit=100):
        records = compare(step, group, settings)
    return {name: {**record, **counts.get(name, {})} for name, record in records.items()}


def compare_decoding(group: Group, settings: Settings) -> dict[str, Record]:
    """Compare the decoding of one token with a filled dynamic cache. The token is removed from the cache after each step.

    A model fills its own cache if its encoding depends on content, or if it stores keys with another head dimension. Other
    models get copies of the original model's cache, because its content doesn't affect their time, and a forward pass over all
    tokens takes seconds.
    """
    filled: list[Any] = []

    def own(model: Any, given: dict[str, Tensor]) -> Any:
        return model(**given).past_key_values

    def fits(model: Any, given: dict[str, Tensor]) -> bool:
        short = own(model, {name: tensor[:, :2] for name, tensor in given.items()})
        return short.layers[0].keys.shape[-1] == filled[0].layers[0].keys.shape[-1]

    def step(model: Any, group: Group, settings: Settings) -> Run:
        given = inputs(group, settings)
        with torch.no_grad():
            copied = filled and not scores_content(model) and fits(model, given)
            cache = copy.deepcopy(filled[0]) if copied else own(model, given)
        if not filled:
            filled.append(copy.deepcopy(cache))
        token = given["input_ids"][:, :1]

        def run() -> None:
            with torch.no_grad():
                model(input_ids=token, **{CACHE: cache})

        return clocked(run, settings.clock, after=lambda: cache.crop(-1))

    return compare(step, group, settings)
