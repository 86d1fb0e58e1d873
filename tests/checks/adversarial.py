"""Checks of what has broken an encoding before: gaps between tokens, mask formats, threads, errors within a forward pass,
replaced modules, and modes of `generate`. The reference is one forward pass over whole texts without padding.

Shapes: B batch, L tokens, Q queries, K keys, V vocabulary or hidden_size.
"""

import contextlib
import copy
import functools
import sys
import unittest.mock
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from checks.decoding import NEW, generate
from checks.registry import TEXT, WRITERS, Subject, check, named, source, without_windows
from closeness import assert_close, assert_equal
from cover import quick
from models import ALL_WAYS, backends, patched, tokens

COUNTING = ("cope", "fox")
"""Encodings that count the tokens between two tokens. Position IDs without tokens between them don't affect these encodings."""
BY_LENGTH = ("fire", "logn", "normalized")
"""Encodings that depend on the length of a text, which 4-D masks and position IDs don't specify."""


# Gaps: padding between real tokens, masked tokens, and non-consecutive position IDs.


@check("decoder", where=without_windows)
@torch.no_grad()
def hidden_tokens_are_not_there(it):
    """Masked tokens have no effect, also between other tokens. (An encoder counts them there.)"""
    ids, mask = tokens(1, 12), torch.ones(1, 12, dtype=torch.long)
    mask[0, 4:7] = 0
    real = mask.bool()
    assert_close(it.plain(it.model, ids, mask)[real], it.plain(it.model, ids[real][None])[0])


def takes_ids_for_places(it):  # LayoutLM doesn't support 4-D masks
    return without_windows(it) and it.name != "layoutlm" and not named(it.encoding, COUNTING + BY_LENGTH)


@check("encoder", "decoder", where=takes_ids_for_places)
@torch.no_grad()
def jumping_ids_are_places_in_a_longer_text(it):
    """Non-consecutive IDs give the same output as a longer text whose other tokens are masked."""
    ids, places = tokens(1, 9), torch.tensor([0, 1, 2, 6, 7, 11, 12, 13, 16])
    shown = torch.zeros(17, dtype=torch.bool).index_fill(0, places, True)
    longer, mask = torch.full((1, 17), 3).index_copy(1, places, ids), square(shown[None], it.kind)
    right = it.plain(it.model, longer, torch.zeros(mask.shape).masked_fill(~mask, LOWEST))
    found = it.plain(it.model, ids, torch.ones_like(ids), position_ids=places[None] + it.host.offset)
    assert_close(found, right[:, places])


@check("decoder", where=without_windows)
@torch.no_grad()
def turns_of_a_batch_are_padded(it):
    """Cached padding between real tokens, from chat turns of different lengths, has no effect."""
    texts, cache, mask, at = tokens(2, 9), it.cache(it.model), torch.zeros(2, 0, dtype=torch.long), [0, 0]
    expected = it.plain(it.model, texts)
    for widths, side in (((4, 2), "right"), ((2, 4), "left"), ((1, 3), "right")):
        shown = torch.arange(max(widths)) < torch.tensor(widths)[:, None]
        shown = shown.flip(1) if side == "left" else shown
        ids = torch.full(shown.shape, 3)
        for row, width in enumerate(widths):
            ids[row, shown[row]] = texts[row, at[row] : at[row] + width]
        mask = torch.cat([mask, shown.long()], dim=1)
        logits = it.step(it.model, ids, cache, mask)
        for row, width in enumerate(widths):
            assert_close(logits[row, shown[row]], expected[row, at[row] : at[row] + width])
            at[row] += width


@check("decoder", on=quick, where=lambda it: without_windows(it) and not named(it.encoding, COUNTING))
@torch.no_grad()
def generate_goes_on_behind_right_padding(it):
    """With right padding, new tokens are at positions 1, 2, ….

    `generate` takes a row's first new token from the last column, which is padding. It continues from that column's position
    ID, which is 0.
    """
    prompt, lengths, new = tokens(2, 8), (8, 5), 4
    mask = (torch.arange(8) < torch.tensor(lengths)[:, None]).long()
    made, logits = generate(it, it.twin(), prompt, mask, max_new_tokens=new)
    for row, length in enumerate(lengths):
        text = torch.cat([prompt[row, :length], made[row]])[None]
        following = torch.arange(new) + (length if length == 8 else 1)
        places = torch.cat([torch.arange(length), following])[None] + it.host.offset
        right = it.plain(it.model, text, torch.ones_like(text), position_ids=places)[0, length - 1 : -1]
        assert_close(logits[row, 1:], right[1:])


