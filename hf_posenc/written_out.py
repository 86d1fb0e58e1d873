"""Attentions which multiply queries and keys themselves, beside Transformers' attention interface: a row each.

Shapes: B batch, L tokens, D hidden_size.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from hf_posenc import attention
from hf_posenc.encodings import PositionContext


@dataclass(frozen=True)
class WrittenOut:
    """The names of an attention's projections; no `out` where that is another module's work."""

    query: str
    key: str
    value: str
    out: str | None = None


ROWS = {
    "MPNetSelfAttention": WrittenOut("q", "k", "v", "o"),
    "MegatronBertSelfAttention": WrittenOut("query", "key", "value"),
    "RemBertSelfAttention": WrittenOut("query", "key", "value"),
}
"""By class name; each computes softmax(QKᵀ/√E + mask) V and takes further keyword arguments."""


def row_of(module: nn.Module) -> WrittenOut | None:
    """The row of an attention of Transformers' own; a class of the same name elsewhere is another one."""
    return ROWS.get(type(module).__name__) if type(module).__module__.startswith("transformers.models.") else None


def install(stack: nn.Module, attentions: dict[str, nn.Module]) -> tuple[nn.Module, ...]:
    """Send these attentions of a stack through the interface. Returns the modules that the stack hands its positions to.

    The layers of such hosts pass no further keyword arguments on, so each module on the way hands the context to the next.
    """
    for module in attentions.values():
        module.forward = partial(attend, row_of(module), module)  # type: ignore[method-assign]
    hops = _hops(stack, [*attentions])
    for module, following in hops.items():
        if module is not stack:
            module.register_forward_pre_hook(partial(hand_on, following), with_kwargs=True)
    return hops.get(stack, ())


def _hops(stack: nn.Module, attentions: list[str]) -> dict[nn.Module, tuple[nn.Module, ...]]:
    """Each module on the way from the stack to these attentions -> the next ones, containers left out."""
    hops: dict[nn.Module, tuple[nn.Module, ...]] = {}
    for name in attentions:
        parts = name.split(".")
        way = [stack, *(stack.get_submodule(".".join(parts[: i + 1])) for i in range(len(parts)))]
        way = [module for module in way if not isinstance(module, nn.ModuleList)]
        for module, following in zip(way, [*way[1:], None], strict=True):
            known = hops.setdefault(module, ())
            if following is not None and following not in known:
                hops[module] = (*known, following)
    return hops


def leave(context: PositionContext, modules: tuple[nn.Module, ...]) -> None:
    """Store the context where `hand_on` takes it from."""
    for module in modules:
        module._posenc_context = context  # type: ignore[assignment]


def hand_on(following: tuple[nn.Module, ...], module: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Pre-hook of a module that is called without the context: takes the one stored for it, and stores it for the next."""
    context = kwargs.get(attention.CONTEXT) or vars(module).get("_posenc_context")
    if context is None:
        raise RuntimeError(
            f"{type(module).__name__} was called without positions: call the model itself, not a part of it, and without "
            "gradient checkpointing, whose second run of a layer loses them in this host"
        )
    module._posenc_context = None
    leave(context, following)
    return args, {**kwargs, attention.CONTEXT: context}


def attend(
    row: WrittenOut,
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    *,
    position_context: PositionContext | None = None,
    encoder_hidden_states: None = None,
    past_key_values: None = None,
) -> tuple[Tensor, ...]:
    """The forward of such an attention in an encoder, by way of the interface: `[B, L, D] -> [B, L, D]`."""
    heads = (*hidden_states.shape[:-1], -1, module.attention_head_size)
    query, key, value = (
        getattr(module, name)(hidden_states).view(heads).transpose(1, 2) for name in (row.query, row.key, row.value)
    )
    if position_bias is not None:
        attention_mask = position_bias if attention_mask is None else position_bias + attention_mask
    output, probabilities = attention.attend(
        "eager",
        module,
        query,
        key,
        value,
        attention_mask,
        position_context=position_context,
        scaling=module.attention_head_size**-0.5,
        dropout=module.dropout.p if module.training else 0.0,
    )
    output = output.flatten(-2)
    if row.out is not None:
        output = getattr(module, row.out)(output)
    return (output, probabilities) if output_attentions and probabilities is not None else (output,)
