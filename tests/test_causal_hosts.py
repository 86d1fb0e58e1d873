"""Decoders whose attentions don't say that they are: later tokens must change nothing in what comes before them."""

import pytest
import torch
import transformers
from peft import PrefixTuningConfig, get_peft_model

import hf_posenc
from conftest import VOCABULARY, assert_close, first, randomize, randomize_encoding, stock, tokens
from oracles import in_pieces

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=VOCABULARY)
XLM = dict(emb_dim=32, n_layers=2, n_heads=4, n_words=VOCABULARY, causal=True, max_position_embeddings=24)
HOSTS = {
    "CodeGen": ("CodeGenModel", dict(n_embd=32, n_layer=2, n_head=4, n_positions=24, vocab_size=VOCABULARY, rotary_dim=4)),
    "CLIPText": ("CLIPTextModel", {**SIZES, "max_position_embeddings": 24}),
    "XLM": ("XLMModel", XLM),
    "Flaubert": ("FlaubertModel", XLM),
    "BlipText": ("BlipTextModel", {**SIZES, "is_decoder": True, "max_position_embeddings": 24}),
}
OPTIONS = {"logn": {"trained_length": 3}, "sinusoidal": {"frequencies": "dynamic", "trained_length": 3}}


def make(name, **changes):
    kind, sizes = HOSTS[name]
    config = getattr(transformers, f"{name}Config")(**{**sizes, **changes})
    torch.manual_seed(0)
    return randomize(getattr(transformers, kind)(config)).eval()


@pytest.mark.parametrize("encoding", ["fire", "logn", "sinusoidal", "fox", "cope", "xpos"])
@pytest.mark.parametrize("name", HOSTS)
@torch.no_grad()
def test_later_tokens_change_nothing(name, encoding):
    model = hf_posenc.patch(make(name), encoding, max_length=20, **OPTIONS.get(encoding, {}))
    randomize_encoding(model)
    ids = tokens(2, 12)
    more = {"is_decoder": True} if name == "BlipText" else {}
    assert_close(first(model(ids[:, :8], **more)), first(model(ids, **more))[:, :8])


def test_encoders_of_the_same_classes_stay_encoders():
    for name, changes in (("XLM", {"causal": False}), ("BlipText", {"is_decoder": False})):
        with pytest.raises(ValueError, match="'fox' is defined for attention to earlier tokens alone"):
            hf_posenc.patch(make(name, **changes), "fox")
        assert hf_posenc.patch(make(name, **changes), {"type": "alibi", "sides": "one_sided"})


@pytest.mark.parametrize(
    ("encoding", "options"),
    [
        ("logn", {"trained_length": 3}),
        ("rope", {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 3}),
    ],
)
@torch.no_grad()
def test_the_length_in_cross_attention_is_the_encoders(encoding, options):
    sizes = dict(d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=48, vocab_size=VOCABULARY, decoder_start_token_id=0)
    torch.manual_seed(0)
    model = randomize(transformers.T5Model(transformers.T5Config(**sizes))).eval()
    model = randomize_encoding(hf_posenc.patch(model, encoding, where=["cross"], **options))
    ids, there = tokens(2, 9), tokens(2, 6, seed=1)
    whole = model(input_ids=there, decoder_input_ids=ids).last_hidden_state
    assert_close(model(input_ids=there, decoder_input_ids=ids[:, :5]).last_hidden_state, whole[:, :5])
    mask = torch.ones_like(there)
    mask[0, 4:] = 0
    hidden = model(input_ids=there, attention_mask=mask, decoder_input_ids=ids).last_hidden_state
    alone = model(input_ids=there[:1, :4], decoder_input_ids=ids[:1]).last_hidden_state
    assert_close(hidden[:1], alone)


@pytest.mark.parametrize(("encoding", "options"), [("pope", {}), ("fope", {"trained_length": 9, "coefficients": "learned"})])
@pytest.mark.parametrize("name", ["Falcon", "Bloom", "GPTNeoXJapanese"])
@torch.no_grad()
def test_written_out_decoders_with_wider_keys_or_one_key_head(name, encoding, options):
    sizes = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2
    )
    more = {"Falcon": {"multi_query": True, "alibi": False}, "Bloom": {"n_layer": 2, "n_head": 4}}.get(name, {})
    config = getattr(transformers, f"{name}Config")(**{**sizes, **more})
    torch.manual_seed(0)
    model = randomize(getattr(transformers, f"{name}ForCausalLM")(config)).eval()
    model = randomize_encoding(hf_posenc.patch(model, encoding, **options))
    ids = tokens(2, 12)
    assert_close(in_pieces(model, ids, (5, 11)), first(model(ids)))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # which peft reads
def test_prefixes_of_another_width_are_refused():
    model = hf_posenc.patch(stock("llama", "ForCausalLM"), "pope")
    model = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match=r"makes keys of 16 features, and the cache holds some of another size.*prefix tuning"):
        model(tokens())
