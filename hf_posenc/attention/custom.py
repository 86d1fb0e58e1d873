"""Descriptions of attentions that don't use Transformers' attention interface, one row each.

`known_models` has the rows of Transformers' own attentions. `intercept` has the forward method that applies an encoding in
them. A checkpoint contains these modules only if its model has such an attention.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from hf_posenc.signatures import names_used


def inverse_sqrt_head_dim(module: Any, head_dim: int) -> float:
    """1/√E, the scaling of most attentions."""
    return head_dim**-0.5


def unscaled(module: Any, head_dim: int) -> float:
    """1, for no scaling."""
    return 1.0


@dataclass(frozen=True)
class CustomAttention:
    """Describes an attention that doesn't use the attention interface.

    scaling: module, E -> the factor by which its forward method multiplies the product of queries and keys afterwards.
    scaled_before: module, E -> the factor by which it multiplies queries before that product.
    scales_keys: whether it multiplies keys instead.
    is_causal: whether each query sees only the keys up to its own, if the module doesn't indicate it.
    unsupported_inputs: its arguments for inputs other than the tokens, which have separate scores.
    token_axis: the token axis of the hidden states that enter its layer. If tokens have rows and columns, the first.
    block_token_axis: the token axis of the output of its block. None: the same.
    num_earlier_value_matmuls: the number of products of weights and values that it computes before that of the tokens.
    forward: module, its arguments -> the output of its forward method, with the encoding applied.
    """

    scaling: Callable[[Any, int], float | Tensor] = inverse_sqrt_head_dim
    scaled_before: Callable[[Any, int], float] = unscaled
    scales_keys: bool = False
    is_causal: bool = False
    unsupported_inputs: tuple[str, ...] = ()
    token_axis: int = 1
    block_token_axis: int | None = None
    num_earlier_value_matmuls: int = 0
    forward: Callable[..., Any] | None = None


ROWS: dict[str, CustomAttention] = {}
"""Keys are the directory and class of Transformers' own attentions, or the module and class of a custom attention."""

OTHER_INPUTS = {
    "idefics.IdeficsPerceiverAttention": "",
    "idefics.IdeficsVisionAttention": "",
    "lxmert.LxmertAttention": "r_layers|visn_self_att|visual_attention",
    "vjepa2.VJEPA2PoolerCrossAttention": "",
    "vjepa2.VJEPA2PoolerSelfAttention": "",
    "vjepa2.VJEPA2RopeAttention": "predictor",
}
"""Directory and class of an attention -> regular expression for its paths where it doesn't read the stack's tokens.

No encoding applies there."""

OTHER_PARTS = frozenset(
    [
        "idefics.IdeficsPerceiverResampler",
        "idefics.IdeficsVisionTransformer",
        "vits.VitsDurationPredictor",
        "vits.VitsHifiGan",
        "vits.VitsPosteriorEncoder",
        "vits.VitsResidualCouplingBlock",
        "vits.VitsStochasticDurationPredictor",
        "vjepa2.VJEPA2AttentivePooler",
        "vjepa2.VJEPA2Predictor",
    ]
)
"""Directory and class of modules that read another input, or the outputs of the last layer. They don't change."""


def add_row(cls: type[nn.Module], row: CustomAttention) -> None:
    """Add the row of a custom attention."""
    ROWS[f"{cls.__module__}.{cls.__qualname__}"] = row


def row_of(module: nn.Module) -> CustomAttention | None:
    """The row of one of Transformers' own attentions or of a custom attention, or None.

    A class of the same name outside Transformers is a different attention. The row of Transformers' own is ignored if this
    version of Transformers has moved the attention to its attention interface.
    """
    own = None if uses_interface(type(module)) else ROWS.get(name_of(module))
    return own or ROWS.get(f"{type(module).__module__}.{type(module).__qualname__}")


def uses_interface(cls: type[nn.Module]) -> bool:
    """Whether an attention calls a function from Transformers' `ALL_ATTENTION_FUNCTIONS`."""
    return "ALL_ATTENTION_FUNCTIONS" in names_used(cls.forward)


def name_of(module: nn.Module) -> str:
    """The directory and class of one of Transformers' own modules, or "" for other modules."""
    package, *path = type(module).__module__.split(".")
    return f"{path[1]}.{type(module).__name__}" if package == "transformers" and path[0] == "models" else ""


def reads_tokens(path: str, module: nn.Module) -> bool:
    """Whether the attention at a path reads the tokens of its stack, rather than another input, such as image regions."""
    others = OTHER_INPUTS.get(name_of(module))
    return others is None or re.search(others, path) is None


def is_causal(module: nn.Module) -> bool:
    """Whether the row of an attention says that each query sees only the keys up to its own."""
    row = row_of(module)
    return row is not None and row.is_causal


def token_axis(module: nn.Module) -> int:
    """The token axis of the hidden states that enter the layer of an attention. In torch.nn, it can be the first."""
    if isinstance(module, nn.MultiheadAttention):
        return 1 if module.batch_first else 0
    row = row_of(module)
    return 1 if row is None else row.token_axis


def block_token_axis(module: nn.Module) -> int:
    """The token axis of the output of the block of an attention."""
    row = row_of(module)
    return token_axis(module) if row is None or row.block_token_axis is None else row.block_token_axis


def install(module: Any) -> None:
    """Replace the forward method of such an attention with one that applies the encoding."""
    _replace_forward(module)
    module._replicate_for_data_parallel = partial(_replica, module)
    if isinstance(module, nn.MultiheadAttention):
        module.register_forward_pre_hook(call_attention)


def _replace_forward(module: Any) -> None:
    row = row_of(module)
    assert row is not None and row.forward is not None, f"{type(module).__name__} has no row"
    module.forward = partial(row.forward, module)


def _replica(module: Any) -> Any:
    """A replica for nn.DataParallel, whose forward method uses its own tensors."""
    replica = type(module)._replicate_for_data_parallel(module)
    _replace_forward(replica)
    return replica


def call_attention(module: nn.Module, args: Any) -> None:
    """A hook that does nothing. With any hook, nn.TransformerEncoderLayer calls its attention instead of a fused kernel."""
