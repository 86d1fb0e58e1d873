"""Hosts that mix attention layers with others, which see order by themselves: linear attention, state spaces, convolutions."""

import pytest
import torch
from torch import nn
from transformers import AutoModel, DynamicCache, LlamaConfig, LlamaModel, StaticCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import hf_posenc
from closeness import assert_apart, assert_close, assert_equal
from hf_posenc.architectures import detection
from models import DECODER, LLAMA, Host, first, patched, stock, tokens
from oracles import in_pieces


def hybrid(prefix, **sizes):
    facts = {name: sizes.pop(name) for name in ("head_prefix",) if name in sizes}
    return Host(prefix, LLAMA | {"eos_token_id": None, "max_position_embeddings": 64} | sizes, **DECODER, **facts)


LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
MIXED = [LINEAR, FULL, LINEAR]
MAMBA = dict(num_hidden_layers=3, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=4)
DELTA = dict(linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=1)
NAMED = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16)
LATENT = dict(num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
SMALL = dict(mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False)

HYBRIDS = {
    "lfm2": hybrid("Lfm2", layer_types=["conv", FULL], block_ff_dim=48, block_auto_adjust_ff_dim=False),
    "lfm3": hybrid("Lfm3", num_hidden_layers=3, layer_types=["conv", FULL, SLIDING], sliding_window=4, head_dim=8),
    "qwen3-next": hybrid("Qwen3Next", layer_types=[LINEAR, FULL], head_dim=8, **DELTA, **NAMED),
    "qwen3.5": hybrid("Qwen3_5Text", head_prefix="Qwen3_5", layer_types=[LINEAR, FULL], head_dim=8, **DELTA),
    "olmo-hybrid": hybrid("OlmoHybrid", layer_types=[LINEAR, FULL], **DELTA),
    "nemotron-h": hybrid(
        "NemotronH",
        layers_block_type=["mamba", "moe", "attention", "mlp"],
        head_dim=8,
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        chunk_size=4,
        n_groups=1,
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        n_group=1,
        topk_group=1,
    ),
    "jamba": hybrid("Jamba", num_hidden_layers=3, attn_layer_period=3, attn_layer_offset=1, num_experts=2, **SMALL),
    "bamba": hybrid("Bamba", attn_layer_indices=[1], **MAMBA),
    "granite": hybrid("GraniteMoeHybrid", layer_types=MIXED, shared_intermediate_size=48, **EXPERTS, **MAMBA),
    "granite-rope": hybrid(
        "GraniteMoeHybrid",
        layer_types=MIXED,
        position_embedding_type="rope",
        shared_intermediate_size=48,
        **EXPERTS,
        **MAMBA,
    ),
    "falcon-h1": hybrid("FalconH1", head_dim=8, mamba_d_ssm=64, **MAMBA | {"num_hidden_layers": 2}),
    "zamba": hybrid("Zamba", num_hidden_layers=3, layers_block_type=[LINEAR, "hybrid", "hybrid"], n_mamba_heads=2, **SMALL),
    "minimax": hybrid("MiniMax", layer_types=[FULL, LINEAR], head_dim=8, block_size=4, **EXPERTS),
    "recurrent-gemma": hybrid("RecurrentGemma", num_hidden_layers=3, lru_width=32, attention_window_size=4),
}
"""Those without positions of their own: Nemotron-H, Jamba, Granite, Zamba."""
QUICK = ("lfm2", "lfm3", "qwen3-next", "nemotron-h", "granite", "falcon-h1", "minimax")
NO_SOURCE = ("nemotron-h", "jamba", "granite", "zamba")
SINGLE_STEPS = ("jamba", "zamba", "recurrent-gemma")
"""The stock models of these read a text at once or token by token; of a chunk behind others they forget what went before."""
ENCODINGS = ("sinusoidal", "rope", "alibi", "shaw")
WINDOWED = ("lfm3", "recurrent-gemma")
"""Each of their attentions, or one of them, sees a few tokens only."""
every_hybrid = pytest.mark.parametrize(
    "host", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in HYBRIDS]
)


def of(host, encoding=None, head="Model", **changes):
    if host in WINDOWED:
        changes = {"attention_window_size" if host == "recurrent-gemma" else "sliding_window": 64} | changes
    host = HYBRIDS[host]
    return stock(host, head, **changes) if encoding is None else patched(host, encoding, head, **changes)


def cache_of(host, model, static=False):
    if host == "minimax":
        return MiniMaxCache()
    return StaticCache(config=model.config, max_cache_len=20) if static else DynamicCache(config=model.config)


def attentions(model):
    return detection._attentions(dict(model.named_modules()))[0]


