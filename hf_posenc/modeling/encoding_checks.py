"""Checks whether an encoding can be applied to the stacks of an original model.

The checks run when the model is patched, or built without a plan.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

from torch import nn

from hf_posenc.architectures.components.component import UnsupportedModelError
from hf_posenc.architectures.structure import Structure
from hf_posenc.attention import custom, dispatch
from hf_posenc.configuration import PositionSpec
from hf_posenc.encodings import Geometry, build_within_limits, quoted
from hf_posenc.encodings.base import MECHANISMS
from hf_posenc.modeling.install import Parts, acting_in, parts_by_attention, shared_parts, unlike_attentions

STREAMS = re.compile(r"HyperConnection|AltUp|GatedResidual")
"""Matches class names of modules that mix several streams of hidden states, so that a layer's input isn't `[B, L, D]`."""


def check(stacks: Iterable[Structure], spec: PositionSpec) -> None:
    """Raises UnsupportedModelError if an encoding can't be applied as specified.

    Raises ValueError for nonexistent layers and for an encoding without mechanisms.
    """
    if idle := [name for name, part in spec.parts.items() if name != "none" and not part.mechanisms()]:
        raise ValueError(f"{idle[0]!r} overrides none of {quoted(MECHANISMS)}, so it has no effect.")
    for structure in stacks:
        own, across, geometry = acting_in(structure, spec)
        if own is not None and own.windows is not None:
            refuse_unwindowed(structure.stack, structure.tokens is not None, geometry.is_causal)
        if own is not None:
            parts = parts_by_attention(structure, own)
            _refuse_attentions(structure, structure.attentions, own, parts)
            _refuse_unlike(structure, own, parts, geometry)
            if "embed" in own.encoding.mechanisms(dict(own.options)):
                _refuse_places(structure, own)
        if across is not None:
            parts = parts_by_attention(replace(structure, attentions=structure.cross_attentions), across)
            _refuse_attentions(structure, structure.cross_attentions, across, parts)
            for path, module in structure.cross_attentions.items():
                if custom.row_of(module):
                    raise UnsupportedModelError(
                        f"{type(structure.stack).__name__}.{path} doesn't use the Transformers attention interface, "
                        f"so {spec.type!r} can't be applied to it",
                        reason="attention outside the attention interface",
                        remedy="Remove 'cross' from where.",
                    )


def refuse_unwindowed(model: nn.Module, reads_tokens: bool, is_causal: bool) -> None:
    """Raises UnsupportedModelError for a model that can't process its inputs in windows."""
    if reads_tokens and not is_causal:
        return
    why = "has causal attention" if reads_tokens else "reads images or audio"
    rope = "For RoPE, choose 'ntk' or 'yarn'; for position embeddings, choose 'keep_first'."
    raise UnsupportedModelError(
        f"method='windows' divides the input of an encoder of tokens, but {type(model).__name__} {why}",
        reason="not an encoder of tokens",
        remedy=rope if reads_tokens else "For other image sizes, pass interpolate_pos_encoding=True.",
    )


def _refuse_attentions(structure: Structure, attentions: Mapping[str, nn.Module], spec: PositionSpec, parts: Parts) -> None:
    """Raises UnsupportedModelError if an encoding would apply to an attention that doesn't support it."""
    for path, module in attentions.items():
        acting = [part for part in parts[path] if {*spec.parts[part].mechanisms()} - {"embed"}]
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
                f"{type(structure.stack).__name__}.{path} is a {type(module).__name__}, which multiplies its output by a "
                f"factor outside its attention weights, so {weighing[0]!r} can't add to its output",
                reason="attention whose weights aren't known",
                remedy="Use an encoding without a value bias, such as 'shaw' with terms='keys'.",
            )


def _refuse_unlike(structure: Structure, spec: PositionSpec, parts: Parts, geometry: Geometry) -> None:
    """Raises UnsupportedModelError if attentions of several sizes would share weights of one size."""
    shared = shared_parts(spec)
    for path in unlike_attentions(structure, spec, parts, geometry):
        its = replace(structure.geometry_of(structure.attentions[path], geometry.max_length), hidden_size=geometry.hidden_size)
        (trial,) = build_within_limits(spec.type, lambda its=its: [spec.encoding(its, **dict(spec.options))])  # type: ignore[misc]
        if structure.tokens is not None or (trial is not None and [*trial.parameters(), *trial.buffers()]):
            names = [field.name for field in fields(its) if getattr(its, field.name) != getattr(geometry, field.name)]
            one, others = (", ".join(f"{name}={getattr(each, name)}" for name in names) for each in (its, geometry))
            raise UnsupportedModelError(
                f"the attention layers of {type(structure.stack).__name__} have several sizes ({path}: {one}; others: "
                f"{others}), so they can't share {', '.join(sorted(shared))}",
                reason="attentions of several sizes",
                remedy="Use an encoding with parameters per layer: per_layer=True.",
            )


def _refuse_places(structure: Structure, spec: PositionSpec) -> None:
    """Raises UnsupportedModelError if vectors can't be added to the hidden states."""
    stack = structure.stack
    if spec.inject == "input" and any(component.accepts_embeddings for component in structure.components):
        return
    if spec.inject != "after_attention" and any(STREAMS.search(type(module).__name__) for module in stack.modules()):
        raise UnsupportedModelError(
            f"{type(stack).__name__} has several streams of hidden states, so vectors can't be added to them",
            reason="several streams of hidden states",
            remedy="Use an encoding that isn't additive, or inject='after_attention'.",
        )
    if spec.inject != "input" and structure.tokens is None and len({*structure.widths}) > 1:
        raise UnsupportedModelError(
            f"the layers of {type(stack).__name__} have several widths ({sorted({*structure.widths})}), so one vector can't be "
            "added to all",
            reason="layers of several widths",
            remedy="Omit inject.",
        )


def _scales_afterwards(module: nn.Module) -> bool:
    """Whether the original eager function multiplies its output by a factor that isn't in the weights that it returns.

    An attention sink has such a factor, computed from a sum of exponentials (Granite with sliding windows).
    """
    code = getattr(inspect.unwrap(dispatch.host_function(module, "eager")), "__code__", None)
    return code is not None and "logsumexp" in code.co_names
