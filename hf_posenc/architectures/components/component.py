"""Positional components: the parts of an original model that hold positions, and the error for those that can't be replaced."""

import abc
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posenc._versions import DOCS
from hf_posenc.encodings.context import CURRENT, PositionContext

HOSTS_PAGE = f"See {DOCS}/reference/models.md for supported models and alternatives."
OWN_PAGE = f"See {DOCS}/guides/custom_model.md for how to register positions and attention of custom classes."


class UnsupportedModelError(ValueError):
    """Raised for a model that doesn't support an encoding. The model isn't changed.

    The message ends with a remedy. docs/reference/models.md lists the reasons.

    message, remedy: the two parts of the text.
    reason: a short phrase that models with the same cause share.
    submodels: supported submodels, values for `submodel` of `patch`.
    """

    def __init__(self, message: str, reason: str = "", remedy: str = HOSTS_PAGE, submodels: tuple[str, ...] = ()) -> None:
        super().__init__(f"{message}. The model was not changed. {remedy}" if reason else message)
        self.message, self.reason, self.remedy, self.submodels = message, reason, remedy, submodels

    def of_own_class(self) -> "UnsupportedModelError":
        """The same error for a custom class, with a link to the page on registration."""
        return UnsupportedModelError(self.message, self.reason, self.remedy.replace(HOSTS_PAGE, OWN_PAGE), self.submodels)


class PositionComponent(abc.ABC):
    """A positional component of a stack. Each kind is a subclass, which registers itself when it is defined.

    A *stack* is an encoder or decoder: the part of a model that computes positions for a list of layers (BertModel,
    LlamaModel). Paths and keys are relative to it.

    path: dotted path of the component: a module, a parameter, a buffer, or an argument of a module.
    """

    kinds: ClassVar[list[type["PositionComponent"]]] = []
    """All kinds of components."""
    encoding: ClassVar[str]
    """The name of the hf-posenc encoding that is equivalent to these positions."""
    verb: ClassVar[str]
    """The mechanism of these positions, such as embed, rotate, or distance_bias."""
    arguments: ClassVar[tuple[str, ...]] = ()
    """Arguments of the original model's forward that pass such positions explicitly."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A notebook cell that runs again defines its class again.
        PositionComponent.kinds[:] = [*(kind for kind in PositionComponent.kinds if kind.__name__ != cls.__name__), cls]

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module = path, module

    @classmethod
    @abc.abstractmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator["PositionComponent"]:
        """The components of this kind in an original stack.

        modules: the modules to search, by dotted path.

        Raises UnsupportedModelError for a component that can't be replaced.
        """

    @classmethod
    def at(cls, path: str, stack: Any, modules: Mapping[str, nn.Module]) -> "PositionComponent":
        """The component of this kind at a path that `find` returned for a stack of the same class.

        Raises KeyError or AttributeError if there is none.
        """
        return cls(path, modules[path])

    def check(self, config: Any) -> None:
        """Raises KeyError, AttributeError, or TypeError if the module that a plan names isn't of this kind."""
        self.saved_shapes(None), self.width, self.offset, self.usable_length(config)

    @classmethod
    def claims(cls, module: nn.Module) -> bool:
        """Whether a module belongs to this kind, even if its name or class matches a more common kind."""
        return False

    @abc.abstractmethod
    def disable(self, stack: Any, adds_vectors: bool) -> None:
        """Disable this component in a stack whose encoding is `stack.posenc`.

        adds_vectors: whether the encoding's vectors replace the original ones at the input (see `accepts_embeddings`).
        """

    @property
    def claimed(self) -> tuple[str, ...]:
        """The paths of the modules and parameters that belong to this component."""
        return (self.path,)

    accepts_embeddings: ClassVar[bool] = False
    """Whether the original model adds the output of this component to its inputs."""

    layer_token_axis: ClassVar[int | None] = None
    """The token axis of the hidden states that enter the layers, such as -2 in `[B, channels, L, D]`. None: the attention's."""

    pads_rows: ClassVar[bool] = False
    """Whether the mask can hide tokens between others, because each row of a smaller image in a batch ends with padding."""

    @property
    def output_module(self) -> str | None:
        """The path of the module whose output `[B, L, D]` includes the original vectors, if others can be added to it."""
        return None

    @property
    def offset(self) -> int | None:
        """The position ID of the first token. None if the component doesn't depend on IDs."""
        return None

    @property
    def width(self) -> int | None:
        """The size of the vectors that this component adds. None if it adds no vectors."""
        return None

    def usable_length(self, config: Any) -> int | None:
        """The original model's maximum length in tokens. None for no limit."""
        return None

    def length_if_disabled(self, config: Any) -> int | None:
        """The maximum length in tokens of a model in which this component is disabled. None for no limit."""
        return None

    def trained_length(self, config: Any) -> int | None:
        """The length in tokens that these positions were trained for. It differs from the maximum if a rule extends them."""
        return self.usable_length(config)

    def saved_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        """The shapes of the learned tensors that `unpatch` needs, by key.

        rows: the length field of the original config.
        """
        return {}

    follows_rope_parameters: ClassVar[bool] = False
    """Whether the module computes its rotation from `rope_parameters` of the config."""

    @property
    def learned_table(self) -> tuple[str, int] | None:
        """The key of learned position embeddings `[rows, D]`, and the row of position 0. None for other components."""
        return None

    patches: int | None = None
    """The number of patches of an image that have a vector in `learned_table`. None for models that read tokens."""

    holds_t5_biases: ClassVar[bool] = False
    """Whether the learned tensor is a table of T5's biases by bucket, `[buckets, H]`."""

    @property
    def zeroed(self) -> str | None:
        """The key of a learned tensor that has no effect if it is 0, such as biases. None for other components."""
        return None

    def table(self) -> Tensor | None:
        """The original position embeddings from position 0 on, `[rows, D]`, if any. They can initialize an encoding."""
        return None


