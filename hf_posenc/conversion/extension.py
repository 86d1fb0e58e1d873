"""`extend` changes a model for longer inputs and keeps its trained weights."""

import copy
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from hf_posenc import _compat
from hf_posenc import configuration as specs
from hf_posenc._versions import DOCS
from hf_posenc.architectures import structure
from hf_posenc.architectures.structure import is_patched
from hf_posenc.configuration import LENGTH_FIELD
from hf_posenc.conversion.extend_images import NewSize, with_image_size
from hf_posenc.conversion.extend_rope import ROTARY, with_other_rotations
from hf_posenc.conversion.extend_tables import by_input, with_computed_tables, with_longer_tables
from hf_posenc.conversion.extend_target import ExtensionTarget
from hf_posenc.conversion.patching import patched_submodel, refuse
from hf_posenc.encodings import (
    Geometry,
    PositionEncoding,
    checked_max_length,
    did_you_mean,
    encoding_class,
    initialize_missing,
    marked_as_loaded,
    options_of,
    quoted,
    short_repr,
)
from hf_posenc.encodings.table_interpolation import CUBIC, DYNAMIC, STATIC, WINDOWS, Extension
from hf_posenc.modeling.derived import PosEncModelMixin
from hf_posenc.modeling.embedding import PositionEmbedding, TokenPositionEmbedding
from hf_posenc.modeling.encoding_checks import refuse_unwindowed
from hf_posenc.modeling.parameter_sharing import (
    build_on_meta,
    encodings_in,
    refuse_wrapped,
    share_parameters,
)
from hf_posenc.modeling.sentence_transformers import apply_to_sentence_transformer, is_sentence_transformer
from hf_posenc.signatures import reads_tokens

M = TypeVar("M", bound=nn.Module)
METHODS = tuple(dict.fromkeys((*STATIC, DYNAMIC, *ROTARY, WINDOWS)))
"""The methods of `extend`."""
TABLES = (*STATIC, DYNAMIC)
ROLES = ("encoder", "decoder")
CHOICE = f"for learned tables {quoted(TABLES)}; for rotary positions {quoted(ROTARY)}; for encoders {WINDOWS!r}"


