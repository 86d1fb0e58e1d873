"""The structure of an encoder or decoder ("stack"): its positional components, attentions, and layers.

It is detected when an original model is patched (detection.py), and read from the plan in the config when a patched model is
built or loaded.
"""

import copy
import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc import _compat
from hf_posenc.architectures.components.component import PositionComponent, UnsupportedModelError
from hf_posenc.attention import custom
from hf_posenc.configuration import LENGTH_FIELD, PositionSpec, StackPlan
from hf_posenc.encodings import Geometry
from hf_posenc.signatures import IS_CAUSAL, reads_tokens

CROSS_ATTENTION = re.compile(r"cross_?att|encoder_attn|(enc|encoder)_?(dec|decoder)_?att", re.IGNORECASE)
"""Matches paths of cross-attentions, such as crossattention, cross_attn, encoder_attn, and EncDecAttention."""
CAUSAL_MASKS = frozenset(["create_causal_mask", "create_sliding_window_causal_mask"])
"""Functions of Transformers that create causal masks, or bidirectional ones if `config.is_causal` is False."""
BIDIRECTIONAL_MASK = "create_bidirectional_mask"
CAUSAL_FLAGS = ("is_decoder", "use_bidirectional_attention")
"""Other config flags that can select between causal and bidirectional masks."""


