"""The layout of an image's tokens: the convolution that computes its patches, extra tokens, and windows."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_posenc.architectures.components.component import is_transformers
from hf_posenc.signatures import names_used

EXTRA_TOKENS = re.compile(
    r"(cls|class|reg|register|dist|distillation|detection|storage|prefix|cls_register)_(tokens?|embedding)"
)
"""Matches names of parameters that are extra tokens, which don't represent a patch."""
BEHIND = "detection_tokens"
"""The extra tokens that come after the patches (YOLOS)."""
QUERIES = {
    "EomtForUniversalSegmentation": "query",
    "EomtDinov3ForUniversalSegmentation": "query",
    "VideomtForUniversalSegmentation": "query",
}
"""Class of a stack -> its embedding of query tokens, which are added before the patches between two layers."""
INTERPOLATED: dict[str, dict[str, Any]] = {
    "Dinov2WithRegistersEmbeddings": {"antialias": True},
    "Tipsv2VisionEmbeddings": {"mode": "bilinear", "antialias": True},
    "DPTViTEmbeddings": {"mode": "bilinear"},
}
"""Class of the module with position embeddings -> how Transformers interpolates them for another image size. The others use
bicubic interpolation without antialiasing."""
POOLS = re.compile(r"Pool")
"""Matches class names of modules whose extra token only pools the patches after all layers (AIMv2)."""


def count_extra_tokens(modules: Mapping[str, nn.Module]) -> tuple[int, int]:
    """The number of tokens before and after the patches."""
    before = behind = 0
    for module in modules.values():
        for name, parameter in module._parameters.items():
            if parameter is not None and EXTRA_TOKENS.fullmatch(name) and not POOLS.search(type(module).__name__):
                count = parameter.shape[:-1].numel()
                before, behind = (before, behind + count) if name == BEHIND else (before + count, behind)
    return before, behind


def count_queries(stack: nn.Module) -> int:
    """The number of query tokens that the stack adds before the patches between two layers."""
    names = (QUERIES.get(cls.__name__) for cls in type(stack).__mro__)
    table = next((stack._modules[name] for name in names if name is not None), None)
    return table.num_embeddings if isinstance(table, nn.Embedding) else 0


def interpolation(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """How position embeddings are interpolated for another image size: arguments of `torch.nn.functional.interpolate`."""
    names = (type(module).__name__ for module in modules.values())
    return next((INTERPOLATED[name] for name in names if name in INTERPOLATED), {})


def patch_projection(modules: Mapping[str, nn.Module]) -> str | None:
    """The path of the convolution whose outputs are the patches, or None."""
    return next((path for path, module in modules.items() if cuts_patches(path, module)), None)


def cuts_patches(path: str, module: nn.Module) -> bool:
    """Whether a convolution computes an image's tokens, from separate patches, or from overlapping ones without padding."""
    if not isinstance(module, (nn.Conv2d, nn.Conv3d)):
        return False
    if max(module.kernel_size) == 1:
        return False
    return module.kernel_size == module.stride or ("patch" in path and module.padding in ("valid", (0,) * len(module.stride)))


def has_windows(modules: Mapping[str, nn.Module]) -> bool:
    """Whether attentions see only windows of the image."""
    sizes = [getattr(module, name, None) for module in modules.values() for name in ("window_size", "window_kernel_size")]
    if any(isinstance(size, (tuple, list)) or (isinstance(size, int) and size > 0) for size in sizes):
        return True
    return cuts_into_windows(modules) or any(path.endswith("temporal_attention") for path in modules)


def has_square_windows(module: nn.Module) -> bool:
    """Whether a layer's attention sees square windows of the image, whose patches are ordered row by row (Swin, SAM, ViTDet).

    Transformers' `window_partition` cuts windows of `window_size` rows and columns. A size of 0 stands for the whole image.
    """
    cuts = is_transformers(type(module)) and "window_partition" in names_used(type(module).forward)
    return cuts and bool(getattr(module, "window_size", 0))


def cuts_into_windows(modules: Mapping[str, nn.Module]) -> bool:
    """Whether the tokens are ordered by window, even in attentions that see all of them."""
    counts = (getattr(module, "num_windows", None) for module in modules.values())
    return any(isinstance(count, int) and count > 1 for count in counts)
