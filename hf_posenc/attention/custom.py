"""What has to be known of attentions that don't go through Transformers' attention interface: a row each.

`known_models` has the rows of Transformers' own attentions, `intercept` the forward by which an encoding acts in them. A
checkpoint of a model without such an attention carries neither.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn


def inverse_sqrt_head_dim(module: Any, head_dim: int) -> float:
    """1/√E, as most attentions scale."""
    return head_dim**-0.5


def always_supported(module: Any) -> str:
    """No reason: an encoding can act."""
    return ""


@dataclass(frozen=True)
class CustomAttention:
    """What has to be known of an attention.

    scaling: module, E -> the factor by which its forward multiplies the product of queries and keys afterwards.
    is_causal: whether each query sees only the keys up to its own, where the module doesn't say it.
    closed: module -> why nothing can act in its product, so that vectors can be added to its inputs alone; "" where it can.
    unsupported_inputs: its arguments for inputs other than the tokens, with scores of their own.
    token_axis: of the hidden states that enter its layer.
    num_earlier_value_matmuls: the number of products of weights and values that it makes before that of the tokens.
    forward: module, its arguments -> what its forward returns, with the encoding in it.
    """

    scaling: Callable[[Any, int], float | Tensor] = inverse_sqrt_head_dim
    is_causal: bool = False
    closed: Callable[[Any], str] = always_supported
    unsupported_inputs: tuple[str, ...] = ()
    token_axis: int = 1
    num_earlier_value_matmuls: int = 0
    forward: Callable[..., Any] | None = None


ROWS: dict[str, CustomAttention] = {}
"""By folder and class of Transformers' own attentions; or by module and class of a user's."""


def add_row(cls: type[nn.Module], row: CustomAttention) -> None:
    """Add the row of a user's own attention."""
    ROWS[f"{cls.__module__}.{cls.__qualname__}"] = row


def row_of(module: nn.Module) -> CustomAttention | None:
    """The row of an attention of Transformers' own, where a class of the same name elsewhere is another one; or of a user's.

    None where this version of Transformers has moved the attention to its attention interface.
    """
    own = None if uses_interface(type(module)) else ROWS.get(name_of(module))
    return own or ROWS.get(f"{type(module).__module__}.{type(module).__qualname__}")


def uses_interface(cls: type[nn.Module]) -> bool:
    """Whether an attention calls a function from Transformers' `ALL_ATTENTION_FUNCTIONS`."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return "ALL_ATTENTION_FUNCTIONS" in getattr(code, "co_names", ())


def name_of(module: nn.Module) -> str:
    """Folder and class of a module of Transformers' own."""
    package, *path = type(module).__module__.split(".")
    return f"{path[1]}.{type(module).__name__}" if package == "transformers" and path[0] == "models" else ""


def is_causal(module: nn.Module) -> bool:
    """Whether each query of such an attention sees only the keys up to its own."""
    row = row_of(module)
    return row is not None and row.is_causal


def token_axis(module: nn.Module) -> int:
    """The axis of tokens in the hidden states that enter the layer of an attention."""
    row = row_of(module)
    return 1 if row is None else row.token_axis


def closed(module: nn.Module) -> str:
    """Why nothing can act in an attention, or ""."""
    row = row_of(module)
    return "" if row is None else row.closed(module)


def install(module: Any) -> None:
    """Let the encoding act in such an attention."""
    row = row_of(module)
    assert row is not None and row.forward is not None, f"{type(module).__name__} has no row"
    module.forward = partial(row.forward, module)
