"""Signs that a host knows positions in a way which no source takes over, and modules that see order by themselves."""

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

WORDS = frozenset(["alibi", "wpe", "pos", "position", "positional", "positions", "relative", "rel", "rope", "rotary"])
"""Words of names that speak of positions; whole words, so that "decomposition" and "properties" are none."""
OTHER_SOURCES = "other sources of position"
PLACE_ON_A_PAGE = re.compile(r"[xyhw]_position_embeddings$")
"""LayoutLM's tables of box coordinates, which are an input of their own and know nothing of word order."""
CONVOLUTIONS = "convolutions, which see the order of their inputs"
JOINED = "inputs joined to their neighbours"
STATES = frozenset(["update_conv_state", "update_recurrent_state", "set_linear_cache"])
"""Methods of caches that keep a state which a layer carries from token to token: linear attention, state spaces."""


def sees_order(module: nn.Module) -> bool:
    """Whether a module tells orders of its inputs apart by itself: it holds a convolution, or carries a state from token to
    token."""
    return _carries_state(module) or any(_convolves(child) for child in module.children())


def _carries_state(module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    return not STATES.isdisjoint(getattr(getattr(forward, "__code__", None), "co_names", ()))


def _convolves(module: nn.Module) -> bool:
    """Whether a module is a convolution. One whose stride is its kernel's size cuts patches out, each an input by itself."""
    return isinstance(module, nn.modules.conv._ConvNd) and max(module.kernel_size) > 1 and module.kernel_size != module.stride


def signs_of_position(stack: Any, modules: Mapping[str, nn.Module], claimed: Collection[str]) -> Iterator[tuple[str, str]]:
    """Path and reason of each sign among the modules of a stack, dotted path -> module, but for what sources claim."""
    for path, module in modules.items():
        name = path.rpartition(".")[2]
        if isinstance(module, nn.ModuleList) and claimed and all(f"{path}.{child}" in claimed for child in module._modules):
            continue
        if any(path == each or path.startswith(f"{each}.") for each in claimed) or PLACE_ON_A_PAGE.search(path):
            continue
        if path and WORDS & {*_words(name), *_words(type(module).__name__)}:
            yield path, OTHER_SOURCES
        elif type(module).__name__.endswith("Compressor"):
            yield path, "keys that stand for several tokens"
        elif "ngram" in type(module).__name__.lower():
            yield path, JOINED
        elif _convolves(module):
            yield path, CONVOLUTIONS
        elif _carries_state(module):
            yield path, "states carried from token to token, which see the order of their inputs"
        for key in (*module._parameters, *(key for key in module._buffers if key != "position_ids")):
            if WORDS & {*_words(key)}:
                yield f"{path}.{key}".lstrip("."), OTHER_SOURCES
    if getattr(stack.config, "trigram_input", False):
        yield "config.trigram_input", JOINED


def _words(name: str) -> list[str]:
    """The words of a name in snake_case or CamelCase, in lower case: RoPEAttention has rope and attention."""
    name = re.sub(r"RoPE", "Rope", name)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().split("_")
