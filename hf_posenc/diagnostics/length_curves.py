"""Length curves: how well a model reads the same tokens behind more and more text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_posenc.diagnostics.encoding_input import POSITIVE, POSITIVES
from hf_posenc.diagnostics.model_input import Reader, Texts, reader
from hf_posenc.diagnostics.receptive_fields import sees_later
from hf_posenc.diagnostics.result import Result
from hf_posenc.encodings import checked_value, short_repr

Measure = Literal["loss", "masked loss", "cosine"]


@dataclass(frozen=True, eq=False)
class LengthCurve(Result):
    """The result of `length_curve`.

    model: its class. texts: how many were read. targets: number of tokens scored in each, the same ones at all lengths.
    measure: "loss", of a causal language model, nats per token; "masked loss", of a masked one, nats per masked token;
        "cosine", of other models: the states of the targets with those at the shortest length.
    lengths: in tokens, of what the model reads, the targets at its end.
    mean: by length, over texts. error: the standard error of it; None with one text. by_text: `[texts, lengths]`.
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


@torch.no_grad()
def length_curve(
    model: Any,
    texts: Texts,
    *,
    tokenizer: Any = None,
    lengths: Sequence[int] | None = None,
    targets: int = 32,
) -> LengthCurve:
    """How well a model reads the same tokens, the last `targets` of each text, behind more and more of the text before them.

    A model that uses length loses nothing, or gets better; one that doesn't stand it gets worse from some length on. Each text
    is cut from its front, so positions count from the start of what is left.

    Args:
        model: of Transformers, patched or stock, or a SentenceTransformer. A causal language model is measured by its loss, a
            masked one by its loss at every fourth target, masked; others by the cosine of the targets' states with those at the
            shortest length, which says how much a state moves, not whether for the better.
        texts, tokenizer: as of `attention_by_distance`; each text as long as the greatest length, or longer.
        lengths: in tokens, special ones among them, ascending; by default 2 · targets and its doubles, as far as the model and
            the shortest text reach.
        targets: number of tokens.

    Raises:
        ValueError: texts that are too short, lengths that the model doesn't read, a masked model without a tokenizer, a
            language model that sees the tokens it is to predict.
    """
    checked_value("targets", targets, POSITIVE)
    read = reader(model, tokenizer)
    rows = read.read(texts, None, least=1) if _is_batch(texts) else _plain(read, texts)
    front, back = ((), ()) if _is_batch(texts) else _frame(read.asked_tokenizer())
    beside = len(front) + len(back)
    shortest, longest = targets + beside + 1, min(row["input_ids"].shape[1] for row in rows) + beside
    reach = longest if read.usable is None else min(longest, read.usable)
    if lengths is None:
        lengths = [length for power in range(1, 24) if shortest <= (length := targets * 2**power) <= reach]
        if len(lengths) < 2:
            raise ValueError(
                f"the shortest text has {longest} tokens and the model reads {read.usable or 'any number'}: give texts of "
                f"{4 * targets} tokens, fewer targets, or lengths"
            )
    _check_lengths(read, lengths, shortest, longest)
    measure = _measure(read, {name: values[:, -lengths[0] :] for name, values in rows[0].items()})
    by_text = torch.stack([_scores(read, measure, row, lengths, targets, (front, back)) for row in rows])
    error = by_text.std(0) / len(rows) ** 0.5 if len(rows) > 1 else None
    return LengthCurve(
        read.name,
        len(rows),
        targets,
        measure,
        tuple(lengths),
        tuple(by_text.mean(0).tolist()),
        (None,) * len(lengths) if error is None else tuple(error.tolist()),
        by_text,
    )


def _is_batch(texts: Any) -> bool:
    return isinstance(texts, (Tensor, Mapping))