# Masks. Right padding doesn't change the output.


LOWEST = torch.finfo(torch.float32).min


def square(shown, kind):
    """`[B, K] -> [B, 1, K, K]`: the tokens that each token attends to, which always include itself."""
    length = shown.shape[1]
    seen = shown.bool()[:, None, None, :].expand(-1, 1, length, length)
    return (seen.tril() if kind == "decoder" else seen) | torch.eye(length, dtype=torch.bool)


def added(shown, kind, lowest=LOWEST):
    """An additive mask: 0 for the tokens that each token attends to, the lowest value for the others."""
    seen = square(shown, kind)
    return torch.zeros(seen.shape).masked_fill(~seen, lowest)


@check("encoder", "decoder")
@torch.no_grad()
def masks_in_every_form(it):
    """All mask formats that the original models support. `tests/test_backends.py` checks the errors for other formats."""
    ids, mask = tokens(2, 9), torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    forms = [mask.bool(), mask.float(), mask.to(torch.uint8)]
    if not it.host.windowed and it.name != "layoutlm" and not named(it.encoding, BY_LENGTH):
        given = added(mask, it.kind)
        forms += [given, added(mask, it.kind, -torch.inf), given.expand(-1, 4, -1, -1)]
        if it.model.config._attn_implementation == "sdpa":
            forms.append(square(mask, it.kind))
    for row, length in enumerate((9, 6)):
        alone = it.plain(it.model, ids[row : row + 1, :length])[0]
        for form in forms:
            assert_close(it.plain(it.model, ids, form)[row, :length], alone)


# One model called by several threads, from within its forward pass, and after a failed forward pass.


@check("encoder", "decoder", on=quick, slow=True)
@torch.no_grad()
def many_threads_at_once(it):
    """Threads run texts of several lengths, padded batches, and cached decoding."""
    lengths, model = (3, 17, 5, 11, 8, 14), it.model
    texts = [tokens(1, length, seed=length) for length in lengths]
    expected = [it.plain(model, text)[0] for text in texts]

    @torch.no_grad()
    def run(number):
        at = number % len(texts)
        if number % 3 == 0:
            return [at], [it.plain(model, texts[at])[0]]
        if number % 3 == 1 and it.kind == "decoder":
            return [at], [it.in_pieces(model, texts[at], (1, 2))[0]]
        rows, side = [at, (at + 1) % len(texts)], ("left", "right")[number % 2]
        ids, mask = batch([texts[row][0] for row in rows], side)
        output = it.plain(model, ids, mask)
        return rows, [each[shown] for each, shown in zip(output, mask.bool(), strict=True)]

    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)  # switch threads within forward passes
        with ThreadPoolExecutor(8) as pool:
            for rows, found in pool.map(run, range(24)):
                assert_close(found, [expected[row] for row in rows])
    finally:
        sys.setswitchinterval(interval)


def batch(texts, side):
    """IDs and mask `[B, L]` of texts of several lengths."""
    width = max(map(len, texts))
    ids, mask = torch.full((len(texts), width), 3), torch.zeros(len(texts), width, dtype=torch.long)
    for row, text in enumerate(texts):
        place = slice(width - len(text), width) if side == "left" else slice(0, len(text))
        ids[row, place], mask[row, place] = text, 1
    return ids, mask


@check(on=quick)
@torch.no_grad()
def forward_passes_within_one_another(it):
    """After a failure in its last layer, a model is called within its own forward pass, together with another model."""
    text = it.kind in TEXT
    given = [it.inputs(tokens(1, length, seed=length)) for length in (9, 5)] if text else [it.inputs(), it.inputs()]
    outer, inner = [it.model(**each)[0] for each in given]
    model, other, found = it.twin(), it.without, []
    last = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each)][-1][-1]

    def fail(*_):
        raise KeyError("on purpose")

    handle = last.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="on purpose"):
        model(**given[1])
    handle.remove()
    assert_equal(model(**given[0])[0], outer)

    def call(*_):
        if not found:
            found.append(None)
            other(**given[1])
            found.append(model(**given[1])[0])

    last.register_forward_pre_hook(call)
    assert_equal(model(**given[0])[0], outer)
    assert_equal(found[1], inner)


