"""Extends models to other image sizes: their position embeddings are interpolated over rows and columns."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from hf_posenc._versions import DOCS
from hf_posenc.architectures.components import UnsupportedModelError
from hf_posenc.architectures.components.vision import interpolation
from hf_posenc.conversion.extend_tables import with_tables
from hf_posenc.conversion.extend_target import find_stacks, same_place
from hf_posenc.encodings import short_repr
from hf_posenc.encodings.table_interpolation import Grids
from hf_posenc.modeling.parameter_sharing import build_on_meta

FIELDS = (("image_size",), ("num_mel_bins", "max_length"))
"""The config fields of an image's height and width, or of a spectrogram's mel bins and frames (AST)."""


@dataclass(frozen=True)
class NewSize:
    """The image size of a stack that reads patches, and a new one.

    config: a copy of the model's config, with the new size.
    grids: the grids of patches of both sizes.
    is_image: whether the input is an image, instead of a spectrogram.
    """

    config: Any
    grids: Grids
    is_image: bool

    @classmethod
    def find(cls, model: Any, stack: Any, projection: str | None, behind: int, image_size: Any) -> "NewSize":
        """projection: the path of the convolution that computes the patches. behind: the number of tokens after them.

        Raises ValueError for an invalid size, and UnsupportedModelError for a stack without a grid of patches.
        """
        sizes = [image_size] * 2 if type(image_size) is int else image_size
        if not isinstance(sizes, (list, tuple)) or len(sizes) != 2 or any(type(n) is not int or n < 1 for n in sizes):
            raise ValueError(
                f"image_size={short_repr(image_size)} must be an integer above 0, or two: height and width. The model was not "
                "changed."
            )
        cutter = None if projection is None else stack.get_submodule(projection)
        names = next((names for names in FIELDS if all(hasattr(stack.config, name) for name in names)), None)
        if names is None or not isinstance(cutter, nn.Conv2d):
            raise UnsupportedModelError(
                f"{type(stack).__name__} doesn't read images as a grid of patches with a size in its config",
                reason="no grid of patches",
                remedy=f"Pass larger inputs to the model directly, or see {DOCS}/reference/extend_methods.md.",
            )
        config = copy.deepcopy(model.config)
        own = same_place(model.config, config, stack.config, projection or "")
        before = [getattr(own, name) for name in names]
        before = [*before[0]] if isinstance(before[0], (list, tuple)) else before * (3 - len(names))
        old, new = (
            tuple((n - k) // s + 1 for n, k, s in zip(each, cutter.kernel_size, cutter.stride, strict=True))
            for each in (before, sizes)
        )
        if min(new) < 1:
            raise ValueError(
                f"image_size={short_repr(image_size)} is smaller than a patch, {[*cutter.kernel_size]}. The model was not "
                "changed."
            )
        value = sizes[0] if sizes[0] == sizes[1] and isinstance(getattr(own, names[0]), int) else [*sizes]
        try:
            for name, each in zip(names, [value] if len(names) == 1 else sizes, strict=True):
                setattr(own, name, each)
            build_on_meta(type(model), config)
        except (TypeError, StrictDataclassError) as error:
            raise _only_squares(model, image_size, error) from error
        return cls(config, Grids(old, new, behind, interpolation(dict(stack.named_modules()))), len(names) == 1)


def with_image_size(model: Any, image_size: Any, submodel: str | None) -> Any:
    """An original model of the same class for another image size. Raises ValueError, UnsupportedModelError."""
    inner, _, stacks = find_stacks(model, submodel)
    name = type(inner).__name__
    seeing = {path: found for path, found in stacks.items() if found.patches is not None and found.tokens is None}
    if not seeing:
        raise UnsupportedModelError(
            f"{name} has no positions of image patches, which image_size extends",
            reason="no grid of patches",
            remedy="If it reads images, pass them to the model directly. For longer texts, pass max_length.",
        )
    if len(seeing) != 1:
        raise UnsupportedModelError(
            f"{name} has {len(seeing)} stacks with positions of image patches, but image_size needs one",
            reason="no grid of patches",
            remedy="Pass submodel.",
        )
    ((path, found),) = seeing.items()
    new = NewSize.find(model, found.stack, found.patches, found.extra_tokens[1], image_size)
    tables, known = dict[str, Tensor](), {f"{path}.{component.path}".lstrip(".") for component in found.components}
    for key, there in build_on_meta(type(model), new.config, like=model).named_parameters():
        old = model.get_parameter(key).detach()
        resized = new.grids.resize_table(old, there.shape) if key in known else None
        if resized is not None:
            tables[key] = resized
        elif there.shape != old.shape:
            raise UnsupportedModelError(
                f"{key} of {name} would change from shape {[*old.shape]} to {[*there.shape]}, and only position embeddings of "
                "patches and BEiT's biases can be interpolated",
                reason="other parameters that depend on the image size",
                remedy="Use an encoding for any size: hf_posenc.patch(model, 'sinusoidal_2d').",
            )
    if not tables:
        raise UnsupportedModelError(
            f"{name} has no position embeddings for one image size, so there is nothing to interpolate",
            reason="no length limit",
            remedy="Pass images of this size to the model directly.",
        )
    resized = with_tables(model, new.config, tables)
    if new.is_image and type(image_size) is not int and len({*image_size}) == 2:
        _check_oblong(resized.get_submodule(path), image_size)
    return resized


def _check_oblong(stack: Any, size: Sequence[int]) -> None:
    """Raises UnsupportedModelError for a stack whose code assumes square images (DINOv2)."""
    modes = {module: module.training for module in stack.modules()}
    try:
        with torch.no_grad():
            stack.eval()(torch.zeros(1, stack.config.num_channels, *size, device=stack.device, dtype=stack.dtype))
    except RuntimeError as error:
        raise _only_squares(stack, size, error) from error
    finally:
        for module, training in modes.items():
            module.training = training


def _only_squares(model: Any, size: Any, error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} doesn't support image_size={short_repr(size)}: {error}",
        reason="image size that the model doesn't support",
        remedy="Choose a square size.",
    )
