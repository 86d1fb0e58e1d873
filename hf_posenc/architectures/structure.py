"""Finds the sources of position, attentions and layers of a stack, and refuses hosts that an encoding can't be put into."""

import copy
import functools
import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.architectures.components import HostRefused, Source, patch_projection, sees_order, signs_of_position
from hf_posenc.architectures.components.component import HOSTS_PAGE, OWN_PAGE, is_transformers
from hf_posenc.architectures.components.convolutions import is_convolution
from hf_posenc.architectures.components.declared import declared_in
from hf_posenc.architectures.components.detection import OTHER_SOURCES, convolves, mixes_its_parts
from hf_posenc.architectures.components.vision import cuts_into_windows
from hf_posenc.architectures.registration import names_in
from hf_posenc.attention import custom
from hf_posenc.configuration import LENGTH_FIELD
from hf_posenc.encodings import Geometry, listed, meant
from hf_posenc.signatures import IS_CAUSAL, TOKENS, argument_names, codes_within, reads_tokens

CROSS_ATTENTION = re.compile(r"cross_?att|encoder_attn|(enc|encoder)_?(dec|decoder)_?att", re.IGNORECASE)
"""In the path of an attention to another stack's states: crossattention, cross_attn, encoder_attn, EncDecAttention."""
SEVERAL_MODELS = "made of several models"
"""The reason of the refusal of a model which needs to be told the submodel."""
MIXES = frozenset(["attention_mask", "past_key_values", "cache_params", "position_ids", "position_embeddings", "mask"])
"""Arguments of modules that look at several tokens."""
CAUSAL_MASKS = frozenset(["create_causal_mask", "create_sliding_window_causal_mask"])
"""Functions of Transformers by which a stack makes masks. With `config.is_causal=False` they make bidirectional ones."""
CAUSAL_FLAGS = ("is_decoder", "use_bidirectional_attention")
"""Other flags of configs by which a stack may choose between causal and bidirectional masks."""

UNKNOWN = "no source of position that is known"
"""The reason of a refusal."""


