"""extend: a patched model for longer inputs, with everything that it has learned."""

import copy
import functools
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn

from hf_posenc import spec as specs
from hf_posenc.embedding import PositionEmbedding, TokenPositionEmbedding
from hf_posenc.encodings import Geometry, PositionEncoding, checked_max_length, encoding_class, marked_as_loaded, refill
from hf_posenc.modeling import PosEncModelMixin
from hf_posenc.patching import changed_within, holds_a_model, refuse
from hf_posenc.spec import LENGTH_FIELD
from hf_posenc.structure import is_patched
from hf_posenc.transfer import refuse_wrapped, share, shell

M = TypeVar("M", bound=nn.Module)


def extend(model: M, max_length: int | None) -> M:
    """The same model for inputs of up to `max_length` tokens; all parameters are shared with `model`, as in `patch`.

    For encodings that are defined at every position, so that `max_length` is a promise and not a size. `model` itself stays
    usable and unchanged. The config's length field follows, and `unpatch` works as before.

    Args:
        model: a patched model, a SentenceTransformer with one, a `PositionEmbedding` or a `TokenPositionEmbedding`.
        max_length: the new longest input in tokens, no shorter than before; None: no limit.

    Raises:
        ValueError: the model isn't patched, its positions were made for its length (a learned table), or max_length is
            shorter than before.
    """
    checked_max_length(max_length)
    if holds_a_model(model):
        return changed_within(model, functools.partial(extend, max_length=max_length))
    if isinstance(model, TokenPositionEmbedding):
        twin = copy.copy(model)
        twin._modules = {**model._modules, "positions": extend(model.positions, max_length)}
        return twin
    if isinstance(model, PositionEmbedding):
        refuse_wrapped(model, "extend")
        return _extended_layer(model, max_length)
    refuse(model, "extend")
    if isinstance(model, PosEncModelMixin):
        return _extended_model(model, max_length)
    raise ValueError(
        f"{type(model).__name__} is not patched, and its own positions can't be extended; this gives it others, which go on: "
        f"hf_posenc.patch(model, 'alibi', max_length={max_length})"
    )


def _extended_layer(layer: Any, max_length: int | None) -> Any:
    config = copy.deepcopy(layer.config)
    config.max_length = max_length
    kind, anew = config.position_encoding["type"], "a new layer"
    _check(kind, layer.posenc.geometry, layer.config.max_length, max_length, anew)
    return _rebuilt(layer, config, kind, anew)


def _extended_model(model: Any, max_length: int | None) -> Any:
    spec, anew = specs.read(model.config), "hf_posenc.patch(hf_posenc.unpatch(model), …, max_length=…)"
    stack = next(filter(is_patched, model.modules()))
    for each in spec.every:
        _check(each.type, stack.posenc.geometry, spec.max_length, max_length, anew)
    config = copy.deepcopy(model.config)
    # The length field of a model made from scratch is the only thing that tells its trained length, and changes below.
    options = spec.options if spec.host else spec.encoding.settled(stack.posenc.geometry, dict(spec.options))
    specs.write(config, replace(spec, max_length=max_length, options=options))
    rows = getattr(config, LENGTH_FIELD, None)
    if rows is not None and spec.replaces_all:  # as patch has it: the promise in the host's count, or the host's own length
        host = spec.host.rows if spec.host else rows
        setattr(config, LENGTH_FIELD, host if max_length is None else max_length + stack._posenc_pass.offset)
        config.check_size()
    return _rebuilt(model, config, spec.type, anew)


def _check(kind: str, geometry: Geometry, before: int | None, after: int | None, anew: str) -> None:
    """Raises ValueError for an encoding whose positions are made for its length, and for a shorter length."""
    parts = encoding_class(kind).component_classes()
    if sized := [name for name, part in parts.items() if part.needs_max_length(geometry)]:
        raise _made_for_its_length(sized[0], anew)
    if after is not None and (before is None or after < before):
        now = "this model has no limit now" if before is None else f"give {before} or more, or None for no limit"
        raise ValueError(f"max_length={after} would make the longest input shorter: {now}")


def _rebuilt(model: Any, config: Any, kind: str, anew: str) -> Any:
    """A twin of the model with this config, built anew; its parameters and buffers are the model's own.

    Raises ValueError where an encoding's tensors have other sizes then.
    """
    twin = shell(type(model), config)
    if _encoding_tensors(twin) != _encoding_tensors(model):
        raise _made_for_its_length(kind, anew)
    share(model, twin)
    theirs: dict[str, Any] = dict(model.named_modules())
    shared: list[torch.Tensor] = []
    for name, module in twin.named_modules():
        if "posenc" not in name.split(".") or (other := theirs.get(name)) is None:
            continue
        module._parameters.update(other._parameters)
        for key, buffer in other._buffers.items():
            # What isn't saved is computed anew, as it will be when the model is loaded: it may depend on max_length.
            computed = buffer is not None and key in other._non_persistent_buffers_set
            module._buffers[key] = torch.empty_like(buffer) if computed else buffer
            shared += [] if computed or buffer is None else [buffer]
        shared += [parameter for parameter in module._parameters.values() if parameter is not None]
    with marked_as_loaded(shared):
        refill(module for module in twin.modules() if isinstance(module, PositionEncoding))
    return twin


def _encoding_tensors(model: nn.Module) -> dict[str, torch.Size]:
    """Name -> shape of the parameters and buffers of all encodings in a model."""
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: tensor.shape for name, tensor in named if "posenc" in name.split(".")}


def _made_for_its_length(kind: str, anew: str) -> ValueError:
    return ValueError(
        f"the positions of {kind!r} are made for its max_length, so more of them have to be trained anew: {anew}, or take an "
        "encoding without a limit of its own"
    )
