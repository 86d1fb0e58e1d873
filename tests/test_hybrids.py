"""Models that combine attention layers with layers that see order themselves: linear attention, state spaces,
and convolutions.
"""

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import hf_posenc
from closeness import assert_apart, assert_close
from models import CACHE, first, randomize_encoding, tiny, tokens
from oracles import in_pieces

LINEAR, FULL = "linear_attention", "full_attention"
MAMBA = dict(num_hidden_layers=3, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=4)
DELTA = dict(linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)

GRANITE = dict(MAMBA, layer_types=[LINEAR, FULL, LINEAR], shared_intermediate_size=48)
HYBRIDS = {
    "lfm2": ("Lfm2", dict(block_ff_dim=48, block_auto_adjust_ff_dim=False)),
    "lfm3": ("Lfm3", {}),
    "qwen3-next": ("Qwen3Next", DELTA),
    "qwen3.5": ("Qwen3_5", DELTA),
    "olmo-hybrid": ("OlmoHybrid", DELTA),
    "nemotron-h": (
        "NemotronH",
        dict(
            layers_block_type=["mamba", "moe", "attention", "mlp"],
            mamba_num_heads=4,
            mamba_head_dim=8,
            ssm_state_size=8,
            chunk_size=4,
            n_groups=1,
            moe_shared_expert_intermediate_size=16,
        ),
    ),
    "jamba": ("Jamba", dict(num_hidden_layers=3, attn_layer_period=3, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4)),
    "bamba": ("Bamba", MAMBA),
    "granite": ("GraniteMoeHybrid", dict(GRANITE, position_embedding_type=None)),
    "granite-rope": ("GraniteMoeHybrid", dict(GRANITE, position_embedding_type="rope")),
    "falcon-h1": ("FalconH1", {**MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 64}),
    "zamba": ("Zamba", dict(num_hidden_layers=3, layers_block_type=[LINEAR, "hybrid", "hybrid"], n_mamba_heads=2)),
    "minimax": ("MiniMax", dict(block_size=4)),
    "recurrent-gemma": ("RecurrentGemma", dict(num_hidden_layers=3, lru_width=32)),
}
QUICK = ("lfm2", "lfm3", "qwen3-next", "nemotron-h", "granite", "falcon-h1", "minimax")
NO_SOURCE = ("nemotron-h", "jamba", "granite", "zamba")
"""Models without a positional component."""
SINGLE_STEPS = ("jamba", "zamba", "recurrent-gemma")
WINDOWED = {"lfm3": "sliding_window", "recurrent-gemma": "attention_window_size"}
"""In these models, one or all attentions see only this many tokens."""
every_hybrid = pytest.mark.parametrize(
    "host", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in HYBRIDS]
)


def of(host, encoding=None, head="Model", **changes):
    prefix, own = HYBRIDS[host]
    if host in WINDOWED:
        changes = {WINDOWED[host]: 64} | changes
    name = "Qwen3_5TextModel" if (host, head) == ("qwen3.5", "Model") else prefix + head
    model = tiny(name, **{**own, **changes})
    return model if encoding is None else randomize_encoding(hf_posenc.patch(model, encoding))


def attentions(model):
    """The softmax attentions. MiniMax also has linear ones."""
    named = {name: module for name, module in model.named_modules() if type(module).__name__.endswith("Attention")}
    return {name: module for name, module in named.items() if "Lightning" not in type(module).__name__}


@torch.no_grad()
def moved_by_order(model):
    """For each attention, the relative change of its output at the last token when the tokens before it are permuted.

    The hidden states that enter it are permuted within the forward pass, because the layers below see order themselves.
    """
    order, moved, busy = torch.tensor([3, 6, 1, 0, 7, 2, 5, 4, 8, 9]), {}, []

    def permute(module, args, kwargs, name):
        if busy:
            return
        busy.append(name)
        named = "hidden_states" in kwargs
        hidden = kwargs["hidden_states"] if named else args[0]
        here, there = (
            first(module(*args, **kwargs | {"hidden_states": states}) if named else module(states, *args[1:], **kwargs))[:, -1]
            for states in (hidden, hidden[:, order])
        )
        moved[name] = ((there - here).abs().max() / here.abs().max()).item()
        busy.pop()

    hooks = [
        module.register_forward_pre_hook(lambda m, a, k, name=name: permute(m, a, k, name), with_kwargs=True)
        for name, module in attentions(model).items()
    ]
    model(tokens(1, 10), use_cache=False)
    for hook in hooks:
        hook.remove()
    return moved


