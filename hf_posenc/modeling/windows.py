"""Processes longer inputs of encoders in overlapping windows, each with separate positions and special tokens.

Each token's hidden state comes from the window in which it is most central. Prefix and suffix tokens, which are in all windows,
get the mean. Time and memory grow linearly with the length.

Shapes: B batch, L tokens, N windows of all texts, K windows of one text, W tokens of a window, D hidden_size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.configuration import Windows
from hf_posenc.encodings import short_repr
from hf_posenc.signatures import BoundCall

FAR = 1 << 40
"""A large number that is added to the distance from an edge of a window that is also an edge of the text."""


def forward(stack: Any, in_one_pass: Callable[..., Any], call: BoundCall) -> Any:
    """The output of a stack for an input up to its maximum length. Inputs that fit in one window take a single pass.

    Raises ValueError for inputs beyond the maximum, and for arguments that windows don't support.
    """
    spec = stack.posenc_state.spec
    tokens = call["input_ids"] if call["inputs_embeds"] is None else call["inputs_embeds"]
    if tokens is None or tokens.ndim < 2 or tokens.shape[1] <= spec.windows.window:
        return in_one_pass(*call.args, **call.kwargs)
    shape = tokens.shape[:2]
    if spec.max_length is not None and shape[1] > spec.max_length:
        raise ValueError(
            f"An input of {shape[1]} tokens is longer than max_length={spec.max_length} of this model. Truncate the input "
            "(tokenizer: truncation=True, max_length=…), or raise the limit with hf_posenc.extend(model, max_length=…)."
        )
    given = {**dict(zip(call.names, call.args, strict=False)), **call.kwargs}
    _check(stack, given, shape)
    mask, types = given.get("attention_mask"), given.get("token_type_ids")
    shown = torch.ones(shape, dtype=torch.bool, device=tokens.device) if mask is None else mask.bool()
    cut = divided(shown, spec.windows, types)
    by_window = {
        name: cut.rows(value.expand(*shape, *value.shape[2:])) if isinstance(value, Tensor) else value
        for name, value in given.items()
    }
    by_window |= {"attention_mask": cut.mask if mask is None else cut.mask.to(mask.dtype), "return_dict": True}
    output = in_one_pass(**by_window)
    merged = {name: _merged(stack, name, value, cut) for name, value in output.items()}
    if merged.get("pooler_output") is not None:
        merged["pooler_output"] = stack.pooler(_from_first(merged["last_hidden_state"], shown))
    wanted = given.get("return_dict")
    whole = type(output)(**merged)
    return whole if (stack.config.return_dict if wanted is None else wanted) else whole.to_tuple()


def _from_first(states: Tensor, shown: Tensor) -> Tensor:
    """Hidden states `[B, L, D]`, rotated so that each row begins with its first token and padding on the left comes last."""
    index = (torch.arange(shown.shape[1], device=shown.device) + shown.int().argmax(1)[:, None]) % shown.shape[1]
    return states.gather(1, index[..., None].expand_as(states))


def _check(stack: Any, given: dict[str, Any], shape: torch.Size) -> None:
    """Raises ValueError for arguments that don't apply to single windows."""
    if given.get("output_attentions") or (given.get("output_attentions") is None and stack.config.output_attentions):
        raise ValueError(
            "output_attentions=True isn't supported for inputs longer than one window, because no attention sees all tokens. "
            f"Omit it, or pass at most {stack.posenc_state.spec.windows.window} tokens."
        )
    if given.get("position_ids") is not None:
        raise ValueError(
            "position_ids isn't supported for inputs longer than one window, because each window has its own positions. Omit "
            "position_ids."
        )
    for name, value in given.items():
        of_tokens = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == shape[1] and len(value) in (1, shape[0])
        square = name == "attention_mask" and isinstance(value, Tensor) and value.ndim != 2
        plain = value is None or isinstance(value, (bool, int, float, str))
        if not plain and (square or not of_tokens):
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"the value {short_repr(value)}"
            raise ValueError(
                f"{name} has {what}, which can't be divided into windows. Omit it, or pass one value for each of the "
                f"{shape[1]} tokens."
            )


