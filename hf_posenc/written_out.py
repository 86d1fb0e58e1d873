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


def install(module: Any) -> None:
    """Send such an attention through the interface."""
    module.forward = partial(attend, ROWS[type(module).__name__], module)


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