def _plain(read: Reader, texts: Any) -> list[dict[str, Tensor]]:
    """Whole texts as input_ids, `[1, L]` each, without special tokens."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise ValueError(f"texts={short_repr(texts)[:100]}: allowed are several strings, or a batch of input_ids")
    encode = read.asked_tokenizer()
    ids = [encode(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    if not ids:
        raise ValueError("texts has none: give some texts, or a batch of input_ids")
    return [{"input_ids": torch.tensor([each], dtype=torch.long, device=read.model.device)} for each in ids]


def _frame(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids of the special tokens in front of a text and behind it."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    start = next(place for place in range(len(whole)) if whole[place : place + len(plain)] == plain)
    return tuple(whole[:start]), tuple(whole[start + len(plain) :])


def _check_lengths(read: Reader, lengths: Sequence[int], shortest: int, longest: int) -> None:
    for length in checked_value("lengths", lengths, POSITIVES):
        if length < shortest:
            raise ValueError(f"lengths has {length}: the targets and a token before them take {shortest}")
        if length > longest:
            raise ValueError(f"lengths has {length}, and the shortest text has {longest} tokens: give longer texts")
        if read.usable is not None and length > read.usable:
            raise ValueError(
                f"lengths has {length}, and {read.name} reads up to {read.usable} tokens: hf_posenc.extend or hf_posenc.patch "
                "with max_length make it longer"
            )
    if not lengths or list(lengths) != sorted({*lengths}):
        raise ValueError(f"lengths={lengths!r}: allowed are lengths in ascending order, each once")


def is_language_model(model: Any) -> bool:
    """Whether a length curve is of a loss."""
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    return any(_class_name(model) in mapping.values() for mapping in mappings)


def _class_name(model: Any) -> str:
    return getattr(type(model), "original_class", type(model)).__name__


def _measure(read: Reader, row: Mapping[str, Tensor]) -> Measure:
    """How a model is measured, by the lists of the Auto classes that its host's class is in, and by whether it sees later
    tokens of a text.

    Raises ValueError for a causal language model that does: it would be asked for tokens that it sees.
    """
    name = _class_name(read.model)
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and not sees_later(read, row):
        return "loss"
    if name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():
        return "masked loss"
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ValueError(
            f"{read.name} is to predict the next token, and sees it here: make its config causal, as by is_decoder=True, or "
            "give its base_model, whose states are measured"
        )
    return "cosine"


def _scores(
    read: Reader,
    measure: Measure,
    row: Mapping[str, Tensor],
    lengths: Sequence[int],
    targets: int,
    frame: tuple[tuple[int, ...], ...],
) -> Tensor:
    """By length, of one text without special tokens, `[1, L]`: `[lengths]`, float64. What a batch has beside its input_ids is
    cut as these are."""
    ids = row["input_ids"]
    front, back = (ids.new_tensor([each], dtype=torch.long) for each in frame)
    found: list[Tensor] = []
    states: list[Tensor] = []
    for length in lengths:
        own = ids[:, ids.shape[1] - (length - front.shape[1] - back.shape[1]) :]
        whole = torch.cat([front, own, back], dim=1)
        beside = {name: values[:, -length:] for name, values in row.items() if name != "input_ids"}
        place = torch.arange(length - back.shape[1] - targets, length - back.shape[1], device=ids.device)
        if measure == "cosine":
            states.append(read.states({"input_ids": whole, **beside})[place].double())
            found.append(F.cosine_similarity(states[-1], states[0], dim=-1).mean())
            continue
        goal = whole[0, place]
        if measure == "masked loss":
            place, goal = place[::4], goal[::4]
            whole = whole.index_fill(1, place, _mask(read))
        logits = read.model(input_ids=whole, **beside, use_cache=False, return_dict=True).logits[0]
        found.append(F.cross_entropy(logits[place if measure == "masked loss" else place - 1].double(), goal))
    return torch.stack(found).cpu()


def _mask(read: Reader) -> int:
    mask = getattr(read.tokenizer, "mask_token_id", None)
    if mask is None:
        raise ValueError(f"{read.name} is measured by masked tokens: give a tokenizer that has a mask token")
    return mask
