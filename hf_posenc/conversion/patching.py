"""`patch` and `unpatch` convert a model between its original and its derived class, with shared parameters."""

import functools
from typing import Any, TypeVar

from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_posenc.architectures.components import UnsupportedModelError
from hf_posenc.architectures.components.component import is_transformers
from hf_posenc.architectures.structure import is_patched, modules_by_path, original_class
from hf_posenc.configuration import PLACEMENT, PositionSpec
from hf_posenc.encodings import quoted, short_repr
from hf_posenc.modeling.derived import PosEncModelMixin, derive
from hf_posenc.modeling.parameter_sharing import refuse_wrapped, to_derived, to_stock
from hf_posenc.modeling.sentence_transformers import apply_to_sentence_transformer, is_sentence_transformer

M = TypeVar("M", bound=nn.Module)


def patch(
    model: M,
    encoding: str | dict[str, Any],
    *,
    max_length: int | None = None,
    submodel: str | None = None,
    where: str | list[str] | dict[str, Any] | None = None,
    inject: str = "input",
    keep_original: bool = True,
    **options: Any,
) -> M:
    """Replace a model's position encoding. Returns a new model of class `PosEnc<OriginalClass>`.

    The new model shares its parameters with `model`: training, freezing, or moving one affects both. `model` itself doesn't
    change and stays usable. The new model has the same mode, requires_grad, dtype, device, tied weights, and generation_config.
    Hooks stay with `model`.

    New parameters are drawn from torch's generator without advancing it. Two consecutive calls therefore start with the same
    values.

    Args:
        model: a Transformers model whose positional components can all be replaced, or a SentenceTransformer with such a model.
            A SentenceTransformer is returned as one, with the maximum length of the patched model as its max_seq_length.
        encoding: a name or alias (`hf_posenc.list_encodings()`), a composition (`"sinusoidal+alibi"`), or
            `{"type": name, **options}`.
        max_length: maximum input length in tokens. It is checked on every forward pass and written to the config's length
            field. None: no limit for computed encodings, the original length for learned ones.
        submodel: in a composite model (CLIP, LLaVA, an EncoderDecoderModel), the dotted path of the submodel to patch, within
            the base model ("text_model", "language_model", "decoder"). Without it, the error for such a model lists the paths.
            For another encoding in another submodel, patch the patched model again. The order doesn't matter.
        where: in an encoder-decoder model, where the encoding applies: one or more of "encoder", "decoder" (their
            self-attention; the default is both), and "cross" (cross-attention, where the distance is that of the positions in
            both sequences). Other places keep the original positions. A dict sets a separate encoding or other options for each
            place: {"encoder": "alibi", "decoder": {"type": "rope", "theta": 5e5}}.
        inject: where an additive encoding adds its vectors: to the "input" (where the original positions are added, or
            otherwise to the input of the first layer), to the input of "every_layer", or to the output of each attention block
            ("after_attention").
        keep_original: keep the original position embeddings as buffers `posenc.original.*`, for `unpatch`.
        **options: options of the encoding (`rope` has theta and layout, `sinusoidal` has base). For a part of a composition,
            use `part__option`. Encodings that apply in attention also have `layers`, a slice as a string ("3::4") or a list of
            layer indices.

    Raises:
        ValueError: the encoding or an option is unknown or invalid. `model` is unchanged.
        UnsupportedModelError: a ValueError for a model with a positional component that can't be replaced.
    """
    if is_sentence_transformer(model):
        change = functools.partial(
            patch,
            encoding=encoding,
            max_length=max_length,
            submodel=submodel,
            where=where,
            inject=inject,
            keep_original=keep_original,
            **options,
        )
        return apply_to_sentence_transformer(model, change)
    refuse(model, "patch")
    refuse_patched(model, "patch", submodel)
    own_class = not is_transformers(original_class(model))
    if own_class and not isinstance(model, PosEncModelMixin):
        refuse_own_config(model)
    if taken := sorted({"type", *PLACEMENT} & set(options)):
        raise ValueError(
            f"{taken[0]}={options[taken[0]]!r} isn't an option of an encoding. Pass the encoding as the second argument of "
            "patch."
        )
    given = {"type": encoding} if isinstance(encoding, str) else encoding
    if isinstance(given, dict):
        placement = {"max_length": max_length, "submodel": submodel, "where": where}
        placement = {name: value for name, value in placement.items() if value is not None}
        given = {**given, **options, **placement, **({} if inject == "input" else {"inject": inject})}
    spec = PositionSpec.parse(given, in_code=True)
    try:
        return to_derived(model, derive(type(model)), spec, keep_original)
    except UnsupportedModelError as refused:
        if not own_class:
            raise
        raise refused.of_own_class() from None


