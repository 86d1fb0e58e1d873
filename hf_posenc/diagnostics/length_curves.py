"""Measures length curves: how well a model reads the same tokens after increasingly long context."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_posenc.diagnostics.encoding_input import POSITIVE, POSITIVES
from hf_posenc.diagnostics.figures import WIDTH, Sheet
from hf_posenc.diagnostics.model_input import ModelRunner, Texts, prepare_model
from hf_posenc.diagnostics.receptive_fields import sees_later
from hf_posenc.diagnostics.registry import Dark, Path, diagnostic, figure
from hf_posenc.diagnostics.result import Result
from hf_posenc.encodings import checked_value

Measure = Literal["loss", "masked loss", "cosine"]
MEASURES: dict[Measure, str] = {
    "loss": "loss, nats per token",
    "masked loss": "loss, nats per masked token",
    "cosine": "cosine with states at the shortest length",
}
"""Measure -> the label of its axis."""


@dataclass(frozen=True, eq=False)
class LengthCurve(Result):
    """The result of `length_curve`.

    model: name of its class.
    texts: number of texts.
    targets: number of tokens scored in each text, the same at all lengths.
    measure: "loss" of a causal language model, in nats per token. "masked loss" of a masked one, in nats per masked token.
        "cosine" of other models, between the states of the targets and those at the shortest length.
    lengths: lengths of the inputs in tokens. The targets are at the end.
    mean: mean over texts for each length.
    error: standard error of the mean, None with one text.
    by_text: `[texts, lengths]`.
    """

    model: str
    texts: int
    targets: int
    measure: Measure
    lengths: tuple[int, ...]
    mean: tuple[float, ...]
    error: tuple[float | None, ...]
    by_text: Tensor

    def lines(self) -> Iterator[str]:
        yield f"{self.model}: {self.measure} of the last {self.targets} tokens of {self.texts} texts"
        for length, mean, error in zip(self.lengths, self.mean, self.error, strict=True):
            yield f"  {length} tokens: {mean:.4g}" + ("" if error is None else f" ± {error:.2g}")


@diagnostic("texts")
@torch.no_grad()
def length_curve(
    model: Any,
    texts: Texts,
    *,
    tokenizer: Any = None,
    lengths: Sequence[int] | None = None,
    targets: int = 32,
) -> LengthCurve:
    """How well a model reads the last `targets` tokens of each text after increasingly long context.

    A model that uses longer context improves with length. A model that doesn't support it gets worse. Each text is cut at its
    start, so positions count from the start of the rest.

    Args:
        model: a Transformers model, patched or original, or a SentenceTransformer. A causal language model is measured by its
            loss, a masked one by its loss at every fourth target, masked. Others are measured by the cosine of the targets'
            states with those at the shortest length. It shows how much a state changes, not whether it improves.
        texts, tokenizer: as for `attention_by_distance`. Each text must have at least the largest length.
        lengths: lengths in tokens, including special tokens, ascending. By default 2 · targets, doubled up to the model's
            maximum length and the length of the shortest text.
        targets: number of tokens.

    Raises:
        ValueError: a text is too short, a length is above the model's maximum, a masked model has no tokenizer, or a causal
            language model sees later tokens.
    """
    checked_value("targets", targets, POSITIVE)
    runner = prepare_model(model, tokenizer)
    rows = runner.read(texts, None, least=1, special=False)
    front, back = ((), ()) if isinstance(texts, Tensor | Mapping) else _frame(runner.required_tokenizer())
    special = len(front) + len(back)
    shortest, longest = targets + special + 1, min(row["input_ids"].shape[1] for row in rows) + special
    reach = longest if runner.usable is None else min(longest, runner.usable)
    if lengths is None:
        lengths = [length for power in range(1, 24) if shortest <= (length := targets * 2**power) <= reach]
        if len(lengths) < 2:
            raise ValueError(
                f"The shortest text has {longest} tokens, and the maximum length of the model is "
                f"{runner.usable or 'unlimited'}. Pass texts of {4 * targets} tokens, fewer targets, or lengths."
            )
    _check_lengths(runner, lengths, shortest, longest)
    measure = _measure(runner, {name: values[:, -lengths[0] :] for name, values in rows[0].items()})
    by_text = torch.stack([_scores(runner, measure, row, lengths, targets, (front, back)) for row in rows])
    error = by_text.std(0) / len(rows) ** 0.5 if len(rows) > 1 else None
    return LengthCurve(
        runner.name,
        len(rows),
        targets,
        measure,
        tuple(lengths),
        tuple(by_text.mean(0).tolist()),
        (None,) * len(lengths) if error is None else tuple(error.tolist()),
        by_text,
    )


@figure(length_curve, example="gpt2 gpt2-alibi --texts my.jsonl")
def draw_length_curve(results: LengthCurve | Mapping[str, LengthCurve], *, dark: Dark = False, path: Path = None) -> Any:
    """Draw how well the same tokens are read after more and more text: the mean over texts with its standard error.

    results: a result of `diagnostics.length_curve`, or results of several models by name, with the same measure.

    Raises ValueError for other results or different measures.
    """
    named = LengthCurve.named(results)
    measures = {result.measure for result in named.values()}
    if len(measures) > 1:
        raise ValueError(
            f"The models were measured by {' and '.join(sorted(measures))}. Draw each measure in a separate figure."
        )
    sheet = Sheet((WIDTH * 0.7, 3.3), dark=dark, path=path)
    axis = sheet.axes[0, 0]
    for place, (name, result) in enumerate(named.items()):
        style = sheet.line(place, markers=True) | {"linestyle": sheet.line(place)["linestyle"]}
        errors = [error or 0.0 for error in result.error]
        axis.errorbar(result.lengths, result.mean, yerr=errors, capsize=2.5, elinewidth=1.2, label=name, **style)
    sheet.length_axis(axis, sorted({length for result in named.values() for length in result.lengths}))
    axis.set_ylabel(MEASURES[measures.pop()])
    sheet.name_lines([*named])
    return sheet.finish()


def _frame(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The IDs of the special tokens before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    start = next(place for place in range(len(whole)) if whole[place : place + len(plain)] == plain)
    return tuple(whole[:start]), tuple(whole[start + len(plain) :])


def _check_lengths(runner: ModelRunner, lengths: Sequence[int], shortest: int, longest: int) -> None:
    for length in checked_value("lengths", lengths, POSITIVES):
        if length < shortest:
            raise ValueError(f"lengths contains {length}, but the targets and a token before them take {shortest}.")
        if length > longest:
            raise ValueError(f"lengths contains {length}, but the shortest text has {longest} tokens. Pass longer texts.")
        if runner.usable is not None and length > runner.usable:
            raise ValueError(
                f"lengths contains {length}, but the maximum length of {runner.name} is {runner.usable} tokens. Extend it with "
                "hf_posenc.extend, or with hf_posenc.patch and max_length."
            )
    if not lengths or list(lengths) != sorted({*lengths}):
        raise ValueError(f"lengths={lengths!r} must be in ascending order, without duplicates.")


def is_language_model(model: Any) -> bool:
    """Whether a length curve measures a loss for this model."""
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    return any(_class_name(model) in mapping.values() for mapping in mappings)


def measure_of(model: Any) -> Measure:
    """The measure of a model. Raises ValueError as `length_curve` does."""
    runner = prepare_model(model)
    length = 8 if runner.usable is None else min(8, runner.usable)
    ids = torch.arange(length)[None] % runner.vocabulary
    return _measure(runner, {"input_ids": ids.to(runner.model.device)})


def _class_name(model: Any) -> str:
    return getattr(type(model), "original_class", type(model)).__name__


def _measure(runner: ModelRunner, row: Mapping[str, Tensor]) -> Measure:
    """The measure for a model. It depends on the Auto classes of its original class and on whether it sees later tokens.

    Raises ValueError for a causal language model that sees later tokens.
    """
    name = _class_name(runner.model)
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and not sees_later(runner, row):
        return "loss"
    if name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():
        return "masked loss"
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ValueError(
            f"{runner.name} predicts the next token, but its attention isn't causal. Set is_decoder=True in its config, or "
            "pass its base_model to measure hidden states."
        )
    return "cosine"


def _scores(
    runner: ModelRunner,
    measure: Measure,
    row: Mapping[str, Tensor],
    lengths: Sequence[int],
    targets: int,
    frame: tuple[tuple[int, ...], ...],
) -> Tensor:
    """The measure of one text by length, `[lengths]`, float64.

    row: the text without special tokens. frame: special tokens before and after it.
    """
    ids = row["input_ids"]
    front, back = (ids.new_tensor([each], dtype=torch.long) for each in frame)
    found: list[Tensor] = []
    states: list[Tensor] = []
    for length in lengths:
        own = ids[:, ids.shape[1] - (length - front.shape[1] - back.shape[1]) :]
        whole = torch.cat([front, own, back], dim=1)
        others = {name: values[:, -length:] for name, values in row.items() if name != "input_ids"}
        place = torch.arange(length - back.shape[1] - targets, length - back.shape[1], device=ids.device)
        if measure == "cosine":
            states.append(runner.states({"input_ids": whole, **others})[place].double())
            found.append(F.cosine_similarity(states[-1], states[0], dim=-1).mean())
            continue
        goal = whole[0, place]
        if measure == "masked loss":
            place, goal = place[::4], goal[::4]
            whole = whole.index_fill(1, place, _mask(runner))
        logits = runner.model(input_ids=whole, **others, use_cache=False, return_dict=True).logits[0]
        found.append(F.cross_entropy(logits[place if measure == "masked loss" else place - 1].double(), goal))
    return torch.stack(found).cpu()


def _mask(runner: ModelRunner) -> int:
    mask = getattr(runner.tokenizer, "mask_token_id", None)
    if mask is None:
        raise ValueError(f"{runner.name} is measured by masked tokens. Pass a tokenizer that has a mask token.")
    return mask