def extend(
    model: M,
    max_length: int | None = None,
    method: str | None = None,
    *,
    image_size: int | Sequence[int] | None = None,
    submodel: str | None = None,
    where: str | None = None,
    **settings: Any,
) -> M:
    """Extend a model to inputs of up to `max_length` tokens, or to images of another size.

    The result shares all other parameters with `model`, as in `patch`, and `model` itself doesn't change. Set its tokenizer's
    `model_max_length` to the new length. The command `hf-posenc extend` does this, and so does `extend` for a
    SentenceTransformer.

    Without a method, only the maximum length changes. This suits patched models whose encoding is defined at every position,
    and original models with computed positions (Marian, Pegasus, Whisper's encoder), whose tables continue exactly. `unpatch`
    works as before. With a method, positions change:

    Learned position embeddings, of an original model (BERT, RoBERTa, GPT-2, OPT, BART) or of the `learned` encoding. For an
    original model, all methods but "dynamic" and "windows" return a model of the same class, which loads without this package:
        "linear"      interpolates between both ends, which stay the same.
        "cubic"       interpolates by cubic convolution.
        "tiled"       repeats the position embeddings. "recurrent" is another name.
        "grouped"     shares each embedding among adjacent positions.
        "keep_first"  keeps the first `keep` embeddings (20) and interpolates the others (Long-CLIP).
        "dynamic"     interpolates by the length of each input. Inputs up to the old length stay bit-identical. An original
                      model is patched with `learned`. Positions are counted from the attention mask, as in every patched model.
                      Only encoders support it.

    RoPE, of an original model whose config has `rope_parameters` (the result is an original model, or without this field, a
    model patched with `rope`), or of the `rope` encoding:
        "linear"      position interpolation.
        "ntk"         a larger theta. It leaves no trace in the config, so don't apply it twice. The default factor is twice
                      that of other methods.
        "dynamic"     "ntk" by the length of the input; in an original model, by that of the longest one so far.
        "yarn", "longrope", "llama3"   Transformers' rules. "longrope" requires its lists of factors.
        "grouped"     SelfExtend: inputs up to the old length stay the same. In longer inputs, tokens at least `window` (a
                      quarter of the old length) apart are distinguished by groups of `group` positions. An original model is
                      patched with `self_extend`, whose second scores take the memory of `[B, H, Q, K]`.
    The factor is max_length divided by the old length, unless you pass `factor`. Layers with sliding windows and their own
    rotations keep them.

    Encoders, original or patched:
        "windows"     divides longer inputs into overlapping windows of `window` tokens (the old length), `stride` tokens
                      apart (three quarters of a window). Each has its own positions and repeats `prefix` and `suffix` special
                      tokens (1 each). The hidden state of a token comes from the window in which it is most central; those of
                      special tokens are means. If `token_type_ids` mark a first segment, such as a question, each window
                      repeats it.

    For another `image_size`, position embeddings are interpolated over rows and columns, as `interpolate_pos_encoding=True`
    does in each call (ViT, DeiT, BEiT, CLIP, DINOv2, AST). An original model keeps its class. In a patched model, `learned` and
    the original position embeddings are interpolated, and other encodings don't change. Set the size of the image processor
    too.

    Args:
        model: a Transformers model, patched or not, a SentenceTransformer with one, a `PositionEmbedding`, or a
            `TokenPositionEmbedding`.
        max_length: new maximum length in tokens, not below the old one. None, without a method: no limit.
        method: see above.
        image_size: new size in pixels, an integer or height and width, instead of max_length. For AST's spectrograms, mel bins
            and frames.
        submodel: in a composite model (CLIP), the dotted path of the submodel to extend, as in `patch`. A patched model needs
            it only if several submodels are patched.
        where: in an original encoder-decoder, "encoder" or "decoder". None: both, in Whisper only the decoder. Its encoder's
            length is max_source_positions, half of the frames. Marian and Pegasus have one length, so both are extended anyway.
        **settings: settings of the method: `keep` of "keep_first"; `window` and `group` of "grouped"; `window`, `stride`,
            `prefix`, and `suffix` of "windows"; parameters of a RoPE rule by their names in Transformers.

    Raises:
        ValueError: the positions require a method or don't support this one, the length is below the old one, or a setting is
            invalid.
        UnsupportedModelError: a ValueError for an original model whose positions can't be extended.
    """
    _check(max_length, method, settings)
    if where not in (None, *ROLES):
        raise ValueError(f"where={short_repr(where)} isn't valid. Choose one of {quoted(ROLES)}, or omit it.")
    if image_size is not None:
        return _with_image_size(model, image_size, submodel, (max_length, method, where))
    if is_sentence_transformer(model):
        change = functools.partial(extend, max_length=max_length, method=method, submodel=submodel, where=where, **settings)
        return apply_to_sentence_transformer(model, change, longer=True)
    if isinstance(model, (PositionEmbedding, TokenPositionEmbedding)) and (where or submodel) is not None:
        raise ValueError(f"{type(model).__name__} has no part {(where or submodel)!r}. Omit where and submodel.")
    if isinstance(model, TokenPositionEmbedding):
        twin = copy.copy(model)
        twin._modules = {**model._modules, "positions": extend(model.positions, max_length, method, **settings)}
        return twin
    if isinstance(model, PositionEmbedding):
        refuse_wrapped(model, "extend")
        return _extended_layer(model, max_length, method, settings)
    refuse(model, "extend")
    if where is not None and isinstance(model, PosEncModelMixin):
        raise ValueError(
            f"where={short_repr(where)} selects a part of an original model to extend. Omit it for a patched model. The model "
            "was not changed."
        )
    if isinstance(model, PosEncModelMixin):
        return _extended_model(model, patched_submodel(model, submodel), max_length, method, settings)
    if submodel is not None and method is None:
        raise ValueError(
            f"submodel={short_repr(submodel)} of an unpatched model can only be extended by a method. Methods: {CHOICE}. The "
            "model was not changed."
        )
    specs.raise_if_v4_relative(model, "it has no positions to extend")
    host = (
        None if max_length is None else ExtensionTarget.find(model, max_length, method or STATIC[0], settings, submodel, where)
    )
    if method is None or host is None:
        if host is not None and (longer := with_computed_tables(host)) is not None:
            return longer
        raise ValueError(
            f"extend() needs a method for an unpatched {type(model).__name__}: {CHOICE} (see "
            f"{DOCS}/reference/extend_methods.md). Or switch to an encoding without a length limit: "
            "hf_posenc.patch(model, 'alibi'). For images, pass image_size; for Whisper's encoder, where='encoder'. The "
            "model was not changed."
        )
    return _extended_host(host)