@torch.no_grad()
def moved_by_order(model):
    """By attention, how far its output at the last token moves, relative to its size, as the tokens before it change places.

    The hidden states that enter it are permuted, in the midst of a forward pass: the layers below see order by themselves.
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


# What is taken, and what stays


@every_hybrid
def test_what_stays_is_said(host):
    model = of(host)
    report, new = hf_posenc.inspect(model), hf_posenc.inspect(hf_posenc.patch(model, "alibi"))
    assert report.order_sensitive == new.order_sensitive and report.order_sensitive
    assert (report.encoding == "none") == (host in NO_SOURCE)
    assert new.locations == {"distance_bias": tuple(attentions(model))}
    (kind, *_), (paths, *_) = zip(*new.order_sensitive.items(), strict=True)
    assert f"stays: {kind}, which sees order by itself: {paths[0]}" in str(new)
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


@every_hybrid
@pytest.mark.parametrize("encoding", ENCODINGS)
@torch.no_grad()
def test_there_and_back(host, encoding, tmp_path):
    """Bit-equal from a file, and by `unpatch`, also of what was loaded."""
    model, ids = of(host), tokens()
    expected = first(model(ids))
    new = of(host, encoding)
    if encoding != "rope":  # which some hosts have themselves
        assert_apart(first(new(ids)), expected, by=1e-4)
    new.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert type(again) is type(new)
    assert_equal(first(again(ids)), first(new(ids)))
    assert_equal(first(hf_posenc.unpatch(again)(ids)), expected)
    assert_equal(first(hf_posenc.unpatch(new)(ids)), expected)
    assert_equal(first(model(ids)), expected)


@torch.no_grad()
def test_the_hosts_own_rotation():
    for host in ("granite-rope", "olmo-hybrid"):
        model = of(host)
        theta = model.config.rope_parameters["rope_theta"]
        assert_close(first(hf_posenc.patch(model, "rope", theta=theta)(tokens())), first(model(tokens())))


@torch.no_grad()
def test_vectors_enter_the_first_layer_of_all():
    """Not the first that has an attention; and they are what stock layers get with the vectors added to the embeddings."""
    model, ids = of("bamba"), tokens()
    new = hf_posenc.patch(model, "sinusoidal")
    assert new.posenc_state.locations == {"embed": ("layers.0",)}
    vectors = new.posenc("embed", torch.arange(11)[None]).float()
    nope = hf_posenc.patch(model, "none")
    assert_close(first(new(ids)), first(nope(inputs_embeds=model.embed_tokens(ids) + vectors)))


# Caches


@every_hybrid
@pytest.mark.parametrize("encoding", [*ENCODINGS, "none"])
@pytest.mark.parametrize("static", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["dynamic", "static"])
@torch.no_grad()
def test_cached_decoding(host, encoding, static):
    """In chunks, and behind left padding; the stock model's window is a narrow one where it has one."""
    narrow = {"lfm3": {"sliding_window": 4}, "recurrent-gemma": {"attention_window_size": 4}}.get(host, {})
    model, ids = of(host, encoding, "ForCausalLM", **narrow), tokens(2, 13)
    cuts = range(5, 13) if host in SINGLE_STEPS else (5, 6, 9, 11)
    mask = torch.ones_like(ids)
    full = first(model(ids, attention_mask=mask, use_cache=False))
    assert_close(in_pieces(model, ids, cuts, mask, cache_of(host, model, static)), full, atol=5e-5)
    if host == "recurrent-gemma":  # whose stock model lets padding change what follows
        return
    mask[0, :3] = 0
    behind = in_pieces(model, ids, cuts, mask, cache_of(host, model, static))
    assert_close(behind[:1, 3:], first(model(ids[:1, 3:], use_cache=False)), atol=5e-5)


@pytest.mark.parametrize("host", ["lfm2", "qwen3-next", "falcon-h1"])
@torch.no_grad()
def test_positions_are_remembered_with_keys(host):
    """Behind ids that jump, in beams, in a cache whose first layer has no keys."""
    model, ids = of(host, "sinusoidal+rope+alibi+shaw"), tokens(2, 9)
    jumping = torch.tensor([[0, 1, 2, 9, 10, 11, 12, 13, 14]])
    full = first(model(ids, position_ids=jumping))
    cache = DynamicCache(config=model.config)
    model(ids[:, :6], position_ids=jumping[:, :6], past_key_values=cache, use_cache=True)
    rest = first(model(ids[:, 6:], position_ids=jumping[:, 6:], past_key_values=cache, use_cache=True))
    assert_close(rest, full[:, 6:])
    cache = DynamicCache(config=model.config)
    model(ids[:, :6], position_ids=jumping[:, :6], past_key_values=cache, use_cache=True)
    cache.reorder_cache(torch.tensor([1, 0]))
    flipped = torch.cat([ids[[1, 0], :6], ids[:, 6:]], dim=1)
    rest = first(model(ids[:, 6:], position_ids=jumping[:, 6:], past_key_values=cache, use_cache=True))
    assert_close(rest, first(model(flipped, position_ids=jumping))[:, 6:])


