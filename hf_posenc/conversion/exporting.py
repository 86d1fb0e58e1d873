"""`to_stock` exports a patched model to a Transformers class that computes the same function."""

import copy
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc._versions import DOCS
from hf_posenc.architectures import detection, structure
from hf_posenc.architectures.components import PositionComponent, UnsupportedModelError
from hf_posenc.configuration import LENGTH_FIELD
from hf_posenc.conversion.patching import refuse
from hf_posenc.conversion.stock_families import BERT_LIKE, TARGETS, Target, rope_parameters
from hf_posenc.encodings import PatchLayout, PositionContext
from hf_posenc.modeling.derived import PosEncModelMixin
from hf_posenc.modeling.offsets import MeanOffset, range_of
from hf_posenc.modeling.parameter_sharing import build_on_meta, compute_buffers, share_parameters, stock_config
from hf_posenc.modeling.sentence_transformers import apply_to_sentence_transformer, is_sentence_transformer

NO_ROTATION = {"rope_type": "linear", "factor": 1e30, "rope_theta": 10000.0}
"""Rotary parameters by which all angles are below 1e-20, so that their sines have no effect."""
TOLERANCE = 1e-5
"""Maximum difference between the outputs of both models in float32, relative to the largest output if that is above 1."""
LENGTHS = (9, 140, 600)
"""Lengths in tokens at which both models are compared, limited to their maximum length."""
IMAGES = "pixel_values"
PAIRED = {"QuestionAnswering": "question from the context", "MultipleChoice": "question from the choice"}
"""Tasks whose inputs are always pairs of texts -> what token types distinguish."""
PAGE = f"{DOCS}/guides/export.md lists the encodings that have an equivalent class."


def to_stock(model: Any, *, max_length: int | None = None) -> Any:
    """Export a patched model to a Transformers class that computes the same function.

    For example, BERT with shared `t5` biases becomes MPNet. The result doesn't need hf_posenc. It shares its parameters with
    `model`, except those that the class stores in another form. Before it is returned, both models are compared on random
    tokens at several lengths, with and without padding.

    Args:
        model: a patched model, or a SentenceTransformer with one.
        max_length: number of positions, if the class has position embeddings. None: the maximum length of the patched model, or
            of the original if there is no limit.

    Raises:
        UnsupportedModelError: no Transformers class computes this function. The error states why and names the nearest class.
        ValueError: the model isn't patched, or max_length is invalid.
    """
    if is_sentence_transformer(model):
        return _sentence_transformer(model, max_length)
    refuse(model, "to_stock")
    if not isinstance(model, PosEncModelMixin):
        raise ValueError(f"{type(model).__name__} isn't patched, so it already loads without hf_posenc.")
    _check_one_pass(model)
    length = _length(model, max_length)
    reasons: list[str] = []
    plain = _float32(model)
    others = (functools.partial(_other_class, target) for target in TARGETS)
    candidates: tuple[Callable[[Any, int], Any], ...] = (_without_rotation_in_layers, _own_class, *others)
    for candidate in candidates:
        try:
            found = candidate(plain, length)
            _verify(plain, found)
            return found if plain is model else candidate(model, length)
        except _NoEquivalent as reason:
            if str(reason):
                reasons.append(str(reason))
    original: Any = type(model).original_class
    why = f" ({'; '.join(reasons)})" if reasons else ""
    raise UnsupportedModelError(
        f"{original.__name__} with the encoding {model.config.position_spec.type!r} has no equivalent class in "
        f"Transformers{why}. {_nearest(model, original)}",
        reason="no equivalent stock class",
        remedy=f"Save the model with save_pretrained; it loads with hf_posenc or trust_remote_code=True. {PAGE}",
    )


class _NoEquivalent(Exception):
    """The reason why a class doesn't compute the same function. Empty if the class is unrelated."""