# Support, and layers that stay


@every_hybrid
def test_what_stays_is_said(host):
    model = of(host)
    report, new = hf_posenc.inspect(model), hf_posenc.inspect(hf_posenc.patch(model, "alibi"))
    assert report.order_sensitive == new.order_sensitive and report.order_sensitive
    assert (report.encoding == "none") == (host in NO_SOURCE)
    assert new.locations == {"distance_bias": tuple(attentions(model))}
    (kind, *_), (paths, *_) = zip(*new.order_sensitive.items(), strict=True)
    assert f"{kind} in {paths[0]}" in str(new).partition("order-sensitive:")[2]
    for path in paths:
        assert type(model.get_submodule(path)).__name__ == kind and path not in attentions(model)


def test_what_stays_by_layer():
    assert hf_posenc.inspect(of("bamba")).order_sensitive == {"BambaMixer": ("layers.0.mamba", "layers.2.mamba")}
    assert hf_posenc.inspect(of("falcon-h1", "rope")).order_sensitive == {"FalconH1Mixer": ("layers.0.mamba", "layers.1.mamba")}
    assert hf_posenc.inspect(of("minimax")).order_sensitive == {"MiniMaxLightningAttention": ("layers.1.self_attn",)}
    assert hf_posenc.inspect(of("nemotron-h")).order_sensitive == {"NemotronHMamba2Mixer": ("layers.0.mixer",)}


@every_hybrid
def test_order_at_each_attention(host):
    model = of(host)
    assert all((moved > 1e-3) == (host not in NO_SOURCE) for moved in moved_by_order(model).values())
    assert max(moved_by_order(hf_posenc.patch(model, "none")).values()) < 1e-5
    for encoding in ("rope", "alibi", "shaw"):
        assert min(moved_by_order(of(host, encoding)).values()) > 1e-4, encoding


@torch.no_grad()
def test_the_hosts_own_rotation():
    for host in ("granite-rope", "olmo-hybrid"):
        model = of(host)
        theta = model.config.rope_parameters["rope_theta"]
        assert_close(first(hf_posenc.patch(model, "rope", theta=theta)(tokens())), first(model(tokens())))


@torch.no_grad()
def test_vectors_enter_the_first_layer_of_all():
    """The vectors enter the first layer, even if it has no attention. The result equals original layers with the vectors added
    to the embeddings.
    """
    model, ids = of("bamba"), tokens()
    new = hf_posenc.patch(model, "sinusoidal")
    assert new.posenc_state.locations == {"embed": ("layers.0",)}
    vectors = new.posenc("embed", torch.arange(11)[None]).float()
    nope = hf_posenc.patch(model, "none")
    assert_close(first(new(ids)), first(nope(inputs_embeds=model.embed_tokens(ids) + vectors)))


# Caches


@every_hybrid
@pytest.mark.parametrize("static", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["dynamic", "static"])
@torch.no_grad()
def test_cached_decoding(host, static):
    """Decoding in chunks and after left padding equals a full forward pass. If the original model has a window, it is narrow
    here.
    """
    narrow = {WINDOWED[host]: 4} if host in WINDOWED else {}
    model, ids, mask = of(host, "sinusoidal+rope+alibi+shaw", "ForCausalLM", **narrow), tokens(2, 13), torch.ones(2, 13)
    cuts = range(5, 13) if host in SINGLE_STEPS else (5, 6, 9, 11)

    def cache():
        if host == "minimax":
            return MiniMaxCache()
        return StaticCache(config=model.config, max_cache_len=20) if static else DynamicCache(config=model.config)

    assert_close(in_pieces(model, ids, cuts, mask, cache()), first(model(ids, use_cache=False)), atol=5e-5)
    if host == "recurrent-gemma":  # its original model lets padding change later tokens
        return
    mask[0, :3] = 0
    behind = in_pieces(model, ids, cuts, mask, cache())
    assert_close(behind[:1, 3:], first(model(ids[:1, 3:], use_cache=False)), atol=5e-5)


