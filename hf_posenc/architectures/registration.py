"""Registration of custom classes: their positional components and their attention modules."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.architectures.components.component import is_transformers
from hf_posenc.architectures.components.registered import declare
from hf_posenc.attention import custom, intercept


def register_positions(cls: type[PreTrainedModel], path: str, disabled_output: Callable[[Any], Any] | None = None) -> None:
    """Register a positional component of a custom model class, so that `hf_posenc.patch` can replace it.

    `patch` finds components that are named and built like those of Transformers' models. Register only the others. Call this
    function in the module that defines the class, so that the registration takes effect wherever the class is imported.

    Args:
        cls: the model class that contains the component, usually the base model. Subclasses inherit the registration.
        path: dotted path of the component in `cls`: an `nn.Embedding` that is called with position IDs, a parameter or buffer
            `[..., positions, D]` that is added to hidden states, or, with `disabled_output`, any other module.
        disabled_output: a module-level function that maps the component's output to the output without positions, such as
            angles with cosine 1 and sine 0.

    Raises:
        ValueError: `cls` is not a subclass of `PreTrainedModel`, or is a class of Transformers, which needs no registration.
    """
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise ValueError(f"cls={cls!r} can't be registered. It must be a custom subclass of PreTrainedModel.")
    _refuse_transformers(cls)
    declare(cls, path, disabled_output)


def register_attention(
    cls: type[nn.Module], *, scaling: float | Callable[[Any, int], float] | None = None, is_causal: bool = False
) -> None:
    """Register a custom attention module that doesn't use Transformers' `ALL_ATTENTION_FUNCTIONS`.

    Its `forward` is not changed. The encoding modifies its first product of queries and keys, `[B, H, L, E]` by
    `[B, H, E, L]`, or its call of `scaled_dot_product_attention`. The hidden states are its argument `hidden_states`, or its
    first argument.

    Args:
        cls: the class of the module that multiplies queries and keys.
        scaling: the factor on the product of queries and keys. None means 1/√E. Pass 1.0 if queries or keys are scaled before
            the product, another number, or a function of the module and E. Ignored if the module calls
            `scaled_dot_product_attention`.
        is_causal: whether the module masks later tokens.

    Raises:
        ValueError: `cls` is not a module class, or is a class of Transformers.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"cls={cls!r} can't be registered. It must be a custom subclass of torch.nn.Module.")
    _refuse_transformers(cls)
    if scaling is None:
        scaling = custom.inverse_sqrt_head_dim
    elif not callable(scaling):
        scaling = _Constant(float(scaling))
    custom.add_row(cls, custom.CustomAttention(scaling, is_causal=is_causal, forward=intercept.forward))


class _Constant:
    """The same scaling for all modules."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, module: Any, head_dim: int) -> float:
        return self.value


def _refuse_transformers(cls: type) -> None:
    if is_transformers(cls):
        raise ValueError(
            f"{cls.__qualname__} is a class of Transformers, which needs no registration. Call hf_posenc.patch with its model."
        )


def names_in_code(cls: type) -> set[str]:
    """The names that the forward of a module class uses."""
    return {*getattr(getattr(inspect.unwrap(cls.forward), "__code__", None), "co_names", ())}  # type: ignore[attr-defined]
