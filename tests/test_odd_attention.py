"""Attentions that do more than multiply queries and keys: latent keys, keys shared by layers, and keys chosen by an indexer."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

import hf_posenc
from closeness import assert_close, assert_equal
from models import first, randomize_encoding, tiny, tokens
from oracles import in_pieces

WINDOW = 6
INDEXED = dict(index_n_heads=2, index_head_dim=8, n_routed_experts=2)
LATENTS = {
    "DeepseekV3Model": {"first_k_dense_replace": 1},
    "DeepseekV2Model": {"first_k_dense_replace": 1},
    "MiniCPM3Model": {},
    "DeepseekV32Model": dict(INDEXED, index_topk=64, first_k_dense_replace=1),
}
"""Class -> changes of the config."""


def gemma4(**changes):
    sizes = dict(num_kv_shared_layers=2, sliding_window=WINDOW, num_global_key_value_heads=2, global_head_dim=8)
    return tiny("Gemma4ForCausalLM", **{**sizes, **changes})


def kept(model):
    return {"dynamic": DynamicCache(config=model.config), "static": StaticCache(config=model.config, max_cache_len=20)}


@pytest.mark.parametrize("host", LATENTS)
@pytest.mark.parametrize("rank", [16, 24])
@torch.no_grad()
def test_latent_keys_in_a_cache(host, rank, encoding="rope+alibi+shaw"):
    """These models cache latents instead of keys, even if both have the same width (16)."""
    model = tiny(host, **LATENTS[host], kv_lora_rank=rank)
    model, ids, mask = randomize_encoding(hf_posenc.patch(model, encoding)), tokens(2, 14), torch.ones(2, 14)
    mask[0, :3] = 0
    expected = first(model(ids, attention_mask=mask, use_cache=False))[mask.bool()]
    assert_close(first(model(ids, attention_mask=mask))[mask.bool()], expected)
    for cache in kept(model).values():
        assert_close(in_pieces(model, ids, (6, 7, 11), mask, cache)[mask.bool()], expected)
    assert_close(first(model(ids[:1, 3:], use_cache=False))[0], expected[:11])


SHARED = [
    {"type": "rope"},
    {"type": "rope", "layers": [0]},
    {"type": "rope", "layers": [2, 3]},
    {"type": "rope+rope", "rope__layers": [0, 3], "rope_2__layers": [1, 2], "rope_2__theta": 3.0},
    {"type": "alibi", "layers": [2]},
]


@pytest.mark.parametrize("encoding", SHARED, ids=str)
@torch.no_grad()
def test_shared_keys_are_rotated_by_each_layers_own_parts(encoding):
    model, ids = hf_posenc.patch(gemma4(), encoding), tokens(2, 17)
    expected = first(model(ids, use_cache=False))
    for cache in kept(model).values():
        assert_close(in_pieces(model, ids, (5, 6, 9, 14), cache=cache), expected)


@pytest.mark.parametrize("encoding", ["rope", "alibi", "shaw"])
@pytest.mark.parametrize("keep", [1, 3])
@torch.no_grad()
def test_the_last_logits_alone(encoding, keep):
    """Otherwise, the last layers of Gemma 4 would get the queries of only these tokens."""
    model, ids = randomize_encoding(hf_posenc.patch(gemma4(), encoding)), tokens(2, 11)
    assert_close(first(model(ids, logits_to_keep=keep)), first(model(ids))[:, -keep:])


@pytest.mark.parametrize("encoding", ["alibi", "relative"])
@torch.no_grad()
def test_attentions_of_several_sizes(encoding):
    """A result for one attention can't be shared with others. With `per_layer`, each has its own, with its own scaling."""
    model, ids = gemma4(global_head_dim=16), tokens(2, 11)
    with pytest.raises(hf_posenc.UnsupportedModelError, match=f"attention layers of .*{encoding}.*per_layer=True"):
        hf_posenc.patch(model, encoding)
    new = randomize_encoding(hf_posenc.patch(model, encoding, per_layer=True))
    assert_close(in_pieces(new, ids, (5, 6)), first(new(ids, use_cache=False)))
    assert_equal(first(hf_posenc.unpatch(new)(ids)), first(model(ids)))


CHOOSING = {
    "DeepseekV32Model": (dict(INDEXED, first_k_dense_replace=1), {"index_topk": 3}, {"index_topk": 64}),
    "GlmMoeDsaModel": (INDEXED, {"index_topk": 3}, {"index_topk": 64}),
    "MiniMaxM3VLTextModel": (
        dict(index_n_heads=2, index_head_dim=8, index_block_size=2, layer_types=["minimax_m3_sparse"] * 2),
        {"index_topk_blocks": 2},
        {"index_topk_blocks": 16},
    ),
}


@pytest.mark.parametrize("host", CHOOSING)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_chosen_keys(host, implementation):
    """Only the keys that the model's indexer chooses are visible."""
    sizes, few, all_keys = CHOOSING[host]
    ids, outputs = tokens(2, 14), []
    for changes in (few, all_keys):
        model = tiny(host, **sizes, **changes)
        model.set_attn_implementation(implementation)
        new = hf_posenc.patch(model, "none")
        model.rotary_emb.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "position_ids": torch.zeros_like(kwargs["position_ids"])}),
            with_kwargs=True,
        )
        outputs.append(first(model(ids)))
        assert_close(first(new(ids)), outputs[-1])
    assert (outputs[0] - outputs[1]).abs().max() > 1e-2 * outputs[1].abs().max()