class Disabled(nn.Module):
    """Replaces a module of the original model, usually learned position embeddings `[rows, D]`.

    key: key of the module's weight, relative to the stack.
    """

    padding_idx = None
    """The original model's weight initialization may read it."""

    def __init__(self, stack: Any, path: str, table: Any) -> None:
        super().__init__()
        # In a tuple, so that the stack isn't registered as a child of its submodule.
        self._stack = (stack,)
        shape = getattr(getattr(table, "weight", None), "shape", ())
        self.key, self.shape = f"{path}.weight", tuple(shape)

    @property
    def context(self) -> PositionContext | None:
        """The current forward pass if it is one of the stack, or of a replica of the stack in nn.DataParallel."""
        (stack,), context = self._stack, CURRENT.context
        # A replica's encoding has other tensors, but the same options.
        return context if context is not None and context.encoding._options is stack.posenc._options else None

    @property
    def kept(self) -> Tensor | None:
        """The original weight if it is kept in `posenc.original`. Otherwise None."""
        (stack,) = self._stack
        try:
            return (stack.posenc if self.context is None else self.context.encoding).get_buffer(f"original.{self.key}")
        except AttributeError:
            return None

    @property
    def weight(self) -> Tensor:
        """The kept weight, or a temporary tensor that the original model's weight initialization can fill."""
        return torch.zeros(self.shape) if self.kept is None else self.kept

    def extra_repr(self) -> str:
        return f"in place of {self.key}"


def is_transformers(cls: type) -> bool:
    """Whether a class belongs to Transformers, rather than to a user or to remote code of a checkpoint."""
    return cls.__module__.startswith("transformers.")


def is_one_of(names: Collection[str], module: nn.Module) -> bool:
    """Whether the class of a module belongs to Transformers and has one of these names."""
    return type(module).__name__ in names and is_transformers(type(module))


def replace(stack: Any, path: str, module: nn.Module) -> None:
    """Replace the module at a path of a stack."""
    owner, _, attribute = path.rpartition(".")
    setattr(stack.get_submodule(owner), attribute, module)
