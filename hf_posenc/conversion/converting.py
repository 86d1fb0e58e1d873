"""`convert` gives a trained model another encoding and preserves its quality by calibration, without a training loop."""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hf_posenc import configuration as specs
from hf_posenc.architectures import detection, structure
from hf_posenc.architectures.components import UnsupportedModelError
from hf_posenc.architectures.contributions import contributions
from hf_posenc.configuration import Calibration
from hf_posenc.conversion import calibration
from hf_posenc.conversion.exporting import to_stock
from hf_posenc.conversion.patching import patch, patched_submodel, refuse, refuse_patched
from hf_posenc.encodings import PositionEncoding, encoding_class, mark, short_repr
from hf_posenc.modeling import offsets
from hf_posenc.modeling.derived import PosEncModelMixin
from hf_posenc.modeling.parameter_sharing import clone_sharing_parameters
from hf_posenc.modeling.sentence_transformers import apply_to_sentence_transformer, is_sentence_transformer
from hf_posenc.modeling.text_batches import Features, Texts, padded, read_features, read_rows, real_tokens
from hf_posenc.progress import ProgressBar
from hf_posenc.serialization.tokenizer_files import check_ids, check_known, required_tokenizer
from hf_posenc.signatures import argument_names, reads_tokens, required_arguments

M = TypeVar("M", bound=nn.Module)
TEXTS, LENGTH, HELD_OUT, READ = 24, 256, 8, 256
"""Default number of calibration texts, their default length in tokens (scripts/results/calibration.txt), number of held-out
texts, and number of texts to choose from."""
ENOUGH = 32
"""Minimum number of token pairs for each bias row."""
FIRST = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
"""Config fields with the first token of a decoder, by priority."""


def convert(
    model: M,
    encoding: str | dict[str, Any],
    *,
    texts: Texts | None = None,
    inputs: Any = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    exportable: bool = False,
    calibration_texts: int = TEXTS,
    calibration_length: int | None = None,
    **options: Any,
) -> M:
    """Replace the position encoding of a trained model and calibrate it against the original, without training.

    `convert` first calls `patch`. Then it fits the biases of the encoding, layer by layer, to the attention of the original
    model. Vectors replace the mean contribution of the original positions to the hidden states: one for each range of positions
    in place of position embeddings (0, 1, 2 to 3, 4 to 7, and so on), and one for each block of a layer
    (`hf_posenc.conversion.calibration`). The other parameters are shared and unchanged, so the result of `unpatch` is
    bit-identical to the original. `inspect(model).calibration` reports how closely the model matches the original.

    In an encoder-decoder, the encoder is calibrated first, and then the decoder, which reads the same texts, shifted by one
    token. Stacks that `where` doesn't name keep their positions.

    Encodings without parameters (fixed slopes of `alibi`, frequencies of `rope`) can't be fitted; for these, only the mean
    vectors are. Biases have `per_layer=True` by default, because separate parameters fit much better.

    Args:
        model: a trained model that isn't patched, or a SentenceTransformer with such a model.
        texts: in-domain strings, or tokenized batches (`input_ids` `[N, L]` and `attention_mask`). The longest of the first
            256 texts are used. Eight others measure the agreement; if there are none, it is measured on the same texts, and the
            report says so. Fewer texts are sufficient if each distance has enough pairs of tokens.
        inputs: for image and audio encoders, instead of texts: batches as a processor returns them (`pixel_values`,
            `input_features`, or `input_values`), without padding. The first `calibration_texts` calibrate, and the next eight
            measure the agreement. Calibration alone doesn't restore the quality of image models with position embeddings, so
            train them afterwards.
        tokenizer: a tokenizer, or its name or path. None: the tokenizer in the directory from which the model was loaded. It
            isn't changed: to truncate at the new maximum length, set its model_max_length to `inspect(model).model_max_length`.
        exportable: choose options that have an equivalent class of Transformers, so that `to_stock` can export the result:
            biases shared by all layers. This costs quality (docs/guides/export.md).
        calibration_texts: number of texts to calibrate on.
        calibration_length: number of tokens to which they are truncated, up to the maximum lengths of both models. None: 256,
            or twice `max_distance`, up to these lengths. Longer texts bring the hidden states of long inputs closer to the
            original's. Time and memory grow with the square of the length.
        max_length, **options: as in `patch`, including `submodel` and `where`.

    Raises:
        ValueError: as in `patch`. calibration_texts or calibration_length is invalid. There are no texts, or they are too short
            or too few for the distances. The encoding doesn't apply in attention. The model is already patched.
        UnsupportedModelError: as in `patch`. Calibration can't reproduce the attention probabilities of the model. With
            `exportable`, the encoding has no equivalent class for this model.
    """
    if is_sentence_transformer(model):
        tokenizer = model.tokenizer if tokenizer is None else tokenizer
        given = {"texts": texts, "inputs": inputs, "tokenizer": tokenizer, "max_length": max_length, "exportable": exportable}
        given |= {"calibration_texts": calibration_texts, "calibration_length": calibration_length}
        change = functools.partial(convert, encoding=encoding, **given, **options)
        return apply_to_sentence_transformer(model, change)
    refuse(model, "convert")
    refuse_patched(model, "convert", options.get("submodel"))
    for name, value in {"calibration_texts": calibration_texts, "calibration_length": calibration_length}.items():
        if type(value) is not int and (value is not None or name == "calibration_texts") or (type(value) is int and value < 1):
            allowed = "" if name == "calibration_texts" else ", or None"
            raise ValueError(
                f"{name}={short_repr(value)} must be an integer of at least 1{allowed}. The model was not changed."
            )
    specs.raise_if_v4_relative(model, "it can't be calibrated against")
    # Parameters created in inference mode couldn't be trained. Tensors without an explicit device belong on the CPU.
    device: Any = model.device
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False), torch.device("cpu"):
        options = _with_own_layers(encoding, options, not exportable)
        patched: Any = patch(model, encoding, max_length=max_length, **options)
        by_range = not exportable or _has_learned_positions(_exported(patched))
        amount = calibration_texts, calibration_length
        return _converted(model, patched, (texts, inputs), tokenizer, by_range, amount, options.get("submodel"))


