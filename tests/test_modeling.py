"""Derived classes, loading, undoing, own encodings, and what is refused."""

import json
from typing import Annotated

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, DynamicCache, StaticCache

import hf_posenc
from conftest import ENCODINGS, HOSTS, LENGTH, as_itself, assert_close, first, patched, run_python, stock, tokens
from hf_posenc import attention
from hf_posenc.encodings import Above, PositionContext

every_host = pytest.mark.parametrize("host", HOSTS)


class Window(hf_posenc.PositionEncoding, type="test-window"):
    """Nothing further than `width` tokens away is seen."""

    width: Annotated[int, Above(0)] = 2

    def distance_bias(self, distance):
        return torch.where(distance.abs() > self.width, -torch.inf, 0.0)[None]


class Recency(hf_posenc.PositionEncoding, type="test-recency"):
    """Scores by content and absolute position: keys late in the text weigh by how much the query likes them."""

    def score_bias(self, query, key, context):
        keys = context.key_positions(key.shape[2]).to(query.dtype)
        return (query @ key.transpose(-1, -2)).tanh() * keys[:, None, None, :]


# Classes.


@every_host
def test_every_head_has_a_derived_class(host):
    """Each Auto class that knows the host knows the derived one, and builds it."""
    from transformers.models.auto import modeling_auto

    config = patched(host, "relative").config
    heads = [
        auto
        for name, auto in vars(modeling_auto).items()
        if name.startswith("AutoModel") and getattr(auto, "_model_mapping", None) and host in auto._model_mapping._model_mapping
    ]
    assert len(heads) >= 5
    for auto in heads:
        model = auto.from_config(config)
        assert type(model).__name__.startswith("PosEnc") and isinstance(model.config, type(config))
        assert model.base_model.posenc.weight.isfinite().all()
        assert getattr(hf_posenc, type(model).__name__) is type(model)


def test_from_scratch():
    config = hf_posenc.PosEncBertConfig(
        position_encoding={"type": "rotary", "theta": 500}, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=48,
    )  # fmt: skip
    expected = {"type": "rope", "theta": 500.0, "layout": "half", "inject": "input", "max_length": None, "host": None}
    assert config.position_encoding == expected and config.model_type == "posenc-bert"
    model = AutoModelForMaskedLM.from_config(config)
    assert type(model) is hf_posenc.PosEncBertForMaskedLM and first(model(tokens(1, 600))).isfinite().all()
    with pytest.raises(ValueError, match="not kept"):
        hf_posenc.unpatch(model)
    learned = AutoModel.from_config(
        hf_posenc.PosEncBertConfig(**{**config.to_dict(), "position_encoding": {"type": "learned", "max_length": 9}})
    )
    assert learned.posenc.weight.std().item() == pytest.approx(0.02, rel=0.2)
    table = AutoModel.from_config(hf_posenc.PosEncBertConfig(**{**config.to_dict(), "position_encoding": "learned"}))
    assert table.config.position_encoding["max_length"] == len(table.posenc.weight) == 512  # the host's own


@every_host
def test_from_pretrained_with_an_encoding_is_patch(host, tmp_path):
    model = stock(host, HOSTS[host].head)
    model.save_pretrained(tmp_path)
    cls = getattr(hf_posenc, f"PosEnc{type(model).__name__}")
    loaded = cls.from_pretrained(tmp_path, position_encoding="alibi")
    assert type(loaded) is cls and torch.equal(first(loaded(tokens())), first(hf_posenc.patch(model, "alibi")(tokens())))
    assert torch.equal(first(hf_posenc.unpatch(loaded)(tokens())), first(model(tokens())))
    loaded, info = cls.from_pretrained(tmp_path, position_encoding={"type": "rope"}, output_loading_info=True)
    assert loaded.config.position_encoding["type"] == "rope" and not info["missing_keys"]


