"""Attention implementations, data types, compilation, and devices."""

import copy
import functools
import inspect
import textwrap

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import EncoderDecoderModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

import hf_posenc
from closeness import assert_close
from hf_posenc.attention import bias_backends, dispatch
from hf_posenc.encodings import PositionContext
from models import ENCODINGS, HOSTS, first, needs_inductor, patched, stock, tokens


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_upcast_attention(encoding):
    plain = patched("gpt2", encoding)
    upcast = patched("gpt2", encoding, reorder_and_upcast_attn=True)
    for model in (plain, upcast):
        model.set_attn_implementation("eager")
    assert_close(first(upcast(tokens())), first(plain(tokens())))
    calls = []
    block = upcast.h[0].attn
    original = block._upcast_and_reordered_attn
    block._upcast_and_reordered_attn = lambda *a, **k: calls.append(1) or original(*a, **k)
    upcast(tokens())
    assert calls == [1]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_scaling_by_layer(encoding):
    """Biases are added to scores after the model's own scaling, in both implementations."""
    model = patched("gpt2", encoding, scale_attn_by_inverse_layer_idx=True)
    model.set_attn_implementation("eager")
    ours = first(model(tokens()))
    model.set_attn_implementation("sdpa")
    assert_close(first(model(tokens())), ours)


def test_each_mask_gets_the_bias():
    """A model may give its layers different masks in one forward pass."""
    module = patched("bert", "alibi").encoder.layer[0].attention.self
    states = torch.zeros(1, 4, 5, 8)
    context = PositionContext(
        patched("bert", "alibi").posenc,
        torch.arange(5)[None],
        past=0,
        start=torch.zeros(1, 1, dtype=torch.long),
    )
    every, some = torch.ones(1, 1, 5, 5, dtype=torch.bool), torch.eye(5, dtype=torch.bool)[None, None]
    acting = dispatch.active_encodings(module, context)
    calls = [dispatch.AttentionCall(module, *[states] * 3, mask, acting, context) for mask in (every, some, every)]
    merged = [bias_backends.biased_mask(call) for call in calls]
    assert merged[0] is merged[2] and (merged[0] > -10).all()
    assert torch.equal((merged[1] > -10), some.expand(1, 4, 5, 5))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in Transformers' own flex code
@torch.no_grad()
def test_each_mask_of_flex_attention_applies_to_its_layer():
    """A model may make a block mask for each layer, at the address of the previous one."""
    model, ids, index = patched("bert", {"type": "shaw", "terms": "keys+values"}), tokens(), torch.arange(11)
    shown = [lambda b, h, q, k: k < 5, lambda b, h, q, k: k > 5]
    addresses = []

    def dense(shows):
        return torch.where(shows(0, 0, index[:, None], index), 0.0, -torch.inf).expand(1, 1, 11, 11)

    def blocks(shows):
        made = [create_block_mask(shows, 1, 1, 11, 11, device="cpu")]
        while addresses and id(made[-1]) not in addresses and len(made) < 200:
            made.append(copy.copy(made[0]))
        addresses.append(id(made[-1]))
        return made[-1]

    def give(make, number, module, args, kwargs):
        return args, {**kwargs, "attention_mask": make(shown[number])}

    found = []
    for implementation, make in (("eager", dense), ("flex_attention", blocks)):
        model.set_attn_implementation(implementation)
        attentions = [layer.attention.self for layer in model.encoder.layer]
        hooks = [
            attention.register_forward_pre_hook(functools.partial(give, make, number), with_kwargs=True)
            for number, attention in enumerate(attentions)
        ]
        found.append(first(model(ids)))
        for hook in hooks:
            hook.remove()
    assert_close(*found)


def test_a_backend_that_would_drop_the_bias(monkeypatch):
    """Choosing a kernel without bias support raises an error that names it, and doesn't change the model. Rotations need no
    bias.
    """
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "test_kernel", sdpa)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "test_kernel", sdpa_mask)
    model = patched("bert", "alibi")
    expected = first(model(tokens()))
    with pytest.raises(ValueError, match=r"'test_kernel'.*score bias.*'sdpa'"):
        model.set_attn_implementation("test_kernel")
    assert model.config._attn_implementation == "sdpa" and torch.equal(first(model(tokens())), expected)
    turned = patched("bert", "rope")
    expected = first(turned(tokens()))
    turned.set_attn_implementation("test_kernel")
    assert torch.equal(first(turned(tokens())), expected)
    model = stock("bert")
    model.config._attn_implementation_internal = "test_kernel"
    with pytest.raises(ValueError, match="score bias"):
        hf_posenc.patch(model, "alibi")