def _with_image_size(model: Any, image_size: Any, submodel: str | None, others: tuple[Any, ...]) -> Any:
    """The model for another image size, patched or original. others: arguments that exclude it."""
    if any(other is not None for other in others):
        raise ValueError(
            f"image_size={short_repr(image_size)} excludes max_length, method, and where. Pass only one of them. The model was "
            "not changed."
        )
    refuse(model, "extend")
    if not isinstance(model, PosEncModelMixin):
        return with_image_size(model, image_size, submodel)
    plans, stacks = specs.plans_of(model.config), [module for module in model.modules() if is_patched(module)]
    if len(plans) != 1 or len(stacks) != 1 or submodel is not None:
        raise ValueError(
            f"image_size={short_repr(image_size)} needs a patched model with one stack, and no submodel. The model was not "
            "changed."
        )
    stack: Any = stacks[0]
    spec, geometry = specs.read(model.config), stack.posenc.geometry
    new = NewSize.find(model, stack, plans[0].patch_projection, plans[0].extra_tokens[1], image_size)
    before, after = math.prod(new.grids.before), math.prod(new.grids.after)
    asked = Extension(CUBIC, before, after, grids=new.grids)
    for name, part in spec.encoding.component_classes().items():
        if part.needs_max_length(geometry):
            _check_table(name, part, spec.encoding.by_part(dict(spec.options))[name], asked, geometry, True)
            if spec.max_length != before:
                raise ValueError(
                    f"The {name!r} encoding has {spec.max_length} positions, but an image of the current size has {before} "
                    f"patches. Patch with max_length={before} to extend by image_size. The model was not changed."
                )
    specs.write(new.config, replace(spec, max_length=None if spec.max_length is None else after))
    return _rebuilt(model, new.config, asked, spec.type)


def _extended_host(host: ExtensionTarget) -> Any:
    reads_tokens = all(found.tokens is not None for found in host.stacks.values())
    if reads_tokens and all(source.learned_table is not None for source in host.limiting):
        return by_input(host) if host.asked.method in (DYNAMIC, WINDOWS) else with_longer_tables(host)
    if not reads_tokens or any(source.encoding != "rope" for source in host.limiting):
        host.refuse_other_sources()
    return with_other_rotations(host)


def _check(max_length: int | None, method: str | None, settings: dict[str, Any]) -> None:
    checked_max_length(max_length)
    if method is not None and (not isinstance(method, str) or method not in METHODS):
        raise ValueError(f"method={short_repr(method)}{did_you_mean(method, METHODS)} isn't a method. Methods: {CHOICE}.")
    if method is not None and max_length is None:
        raise ValueError(f"max_length=None isn't allowed with method={method!r}. Pass the new maximum length in tokens.")
    for name, value in settings.items() if method is None else ():
        raise ValueError(f"{name}={short_repr(value)} is a setting of a method, and no method was passed. Methods: {CHOICE}.")


def _extended_layer(layer: Any, max_length: int | None, method: str | None, settings: dict[str, Any]) -> Any:
    config, geometry = copy.deepcopy(layer.config), layer.posenc.geometry
    kind, options = config.position_encoding["type"], options_of(config.position_encoding)
    asked = _asked([(kind, options)], geometry, config.max_length, max_length, method, settings)
    config.max_length = max_length
    config.position_encoding = {"type": kind, **(_longer(kind, options, asked, geometry) or options)}
    return _rebuilt(layer, config, asked, kind)


