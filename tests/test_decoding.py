"""Decoders: caches, generation, packed sequences, and cross-attention."""

import copy
import pickle

import pytest
import torch
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import DynamicLayer

from checks.generation import PAGED
from closeness import assert_close
from hf_posenc.encodings import rope
from models import ALL_WAYS, CACHE, ENCODINGS, OFFSET, first, in_turn, pairs, patched, tokens


def test_a_decode_step_rotates_one_key(monkeypatch):
    model = patched("gpt2", "rope", "LMHeadModel", n_positions=1200)
    rotated = []
    turn = rope.rotated

    def counted(states, *others):
        rotated.append(states.shape[2])
        return turn(states, *others)

    monkeypatch.setattr(rope, "rotated", counted)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 1024), **{CACHE: cache})
        rotated.clear()
        model(tokens(1, 1), **{CACHE: cache})
    assert rotated == [1] * (2 * model.config.n_layer)  # one key and one query in each layer


def test_a_static_cache_keeps_the_promise():
    """The size of a static cache is checked against max_length. Reading its fill level would wait for a GPU."""
    model = patched("gpt2", "alibi", "LMHeadModel", max_length=12)
    with pytest.raises(ValueError, match="static cache of 16 tokens is longer than max_length=12"):
        model(tokens(1, 5), **{CACHE: StaticCache(config=model.config, max_cache_len=16)})
    model(tokens(1, 5), **{CACHE: StaticCache(config=model.config, max_cache_len=12)})


@pytest.mark.parametrize("encoding", ["rope", "relative"])
def test_cross_attention_is_left_alone(encoding):
    """In a decoder with cross-attention, cached or not, only the self-attention gets positions."""
    model = patched("gpt2", encoding, "LMHeadModel", add_cross_attention=True)
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    full = model(tokens(2, 9), encoder_hidden_states=states).logits
    turned = model(tokens(2, 9), encoder_hidden_states=states.flip(1)).logits
    assert_close(turned, full)
    start = model(tokens(2, 9)[:, :6], encoder_hidden_states=states, use_cache=True)
    rest = model(tokens(2, 9)[:, 6:], encoder_hidden_states=states, **{CACHE: start.past_key_values}, use_cache=True)
    assert_close(torch.cat([start.logits, rest.logits], 1), full)


@pytest.mark.parametrize("encoding", ["alibi", ALL_WAYS])
@torch.no_grad()
def test_a_cache_changed_by_its_own_methods(encoding):
    """Positions follow their keys, also through a copy and a pickle. If a cache is changed in another way, the model raises an
    error.
    """
    model, ids = patched("gpt2", encoding), tokens(3, 8)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])

    def step(cache, rows, length=6):
        whole = torch.cat([mask[rows, :length], mask.new_ones(len(rows), 2)], dim=1)
        expected = first(model(torch.cat([ids[rows, :length], ids[rows, 6:]], dim=1), attention_mask=whole))[:, length:]
        assert_close(first(model(ids[rows, 6:], attention_mask=whole, **{CACHE: cache})), expected)

    def filled():
        return model(ids[:, :6], attention_mask=mask, use_cache=True).past_key_values

    for change, rows, length in (
        (lambda cache: cache, [0, 1, 2], 6),
        (lambda cache: cache.crop(-2), [0, 1, 2], 4),
        (lambda cache: cache.crop(0), [0, 1, 2], 6),
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0], 6),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2], 6),
        (lambda cache: cache.batch_select_indices(torch.tensor([2, 1])), [2, 1], 6),
    ):
        for copied in (lambda cache: cache, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))):
            cache = copied(filled())
            change(cache)
            step(cache, rows, length)
            cache.reset()
            if cache.get_seq_length():  # Transformers before 5.16 empties its tensors and keeps its length
                continue
            first(model(ids[:, :6], attention_mask=mask, **{CACHE: cache}))
            step(cache, [0, 1, 2])
    cache = filled()
    cache.layers[0].keys, cache.layers[0].values = cache.layers[0].keys[:, :, :5], cache.layers[0].values[:, :, :5]
    with pytest.raises(ValueError, match="holds 5 keys for a batch of 3.*3, 6.*new cache"):
        model(ids[:, 6:], **{CACHE: cache})


class LayerCroppedToALength(DynamicLayer):
    """As in Transformers 5.15 to 5.17, where a positive argument is the number of keys to keep."""

    def crop(self, length):
        super().crop(length - self.get_seq_length() if length > 0 else length)


@torch.no_grad()
def test_a_cache_cropped_to_a_length():
    model, ids, positions = patched("gpt2", "alibi"), tokens(2, 7), torch.tensor([[0, 1, 2, 5, 6, 8, 9]])
    cache = DynamicCache()
    cache.layers = [LayerCroppedToALength() for _ in range(model.config.num_hidden_layers)]
    model(ids, position_ids=positions, **{CACHE: cache})
    cache.crop(5)
    expected = first(model(ids, position_ids=positions))[:, 5:]
    assert_close(first(model(ids[:, 5:], position_ids=positions[:, 5:], **{CACHE: cache})), expected)


