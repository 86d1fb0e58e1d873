"""Decoders whose attentions don't declare that they are causal: later tokens must not change the output of earlier tokens."""

import pytest
import torch
import transformers
from peft import PrefixTuningConfig, get_peft_model

import hf_posenc
from closeness import assert_close
from models import first, randomize_encoding, stock, tiny, tokens
from oracles import in_pieces

HOSTS = {
    "CodeGen": {"rotary_dim": 4},
    "CLIPText": {},
    "XLM": {"causal": True},
    "Flaubert": {"causal": True},
    "BlipText": {"is_decoder": True},
}
"""Class prefix -> changes of the config."""
TWO_WAYS = {
    **dict.fromkeys(("GPT2", "Llama", "Bloom", "CLIPText", "Laguna"), {}),
    "CodeGen": {"rotary_dim": 4},
    "Bert": {"is_decoder": True},
    "Gemma3Text": {"layer_types": ["full_attention"] * 2},
}
OPTIONS = {"logn": {"trained_length": 3}, "sinusoidal": {"frequencies": "dynamic", "trained_length": 3}}


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        *(("CodeGen", encoding) for encoding in ("fire", "logn", "sinusoidal", "fox", "cope", "xpos")),
        *((name, encoding) for name in [*HOSTS][1:] for encoding in ("logn", "fox")),
    ],
)
@torch.no_grad()
def test_later_tokens_change_nothing(name, encoding):
    model = hf_posenc.patch(tiny(f"{name}Model", **HOSTS[name]), encoding, max_length=20, **OPTIONS.get(encoding, {}))
    randomize_encoding(model)
    ids = tokens(2, 12)
    more = {"is_decoder": True} if name == "BlipText" else {}
    assert_close(first(model(ids[:, :8], **more)), first(model(ids, **more))[:, :8])


def test_encoders_of_the_same_classes_stay_encoders():
    for name, changes in (("XLM", {"causal": False}), ("BlipText", {"is_decoder": False})):
        with pytest.raises(ValueError, match="'fox' requires causal attention"):
            hf_posenc.patch(tiny(f"{name}Model", **changes), "fox")
        assert hf_posenc.patch(tiny(f"{name}Model", **changes), {"type": "alibi", "sides": "one_sided"})


@pytest.mark.parametrize(
    ("encoding", "options"),
    [
        ("logn", {"trained_length": 3}),
        ("rope", {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 3}),
    ],
)
@torch.no_grad()
def test_the_length_in_cross_attention_is_the_encoders(encoding, options):
    model = randomize_encoding(hf_posenc.patch(tiny("T5Model"), encoding, where=["cross"], **options))
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
    more = {"multi_query": True, "alibi": False} if name == "Falcon" else {}
    model = randomize_encoding(hf_posenc.patch(tiny(f"{name}ForCausalLM", **more), encoding, **options))
    ids = tokens(2, 12)
    assert_close(in_pieces(model, ids, (5, 11)), first(model(ids)))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft reads it
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # peft passes it
def test_prefixes_of_another_width_are_refused():
    model = hf_posenc.patch(stock("llama", "ForCausalLM"), "pope")
    model = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match=r"keys of 16 features.*prefix tuning"):
        model(tokens())


BIDIRECTIONAL = [(name, {"is_causal": False}) for name in TWO_WAYS] + [("Gemma3Text", {"use_bidirectional_attention": True})]