def _extended_model(
    model: Any, spec: specs.PositionSpec, max_length: int | None, method: str | None, settings: dict[str, Any]
) -> Any:
    """A patched model, or one with a patched submodel, extended. `spec` is the encoding to extend."""
    stack: Any = next(filter(is_patched, structure.part(model, spec.submodel).modules()))
    geometry = stack.posenc.geometry
    if max_length is not None and (method == WINDOWS or (spec.windows is not None and method is None)):
        return _in_windows(model, spec, max_length, method, settings)
    if method is not None and any(plan.patch_projection for plan in specs.plans_of(model.config, spec.submodel)):
        raise ValueError(
            f"method={method!r} extends a sequence, but {type(model).__name__} reads a grid of patches. Pass image_size. The "
            "model was not changed."
        )
    kinds = [(each.type, dict(each.options)) for each in spec.all_encodings]
    asked = _asked(kinds, geometry, spec.max_length, max_length, method, settings, spec.original is not None)
    config = copy.deepcopy(model.config)
    # For a model created from scratch, only the length field records the trained length, and it changes below.
    options = dict(spec.options) if spec.original else spec.encoding.with_explicit_defaults(geometry, dict(spec.options))
    options = _longer(spec.type, options, asked, geometry) or options
    others = {name: _longer_spec(each, asked, geometry) for name, each in spec.others.items()}
    longer = replace(spec, max_length=max_length, options=options, others=others)
    specs.write(config, specs.read(config).changed(longer))
    rows = getattr(config, LENGTH_FIELD, None)
    # As in patch, the field becomes the maximum length plus the original's offset, or the original value without a limit.
    if rows is not None and spec.replaces_all:
        host = spec.original.rows if spec.original else rows
        setattr(config, LENGTH_FIELD, host if max_length is None else max_length + stack.posenc_state.inputs.offset)
    return _rebuilt(model, config, asked, spec.type)


def _in_windows(model: Any, spec: specs.PositionSpec, max_length: int, method: str | None, settings: dict[str, Any]) -> Any:
    """A patched model that reads longer inputs in windows. Without a method, it keeps its windows."""
    config, inner = copy.deepcopy(model.config), structure.part(model, spec.submodel)
    before = spec.max_length or settings.get("window")
    if type(before) is not int or max_length < before:
        raise ValueError(
            f"max_length={max_length} and window={short_repr(settings.get('window'))} don't fit this model, whose maximum "
            f"length is {spec.max_length}. Pass a window, and a max_length of at least that. The model was not changed."
        )
    windows = spec.windows
    if method is not None:
        for plan in specs.plans_of(config, spec.submodel):
            if plan.role == "encoder":
                stack: Any = inner.get_submodule(plan.path)
                refuse_unwindowed(model, reads_tokens(stack), stack.posenc.geometry.is_causal)
        before = before if windows is None else windows.window
        windows = specs.Windows.parse(Extension(method, before, max_length, settings).windows())
    specs.write(config, specs.read(config).changed(replace(spec, max_length=max_length, windows=windows)))
    return _rebuilt(model, config, None, spec.type)


def _asked(
    kinds: Sequence[tuple[str, dict[str, Any]]],
    geometry: Geometry,
    before: int | None,
    after: int | None,
    method: str | None,
    settings: dict[str, Any],
    of_stock: bool = False,
) -> Extension | None:
    """The extension of encodings, which are pairs of type and options. None without a method.

    of_stock: whether the model was patched from an original model, so that `unpatch` can restore it.

    Raises ValueError for a shorter length, and if the method is missing or doesn't apply to these encodings.
    """
    if method is not None and before is None:
        before = geometry.trained_length
        if before is None:
            raise ValueError(
                f"method={method!r} needs the original maximum length, which this model doesn't record. Set max_length when "
                "you patch, or set the scaling rule as an option of the encoding."
            )
    if after is not None and (before is None or after < before):
        unlimited = "" if before is None or method else ", or None for no limit"
        longer = "This model has no length limit." if before is None else f"Pass {before} or more{unlimited}."
        raise ValueError(f"max_length={after} is below the current maximum length. {longer} The model was not changed.")
    asked = None if method is None or before is None or after is None else Extension(method, before, after, settings)
    for kind, options in kinds:
        for name, part in encoding_class(kind).component_classes().items():
            if part.needs_max_length(geometry):
                _check_table(name, part, encoding_class(kind).by_part(options)[name], asked, geometry, of_stock)
    if asked and all(_longer(kind, options, asked, geometry) is None for kind, options in kinds):
        named = " or ".join(repr(kind) for kind, _ in kinds)
        others = " For the original positions, call hf_posenc.unpatch(model) first." if of_stock else ""
        raise ValueError(
            f"{named} doesn't support method={method!r}. If the encoding has no length limit, call "
            f"hf_posenc.extend(model, {after}) without a method. Methods: {CHOICE}.{others}"
        )
    return asked


