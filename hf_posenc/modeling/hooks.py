"""Hooks of a model's layers that add the vectors of an encoding to hidden states.

Shapes: B batch, L tokens, D hidden_size. Hooks are partials of plain functions, so that a patched model can be copied and
pickled.
"""

import math
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.utils import ModelOutput

from hf_posenc import _compat
from hf_posenc.attention import dispatch
from hf_posenc.encodings.context import PatchLayout
from hf_posenc.signatures import BoundCall, argument_names

JOINED = {"UdopStack": "dropout", "ViltModel": "embeddings"}
"""Class of a stack that reads text and images -> path of the module whose output has the image's tokens behind the text."""


def before(module: nn.Module, parts: tuple[str, ...], token_axis: int = 1) -> None:
    """Register a hook that adds the vectors of these parts to the hidden states that enter a layer."""
    hook = partial(add_to_input, parts, argument_names(module), token_axis)
    module.register_forward_pre_hook(hook, with_kwargs=True)


def after(module: nn.Module, parts: tuple[str, ...], token_axis: int = 1, square: bool = False) -> None:
    """Register a hook that adds the vectors of these parts to the output of an attention block.

    square: whether it contains the tokens of square windows.
    """
    module.register_forward_hook(partial(add_to_output, parts, token_axis, square), with_kwargs=True)


def add_to_input(
    parts: tuple[str, ...], names: list[str], token_axis: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Pre-hook of a layer, whose first argument is the hidden states. Those of Swin also receive their rows and columns."""
    call = BoundCall(names, args, kwargs)
    hidden = call[names[0]]
    if (grid := call["input_dimensions"]) is not None:
        dispatch.context_for(module, kwargs.get(dispatch.CONTEXT)).record(grid=tuple(grid))
    return call.changed(**{names[0]: hidden + _vectors(parts, token_axis, module, kwargs, hidden)})


def add_to_output(
    parts: tuple[str, ...], token_axis: int, square: bool, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
) -> Any:
    """Hook of an attention block or of embeddings, whose only or first output is the hidden states."""
    if isinstance(output, ModelOutput):
        name, hidden = next(iter(output.items()))
        return type(output)(**{**output, name: hidden + _vectors(parts, token_axis, module, kwargs, hidden, square)})
    hidden, *others = output if isinstance(output, tuple) else (output,)
    hidden = hidden + _vectors(parts, token_axis, module, kwargs, hidden, square)
    return (hidden, *others) if isinstance(output, tuple) else hidden


def joined_at(stack: nn.Module) -> str:
    """The path of the module whose output has tokens without a position behind the text, or ""."""
    return next((JOINED[cls.__name__] for cls in type(stack).__mro__ if cls.__name__ in JOINED), "")


def record_tokens_behind(module: nn.Module, args: tuple, output: Any) -> None:
    """Hook of the module that appends tokens of another input to the text. Records that they have no position."""
    hidden = output[0] if isinstance(output, tuple) else output
    if (context := dispatch.CURRENT.context) is not None:
        context.record(extra_tokens=(0, hidden.shape[1] - context.positions.shape[1]))


def _vectors(
    parts: tuple[str, ...], token_axis: int, module: nn.Module, kwargs: dict[str, Any], hidden: Tensor, square: bool = False
) -> Tensor:
    """The vectors to add, `[1 or B, L, D]`, or with L on another axis. Extra tokens get zeros.

    They are computed once per forward pass, unless they are trained. If the hidden states have a row and a column axis, or no
    batch, the vectors get the same shape. The axis D can be before the rows (LW-DETR). If there are several channels before L,
    each gets the same vectors.
    """
    if (
        token_axis == 1
        and hidden.ndim == 4
        and _has_channels_first(hidden, dispatch.context_for(module, kwargs.get(dispatch.CONTEXT)).patches)
    ):
        return _vectors(parts, token_axis, module, kwargs, hidden.permute(0, 2, 3, 1), square).permute(0, 3, 1, 2)
    if token_axis == 2:
        length = math.prod(hidden.shape[2:])
    elif token_axis != 1:
        length = hidden.shape[token_axis]
    else:
        length = math.prod(hidden.shape[1:-1] if hidden.ndim > 2 else hidden.shape[:1])
    context = dispatch.context_for(module, kwargs.get(dispatch.CONTEXT)).with_length(length, hidden.device, square)
    here = [encoding for name, encoding in context.encoding.named_parts().items() if name in parts]

    def compute() -> Tensor:
        terms = (encoding("embed", context.coordinates(encoding.axes)) for encoding in here)
        total: Any = sum(vectors for vectors in terms if vectors is not None)
        vectors = total.to(hidden)
        if context.has_extra_tokens:
            vectors = context.pad_extra(vectors.transpose(-1, -2), dims=1).transpose(-1, -2)
        return vectors.movedim(1, token_axis)

    trained = any(encoding.is_trained() for encoding in here)
    vectors = compute() if trained else context.cached(("vectors", parts, hidden.dtype, hidden.device), compute)
    if hidden.ndim == 4 and token_axis == -2:
        return vectors[:, None]
    return vectors if hidden.ndim == 3 else vectors.reshape(*(hidden.shape if hidden.ndim == 2 else (-1, *hidden.shape[1:])))


def _has_channels_first(hidden: Tensor, patches: PatchLayout | None) -> bool:
    """Whether hidden states are `[B, D, rows, columns]` instead of `[B, rows, columns, D]`, by the grid of patches."""
    return patches is not None and patches.grid == tuple(hidden.shape[2:]) != tuple(hidden.shape[1:3])


def wrap_gradient_checkpointing(model: nn.Module) -> None:
    """Make gradient checkpointing use the positions of a forward pass also when it recomputes the layers."""
    for module in model.modules():
        checkpoint = vars(module).get(_compat.GRADIENT_CHECKPOINTING)
        if checkpoint is not None and getattr(checkpoint, "func", None) is not dispatch.checkpointed:
            setattr(module, _compat.GRADIENT_CHECKPOINTING, partial(dispatch.checkpointed, checkpoint))
