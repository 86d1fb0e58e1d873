"""Tables of learned position vectors in models of images and sounds, bare parameters or embeddings: ViT, DINOv2, CLIP.

Such a host reads its table in ways of its own: it slices, interpolates, gathers. So the table is silenced where it lies: its
module becomes one of a subclass with the same name, in which the table's attribute answers zeros.
"""

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
"""Of a parameter, a tensor or an `nn.Embedding`."""
NOT_BY_TOKEN = (
    "mid_position_embeddings",
    "position_embedding_table",
    "class_pos_emb",
    "cls_position_embedding",
    "time_position_embeddings",
    "time_embeddings",
)
"""Those that don't have one vector for each patch: of several layers, of rows and columns, of frames, of a class token."""
SILENCED = "_posenc_silenced"
"""The attribute of a module that names its silenced parameters."""


class PositionParameter(PositionComponent):
    """A parameter of vectors `[..., rows, D]`, or a constant tensor of them, in a stack whose inputs aren't tokens.

    path: of the parameter. A table of one vector for each token also covers extra tokens.
    near: path and module of what reads it.
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
                f"hf-posenc doesn't support {type(stack).__name__} with several windows: each window of an image has its own "
                "class token, so the patches aren't contiguous",
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
        """The name of the table in its module."""
        return self.path.rpartition(".")[2]

    @property
    def _tensor(self) -> Tensor:
        return getattr(self.module, self.key)

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        disable(self.module, self.key, Zeros(stack, self.path, self.near, self._tensor))

    @property
    def output_module(self) -> str | None:
        # CLIP normalises what comes out, so its layers are no place for vectors of the same size.
        return None if self.key in NOT_BY_TOKEN else self.near_path or None

    @property
    def patches(self) -> int:
        """The number of patches that have a vector. Extra tokens that were added later have none (registers)."""
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

    def table(self) -> Tensor | None:
        """The vectors of the patches, where there is one for each."""
        if self.key in NOT_BY_TOKEN:
            return None
        vectors = self._tensor.flatten(0, -2)
        before = len(vectors) - self.extra_tokens[1] - self.patches
        return vectors[before : before + self.patches]


class Zeros:
    """What a silenced table answers: zeros of its shape, in the dtype and on the device of the modules around it."""

    def __init__(self, stack: nn.Module, path: str, near: nn.Module, table: Tensor) -> None:
        self.around, self.path, self.shape = (near, stack), path, tuple(table.shape)

    def __call__(self) -> Tensor:
        _, stack = self.around
        kept = [buffer for name, buffer in stack.named_buffers() if name == f"posenc.original.{self.path}"]
        tensors = [*self.around[0].parameters(), *kept, *stack.parameters()]
        like = next((tensor for tensor in tensors if not tensor.is_meta and tensor.is_floating_point()), tensors[0])
        device = like.device
        if like.is_meta:  # all other weights are offloaded now, or the whole model is on the meta device
            hooks = filter(None, map(accelerate_hook, (self.around[0], *stack.modules())))
            device = next((hook.execution_device for hook in hooks if hasattr(hook, "execution_device")), device)
        return torch.zeros(self.shape, dtype=like.dtype, device=device)


def disable(module: nn.Module, key: str, zeros: Zeros) -> None:
    """Make an attribute of a module, a parameter or a constant, answer zeros."""
    for place in (module._parameters, module._buffers, vars(module)):
        place.pop(key, None)
    silenced = {**vars(module).get(SILENCED, {}), key: zeros}
    vars(module)[SILENCED] = silenced
    host = next(cls for cls in type(module).__mro__ if SILENCED not in vars(cls))
    module.__class__ = _silent(host, tuple(silenced))


def disabled_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of a module that answer zeros instead."""
    return tuple(vars(module).get(SILENCED, ()))


@functools.cache
def _silent(host: type, keys: tuple[str, ...]) -> type:
    """A subclass of a host's class, of the same name, in which these attributes are computed."""
    body: dict[str, Any] = {key: property(_answering(key)) for key in keys}
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
        if key not in silenced:  # another model of this class, which is being built: its own attribute
            raise AttributeError(key)
        return silenced[key]()

    return zeros


def _reduced(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """For copies and pickles, which would look the class up by its name."""
    host = next(cls for cls in type(module).__mro__ if SILENCED not in vars(cls))
    return _new, (host, disabled_names(module)), vars(module).copy()


def _new(host: type, keys: tuple[str, ...]) -> Any:
    made: Any = _silent(host, keys)
    return made.__new__(made)