@pytest.mark.parametrize("host", ["lfm2", "granite", pytest.param("bamba", marks=pytest.mark.slow)])
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_generate(host, implementation):
    model, prompt = of(host, "rope+shaw", "ForCausalLM"), tokens(2, 8)
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    settings = dict(max_new_tokens=5, do_sample=False, eos_token_id=None, cache_implementation=implementation)
    settings |= dict(output_logits=True, return_dict_in_generate=True)
    made = model.generate(prompt, attention_mask=mask, **settings)
    with torch.no_grad():
        assert_close(torch.stack(made.logits, 1)[:1], first(model(made.sequences[:1, 3:]))[:, 4:-1])
        assert_close(torch.stack(made.logits, 1)[1:], first(model(made.sequences[1:]))[:, 7:-1])


def test_a_cache_that_counts_in_a_layer_without_keys():
    """The stock model goes on from position 0, which is wrong; so would ours."""
    model = of("minimax", "alibi", layer_types=[LINEAR, FULL])
    cache = model(tokens(2, 5), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="counts 0 tokens and holds keys of 5.*use_cache=False"):
        model(tokens(2, 1), past_key_values=cache, use_cache=True)


# Layers


def test_layers_are_the_hosts():
    model = hf_posenc.patch(of("nemotron-h", num_hidden_layers=4), "alibi", layers=[2])
    assert hf_posenc.inspect(model).layers == {"alibi": (2,)}
    six = dict(num_hidden_layers=6, attn_layer_indices=[1, 4])
    model = hf_posenc.patch(of("bamba", **six), "rope+alibi", rope__layers="1:4:3", alibi__layers=[-2])
    assert hf_posenc.inspect(model).layers == {"rope": (1,), "alibi": (4,)}
    with pytest.raises(ValueError, match=r"layers of 'alibi' name 0, 2, in which this model has no attention: it has one in 1"):
        hf_posenc.patch(of("bamba"), "alibi", layers="0::2")
    with pytest.raises(ValueError, match="name 2, in which this model has no attention: it has one in 1, 4, counted from 0"):
        hf_posenc.patch(of("bamba", **six), "alibi", layers=[1, 2])


@torch.no_grad()
def test_one_of_two_attentions():
    model, ids = of("bamba", num_hidden_layers=6, attn_layer_indices=[1, 4]), tokens()
    new = hf_posenc.patch(model, "alibi", layers=[4])
    moved = moved_by_order(new)
    assert moved["layers.1.self_attn"] < 1e-5 < 1e-3 < moved["layers.4.self_attn"]
    assert_apart(first(new(ids)), first(hf_posenc.patch(model, "none")(ids)))


# Refusals


class Mixing(nn.Module):
    """A layer that mixes tokens in a way that nothing is known of."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return hidden_states + hidden_states.mean(1, keepdim=True)


class Convolved(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear, self.short = nn.Linear(size, size), nn.Conv1d(size, size, 3, padding=2, groups=size)

    def forward(self, hidden_states):
        return self.short(self.linear(hidden_states).transpose(1, 2))[..., :-2].transpose(1, 2)


def llama():
    return LlamaModel(LlamaConfig(vocab_size=61, **LLAMA))


def test_a_convolution_within_an_attention():
    """It gives queries an order of their own, beside the encoding."""
    model = llama()
    model.layers[0].self_attn.q_proj = Convolved(32)
    with pytest.raises(hf_posenc.UnsupportedModelError, match=r"layers\.0\.self_attn\.q_proj\.short") as error:
        hf_posenc.patch(model, "alibi")
    assert error.value.reason == "convolutions, which see the order of their inputs"


def test_a_layer_of_which_nothing_is_known():
    model = llama()
    model.layers[1].self_attn = Mixing()
    with pytest.raises(
        hf_posenc.UnsupportedModelError, match=r"layers\.1 is a LlamaDecoderLayer without an attention"
    ) as error:
        hf_posenc.patch(model, "alibi")
    assert error.value.reason == "layers without attention"


def test_no_source_and_no_other_layers():
    """A stack of attentions alone gets its positions from somewhere that was not found."""
    model = llama()
    model.rotary_emb = None
    with pytest.raises(hf_posenc.UnsupportedModelError, match="no source of position that is known"):
        hf_posenc.patch(model, "alibi")
