"""Extends original models with learned position embeddings."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import guard_torch_init_functions

from hf_posenc.architectures import detection
from hf_posenc.architectures.components import PositionComponent, UnsupportedModelError
from hf_posenc.architectures.structure import is_patched
from hf_posenc.conversion.extend_target import ExtensionTarget
from hf_posenc.conversion.patching import patch
from hf_posenc.encodings import global_rng_lock, quoted
from hf_posenc.encodings.table_interpolation import DYNAMIC, STATIC, WINDOWS
from hf_posenc.modeling.parameter_sharing import build_on_meta, clone_sharing_parameters, share_parameters

NO_FIELD = "a table whose length no config says"
BESIDE = "positions beside a table"
"""Values of `UnsupportedModelError.reason`."""
SAME = 1e-3
"""Maximum difference of hidden states between two computations of biases, relative to their standard deviation."""
ROUNDING = 1e-2
"""Maximum difference of computed positions from those in a checkpoint, which may be rounded to 16 bits."""
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
    longer = dict[str, Tensor]()
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
                old = found.stack.get_parameter(key).detach()
                rows = asked.interpolate_table(old[first : first + asked.before])
                longer[f"{path}.{key}".lstrip(".")] = torch.cat([old[:first], rows])
    return with_tables(host.model, host.longer_config(), longer)


def with_computed_tables(host: ExtensionTarget) -> Any:
    """A model of the same class whose computed positions (Marian, Whisper's encoder) continue exactly to the new length.

    None if a table isn't computed, or if the positions are rotations, which a longer input may need at other frequencies.
    """
    if any(component.verb == "rotate" for component in host.limiting):
        return None
    longer, config = dict[str, Tensor](), host.longer_config()
    twin = build_on_meta(type(host.model), config, like=host.model)
    for path, there in twin.named_parameters():
        old = host.model.get_parameter(path).detach()
        if there.shape != old.shape:
            made = [_initialized(twin, path, old) for _ in range(2)]
            rows = made[0][: len(old)]
            if not torch.equal(*made) or rows.shape != old.shape or not torch.allclose(rows, old, rtol=0, atol=ROUNDING):
                return None
            longer[path] = torch.cat([old, made[0][len(old) :]])
    found = with_tables(host.model, config, longer)
    reached = [each.usable_length for name, each in detection.find_all(found).items() if name in host.stacks]
    return found if all(length is None or length >= host.asked.after for length in reached) else None


def _initialized(twin: Any, path: str, like: Tensor) -> Tensor:
    """The values that a new model has at a path. Those of a computed table are always the same."""
    owner, _, key = path.rpartition(".")
    module = twin.get_submodule(owner)
    module._parameters[key] = made = nn.Parameter(
        torch.empty(module._parameters[key].shape, dtype=like.dtype, device=like.device), requires_grad=False
    )
    with global_rng_lock(), torch.random.fork_rng(devices=[]), torch.no_grad(), guard_torch_init_functions():
        for inside in (module, twin.get_submodule(owner.rpartition(".")[0])):  # Whisper's encoder initializes its table
            twin._init_weights(inside)
    return made.detach().clone()


def with_tables(model: Any, config: Any, tables: Mapping[str, Tensor]) -> Any:
    """A model of the same class with another config, which has new values of some parameters and shares the others.

    Raises UnsupportedModelError if a parameter doesn't have the shape that the config specifies.
    """
    twin = build_on_meta(type(model), config, like=model)
    for path, there in twin.named_parameters():
        if (given := tables.get(path, model.get_parameter(path))).shape != there.shape:
            raise UnsupportedModelError(
                f"{path} of {type(model).__name__} would have shape {[*given.shape]}, but the config specifies "
                f"{[*there.shape]}",
                reason=NO_FIELD,
                remedy="Use an encoding without position embeddings: hf_posenc.patch(model, 'alibi').",
            )
    rebuilt = {path.rpartition(".")[0] for path in tables}
    for name in rebuilt:
        module = twin.get_submodule(name)
        for key in (key for key, parameter in module._parameters.items() if parameter is not None):
            old = model.get_parameter(path := f"{name}.{key}".lstrip("."))
            module._parameters[key] = nn.Parameter(tables[path], old.requires_grad) if path in tables else old
    share_parameters(model, twin, rebuilt, resized=True)
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