def test_auto_classes_still_list_their_models():
    """Iterating the mappings, as Transformers does for its error messages, meets our names too."""
    code = (
        "import transformers, hf_posenc;"
        "from transformers.models.auto import modeling_auto as m;"
        "names = [c.__name__ for c in m.MODEL_MAPPING];"
        "assert 'PosEncBertConfig' in names and 'BertConfig' in names and 'PositionEmbeddingConfig' in names;"
        "assert m.MODEL_FOR_MASKED_LM_MAPPING_NAMES['posenc-bert'] == 'PosEncBertForMaskedLM'"
    )
    run_python(code)


def test_tokenizer_beside_a_patched_model(tmp_path):
    from transformers import AutoTokenizer, BertTokenizer

    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    patched("bert", "alibi").save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("a b").input_ids == [2, 5, 6, 3]


# Undoing.


@every_host
def test_unpatch_after_training_says_so(host, tmp_path):
    model = patched(host, "alibi", HOSTS[host].head)
    model.save_pretrained(tmp_path / "untrained")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "trained")
    for trained in (model.eval(), AutoModel.from_pretrained(tmp_path / "trained")):
        with pytest.warns(UserWarning, match="no longer those which were patched"):
            again = hf_posenc.unpatch(trained)
        old = stock(host, HOSTS[host].head).base_model
        for name in HOSTS[host].tables:
            assert torch.equal(again.base_model.get_parameter(name), old.get_parameter(name))
    hf_posenc.unpatch(AutoModel.from_pretrained(tmp_path / "untrained"))


def test_without_kept_positions_unpatch_names_the_base():
    model = stock("bert")
    model.name_or_path = model.config.name_or_path = "somebody/base"
    new = hf_posenc.patch(model, "alibi", keep_host=False)
    assert not any("host" in name for name in new.state_dict())
    with pytest.raises(ValueError, match="somebody/base"):
        hf_posenc.unpatch(new)
    with pytest.raises(ValueError, match="not patched"):
        hf_posenc.unpatch(model)


def test_max_length_is_undone():
    again = hf_posenc.unpatch(hf_posenc.patch(stock("gpt2"), "alibi", max_length=99))
    assert again.config.n_positions == LENGTH and again.wpe.num_embeddings == LENGTH


def test_kept_positions_are_not_trained_and_not_shared():
    model = stock("bert")
    new = hf_posenc.patch(model, "alibi")
    kept = dict(new.named_buffers())["posenc.host.embeddings.position_embeddings.weight"]
    table = model.embeddings.position_embeddings.weight
    assert torch.equal(kept, table) and kept.data_ptr() != table.data_ptr() and not kept.requires_grad


# GPT-2.


