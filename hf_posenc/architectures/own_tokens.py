"""Stacks that make their tokens themselves, of an image, a video or audio: what `PatchLayout` is made from.

A checkpoint of a stack that reads tokens doesn't carry this module.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_posenc.architectures.structure import Structure, rows_of
from hf_posenc.encodings import PatchLayout, position_ids_from_mask
from hf_posenc.encodings.context import CURRENT
from hf_posenc.signatures import BoundCall, argument_names


def install_hooks(structure: Structure) -> None:
    """Let the modules of a stack record what the context of a forward pass has to know of its tokens."""
    stack = structure.stack
    if structure.patches is not None:
        stack.get_submodule(structure.patches).register_forward_hook(record_patch_grid)
    for component in structure.components:
        if component.verb == "rotate" and "position_ids" in (names := argument_names(component.module)):
            hook = partial(record_image_boundaries, names)
            component.module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    # Modules that the layers lie in, outermost first, if they are given a mask of their inputs.
    rows = rows_of(structure.modules, structure.attentions)
    for path in sorted(path for path in structure.modules if path and any(row.startswith(f"{path}.") for row in rows)):
        module = stack.get_submodule(path)
        if "attention_mask" in (names := argument_names(module)):
            module.register_forward_pre_hook(partial(record_frame_mask, names), with_kwargs=True, prepend=True)
    for module in stack.modules():
        if hasattr(module, "random_masking"):
            module.random_masking = partial(track_random_masking, module.random_masking)


def layout_of(call: BoundCall, extra_tokens: tuple[int, int], windows: bool) -> PatchLayout:
    """What the arguments of a stack say of its tokens."""
    return PatchLayout(
        extra_tokens, images=_images(call), kept_patches=_kept_patches(call), cells=_cells(call), windows=windows
    )


def record_patch_grid(module: torch.nn.Module, args: tuple, output: Tensor) -> None:
    """Hook of the convolution that cuts an image into patches: records their grid.

    If each patch is an input by itself, the output has one place, and says nothing of the grid.
    """
    grid = tuple(output.shape[2:])
    if CURRENT.context is not None and math.prod(grid) > 1:
        CURRENT.context.record(grid=grid, num_images=len(output))


def record_image_boundaries(names: list[str], module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Pre-hook of a rotary module of rows and columns, `[L, 2]`: records the cells, and the images that are packed in one row.

    Each image begins with row and column 0. The cells of a window, or of the only image, aren't needed.
    """
    ids, context = BoundCall(names, args, kwargs)["position_ids"], CURRENT.context
    if context is None or ids.ndim != 2 or ids.shape[-1] != 2:
        return
    layout = context.patches or PatchLayout()
    images = layout.images
    if not images:
        first = (ids == 0).all(-1).nonzero()[:, 0].tolist()
        if first[:1] == [0]:
            images = tuple(end - start for start, end in itertools.pairwise([*first, len(ids)]))
    whole = layout.windows or (layout.grid and images == (math.prod(layout.grid),))
    context.record(images=images, cells=layout.cells if whole else ids[None])


def record_frame_mask(names: list[str], module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Pre-hook of a module around the layers of an audio stack: records which frames are padding.

    The mask that the stack itself is called with is one of samples or features.
    """
    mask, context = BoundCall(names, args, kwargs)["attention_mask"], CURRENT.context
    if context is not None and isinstance(mask, Tensor) and mask.ndim == 2:
        context.record(frame_mask=mask)


def track_random_masking(mask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The model's own `random_masking`, which takes patches out: records those that are left."""
    left, *others = mask(*args, **kwargs)
    if CURRENT.context is not None:
        kept = others[-1].argsort(dim=1)[:, : left.shape[1]]
        CURRENT.context.record(kept_patches=kept)
    return (left, *others)


def _images(call: BoundCall) -> tuple[int, ...]:
    """The number of patches of each image, or frame of a video, that are packed in one row of tokens."""
    given = (call[name] for name in ("grid_thw", "image_grid_hw", "target_sizes"))
    grids = next((grids for grids in given if grids is not None), None)
    return () if grids is None else tuple(h * w for *frames, h, w in grids.tolist() for _ in range(*(frames or [1])))


def _kept_patches(call: BoundCall) -> Tensor | None:
    """`[B, L]`, the positions of patches in a batch of images of several sizes: each image's own are counted row by row."""
    shown = call["patch_attention_mask"]
    return None if shown is None else position_ids_from_mask(shown.flatten(1)).clamp(min=0)


def _cells(call: BoundCall) -> Tensor | None:
    """`[1, L, 2]`, the row and column of each patch in such a batch: smaller images are padded on the right and below."""
    shown = call["patch_attention_mask"]
    return None if shown is None else torch.ones_like(shown[0]).nonzero()[None]