def _nearest(model: Any, original: Any) -> str:
    """The encodings of this architecture that have an equivalent class."""
    if original.config_class.model_type in BERT_LIKE:
        return "Nearest: t5 with shared biases is MPNet, rope is JinaEmbeddingsV3, and additive encodings keep the class"
    if model.config.position_spec.submodel is not None:
        return "Export the submodel on its own"
    components = [each for found in _original(model)[1].values() for each in found.components]
    if components and all(each.follows_rope_parameters for each in components):
        more = ", and in some layers, SmolLM3" if original.config_class.model_type == "llama" else ""
        return f"Nearest: rope in all layers and none keep the class{more}"
    if not _is_learned(components):
        return "No encoding keeps this class, because its positions aren't all learned or set by rotary parameters"
    kept = ["additive encodings"] if any(each.learned_table is not None for each in components) else []
    kept += ["shared t5"] if any(each.holds_t5_biases for each in components) else []
    return f"Nearest: {' and '.join([*kept, 'none'])} keep{'' if kept else 's'} the class"


def _is_learned(components: Collection[PositionComponent]) -> bool:
    """Whether all positions are learned tensors, which can get other values."""
    return bool(components) and all(each.learned_table is not None or each.zeroed is not None for each in components)


def _check_one_pass(model: Any) -> None:
    """Raises UnsupportedModelError for a model that reads its inputs in windows."""
    if model.config.position_spec.windows is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} reads longer inputs in windows, which no class of Transformers does",
            reason="windows",
            remedy="Export the model from which it was extended.",
        )


def _length(model: Any, asked: int | None) -> int:
    """The number of positions for position embeddings. Raises ValueError for an invalid max_length."""
    limits = [
        module.posenc.geometry.max_length
        for module in model.modules()
        if structure.is_patched(module) and module.posenc.geometry.max_length is not None
    ]
    if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 1):
        raise ValueError(f"max_length={asked!r} must be an integer of at least 1, or None.")
    if asked is not None and limits and asked > min(limits):
        raise ValueError(f"max_length={asked} is above the maximum length of the patched model, {min(limits)} tokens.")
    if asked is not None or limits:
        return asked or min(limits)
    original = model.config.position_spec.original
    return (original.rows if original is not None else None) or 2048


def _sentence_transformer(outer: Any, max_length: int | None) -> Any:
    twin = apply_to_sentence_transformer(outer, functools.partial(to_stock, max_length=max_length), longer=True)
    config = twin[0].model.config
    rows = getattr(config, LENGTH_FIELD, None)
    lengths = [outer[0].max_seq_length, rows if config.model_type != "mpnet" or rows is None else rows - 2]
    twin[0].max_seq_length = min(length for length in lengths if length is not None)
    without_unused_inputs(twin.tokenizer, twin[0].model)
    return twin


def without_unused_inputs(tokenizer: Any, model: Any) -> None:
    """Remove token_type_ids from a tokenizer's outputs if the model's forward doesn't accept them (MPNet)."""
    read = signature(type(model).forward).parameters
    tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name != "token_type_ids" or name in read]


def _original(model: Any) -> tuple[Any, dict[str, structure.Structure]]:
    """The original model on the meta device, and its stacks."""
    stock = type(model).original_class
    original = build_on_meta(stock, stock_config(model.config, stock), like=model)
    return original, detection.find_all(original)