@dataclass(frozen=True)
class Structure:
    """The positional components and attentions of one stack. Paths are dotted and relative to the stack.

    attentions, cross_attentions: the modules by path.
    order_sensitive: other modules in its layers that depend on token order (linear attention, state spaces, convolutions), by
        path. `patch` doesn't change them.
    role: "encoder" or "decoder".
    masks: names of the functions and config flags with which its code creates masks.
    axes: number of coordinates of a token.
    extra_tokens: number of leading and trailing tokens that are not patches.
    windows: whether attentions see only parts of an image.
    patches: path of the convolution that computes the patches.
    flattens: whether IDs with more dimensions than `[B, L]` are flattened to one text per row.
    """

    stack: Any
    components: tuple[PositionComponent, ...]
    attentions: Mapping[str, nn.Module]
    cross_attentions: Mapping[str, nn.Module] = field(default_factory=dict)
    order_sensitive: Mapping[str, nn.Module] = field(default_factory=dict)
    role: str = "encoder"
    masks: frozenset[str] = frozenset()
    axes: int = 1
    extra_tokens: tuple[int, int] = (0, 0)
    windows: bool = False
    patches: str | None = None
    flattens: bool = False

    @classmethod
    def planned(cls, stack: Any, plan: StackPlan) -> "Structure":
        """The structure that a plan describes. Raises a ValueError that names the module if the plan doesn't fit the stack."""
        if changed := {name for name, value in plan.settings if getattr(stack.config, name, value) != value}:
            raise ValueError(f"config.{min(changed)} has changed since config.position_plan was made. {REMEDY}")
        modules = modules_by_path(stack)
        kinds = {kind.__name__: kind for kind in PositionComponent.kinds}
        components: list[PositionComponent] = []
        for kind, pattern in plan.components:
            for path in _found(stack, pattern, modules):
                try:
                    components.append(component := kinds[kind].at(path, stack, modules))
                    component.check(stack.config)
                except (KeyError, AttributeError, TypeError) as error:
                    raise _misfit(stack, path, f"no {kind}") from error
        named = [{path: modules[path] for path in _all_found(stack, paths, modules)} for paths in plan.paths]
        attentions, across, others = named
        for path, module in {**attentions, **across}.items():
            if not (custom.uses_interface(original_class(module)) or custom.row_of(module)):
                raise _misfit(stack, path, "no attention")
        return cls(
            stack,
            tuple(components),
            attentions,
            across,
            others,
            role=plan.role,
            masks=frozenset(plan.masks),
            axes=plan.axes,
            extra_tokens=plan.extra_tokens,
            windows=plan.windows,
            patches=plan.patch_projection,
            flattens=plan.flattens_ids,
        )

    @functools.cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The modules of the stack by path.

        They are cached on first access, because one traversal per layer would take time quadratic in the number of layers.
        """
        return modules_by_path(self.stack)

    @property
    def tokens(self) -> Tensor | None:
        """The token embedding weights, or None if the stack doesn't read token IDs."""
        return tokens_of(self.stack)

    @property
    def embedding_outputs(self) -> tuple[str, ...]:
        """Paths of the modules to whose output the embeddings are added.

        Modules that contain the layers are excluded, because their output comes after the layers. VideoPrism has two: one for
        the patches of each frame, and one for the frames at each patch.
        """
        found = dict.fromkeys(component.output_module for component in self.components if component.output_module is not None)
        return tuple(path for path in found if not any(each.startswith(f"{path}.") for each in self.attentions))

    @property
    def token_axis(self) -> int:
        """The token axis of the hidden states that enter the layers."""
        axes = (source.layer_token_axis for source in self.components if source.layer_token_axis is not None)
        return next(axes, custom.token_axis(next(iter(self.attentions.values()))))

    @property
    def block_token_axis(self) -> int:
        """The token axis of the output of the attention blocks."""
        axes = (source.layer_token_axis for source in self.components if source.layer_token_axis is not None)
        return next(axes, custom.block_token_axis(next(iter(self.attentions.values()))))

    @property
    def offset(self) -> int:
        """The position id of the first token."""
        return next((component.offset for component in self.components if component.offset is not None), 0)

    @property
    def usable_length(self) -> int | None:
        """The original model's maximum length in tokens. None for no limit."""
        return _least(component.usable_length(self.stack.config) for component in self.components)

    @property
    def length_if_disabled(self) -> int | None:
        """The maximum length in tokens with another encoding. None for no limit, or if the stack doesn't read token IDs."""
        lengths = [component.length_if_disabled(self.stack.config) for component in self.components]
        return _least(lengths) if self.tokens is not None else None

    @functools.cached_property
    def trained_length(self) -> int | None:
        """The length in tokens that the original model's positions were trained for. None if unknown.

        The config of a patched model can specify another length.
        """
        config = self.stack.config
        spec = getattr(config, "position_spec", None)
        if spec is not None and spec.original is not None and spec.original.rows is not None:
            config = copy.copy(config)
            setattr(config, LENGTH_FIELD, spec.original.rows)
        return _least(component.trained_length(config) for component in self.components)

    @property
    def layers(self) -> dict[str, int]:
        """The layer index of each attention, by path.

        Raises UnsupportedModelError if an attention isn't in a numbered layer.
        """
        return {path: int(layer.rpartition(".")[2]) for path, layer in self.layer_paths.items()}

    @property
    def layer_paths(self) -> dict[str, str]:
        """The path of each attention's layer. Raises UnsupportedModelError if an attention isn't in a numbered layer."""
        return {path: self._layer(path)[0] for path in self.attentions}

    @property
    def first_layer(self) -> str:
        """The path of the first layer, which may be an order-sensitive layer without attention."""
        first, _ = self._layer(next(iter(self.attentions)))
        return f"{first.rpartition('.')[0]}.0" if self.order_sensitive else first

    @functools.cached_property
    def square_windows(self) -> frozenset[str]:
        """The paths of the attentions that see square windows of the image."""
        if self.tokens is not None:
            return frozenset()
        from hf_posenc.architectures.components.vision import has_square_windows

        layers = tuple(f"{path}." for path, module in self.modules.items() if has_square_windows(module))
        return frozenset(path for path in self.attentions if path.startswith(layers))

    @property
    def blocks(self) -> dict[str, str]:
        """The path of each attention's block, the child of the layer that contains the attention."""
        return {path: self._layer(path)[1] for path in self.attentions}

    def _layer(self, path: str) -> tuple[str, str]:
        """The paths of an attention's layer and block."""
        if path not in self._numbered:
            raise UnsupportedModelError(
                f"{path} of {type(self.stack).__name__} isn't in a numbered layer",
                reason="no numbered layers",
                remedy="Use inject='input' and omit layers.",
            )
        return self._numbered[path]

    @functools.cached_property
    def _numbered(self) -> dict[str, tuple[str, str]]:
        return layers_and_blocks(self.modules, self.attentions)

    def saved_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        """The shapes of all learned tensors that `unpatch` needs, by key."""
        return {key: shape for component in self.components for key, shape in component.saved_shapes(rows).items()}

    def geometry(self, max_length: int | None, inject: str) -> Geometry:
        """The sizes for the encoding of the stack. Embeddings can be narrower than layers (ALBERT, ELECTRA)."""
        widths = [component.width for component in self.components if component.width is not None] if inject == "input" else []
        if self.tokens is None:
            widths += self.widths[:1]
        return self._geometry(next(iter(self.attentions.values())), max_length, widths[0] if widths else None)

    @property
    def widths(self) -> list[int]:
        """The width of the hidden states that enter each attention that has linear projections. Swin's stages differ."""
        layers = ((each for each in module.children() if isinstance(each, nn.Linear)) for module in self.attentions.values())
        return [first.in_features for each in layers if (first := next(each, None)) is not None]

    def geometry_of(self, attention: nn.Module, max_length: int | None) -> Geometry:
        """The sizes for an encoding of one attention."""
        return self._geometry(attention, max_length, None)

    def _geometry(self, attention: Any, max_length: int | None, width: int | None) -> Geometry:
        config = self.stack.config
        hidden = getattr(config, "hidden_size", None) or self.widths[0]  # timm's config has no sizes
        heads = getattr(attention, "num_heads", None) or getattr(attention, "num_attention_heads", None)
        heads = heads if isinstance(heads, int) else config.num_attention_heads
        names = ("qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_head")
        sizes = (getattr(attention, name, None) for name in names)
        head_dim = next((size for size in sizes if size), None)
        of_values = getattr(attention, "v_head_dim", None)  # of latent attention
        groups = getattr(attention, "num_key_value_groups", None)
        own_groups = getattr(attention, "num_kv_heads", None)  # Falcon's number of key heads
        return Geometry(
            hidden_size=width or hidden,
            num_attention_heads=heads,
            head_dim=head_dim or hidden // heads,
            max_length=max_length,
            is_causal=self._is_causal(attention),
            num_key_value_heads=heads // groups if groups else own_groups if isinstance(own_groups, int) else heads,
            trained_length=self.trained_length,
            value_head_dim=of_values if isinstance(of_values, int) and of_values != head_dim else 0,
            axes=self.axes,
        )

    def _is_causal(self, attention: nn.Module) -> bool:
        """Whether an attention is causal, given the current value of `config.is_causal`."""
        return _has_causal_mask(attention) or (self._made_causal(attention) and self.causal_flags.get(IS_CAUSAL, True))

    def _made_causal(self, attention: nn.Module) -> bool:
        """Whether an attention is causal unless `config.is_causal` is False."""
        declared = any(getattr(attention, name, False) for name in ("is_causal", "is_decoder"))
        return declared or custom.is_causal(attention) or self._uses_causal_mask

    @functools.cached_property
    def _uses_causal_mask(self) -> bool:
        """Whether the stack creates a causal mask. Its attentions may have no such attribute (CLIP's text model)."""
        config = self.stack.config
        if getattr(config, "causal", False) is True:  # XLM, Flaubert
            return True
        if "create_causal_mask" not in self.masks:
            return False
        if BIDIRECTIONAL_MASK in self.masks:
            return bool(getattr(config, "is_decoder", False))
        return not getattr(config, "use_bidirectional_attention", False)

    @property
    def causal_flags(self) -> dict[str, bool]:
        """The config flags that select a causal or bidirectional mask in every forward pass, with their values."""
        config = self.stack.config
        flags = {name: bool(getattr(config, name)) for name in CAUSAL_FLAGS if name in self.masks and hasattr(config, name)}
        if CAUSAL_MASKS & self.masks and any(self._made_causal(attention) for attention in self.attentions.values()):
            flags[IS_CAUSAL] = bool(getattr(config, IS_CAUSAL, True))
        return flags


