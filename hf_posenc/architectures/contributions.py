"""The modules of a stack whose outputs positions may change on average, to which calibration adds constant vectors.

A checkpoint of a model that wasn't calibrated doesn't carry this module.
"""

from typing import Any

from hf_posenc.architectures.structure import CROSS_ATTENTION, Structure


def contributions(structure: Structure) -> dict[str, int]:
    """Path -> width: the tables that are added to the inputs, and in each layer the last projections of the attention block and
    of the feed-forward block, whose outputs are added to the residual stream."""
    modules, width = structure.modules, structure.stack.config.hidden_size
    tables = (component for component in structure.components if component.accepts_embeddings)
    found = {component.path: component.width for component in tables if component.width is not None}
    for block, layer in dict(zip(structure.blocks.values(), structure.layer_paths.values(), strict=True)).items():
        inside = [path for path, module in modules.items() if f"{path}.".startswith(f"{layer}.") and _projects(module, width)]
        inside = [path for path in inside if not CROSS_ATTENTION.search(path)]
        of_attention = [path for path in inside if f"{path}.".startswith(f"{block}.")]
        others = [path for path in inside if path not in of_attention]
        found.update((path, width) for last in (of_attention, others) for path in last[-1:])
    return found


def _projects(module: Any, hidden_size: int) -> bool:
    """Whether a module is a linear layer onto hidden states. The width of Transformers' Conv1D is `nf`."""
    width = getattr(module, "out_features", getattr(module, "nf", None))
    return isinstance(width, int) and width == hidden_size and hasattr(module, "weight")