def _exported(patched: Any) -> Any:
    """The equivalent class of Transformers. Its error says how to convert without one."""
    try:
        return to_stock(patched)
    except UnsupportedModelError as error:
        error.args = (f"{error} Or omit exportable=True to convert to this encoding.",)
        raise


def _has_learned_positions(model: Any) -> bool:
    """Whether a model has learned position embeddings, so that it can store vectors by position."""
    return any(each.learned_table for found in detection.find_all(model).values() for each in found.components)


def _converted(
    model: Any,
    patched: Any,
    data: tuple[Any, Any],
    tokenizer: Any,
    by_range: bool,
    amount: tuple[int, int | None],
    submodel: str | None,
) -> Any:
    """Calibrate a patched model, or one of its submodels, against the original.

    data: texts and inputs, of which one is given.
    by_range: whether ranges of positions get separate vectors. amount: the number of texts and their length.
    """
    spec = patched_submodel(patched, submodel)
    if {*spec.encoding.mechanisms()} == {"embed"}:
        raise ValueError(
            f"{spec.type!r} only adds vectors to the inputs, but calibration fits biases in attention. Use an encoding with a "
            "bias, or patch the model and train it (python -m hf_posenc.training.distill)."
        )
    pairs = _pairs(_twin(model), patched, spec)
    of_tokens = reads_tokens(pairs[0].found.stack)
    for name, value, fits in (("texts", data[0], of_tokens), ("inputs", data[1], not of_tokens)):
        if (value is not None) != fits:
            wanted = (
                "texts, a list of strings"
                if of_tokens
                else f"inputs, which are batches of {pairs[0].found.stack.main_input_name!r}"
            )
            raise ValueError(
                f"{name}={short_repr(value)[:100]} doesn't fit {type(model).__name__}, which is calibrated on {wanted}. The "
                "model was not changed."
            )
    usable = min((pair.found.usable_length for pair in pairs if pair.found.usable_length is not None), default=None)
    if of_tokens:
        length = _wanted_length(spec, usable, amount[1])
        chosen, held_out = _batches(data[0], _tokenizer(model, tokenizer), amount[0], length, model.device)
        for pair in pairs:
            for batch in filter(None, (chosen, held_out)):
                check_ids(batch["input_ids"], pair.found.stack.get_input_embeddings(), "texts")
    else:
        chosen, held_out = _features(data[1], pairs[0].found.stack, amount)
    for pair in pairs:
        if pair.reads_an_encoder and of_tokens:
            _check_start(pair, chosen["input_ids"])
        _check_coverage(pair, chosen)
    report = _calibrated(pairs, chosen, held_out, offsets.range_count(usable) if by_range and of_tokens else 1)
    # Submodels can have their own configs, and the stacks of T5 have copies.
    for part in (patched, *(each for each in pairs[0].patched.modules() if isinstance(each, PosEncModelMixin))):
        whole = part.config.position_spec
        own = whole.by_submodel.get(spec.submodel, whole)
        specs.write(part.config, whole.changed(replace(own, calibration=report)))
    return patched


