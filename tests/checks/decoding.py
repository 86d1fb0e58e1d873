"""Cached decoding and generation, compared with one forward pass without a cache."""

import copy

import torch
from transformers import DynamicCache, StaticCache

from checks.registry import WRITERS, check, without_windows
from closeness import assert_close, assert_equal
from cover import quick
from models import tokens

NEW = 5
"""Number of generated tokens."""


def caches(it):
    yield it.cache(it.model)
    yield it.cache(it.model, StaticCache, max_cache_len=20)


@check(*WRITERS)
@torch.no_grad()
def cached_decoding_is_one_pass(it):
    """Decoding in chunks longer and shorter than a sliding window and token by token, with and without left padding."""
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    left = mask.clone()
    left[0, :4] = 0
    for seen in (None, left):
        expected, real = it.plain(it.model, ids, seen), (mask if seen is None else seen).bool()
        for cache in caches(it):
            assert_close(it.in_pieces(it.model, ids, (7, 8, 9), cache, seen)[real], expected[real])


@check("decoder", where=without_windows)
@torch.no_grad()
def decoding_follows_right_padding(it):
    """Tokens after a right-padded prompt have the same distances as without the padding."""
    prompt, new, lengths = tokens(3, 7), tokens(3, 4, seed=1), (4, 7, 1)
    mask = torch.arange(7)[None] < torch.tensor(lengths)[:, None]
    whole, ids = torch.cat([mask, torch.ones(3, 4, dtype=torch.bool)], dim=1).long(), torch.cat([prompt, new], dim=1)
    for cache in caches(it):
        decoded = it.in_pieces(it.model, ids, (7, 8, 10), cache, whole)[:, 7:]
        for row, length in enumerate(lengths):
            alone = it.plain(it.model, torch.cat([prompt[row, :length], new[row]])[None])[:, length:]
            assert_close(decoded[row : row + 1], alone)


@check("decoder", where=without_windows)
@torch.no_grad()
def decoding_follows_position_ids(it):
    """Cached keys keep their positions, with and without explicit `position_ids` for the following tokens."""
    ids, jumping = tokens(2, 9), torch.tensor([[0, 1, 2, 9, 10], [3, 4, 2, 1, 0]])
    for following in ([[11, 12, 13, 20]], [[14, 2, 3, 4], [0, 1, 2, 17]], None):
        positions = torch.cat([jumping, torch.tensor(following or [[5, 6, 7, 8]]).expand(2, -1)], dim=1)
        expected = it.plain(it.model, ids, position_ids=positions, use_cache=True)
        for cache in caches(it):
            pieces = []
            for start, stop in ((0, 5), (5, 6), (6, 8), (8, 9)):
                given = {} if following is None and start else {"position_ids": positions[:, start:stop]}
                pieces.append(it.step(it.model, ids[:, start:stop], cache, **given))
            assert_close(torch.cat(pieces, dim=1), expected)


def generate(it, model, ids, mask, **settings):
    """The new tokens, and the logits that they were chosen from."""
    if it.kind == "encoder-decoder":  # otherwise Transformers prepends this token to the prompt
        ids[:, 0] = model.generation_config.decoder_start_token_id
    prefix = "decoder_" if it.kind == "encoder-decoder" else ""
    given = {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask}
    if prefix:
        given |= {"input_ids": it.inputs(ids)["input_ids"], "attention_mask": torch.ones(len(ids), 7)}
    settings = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0) | settings
    output = model.generate(**given, **settings, output_logits=True, return_dict_in_generate=True)
    return output.sequences[:, ids.shape[1] :], torch.stack(output.logits, dim=1)


@check(*WRITERS)
@torch.no_grad()
def generate_is_repeated_forward_passes(it):
    """Greedy decoding gives the same tokens with a dynamic cache, with a static cache, and without a cache.

    The logits of each token in a left-padded batch equal those of a forward pass over the row without padding.
    """
    model, prompt, mask = it.twin(), tokens(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    dynamic = generate(it, model, prompt, mask)
    for more in ({"cache_implementation": "static", "disable_compile": True}, {"use_cache": False}):
        other = generate(it, model, prompt, mask, **more)
        assert_equal(other[0], dynamic[0])
        assert_close(other[1], dynamic[1])
    for row, start in enumerate((3, 0)):
        text = torch.cat([prompt[row : row + 1, start:], dynamic[0][row : row + 1, :-1]], dim=1)
        assert_close(it.plain(model, text)[:, -NEW:], dynamic[1][row : row + 1])


@check(*WRITERS)
@torch.no_grad()
def a_prompt_read_once_is_continued_in_several_ways(it):
    prompt, cache = tokens(1, 6), it.cache(it.model)
    it.step(it.model, prompt, cache)
    texts = torch.cat([prompt.expand(3, -1), tokens(3, 4, seed=9)], dim=1)
    found = []
    for row in texts:
        own = copy.deepcopy(cache)
        found.append(torch.cat([it.step(it.model, piece, own) for piece in row[None, 6:].split((1, 3), dim=1)], dim=1))
    assert_close(torch.cat(found), it.plain(it.model, texts)[:, 6:])


@check(*WRITERS, on=quick)
@torch.no_grad()
def beams_are_forward_passes(it):
    """The score of a beam is the sum of the log-probabilities of its tokens."""
    ids, mask = tokens(2, 6), torch.ones(2, 6, dtype=torch.long)
    prefix = "decoder_" if it.kind == "encoder-decoder" else ""
    given = {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask}
    given |= {"input_ids": it.inputs(ids)["input_ids"]} if prefix else {}
    output = it.twin().generate(
        **given,
        **dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, num_beams=3, length_penalty=0.0),
        return_dict_in_generate=True,
        output_scores=True,
    )
    made = output.sequences
    likely = it.plain(it.model, made[:, :-1])[:, -NEW:].log_softmax(-1)
    assert_close(output.sequences_scores, likely.gather(2, made[:, -NEW:, None]).sum((1, 2)))


@check(*WRITERS, on=quick, where=without_windows)  # Transformers can't crop a cache of windows
@torch.no_grad()
def a_cropped_cache_goes_on(it):
    ids, cache = tokens(2, 12), it.cache(it.model, DynamicCache)
    it.step(it.model, torch.cat([ids[:, :5], tokens(2, 4, seed=8)], dim=1), cache)
    cache.crop(-4)
    found = torch.cat([it.step(it.model, piece, cache) for piece in ids[:, 5:].split((1, 6), dim=1)], dim=1)
    assert_close(found, it.plain(it.model, ids)[:, 5:])