# Models that are created again, and modules that are replaced.


def seeded(model):
    torch.manual_seed(5)
    return type(model)(copy.deepcopy(model.config)).eval()


@functools.cache
def without_positions(name):
    """The weights of the model without positions."""
    return dict(seeded(Subject(name, "none").without).named_parameters())


@check()
@torch.no_grad()
def a_model_of_its_config(it):
    """A model created from the config.

    With the same seed, it has the weights of a model without positions. With the state dict, it gives the same output, also if
    it was created on the meta device.
    """
    made, host = seeded(it.model), without_positions(it.name)
    ours = dict(made.named_parameters())
    assert_equal({name: ours[name] for name in host}, host)
    made.load_state_dict(it.model.state_dict())
    assert_equal(it.plain(made), it.plain(it.model))
    with torch.device("meta"):
        empty = type(it.model)(copy.deepcopy(it.model.config)).eval()
    empty.load_state_dict(it.model.state_dict(), assign=True)
    buffers = dict(it.model.named_buffers())
    for name, buffer in [*empty.named_buffers()]:
        if buffer.is_meta:
            owner, _, last = name.rpartition(".")
            empty.get_submodule(owner)._buffers[last] = buffers[name]
    empty.tie_weights()
    assert_equal(it.plain(empty), it.plain(it.model))


@check(*TEXT, on=quick, slow=True)
@torch.no_grad()
def embeddings_are_replaced(it):
    """Embeddings are replaced by copies, resized, and converted to another dtype and back."""
    expected, model = it.plain(it.model), it.twin()
    model.resize_token_embeddings(70, mean_resizing=False)
    assert_close(it.plain(model)[..., : expected.shape[-1]], expected)
    model = it.twin()
    model.set_input_embeddings(copy.deepcopy(model.get_input_embeddings()))
    model.tie_weights()
    assert_close(it.plain(model.double().float()), expected)


# Implementations of attention.


@contextlib.contextmanager
def own_implementation(name):
    """Transformers' SDPA registered under an unknown name."""
    with (
        unittest.mock.patch.dict(AttentionInterface._global_mapping, {name: sdpa_attention_forward}),
        unittest.mock.patch.dict(AttentionMaskInterface._global_mapping, {name: sdpa_mask}),
    ):
        yield name


@check("encoder", "decoder", on=quick, slow=True)
@torch.no_grad()
def implementations_are_switched(it):
    """Implementations are switched by a method, a dict, and the config. One without bias support raises an error for biases."""
    if len(backends(it.model)) < 2:
        pytest.skip("with one implementation")
    model, expected = it.twin(), it.plain(it.model)
    for switch in ("eager", {"": "sdpa"}, {"": "eager"}, "sdpa"):
        model.set_attn_implementation(switch)
        assert_close(it.plain(model), expected)
    for name in ("eager", "sdpa"):
        model.config._attn_implementation = name
        assert_close(it.plain(model), expected)
    for number, by_config in enumerate((False, True)):
        with own_implementation(f"sdpa_of_ones_own_{number}") as name:
            try:
                if by_config:
                    model.config._attn_implementation = name
                else:
                    model.set_attn_implementation(name)
                found = it.plain(model)
            except ValueError as error:
                assert "score bias" in str(error), error
            else:
                assert_close(found, expected)
        model.config._attn_implementation = "sdpa"


# Other modes of `generate`, and reused caches.