def unpatch(model: M, *, submodel: str | None = None) -> M:
    """Restore a model's original class and positions. Parameters are shared, as in `patch`.

    The result is bit-identical to the model that was patched. If the patched model was trained, the result combines the trained
    weights with the original positions.

    Args:
        model: a patched model, or a SentenceTransformer with one.
        submodel: in a composite model with several patched submodels, the one to restore. The others stay patched.

    Raises:
        ValueError: the model isn't patched, or its original positions weren't kept. The error names the original model.
    """
    if is_sentence_transformer(model):
        return apply_to_sentence_transformer(model, functools.partial(unpatch, submodel=submodel))
    refuse(model, "unpatch")
    if not isinstance(model, PosEncModelMixin):
        raise ValueError(f"{type(model).__name__} isn't patched, so there is nothing to restore.")
    return to_stock(model, type(model).original_class, None if submodel is None else patched_submodel(model, submodel).submodel)


def patched_submodel(model: Any, submodel: str | None) -> PositionSpec:
    """The encoding of a patched model, or of one of its patched submodels.

    Raises ValueError if `submodel` isn't patched, or is None although several are.
    """
    known = model.config.position_spec.by_submodel
    if submodel not in known and (submodel is not None or len(known) > 1):
        paths = [path for path in known if path is not None]
        remedy = (
            f"Pass one of {quoted(paths)}, or change the other part before you patch this one."
            if paths
            else "Omit submodel, because the whole model is patched."
        )
        what = f"submodel={short_repr(submodel)} isn't a patched submodel of this {type(model).__name__}."
        if submodel is None:
            what = f"Several submodels of this {type(model).__name__} are patched, and submodel is missing."
        raise ValueError(f"{what} {remedy} The model was not changed.")
    return known[submodel] if submodel in known else next(iter(known.values()))


def refuse_patched(model: Any, call: str, submodel: str | None = None) -> None:
    """Raises ValueError for a model that is already patched, unless `submodel` is another submodel than the patched ones."""
    if isinstance(model, PosEncModelMixin):
        known = model.config.position_spec.by_submodel
        there = [spec for path, spec in known.items() if submodel is None or _overlap(submodel, path)]
        if not there:
            return
        spec = there[0]
        inner = "" if spec.submodel is None else f" in its {spec.submodel}"
        remedy = f"Call hf_posenc.{call}(hf_posenc.unpatch(model), …), or run `hf-posenc unpatch` first."
        if spec.submodel is not None:
            restored = f"hf_posenc.unpatch(model, submodel={spec.submodel!r})"
            remedy = f"Call hf_posenc.{call}({restored}, …), or choose another submodel."
        if spec.original is None:
            remedy = (
                "It was created from scratch or by from_v4, so it has no original positions. Start from the checkpoint that "
                "it was created from, and distill that with this model as the --teacher of hf_posenc.training.distill."
            )
        raise ValueError(f"This model already has the {spec.type!r} encoding{inner}. {remedy}")


def _overlap(path: str, other: str | None) -> bool:
    """Whether one of two submodels contains the other. None is the whole model."""
    return other is None or f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def refuse_own_config(model: Any) -> None:
    """Raises ValueError if a custom model's config can't be loaded again, or lacks the sizes that an encoding needs."""
    kind, name = type(model.config), type(model).__name__
    if is_transformers(kind) or kind.model_type in ("", *CONFIG_MAPPING_NAMES):
        raise ValueError(
            f"{name} is a custom class, but the Auto classes load another model for its config, a {kind.__name__} with "
            f"model_type {kind.model_type!r}. Define a config class with a new model_type."
        )
    missing = [
        size for size in ("hidden_size", "num_attention_heads") if not isinstance(getattr(model.config, size, None), int)
    ]
    if missing:
        raise ValueError(
            f"{kind.__name__} has no {' and no '.join(missing)}, which encodings need. Rename the field, or add it to "
            f'attribute_map ({{"{missing[0]}": "its name there"}}).'
        )


def refuse(model: Any, call: str) -> None:
    """Raises ValueError for an unsupported model: wrapped, running code from its checkpoint, or with a patched submodel."""
    refuse_wrapped(model, call)
    if isinstance(model, PosEncModelMixin):
        return
    modules = modules_by_path(model)
    for path, module in modules.items():
        if isinstance(module, PosEncModelMixin) and is_patched(module):
            raise ValueError(
                f"{path} of this {type(model).__name__} is already patched ({module.config.position_spec.type!r}). Call {call} "
                f"on that submodel, or restore it first: model.{path} = hf_posenc.unpatch(model.{path})."
            )
    if any(map(is_patched, modules.values())):
        raise ValueError(
            f"{type(model).__name__} runs the code saved with its checkpoint (trust_remote_code). Import hf_posenc, then load "
            "it again."
        )
