"""Order, padding, `position_ids`, and maximum lengths."""

import copy
import functools

import pytest
import torch

from checks.registry import TEXT, check, source
from closeness import assert_apart, assert_close, assert_equal
from models import LENGTH, UNORDERED, backends, tokens
from oracles import ids_of, padded

PLACES = torch.randperm(11, generator=torch.Generator().manual_seed(3))


def in_float64(model):
    """A copy with eager attention in float64."""
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


@check(*TEXT)
@torch.no_grad()
def order_is_visible(it):
    """Shuffling the other tokens changes outputs, except with the encodings in UNORDERED.

    All tokens are compared in an encoder. In a decoder with one layer, only the last token is compared, because it attends to
    all others.
    """
    ids = tokens(1)
    compare = assert_close if it.encoding in UNORDERED else functools.partial(assert_apart, by=2e-5)
    if it.kind == "encoder":
        compare(it.plain(it.model, ids[:, PLACES]), it.plain(it.model, ids)[:, PLACES])
        return
    model = it.fresh(**it.host.one_layer)
    moved = torch.cat([PLACES[PLACES != 10], torch.tensor([10])])
    compare(it.plain(model, ids[:, moved])[:, -1], it.plain(model, ids)[:, -1])
    if it.kind == "encoder-decoder":
        read, places = model.get_encoder(), PLACES[PLACES < 7]
        states = read(source(1))
        compare(read(source(1)[:, places])[0], states[0][:, places])
        # Neither stack's encoding affects cross-attention.
        moved = type(states)(**{**states, "last_hidden_state": states[0][:, places]})
        given = [{"encoder_outputs": each, "input_ids": None} for each in (states, moved)]
        assert_close(*(it.plain(model, ids, **each) for each in given))


@check(*TEXT)
@torch.no_grad()
def length_is_limited_by_max_length_alone(it):
    long = tokens(1, LENGTH + 9)
    if it.kind != "encoder-decoder":
        if it.encoding.startswith(("learned", "tupe")) or (it.encoding == "normalized" and it.kind == "decoder"):
            with pytest.raises(ValueError, match=rf"{LENGTH + 9} tokens.*max_length={LENGTH}.*truncat"):
                it.plain(it.model, long)
        else:
            assert_close(it.plain(it.model, long), it.plain(in_float64(it.model), long).float())
    promised = it.fresh(max_length=LENGTH + 9)
    assert_close(it.plain(promised, long), it.plain(in_float64(promised), long).float())
    with pytest.raises(ValueError, match=rf"{LENGTH + 10} tokens.*max_length={LENGTH + 9}"):
        it.plain(promised, tokens(1, LENGTH + 10))


@check(*TEXT)
@torch.no_grad()
def padding_changes_nothing(it):
    model, ids, lengths = it.twin(), tokens(3), [11, 7, 4]
    for implementation in backends(model):
        model.set_attn_implementation(implementation)
        alone = [it.plain(model, ids[row : row + 1, :length])[0] for row, length in enumerate(lengths)]
        for side in ("right", "left"):
            batch, mask = padded(ids, lengths, side)
            more = {}
            if it.kind == "encoder-decoder":
                read, seen = padded(source(3), [7, 7, 7], side)
                more = {"input_ids": read, "attention_mask": seen}
            outputs = it.plain(model, batch, mask, **more)
            for row, expected in enumerate(alone):
                assert_close(outputs[row][mask[row].bool()], expected)


@check("encoder", "decoder")
@torch.no_grad()
def position_ids_are_positions(it):
    """Consecutive IDs change nothing. With non-consecutive IDs, a batch gives the same output as its rows separately."""
    ids, arange = tokens(), ids_of(it.host)[:1]
    expected = it.plain(it.model, ids)
    assert_equal(it.plain(it.model, ids, position_ids=arange), expected)
    jumps = torch.stack([torch.arange(11) * 2, torch.arange(11).flip(0)]) + it.host.offset
    whole = it.plain(it.model, ids, torch.ones_like(ids), position_ids=jumps)
    for row in range(2):
        mask = torch.ones(1, 11, dtype=torch.long)
        alone = it.plain(it.model, ids[row : row + 1], mask, position_ids=jumps[row : row + 1])
        assert_close(whole[row : row + 1], alone)
    if it.kind == "encoder":  # its output depends on the IDs, not on the order of the inputs
        moved = it.plain(it.model, ids[:, PLACES], position_ids=arange[:, PLACES].expand(2, -1))
        assert_close(moved, expected[:, PLACES])


TEXTS = (5, 7)
"""Lengths of the texts in a packed row."""


@check("decoder", where=lambda it: it.name != "gpt-oss")  # packed texts also attend to one another in the original model
@torch.no_grad()
def packed_texts_stay_apart(it):
    """IDs that restart from 0 within a row separate two texts, which don't attend to each other.

    The same holds for the original models without a cache.
    """
    ids = tokens(1, sum(TEXTS))
    packed = it.plain(it.model, ids, position_ids=torch.cat([torch.arange(length) for length in TEXTS])[None])
    assert_close(packed, torch.cat([it.plain(it.model, text) for text in ids.split(TEXTS, dim=1)], dim=1))