@dataclass(frozen=True)
class Division:
    """The windows of a batch.

    text: index of each window's text, `[N]`. index: index of each of the window's tokens in that text's row, `[N, W]`.
    mask: whether each of these is a token, `[N, W]`.
    window: for each token of the batch, the window from which its hidden state comes, `[B, L]`. place: its index there.
    repeated: whether the token is in all windows of its text, `[B, L]`. inside: whether it is within its text.
    count: number of windows of each text, `[B]`.
    """

    text: Tensor
    index: Tensor
    mask: Tensor
    window: Tensor
    place: Tensor
    repeated: Tensor
    inside: Tensor
    count: Tensor

    def rows(self, values: Tensor) -> Tensor:
        """Values by token `[B, L, …]` -> by window `[N, W, …]`."""
        return values[self.text[:, None], self.index]

    def merged(self, states: Tensor) -> Tensor:
        """Hidden states by window `[N, W, D]` -> by token `[B, L, D]`. Padding gets zeros."""
        count = self.count[:, None, None].to(states.dtype)
        mean = states.new_zeros(len(count), *states.shape[1:]).index_add(0, self.text, states) / count
        batch = torch.arange(len(count), device=states.device)[:, None]
        chosen = torch.where(self.repeated[..., None], mean[batch, self.place], states[self.window, self.place])
        return chosen.masked_fill(~self.inside[..., None], 0)


def divided(shown: Tensor, windows: Windows, types: Tensor | None = None) -> Division:
    """Divide texts `[B, L]` into windows. A text extends from its first to its last shown token.

    types: token types. A first segment of at most half a window, such as a question, is repeated in every window.
    """
    device, length = shown.device, shown.shape[1]
    first = shown.int().argmax(1)
    size = (length - shown.int().flip(1).argmax(1) - first).where(shown.any(1), 0)
    prefix = _prefix(types, shown, first, windows)
    room, suffix = windows.window - windows.suffix - prefix, windows.suffix
    stride = (windows.stride * room // windows.room).clamp(min=1)
    slack = (size - windows.window).clamp(min=0)  # start of the last window
    count = (slack + stride - 1) // stride + 1
    width = int(size.max().clamp(1, windows.window))
    text = torch.arange(len(shown), device=device).repeat_interleave(count)
    before = count.cumsum(0) - count
    start = torch.minimum((torch.arange(len(text), device=device) - before[text]) * stride[text], slack[text])[:, None]
    place = torch.arange(width, device=device)[None]
    ends = slack[text, None] + place  # indices at the end of the text
    inner = torch.where(place < prefix[text, None], place, start + place)
    index = torch.where(place >= width - suffix, torch.where(slack[text, None] > 0, ends, place), inner)
    mask = index < size[text, None]
    index = (first[text, None] + index).clamp(max=length - 1)
    mask = mask & shown[text[:, None], index]

    number = torch.arange(int(count.max()), device=device)[None, :, None]  # K
    starts = torch.minimum(number * stride[:, None, None], slack[:, None, None])
    there = torch.arange(length, device=device)[None] - first[:, None]  # index in the text, [B, L]
    left = there[:, None] - prefix[:, None, None] - starts  # [B, K, L]
    right = room[:, None, None] - 1 - left
    outside = (left < 0) | (right < 0) | (number >= count[:, None, None])
    central = torch.minimum(left + FAR * (number == 0), right + FAR * (number == count[:, None, None] - 1))
    best = central.masked_fill(outside, -1).argmax(1)  # [B, L]
    at_start, at_end = there < prefix[:, None], there >= (size - suffix)[:, None]
    repeated = (at_start | at_end) | (slack == 0)[:, None]
    moved = torch.where(at_end, slack[:, None], starts[..., 0].gather(1, best)).masked_fill(at_start, 0)
    inside = (there >= 0) & (there < size[:, None])
    place = (there - moved).masked_fill(~inside, 0)
    return Division(text, index, mask, before[:, None] + best, place, repeated, inside, count)


def _prefix(types: Tensor | None, shown: Tensor, first: Tensor, windows: Windows) -> Tensor:
    """The number of tokens at the start of each text that all its windows repeat, `[B]`."""
    usual = torch.full_like(first, windows.prefix)
    if types is None:
        return usual
    second = (types.expand(shown.shape) > 0) & shown
    segment = second.int().argmax(1) - first
    return segment.where(second.any(1) & (segment > windows.prefix) & (segment <= windows.room // 2), usual)


def _merged(stack: Any, name: str, value: Any, cut: Division) -> Any:
    if isinstance(value, tuple):
        return tuple(_merged(stack, name, each, cut) for each in value)
    if value is None or name == "pooler_output":
        if value is not None and not isinstance(getattr(stack, "pooler", None), torch.nn.Module):
            raise ValueError(f"{type(stack).__name__} has no pooler to compute pooler_output of several windows.")
        return value
    if isinstance(value, Tensor) and value.ndim == 3 and value.shape[:2] == cut.index.shape:
        return cut.merged(value)
    raise ValueError(f"{type(stack).__name__} returns {name}, which can't be merged from several windows.")
