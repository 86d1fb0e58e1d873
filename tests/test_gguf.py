"""Models that Transformers read from a GGUF file: their weights are dequantized, but they still look quantized."""

import json

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_posenc
from closeness import assert_apart, assert_equal
from models import first, stock, tokens
from reloading import keep, reload

WIDTH, LAYERS, HEADS, LENGTH = 32, 2, 4, 64
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Parts of names in Llama -> in GGUF."""
FILE = "tiny.gguf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The directory of a GGUF file with a tiny Llama, whose matrices are quantized to 8 bits."""
    folder = tmp_path_factory.mktemp("gguf")
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    model = stock("llama", "ForCausalLM", **sizes, num_key_value_heads=HEADS, max_position_embeddings=LENGTH)
    writer = gguf.GGUFWriter(folder / FILE, "llama")
    writer.add_context_length(LENGTH)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(model.config.vocab_size)
    for name, value in model.state_dict().items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if value.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(value.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


@pytest.fixture
def model(folder):
    found = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE)
    assert found.config.rope_parameters["rope_theta"] == 500.0 and found.dtype == torch.float32
    assert found.hf_quantizer is not None  # otherwise, these tests show nothing
    return found


@torch.no_grad()
def test_patch_and_reload_in_a_new_process(model, tmp_path):
    ids = tokens()
    expected = first(model(ids))
    patched = hf_posenc.patch(model, "alibi")
    assert_apart(first(patched(ids)), expected)
    assert_equal(first(hf_posenc.unpatch(patched)(ids)), expected)
    assert patched.lm_head.weight is model.lm_head.weight and model.hf_quantizer is not None
    keep(tmp_path / "kept" / "alibi", hf_posenc.patch(model.model, "alibi"), model.model, ids)
    saved = json.loads((tmp_path / "kept" / "alibi" / "config.json").read_text())
    assert not [name for name in saved if "quant" in name]
    hf_posenc.unpatch(patched).save_pretrained(tmp_path / "unpatched")
    assert "quantization_config" not in (tmp_path / "unpatched" / "config.json").read_text()
    reload(tmp_path / "kept")
    patched.half()  # Transformers raises an error if it calls a model quantized.


@torch.no_grad()
def test_the_other_functions(model, tmp_path):
    ids, long = tokens(), tokens(1, 2 * LENGTH)
    expected = first(model(ids))
    for name, method in {"yarn": "yarn", "grouped": "grouped"}.items():
        longer = hf_posenc.extend(model, 2 * LENGTH, method)
        assert first(longer(long)).isfinite().all()
        longer.save_pretrained(tmp_path / name)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert_equal(first(again(long)), first(longer(long)))
    texts = [{"input_ids": each, "attention_mask": torch.ones_like(each)} for each in ids[:, None]]
    converted = hf_posenc.convert(model, "alibi", texts=texts)
    assert_equal(first(hf_posenc.unpatch(converted)(ids)), expected)
    exported = hf_posenc.to_stock(hf_posenc.patch(model, "rope", theta=500.0))
    exported.save_pretrained(tmp_path / "exported")
    assert_equal(first(AutoModelForCausalLM.from_pretrained(tmp_path / "exported")(ids)), first(exported(ids)))


@torch.no_grad()
def test_a_derived_class_reads_the_file(model, folder):
    read = hf_posenc.PosEncLlamaForCausalLM.from_pretrained(folder, gguf_file=FILE, position_encoding="alibi")
    assert_equal(first(read(tokens())), first(hf_posenc.patch(model, "alibi")(tokens())))


def test_weights_in_blocks_are_refused(model):
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(61, WIDTH, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match="quantized"):
        hf_posenc.patch(model, "alibi")


def test_other_quantizers_are_refused(model):
    model.hf_quantizer.quantization_config.quant_method = "torchao"  # whose tensors have a floating-point dtype
    with pytest.raises(ValueError, match="quantized"):
        hf_posenc.patch(model, "alibi")
