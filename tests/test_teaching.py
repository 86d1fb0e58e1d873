"""A teacher that reads long texts in windows. Here, its states show the id and the window position of each token."""

from types import SimpleNamespace

import pytest
import torch
from transformers import BertTokenizer

from hf_posenc.training import data, teaching

CLS, SEP, USABLE = 2, 3, 12


@pytest.fixture
def cut(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    return data.Cut(BertTokenizer(str(tmp_path / "vocab.txt")))


class Teacher:
    """States: the token's id, its position in the window, and the first token after [CLS]."""

    def __init__(self):
        self.windows = []

    def __call__(self, input_ids, attention_mask=None):
        assert input_ids.shape[1] <= USABLE or attention_mask is not None
        shown = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        self.windows += [row[mask].tolist() for row, mask in zip(input_ids, shown.bool(), strict=True)]
        place = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        first = input_ids[:, 1:2].expand(input_ids.shape)
        return SimpleNamespace(last_hidden_state=torch.stack([input_ids, place, first], dim=-1).float())


def text(size, first):
    return [CLS, *range(first, first + size - 2), SEP]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("size", [12, 13, 17, 18, 22, 31, 32, 57])
def test_the_window_in_which_a_token_lies_most_centrally(cut, size, side):
    rows = [text(size, 100), text(9, 500)]
    longest = max(map(len, rows))
    batch = {name: torch.zeros(2, longest, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    places = [slice(0, len(row)) if side == "right" else slice(longest - len(row), longest) for row in rows]
    for i, (row, place) in enumerate(zip(rows, places, strict=True)):
        batch["input_ids"][i, place], batch["attention_mask"][i, place] = torch.tensor(row), 1
    teacher = Teacher()
    found = teaching.states(teacher, batch, cut, USABLE)
    for i, (row, place) in enumerate(zip(rows, places, strict=True)):
        states = found[i, place]
        assert states[1:-1, 0].tolist() == row[1:-1]
        if size <= USABLE:
            continue
        windows = [window for window in teacher.windows if window[1] in row]
        assert all(len(window) <= USABLE and window[0] == CLS and window[-1] == SEP for window in windows)
        for index, token in enumerate(row[1:-1]):
            # The distance to the window's edge. The ends of the text don't count as edges.
            room = {}
            for window in windows:
                if token in window[1:-1]:
                    before = window.index(token) - 1 if window[1] != row[1] else 99
                    behind = len(window) - 2 - window.index(token) if window[-2] != row[-2] else 99
                    room[window[1]] = min(before, behind)
            chosen = int(states[1 + index, 2])
            assert room[chosen] >= max(room.values()) - 1, (token, room, chosen)
        assert states[0].tolist() == pytest.approx(torch.tensor([[CLS, 0, w[1]] for w in windows]).float().mean(0).tolist())


def test_short_texts_are_read_as_they_are(cut):
    batch = {"input_ids": torch.tensor([text(9, 100)]), "attention_mask": torch.ones(1, 9, dtype=torch.long)}
    for usable in (None, 9, 12):
        teacher = Teacher()
        teaching.states(teacher, batch, cut, usable)
        assert teacher.windows == [text(9, 100)]