@dataclass(frozen=True)
class Structure:
    """The sources and attentions of one stack. Paths are dotted, and relative to it.

    sources: where it has positions of its own.
    attentions: path -> self-attention.
    others: path -> module of what sees order by itself in its layers, beside their attentions or in place of one (linear
        attention, state spaces, convolutions). It stays as it is.
    fronts: path -> convolution before the layers, which makes the tokens of an image or a sound. It stays, too.
    """

    stack: Any
    sources: tuple[Source, ...]
    attentions: Mapping[str, nn.Module]
    others: Mapping[str, nn.Module] = field(default_factory=dict)
    fronts: Mapping[str, nn.Module] = field(default_factory=dict)

    @functools.cached_property
    def modules(self) -> dict[str, nn.Module]:
        """Path -> module of the stack, as it was when it was first asked for: walking it for each layer would take a time that
        grows with the square of their number."""
        return dict(self.stack.named_modules())

    @functools.cached_property
    def role(self) -> str:
        """Which stack of an encoder and a decoder it is."""
        return _role(self.stack)

    @functools.cached_property
    def across(self) -> dict[str, nn.Module]:
        """Path -> attention to another stack's states."""
        modules = self.modules.items()
        return {path: module for path, module in modules if _is_attention(module) and _looks_across(path, module)}

    @property
    def tokens(self) -> Tensor | None:
        """The table of token embeddings, if the stack reads tokens."""
        return tokens_of(self.stack)

    @property
    def entrances(self) -> tuple[str, ...]:
        """The paths of modules behind which vectors are added; behind one that holds the layers, too, they would come too late.
        VideoPrism has two: one for the patches of each frame, one for the frames at each place."""
        found = dict.fromkeys(source.entrance for source in self.sources if source.entrance is not None)
        return tuple(path for path in found if not any(each.startswith(f"{path}.") for each in self.attentions))

    @property
    def offset(self) -> int:
        """The position id of the first token."""
        return next((source.offset for source in self.sources if source.offset is not None), 0)

    @property
    def tellers_of_cells(self) -> tuple[Source, ...]:
        """The sources in a model of images that are given the row and column of each patch."""
        taking = (each for each in self.sources if each.verb == "rotate" and "position_ids" in argument_names(each.module))
        return tuple(taking) if self.tokens is None else ()

    @property
    def around_layers(self) -> tuple[nn.Module, ...]:
        """The modules within the stack that its layers lie in, outermost first, where they are given a mask of their inputs."""
        rows = _rows(self.modules, self.attentions)
        paths = [path for path in self.modules if path and any(row.startswith(f"{path}.") for row in rows)]
        modules = (self.stack.get_submodule(path) for path in sorted(paths))
        return tuple(module for module in modules if "attention_mask" in argument_names(module))

    @functools.cached_property
    def axes(self) -> int:
        """How many coordinates a token has: of a patch as many as the convolution that cuts it out. Of patches that lie by
        windows, not row by row, the number in that order alone."""
        path = patch_projection(self.modules)
        if self.tokens is not None or cuts_into_windows(self.modules) or path is None:
            return 1
        return 2 if self.tellers_of_cells or isinstance(self.modules[path], nn.Conv2d) else 3

    @property
    def claimed(self) -> set[str]:
        """The paths of what its sources are made of."""
        return {path for source in self.sources for path in source.claimed}

    @property
    def usable_length(self) -> int | None:
        """The longest input in tokens that the stock host is made for."""
        return _least(source.usable_length(self.stack.config) for source in self.sources)

    @functools.cached_property
    def trained_length(self) -> int | None:
        """The longest input in tokens that the stock host's positions were trained for, whatever length the config of a patched
        one promises."""
        config = self.stack.config
        spec = getattr(config, "position_spec", None)
        if spec is not None and spec.host is not None and spec.host.rows is not None:
            config = copy.copy(config)
            setattr(config, LENGTH_FIELD, spec.host.rows)
        return _least(source.trained_length(config) for source in self.sources)

    @property
    def layers(self) -> dict[str, int]:
        """Path of each attention -> the number of its layer.

        Raises HostRefused where one lies in no numbered layer.
        """
        return {path: int(layer.rpartition(".")[2]) for path, layer in self.layer_paths.items()}

    @property
    def layer_paths(self) -> dict[str, str]:
        """Path of each attention -> the path of its layer. Raises HostRefused where one lies in no numbered layer."""
        return {path: self._layer(path)[0] for path in self.attentions}

    @property
    def first_layer(self) -> str:
        """The path of the layer which the inputs enter, that of an attention or another one in the same row."""
        first, _ = self._layer(next(iter(self.attentions)))
        return f"{first.rpartition('.')[0]}.0" if self.others else first

    @property
    def blocks(self) -> dict[str, str]:
        """Path of each attention -> the path of its attention block, the layer's child."""
        return {path: self._layer(path)[1] for path in self.attentions}

    @property
    def contributions(self) -> dict[str, int]:
        """Path -> width of the modules whose outputs positions may change on average: the tables that are added to the
        inputs, and in each layer the last projection of the attention block and that of the feed-forward block, whose outputs
        enter a residual sum."""
        modules = self.modules
        found = {source.path: source.width for source in self.sources if source.takes_vectors and source.width is not None}
        for block, layer in dict(zip(self.blocks.values(), self.layer_paths.values(), strict=True)).items():
            inside = [path for path, module in modules.items() if f"{path}.".startswith(f"{layer}.") and self._projects(module)]
            inside = [path for path in inside if not CROSS_ATTENTION.search(path)]
            of_attention = [path for path in inside if f"{path}.".startswith(f"{block}.")]
            others = [path for path in inside if path not in of_attention]
            found.update((path, self.stack.config.hidden_size) for last in (of_attention, others) for path in last[-1:])
        return found

    def _projects(self, module: Any) -> bool:
        """Whether a module is a linear layer onto hidden states; of Transformers' Conv1D the width is `nf`."""
        width = getattr(module, "out_features", getattr(module, "nf", None))
        return isinstance(width, int) and width == self.stack.config.hidden_size and hasattr(module, "weight")

    def _layer(self, path: str) -> tuple[str, str]:
        """The paths of an attention's layer and of its block."""
        if path not in self._numbered:
            raise HostRefused(
                f"{path} of {type(self.stack).__name__} lies in no numbered layer: use inject='input', and no layers",
                reason="no numbered layers",
            )
        return self._numbered[path]

    @functools.cached_property
    def _numbered(self) -> dict[str, tuple[str, str]]:
        return numbered(self.modules, self.attentions)

    def kept_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        """Key -> shape of all learned tensors that `unpatch` needs."""
        return {key: shape for source in self.sources for key, shape in source.kept_shapes(rows).items()}

    def geometry(self, max_length: int | None, inject: str) -> Geometry:
        """The sizes of what the stack owns. Tables can be narrower than layers (ALBERT, ELECTRA)."""
        widths = [source.width for source in self.sources if source.width is not None] if inject == "input" else []
        if self.tokens is None:
            widths += self.widths[:1]
        return self._geometry(next(iter(self.attentions.values())), max_length, widths[0] if widths else None)

    @property
    def widths(self) -> list[int]:
        """The width of the states that enter each attention, where its projections tell it: those of Swin's stages differ."""
        layers = ((each for each in module.children() if isinstance(each, nn.Linear)) for module in self.attentions.values())
        return [first.in_features for each in layers if (first := next(each, None)) is not None]

    def geometry_of(self, attention: nn.Module, max_length: int | None) -> Geometry:
        """The sizes of one attention."""
        return self._geometry(attention, max_length, None)

    def _geometry(self, attention: Any, max_length: int | None, width: int | None) -> Geometry:
        config = self.stack.config
        heads = getattr(attention, "num_heads", None) or getattr(attention, "num_attention_heads", None)
        heads = heads if isinstance(heads, int) else config.num_attention_heads
        names = ("qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_head")
        sizes = (getattr(attention, name, None) for name in names)
        head_dim = next((size for size in sizes if size), None)
        of_values = getattr(attention, "v_head_dim", None)  # of latent attention
        groups = getattr(attention, "num_key_value_groups", None)
        own_groups = getattr(attention, "num_kv_heads", None)  # Falcon's number of key heads
        return Geometry(
            hidden_size=width or config.hidden_size,
            num_attention_heads=heads,
            head_dim=head_dim or config.hidden_size // heads,
            max_length=max_length,
            is_causal=self._is_causal(attention),
            num_key_value_heads=heads // groups if groups else own_groups if isinstance(own_groups, int) else heads,
            trained_length=self.trained_length,
            value_head_dim=of_values if isinstance(of_values, int) and of_values != head_dim else 0,
            axes=self.axes,
        )

    def _is_causal(self, attention: nn.Module) -> bool:
        """Whether the queries of an attention see no later keys."""
        return _has_causal_mask(attention) or (self._made_causal(attention) and self.causal_flags.get(IS_CAUSAL, True))

    def _made_causal(self, attention: nn.Module) -> bool:
        """Whether they see none unless `config.is_causal` is False."""
        declared = any(getattr(attention, name, False) for name in ("is_causal", "is_decoder"))
        return declared or custom.is_causal(attention) or _masks_the_future(self.stack)

    @property
    def causal_flags(self) -> dict[str, bool]:
        """Name -> value of each flag of the config by which the stack chooses, at every forward, between a causal and a
        bidirectional mask."""
        names, config = _named_in(self.stack.__class__), self.stack.config
        flags = {name: bool(getattr(config, name)) for name in CAUSAL_FLAGS if name in names and hasattr(config, name)}
        if CAUSAL_MASKS & names and any(self._made_causal(attention) for attention in self.attentions.values()):
            flags[IS_CAUSAL] = bool(getattr(config, IS_CAUSAL, True))
        return flags


