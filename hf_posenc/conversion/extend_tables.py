"""Extends original models with learned position embeddings."""

from typing import Any

import torch
from torch import nn

from hf_posenc import configuration as specs
from hf_posenc.architectures.components import PositionComponent, UnsupportedModelError
from hf_posenc.architectures.structure import is_patched
from hf_posenc.configuration import LENGTH_FIELD
from hf_posenc.conversion.extend_target import ExtensionTarget
from hf_posenc.conversion.patching import patch
from hf_posenc.encodings import quoted
from hf_posenc.encodings.table_interpolation import DYNAMIC, STATIC, WINDOWS
from hf_posenc.modeling.parameter_sharing import build_on_meta, clone_sharing_parameters, share_parameters

NO_FIELD = "a table whose length no config says"
BESIDE = "positions beside a table"
"""Values of `UnsupportedModelError.reason`."""
SAME = 1e-3
"""Maximum difference of hidden states between two computations of biases, relative to their standard deviation."""
BIASES = "t5"
"""The encoding of biases that can be used together with position embeddings (MPNet)."""


def with_longer_tables(host: ExtensionTarget) -> Any:
    """A model of the same class with more position embeddings. Raises ValueError, UnsupportedModelError."""
    name, asked = type(host.model).__name__, host.asked
    if asked.method not in STATIC:
        raise ValueError(
            f"method={asked.method!r} applies to rotary positions, but {name} has learned position embeddings. Choose one of "
            f"{quoted((*STATIC, DYNAMIC))}."
        )
    longer = dict[str, nn.Parameter]()
    for path, found in host.stacks.items():
        for component in found.components:
            if component.verb == "score_bias":  # its buckets may depend on the length
                raise UnsupportedModelError(
                    f"{name} can't be extended: it also has {component.encoding!r} positions that depend on its length",
                    reason=BESIDE,
                    remedy="Use an encoding without a length limit: hf_posenc.patch(model, 'alibi').",
                )
            if component.learned_table is not None:
                key, first = component.learned_table
                old = found.stack.get_parameter(key)
                rows = torch.cat([old.detach()[:first], asked.interpolate_table(old.detach()[first : first + asked.before])])
                longer[f"{path}.{key}".lstrip(".")] = nn.Parameter(rows, requires_grad=old.requires_grad)
    config, own = host.config()
    if specs.length_of(own) is not None:
        setattr(own, LENGTH_FIELD, getattr(own, LENGTH_FIELD) + asked.after - asked.before)
    twin = build_on_meta(type(host.model), config, like=host.model)
    for path, there in twin.named_parameters():
        if (given := longer.get(path, host.model.get_parameter(path))).shape != there.shape:
            raise UnsupportedModelError(
                f"{path} of {name} would have shape {[*given.shape]}, but the config specifies {[*there.shape]}",
                reason=NO_FIELD,
                remedy="Use an encoding without position embeddings: hf_posenc.patch(model, 'alibi').",
            )
    for path, parameter in longer.items():
        module, _, key = path.rpartition(".")
        twin.get_submodule(module)._parameters[key] = parameter
    share_parameters(host.model, twin, rebuilt={path.rpartition(".")[0] for path in longer})
    return twin


def by_input(host: ExtensionTarget) -> Any:
    """A patched model whose `learned` encoding has the original position embeddings, for methods that depend on the input.

    "dynamic" interpolates them for longer inputs, and "windows" divides longer inputs. Biases of the original become `t5`."""
    asked = host.asked
    if asked.method == DYNAMIC:
        asked.refuse_other_settings()
    if asked.method == DYNAMIC and any(found.geometry(asked.after, "input").is_causal for found in host.stacks.values()):
        raise UnsupportedModelError(
            f"method={DYNAMIC!r} doesn't support the causal attention of {type(host.inner).__name__}, because cached "
            "keys keep the positions of a shorter input",
            reason="causal attention",
            remedy="Choose a static method, such as 'keep_first'.",
        )
    learned = {"init": "host", **({"trained_rows": asked.before} if asked.method == DYNAMIC else {})}
    encoding: dict[str, Any] = {"type": "learned", **learned}
    components = (component for found in host.stacks.values() for component in found.components)
    if beside := [component for component in components if not component.accepts_embeddings]:
        if any(component.encoding != BIASES for component in beside):
            raise _would_be_lost(host, beside)
        rows = {len(component.module.get_parameter("weight")) for component in beside}
        encoding = {"type": f"learned+{BIASES}", "learned": learned, BIASES: {"num_buckets": max(rows)}}
    if asked.method == WINDOWS:
        encoding["windows"] = asked.windows()
    where = "encoder" if getattr(host.inner.config, "is_encoder_decoder", False) else None
    patched = patch(host.model, encoding, max_length=asked.after, where=where, submodel=host.submodel)
    for path, found in host.stacks.items():
        stack: Any = patched.get_submodule(path)
        if is_patched(stack):
            key, _ = next(component.learned_table for component in found.components if component.learned_table)
            part = stack.posenc.get_submodule("learned") if beside else stack.posenc
            part.requires_grad_(found.stack.get_parameter(key).requires_grad)
            for component in found.components:
                if component in beside:
                    _take_over(component.module.get_parameter("weight"), stack.posenc.get_submodule(BIASES))
    if beside:
        count = asked.before if asked.method == DYNAMIC else encoding["windows"]["window"]
        expected = host.answer(clone_sharing_parameters(host.model), count)
        if not torch.allclose(host.answer(patched, count), expected, atol=SAME * float(expected.std())):
            raise _would_be_lost(host, beside)
    return patched


def _take_over(weight: nn.Parameter, biases: nn.Module) -> None:
    with torch.no_grad():
        biases.get_parameter("weight").copy_(weight)
    biases.requires_grad_(weight.requires_grad)


def _would_be_lost(host: ExtensionTarget, beside: list[PositionComponent]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(host.model).__name__} also has positions in {beside[0].path}, which method={host.asked.method!r} would disable",
        reason=BESIDE,
        remedy="Choose a static method, such as 'linear'.",
    )