@pytest.mark.parametrize(("name", "changes"), BIDIRECTIONAL)
@torch.no_grad()
def test_bidirectional_decoders(name, changes, tmp_path):
    """With `config.is_causal=False`, a decoder sees later tokens, and the encoding distinguishes them from earlier ones."""
    model = tiny(f"{name}Model", **{**TWO_WAYS[name], **changes})
    for encoding in ("cope", "fox", "xpos"):
        with pytest.raises(ValueError, match=f"'{encoding}' requires causal attention"):
            hf_posenc.patch(model, encoding)
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = 0
    for encoding, options in (("t5", {}), ("alibi", {"sides": "one_sided"})):
        patched = randomize_encoding(hf_posenc.patch(model, encoding, **options))
        assert not next(each for each in patched.modules() if hasattr(each, "posenc")).posenc.geometry.is_causal
        hidden = first(patched(ids, attention_mask=mask))
        moved = first(patched(ids[:, [*range(8), 11, 9, 10, 8]], attention_mask=mask))
        assert (hidden - moved)[:, 4].abs().max() > 1e-3
    patched.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(first(again(ids, attention_mask=mask)), hidden)
    assert_close(first(hf_posenc.unpatch(patched)(ids, attention_mask=mask)), first(model(ids, attention_mask=mask)))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("name", "encoding"), [("GPT2", "learned/host"), ("Bert", "learned/host"), ("Llama", "rope")])
@torch.no_grad()
def test_decoders_with_their_own_positions_in_both_directions(name, encoding, causal):
    model, ids = tiny(f"{name}Model", **{**TWO_WAYS[name], "is_causal": causal}), tokens(2, 12)
    options = {"init": "host"} if encoding == "learned/host" else {}
    assert_close(first(hf_posenc.patch(model, encoding.partition("/")[0], **options)(ids)), first(model(ids)))


@pytest.mark.parametrize("name", TWO_WAYS)
@torch.no_grad()
def test_causal_flags_that_change_after_patching(name):
    ids = tokens(2, 12)
    model = hf_posenc.patch(tiny(f"{name}Model", **{**TWO_WAYS[name]}), "t5")
    expected = first(model(ids))
    with pytest.raises(ValueError, match=r"is_causal=False changes which tokens.*'t5'.*built for is_causal=True"):
        model(ids, is_causal=False)
    assert torch.equal(first(model(ids)), expected)
    for flag, value in (("is_causal", False), *([("is_decoder", False)] if name == "Bert" else [])):
        before = getattr(model.config, flag, None)
        setattr(model.config, flag, value)
        with pytest.raises(ValueError, match=rf"{flag}=False changes.*in the config"):
            model(ids)
        setattr(model.config, flag, True if before is None else before)
    assert torch.equal(first(model(ids)), expected)
    model = hf_posenc.patch(tiny(f"{name}Model", **{**TWO_WAYS[name], "is_causal": False}), "t5")
    with pytest.raises(ValueError, match=r"is_causal=True changes which tokens.*built for is_causal=False"):
        model(ids, is_causal=True)


def test_a_decoder_with_a_mask_of_its_own_stays_causal():
    model = hf_posenc.patch(tiny("GPTNeoModel", is_causal=False), "fox")
    ids = tokens(2, 12)
    assert_close(first(model(ids[:, :8])), first(model(ids))[:, :8])


@pytest.mark.parametrize("encoding", ["alibi", "shaw", "relative_key_query", "rope"])
@torch.no_grad()
def test_a_decoder_whose_attention_has_no_causal_flag(encoding):
    """Transformers' SDPA function then masks the future itself, and gets no mask."""
    model, ids = hf_posenc.patch(tiny("LlamaModel"), encoding), tokens(2, 12)
    for layer in model.layers:
        del layer.self_attn.is_causal
    assert_close(first(model(ids[:, :8])), first(model(ids))[:, :8])


@torch.no_grad()
def test_only_the_decoder_of_two_stacks_follows_the_flag():
    model = hf_posenc.patch(tiny("BartModel", is_causal=False), "t5")
    assert not model.decoder.posenc.geometry.is_causal and not model.encoder.posenc.geometry.is_causal
    with pytest.raises(ValueError, match="is_causal=True changes"):
        model(tokens(), is_causal=True)
    with pytest.raises(ValueError, match="'xpos' requires causal attention"):
        hf_posenc.patch(hf_posenc.unpatch(model), "xpos", where="decoder")