def test_a_decode_step_rotates_one_key(monkeypatch):
    model = patched("gpt2", "rope", "LMHeadModel", n_positions=1200)
    rotated = []
    turn = type(model.transformer.posenc)._turn

    def counted(self, states, cos, sin):
        if states is not None:
            rotated.append(states.shape[2])
        return turn(self, states, cos, sin)

    monkeypatch.setattr(type(model.transformer.posenc), "_turn", counted)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 1024), past_key_values=cache)
        rotated.clear()
        model(tokens(1, 1), past_key_values=cache)
    assert rotated == [1] * (2 * model.config.n_layer)  # one key and one query in each layer


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_upcast_attention(encoding):
    plain = patched("gpt2", encoding)
    upcast = patched("gpt2", encoding, reorder_and_upcast_attn=True)
    for model in (plain, upcast):
        model.set_attn_implementation("eager")
    torch.testing.assert_close(first(upcast(tokens())), first(plain(tokens())), atol=1e-5, rtol=1e-4)
    calls = []
    block = upcast.h[0].attn
    original = block._upcast_and_reordered_attn
    block._upcast_and_reordered_attn = lambda *a, **k: calls.append(1) or original(*a, **k)
    upcast(tokens())
    assert calls == [1]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_scaling_by_layer(encoding):
    """Biases are added to scaled scores, whatever the host's scaling: eager against scores by hand."""
    model = patched("gpt2", encoding, scale_attn_by_inverse_layer_idx=True)
    model.set_attn_implementation("eager")
    ours = first(model(tokens()))
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(first(model(tokens())), ours, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_generate(encoding, implementation):
    """Greedy generation of a left-padded batch equals that of each row alone, and of full forwards."""
    model = patched("gpt2", encoding, "LMHeadModel")
    prompt, mask = tokens(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    settings = dict(max_new_tokens=6, do_sample=False, cache_implementation=implementation, eos_token_id=None)
    both = model.generate(prompt, attention_mask=mask, **settings)
    alone = model.generate(prompt[:1, 3:], attention_mask=mask[:1, 3:], **settings)
    assert torch.equal(both[0, 8:], alone[0, 5:])
    expected = prompt[1:]
    for _ in range(6):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(both[1:], expected)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_static_cache_compiles_as_one_graph(encoding):
    model = patched("gpt2", encoding, "LMHeadModel")
    ids = tokens(2, 10)
    with torch.no_grad():
        full = model(ids).logits
        torch._dynamo.reset()
        cache = StaticCache(config=model.config, max_cache_len=16)
        model(ids[:, :8], past_key_values=cache)
        step = torch.compile(model, fullgraph=True, backend="eager")
        for index in (8, 9):
            logits = step(ids[:, index : index + 1], past_key_values=cache).logits
            torch.testing.assert_close(logits[:, 0], full[:, index], atol=2e-5, rtol=1e-4)


def test_a_static_cache_keeps_the_promise():
    """Its size is checked, which is known without reading a counter on a GPU."""
    model = patched("gpt2", "alibi", "LMHeadModel", max_length=12)
    with pytest.raises(ValueError, match="a static cache of 16 tokens is longer than max_length=12"):
        model(tokens(1, 5), past_key_values=StaticCache(config=model.config, max_cache_len=16))
    model(tokens(1, 5), past_key_values=StaticCache(config=model.config, max_cache_len=12))


def test_each_mask_gets_the_bias():
    """Hosts may hand different masks to different layers in one forward."""
    module = patched("bert", "alibi").encoder.layer[0].attention.self
    states = torch.zeros(1, 4, 5, 8)
    context = PositionContext(
        patched("bert", "alibi").posenc,
        torch.arange(5)[None],
        past=0,
        start=torch.zeros(1, 1, dtype=torch.long),
        consecutive=True,
    )
    every, some = torch.ones(1, 1, 5, 5, dtype=torch.bool), torch.eye(5, dtype=torch.bool)[None, None]
    merged = [attention.biased_mask(module, states, states, mask, context, None) for mask in (every, some, every)]
    assert merged[0] is merged[2] and (merged[0] > -10).all()
    assert torch.equal((merged[1] > -10), some.expand(1, 4, 5, 5))


@pytest.mark.parametrize("encoding", ["rope", "relative"])
def test_cross_attention_is_left_alone(encoding):
    """A decoder with cross-attention, cached: only its self-attention knows positions."""
    model = patched("gpt2", encoding, "LMHeadModel", add_cross_attention=True)
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    full = model(tokens(2, 9), encoder_hidden_states=states).logits
    turned = model(tokens(2, 9), encoder_hidden_states=states.flip(1)).logits
    torch.testing.assert_close(turned, full, atol=1e-5, rtol=1e-4)
    start = model(tokens(2, 9)[:, :6], encoder_hidden_states=states, use_cache=True)
    rest = model(tokens(2, 9)[:, 6:], encoder_hidden_states=states, past_key_values=start.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([start.logits, rest.logits], 1), full, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_packed_sequences(encoding):
    """Ids that start anew in the middle of a row are two texts, of which neither sees the other (as in stock models,
    without a cache)."""
    model, ids = patched("gpt2", encoding), tokens(1, 12)
    packed = first(model(ids, position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]]), use_cache=False))
    apart = torch.cat([first(model(ids[:, :5])), first(model(ids[:, 5:]))], dim=1)
    torch.testing.assert_close(packed, apart, atol=2e-5, rtol=1e-4)


