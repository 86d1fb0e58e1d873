"""Whether an encoding can act in the stacks of a stock model: checked when it is patched, or made without a plan."""

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from hf_posenc.architectures.components.component import UnsupportedModelError
from hf_posenc.architectures.structure import Structure
from hf_posenc.attention import custom, dispatch
from hf_posenc.configuration import PositionSpec
from hf_posenc.encodings import Geometry, build_within_limits
from hf_posenc.modeling.install import Parts, acting_in, parts_by_attention, shared_parts, unlike_attentions

STREAMS = re.compile(r"HyperConnection|AltUp|GatedResidual")
"""In class names of modules that mix several streams of hidden states, so that a layer's input is not `[B, L, D]`."""


def check(stacks: Iterable[Structure], spec: PositionSpec) -> None:
    """Raises UnsupportedModelError for an encoding that can't act where it should, ValueError for layers that don't exist."""
    for structure in stacks:
        own, across, geometry = acting_in(structure, spec)
        if own is not None:
            parts = parts_by_attention(structure, own)
            _refuse_closed(structure, structure.attentions, own, parts)
            _refuse_unlike(structure, own, parts, geometry)
            if "embed" in own.encoding.mechanisms(dict(own.options)):
                _refuse_places(structure, own)
        if across is not None:
            parts = parts_by_attention(replace(structure, attentions=structure.cross_attentions), across)
            _refuse_closed(structure, structure.cross_attentions, across, parts)
            for path, module in structure.cross_attentions.items():
                if custom.row_of(module):
                    raise UnsupportedModelError(
                        f"{type(structure.stack).__name__}.{path} doesn't use the Transformers attention interface",
                        reason="attention beside Transformers' interface",
                        remedy="Omit 'cross' from where.",
                    )


def _refuse_closed(structure: Structure, attentions: Mapping[str, nn.Module], spec: PositionSpec, parts: Parts) -> None:
    """Raises UnsupportedModelError for an encoding that would act in an attention in which none can."""
    for path, module in attentions.items():
        acting = [part for part in parts[path] if {*spec.parts[part].mechanisms()} - {"embed"}]
        if acting and (why := custom.closed(module)):
            raise UnsupportedModelError(
                f"{acting[0]!r} can't be applied in {type(structure.stack).__name__}.{path}: it is a {type(module).__name__}, "
                f"which {why}",
                reason="attention in which nothing can act",
                remedy="Use an additive encoding, such as 'sinusoidal' or 'learned'.",
            )
        capped = getattr(getattr(module, "config", None), "attn_logit_softcapping", None)
        if capped and (correcting := [part for part in acting if spec.parts[part].corrects_scores]):
            raise UnsupportedModelError(
                f"{type(structure.stack).__name__}.{path} caps its scores at {capped} before a bias is added, so "
                f"{correcting[0]!r} can't correct them",
                reason="scores that are capped before the bias",
                remedy="Use an encoding that rotates or adds a bias.",
            )
        weighing = [part for part in acting if "value_bias" in spec.mechanisms(part)]
        if weighing and custom.row_of(module) is None and _scales_afterwards(module):
            raise UnsupportedModelError(
                f"{weighing[0]!r} can't be applied in {type(structure.stack).__name__}.{path}: this {type(module).__name__} "
                "multiplies its output by a factor that isn't in its weights",
                reason="attention whose weights aren't known",
                remedy="Use an encoding that adds nothing to values, such as 'shaw' with terms='keys'.",
            )


def _refuse_unlike(structure: Structure, spec: PositionSpec, parts: Parts, geometry: Geometry) -> None:
    """Raises UnsupportedModelError where attentions of several sizes would share weights that are made for one size."""
    shared = shared_parts(spec)
    for path in unlike_attentions(structure, spec, parts, geometry):
        its = replace(structure.geometry_of(structure.attentions[path], geometry.max_length), hidden_size=geometry.hidden_size)
        (trial,) = build_within_limits(spec.type, lambda its=its: [spec.encoding(its, **dict(spec.options))])  # type: ignore[misc]
        if structure.tokens is not None or (trial is not None and [*trial.parameters(), *trial.buffers()]):
            raise UnsupportedModelError(
                f"The attention modules of {type(structure.stack).__name__} differ in size: {path} has {its}, others have "
                f"{geometry}, but all would share the parameters of {', '.join(sorted(shared))}",
                reason="attentions of several sizes",
                remedy="Set per_layer=True to give each attention module its own encoding.",
            )


def _refuse_places(structure: Structure, spec: PositionSpec) -> None:
    """Raises UnsupportedModelError where vectors can't be added to hidden states."""
    stack = structure.stack
    if spec.inject == "input" and any(component.accepts_embeddings for component in structure.components):
        return
    if spec.inject != "after_attention" and any(STREAMS.search(type(module).__name__) for module in stack.modules()):
        raise UnsupportedModelError(
            f"{type(stack).__name__} has several streams of hidden states between its layers, so vectors can't be added",
            reason="several streams of hidden states",
            remedy="Use an encoding that acts in attention, or inject='after_attention'.",
        )
    if spec.inject != "input" and structure.tokens is None and len({*structure.widths}) > 1:
        raise UnsupportedModelError(
            f"The layers of {type(stack).__name__} have hidden states of different widths, {sorted({*structure.widths})}, so "
            "they can't share one vector",
            reason="layers of several widths",
            remedy="Omit inject.",
        )


def _scales_afterwards(module: nn.Module) -> bool:
    """Whether the host's eager function multiplies its output by a factor that isn't in the weights it gives: that of an
    attention sink, made from a sum of exponentials (Granite with sliding windows)."""
    code = getattr(inspect.unwrap(dispatch.host_function(module, "eager")), "__code__", None)
    return code is not None and "logsumexp" in code.co_names