@pytest.mark.parametrize("encoding", ["alibi", "rope", "rope+t5"])
@torch.no_grad()
def test_an_attention_function_of_a_user(monkeypatch, encoding):
    """A function whose name begins with that of one that adds its mask gets the bias in its mask. Rotations need no mask."""
    sdpa, masks = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def own(module, query, key, value, mask, **options):
        masks.append(mask)
        return sdpa(module, query, key, value, mask, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa_of_mine", own)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa_of_mine", sdpa_mask)
    model, mask = patched("bert", encoding), torch.ones(2, 11, dtype=torch.long)
    mask[0, 7:] = 0
    expected = first(model(tokens(), attention_mask=mask))
    model.set_attn_implementation("sdpa_of_mine")
    assert_close(first(model(tokens(), attention_mask=mask)), expected)
    assert len(masks) == 2


@pytest.mark.slow
@needs_inductor
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # in Transformers' own flex code
@pytest.mark.parametrize("host", ["bert", "distilbert"])
@pytest.mark.parametrize("encoding", ["rope", "learned"])
def test_flex_attention(host, encoding):
    model = patched(host, encoding, **HOSTS[host].no_dropout)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, 7:] = 0
    with torch.no_grad():
        expected = first(model(tokens(), attention_mask=mask))
        model.set_attn_implementation("flex_attention")
        actual = first(model(tokens(), attention_mask=mask))
    assert_close(actual[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("way", ["config", "parent"])
@torch.no_grad()
def test_an_implementation_set_by_a_parent(way, monkeypatch):
    """A model that contains patched models sets their configs directly. A kernel without bias support raises an error if a bias
    acts there.
    """
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "test_kernel", ALL_ATTENTION_FUNCTIONS["sdpa"])
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "test_kernel", sdpa_mask)
    decoder = patched("bert", "alibi", "LMHeadModel", is_decoder=True, add_cross_attention=True)
    model = EncoderDecoderModel(encoder=patched("bert", "rope"), decoder=decoder).eval()
    ids = {"input_ids": tokens(), "decoder_input_ids": tokens(2, 5)}
    expected = model(**ids).logits

    def choose(name):
        if way == "config":
            model.encoder.config._attn_implementation = model.decoder.bert.config._attn_implementation = name
        else:
            model.set_attn_implementation(name)

    for name in ("eager", "sdpa"):
        choose(name)
        assert model.encoder.config._attn_implementation == name
        assert_close(model(**ids).logits, expected)
    states = first(model.encoder(tokens()))
    with pytest.raises(ValueError, match="'test_kernel'.*score bias.*'sdpa', 'flex_attention', or 'eager'"):
        choose("test_kernel")
        model(**ids)
    model.encoder.config._attn_implementation = "test_kernel"
    assert_close(first(model.encoder(tokens())), states)  # a rotation needs none


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_mask_of_integers(implementation):
    """An integer mask would be added to the scores as 0 and 1. Transformers converts a 2-D mask to a boolean mask."""
    model = patched("gpt2", "alibi")
    model.set_attn_implementation(implementation)
    seen = torch.ones(11, 11).tril()[None, None].expand(2, 1, 11, 11)
    with pytest.raises(ValueError, match=r"attention_mask.*\(2, 1, 11, 11\).*torch.int64.*boolean mask"):
        model(tokens(), attention_mask=seen.long())
    expected = first(model(tokens()))
    assert_close(first(model(tokens(), attention_mask=torch.zeros(seen.shape).masked_fill(seen == 0, -torch.inf))), expected)
    if implementation == "sdpa":
        assert_close(first(model(tokens(), attention_mask=seen.bool())), expected)


@pytest.mark.xfail(
    strict=True, reason="an attention that compares the name of its implementation with one string takes its other branch"
)
@torch.no_grad()
def test_an_attention_that_compares_its_implementation_with_one_name(monkeypatch):
    code = textwrap.dedent(inspect.getsource(LlamaAttention.forward))
    doubled = "hidden_states = hidden_states * (2 if self.config._attn_implementation == 'sdpa' else 1)\n    input_shape ="
    exec(code.replace("input_shape =", doubled, 1), scope := dict(vars(modeling_llama)))
    monkeypatch.setattr(LlamaAttention, "forward", scope["forward"])
    model = stock("llama")
    expected = first(model(tokens()))
    assert_close(first(hf_posenc.patch(model, "rope")(tokens())), expected)
