"""The properties of an original model that `extend` needs."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc import configuration as specs
from hf_posenc.architectures import detection
from hf_posenc.architectures.components import PositionComponent, UnsupportedModelError
from hf_posenc.architectures.structure import Structure
from hf_posenc.configuration import LENGTH_FIELD
from hf_posenc.encodings import Geometry, quoted
from hf_posenc.encodings.table_interpolation import DYNAMIC, WINDOWS, Extension
from hf_posenc.modeling.encoding_checks import refuse_unwindowed

LENGTHS = {"encoder": "max_source_positions", "decoder": "max_target_positions"}
"""Role of a stack -> the config field of its length, in configs without LENGTH_FIELD (Whisper)."""


@dataclass(frozen=True)
class ExtensionTarget:
    """An original model to extend, and the arguments of `extend`.

    model: the whole model.
    inner: the submodel to extend, or the whole model.
    path, submodel: path of `inner` in the model and in its base model.
    stacks: path in the whole model -> structure, for the stacks to extend.
    asked: the arguments of `extend`.
    """

    model: Any
    inner: Any
    path: str
    submodel: str | None
    stacks: Mapping[str, Structure]
    asked: Extension

    @classmethod
    def find(
        cls,
        model: Any,
        max_length: int,
        method: str,
        settings: dict[str, Any],
        submodel: str | None,
        where: str | None = None,
    ) -> "ExtensionTarget":
        """Raises ValueError for a shorter length, UnsupportedModelError for a model without a length limit.

        where: "encoder" or "decoder". None: both, but only those that read tokens if any do (Whisper's decoder).
        """
        inner, path, stacks = find_stacks(model, submodel, where)
        if where is None and any(found.tokens is not None for found in stacks.values()):
            stacks = {name: found for name, found in stacks.items() if found.tokens is not None}
        if where is None and method in (DYNAMIC, WINDOWS) and getattr(inner.config, "is_encoder_decoder", False):
            stacks = {name: found for name, found in stacks.items() if found.role == "encoder"}
        if method == WINDOWS:
            for found in stacks.values():
                refuse_unwindowed(inner, found.tokens is not None, found.geometry(None, "input").is_causal)
        lengths = [found.usable_length for found in stacks.values() if found.usable_length is not None]
        if not lengths:
            raise UnsupportedModelError(
                f"{type(inner).__name__} has no length limit, so there is nothing to extend",
                reason="no length limit",
                remedy="Pass longer inputs to the model directly.",
            )
        if max_length < min(lengths):
            raise ValueError(
                f"max_length={max_length} is below the current maximum length. Pass {min(lengths)} or more. To truncate "
                "earlier, set the tokenizer's model_max_length or a SentenceTransformer's max_seq_length. "
                "The model was not changed."
            )
        return cls(model, inner, path, submodel, stacks, Extension(method, min(lengths), max_length, settings))

    @property
    def limiting(self) -> list[PositionComponent]:
        """The positional components that limit the length."""
        components = ((component, found) for found in self.stacks.values() for component in found.components)
        return [component for component, found in components if component.usable_length(found.stack.config) is not None]

    def refuse_other_sources(self) -> None:
        kinds = quoted(sorted({component.encoding for component in self.limiting}))
        raise UnsupportedModelError(
            f"{type(self.inner).__name__} has neither learned position embeddings of tokens nor only rotary "
            f"positions ({kinds})",
            reason="positions without an extension method",
            remedy="For computed positions, omit the method. For other image sizes, pass image_size instead of max_length.",
        )

    @property
    def geometry(self) -> Geometry:
        """The geometry of the stacks for the new length, which is the same for all."""
        (geometry,) = {found.geometry(self.asked.after, "input") for found in self.stacks.values()}
        return geometry

    def answer(self, model: Any, count: int) -> Tensor:
        """Hidden states `[1, L, D]` for `count` tokens, without dropout. `model` is of this class or its patched class."""
        inner = model.get_submodule(self.path).base_model
        modes = {module: module.training for module in inner.modules()}
        padding = getattr(inner.config, "pad_token_id", None)
        tokens = [each for each in range(1, inner.config.vocab_size) if each != padding]
        ids = torch.tensor((tokens * count)[:count], device=inner.device)
        try:
            with torch.no_grad():
                return inner.eval()(input_ids=ids[None])[0]
        finally:
            for module, training in modes.items():
                module.training = training

    def config(self) -> tuple[Any, Any]:
        """A copy of the model's config, and its part for `inner`. Raises UnsupportedModelError if there is none."""
        whole = copy.deepcopy(self.model.config)
        return whole, same_place(self.model.config, whole, self.inner.config, self.path)

    def longer_config(self) -> Any:
        """A copy of the model's config with the new length in its fields for it."""
        whole, own = self.config()
        names = {LENGTH_FIELD} if specs.length_of(own) is not None else {LENGTHS[found.role] for found in self.stacks.values()}
        for name in names:
            if isinstance(getattr(own, name, None), int):
                setattr(own, name, getattr(own, name) + self.asked.after - self.asked.before)
        return whole


def find_stacks(model: Any, submodel: str | None, where: str | None = None) -> tuple[Any, str, dict[str, Structure]]:
    """The submodel to extend, its path, and its stacks by their path in the model."""
    inner = model if submodel is None else detection.submodel(model, submodel)
    path = next(name for name, module in model.named_modules() if module is inner)
    found = detection.find_all(inner, () if where is None else (where,))
    return inner, path, {f"{path}.{name}".strip("."): each for name, each in found.items()}


def same_place(config: Any, copied: Any, wanted: Any, path: str) -> Any:
    """The config in `copied` at the place where `wanted` is in `config`."""
    if config is wanted:
        return copied
    for name in specs.part_names(config):
        if getattr(config, name, None) is wanted:
            return getattr(copied, name)
    raise UnsupportedModelError(
        f"the config of {path} isn't part of {type(config).__name__}",
        reason="submodel with a separate config",
        remedy=f"Extend it before you combine the parts: hf_posenc.extend(model.{path}, …).",
    )