def _own_class(model: Any, length: int) -> Any:
    """A model of the original class, with the encoding's vectors as position embeddings, or with other RoPE parameters."""
    spec, stock = model.config.position_spec, type(model).original_class
    if spec.submodel is not None:
        raise _NoEquivalent(f"only submodels of this composite model are patched: {', '.join(map(str, spec.by_submodel))}")
    if spec.where or spec.layers:
        raise _NoEquivalent("" if spec.layers else "the encoding applies only in parts of the model")
    stacks = {name: module for name, module in model.named_modules() if structure.is_patched(module)}
    original, found = _original(model)
    components = [component for each in found.values() for component in each.components]
    if components and all(component.follows_rope_parameters for component in components) and spec.type in ("rope", "none"):
        return _rotated(model, original, spec.options if spec.type == "rope" else None)
    mechanisms = {*spec.encoding.mechanisms(dict(spec.options))}
    has_biases = any(component.holds_t5_biases for component in components)
    if not mechanisms <= ({"embed", "distance_bias"} if has_biases else {"embed"}):
        raise _NoEquivalent("")
    if spec.inject != "input":
        raise _NoEquivalent(f"{stock.__name__} adds vectors to its input only")
    if "embed" in mechanisms and all(component.learned_table is None for component in components):
        raise _NoEquivalent(f"{stock.__name__} has no learned position embeddings to fill")
    if not _is_learned(components):
        raise _NoEquivalent(f"{stock.__name__} computes its positions, which can't be set to other values")
    config = stock_config(model.config, stock)
    _set_buckets(config, _bias_options(spec))
    # BART's length field doesn't count the offset, and images have no such field.
    for rows in (length, length + max(each.offset or 0 for each in found.values())):
        if hasattr(config, LENGTH_FIELD):
            setattr(config, LENGTH_FIELD, rows)
        built = build_on_meta(stock, config, model.dtype, model)
        if _room(built) >= length:
            break
    share_parameters(model, built, rebuilt=_tables(built))
    for name, each in detection.find_all(built).items():
        for component in each.components:
            key, first = component.learned_table or (component.zeroed, None)
            path, _, parameter = key.rpartition(".")
            owner = built.get_submodule(name).get_submodule(path)
            like, shape = next(stacks[name].parameters()), owner.get_parameter(parameter).shape
            values = torch.zeros(shape, dtype=like.dtype, device=like.device)
            if first is not None and component.width is not None:
                table = values.flatten(0, -2)[first:]
                _fill_vectors(table, stacks[name], each, component, config)
                if isinstance(offset := stacks[name].get_submodule(path)._modules.get("posenc"), MeanOffset):
                    _add_offset(table, offset)
            elif component.holds_t5_biases:
                _fill_biases(values, stacks[name])
            owner.register_parameter(parameter, nn.Parameter(values))
    _fold_offsets(model, built)
    return _finished(model, built)


def _fold_offsets(model: Any, built: Any) -> None:
    """Add the calibrated vectors of linear layers to their biases."""
    tables = _tables(built)
    for path, module in model.named_modules():
        offset = module._modules.get("posenc")
        if isinstance(offset, MeanOffset) and path not in tables:
            other = built.get_submodule(path)
            if other._parameters.get("bias") is None:
                raise _NoEquivalent(f"{type(built).__name__} has no biases to store calibrated vectors")
            other.bias = nn.Parameter(module.bias.detach() + offset.weight.detach(), requires_grad=module.bias.requires_grad)


def _bias_options(spec: Any) -> Mapping[str, Any] | None:
    """The options of the distance biases of an encoding. None if it has none.

    Raises _NoEquivalent unless they are those of T5.
    """
    parts = spec.encoding.parts if hasattr(spec.encoding, "parts") else {spec.type: spec.encoding}
    biases = [name for name, part in parts.items() if "distance_bias" in part.mechanisms()]
    if not biases:
        return None
    options = spec.options if biases == [spec.type] else spec.options[biases[0]]
    if biases != ["t5"] or options["per_layer"]:
        raise _NoEquivalent("the biases of this class are those of t5 with per_layer=False")
    return options


def _set_buckets(config: Any, options: Mapping[str, Any] | None) -> None:
    """Set the fields of T5's biases to the options of `t5`."""
    for field, option in {"num_buckets": "num_buckets", "max_distance": "max_distance"}.items():
        if options is not None and hasattr(config, f"relative_attention_{field}"):
            setattr(config, f"relative_attention_{field}", options[option])