# Own encodings.


@every_host
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_own_distance_bias(host, implementation):
    model = hf_posenc.patch(stock(host, **HOSTS[host].one_layer), "test-window", width=3)
    model.set_attn_implementation(implementation)
    ids = tokens(1, 20)
    before = first(model(ids))
    ids[0, 15] = (ids[0, 15] + 1) % 50 + 3
    changed = (first(model(ids)) - before).abs().amax(-1)[0] > 1e-6
    expected = torch.zeros(20, dtype=torch.bool)
    expected[15 if HOSTS[host].causal else 12 : 19] = True
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_own_score_bias(side):
    model = hf_posenc.patch(stock("gpt2", "LMHeadModel"), "test-recency")
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    real = slice(3, 9) if side == "left" else slice(0, 6)
    mask[0] = 0
    mask[0, real] = 1
    batch = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(batch[:1, real], model(ids[:1, real]).logits, atol=2e-5, rtol=1e-4)
    cache = DynamicCache(config=model.config)
    pieces = [model(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits for a, b in ((0, 5), (5, 6), (6, 9))]
    torch.testing.assert_close(torch.cat(pieces, 1)[mask.bool()], batch[mask.bool()], atol=2e-5, rtol=1e-4)


def test_own_encoding_travels(tmp_path):
    model = hf_posenc.patch(stock("bert"), "test-window", width=4)
    model.save_pretrained(tmp_path)
    assert torch.equal(first(AutoModel.from_pretrained(tmp_path)(tokens())), first(model(tokens())))
    code = (
        "import sys, hf_posenc\nfrom transformers import AutoModel\n"
        "try: AutoModel.from_pretrained(sys.argv[1])\n"
        "except ValueError as error: print(error)"
    )
    message = run_python(code, tmp_path)
    assert "test-window" in message and "import the module that defines its class" in message


# While a model is being converted.


@pytest.mark.parametrize("encoding", ["alibi", "sinusoidal", "rope"])
def test_blend_fades_from_the_hosts_positions(encoding, tmp_path):
    model = stock("bert")
    new = hf_posenc.patch(model, encoding)
    full = first(new(tokens()))
    new.posenc.blend = 0.0
    torch.testing.assert_close(first(new(tokens())), first(model(tokens())), atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"blend 0\.0"):
        new.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    new.posenc.blend = 0.5
    assert not torch.allclose(first(new(tokens())), full, atol=1e-3)
    new.posenc.blend = 1.0
    assert torch.equal(first(new(tokens())), full)


# Learned.


@every_host
def test_learned_from_the_host_changes_nothing(host):
    model = stock(host)
    longer = as_itself(model, host, max_length=LENGTH + 8)
    expected = first(model(tokens()))
    for actual in (first(each(tokens())) for each in (as_itself(model, host), longer)):
        assert_close(actual, expected) if HOSTS[host].written_out else torch.testing.assert_close(
            actual, expected, rtol=0, atol=0
        )
    assert first(longer(tokens(1, LENGTH + 8))).isfinite().all()


def test_ids_beyond_a_table():
    for model in (patched("bert", "learned"), patched("gpt2", "learned")):
        with pytest.raises(ValueError, match=f"{LENGTH} rows"):
            model(tokens(1, 2), position_ids=torch.tensor([[0, LENGTH]]))
        with pytest.raises(ValueError, match=r"position_ids have shape \(1, 2\).*3 tokens"):
            model(tokens(1, 3), position_ids=torch.tensor([[0, 1]]))


def test_distilbert_fills_a_sinusoidal_table_of_its_own():
    model = stock("distilbert", sinusoidal_pos_embds=True)
    new = hf_posenc.patch(model, "alibi")
    assert torch.equal(first(hf_posenc.unpatch(new)(tokens())), first(model(tokens())))
    assert first(AutoModel.from_config(new.config)(tokens())).isfinite().all()


# What is refused, and that nothing is half done.


def broken(host="bert", **arguments):
    model = stock(host)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules = [type(module) for module in model.modules()]
    with pytest.raises(ValueError) as error:
        hf_posenc.patch(model, **arguments)
    assert [type(module) for module in model.modules()] == modules and type(model.config).__name__.startswith("PosEnc") is False
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    first(model(tokens()))
    return str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"encoding": "alibbi"}, ["'alibbi'", "'alibi'", "import the module"]),
        ({"encoding": "alibi", "slope": 3}, ["'slope'", "no options"]),
        ({"encoding": "rope", "theta": "big"}, ["theta", "'big'", "above 1"]),
        ({"encoding": "rope", "theta": 0.5}, ["theta", "0.5", "above 1"]),
        ({"encoding": "rope", "layout": "pairs"}, ["'pairs'", "'half' or 'interleaved'"]),
        ({"encoding": "relative", "max_distance": True}, ["True", "integer"]),
        ({"encoding": "alibi", "max_length": 0}, ["max_length=0", "above 0"]),
        ({"encoding": "alibi", "max_length": 3.5}, ["max_length=3.5"]),
        ({"encoding": 7}, ["7", "a name or a dict"]),
        ({"encoding": {"theta": 3.0}}, ["theta", "a name or a dict"]),
        ({"encoding": None}, ["None", "a name or a dict"]),
    ],
)
def test_bad_arguments(arguments, words):
    message = broken(**arguments)
    assert all(word in message for word in words), message