@torch.no_grad()
def test_keys_of_another_origin():
    """If a cache doesn't record the positions of its keys, the mask determines them."""
    model, ids = patched("gpt2", "alibi"), tokens(2, 8)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
    filled = model(ids[:, :6], attention_mask=mask[:, :6], use_cache=True).past_key_values
    cache = DynamicCache()
    for number, layer in enumerate(filled.layers):
        cache.update(layer.keys, layer.values, number)
    expected = first(model(ids, attention_mask=mask))[:, 6:]
    assert_close(first(model(ids[:, 6:], attention_mask=mask, **{CACHE: cache})), expected)
    cache.crop(-2)
    jumped = first(model(ids[:, 6:], attention_mask=mask, **{CACHE: cache}, position_ids=torch.tensor([[4, 5], [6, 7]])))
    assert_close(jumped, expected)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["alibi", "shaw"])
@torch.no_grad()
def test_a_cache_that_a_compiled_model_filled(encoding):
    """Beam search and speculative decoding can reorder and crop a compiled model's cache between calls."""
    model, ids = patched("gpt2", encoding, "LMHeadModel"), tokens(2, 8)
    compiled = torch.compile(model, backend="eager", dynamic=True)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
    for rows, length in (([1, 0], 6), ([0, 1], 4)):
        cache = DynamicCache(config=model.config)
        compiled(ids[:, :6], attention_mask=mask[:, :6], **{CACHE: cache})
        cache.reorder_cache(torch.tensor(rows))
        cache.crop(length - 6)
        whole, seen = torch.cat([ids[rows, :length], ids[:, 6:]], dim=1), torch.cat([mask[rows, :length], mask[:, 6:]], dim=1)
        expected = first(model(whole, attention_mask=seen))[:, length:]
        assert_close(first(compiled(ids[:, 6:], attention_mask=seen, **{CACHE: cache})), expected)


def test_a_plain_cache_stays_as_it_is():
    model = patched("gpt2", "alibi")
    cache = model(tokens(), use_cache=True).past_key_values
    assert type(cache.layers[0]) is DynamicLayer and "key_positions" not in vars(cache.layers[0])


def test_a_mask_shorter_than_what_is_cached():
    model = patched("gpt2", "alibi")
    cache = model(tokens(2, 5), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="attention_mask has 1 columns for 5 cached and 1 new tokens"):
        model(tokens(2, 1), attention_mask=torch.ones(2, 1), **{CACHE: cache})


@pytest.mark.parametrize(
    ("host", "encoding", "cached"),
    in_turn(pairs(hosts=[*OFFSET[:1], "bert"], encodings=ENCODINGS, on=("roberta",)), True, False),
)
@torch.no_grad()
def test_generate_with_an_encoder_turned_decoder(host, encoding, cached):
    """`generate` counts its ids from 0, even if the original model starts elsewhere. The reference implementation picks one
    token after another.
    """
    head = "LMHeadModel" if host == "bert" else "ForCausalLM"
    model = patched(host, encoding, head, is_decoder=True)
    ids, mask = tokens(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0
    settings = dict(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=cached)
    both = model.generate(ids, attention_mask=mask, **settings)
    for row, start in ((0, 3), (1, 0)):
        expected = ids[row : row + 1, start:]
        for _ in range(5):
            expected = torch.cat([expected, first(model(expected))[:, -1].argmax(-1, keepdim=True)], dim=1)
        assert torch.equal(both[row, 6:], expected[0, -5:])


@torch.no_grad()
def test_generate_keeps_a_users_ids():
    """Explicit position_ids use the count of the original model, and generation continues them by one."""
    model = patched("roberta", "learned", "ForCausalLM", is_decoder=True)
    ids, positions = tokens(1, 4), torch.tensor([[2, 3, 7, 8]])
    made = model.generate(ids, position_ids=positions, max_new_tokens=2, do_sample=False, eos_token_id=None)
    expected = ids
    for length in (4, 5):
        logits = first(model(expected, position_ids=torch.tensor([[2, 3, 7, 8, 9]])[:, :length]))
        expected = torch.cat([expected, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(made, expected)


@pytest.mark.skipif(not PAGED, reason="other arguments before Transformers 5.18")
@torch.no_grad()
def test_continuous_batching():
    """The paged cache supports rotary and additive encodings. Biases raise an error."""
    settings = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [tokens(1, 5)[0].tolist(), tokens(1, 9, seed=3)[0].tolist()]
    biased = patched("llama", "alibi", "ForCausalLM")
    with pytest.raises(ValueError, match="generate_batch.*biases.*model.generate"):
        biased.generate_batch(prompts, generation_config=settings)
    with pytest.raises(ValueError, match="model.generate with a padded batch"):
        biased(tokens(1, 5), read_index=[])
    rotated = patched("llama", "rope+logn", "ForCausalLM")
    with pytest.raises(ValueError, match="LlamaAttention.*unrotated"):  # as in an attention whose cache isn't wrapped
        rotated(tokens(1, 5), read_index=[], use_cache=False)
    small = ContinuousBatchingConfig(num_blocks=8, page_size=16, max_batch_tokens=32)  # else the cache takes most of the memory
    outputs = rotated.generate_batch(prompts, generation_config=settings, continuous_batching_config=small)
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        expected = rotated.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False, eos_token_id=None)
        assert output.error is None and output.generated_tokens == expected[0, len(prompt) :].tolist()