@dataclass(frozen=True)
class _Pair:
    """A stack to calibrate.

    found, stack: the original one, and that of the patched model.
    original, patched: the models, or submodels, that contain them.
    """

    found: structure.Structure
    stack: Any
    original: Any
    patched: Any

    @property
    def reads_an_encoder(self) -> bool:
        return self.found.role == "decoder" and bool(getattr(self.original.config, "is_encoder_decoder", False))

    def of_original(self, texts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The inputs of the original stack for a batch of texts."""
        return _for_decoder(self.original, texts) if self.reads_an_encoder else texts

    def of_patched(self, texts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The inputs of the patched stack."""
        return _for_decoder(self.patched, texts) if self.reads_an_encoder else texts


def _pairs(original: Any, patched: Any, spec: Any) -> list[_Pair]:
    """The stacks to calibrate, encoders first. Raises UnsupportedModelError if one can't be calibrated."""
    name = type(original).__name__
    if "cross" in spec.where:
        raise UnsupportedModelError(
            f"where={[*spec.where]} of {name} includes cross-attention, which calibration doesn't support",
            reason="cross-attention",
            remedy="Choose 'encoder', 'decoder', or both, or patch the model and train it.",
        )
    if spec.submodel is not None:
        original, patched = (structure.part(model, spec.submodel) for model in (original, patched))
    stacks = detection.find_all(original, spec.where)
    pairs = [_Pair(found, patched.get_submodule(path), original, patched) for path, found in stacks.items()]
    pairs.sort(key=lambda pair: pair.found.role != "encoder")
    for pair in pairs:
        if pair.reads_an_encoder and not reads_tokens(original.get_encoder()):
            raise UnsupportedModelError(
                f"{type(pair.found.stack).__name__} reads another input than its encoder, which calibration doesn't support",
                reason="no tokens to calibrate on",
                remedy="Convert only the encoder (where='encoder'), or patch the model, then train it.",
            )
        _refuse_odd_attentions(pair.found)
    if len(pairs) > 1 and not getattr(original.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} has {len(pairs)} stacks with their own positions, and calibration supports several only in an "
            "encoder-decoder",
            reason="several stacks",
            remedy="Patch the model, then train it.",
        )
    return pairs


def _start(config: Any, ids: Tensor) -> tuple[str, int]:
    """The first token of a decoder, and the field of its config with it. Without such a field, it is that of the texts."""
    found = ((name, getattr(config, name, None)) for name in FIRST)
    return next(((name, start) for name, start in found if start is not None), ("", int(ids[0, 0])))


