"""The modules of an encoder or decoder to whose outputs calibration adds vectors.

Positions can change the mean of these outputs. Only checkpoints of calibrated models contain this module.
"""

from typing import Any

from hf_posenc.architectures.structure import CROSS_ATTENTION, Structure


def contributions(structure: Structure, ranges: int = 1) -> dict[str, tuple[int, ...]]:
    """Shape of the vectors for each contribution, by path: `[D]`, or `[ranges, D]` for position embeddings with several ranges.

    Contributions are the position embeddings that are added to the inputs (for images, the sum of both), and the outputs that
    each layer adds to the residual stream: the last projections of its attention block and of its feed-forward block.
    """
    modules, width = structure.modules, structure.stack.config.hidden_size
    tables = (component for component in structure.components if component.accepts_embeddings)
    shape = (ranges,) if ranges > 1 else ()
    found = {component.path: (*shape, component.width) for component in tables if component.width is not None}
    if structure.tokens is None:
        found |= dict.fromkeys(structure.embedding_outputs, (width,))
    for block, layer in dict(zip(structure.blocks.values(), structure.layer_paths.values(), strict=True)).items():
        inside = [path for path, module in modules.items() if f"{path}.".startswith(f"{layer}.") and _projects(module, width)]
        inside = [path for path in inside if not CROSS_ATTENTION.search(path)]
        of_attention = [path for path in inside if f"{path}.".startswith(f"{block}.")]
        others = [path for path in inside if path not in of_attention]
        found.update((path, (width,)) for last in (of_attention, others) for path in last[-1:])
    return found


def _projects(module: Any, hidden_size: int) -> bool:
    """Whether a module is a linear layer with outputs of this size. Transformers' Conv1D stores its output size as `nf`."""
    width = getattr(module, "out_features", getattr(module, "nf", None))
    return isinstance(width, int) and width == hidden_size and hasattr(module, "weight")