def _check_table(
    name: str, part: Any, options: dict[str, Any], asked: Extension | None, geometry: Geometry, of_stock: bool
) -> None:
    """Raises ValueError for an encoding that has no positions beyond its max_length, if it can't be extended as asked."""
    if asked is not None and part.extended(options, asked, geometry) is not None:
        return
    suited = [each for each in TABLES if part.extended(options, Extension(each, 1, 1), geometry) is not None]
    if not suited or asked is None:
        raise _made_for_its_length(name, suited)
    others = " To use it on the original positions, call hf_posenc.unpatch(model) first." if of_stock else ""
    raise ValueError(
        f"method={asked.method!r} isn't available for this model's {name!r} encoding ({short_repr(options)}), which supports "
        f"{quoted(suited)}.{others}"
    )


def _longer(kind: str, options: dict[str, Any], asked: Extension | None, geometry: Geometry) -> dict[str, Any] | None:
    """The extended options of an encoding. None without a method, or if the encoding doesn't support it."""
    return None if asked is None else encoding_class(kind).extended(options, asked, geometry)


def _longer_spec(spec: specs.PositionSpec, asked: Extension | None, geometry: Geometry) -> specs.PositionSpec:
    options = _longer(spec.type, dict(spec.options), asked, geometry)
    return spec if options is None else replace(spec, options=options)


def _rebuilt(model: Any, config: Any, asked: Extension | None, kind: str) -> Any:
    """A new model with this config, in which the encoding `kind` is extended.

    It shares all parameters and buffers with `model`, except those whose size has changed.

    Raises ValueError if an encoding doesn't define the new values of those.
    """
    twin = build_on_meta(type(model), config, like=model)
    if asked is None and _sizes(twin) != _sizes(model):
        raise _made_for_its_length(kind)
    share_parameters(model, twin, resized=asked is not None and asked.grids is not None)
    ours, theirs = encodings_in(twin), encodings_in(model)
    shared = dict[int, torch.Tensor]()  # by ID, because layers can share tensors
    for path in ours.keys() & theirs.keys():
        module, other = ours[path], theirs[path]
        for own, given in ((module._parameters, other._parameters), (module._buffers, other._buffers)):
            for key, tensor in given.items():
                if tensor is not None and own.get(key) is not None and own[key].shape == tensor.shape:
                    # Buffers that aren't saved may depend on max_length. They are computed again, as in a loaded model.
                    computed = key in _compat.non_persistent_buffers(other)
                    own[key] = torch.empty_like(tensor) if computed else tensor
                    shared |= {} if computed else {id(tensor): tensor}
                elif tensor is not None and own.get(key) is not None and "original" in path.split("."):
                    resized = asked and asked.grids and asked.grids.resize_table(tensor, own[key].shape)
                    if resized is None:
                        raise _made_for_its_length("original")
                    own[key] = resized
        if asked is not None and isinstance(module, PositionEncoding):
            module.load_from_shorter(other, asked)
        shared |= {id(parameter): parameter for parameter in module.parameters(recurse=False)}
    if any(parameter.is_meta for module in ours.values() for parameter in module.parameters()):
        raise _made_for_its_length(kind)
    with marked_as_loaded(shared.values()):
        initialize_missing(module for module in twin.modules() if isinstance(module, PositionEncoding))
    return twin


def _sizes(model: nn.Module) -> dict[str, torch.Size]:
    """Path -> shape, for the parameters and buffers of all encodings in a model."""
    found = itertools.chain(model.named_parameters(), model.named_buffers())
    return {path: tensor.shape for path, tensor in found if "posenc" in path.split(".")}


def _made_for_its_length(kind: str, methods: Sequence[str] = ()) -> ValueError:
    """The error for an encoding that is limited to its max_length. methods: the methods that extend it."""
    again = "Patch with a larger max_length and train again: hf_posenc.patch(hf_posenc.unpatch(model), …, max_length=…)."
    more = f"Choose a method that extends a table: {quoted(methods)}." if methods else again
    return ValueError(f"The {kind!r} encoding is limited to its max_length. {more} Or use an encoding without a length limit.")
