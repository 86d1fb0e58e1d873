"""The teacher's hidden states. The teacher reads texts beyond its maximum length in overlapping windows.

Shapes: B batch, L tokens, D hidden_size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_posenc.configuration import Windows
from hf_posenc.modeling.windows import divided
from hf_posenc.training.data import Cut

AT_ONCE = 16
"""Maximum number of windows in a forward pass."""


@torch.no_grad()
def states(teacher: Any, batch: Mapping[str, Tensor], cut: Cut, usable: int | None) -> Tensor:
    """The teacher's last hidden states of a batch, `[B, L, D]`.

    Texts longer than `usable` are read in windows of that length with a stride of half a window, as in `extend` with the method
    "windows".
    """
    shown = batch["attention_mask"].bool()
    if usable is None or int(shown.sum(1).max()) <= usable:
        return teacher(**batch).last_hidden_state
    room = usable - cut.head - cut.tail
    windows = divided(shown, Windows(usable, max(1, room // 2), cut.head, cut.tail))
    inputs = {"input_ids": windows.rows(batch["input_ids"]), "attention_mask": windows.mask.to(batch["attention_mask"].dtype)}
    parts = (
        {name: each[start : start + AT_ONCE] for name, each in inputs.items()} for start in range(0, len(windows.text), AT_ONCE)
    )
    return windows.merged(torch.cat([teacher(**part).last_hidden_state for part in parts]))