def _room(model: PreTrainedModel) -> int:
    """The number of positions in a model's position embeddings."""
    rooms = [
        each.stack.get_parameter(component.learned_table[0]).shape[:-1].numel() - component.learned_table[1]
        for each in detection.find_all(model).values()
        for component in each.components
        if component.learned_table is not None and each.tokens is not None
    ]
    return min(rooms, default=2**62)


def _tables(model: PreTrainedModel) -> set[str]:
    """Paths of the modules that are positional components of a model."""
    found: set[str] = set()
    for name, each in detection.find_all(model).items():
        found |= {f"{name}.{component.path}".strip(".") for component in each.components if component.path in each.modules}
    return found


def _fill_vectors(rows: Tensor, stack: Any, found: structure.Structure, component: PositionComponent, config: Any) -> None:
    """Write the encoding's vectors to position embeddings `[N, D]`, which begin with position 0."""
    parts = [part for part in stack.posenc.named_parts().values() if "embed" in part.mechanisms()]
    if not parts:
        return
    patches = component.patches
    with torch.no_grad():
        positions = torch.arange(len(rows) if patches is None else patches, device=rows.device)[None]
        grid = () if patches is None or found.axes == 1 else _grid(config, patches)
        context = PositionContext(stack.posenc, positions, 0, positions[:, :1], patches=PatchLayout(grid=grid))
        for part in parts:
            rows[: positions.shape[1]] += part("embed", context.coordinates(part.axes))[0].to(rows.dtype)


