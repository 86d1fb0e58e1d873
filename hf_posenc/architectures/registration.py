"""What users say of their own classes: where they have positions, and which of their modules are attentions."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.architectures.components.component import is_transformers
from hf_posenc.architectures.components.declared import declare
from hf_posenc.attention import custom, intercept


def register_positions(cls: type[PreTrainedModel], path: str, disabled_output: Callable[[Any], Any] | None = None) -> None:
    """Say where a class of your own has positions, so that `hf_posenc.patch` can take them over.

    Needed only where its names and forms differ from those of Transformers' own models: what `patch` finds by itself needs
    no line. Call it where the class is defined, so that it holds wherever the class is imported.

    Args:
        cls: the model which makes the positions, usually the base model. It holds for its subclasses, too.
        path: dotted path within it: an `nn.Embedding` called with position ids; a parameter or buffer of vectors `[..., rows,
            D]` that are added; or, with `disabled_output`, any other module.
        disabled_output: a function at the top level of a module: what the module answers -> the same without positions, as angles of
            cosine 1 and sine 0.

    Raises:
        ValueError: `cls` is a class of Transformers, which needs no such line.
    """
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise ValueError(f"{cls!r}: allowed is a subclass of PreTrainedModel, of your own")
    _refuse_transformers(cls)
    declare(cls, path, disabled_output)


def register_attention(
    cls: type[nn.Module], *, scaling: float | Callable[[Any, int], float] | None = None, is_causal: bool = False
) -> None:
    """Say that a module of your own computes attention by itself, without Transformers' ALL_ATTENTION_FUNCTIONS.

    Its first product of queries and keys, `[B, H, L, E]` by `[B, H, E, L]`, or its call of scaled_dot_product_attention, is
    where the encoding acts: its forward stays as it is. It reads `hidden_states` or whatever comes first.

    Args:
        cls: the module's class, in which queries and keys are multiplied.
        scaling: what the product is multiplied by afterwards: None for 1/√E, 1.0 if queries or keys are scaled before, a
            number, or a function of the module and E. A call of scaled_dot_product_attention says it by itself.
        is_causal: whether each token sees only those before it, and itself.

    Raises:
        ValueError: `cls` is no module, or one of Transformers' own.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"{cls!r}: allowed is a subclass of torch.nn.Module, of your own")
    _refuse_transformers(cls)
    if scaling is None:
        scaling = custom.inverse_sqrt_head_dim
    elif not callable(scaling):
        scaling = _Constant(float(scaling))
    custom.add_row(cls, custom.CustomAttention(scaling, is_causal=is_causal, forward=intercept.forward))


class _Constant:
    """A scaling that is the same for all modules."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, module: Any, head_dim: int) -> float:
        return self.value


def _refuse_transformers(cls: type) -> None:
    if is_transformers(cls):
        raise ValueError(f"{cls.__qualname__} is a class of Transformers itself: hf_posenc.patch knows those, or says why not")


def names_in_code(cls: type) -> set[str]:
    """What the forward of a module mentions."""
    return {*getattr(getattr(inspect.unwrap(cls.forward), "__code__", None), "co_names", ())}  # type: ignore[attr-defined]
