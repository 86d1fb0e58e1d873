"""Positional components of a model, and the error for models that aren't supported."""

import abc
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

HOSTS_PAGE = "See docs/reference/models.md for supported models and alternatives."
OWN_PAGE = "See docs/guides/custom_model.md for how to register positions and attention in custom classes."


class UnsupportedModelError(ValueError):
    """Raised if hf-posenc can't apply an encoding to a model. The model is not changed.

    The message ends with a remedy. docs/reference/models.md lists the reasons.

    reason: a short phrase, the same for all models that are unsupported for this reason.
    submodels: the supported submodels, which are values of the argument `submodel` of `patch`.
    """

    def __init__(self, message: str, reason: str = "", remedy: str = HOSTS_PAGE, submodels: tuple[str, ...] = ()) -> None:
        super().__init__(f"{message}. The model was not changed. {remedy}" if reason else message)
        self.reason, self.submodels = reason, submodels

    def of_own_class(self) -> "UnsupportedModelError":
        """The same error for a custom class, whose positions and attention users can register."""
        said = UnsupportedModelError(str(self).replace(HOSTS_PAGE, OWN_PAGE), submodels=self.submodels)
        said.reason = self.reason
        return said


class PositionComponent(abc.ABC):
    """One place where a stack has positions. Each kind is a subclass in a file of its own, registered by existing.

    A *stack* is the part of a model which makes positions for a row of attentions (BertModel, LlamaModel). Paths and keys
    are relative to it.

    path: dotted path of the module that holds the positions.
    """

    kinds: ClassVar[list[type["PositionComponent"]]] = []
    """Every kind of source."""
    encoding: ClassVar[str]
    """The name of our encoding that these positions are equivalent to."""
    verb: ClassVar[str]
    """How they act: embed, rotate, distance_bias."""
    arguments: ClassVar[tuple[str, ...]] = ()
    """Arguments of the host's forward by which such positions could be given by hand."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        PositionComponent.kinds.append(cls)

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module = path, module

    @classmethod
    @abc.abstractmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator["PositionComponent"]:
        """The sources of this kind among the modules of a stock stack, dotted path -> module.

        Raises UnsupportedModelError for one that is recognised but can't be taken over.
        """

    @classmethod
    def at(cls, path: str, stack: Any, modules: Mapping[str, nn.Module]) -> "PositionComponent":
        """The source of this kind at a path that `find` once found in a stack of this class.

        Raises KeyError, or AttributeError, where there is none.
        """
        return cls(path, modules[path])

    def check(self, config: Any) -> None:
        """Raises KeyError, AttributeError or TypeError where a module that a plan names isn't of this kind."""
        self.saved_shapes(None), self.width, self.offset, self.usable_length(config)

    @classmethod
    def claims(cls, module: nn.Module) -> bool:
        """Whether a module that bears the name of a common table of vectors is of this kind instead."""
        return False

    @classmethod
    def check_config(cls, config: Any) -> None:
        """Raises ValueError for a config whose host would make such a source beyond all bounds, patched or not."""
        return

    @abc.abstractmethod
    def disable(self, stack: Any, adds_vectors: bool) -> None:
        """Take the host's positions out of a stack that has its encoding as `stack.posenc`.

        adds_vectors: whether the encoding's vectors are added at the input, in place of the host's (see `accepts_embeddings`).
        """

    @property
    def claimed(self) -> tuple[str, ...]:
        """The paths of the modules and parameters that make these positions."""
        return (self.path,)

    accepts_embeddings: ClassVar[bool] = False
    """Whether the host adds to its inputs what this source answers."""

    layer_token_axis: ClassVar[int | None] = None
    """The axis of tokens in the hidden states that enter layers, such as -2 of `[B, channels, L, D]`; None: the attention's."""

    @property
    def output_module(self) -> str | None:
        """The path of a module which adds the host's vectors to what it returns, `[B, L, D]`, if ours can be added there."""
        return None

    @property
    def offset(self) -> int | None:
        """The position id of the first token, if ids mean something to this source."""
        return None

    @property
    def width(self) -> int | None:
        """The size of the vectors that are added here, if it takes vectors."""
        return None

    def usable_length(self, config: Any) -> int | None:
        """The longest input in tokens that a stock host is made for."""
        return None

    def trained_length(self, config: Any) -> int | None:
        """The longest input that these positions were trained for, where they go on by a rule behind it."""
        return self.usable_length(config)

    def saved_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        """Key -> shape of the learned tensors that `unpatch` needs, for a host whose config says `rows`."""
        return {}

    follows_rope_parameters: ClassVar[bool] = False
    """Whether the module turns by `rope_parameters` of the config."""

    @property
    def learned_table(self) -> tuple[str, int] | None:
        """Of a learned table `[rows, D]` of consecutive positions the key of its parameter, and the row of position 0."""
        return None

    def table(self) -> Tensor | None:
        """The host's vectors of the positions from 0 on, `[rows, D]`, if it has them: an encoding may adopt them."""
        return None


class Disabled(nn.Module):
    """Replaces a module of the host's; most are learned tables, of the shape `rows × size`.

    key: of the module's weight, relative to the stack.
    """

    padding_idx = None
    """As of a table without a row for padding: the host's own initialisation may ask."""

    def __init__(self, stack: Any, path: str, table: Any) -> None:
        super().__init__()
        # In a tuple, so that the stack is not registered as a child of its own part.
        self._stack = (stack,)
        shape = getattr(getattr(table, "weight", None), "shape", ())
        self.key, self.shape = f"{path}.weight", tuple(shape)

    @property
    def kept(self) -> Tensor | None:
        """The host's own table, or None."""
        (stack,) = self._stack
        try:
            return stack.get_buffer(f"posenc.original.{self.key}")
        except AttributeError:
            return None

    @property
    def weight(self) -> Tensor:
        """For the host's own initialisation, which may fill its table: the kept one, or a scratch one."""
        return torch.zeros(self.shape) if self.kept is None else self.kept

    def extra_repr(self) -> str:
        return f"in place of {self.key}"


def is_transformers(cls: type) -> bool:
    """Whether a class is one of Transformers' own, not of a user's or of code that came with a checkpoint."""
    return cls.__module__.startswith("transformers.")


def is_one_of(names: Collection[str], module: nn.Module) -> bool:
    """Whether a module is of one of these classes of Transformers' own."""
    return type(module).__name__ in names and is_transformers(type(module))


def replace(stack: Any, path: str, module: nn.Module) -> None:
    """Replace the module at a path of a stack."""
    owner, _, attribute = path.rpartition(".")
    setattr(stack.get_submodule(owner), attribute, module)
