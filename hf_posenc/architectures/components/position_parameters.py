"""Position embeddings of vision and audio models, stored as parameters, buffers, or `nn.Embedding`: ViT, DINOv2, CLIP.

Each model reads them differently: it slices, interpolates, or gathers. They are therefore disabled in place. The class of their
module is replaced by a subclass of the same name, in which the attribute is a property that returns zeros.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc._compat import accelerate_hook
from hf_posenc.architectures.components.component import PositionComponent, UnsupportedModelError
from hf_posenc.architectures.components.vision import count_extra_tokens, cuts_into_windows
from hf_posenc.signatures import reads_tokens

NAMES = (
    "position_embeddings",
    "position_embedding",
    "mid_position_embeddings",
    "embed_positions",
    "pos_embed",
    "positional_embedding",
    "position_embedding_table",
    "class_pos_emb",
    "cls_position_embedding",
    "time_position_embeddings",
    "time_embeddings",
)
"""Names of parameters, buffers, other tensors, or `nn.Embedding` modules."""
NOT_BY_TOKEN = (
    "mid_position_embeddings",
    "position_embedding_table",
    "class_pos_emb",
    "cls_position_embedding",
    "time_position_embeddings",
    "time_embeddings",
)
"""Names of those without one vector per patch: for several layers, rows and columns, frames, or a class token."""
SILENCED = "_posenc_silenced"
"""The attribute of a module that maps the names of its disabled tensors to their `Zeros`."""
INTERPOLATES = "interpolate_pos_encoding"
"""The method of a module that resizes its position embeddings for another image size."""


class PositionParameter(PositionComponent):
    """Position embeddings `[..., rows, D]`, learned or constant, in a stack that doesn't read token IDs.

    path: path of the tensor. If it has one vector per token, this includes extra tokens.
    near: path and module of the module that uses it.
    """

    encoding, verb = "learned", "embed"

    def __init__(self, path: str, module: nn.Module, extra_tokens: tuple[int, int], near: tuple[str, nn.Module]) -> None:
        super().__init__(path, module)
        self.extra_tokens, (self.near_path, self.near) = extra_tokens, near
        self.shape, self.is_learned = tuple(self._tensor.shape), self.key in module._parameters

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        if reads_tokens(stack):
            return
        extra_tokens = count_extra_tokens(modules)
        if any(extra_tokens) and cuts_into_windows(modules):
            raise UnsupportedModelError(
                f"{type(stack).__name__} adds a class token to each window of an image, so its patches aren't adjacent",
                reason="class tokens between patches",
                remedy="Load it with num_windows=1.",
            )
        for path, module in modules.items():
            owner, _, name = path.rpartition(".")
            if name in NAMES and type(module) is nn.Embedding:
                yield cls(f"{path}.weight", module, extra_tokens, (owner, modules.get(owner, stack)))
            else:
                tables = {**module._parameters, **module._buffers, **vars(module)}
                for key in (key for key in NAMES if isinstance(tables.get(key), Tensor)):
                    yield cls(f"{path}.{key}".lstrip("."), module, extra_tokens, (path, module))

    @classmethod
    def at(cls, path: str, stack: Any, modules: Mapping[str, nn.Module]) -> PositionComponent:
        owner, _, key = path.rpartition(".")
        table, (outer, _, name) = modules[owner], owner.rpartition(".")
        near = outer if key == "weight" and name in NAMES and type(table) is nn.Embedding else owner
        return cls(path, table, count_extra_tokens(modules), (near, modules.get(near, stack)))

    @property
    def key(self) -> str:
        """The name of the tensor in its module."""
        return self.path.rpartition(".")[2]

    @property
    def _tensor(self) -> Tensor:
        return getattr(self.module, self.key)

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        patches = 0 if self.key in NOT_BY_TOKEN else self.patches
        disable(self.module, self.key, Zeros(stack, self.path, self.near, self._tensor, patches))

    @property
    def output_module(self) -> str | None:
        # Vectors can't be added at the first layer instead, because CLIP normalizes this output before it.
        return None if self.key in NOT_BY_TOKEN else self.near_path or None

    @property
    def patches(self) -> int:  # type: ignore[override]
        """The number of patches that have a vector. Extra tokens that were added later (registers) have none."""
        rows = math.prod(self.shape[:-1])
        told = (getattr(module, "num_patches", None) for module in self.near.modules())
        counts = [count for count in told if isinstance(count, int) and count <= rows - self.extra_tokens[1]]
        return counts[0] if counts else rows - sum(self.extra_tokens)

    @property
    def width(self) -> int | None:
        return None if self.key in NOT_BY_TOKEN else self.shape[-1]

    def usable_length(self, config: Any) -> int | None:
        return None if self.key in NOT_BY_TOKEN else self.patches

    def saved_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        return {self.path: self.shape} if self.is_learned else {}

    @property
    def _first(self) -> int:
        """The row of the first patch."""
        return math.prod(self.shape[:-1]) - self.extra_tokens[1] - self.patches

    @property
    def learned_table(self) -> tuple[str, int] | None:
        return (self.path, self._first) if self.is_learned and self.key not in NOT_BY_TOKEN else None

    @property
    def zeroed(self) -> str | None:
        return self.path if self.is_learned and self.key in NOT_BY_TOKEN else None

    def table(self) -> Tensor | None:
        """The vectors of the patches. None if there isn't one vector per patch."""
        if self.key in NOT_BY_TOKEN:
            return None
        vectors = self._tensor.flatten(0, -2)
        return vectors[self._first : self._first + self.patches]