def _check_start(pair: _Pair, ids: Tensor) -> None:
    """Raises ValueError if the first token of a decoder is outside of its vocabulary."""
    (name, start), vocabulary = _start(pair.original.config, ids), len(pair.found.stack.get_input_embeddings().weight)
    if not 0 <= start < vocabulary:
        raise ValueError(
            f"config.{name}={start} isn't a token of the decoder, whose vocabulary has the IDs 0 to {vocabulary - 1}. Set it "
            "to the token with which the decoder was trained to start. The model was not changed."
        )


def _for_decoder(model: Any, texts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of the decoder of an encoder-decoder for texts that both read. The decoder reads them shifted by one token."""
    ids, mask = texts["input_ids"], texts.get("attention_mask")
    _, start = _start(model.config, ids)
    inputs = {"input_ids": torch.cat([ids.new_full((len(ids), 1), start), ids[:, :-1]], dim=1)}
    inputs["encoder_hidden_states"] = calibration.states(model.get_encoder(), texts)
    return inputs if mask is None else {**inputs, "attention_mask": mask, "encoder_attention_mask": mask}


def _with_own_layers(encoding: Any, options: dict[str, Any], per_layer: bool) -> dict[str, Any]:
    """The options, with `per_layer` added for each part that has this option, unless it is given."""
    kind = encoding_class(encoding["type"] if isinstance(encoding, dict) and "type" in encoding else encoding)
    parts, given = kind.component_classes(), {**(encoding if isinstance(encoding, dict) else {}), **options}
    added = {}
    for part, cls in parts.items():
        name = "per_layer" if kind is cls else f"{part}__per_layer"
        of_part: dict[str, Any] = next((given[each] for each in (part, *cls.aliases) if isinstance(given.get(each), dict)), {})
        called = {f"{each}__per_layer" for each in (part, *cls.aliases)} | {name}
        if "per_layer" in cls.option_types() and "per_layer" not in of_part and not called & given.keys():
            added[name] = per_layer
    return {**options, **added}


def _twin(model: Any) -> Any:
    """A copy in eval mode that shares the model's parameters and can return attention probabilities."""
    twin = clone_sharing_parameters(model)
    twin.set_attn_implementation("eager")
    return twin.eval()


def _refuse_odd_attentions(found: structure.Structure) -> None:
    """Raises UnsupportedModelError for attentions whose probabilities aren't softmax(scores + bias)."""
    config = found.stack.config
    for path, module in found.attentions.items():
        for odd in ("attn_logit_softcapping", "sinks"):
            if getattr(config if odd.startswith("attn") else module, odd, None) is not None:
                raise UnsupportedModelError(
                    f"{type(found.stack).__name__}.{path} changes its scores after the bias is added ({odd}), which "
                    "calibration can't reproduce",
                    reason="scores changed after the bias",
                    remedy="Patch the model, then distill it (python -m hf_posenc.training.distill).",
                )


def _wanted_length(spec: Any, usable: int | None, asked: int | None) -> int:
    """The length of calibration texts in tokens: `asked`, or at least twice `max_distance`, within both maximum lengths."""
    parts = spec.encoding.by_part(dict(spec.options)).values()
    reach = max(options.get("max_distance", 0) for options in parts)
    limits = {"the original model's maximum length": usable, "max_length": spec.max_length}
    for name, limit in limits.items():
        if asked is not None and limit is not None and asked > limit:
            raise ValueError(
                f"calibration_length={asked} exceeds {name}, {limit} tokens. Pass at most {limit}, or None. The model was not "
                "changed."
            )
    wanted = max(LENGTH, 2 * reach) if asked is None else asked
    return min([wanted, *(limit for limit in limits.values() if limit is not None)])


def _tokenizer(model: Any, given: Any) -> Any:
    if isinstance(given, PreTrainedTokenizerBase) or (callable(given) and not isinstance(given, str)):
        return given
    name = given or model.config.name_or_path
    if not name:
        return None
    try:
        return required_tokenizer(str(name))
    except (OSError, ValueError) as error:
        if given:
            raise ValueError(f"tokenizer={given!r} can't be loaded: {error}") from error
        return None


def _batches(given: Any, tokenizer: Any, count: int, length: int, device: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The batch of `count` texts to calibrate on, and the one to measure on, which may be empty."""
    found = (row for row in read_rows(given, tokenizer, length) if len(row["input_ids"]))
    rows = list(itertools.islice(found, max(READ, count + HELD_OUT)))
    if not rows:
        raise ValueError("texts is empty. Pass about 32 in-domain texts of 256 tokens or more.")
    check_known(tokenizer, (row["input_ids"] for row in rows))
    rows.sort(key=lambda row: -len(row["input_ids"]))
    chosen = rows[:count]
    others = [row for row in rows[count:] if not any(torch.equal(row["input_ids"], known["input_ids"]) for known in chosen)]
    return padded(chosen, device), padded(others[:HELD_OUT], device)


def _features(given: Any, stack: Any, amount: tuple[int, int | None]) -> tuple[Features, Features]:
    """The batch of images or audio to calibrate on, and the one to measure on, which may be empty."""
    if amount[1] is not None:
        raise ValueError(f"calibration_length={amount[1]} applies to texts. Omit it for images and audio.")
    name, like = stack.main_input_name, next(stack.parameters())
    if required_arguments(stack) not in ([], [name]) or name not in argument_names(stack):  # Swin's encoder, SigLIP 2
        raise UnsupportedModelError(
            f"{type(stack).__name__} doesn't read only {name}, which calibration needs",
            reason="other inputs",
            remedy="Patch the model, then train it.",
        )
    rows = read_features(given, name, amount[0] + HELD_OUT).to(like.device, like.dtype)
    try:
        with torch.no_grad():
            first, again = (calibration.states(stack, Features({name: rows[:1]})) for _ in range(2))
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"inputs of shape {tuple(rows.shape)} don't suit {type(stack).__name__}: {error}. Pass batches of its processor's "
            f"output, such as {{{name!r}: tensor}}. The model was not changed."
        ) from error
    if first.ndim != 3 or not torch.equal(first, again):  # MAE drops patches
        raise UnsupportedModelError(
            f"{type(stack).__name__} doesn't return the same hidden states [N, L, D] in each call, which calibration needs",
            reason="hidden states of another form",
            remedy="Patch the model, then train it.",
        )
    batches = Features({name: rows[: amount[0]]}), Features({name: rows[amount[0] :]} if len(rows) > amount[0] else {})
    for batch in batches:
        batch.tokens = first.shape[1]
    return batches


def _check_coverage(pair: _Pair, batch: Mapping[str, Tensor]) -> None:
    """Raises ValueError if an encoding has bias rows for distances that too few token pairs have."""
    stack, sizes = pair.stack, real_tokens(batch).sum(1) - sum(pair.found.extra_tokens)
    length = int(sizes.max())
    distance = torch.arange(1 - length, length)
    pairs = (sizes[:, None].cpu() - distance.abs()).clamp(min=0).sum(0)
    for encoding in (each for each in stack.modules() if isinstance(each, PositionEncoding)):
        last = 0 if encoding.geometry.is_causal else calibration.FARTHEST
        needed = encoding.rows(torch.tensor([-calibration.FARTHEST, last]))
        if needed is None or not calibration.trained(encoding):
            continue
        rows: Any = encoding.rows(distance[distance <= last])
        found = torch.zeros(calibration.row_count(encoding), dtype=torch.long).index_add_(0, rows, pairs[distance <= last])
        # Only the outermost bias rows can belong to distances that don't occur in these texts.
        least, row = min((int(found[row]), int(row)) for row in (*needed, *rows.unique()))
        if least < ENOUGH:
            every = torch.arange(-calibration.FARTHEST, last + 1)
            nearest = int(every[encoding.rows(every) == row].abs().min())
            raise ValueError(
                f"The inputs are too short or too few for {encoding.type!r}. {len(sizes)} inputs of up to {length} tokens "
                f"(limited by the original model, max_length, and calibration_length) have {least} pairs of tokens at "
                f"distances from {nearest}, but {ENOUGH} are needed. Pass more or longer inputs, a larger max_length or "
                "calibration_length, or a smaller max_distance."
            )


@torch.no_grad()
def _calibrated(pairs: Sequence[_Pair], batch: dict[str, Tensor], held_out: dict[str, Tensor], ranges: int) -> Calibration:
    """Calibrate stacks one after another. The agreement is that of the last one, which includes those before."""
    measured, last, divergences = held_out or batch, pairs[-1], list[tuple[float, float]]()
    try:
        states = calibration.states(last.found.stack, last.of_original(measured))
    except (ValueError, TypeError) as error:  # UDOP and BROS need the bounding boxes of tokens.
        raise UnsupportedModelError(
            f"calibration passes only token IDs and a mask, with which {type(last.original).__name__} raises {str(error)!r}",
            reason="inputs other than tokens",
            remedy="Patch the model, then train it.",
        ) from error
    for pair in pairs:
        # Those of modules which don't give out states of all tokens stay 0: a model that is loaded has them all.
        _install_offsets(pair.stack, contributions(pair.found, ranges))
    with _as_original([pair.stack for pair in pairs]):
        before = _agreement(last, measured, states)
        for pair in pairs:
            divergences += _calibrated_stack(pair, batch)
        after = _agreement(last, measured, states)
    real = real_tokens(batch).sum(1)
    return Calibration(
        texts=len(real),
        tokens=int(real.sum()),
        length=int(real.max()),
        kl_before=tuple(round(first, 4) for first, _ in divergences),
        kl_after=tuple(round(last, 4) for _, last in divergences),
        agreement_before=round(before, 4),
        agreement=round(after, 4),
        held_out=len(next(iter(held_out.values()))) if held_out else 0,
        ranges=ranges,
    )


def _calibrated_stack(pair: _Pair, batch: dict[str, Tensor]) -> list[tuple[float, float]]:
    """Calibrate a stack. Returns the divergence of each attention, before and after."""
    found = pair.found
    original = calibration.observed(found.stack, tuple(found.attentions), tuple(contributions(found)), pair.of_original(batch))
    if not original.states[real_tokens(batch)].isfinite().all():
        raise ValueError(
            "The hidden states of the original model contain NaN or infinite values for these texts. Check that its weights "
            "are finite, or convert it in float32."
        )
    total = sum(map(len, original.attentions.values())) * calibration.runs(original, pair.stack)
    with ProgressBar(total=total, desc="calibrating", unit="attention", leave=False) as bar:
        return calibration.calibrate(pair.stack, original, pair.of_patched(batch), bar.update)


@contextmanager
def _as_original(stacks: Sequence[Any]) -> Iterator[None]:
    """Set stacks to eval mode and eager attention, like the original, and restore both."""
    is_training = {module: module.training for stack in stacks for module in stack.modules()}
    implementations = [stack.config._attn_implementation for stack in stacks]
    try:
        for stack in stacks:
            stack.set_attn_implementation("eager")
            stack.eval()
        yield
    finally:
        for stack, implementation in zip(stacks, implementations, strict=True):
            stack.set_attn_implementation(implementation)
        for module, training in is_training.items():
            module.training = training


def _agreement(pair: _Pair, batch: Mapping[str, Tensor], states: Tensor) -> float:
    """The mean cosine similarity of hidden states with those of the original."""
    ours = calibration.states(pair.stack, pair.of_patched(batch))
    cosine = torch.nn.functional.cosine_similarity(ours.float(), states.float(), dim=-1)
    return float(cosine[real_tokens(batch)].mean())


def _install_offsets(stack: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Install Offsets of the model's device and type, marked as having their values."""
    offsets.install(stack, shapes)
    like = next(stack.parameters())
    for path in shapes:
        module = stack.get_submodule(path)
        module.posenc.to(like.device, like.dtype).train(module.training)
        mark(module.posenc)
