"""Builds encodings within memory limits, with initialized values.

It doesn't draw from torch's generator, so that a model created from scratch has the same other weights with every encoding."""

import contextlib
import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_posenc._compat import INITIALIZED, non_persistent_buffers
from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.options import check_size
from hf_posenc.encodings.registry import encoding_class, options_of

Encodings = list[PositionEncoding | None]
_GLOBALS = threading.RLock()
_HERE = threading.local()
"""Whether models created in this thread get values."""
EMPTY = (torch.empty, torch.empty_like, Tensor.new_empty)


@contextlib.contextmanager
def global_rng_lock() -> Iterator[None]:
    """Lets one thread at a time change torch's generator, default dtype, or functions, which all threads share."""
    with _GLOBALS:
        yield


def build(encoding: dict[str, Any], geometry: Geometry) -> PositionEncoding:
    """One module with all parameters of a canonical dict. Raises ValueError above MAX_VALUES."""
    kind = encoding["type"]
    (module,) = build_within_limits(kind, lambda: [encoding_class(kind).built(geometry, **options_of(encoding))])
    assert module is not None
    return module


def build_within_limits(kind: str, make: Callable[[], Encodings]) -> Encodings:
    """The modules returned by `make`, on the device and in the dtype of the surrounding context.

    `make` first runs on the meta device, where tensors take no memory, to measure them. Then it runs on the CPU in any context:
    when Transformers loads a model, everything else is on the meta device, but the computations of `__init__` need values. In
    a meta context, encodings of this library that compute only saved tensors aren't built a second time.

    Raises ValueError if they have more than MAX_VALUES elements together, hold uninitialized memory, or have unsaved values
    that differ between two builds.
    """
    try:
        with torch.device("meta"):
            trial = make()
    except (RuntimeError, NotImplementedError):  # the class reads values of tensors
        trial = []
    for module in trial:
        _check_tensors(module)
    _check_size(kind, trial)
    device, dtype = torch.empty(0).device, torch.get_default_dtype()
    if device.type == "meta" and trial and all(map(_is_of_library, trial)) and all(map(_holds_all, trial)):
        return [module if module is None else placed(module, device, dtype) for module in trial]  # type: ignore[misc]
    built = with_values(make)
    _check_size(kind, built)
    if not all(map(_is_of_library, built)):
        from hf_posenc.encodings.determinism import differing

        if differing(built, trial) and (name := differing(built, with_values(make, draw=1))):
            raise ValueError(
                f"{name} of the {kind!r} encoding isn't saved and differs each time it is built. Make it a parameter or a "
                "persistent buffer, or draw it from a generator with a fixed seed."
            )
    for module in built:
        if module is not None and (device.type != "cpu" or dtype != torch.float32):
            placed(module, device, dtype)
        for tensor in _tensors(module).values():
            if not tensor.is_meta:
                mark(tensor)
    return built


def _is_of_library(encoding: nn.Module | None) -> bool:
    """Whether an encoding and its parts belong to this library."""
    parts = (part for part in encoding.modules() if isinstance(part, PositionEncoding)) if encoding is not None else ()
    return not any(part.is_custom() for part in parts)


def _holds_all(encoding: nn.Module | None) -> bool:
    """Whether all tensors of an encoding are saved with it, so that loading sets each value."""
    modules = encoding.modules() if encoding is not None else ()
    return not any(
        non_persistent_buffers(module) or any(isinstance(value, Tensor) for value in vars(module).values())
        for module in modules
    )


