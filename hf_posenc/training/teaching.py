"""The teacher's hidden states. The teacher reads texts beyond its maximum length in overlapping windows.

Shapes: B batch, L tokens, W tokens of a window, D hidden_size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_posenc.training.data import Cut

AT_ONCE = 16
"""Maximum number of windows in a forward pass."""


@torch.no_grad()
def states(teacher: Any, batch: Mapping[str, Tensor], cut: Cut, usable: int | None) -> Tensor:
    """The teacher's last hidden states of a batch, `[B, L, D]`.

    A text longer than `usable` is read in windows of that length, including special tokens, with a stride of half a window.
    The state of a token comes from the window in which it is most central. The states of special tokens are the means over
    the windows.
    """
    ids, shown = batch["input_ids"], batch["attention_mask"].bool()
    if usable is None or int(shown.sum(1).max()) <= usable:
        return teacher(**batch).last_hidden_state
    rows = [_windows(text[kept], cut, usable) for text, kept in zip(ids, shown, strict=True)]
    of_one_length: dict[int, list[tuple[int, int]]] = {}
    for i, windows in enumerate(rows):
        for j, (_, window) in enumerate(windows):
            of_one_length.setdefault(len(window), []).append((i, j))
    found: dict[tuple[int, int], Tensor] = {}
    for places in of_one_length.values():
        for some in (places[k : k + AT_ONCE] for k in range(0, len(places), AT_ONCE)):
            read = teacher(input_ids=torch.stack([rows[i][j][1] for i, j in some])).last_hidden_state
            found.update(zip(some, read, strict=True))
    width = next(iter(found.values())).shape[-1]
    target = torch.zeros(*ids.shape, width, device=ids.device)
    for i, kept in enumerate(shown):
        target[i, kept] = _joined([(start, found[i, j]) for j, (start, _) in enumerate(rows[i])], int(kept.sum()), cut)
    return target


def _windows(ids: Tensor, cut: Cut, usable: int) -> list[tuple[int, Tensor]]:
    """The windows of a text: the start of each among the inner tokens, and its tokens `[W]` with the special tokens."""
    if len(ids) <= usable:
        return [(0, ids)]
    inner, room = len(ids) - cut.head - cut.tail, usable - cut.head - cut.tail
    head, body, tail = ids[: cut.head], ids[cut.head : cut.head + inner], ids[cut.head + inner :]
    starts = [*range(0, inner - room, room // 2), inner - room]
    return [(start, torch.cat([head, body[start : start + room], tail])) for start in starts]


def _joined(windows: list[tuple[int, Tensor]], size: int, cut: Cut) -> Tensor:
    """The states of a text of `size` tokens from the states `[W, D]` of its windows."""
    if len(windows) == 1:
        return windows[0][1]
    all_states = torch.stack([states for _, states in windows])
    inner, room = size - cut.head - cut.tail, all_states.shape[1] - cut.head - cut.tail
    place = torch.arange(inner)[None] - torch.tensor([start for start, _ in windows])[:, None]
    central = torch.minimum(place, room - 1 - place)
    # The first tokens of a text come from its first window, and the last tokens from its last window.
    central[0, : room // 2] += size
    central[-1, inner - room + room // 2 :] += size
    central[(place < 0) | (place >= room)] = -1
    best = central.argmax(0).to(all_states.device)
    index = place.to(best.device).gather(0, best[None])[0] + cut.head
    ends = all_states.mean(0)
    return torch.cat([ends[: cut.head], all_states[best, index], ends[len(ends) - cut.tail :]])