def _least(lengths: Iterable[int | None]) -> int | None:
    return min((length for length in lengths if length is not None), default=None)


def numbered(modules: Mapping[str, nn.Module], attentions: Collection[str]) -> dict[str, tuple[str, str]]:
    """Path of each attention in a numbered layer -> the paths of its layer and of its attention block, the layer's child.

    The parts of a layer may be numbered themselves: T5 has its first attention in block.0.layer.0.
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
    """Whether the children of a list are the parts of one layer, each of a class of its own, and not all with an attention."""
    kinds = [type(child) for child in modules[path].children()]
    without = (f"{path}.{key}." for key in modules[path]._modules)
    return len({*kinds}) == len(kinds) and any(not any(each.startswith(part) for each in attentions) for part in without)


def _has_causal_mask(attention: Any) -> bool:
    """Whether an attention hides later keys by a buffer of its own, whatever mask it is given (GPT-Neo)."""
    mask = dict(attention.named_buffers(recurse=False)).get("bias")
    return mask is not None and mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[-1] == mask.shape[-2]


def _masks_the_future(stack: Any) -> bool:
    """Whether a stack hides later tokens by the mask that it makes, of which its attentions don't know (CLIP's text model)."""
    config = stack.config
    if getattr(config, "causal", False) is True:  # XLM, Flaubert
        return True
    names = _named_in(stack.__class__)
    if "create_causal_mask" not in names:
        return False
    if "create_bidirectional_mask" in names:
        return bool(getattr(config, "is_decoder", False))
    return not getattr(config, "use_bidirectional_attention", False)


@functools.cache
def _named_in(stack: Any) -> frozenset[str]:
    """The names that the methods of a stack's own classes use."""
    classes = [cls for cls in stack.__mro__ if issubclass(cls, PreTrainedModel) and cls is not PreTrainedModel]
    functions = (inspect.unwrap(value) for cls in classes for value in vars(cls).values() if inspect.isfunction(value))
    return frozenset(name for function in functions for code in codes_within(function.__code__) for name in code.co_names)