def test_odd_head_dim():
    model = stock("bert", hidden_size=36, num_attention_heads=4)
    with pytest.raises(ValueError, match="head_dim is 9"):
        hf_posenc.patch(model, "rope")
    assert first(hf_posenc.patch(model, "alibi")(tokens())).isfinite().all()


def test_patching_twice():
    with pytest.raises(ValueError, match=r"has the 'alibi' encoding already.*unpatch"):
        hf_posenc.patch(patched("bert", "alibi"), "rope")


SMALL = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, vocab_size=61)


@pytest.mark.parametrize(
    ("host", "config", "reason"),
    [
        ("ResNet", dict(hidden_sizes=[8], depths=[1], embedding_size=8), "no ports"),
        ("Llama", SMALL, "rotary_emb"),
        ("T5", dict(d_model=32, num_layers=1, num_heads=4, d_kv=8, d_ff=32, vocab_size=61), "relative_attention_bias"),
        ("OPT", dict(hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=61), "way of its own"),
        ("MegatronBert", dict(SMALL, is_decoder=True), "as an encoder only"),
        ("IBert", SMALL, "attention interface"),
        ("CTRL", dict(n_embd=32, n_layer=1, n_head=4, dff=32, vocab_size=61), "no position table"),
    ],
)
def test_hosts_that_are_not_taken_over_yet(host, config, reason):
    model = getattr(transformers, f"{host}Model")(getattr(transformers, f"{host}Config")(**config))
    with pytest.raises(ValueError, match=reason):
        hf_posenc.patch(model, "alibi")


def test_wrapped_models(tmp_path):
    model = stock("bert")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    distributed = torch.nn.parallel.DistributedDataParallel(model)
    torch.distributed.destroy_process_group()
    cases = {
        "torch.compile": torch.compile(model, backend="eager"),
        "DistributedDataParallel": distributed,
        "PreTrainedModel": torch.nn.Linear(2, 2),
        "None": None,
    }
    for word, wrapped in cases.items():
        with pytest.raises(ValueError, match=word):
            hf_posenc.patch(wrapped, "alibi")
    model.embeddings._hf_hook = object()
    with pytest.raises(ValueError, match="device_map"):
        hf_posenc.patch(model, "alibi")
    del model.embeddings._hf_hook
    model.hf_quantizer = object()
    with pytest.raises(ValueError, match="quantised"):
        hf_posenc.patch(model, "alibi")