@pytest.mark.parametrize("host", ["lfm2", "falcon-h1"])
@torch.no_grad()
def test_positions_are_remembered_with_keys(host):
    """Positions stay with their keys for ids with gaps, in beam search, and in a cache whose first layer has no keys."""
    model, ids = of(host, "sinusoidal+rope+alibi+shaw"), tokens(2, 9)
    jumping = torch.tensor([[0, 1, 2, 9, 10, 11, 12, 13, 14]])
    full = first(model(ids, position_ids=jumping))
    cache = DynamicCache(config=model.config)
    model(ids[:, :6], position_ids=jumping[:, :6], **{CACHE: cache}, use_cache=True)
    rest = first(model(ids[:, 6:], position_ids=jumping[:, 6:], **{CACHE: cache}, use_cache=True))
    assert_close(rest, full[:, 6:])
    cache = DynamicCache(config=model.config)
    model(ids[:, :6], position_ids=jumping[:, :6], **{CACHE: cache}, use_cache=True)
    cache.reorder_cache(torch.tensor([1, 0]))
    flipped = torch.cat([ids[[1, 0], :6], ids[:, 6:]], dim=1)
    rest = first(model(ids[:, 6:], position_ids=jumping[:, 6:], **{CACHE: cache}, use_cache=True))
    assert_close(rest, first(model(flipped, position_ids=jumping))[:, 6:])


def test_a_cache_that_counts_in_a_layer_without_keys():
    """The original model would continue from position 0, which is wrong. The patched model raises an error."""
    model = of("minimax", "alibi", layer_types=[LINEAR, FULL])
    cache = model(tokens(2, 5), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="counts 0 tokens, but holds keys of 5.*use_cache=False"):
        model(tokens(2, 1), **{CACHE: cache}, use_cache=True)


# Layers


def test_layers_are_the_hosts():
    model = hf_posenc.patch(of("nemotron-h", num_hidden_layers=4), "alibi", layers=[2])
    assert hf_posenc.inspect(model).layers == {"alibi": (2,)}
    six = dict(num_hidden_layers=6, attn_layer_indices=[1, 4])
    model = hf_posenc.patch(of("bamba", **six), "rope+alibi", rope__layers="1:4:3", alibi__layers=[-2])
    assert hf_posenc.inspect(model).layers == {"rope": (1,), "alibi": (4,)}
    with pytest.raises(ValueError, match=r"layers of 'alibi' include 0, 2, .*attention, .*: 1\."):
        hf_posenc.patch(of("bamba"), "alibi", layers="0::2")
    with pytest.raises(ValueError, match="include 2, .*counted from 0: 1, 4"):
        hf_posenc.patch(of("bamba", **six), "alibi", layers=[1, 2])


@torch.no_grad()
def test_one_of_two_attentions():
    model, ids = of("bamba", num_hidden_layers=6, attn_layer_indices=[1, 4]), tokens()
    new = hf_posenc.patch(model, "alibi", layers=[4])
    moved = moved_by_order(new)
    assert moved["layers.1.self_attn"] < 1e-5 < 1e-3 < moved["layers.4.self_attn"]
    assert_apart(first(new(ids)), first(hf_posenc.patch(model, "none")(ids)))


# Unsupported models


class Mixing(nn.Module):
    """A layer that mixes tokens in an unknown way."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return hidden_states + hidden_states.mean(1, keepdim=True)


class Convolved(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear, self.short = nn.Linear(size, size), nn.Conv1d(size, size, 3, padding=2, groups=size)

    def forward(self, hidden_states):
        return self.short(self.linear(hidden_states).transpose(1, 2))[..., :-2].transpose(1, 2)


@pytest.mark.parametrize(
    ("path", "module", "reason", "words"),
    [
        ("layers.0.self_attn.q_proj", Convolved(32), "order-sensitive convolutions", r"q_proj\.short"),
        ("layers.1.self_attn", Mixing(), "layers without attention", r"layers\.1.*LlamaDecoderLayer"),
        # A layer stack with only attentions must get its positions from an undetected component.
        ("rotary_emb", None, None, "no known positional component"),
    ],
)
def test_unsupported(path, module, reason, words):
    model = tiny("LlamaModel")
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, module)
    with pytest.raises(hf_posenc.UnsupportedModelError, match=words) as error:
        hf_posenc.patch(model, "alibi")
    assert reason in (None, error.value.reason)