def _grid(config: Any, patches: int) -> tuple[int, int]:
    """The rows and columns of an image's patches.

    Raises _NoEquivalent if the config doesn't determine them.
    """
    sizes = (getattr(config, name, None) for name in ("image_size", "patch_size"))
    (height, width), (tall, wide) = (size if isinstance(size, (tuple, list)) else (size, size) for size in sizes)
    if None in (height, tall) or (height // tall) * (width // wide) != patches:
        raise _NoEquivalent("the config doesn't determine the rows and columns of its patches")
    return height // tall, width // wide


def _fill_biases(values: Tensor, stack: Any) -> None:
    """Write the biases of `t5` to a table `[buckets, H]`."""
    for part in (part for part in stack.posenc.named_parts().values() if "distance_bias" in part.mechanisms()):
        if part.weight.shape != values.shape:
            raise _NoEquivalent(f"{values.shape[0]} buckets are fixed in this class")
        with torch.no_grad():
            values.copy_(part.weight)


def _rotated(model: Any, original: Any, options: Mapping[str, Any] | None) -> Any:
    """A model of the original class with the RoPE parameters of `rope`. None: angles that round to 0."""
    config = stock_config(model.config, type(original))
    given = getattr(config, "rope_parameters", None) or {}
    sets = [given] if "rope_theta" in given else [each for each in given.values() if each is not None]
    if not sets or not all(isinstance(each, dict) and "rope_theta" in each for each in sets):
        raise _NoEquivalent(f"{type(original).__name__} has no rotary parameters that determine all angles")
    wanted = NO_ROTATION if options is None else rope_parameters(options)
    start = wanted.get("original_max_position_embeddings")
    if wanted["rope_type"] == "dynamic" and start not in (None, getattr(config, LENGTH_FIELD, None)):
        raise _NoEquivalent(f"{type(original).__name__} starts dynamic scaling at {LENGTH_FIELD}, not at {start} tokens")
    for each in sets:  # one, or one for each type of layer
        whole = {"partial_rotary_factor": 1.0} if "partial_rotary_factor" in each else {}
        each.clear(), each.update(whole | wanted)
    built = build_on_meta(type(original), config, model.dtype, model)
    share_parameters(model, built, rebuilt=_tables(built))
    _fold_offsets(model, built)
    return _finished(model, built)


def _without_rotation_in_layers(model: Any, length: int) -> Any:
    """SmolLM3, which is Llama with `rope` in some layers."""
    spec, stock = model.config.position_spec, type(model).original_class
    if stock.config_class.model_type not in ("llama", "smollm3") or spec.submodel is not None:
        raise _NoEquivalent("")
    if spec.type not in ("rope", "none"):
        raise _NoEquivalent("SmolLM3 rotates with `rope` in some layers, and with nothing in the others")
    target = getattr(transformers, stock.__name__.replace("Llama", "SmolLM3"), None)
    if target is None:
        raise _NoEquivalent(f"SmolLM3 has no counterpart of {stock.__name__}")
    given = stock_config(model.config, stock).to_dict()
    layers = given["num_hidden_layers"]
    turning = _acting_layers(model, layers)
    if len(turning) == layers and stock.config_class.model_type == "llama":
        raise _NoEquivalent("")
    if given.get("head_dim") not in (None, given["hidden_size"] // given["num_attention_heads"]):
        raise _NoEquivalent("SmolLM3 has heads of hidden_size / num_attention_heads features")
    names = {field for field in target.config_class().to_dict() if field not in ("model_type", "architectures", "layer_types")}
    config = target.config_class(
        **{
            **{name: value for name, value in given.items() if name in names},
            "no_rope_layers": [int(layer in turning) for layer in range(layers)],
            "use_sliding_window": False,
            "rope_parameters": rope_parameters(spec.options) if spec.type == "rope" else given["rope_parameters"],
        }
    )
    built = build_on_meta(target, config, model.dtype)
    _assign(model, built, {name: name for name, module in built.named_modules() if module._parameters})
    return _finished(model, built)


def _acting_layers(model: Any, layers: int) -> set[int]:
    spec = model.config.position_spec
    if spec.type == "none":
        return set()
    chosen = spec.layers.get(spec.type)
    if chosen is None:
        return {*range(layers)}
    (stack,) = (module for module in model.modules() if structure.is_patched(module))
    acting = (number for number, layer in enumerate(stack.layers) if layer.self_attn.posenc_state.parts)
    return {*acting}


def _other_class(target: Target, model: Any, length: int) -> Any:
    """A model of the target family, for a BERT-like encoder with that family's encoding."""
    spec, stock = model.config.position_spec, type(model).original_class
    kind = stock.config_class.model_type
    family = BERT_LIKE.get(kind)
    if family is None or spec.type != target.encoding or spec.submodel is not None:
        raise _NoEquivalent("")
    if spec.layers or spec.where:
        raise _NoEquivalent(f"{target.prefix} has {spec.type} in all layers")
    if reason := target.unlike(spec.options):
        raise _NoEquivalent(reason)
    source = stock_config(model.config, stock)
    if reason := family.unlike_bert(source):
        raise _NoEquivalent(reason)
    if getattr(source, "embedding_size", source.hidden_size) != source.hidden_size:
        raise _NoEquivalent(f"{target.prefix} has no projection from embedding_size={source.embedding_size} to hidden_size")
    if getattr(source, "is_decoder", False):
        raise _NoEquivalent(f"{target.prefix} is an encoder, and this model has is_decoder=True")
    task = stock.__name__.removeprefix(family.prefix).removeprefix("For")
    if task != "Model" and not (task in family.heads and task in target.heads):
        raise _NoEquivalent(f"{target.prefix} has no counterpart of {stock.__name__}")
    fields = {**source.to_dict(), **family.settings_of(source)}
    ours, theirs = family.activation(task, fields), target.activation(task, fields)
    if ours != theirs and task not in target.chosen_activations:
        raise _NoEquivalent(f"the head of {target.prefix} uses {theirs}, and that of {stock.__name__} {ours}")
    folded = "token_type" not in target.body
    if folded and "token_type" in family.body:
        _check_token_types(model, family, task, target)
    config, cls = _config(target, fields, spec.options, length, folded), _class(target, task)
    for field, value in (target.chosen_activations[task](ours) if task in target.chosen_activations else {}).items():
        setattr(config, field, value)
    without_pooler = task == "Model" and "pooler" in target.body and not _has(model, "pooler.dense")
    built = build_on_meta(functools.partial(cls, add_pooling_layer=False) if without_pooler else cls, config, model.dtype)
    _assign(model, built, _pairs(family, target, task, model, built))
    _fill(model, built, family, target, task, folded)
    return _finished(model, built)


def _class(target: Target, task: str) -> Any:
    cls = getattr(transformers, f"{target.prefix}{'' if task == 'Model' else 'For'}{task}", None)
    if cls is None:
        raise _NoEquivalent(f"this version of Transformers has no {target.prefix}{task}")
    return cls


def _config(target: Target, given: Mapping[str, Any], options: Mapping[str, Any], length: int, untied: bool) -> Any:
    """A config of the target with the given sizes and labels."""
    kind: Any = getattr(transformers, f"{target.prefix}Config")
    fields = {*kind().to_dict(), "num_labels", "id2label", "label2id", "problem_type"}
    left_out = {"model_type", "architectures", "transformers_version", LENGTH_FIELD, "rope_parameters", "auto_map"}
    taken = {name: value for name, value in given.items() if name in fields - left_out and value is not None}
    if "embedding_size" in fields:
        taken["embedding_size"] = given["hidden_size"]
    taken |= target.settings(options, length)
    return kind(**{**taken, **({"tie_word_embeddings": False} if untied else {})})


def _check_token_types(model: Any, family: Any, task: str, target: Target) -> None:
    """Raises _NoEquivalent, or warns, if a model uses token types and the target has none."""
    table = _base(model, family).get_submodule(family.body["token_type"]).weight
    if torch.equal(table, table[:1].expand_as(table)):
        return
    if task in PAIRED:
        raise _NoEquivalent(f"{target.prefix} has no token types, which distinguish the {PAIRED[task]}")
    if task in ("SequenceClassification", "TokenClassification"):
        warnings.warn(
            f"{target.prefix} has no token types, so its outputs for pairs of texts (token_type_ids of 1) differ from those of "
            "the patched model. For pairs, use the encoding 'rope'.",
            stacklevel=4,
        )


def _base(model: Any, family: Any) -> Any:
    return getattr(model, family.base, model)


def _pairs(family: Any, target: Target, task: str, model: Any, built: Any) -> dict[str, str]:
    """Path in the target -> path in the source, for modules that both have."""
    prefixes = tuple(f"{each.base}." if hasattr(other, each.base) else "" for each, other in ((family, model), (target, built)))
    here, there = prefixes
    pairs: dict[str, str] = {}
    for part, path in target.body.items():
        if part not in family.body:
            continue
        for layer in range(built.config.num_hidden_layers) if "{}" in path else [0]:
            pairs[there + path.format(layer)] = here + family.body[part].format(layer)
    heads = {} if task == "Model" else {path: family.heads[task][part] for part, path in target.heads[task].items()}
    return {**{path: other for path, other in pairs.items() if _has(built, path) and _has(model, other)}, **heads}


def _has(model: nn.Module, path: str) -> bool:
    try:
        return model.get_submodule(path) is not None
    except AttributeError:
        return False


def _assign(source: nn.Module, target: nn.Module, pairs: Mapping[str, str]) -> None:
    """Assign the source's parameters to the target's modules, and add calibrated offsets to their biases."""
    for path, other in pairs.items():
        module: Any = target.get_submodule(path)
        given: Any = source.get_submodule(other)
        for name, parameter in given._parameters.items():
            if parameter is not None and name in module._parameters:
                module._parameters[name] = parameter
        if isinstance(offset := given._modules.get("posenc"), MeanOffset) and module._parameters.get("bias") is not None:
            module.bias = nn.Parameter(given.bias.detach() + offset.weight.detach(), requires_grad=given.bias.requires_grad)


def _add_offset(rows: Tensor, offset: MeanOffset) -> None:
    """Add the vectors of a MeanOffset to the rows of a table, from that of position 0 on."""
    vectors = offset.weight.detach().to(rows.dtype)
    if vectors.ndim == 2:
        vectors = vectors[range_of(torch.arange(len(rows), device=rows.device), len(vectors))]
    rows += vectors


def _fill(model: Any, built: Any, family: Any, target: Target, task: str, folded: bool) -> None:
    """Set what the target stores in another form: token types in word embeddings, zero positions, and biases."""
    inner, theirs = _base(built, target), _base(model, family)
    like = theirs.get_submodule(family.body["word"]).weight
    offset = theirs.embeddings.position_embeddings._modules.get("posenc")
    by_range = isinstance(offset, MeanOffset) and offset.weight.ndim == 2
    if by_range and not folded:
        raise _NoEquivalent(f"{target.prefix} has no position embeddings to store calibrated vectors: use exportable=True")
    added = offset.weight if isinstance(offset, MeanOffset) and not by_range else torch.zeros_like(like[0])
    token_types = theirs.get_submodule(family.body["token_type"]).weight if "token_type" in family.body else None
    with torch.no_grad():
        if not folded:
            types = inner.get_submodule(target.body["token_type"])
            if token_types is None or isinstance(offset, MeanOffset):
                rows = added.expand(types.weight.shape) if token_types is None else token_types + added
                types.weight = nn.Parameter(rows.clone(), requires_grad=like.requires_grad)
        else:
            words = like + added + (0 if token_types is None else token_types[0])
            inner.get_submodule(target.body["word"]).weight = nn.Parameter(words, requires_grad=like.requires_grad)
            positions = inner.get_submodule("embeddings.position_embeddings")
            table = torch.zeros(positions.weight.shape, dtype=like.dtype, device=like.device)
            if by_range:
                _add_offset(table[2:], offset)  # MPNet's first two rows are of padding
            positions.weight = nn.Parameter(table)
        if target.sinusoids is not None:
            sinusoids: Any = inner.get_submodule(target.sinusoids)
            sinusoids.weight = nn.Parameter(sinusoids.create_weight().to(like), requires_grad=False)
        if target.biases is not None:
            inner.get_submodule(target.biases).weight = theirs.posenc.weight
    if task == "MaskedLM":
        decoder = built.get_submodule(target.heads[task]["decoder"])
        if folded:  # untied, so saved as two parameters
            decoder.bias = nn.Parameter(decoder.bias.detach().clone(), requires_grad=decoder.bias.requires_grad)
        head = built.get_submodule(target.heads[task]["decoder"].rpartition(".")[0])
        head._parameters["bias"] = nn.Parameter(decoder.bias.detach().clone()) if folded else decoder.bias


def _finished(model: Any, built: Any) -> Any:
    """The new model with its buffers, mode, and generation_config."""
    for module in reversed([*built.modules()]):
        if isinstance(module, PreTrainedModel):
            compute_buffers(module, model.device)
    left = [name for name, value in (*built.named_parameters(), *built.named_buffers()) if value.is_meta]
    if left:
        raise _NoEquivalent(f"{type(built).__name__} has {left[0]}, which {type(model).original_class.__name__} doesn't have")
    if hasattr(model, "generation_config") and hasattr(built, "generation_config"):
        built.generation_config = copy.deepcopy(model.generation_config)
    built.name_or_path = model.name_or_path
    return built.train(model.training)


def _verify(model: Any, built: Any) -> None:
    """Raises _NoEquivalent if both models differ on random tokens in float32."""
    if model.main_input_name not in ("input_ids", IMAGES):
        raise _NoEquivalent(f"to_stock can't compare models that read {model.main_input_name}")
    usable = min((each for each in (_usable(model), getattr(built.config, LENGTH_FIELD, None)) if each), default=max(LENGTHS))
    lengths = sorted({max(1, min(length, usable - 2)) for length in LENGTHS})
    worst, place = 0.0, ""
    with torch.no_grad():
        for length in lengths:
            for name, inputs in _inputs(model, length):
                for key, expected, found in _outputs(model, built, inputs):
                    apart = float((expected - found).abs().max()) / max(1.0, float(expected.abs().max()))
                    if not apart <= worst:
                        worst, place = apart, f"{key} at {length} tokens{name}"
    if not worst <= TOLERANCE:
        rotated = type(built) is type(model).original_class and model.config.position_spec.type == "rope"
        why = ". Its layers rotate other features: try another layout" if rotated else ""
        raise _NoEquivalent(f"{type(built).__name__} differs by {worst:.1e} in {place}, more than {TOLERANCE:.0e}{why}")


def _float32(model: Any) -> Any:
    """The model in eval mode and float32 on the CPU. A copy if it has to change."""
    plain = model.dtype == torch.float32 and model.device.type == "cpu" and not model.training
    return model if plain else copy.deepcopy(model).to("cpu", torch.float32).eval()


def _usable(model: Any) -> int | None:
    lengths = [m.posenc.geometry.max_length for m in model.modules() if structure.is_patched(m)]
    return min((length for length in lengths if length is not None), default=None)


def _inputs(model: Any, length: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Random images or tokens `[2, L]`. Tokens are repeated with padding on the right, and, for decoders, on the left.

    Multiple-choice models get the two rows as choices of one question. Encoders are not compared with left padding. Original
    classes count it in positions, and patched classes don't.
    """
    config, generator = model.config.get_text_config(), torch.Generator().manual_seed(0)
    if model.main_input_name == IMAGES:
        size = config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size,) * 2
        yield "", {IMAGES: torch.randn(2, config.num_channels, *size, generator=generator)}
        return
    if type(model).original_class.__name__.endswith("ForMultipleChoice"):
        for name, inputs in _token_inputs(model, config, generator, length):
            yield name, {key: value[None] for key, value in inputs.items()}
        return
    yield from _token_inputs(model, config, generator, length)


def _token_inputs(model: Any, config: Any, generator: torch.Generator, length: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Random tokens for `_inputs`."""
    padding = config.pad_token_id if config.pad_token_id is not None else 0
    allowed = torch.tensor([each for each in range(min(config.vocab_size, 4096)) if each != padding])
    ids = allowed[torch.randint(len(allowed), (2, length), generator=generator)]
    more = {"decoder_input_ids": ids[:, : max(2, length // 2)]} if config.is_encoder_decoder else {}
    yield "", {"input_ids": ids, **more}
    mask = torch.ones_like(ids)
    mask[1, 1 + (2 * length) // 3 :] = 0
    yield " padded on the right", {"input_ids": ids.masked_fill(mask == 0, padding), "attention_mask": mask, **more}
    causal = any(module.posenc.geometry.is_causal for module in model.modules() if structure.is_patched(module))
    if causal and not config.is_encoder_decoder:
        mask = mask.flip(1)
        left = {"input_ids": ids.masked_fill(mask == 0, padding), "attention_mask": mask}
        if "position_ids" in signature(type(model).original_class.forward).parameters:  # as `generate` passes them
            left["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        yield " padded on the left", left


def _outputs(ours: Any, theirs: Any, inputs: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, and the outputs of both models at tokens that aren't masked."""
    first, second = ours(**inputs), theirs(**inputs)
    mask = inputs.get("attention_mask")
    for key, expected in first.items():
        found = second.get(key)
        if isinstance(expected, Tensor) and expected.is_floating_point() and isinstance(found, Tensor):
            if mask is not None and expected.shape[:2] == mask.shape:
                expected, found = expected[mask.bool()], found[mask.bool()]
            yield key, expected, found