def test_models_changed_by_hand():
    model = stock("bert")
    model.encoder.layer[0].intermediate.dense = torch.nn.Linear(32, 40)
    with pytest.raises(ValueError, match=r"encoder\.layer\.0\.intermediate\.dense.*another shape"):
        hf_posenc.patch(model, "alibi")
    model.encoder.layer[0].intermediate = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"intermediate' is a Identity"):
        hf_posenc.patch(model, "alibi")


@every_host
def test_after_the_stock_model_was_used(host):
    """Hooks by which Transformers collects hidden states are the stock model's own; the patched one gets its own."""
    model = stock(host)
    model(tokens(), output_hidden_states=True)
    new = hf_posenc.patch(model, "alibi")
    assert len(new(tokens(), output_hidden_states=True).hidden_states) == 3
    again = hf_posenc.unpatch(new)
    assert len(again(tokens(), output_hidden_states=True).hidden_states) == 3
    assert not any("posenc" in name for name in vars(again.base_model))
    with pytest.raises(ValueError, match="specify"):
        new()


def test_resized_and_dropped_out_models_carry_over():
    model = stock("bert", "ForMaskedLM")
    model.resize_token_embeddings(70)
    model.bert.embeddings.dropout.p = 0.77
    new = hf_posenc.patch(model, "alibi")
    assert new.get_input_embeddings().weight.shape[0] == 70 and new.bert.embeddings.dropout.p == 0.77


def test_another_type_on_load(tmp_path):
    patched("bert", "rope").save_pretrained(tmp_path)
    for load in (AutoModel, AutoConfig, hf_posenc.PosEncBertModel):
        with pytest.raises(ValueError, match=r"saved with the 'rope' encoding, not 'alibi'.*unpatch"):
            load.from_pretrained(tmp_path, position_encoding="alibi")
    assert AutoModel.from_pretrained(tmp_path, position_encoding="rotary").config.position_encoding["type"] == "rope"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"type": "rope", "angle": 1.0}, "no option 'angle'"),
        ({"type": "rope", "theta": -1.0}, "theta=-1.0"),
        ({"type": "nothing"}, "unknown position encoding 'nothing'"),
        ({"theta": 1.0}, "a name or a dict"),
        ("rope?", "unknown position encoding"),
        (["rope"], "a name or a dict"),
        ({"type": "rope", "max_length": "long"}, "max_length='long'"),
        ({"type": "rope", "host": {"kept": True}}, "not to be edited"),
        ({"type": "rope", "host": 7}, "not to be edited"),
        ({"type": "rope", "max_length": -1}, "max_length=-1"),
    ],
)
def test_malformed_config(tmp_path, value, words):
    patched("bert", "rope").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "position_encoding": value}))
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        AutoModel.from_pretrained(tmp_path)


def test_config_without_an_encoding(tmp_path):
    patched("bert", "rope").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["position_encoding"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"needs config\.position_encoding"):
        AutoModel.from_pretrained(tmp_path)
    stock("bert").save_pretrained(tmp_path / "stock")
    with pytest.raises(ValueError, match=r"hf_posenc\.patch"):
        hf_posenc.PosEncBertModel.from_pretrained(tmp_path / "stock")


