"""Finds unsupported positional components, and modules that depend on token order."""

import functools
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

from torch import nn

from hf_posenc import _compat
from hf_posenc.architectures.components.component import is_one_of, is_transformers
from hf_posenc.architectures.components.vision import cuts_patches
from hf_posenc.signatures import argument_names, attributes_read, names_used

WORDS = frozenset(["alibi", "wpe", "pos", "position", "positional", "positions", "relative", "rel", "rope", "rotary"])
"""Words in names that indicate positions. Only whole words count, so "decomposition" and "properties" don't match."""
OTHER_COMPONENTS = "unsupported positional component"
OTHER_INPUTS = re.compile(
    r"(^|\.)([xyhw]_position_embeddings|rel_pos_[xy]_bias|visual_position_embeddings|entity_embeddings\.position_embeddings"
    r"|bbox_sinusoid_emb|bbox_sinusoid_emb\.[xy]_pos_emb)$"
)
"""Paths of embeddings that don't encode word order: coordinates of boxes on a page, and inputs besides the tokens."""
OF_OTHER_INPUTS = {
    "LayoutLMv3Model": "pos_embed",
    "MoonshineStreamingDecoder": "pos_emb",
    "ViltEmbeddings": "position_embeddings",
}
"""Class of a module of a stack that reads tokens -> its parameter or module for positions in an image, or in the encoder's
output."""
OF_BOXES = frozenset(["RelativePositionBiasHorizontal", "RelativePositionBiasVertical"])
"""Classes of modules that compute biases by the boxes of tokens on a page (UDOP)."""
SUMS = frozenset(["RelativePositionBiasAggregated"])
"""Classes of modules that only sum the biases of the modules in them."""
CONVOLUTIONS = "order-sensitive convolutions"
JOINED = "inputs concatenated with their neighbors"
STATES = frozenset(["update_conv_state", "update_recurrent_state", "set_linear_cache"])
"""Cache methods that store a layer's recurrent state: linear attention, state spaces."""


def is_order_sensitive(module: nn.Module) -> bool:
    """Whether a module depends on the order of its inputs, because it contains a convolution or has a recurrent state."""
    return _carries_state(module) or any(convolves(name, child) for name, child in module.named_children())


def _carries_state(module: nn.Module) -> bool:
    return not STATES.isdisjoint(names_used(type(module).forward))


def convolves(path: str, module: nn.Module) -> bool:
    """Whether a module is a convolution over tokens. Those that compute patches, with or without overlap, don't count."""
    is_one = isinstance(module, _compat.Convolution) and max(module.kernel_size) > 1 and module.kernel_size != module.stride
    return is_one and not cuts_patches(path, module)


_KEYS = "passes the keys that one submodel caches to another, which would need the same encoding"
COUPLED = "interleaved submodels"
MIXED = {
    "DiffusionGemmaModel": (_KEYS, COUPLED),
    "Gemma4UnifiedAssistantForCausalLM": (
        "reads the keys that another model caches, which would need the same encoding",
        COUPLED,
    ),
    "PI0Model": (_KEYS, COUPLED),
    "BridgeTowerModel": ("runs the layers of its submodels one by one, not the submodels themselves", COUPLED),
    "JevForDecision": ("can't be loaded with output_loading_info=True, which shows missing weights", "loading without checks"),
}
"""Composite models whose submodels can't be patched separately -> why not, and the reason that such models share."""


def why_mixed(module: nn.Module) -> tuple[str, str] | None:
    """Why no submodel of a Transformers model can be patched separately, and the reason that such models share, or None."""
    theirs = (kind.__name__ for kind in type(module).__mro__ if is_transformers(kind))
    return next((MIXED[name] for name in theirs if name in MIXED), None)


def unhandled_position_modules(stack: Any, modules: Mapping[str, nn.Module], claimed: Set[str]) -> Iterator[tuple[str, str]]:
    """Path and reason of each module or tensor that indicates unsupported positions.

    modules: the modules of a stack by dotted path.
    claimed: paths that belong to positional components, which are excluded.

    Modules that are never called don't count.
    """
    unused: list[str] = []
    inside = tuple(f"{each}." for each in claimed)
    read: set[str] | None = None
    of_other_inputs = {OF_OTHER_INPUTS.get(cls.__name__) for cls in type(stack).__mro__}
    for path, module in modules.items():
        name = path.rpartition(".")[2]
        if unused and path.startswith(tuple(f"{outer}." for outer in unused)):
            continue
        if isinstance(module, nn.ModuleList) and claimed and all(f"{path}.{child}" in claimed for child in module._modules):
            continue
        if is_one_of(OF_BOXES, module):
            unused.append(path)  # by the tokens' order
            continue
        if f"{path}.".startswith(inside) or OTHER_INPUTS.search(path) or path in of_other_inputs or is_one_of(SUMS, module):
            continue
        if path and (_names_positions(name) or _names_positions(type(module).__name__)) and not _treats_each_alone(module):
            read = attributes_read(modules.values()) if read is None else read
            if not name.isdigit() and name not in read:
                unused.append(path)
                continue
            if not (_is_given_a_table(module) or _holds_what_is_claimed(path, module, claimed)):
                yield path, OTHER_COMPONENTS
        elif type(module).__name__.endswith("Compressor"):
            yield path, "keys that represent several tokens"
        elif "ngram" in type(module).__name__.lower():
            yield path, JOINED
        elif convolves(path, module):
            yield path, CONVOLUTIONS
        elif _carries_state(module):
            yield path, "order-sensitive recurrent states"
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or key == "position_ids" or not _names_positions(key):
                continue
            if key in (OF_OTHER_INPUTS.get(cls.__name__) for cls in type(module).__mro__):
                continue
            if f"{path}.{key}".lstrip(".") not in claimed:
                yield f"{path}.{key}".lstrip("."), OTHER_COMPONENTS
    if getattr(stack.config, "trigram_input", False):
        yield "config.trigram_input", JOINED


def _treats_each_alone(module: nn.Module) -> bool:
    """Whether a module can't contain positions, regardless of its name: dropout, or a norm (such as that of the rotated part of
    keys in latent attention)."""
    return isinstance(module, nn.Dropout) or type(module).__name__.endswith("Norm")


def _is_given_a_table(module: nn.Module) -> bool:
    """Whether a module without direct tensors receives positions as an argument. YOLOS interpolates position embeddings, and
    SAM 3 has attentions named after the rotation that they receive."""
    own = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
    return not own and bool({"pos_embed", "position_embeddings"} & {*argument_names(module)})


def _holds_what_is_claimed(path: str, module: nn.Module, claimed: Set[str]) -> bool:
    """Whether a module has tensors, and all of them belong to positional components."""
    tensors = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    return bool(tensors) and all(f"{path}.{name}" in claimed for name in tensors)


@functools.lru_cache(maxsize=1024)
def _names_positions(name: str) -> bool:
    """Whether a name in snake_case or CamelCase has a word that indicates positions. RoPEAttention has rope and attention."""
    name = re.sub(r"RoPE", "Rope", name)
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().split("_")
    return not WORDS.isdisjoint(words)
