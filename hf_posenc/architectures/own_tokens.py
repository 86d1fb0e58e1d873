"""Records the `PatchLayout` of models that compute their tokens from an image, a video, or audio.

Checkpoints of models that read token IDs don't contain this module.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_posenc.architectures.components.vision import count_queries
from hf_posenc.architectures.structure import Structure, rows_of
from hf_posenc.encodings import PatchLayout, position_ids_from_mask
from hf_posenc.encodings.context import CURRENT
from hf_posenc.signatures import BoundCall, argument_names


def install_hooks(structure: Structure) -> None:
    """Register the hooks that record the layout of the tokens in the context of a forward pass."""
    stack = structure.stack
    if structure.patches is not None:
        projection = stack.get_submodule(structure.patches)
        projection.register_forward_hook(record_patch_grid)
        if queries := count_queries(stack):
            projection.register_forward_hook(partial(record_queries, queries))
    for component in structure.components:
        if component.verb == "rotate" and "position_ids" in (names := argument_names(component.module)):
            hook = partial(record_image_boundaries, names)
            component.module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    # Modules that contain the layers and receive a mask of their inputs, outermost first.
    rows = rows_of(structure.modules, structure.attentions)
    for path in sorted(path for path in structure.modules if path and any(row.startswith(f"{path}.") for row in rows)):
        module = stack.get_submodule(path)
        if "attention_mask" in (names := argument_names(module)):
            module.register_forward_pre_hook(partial(record_frame_mask, names), with_kwargs=True, prepend=True)
    for module in stack.modules():
        if hasattr(module, "random_masking"):
            module.random_masking = partial(track_random_masking, module.random_masking)


def layout_of(call: BoundCall, extra_tokens: tuple[int, int], windows: bool) -> PatchLayout:
    """The layout of the tokens, as far as the arguments of a forward call determine it."""
    return PatchLayout(
        extra_tokens, images=_images(call), kept_patches=_kept_patches(call), cells=_cells(call), windows=windows
    )


def record_patch_grid(module: torch.nn.Module, args: tuple, output: Tensor) -> None:
    """Hook of the convolution that cuts an image into patches. Records their grid.

    If each patch is a separate input, the output has spatial size 1, and the grid remains unknown.
    """
    grid = tuple(output.shape[2:])
    if CURRENT.context is not None and math.prod(grid) > 1:
        CURRENT.context.record(grid=grid, num_images=len(output))


def record_queries(queries: int, module: torch.nn.Module, args: tuple, output: Tensor) -> None:
    """Hook of the same convolution. Records how many query tokens later layers have before the patches."""
    if CURRENT.context is not None:
        CURRENT.context.record(queries=queries)


def record_image_boundaries(names: list[str], module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Pre-hook of a rotary module that is called with rows and columns, `[L, 2]`. Records the grid cells and the packed images.

    Each image begins at row and column 0. The cells of windows, or of a single image, aren't needed. SAM 3 calls the module
    with those of a window or of the image in each layer.
    """
    ids, context = BoundCall(names, args, kwargs)["position_ids"], CURRENT.context
    if context is None or ids.ndim != 2 or ids.shape[-1] != 2:
        return
    layout = context.patches or PatchLayout()
    if layout.windows and layout.grid:
        return
    images = layout.images
    if not images:
        first = (ids == 0).all(-1).nonzero()[:, 0].tolist()
        if first[:1] == [0]:
            images = tuple(end - start for start, end in itertools.pairwise([*first, len(ids)]))
    whole = layout.windows or (layout.grid and images == (math.prod(layout.grid),))
    context.record(images=images, cells=layout.cells if whole else ids[None])


def record_frame_mask(names: list[str], module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Pre-hook of a module that contains the layers of an audio encoder. Records which frames are padding.

    The mask that the encoder itself is called with masks samples or features.
    """
    mask, context = BoundCall(names, args, kwargs)["attention_mask"], CURRENT.context
    if context is not None and isinstance(mask, Tensor) and mask.ndim == 2:
        context.record(frame_mask=mask)


def track_random_masking(mask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the model's `random_masking`, which removes patches, and record the remaining ones."""
    left, *others = mask(*args, **kwargs)
    if CURRENT.context is not None:
        kept = others[-1].argsort(dim=1)[:, : left.shape[1]]
        CURRENT.context.record(kept_patches=kept)
    return (left, *others)


def _images(call: BoundCall) -> tuple[int, ...]:
    """The number of patches of each image or video frame, if several are packed in one row of tokens."""
    given = (call[name] for name in ("grid_thw", "image_grid_hw", "target_sizes"))
    grids = next((grids for grids in given if grids is not None), None)
    return () if grids is None else tuple(h * w for *frames, h, w in grids.tolist() for _ in range(*(frames or [1])))


def _kept_patches(call: BoundCall) -> Tensor | None:
    """The positions of patches in a batch of images of several sizes, `[B, L]`, counted row by row within each image."""
    shown = call["patch_attention_mask"]
    return None if shown is None else position_ids_from_mask(shown.flatten(1)).clamp(min=0)


def _cells(call: BoundCall) -> Tensor | None:
    """The row and column of each patch in a batch of images of several sizes, `[1, L, 2]`.

    Smaller images are padded on the right and at the bottom.
    """
    shown = call["patch_attention_mask"]
    return None if shown is None else torch.ones_like(shown[0]).nonzero()[None]