def modules_by_path(model: nn.Module, remove_duplicate: bool = True) -> dict[str, nn.Module]:
    """The same as `dict(model.named_modules())`, which is slow because it nests a generator for each level."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, path: str) -> None:
        if remove_duplicate and id(module) in seen:
            return
        seen.add(id(module))
        found[path] = module
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}.{name}" if path else name)

    visit(model, "")
    return found


class OtherStack(ValueError):
    """The plans describe another class of stack than those of the model, such as Dinov2Model for Dinov2Backbone."""


def planned_in(model: Any, plans: Collection[StackPlan], where: Collection[str] = ()) -> dict[str, Structure]:
    """The structure of each stack of an original model by path, innermost first, as the plans in its config describe it.

    A plan names the class of a stack, so it applies to the base model and to models with any head. The plans of stacks that the
    model lacks are ignored, for example if BART's decoder is loaded separately. Patched stacks are skipped.

    where: the placement of a spec. If it isn't empty, stacks that it doesn't name are skipped.

    Raises a ValueError that names the module if the plans don't fit, and OtherStack if the model has none of their stacks.
    """
    modules = modules_by_path(model)
    models = {path: module for path, module in modules.items() if isinstance(module, PreTrainedModel)}
    found: dict[str, Structure] = {}
    wanted = roles(where)
    there = {plan.role for plan in plans}
    there |= {"cross" for plan in plans if plan.cross_attentions and plan.role == "decoder"}
    if missing := {*where} - there:
        raise ValueError(f"config.position_plan has no {min(missing)!r}, which position_encoding['where'] names. {REMEDY}")
    for plan in (plan for plan in plans if not wanted or plan.role in wanted):
        paths = [path for path, module in models.items() if original_class(module).__name__ == plan.stack and path not in found]
        paths = [path for path in paths if not is_patched(models[path])]
        alike = sum(each.stack == plan.stack for each in plans) > 1
        if alike or len(paths) > 1:
            last = plan.path.rpartition(".")[2]
            paths = [path for path in paths if path.rpartition(".")[2] == last] or ([] if alike else paths)
        found |= {path: Structure.planned(models[path], plan) for path in paths}
    known = {id(module) for each in found.values() for module in (*each.attentions.values(), *each.cross_attentions.values())}
    taken = [module for module in models.values() if is_patched(module)]
    known |= {id(module) for each in taken for module in each.modules()}
    classes = {type(module) for each in found.values() for module in each.attentions.values()}
    left = [path for path, module in modules.items() if type(module) in classes and id(module) not in known]
    left = [path for path in left if custom.reads_tokens(path, modules[path])]
    if where:
        left = [path for path in left if any(path.startswith(f"{stack}.") for stack in found)]
    if not (found or taken) or left:
        place = f"{left[0]!r}" if left else f"a {' or a '.join(sorted({plan.stack for plan in plans}))}"
        raise (ValueError if left else OtherStack)(
            f"config.position_plan of this {type(model).__name__} {'omits' if left else 'describes'} {place}"
            f"{'' if left else ', which the model does not have'}. {REMEDY}"
        )
    return {path: found[path] for path in reversed(models) if path in found}


def roles(where: Collection[str]) -> set[str]:
    """The roles of the stacks that `where` names. Cross-attentions belong to the decoder."""
    return {"decoder" if name == "cross" else name for name in where}


REMEDY = (
    "Restore the config that was saved with the model, or set its position_plan to None. hf-posenc then detects the structure "
    "again."
)


def original_class(model: Any) -> type:
    """The class of a model. For a patched model, the class of the original model."""
    return getattr(type(model), "original_class", type(model))


def _all_found(stack: Any, patterns: Iterable[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """The paths of all modules that match patterns, in module order. Raises ValueError if a pattern has no match."""
    wanted = {path for pattern in patterns for path in _found(stack, pattern, modules)}
    if missing := wanted - modules.keys():
        raise _misfit(stack, min(missing), "no module")
    return [path for path in modules if path in wanted]


def _found(stack: Any, pattern: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """The paths that match a pattern. Raises ValueError if there are none."""
    if paths := list(matching(pattern, modules)):
        return paths
    raise _misfit(stack, pattern, "nothing")


def matching(pattern: str, modules: Iterable[str]) -> Iterator[str]:
    """The paths that match a pattern of a plan: those of modules, otherwise those of attributes of modules.

    `*` matches any number. A pattern without `*` is returned unchanged.
    """
    if "*" not in pattern:
        yield pattern
        return
    regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    found = [path for path in modules if regex.fullmatch(path)]
    if not found:
        owner, _, name = pattern.rpartition(".")
        found = [f"{path}.{name}" for path in matching(owner, modules)] if "*" in owner else []
    yield from found


def _misfit(stack: Any, path: str, there: str) -> ValueError:
    return ValueError(f"config.position_plan names {path!r}, but this {type(stack).__name__} has {there} there. {REMEDY}")


def _least(lengths: Iterable[int | None]) -> int | None:
    return min((length for length in lengths if length is not None), default=None)


def layers_and_blocks(modules: Mapping[str, nn.Module], attentions: Collection[str]) -> dict[str, tuple[str, str]]:
    """The paths of the layer and of the attention block of each attention in a numbered layer, by the attention's path.

    The block is the child of the layer. The parts of a layer can be numbered too. T5's first attention is in block.0.layer.0.
    """
    found = {}
    for path in attentions:
        names = path.split(".")
        levels = [level for level, name in enumerate(names[:-1]) if name.isdigit()]
        while len(levels) > 1 and _is_list_of_parts(".".join(names[: levels[-1]]), modules, attentions):
            levels.pop()
        if levels:
            end = levels[-1] + 1
            of_block = 2 if names[end + 1 : end + 2] and names[end + 1].isdigit() else 1
            found[path] = ".".join(names[:end]), ".".join(names[: end + of_block])
    return found


def _is_list_of_parts(path: str, modules: Mapping[str, nn.Module], attentions: Collection[str]) -> bool:
    """Whether the children of a list are the parts of one layer: all of different classes, and some without an attention."""
    kinds = [type(child) for child in modules[path].children()]
    without = (f"{path}.{key}." for key in modules[path]._modules)
    return len({*kinds}) == len(kinds) and any(not any(each.startswith(part) for each in attentions) for part in without)


def _has_causal_mask(attention: Any) -> bool:
    """Whether an attention has a causal mask in a buffer, which it applies in addition to the mask argument (GPT-Neo)."""
    mask = dict(attention.named_buffers(recurse=False)).get("bias")
    return mask is not None and mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[-1] == mask.shape[-2]


def is_patched(module: nn.Module) -> bool:
    """Whether a module is a patched stack."""
    return isinstance(module, PreTrainedModel) and "posenc" in module._modules


def tokens_of(stack: Any) -> Tensor | None:
    """The token embedding weights, or None if the stack doesn't read token IDs.

    IDs are `[B, L]`, or `[B, L, N]` if each token is the sum of N embeddings. The input embeddings of a vision model can be its
    patch projection (CLIP), which doesn't count.
    """
    try:
        embeddings = stack.get_input_embeddings()
    except (NotImplementedError, AttributeError):  # GroupViT's text encoder lacks the method, Sam3Video the submodel
        embeddings = None
    if not isinstance(getattr(embeddings, "weight", None), Tensor) and reads_tokens(stack):
        rows = getattr(stack.config, "vocab_size", None) or 1
        parts = stack.children() if embeddings is None else [embeddings]
        inside = (module for part in parts if not isinstance(part, nn.ModuleList) for module in part.modules())
        tables = (module for module in inside if isinstance(module, nn.Embedding) and module.num_embeddings >= rows)
        embeddings = next(tables, None)
    cuts = isinstance(embeddings, (nn.Linear, _compat.Convolution))
    weight = getattr(embeddings, "weight", None)
    return weight if isinstance(weight, Tensor) and not cuts else None


def rows_of(modules: Mapping[str, nn.Module], attentions: Collection[str]) -> set[str]:
    """The paths of the lists of layers that contain attentions."""
    return {layer.rpartition(".")[0] for layer, _ in layers_and_blocks(modules, attentions).values()}


def parts_of(model: Any) -> dict[str, Any]:
    """The submodels of a model by path, outermost first.

    Paths are relative to the base model. If the base model itself has another kind of config than the model, it is a submodel
    too, and its path is its name in the model.
    """
    base = model.base_model
    whole = {} if type(base.config) is type(model.config) else {model.base_model_prefix: base}
    return {**whole, **{path: module for path, module in base.named_modules() if path and isinstance(module, PreTrainedModel)}}


def patched_parts(model: Any, spec: PositionSpec) -> list[tuple[Any, PositionSpec]]:
    """Each submodel of a model with its encoding. If there are several, those that the model's class lacks are skipped.

    CLIP's image classifier has no text model.
    """
    found = [(path, own) for path, own in spec.by_submodel.items() if not spec.submodels or path in parts_of(model)]
    return [(part(model, path), own) for path, own in found]


def part(model: Any, path: str | None) -> Any:
    """The submodel at a path of `parts_of`. If the path is None, or for DETR's encoder, which has the whole model's config, the
    model itself.
    """
    return model if path is None or is_patched(model) else parts_of(model).get(path) or model.base_model.get_submodule(path)