def placed(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Moves a module like `Module.to`, but keeps complex numbers."""
    return module._apply(lambda each: each.to(device, dtype if each.is_floating_point() else each.dtype))


def mark(thing: Tensor | nn.Module) -> None:
    """Mark a tensor or a whole module as loaded, so that Transformers doesn't initialize it."""
    setattr(thing, INITIALIZED, True)


def is_marked(thing: Tensor | nn.Module) -> bool:
    return getattr(thing, INITIALIZED, False)


def initialize_missing(encodings: Iterable[PositionEncoding]) -> None:
    """Initialize newly allocated tensors as their classes do. Tensors marked as loaded don't change."""
    encodings = list(encodings)
    for encoding in encodings if getattr(_HERE, "values", True) else ():
        encoding.check_values()
    # Nested encodings are initialized first, because the outer encoding may change them.
    waiting = [e for e in reversed(encodings) if not all(map(is_marked, _tensors(e).values()))]
    with torch.no_grad():
        for encoding, fresh in zip(waiting, with_values(lambda: [each.rebuilt() for each in waiting]), strict=True):
            values = _tensors(fresh)
            for name, tensor in _tensors(encoding).items():
                if name in values and not is_marked(tensor):
                    _give(tensor, values[name])
                mark(tensor)


def _give(tensor: Tensor, values: Tensor) -> None:
    """Set the values of a new tensor, without a copy if possible."""
    alike = all(getattr(tensor, name) == getattr(values, name) for name in ("shape", "dtype", "device", "layout"))
    if alike and type(tensor) is type(values) and type(tensor.data) is Tensor:
        tensor.data = values.data
    else:
        tensor.copy_(values)


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Lets models created in this context lack values that can't be computed, because they are only inspected."""
    before, _HERE.values = getattr(_HERE, "values", True), False
    try:
        yield
    finally:
        _HERE.values = before


@contextlib.contextmanager
def marked_as_loaded(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Marks tensors as loaded within the context, so that Transformers doesn't initialize them."""
    marked = [tensor for tensor in tensors if not is_marked(tensor)]
    for tensor in marked:
        mark(tensor)
    try:
        yield
    finally:
        for tensor in marked:
            delattr(tensor, INITIALIZED)


class _FillEmptyWithNaN(TorchFunctionMode):
    """Fills uninitialized memory with NaN."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.fill_(math.nan) if func in EMPTY and made.is_floating_point() else made


@global_rng_lock()
def with_values(make: Callable[[], Encodings], draw: int = 0) -> Encodings:
    """The modules returned by `make`, with values, on the CPU and in float32.

    draw: another number gives other random values. They depend on the state of torch's generator, which doesn't change.
    """
    seed = hashlib.sha256(torch.get_rng_state().numpy().tobytes() + bytes([draw])).digest()[:8]
    dtype = torch.get_default_dtype()
    if dtype != torch.float32:
        torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), _FillEmptyWithNaN():
            torch.default_generator.manual_seed(int.from_bytes(seed, "little"))  # torch.manual_seed also seeds GPUs
            built = make()
            for module in built:
                _check_tensors(module)
                parts = [] if module is None else [each for each in module.modules() if isinstance(each, PositionEncoding)]
                name = _empty(module)
                if name or not all(_resets(type(part)) for part in parts):
                    with torch.no_grad():
                        for part in parts:
                            if _empty(part) or not _resets(type(part)):
                                part.reset_parameters()
                    name = _empty(module)
                if name:
                    raise ValueError(
                        f"{type(module).__name__}.{name} has uninitialized memory. Set it in __init__ or reset_parameters."
                    )
                if not _is_of_library(module):  # Its __init__ may store a constant, which layers and models would share.
                    for tensor in _tensors(module).values():
                        tensor.data = tensor.data.clone()
    finally:
        if dtype != torch.float32:
            torch.set_default_dtype(dtype)
    return built


def _resets(cls: type) -> bool:
    """Whether an `__init__` of a class calls reset_parameters."""
    makers = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)]
    return any("reset_parameters" in getattr(getattr(maker, "__code__", None), "co_names", ()) for maker in makers)


def _check_tensors(module: nn.Module | None) -> None:
    """Raises ValueError for tensors that a checkpoint can't store."""
    if module is None:
        return
    names: dict[int, str] = {}
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        place = f"{type(module).__name__}.{name}"
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ValueError(f"{place} has no shape before the first call. Set its shape in __init__, from self.geometry.")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ValueError(f"{place} is a sparse or quantized tensor. Make it a dense tensor.")
        if names.setdefault(id(tensor), name) != name:
            raise ValueError(f"{place} and {names[id(tensor)]} are the same tensor. Register it only once.")


def _tensors(module: nn.Module | None) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {} if module is None else {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _empty(module: nn.Module | None) -> str | None:
    """The name of a tensor with uninitialized memory, or None."""
    valued = {name: tensor for name, tensor in _tensors(module).items() if tensor.is_floating_point() and not tensor.is_meta}
    # A sum takes one pass over the memory, but is also NaN for opposite infinities.
    return next((name for name, tensor in valued.items() if tensor.sum().isnan() and tensor.isnan().any()), None)


def _check_size(kind: str, modules: Encodings) -> None:
    tensors = [tensor for module in modules for tensor in _tensors(module).values()]
    largest = max((tensor.shape for tensor in tensors), key=math.prod, default=())
    check_size(f"The {kind!r} encoding, with tables of up to {tuple(largest)},", sum(map(Tensor.numel, tensors)))
