"""Rotary positions that a model computes once for all layers: Llama, Qwen, Gemma, ModernBERT, GPT-NeoX."""

import copy
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.architectures.components.component import PositionComponent, UnsupportedModelError, replace
from hf_posenc.configuration import LENGTH_FIELD
from hf_posenc.signatures import BoundCall, argument_names

OTHER_FORMAT = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""The errors of a module that expects other inputs or returns other outputs than a probe."""
CLASS = re.compile(r"rotary\w*embedding|rope\w*embedding", re.IGNORECASE)


class RotaryEmbedding(PositionComponent):
    """A module of the stack that maps position IDs to the angles by which attentions rotate queries and keys.

    At position 0, all angles are 0. The module is therefore disabled by setting its position IDs to 0. In any output format
    (pairs of cosine and sine, complex numbers, halves or interleaved, one for each layer type), this is the identity rotation.
    """

    encoding, verb, arguments = "rope", "rotate", ("position_embeddings",)
    follows_rope_parameters = True

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        for path, module in modules.items():
            if CLASS.search(type(module).__name__) and not any(kind.claims(module) for kind in PositionComponent.kinds):
                if argument_names(module) == ["pixel_values"] and AxialRotaryEmbedding.is_understood(module, stack.config):
                    yield AxialRotaryEmbedding(path, module)
                    continue
                if "position_ids" not in argument_names(module) or not _is_understood(module, stack.config):
                    raise UnsupportedModelError(
                        f"{type(stack).__name__}.{path} is a {type(module).__name__}, which doesn't map position_ids to only "
                        "cosines and sines, or complex numbers",
                        reason="unknown format of rotary positions",
                    )
                yield cls(path, module)

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        self._make_for_the_hosts_length(stack)
        self.module.register_forward_pre_hook(partial(without_positions, argument_names(self.module)), with_kwargs=True)
        self.module.register_forward_hook(without_scaling)

    def _make_for_the_hosts_length(self, stack: Any) -> None:
        """Create the module again for the original length, if the config has another one. Some rules derive frequencies from
        it, and `unpatch` must restore the original module."""
        host, config = stack.config.position_spec.original, getattr(self.module, "config", None)
        if host is None or config is None or host.rows in (None, getattr(config, LENGTH_FIELD, None)):
            return
        config = copy.copy(config)
        setattr(config, LENGTH_FIELD, host.rows)
        self.module = type(self.module)(config)
        replace(stack, self.path, self.module)

    def usable_length(self, config: Any) -> int | None:
        length, given = self.trained_length(config), getattr(config, "rope_parameters", None) or {}
        # Transformers treats the length field as the trained length, above which this rule changes the frequencies.
        grows = [each for each in (given, *given.values()) if isinstance(each, dict) and each.get("rope_type") == "dynamic"]
        return length if length is None or not grows else round(length * min(each.get("factor", 1) for each in grows))

    def trained_length(self, config: Any) -> int | None:
        return getattr(config, LENGTH_FIELD, None)


class AxialRotaryEmbedding(PositionComponent):
    """A module that computes angles from the size of an image: DINOv3. It is disabled by changing its output."""

    encoding, verb = "rope", "rotate"

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        return iter(())  # RotaryEmbedding finds it

    @classmethod
    def is_understood(cls, module: Any, config: Any) -> bool:
        """Whether the module maps an image to a pair of cosines and sines.

        Patch coordinates are centered at 0, so the sines cancel out. The module runs in eval mode, because in training,
        coordinates are randomly shifted and scaled.
        """
        if any(buffer.is_meta for buffer in module.buffers()):
            return True
        training = module.training
        try:
            sides = torch.Size([8 * module.config.patch_size] * 2)
            cos, sin = module.eval()(torch.zeros(1, getattr(config, "num_channels", 3), *sides, device=_device(module)))
        except OTHER_FORMAT:
            return False
        finally:
            module.train(training)
        on_circle = bool((cos**2 + sin**2 - 1).abs().max() < 1e-4)
        return on_circle and bool(sin.sum(0).abs().max() < 1e-2) and bool((cos - sin).abs().max() > 1e-2)

    def disable(self, stack: Any, adds_vectors: bool) -> None:
        self.module.register_forward_hook(without_angles)


def without_angles(module: nn.Module, args: tuple, answer: Any) -> Any:
    """Hook of a module that returns cosines and sines. Replaces them by the identity rotation."""
    cos, sin = answer
    return torch.ones_like(cos), torch.zeros_like(sin)


def _is_understood(module: Any, config: Any) -> bool:
    """Whether the module maps position 0 to the identity rotation, and other positions to other rotations.

    A module on the meta device can't be called. It belongs to a checkpoint whose model was patched before.
    """
    if any(buffer.is_meta for buffer in module.buffers()):
        return True
    kinds = getattr(module, "layer_types", None) or getattr(config, "layer_types", None) or ()
    if not kinds or "layer_type" not in argument_names(module):
        return _is_rotation(module, {})
    # Layer types without rotation have no parameters: linear attention, or None for layers without positions.
    given = getattr(config, "rope_parameters", None) or {}
    asked = {kind for kind in kinds if given.get(kind, given) is not None}
    return bool(asked) and all(_is_rotation(module, {"layer_type": kind}) for kind in asked)


def _is_rotation(module: Any, arguments: dict[str, Any]) -> bool:
    """`_is_understood` for position IDs with one number per token, or two (row and column) per patch."""
    return any(_turns(module, axes, arguments) for axes in (1, 2))


def _turns(module: Any, axes: int, arguments: dict[str, Any]) -> bool:
    states = torch.zeros(1, 1, 1, device=_device(module))
    with torch.no_grad():
        try:
            here, there = (
                _tensors(module(states, position_ids=states.new_full((1, axes), position, dtype=torch.long), **arguments))
                for position in (0, 1)
            )
        except OTHER_FORMAT:
            return False
    kinds = {complex(value.sgn().flatten()[0]) if value.numel() else None for value in here}
    rotates = all(value.sgn().eq(value.sgn().flatten()[0]).all() for value in here if value.numel())
    pairs = kinds == {0j, 1 + 0j} or (kinds == {1 + 0j} and all(value.is_complex() for value in here))
    return rotates and pairs and any(not torch.equal(a, b) for a, b in zip(here, there, strict=True))


def _device(module: nn.Module) -> torch.device | None:
    return next((tensor.device for tensor in (*module.buffers(), *module.parameters())), None)


def _tensors(answer: Any) -> list[Tensor]:
    return list(answer) if isinstance(answer, (tuple, list)) else [answer]


# Hooks are partials of plain functions, so that a patched model can be copied and pickled.


def without_positions(names: list[str], module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Pre-hook of a rotary module. Sets all position IDs to 0."""
    call = BoundCall(names, args, kwargs)
    return call.changed(position_ids=torch.zeros_like(call["position_ids"]))


def without_scaling(module: nn.Module, args: tuple, answer: Any) -> Any:
    """Hook of a rotary module. Removes the factor by which some rules (YaRN) multiply cosines and sines."""
    return type(answer)(map(torch.sgn, answer)) if isinstance(answer, (tuple, list)) else torch.sgn(answer)