@pytest.mark.parametrize("encoding", ["learned", "relative"])
def test_missing_and_unexpected_weights(tmp_path, encoding):
    patched("bert", encoding).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: value for name, value in weights.items() if name != "posenc.weight"}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing_keys posenc\.weight"):
        AutoModel.from_pretrained(tmp_path)
    save_file({**weights, "posenc.extra": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected_keys posenc\.extra"):
        AutoModel.from_pretrained(tmp_path)


def test_a_backend_that_would_drop_the_bias(monkeypatch):
    """flash attention takes no bias: refused by name, the model left as it was; rotations pass."""
    monkeypatch.setitem(
        attention.ALL_ATTENTION_FUNCTIONS._global_mapping, "test_kernel", transformers.modeling_utils.sdpa_attention_forward
    )
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "test_kernel", sdpa_mask)
    model = patched("bert", "alibi")
    expected = first(model(tokens()))
    with pytest.raises(ValueError, match=r"'test_kernel'.*takes no score bias.*'sdpa'"):
        model.set_attn_implementation("test_kernel")
    assert model.config._attn_implementation == "sdpa" and torch.equal(first(model(tokens())), expected)
    turned = patched("bert", "rope")
    expected = first(turned(tokens()))
    turned.set_attn_implementation("test_kernel")
    assert torch.equal(first(turned(tokens())), expected)
    model = stock("bert")
    model.config._attn_implementation_internal = "test_kernel"
    with pytest.raises(ValueError, match="takes no score bias"):
        hf_posenc.patch(model, "alibi")


@pytest.mark.parametrize("host", ["bert", "mpnet"])
def test_only_a_part_has_no_positions(host):
    model = patched(host, "alibi")
    assert torch.equal(first(model.forward(tokens())), first(model(tokens())))
    with pytest.raises(RuntimeError, match="without positions"):
        model.encoder(model.embeddings(tokens(), position_ids=torch.arange(11)[None]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of Transformers' own flex path
@pytest.mark.parametrize("host", ["bert", "distilbert"])
@pytest.mark.parametrize("encoding", ["alibi", "relative", "rope", "learned"])
def test_flex_attention(host, encoding):
    model = patched(host, encoding, **HOSTS[host].no_dropout)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, 7:] = 0
    with torch.no_grad():
        expected = first(model(tokens(), attention_mask=mask))
        model.set_attn_implementation("flex_attention")
        actual = first(model(tokens(), attention_mask=mask))
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=2e-5, rtol=1e-4)


# inspect.


def test_inspect(tmp_path):
    report = hf_posenc.inspect(patched("gpt2", "rope", "LMHeadModel", max_length=99))
    assert (report.encoding, report.options, report.max_length) == ("rope", {"theta": 10000.0, "layout": "half"}, 99)
    assert report.enters == {"rotate": ("transformer.h.0.attn", "transformer.h.1.attn")} and report.host_kept
    patched("bert", "sinusoidal", "ForMaskedLM").save_pretrained(tmp_path / "patched")
    report = hf_posenc.inspect(tmp_path / "patched")
    assert report.enters == {"embed": ("embeddings.position_embeddings",)} and report.max_length is None
    assert "no limit" in str(report) and "sinusoidal (base=10000.0" in str(report)
    model = stock("bert")
    model.config.position_embedding_type = "relative_key"
    model.save_pretrained(tmp_path / "v4")
    report = hf_posenc.inspect(tmp_path / "v4")
    assert (report.encoding, report.max_length) == ("learned", LENGTH) and "relative_key" in report.ignored[0]
    resnet = transformers.ResNetModel(transformers.ResNetConfig(hidden_sizes=[8], depths=[1], embedding_size=8))
    with pytest.raises(ValueError, match="ResNetModel"):
        hf_posenc.inspect(resnet)


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "20KB"}])
def test_a_weight_file_by_itself_tells_its_encoding(shards, tmp_path):
    for encoding in ("shaw", "alibi"):  # into the same folder
        model = patched("bert", encoding)
        model.save_pretrained(tmp_path, **shards)
        paths = list(tmp_path.glob("*.safetensors"))
        assert (len(paths) > 1) == bool(shards)
        for path in paths:
            with safe_open(path, "pt") as file:
                metadata = file.metadata()
            assert metadata["format"] == "pt" and json.loads(metadata["position_encoding"]) == model.config.position_encoding
        assert torch.equal(first(AutoModel.from_pretrained(tmp_path)(tokens())), first(model(tokens())))
        assert not list(tmp_path.glob("*.labelled"))
        saved = {path.name: path.read_bytes() for path in paths}
        model.save_pretrained(tmp_path / "again", **shards)
        assert {path.name: path.read_bytes() for path in (tmp_path / "again").glob("*.safetensors")} == saved