class Zeros:
    """Computes the value of a disabled tensor: zeros of its shape, with the dtype and device of the module that uses it.

    patches: number of rows of patches in a tensor `[..., rows, D]`. 0 for other tensors.
    """

    def __init__(self, stack: nn.Module, path: str, near: nn.Module, table: Tensor, patches: int) -> None:
        self.around, self.path, self.shape, self.patches = (near, stack), path, tuple(table.shape), patches

    def square(self) -> Tensor | None:
        """Zeros for the largest square grid in the grid of patches. None if that grid is a square, or there is none."""
        without = self.patches - math.isqrt(self.patches) ** 2
        if not without or self.shape[-2] < self.patches:
            return None
        return self((*self.shape[:-2], self.shape[-2] - without, self.shape[-1]))

    def __call__(self, shape: tuple[int, ...] | None = None) -> Tensor:
        near, stack = self.around
        like = next((tensor for tensor in self._tensors() if not tensor.is_meta and tensor.is_floating_point()), None)
        like = next(self._tensors()) if like is None else like
        device = like.device
        if like.is_meta:  # All other weights are offloaded, or the whole model is on the meta device.
            hooks = filter(None, map(accelerate_hook, (near, *stack.modules())))
            device = next((hook.execution_device for hook in hooks if hasattr(hook, "execution_device")), device)
        return torch.zeros(self.shape if shape is None else shape, dtype=like.dtype, device=device)

    def _tensors(self) -> Iterator[Tensor]:
        """Tensors with the dtype and device of the module, the nearest first. Each forward pass reads one, mostly the first."""
        near, stack = self.around
        yield from near.parameters()
        with contextlib.suppress(AttributeError):  # The original positions may not have been kept.
            yield stack.get_buffer(f"posenc.original.{self.path}")
        yield from stack.parameters()


def disable(module: nn.Module, key: str, zeros: Zeros) -> None:
    """Replace a parameter, buffer, or other tensor attribute of a module by zeros."""
    for place in (module._parameters, module._buffers, vars(module)):
        place.pop(key, None)
    silenced = {**vars(module).get(SILENCED, {}), key: zeros}
    vars(module)[SILENCED] = silenced
    host = next(cls for cls in type(module).__mro__ if SILENCED not in vars(cls))
    module.__class__ = _silent(host, tuple(silenced))


def disabled_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the disabled tensors of a module."""
    return tuple(vars(module).get(SILENCED, ()))


@functools.cache
def _silent(host: type, keys: tuple[str, ...]) -> type:
    """A subclass of a module class, with the same name, in which these attributes are properties that return zeros."""
    body: dict[str, Any] = {key: property(_answering(key)) for key in keys}
    if hasattr(host, INTERPOLATES):
        body[INTERPOLATES] = _interpolating(getattr(host, INTERPOLATES))
    body |= {
        "__module__": host.__module__,
        "__qualname__": host.__qualname__,
        "__doc__": host.__doc__,
        "__reduce_ex__": _reduced,
        SILENCED: None,
    }
    return type(host.__name__, (host,), body)


def _answering(key: str) -> Callable[[Any], Tensor]:
    def zeros(module: Any) -> Tensor:
        silenced = vars(module).get(SILENCED, {})
        if key not in silenced:  # the instance is still being built
            raise AttributeError(key)
        return silenced[key]()

    return zeros


def _interpolating(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The method of the original model that resizes position embeddings, which supports only square grids of patches."""

    @functools.wraps(original)
    def interpolate_pos_encoding(module: Any, *args: Any, **kwargs: Any) -> Tensor:
        zeros = {key: zeros.square() for key, zeros in vars(module).get(SILENCED, {}).items()}
        squares = {key: square for key, square in zeros.items() if square is not None}
        return original(_WithSquares(module, squares) if squares else module, *args, **kwargs)

    return interpolate_pos_encoding


class _WithSquares:
    """The attributes of a module, with zeros for square grids."""

    def __init__(self, module: nn.Module, squares: Mapping[str, Tensor]) -> None:
        self._module = module
        vars(self).update(squares)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _reduced(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """`__reduce_ex__` for copy and pickle, which would otherwise look up the class by name and find the original one."""
    host = next(cls for cls in type(module).__mro__ if SILENCED not in vars(cls))
    return _new, (host, disabled_names(module)), vars(module).copy()


def _new(host: type, keys: tuple[str, ...]) -> Any:
    made: Any = _silent(host, keys)
    return made.__new__(made)
