"""Signs that a host knows positions in a way which no source takes over."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

WORDS = frozenset(["alibi", "wpe", "pos", "position", "positional", "positions", "relative", "rel", "rope", "rotary"])
"""Words of names that speak of positions; whole words, so that "decomposition" and "properties" are none."""
OTHER_SOURCES = "other sources of position"
PLACE_ON_A_PAGE = re.compile(r"[xyhw]_position_embeddings$")
"""LayoutLM's tables of box coordinates, which are an input of their own and know nothing of word order."""

KEYS_OVER = ("DiffusionGemmaModel", "PI0Model")
"""Models made of several, of which one reads the keys that another caches, and turns its queries by positions of its own."""


def hands_keys_over(module: nn.Module) -> bool:
    """Whether a model of Transformers' own gives the keys that one model in it has cached to another."""
    return any(kind.__name__ in KEYS_OVER and kind.__module__.startswith("transformers.") for kind in type(module).__mro__)


def signs_of_position(stack: Any, modules: Mapping[str, nn.Module], claimed: Collection[str]) -> Iterator[tuple[str, str]]:
    """Path and reason of each sign among the modules of a stack, dotted path -> module, but for what sources claim.

    A convolution whose stride is its kernel's size cuts patches out, each an input by itself.
    """
    for path, module in modules.items():
        name = path.rpartition(".")[2]
        if isinstance(module, nn.ModuleList) and claimed and all(f"{path}.{child}" in claimed for child in module._modules):
            continue
        if any(path == each or path.startswith(f"{each}.") for each in claimed) or PLACE_ON_A_PAGE.search(path):
            continue
        if path and WORDS & {*_words(name), *_words(type(module).__name__)}:
            yield path, OTHER_SOURCES
        elif (
            isinstance(module, nn.modules.conv._ConvNd) and max(module.kernel_size) > 1 and module.kernel_size != module.stride
        ):
            yield path, "convolutions, which see the order of their inputs"
        for key in (*module._parameters, *(key for key in module._buffers if key != "position_ids")):
            if WORDS & {*_words(key)}:
                yield f"{path}.{key}".lstrip("."), OTHER_SOURCES
    if getattr(stack.config, "trigram_input", False):
        yield "config.trigram_input", "inputs joined to their neighbours"


def _words(name: str) -> list[str]:
    """The words of a name in snake_case or CamelCase, in lower case: RoPEAttention has rope and attention."""
    name = re.sub(r"RoPE", "Rope", name)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().split("_")