def is_patched(module: nn.Module) -> bool:
    """Whether a module is a stack with an encoding in it."""
    return isinstance(module, PreTrainedModel) and "posenc" in module._modules


def find_all(model: Any, where: Collection[str] = ()) -> dict[str, Structure]:
    """Path -> structure of each stack of a model, innermost first: BART has an encoder and a decoder. Stacks which are patched
    already are passed over.

    where: of a spec; a stack in which nothing acts is passed over, too.

    Raises HostRefused where an encoding can't be put into all of the others, or where there is none. ValueError where the
    model has no such stack.
    """
    refuse_several_models(model)
    wanted = {"decoder" if name == "cross" else name for name in where}
    passed: list[str] = []
    models = {path: module for path, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    taken = [path for path, module in models.items() if is_patched(module)]
    found: dict[str, Structure] = {}
    for path, module in reversed(models.items()):
        inside = f"{path}." if path else ""
        if not is_patched(module):
            inner = [other for other in found if other.startswith(inside)]
            patched = [other.removeprefix(inside) for other in (*taken, *passed) if other.startswith(inside)]
            try:
                structure = _find(module, [*patched, *(other.removeprefix(inside) for other in inner)])
            except HostRefused:
                if not wanted or _role(module) in wanted:
                    raise
                passed.append(path)
                continue
            around = [*patched, *(other.removeprefix(inside) for other in inner)]
            if structure is None and inner and _has_sources_around(module, around):
                # Swin's encoder has biases, and the model around it a table: one stack.
                structure = _find(module, patched)
                found = {other: each for other, each in found.items() if other not in inner}
            if structure is not None and wanted and structure.role not in wanted:
                passed.append(path)
            elif structure is not None:
                found[path] = structure
    _check_where(model, where, found)
    left = {path for path, module in model.named_modules() if _is_self_attention(path, module)}
    if not left:
        raise none_found(type(model))
    left -= {f"{path}.{name}".lstrip(".") for path, structure in found.items() for name in structure.attentions}
    left = {path for path in left if not any(f"{path}.".startswith(f"{stack}.") for stack in (*taken, *passed))}
    if left:
        raise HostRefused(
            f"{type(model).__name__} has no source of position that is known, for {min(left)}",
            UNKNOWN,
        )
    return found


def _check_where(model: Any, where: Collection[str], found: Mapping[str, Structure]) -> None:
    if not where:
        return
    there = {structure.role for structure in found.values()}
    there |= {"cross" for structure in found.values() if structure.across and structure.role == "decoder"}
    if not (getattr(model.config, "is_encoder_decoder", False) and {*where} <= there):
        missing = ", ".join(map(repr, where))
        raise ValueError(
            f"where names {missing}, but {type(model).__name__} is no encoder and decoder with attentions of Transformers' "
            "interface in each of these: leave where out, or name what it has"
        )


def _role(stack: Any) -> str:
    """Which stack of an encoder and a decoder one is."""
    looks = any(_is_attention(module) and _looks_across(path, module) for path, module in stack.named_modules())
    return "decoder" if looks or getattr(stack.config, "is_decoder", False) else "encoder"


def _find(stack: Any, taken: Iterable[str]) -> Structure | None:
    """The structure of a stack, but for those within it that are taken. None where it has no attention, or no source of
    position: DINOv3's encoder gets its angles from the model around it.

    Raises HostRefused where not all of its sources of position can be taken over.
    """
    inside = tuple(f"{name}." for name in taken)
    modules = {name: module for name, module in stack.named_modules() if not f"{name}.".startswith(inside)}
    _refuse_modules(stack, modules)
    attentions = {name: module for name, module in modules.items() if _is_self_attention(name, module)}
    if not attentions:
        if inside or all(reason != OTHER_SOURCES for _, reason in signs_of_position(stack, modules, claimed=frozenset())):
            return None
        raise HostRefused(
            f"no attention of {type(stack).__name__} goes through Transformers' attention interface, so nothing can be rotated "
            "or biased there",
            "attention beside Transformers' interface",
        )
    declared = declared_in(stack, modules)
    others = {path: module for path, module in modules.items() if path not in declared}
    known = (source for kind in Source.kinds for source in kind.find(stack, others) if source.path not in declared)
    sources = (*declared.values(), *known)
    claimed = tuple(f"{path}." for source in sources for path in source.claimed)
    fronts = {path: module for path, module in _fronts(stack, modules, attentions).items() if not path.startswith(claimed)}
    structure = Structure(stack, sources, attentions, others_in_layers(modules, attentions), fronts)
    _refuse_unclaimed(structure, modules)
    # A stack of tokens without positions of its own has other layers to know order by. One whose layers are all attentions gets
    # its positions elsewhere.
    if not sources and (not structure.others or structure.tokens is None):
        return None
    _refuse_unreachable(structure, modules)
    return structure


def others_in_layers(modules: Mapping[str, nn.Module], attentions: Collection[str]) -> dict[str, nn.Module]:
    """Path -> module of what sees order by itself in the numbered layers of a stack, outside of its attentions."""
    rows = _rows(modules, attentions)
    found: dict[str, nn.Module] = {}
    for path, module in modules.items():
        if not (sees_order(module) or _pools(path, module)):
            continue
        in_row = any(re.match(rf"{re.escape(row)}\.\d+\.", path) for row in rows)
        within = any(f"{path}.".startswith(f"{other}.") for other in (*attentions, *found))
        around = any(f"{attention}.".startswith(f"{path}.") for attention in attentions)
        if in_row and not within and not around:
            found[path] = module
    return found


def _pools(path: str, module: nn.Module) -> bool:
    """Whether a module makes one token of several, for a layer of fewer tokens (adapters of speech encoders)."""
    return convolves(path, module) and max(getattr(module, "stride", (1,))) > 1


def _fronts(stack: Any, modules: Mapping[str, nn.Module], attentions: Collection[str]) -> dict[str, nn.Module]:
    """Path -> module of the convolutions outside the numbered layers of a stack that makes its tokens itself, of an image or a
    sound."""
    names = {*argument_names(stack)}
    if not TOKENS.isdisjoint(names) and stack.main_input_name not in names - TOKENS:
        return {}
    rows = tuple(f"{row}." for row in _rows(modules, attentions))
    # Convolutions of positions are sources, or nothing calls them.
    elsewhere = (*rows, *(f"{path}." for path, module in modules.items() if is_convolution(module)))
    return {path: module for path, module in modules.items() if convolves(path, module) and not path.startswith(elsewhere)}


def stays_in(stack: nn.Module) -> dict[str, nn.Module]:
    """Path -> module of what sees order by itself in a patched stack: in its layers, and before them."""
    inside = tuple(f"{name}." for name, module in stack.named_modules() if name and isinstance(module, PreTrainedModel))
    modules = {name: module for name, module in stack.named_modules() if not f"{name}.".startswith(inside)}
    attentions = [name for name, module in modules.items() if _is_self_attention(name, module)]
    return {**others_in_layers(modules, attentions), **_fronts(stack, modules, attentions)}


def _rows(modules: Mapping[str, nn.Module], attentions: Collection[str]) -> set[str]:
    """The paths of the lists of layers that attentions lie in."""
    return {layer.rpartition(".")[0] for layer, _ in numbered(modules, attentions).values()}


def _refuse_modules(stack: Any, modules: Mapping[str, nn.Module]) -> None:
    """Raises HostRefused where a module is one in which order stays visible, or which tokens alone don't reach."""
    for path, module in modules.items():
        if refusal := custom.refusal_of(module):
            raise HostRefused(
                f"{path} of {type(stack).__name__} is a {type(module).__name__}, which {refusal.why}"
                if path
                else f"{type(stack).__name__} {refusal.why}",
                reason="attention that can't be taken over",
                remedy=refusal.remedy,
            )


def _has_sources_around(stack: Any, taken: Iterable[str]) -> bool:
    """Whether a model has sources of position outside of the stacks within it."""
    inside = tuple(f"{name}." for name in taken)
    modules = {name: module for name, module in stack.named_modules() if not f"{name}.".startswith(inside)}
    return any(next(iter(kind.find(stack, modules)), None) is not None for kind in Source.kinds)


def refuse_several_models(model: Any) -> None:
    """Raises HostRefused for a model that joins others (LLaVA, DPR). The halves of one model, as BART's, have its config."""
    for path, module in model.named_modules():
        if path and isinstance(module, PreTrainedModel) and type(module.config) is not type(model.config):
            raise _several_models(model, path)


def _several_models(model: Any, inner: str) -> HostRefused:
    submodels = submodels_of(model)
    named = " or ".join(f"submodel={path!r}" for path in submodels)
    return HostRefused(
        f"{type(model).__name__} is made of several models, each with positions of its own, as {inner}",
        SEVERAL_MODELS,
        f"say which: {named}" if named else f"none of them can be taken by itself; {HOSTS_PAGE}",
        submodels=submodels,
    )


def submodel(model: Any, path: str) -> Any:
    """The model at a dotted path within the base model of one that is made of several.

    Raises ValueError if there is none, and HostRefused where the model mixes what its parts compute.
    """
    base = model.base_model
    inner = dict(base.named_modules()).get(path)
    if not isinstance(inner, PreTrainedModel) or type(inner.config) is type(base.config):
        there = submodels_of(model)
        taken = f"those that can be taken are {listed(there)}" if there else "none of those within can be taken; leave it out"
        raise ValueError(f"submodel={path!r} is no model of its own within {type(base).__name__}{meant(path, there)}: {taken}")
    _refuse_mixed(model, inner, path)
    return inner


def submodels_of(model: Any) -> tuple[str, ...]:
    """The paths, relative to the base model, of the models within that an encoding can be put into: none lies within another,
    and those that read tokens come first."""
    found: dict[str, bool] = {}
    for path, module in model.base_model.named_modules():
        inside = any(path.startswith(f"{other}.") for other in found)
        if path and not inside and isinstance(module, PreTrainedModel) and type(module.config) is not type(model.config):
            try:
                _refuse_mixed(model, module, path)
                find_all(module)
            except HostRefused:
                continue
            found[path] = reads_tokens(module)
    return tuple(sorted(found, key=lambda path: not found[path]))


def _refuse_mixed(model: Any, inner: Any, path: str) -> None:
    """Raises HostRefused for a part of a model that mixes what its parts compute."""
    for module in model.modules():
        if (why := mixes_its_parts(module)) and any(part is inner for part in module.modules()):
            raise HostRefused(f"{type(module).__name__} {why}: {path} can't be taken by itself", "parts that are mixed")


def _refuse_unclaimed(structure: Structure, modules: Mapping[str, nn.Module]) -> None:
    name = type(structure.stack).__name__
    claimed = {*structure.claimed, *structure.others, *structure.fronts}
    if signs := sorted(signs_of_position(structure.stack, modules, claimed)):
        reason = signs[0][1]
        raise HostRefused(
            f"{name} has sources of position which can't be taken over: {', '.join(path for path, _ in signs[:4])}", reason
        )
    offsets = {source.offset for source in structure.sources if source.offset is not None}
    if len(offsets) > 1:
        raise HostRefused(f"the tables of {name} begin at different ids: {offsets}", "tables that begin at different ids")


def _refuse_unreachable(structure: Structure, modules: Mapping[str, nn.Module]) -> None:
    """Raises HostRefused where the encoding could not act in all layers."""
    stack, name = structure.stack, type(structure.stack).__name__
    if reads_tokens(stack) and tokens_of(stack) is None:
        raise HostRefused(f"{name} has no table of token embeddings", "no table of token embeddings")
    for path, module in structure.attentions.items():
        if not is_transformers(type(module)) and not custom.row_of(module):
            _refuse_own_attention(f"{name}.{path}", module)
    if without := _layers_without_attention(structure, modules):
        raise HostRefused(
            f"{name}.{without[0]} is a {type(modules[without[0]]).__name__} without an attention of Transformers' interface, "
            "and what else it knows positions by was not found: the encoding would not act in it",
            "layers without attention",
        )


def _refuse_own_attention(path: str, module: Any) -> None:
    """Raises HostRefused for a user's own attention that doesn't look its function up as Transformers' own do, by which an
    encoding would be lost."""
    if not {"config", "_attn_implementation"} <= names_in(type(module)) or not hasattr(module, "config"):
        raise HostRefused(
            f"{path} is a {type(module).__name__} which doesn't ask self.config._attn_implementation in its forward for the "
            "function that it takes of ALL_ATTENTION_FUNCTIONS, so the encoding would be lost",
            reason="attention that chooses its function elsewhere",
            remedy=OWN_PAGE,
        )


def tokens_of(stack: Any) -> Tensor | None:
    """The table whose rows the input ids `[B, L]` name, or several ids for each place, `[B, L, N]`, whose rows are added up.

    None for a stack that reads something else. A model of images may call the projection that cuts patches out its input
    embeddings (CLIP).
    """
    try:
        embeddings = stack.get_input_embeddings()
    except NotImplementedError:  # GroupViT's text encoder doesn't say it
        embeddings = None
    if not isinstance(getattr(embeddings, "weight", None), Tensor) and reads_tokens(stack):
        rows = getattr(stack.config, "vocab_size", None) or 1
        parts = stack.children() if embeddings is None else [embeddings]
        inside = (module for part in parts if not isinstance(part, nn.ModuleList) for module in part.modules())
        tables = (module for module in inside if isinstance(module, nn.Embedding) and module.num_embeddings >= rows)
        embeddings = next(tables, None)
    cuts = isinstance(embeddings, (nn.Linear, nn.modules.conv._ConvNd))
    weight = getattr(embeddings, "weight", None)
    return weight if isinstance(weight, Tensor) and not cuts else None


def none_found(host: type[PreTrainedModel]) -> HostRefused:
    """The refusal of a host in which `find` found nothing."""
    return HostRefused(
        f"{host.__name__} has no place for a position encoding: neither positions of its own nor an attention of "
        "Transformers' interface were found in it",
        "neither a source of position nor an attention of the interface",
    )


def _layers_without_attention(structure: Structure, modules: Mapping[str, nn.Module]) -> list[str]:
    """The layers in a row with attentions that have none, and of which nothing else is known either: neither what sees order
    by itself, nor that it treats each token alone."""
    with_attention = {layer for layer, _ in numbered(modules, structure.attentions).values()}
    rows = {layer.rpartition(".")[0] for layer in with_attention}
    layers = (path for path in modules if path.rpartition(".")[0] in rows and path.rpartition(".")[2].isdigit())
    known = [*with_attention, *structure.others]
    left = [path for path in layers if not any(f"{other}.".startswith(f"{path}.") for other in known)]
    return [path for path in left if any(_may_mix(module) for module in modules[path].modules() if module is not modules[path])]


def _may_mix(module: nn.Module) -> bool:
    """Whether a module within a layer may look at several tokens: it takes more than hidden states, or is named so. (A
    feed-forward block or a choice of experts takes hidden states alone; an expert which tokens are its own.)"""
    return bool(MIXES & {*argument_names(module)}) or "attention" in type(module).__name__.lower()


def _is_self_attention(path: str, module: nn.Module) -> bool:
    return _is_attention(module) and not _looks_across(path, module)


def _is_attention(module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    on_interface = "ALL_ATTENTION_FUNCTIONS" in getattr(getattr(forward, "__code__", None), "co_names", ())
    return on_interface or bool(custom.row_of(module))


def _looks_across(path: str, module: nn.Module) -> bool:
    """Whether an attention's keys are another stack's states."""
    return bool(CROSS_ATTENTION.search(path)) or bool(getattr(module, "is_cross_attention", False))