MODES = {
    "several answers": {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "encoder_outputs": {"outputs": True},
    "inputs_embeds": {"embeds": True},
}


@check(*WRITERS, on=quick, slow=True)
@torch.no_grad()
def generate_behind_padding_in_other_modes(it):
    """The logits of each token equal those of one forward pass over the row's text, without padding in its source."""
    two = it.kind == "encoder-decoder"
    for mode, settings in MODES.items():
        settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | settings
        outputs, embeds = (settings.pop(name, False) for name in ("outputs", "embeds"))
        if not two and (outputs or embeds):
            continue
        model, prompt = it.twin(), tokens(1 if "lookup" in mode else 2, 8)
        mask = torch.ones_like(prompt)
        mask[0, :3] = 0
        if two:  # otherwise `generate` would prepend this token
            settings["encoder_no_repeat_ngram_size"] = 0  # Blenderbot's setting, which requires input IDs
            prompt[:, 0] = model.config.decoder_start_token_id
        prefix = "decoder_" if two else ""
        given = {f"{prefix}input_ids": prompt, f"{prefix}attention_mask": mask}
        if two:
            read = torch.nn.functional.pad(source(len(prompt)), (2, 0), value=3)
            seen = (torch.arange(9) > 1).long().expand(len(prompt), -1)
            given |= {"attention_mask": seen}
            if outputs:
                given["encoder_outputs"] = model.get_encoder()(input_ids=read, attention_mask=seen, return_dict=True)
            elif embeds:
                given["inputs_embeds"] = model.get_input_embeddings()(read)
            else:
                given["input_ids"] = read
        torch.manual_seed(4)
        output = model.generate(**given, **settings, output_logits=True, return_dict_in_generate=True)
        for row, text in enumerate(output.sequences):
            start = 3 if row < settings.get("num_return_sequences", 1) else 0
            right = it.plain(it.model, text[None, start:-1])[0, -NEW:]
            assert_close(torch.stack(output.logits, dim=1)[row], right)


@check(*WRITERS, on=quick, slow=True)
@torch.no_grad()
def a_static_cache_is_used_again(it):
    cache = it.cache(it.model, StaticCache, max_cache_len=16)
    for seed in (9, 10):
        text = tokens(2, 12, seed=seed)
        assert_close(it.in_pieces(it.model, text, (4, 5, 9), cache), it.plain(it.model, text))
        cache.reset()


# Graphs traced at one length and run at others, and images of other sizes.


def of_few(it):
    return it.name in ("bert", "gpt2", "llama") and it.encoding in ("alibi", "rope", "shaw", "learned", ALL_WAYS)


@check("encoder", "decoder", slow=True, on=quick, where=of_few)
@torch.no_grad()
def a_graph_of_one_length_runs_at_others(it):
    """Lengths are below and above 256 keys, padded and cached. From 256 keys, an untraced run on a CPU uses other kernels."""
    model, other = (patched(it.name, it.encoding, it.host.head, max_length=512) for _ in range(2))
    other.set_attn_implementation("eager")
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager", dynamic=True)
    for length in (9, 2, 257, 400):
        ids, mask = batch([tokens(1, each, seed=each)[0] for each in (length, length // 2)], "right")
        assert_close(it.plain(run, ids, mask)[mask.bool()], it.plain(other, ids, mask)[mask.bool()])
    if it.kind == "decoder":
        ids, mask = batch([tokens(1, 257)[0], tokens(1, 254, seed=2)[0]], "left")
        found = it.in_pieces(run, ids, (253, 254, 255), it.cache(model, StaticCache, max_cache_len=320), mask)
        assert_close(found[mask.bool()], it.plain(other, ids, mask)[mask.bool()])


SIZES = ((48, 32), (16, 64), (16, 16), (136, 136), (8, 40))
"""Images that are taller, wider, and smaller than the model's size, with 289 patches, and with one row of patches."""


@check("vision", where=lambda it: it.name != "sam3")  # the original model supports only one image size
@torch.no_grad()
def images_of_other_sizes(it):
    """The output is that of a model created for that size, with each implementation."""
    model, eager = it.twin(), it.twin()
    eager.set_attn_implementation("eager")
    for height, width in SIZES:
        if it.max_length and height * width // 64 > it.max_length:
            continue
        pixels = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(height))
        given = {"pixel_values": pixels} | ({} if it.name == "dinov3" else {"interpolate_pos_encoding": True})
        found = model(**given)[0]
        assert_close(found, eager(**given)[0])
        if it.name == "vit" or height == width:
            other = it.fresh(image_size=height if height == width and it.name != "yolos" else [height, width])
            state = {name: each for name, each in model.state_dict().items() if "original" not in name}
            other.load_state_dict(state, strict=False)
            assert_close(found, other(pixels)[0])
