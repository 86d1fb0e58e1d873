"""Models that aren't part of Transformers: the examples of docs/guides/other_models.md, and timm's vision transformers."""

import importlib
import inspect
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, TimmWrapperConfig, TimmWrapperModel
from transformers.modeling_outputs import BaseModelOutput

import hf_posenc
from closeness import assert_apart, assert_close, assert_equal
from conftest import ROOT, run_python
from hf_posenc.attention import custom
from models import randomize, randomize_encoding, tokens
from oracles import alibi

FOLDER = ROOT / "scripts" / "examples"
EXAMPLES = {"nanogpt": "NanoGPT", "torch_encoder": "TorchEncoder", "x_transformer": "XTransformer"}
"""File -> its model class."""
ENCODINGS = ("sinusoidal", "rope", "alibi", "t5", "shaw")
LOAD = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, hf_posenc, importlib
from transformers import AutoModel
if sys.argv[2]:
    importlib.import_module(sys.argv[2])
case = torch.load(sys.argv[4])
model = AutoModel.from_pretrained(sys.argv[3])
print(type(model).__name__, torch.equal(model(case["inputs"])[0], case["output"]))
"""


@pytest.fixture
def example(request, monkeypatch):
    """The module of an example, which registers its attention, and a model with random weights."""
    name = request.param
    if name == "x_transformer":
        pytest.importorskip("x_transformers")
    monkeypatch.setattr(custom, "ROWS", dict(custom.ROWS))
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module(name)
    attention = {"nanogpt": "CausalSelfAttention", "x_transformer": "Attention"}.get(name)
    hf_posenc.register_attention(
        getattr(module, attention) if attention else nn.MultiheadAttention, is_causal=attention is not None
    )
    made = getattr(module, EXAMPLES[name])
    return module, randomize(made(made.config_class())).eval()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("example", EXAMPLES, indirect=True)
@torch.no_grad()
def test_order_padding_save_and_unpatch(example, encoding, tmp_path):
    module, stock = example
    ids, causal = tokens(), not isinstance(stock, getattr(module, "TorchEncoder", ()))
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist() + [10]
    without = hf_posenc.patch(stock, "none")
    if causal:  # Later layers know order from the causal mask, and the first layer's outputs can't be read.
        assert_close(without(ids[:, :1].expand(-1, 9))[0], without(ids[:, :1])[0].expand(-1, 9, -1))
    else:
        assert_close(without(ids[:, order])[0], without(ids)[0][:, order])
    model = randomize_encoding(hf_posenc.patch(stock, encoding, max_length=40))
    output = model(ids)[0]
    if causal:
        changed = torch.cat([ids[:, :-1], ids[:, :1]], dim=1)
        assert_close(model(changed)[0][:, :-1], output[:, :-1])
    else:
        assert_apart(model(ids[:, order])[0], output[:, order])
    assert_apart(output, without(ids)[0])
    assert model(tokens(length=33))[0].isfinite().all()  # longer than its table was
    with torch.enable_grad():  # torch's fused kernels run only without gradients
        assert_close(model(ids)[0], output)
    if "attention_mask" in inspect.signature(stock.forward).parameters:
        mask = torch.tensor([[1] * 11, [1] * 7 + [0] * 4])
        assert_close(model(ids, attention_mask=mask)[0][1, :7], model(ids[1:, :7])[0][0])
    model.save_pretrained(tmp_path)
    assert_equal(AutoModel.from_pretrained(tmp_path)(ids)[0], output)
    assert_equal(hf_posenc.unpatch(model)(ids)[0], stock(ids)[0])


@pytest.mark.parametrize("example", EXAMPLES, indirect=True)
@torch.no_grad()
def test_the_original_positions_as_an_encoding(example):
    _, stock = example
    assert_close(hf_posenc.patch(stock, "learned", init="host")(tokens())[0], stock(tokens())[0])


@pytest.mark.parametrize("example", EXAMPLES, indirect=True)
@torch.no_grad()
def test_loads_in_another_process(example, tmp_path):
    module, stock = example
    model, ids = hf_posenc.patch(stock, "alibi"), tokens()
    model.save_pretrained(tmp_path / "model")
    torch.save({"inputs": ids, "output": model(ids)[0]}, tmp_path / "case.pt")
    said = run_python(LOAD, FOLDER, module.__name__, tmp_path / "model", tmp_path / "case.pt")
    assert said.split() == [f"PosEnc{type(stock).__name__}", "True"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("example", ["torch_encoder"], indirect=True)
@torch.no_grad()
def test_torchs_encoder_with_a_bias_in_its_mask(example):
    """ALiBi equals the original model without its positions, with a mask that contains the biases."""
    _, stock = example
    model, ids = hf_posenc.patch(stock, "alibi"), tokens()
    states = stock.embed_tokens(ids)
    with torch.enable_grad():  # torch's fused kernel takes only boolean masks
        assert_close(model(ids)[0], stock.encoder(states, mask=alibi(11).repeat(2, 1, 1)))
    model.encoder.use_nested_tensor = True
    with pytest.raises(ValueError, match="enable_nested_tensor=False"):
        model(ids, attention_mask=torch.tensor([[1] * 11, [1] * 7 + [0] * 4]))


class TorchStackConfig(PreTrainedConfig):
    model_type = "torch-stack"
    hidden_size: int = 32
    num_attention_heads: int = 4
    max_position_embeddings: int = 24
    batch_first: bool = False


class TorchStack(PreTrainedModel):
    """Torch's decoder, whose memory has the embeddings of the same tokens, at the indices `memory` or all of them."""

    config_class = TorchStackConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens, self.position_embeddings = nn.Embedding(61, 32), nn.Embedding(24, 32)
        layer = nn.TransformerDecoderLayer(32, 4, 48, dropout=0.0, batch_first=config.batch_first)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def forward(self, input_ids, memory=None):
        content = self.embed_tokens(input_ids)
        states = content + self.position_embeddings(torch.arange(input_ids.shape[1])[None])
        states, read = ((each if self.config.batch_first else each.transpose(0, 1)) for each in (states, content))
        read = read if memory is None else read.index_select(int(self.config.batch_first), memory)
        states = self.decoder(states, read)
        return BaseModelOutput(states if self.config.batch_first else states.transpose(0, 1))


@pytest.fixture
def torch_stack(monkeypatch):
    """A model for each order of torch's axes, with the same weights: tokens first, and batch first."""
    monkeypatch.setattr(custom, "ROWS", dict(custom.ROWS))
    hf_posenc.register_attention(nn.MultiheadAttention)
    return [randomize(TorchStack(TorchStackConfig(batch_first=first))).eval() for first in (False, True)]


@pytest.mark.parametrize("encoding", [*ENCODINGS, "none"])
@torch.no_grad()
def test_torchs_cross_attention_does_not_change(encoding, torch_stack, tmp_path):
    """The order of the memory doesn't matter, and it can have another length than the tokens."""
    model, ids = randomize_encoding(hf_posenc.patch(torch_stack[1], encoding)), tokens()
    memory = torch.randperm(11, generator=torch.Generator().manual_seed(0))
    assert_close(model(ids, memory)[0], model(ids, torch.arange(11))[0])
    assert_apart(model(ids, memory[:5])[0], model(ids, memory)[0])
    model.save_pretrained(tmp_path)
    assert_equal(type(model).from_pretrained(tmp_path)(ids)[0], model(ids)[0])
    assert_equal(hf_posenc.unpatch(model)(ids)[0], torch_stack[1](ids)[0])


@pytest.mark.parametrize("inject", ["input", "every_layer", "after_attention"])
@pytest.mark.parametrize("size", [1, 2, 11])
@torch.no_grad()
def test_torchs_axis_of_tokens(inject, size, torch_stack):
    """Vectors are added to tokens, whether their axis comes before that of the batch or behind it."""
    ids = tokens(size)
    outputs = [hf_posenc.patch(model, "sinusoidal", inject=inject)(ids)[0] for model in torch_stack]
    assert outputs[0].shape == (size, 11, 32)
    assert_close(*outputs)


class OneConfig(PreTrainedConfig):
    model_type = "one-attention"
    hidden_size: int = 8
    num_attention_heads: int = 2
    made: dict | None = None


class OneModel(PreTrainedModel):
    """An attention of torch by itself. Its positions are zero."""

    config_class = OneConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens, self.position_embeddings = nn.Embedding(61, 8), nn.Embedding(24, 8)
        self.layers = nn.ModuleList([nn.MultiheadAttention(8, 2, batch_first=True, **config.made)])
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def forward(self, input_ids, shift=0, **given):
        states = self.embed_tokens(input_ids) + self.position_embeddings(torch.arange(input_ids.shape[1])[None])
        others = states + shift if shift else states
        return self.layers[0](states, others, others, **given)


def one_attention(**made):
    model = randomize(OneModel(OneConfig(made=made))).eval()
    nn.init.zeros_(model.position_embeddings.weight)
    return model, hf_posenc.patch(model, "none")


@torch.no_grad()
def test_torchs_attention(monkeypatch):
    """Without an encoding, the intercepted call gives torch's own outputs and probabilities."""
    monkeypatch.setattr(custom, "ROWS", dict(custom.ROWS))
    hf_posenc.register_attention(nn.MultiheadAttention)
    ids, hidden = tokens(length=5), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    biases = torch.randn(4, 5, 5, generator=torch.Generator().manual_seed(0))
    for made, given in (
        ({}, {}),
        ({"bias": False}, {"key_padding_mask": hidden}),
        ({}, {"attn_mask": torch.ones(5, 5).triu(1).bool(), "average_attn_weights": False}),
        ({}, {"attn_mask": biases, "need_weights": False, "key_padding_mask": hidden * -1e9}),
    ):
        stock, model = one_attention(**made)
        expected, found = stock(ids, **given), model(ids, **given)
        assert_close([each for each in found if each is not None], [each for each in expected if each is not None])
        assert (found[1] is None) == (expected[1] is None)
    _, model = one_attention(add_bias_kv=True)
    with pytest.raises(ValueError, match="add_bias_kv"):
        model(ids)
    with pytest.raises(ValueError, match="another input"):
        one_attention()[1](ids, shift=1)


TIMM = {
    "vit_tiny_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "vit_small_patch14_reg4_dinov2": {},
    "vit_base_patch16_siglip_224": {},
}
"""Architecture -> arguments. They have a class token, a distillation token, registers without positions, or only patches."""


def timm_model(name):
    pytest.importorskip("timm")
    sizes = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, **TIMM[name])
    return randomize(TimmWrapperModel(TimmWrapperConfig(architecture=name, num_labels=2, model_args=sizes))).eval()


@pytest.mark.parametrize("name", TIMM)
@torch.no_grad()
def test_timms_vision_transformers(name):
    """Positions are those of the patches. Their own as an encoding give the original output if other tokens have none."""
    stock, images = timm_model(name), torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    table = stock.timm_model.pos_embed
    table[:, : table.shape[1] - 16] = 0
    expected = stock(pixel_values=images)[0]
    assert_close(hf_posenc.patch(stock, "learned", init="host")(pixel_values=images)[0], expected)
    without = hf_posenc.patch(stock, "none")(pixel_values=images)[0]
    for encoding in ("rope_2d", "rope", "alibi", "t5"):
        model = randomize_encoding(hf_posenc.patch(stock, encoding))
        assert_apart(model(pixel_values=images)[0], without)
        for block in model.timm_model.blocks:
            block.attn.fused_attn = False
        fused = randomize_encoding(hf_posenc.patch(stock, encoding))
        assert_close(model(pixel_values=images)[0], fused(pixel_values=images)[0])
        assert_equal(hf_posenc.unpatch(fused)(pixel_values=images)[0], expected)


@torch.no_grad()
def test_timms_patches_in_another_order():
    stock, images = timm_model("vit_tiny_patch16_224"), torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    order = [*torch.randperm(4, generator=torch.Generator().manual_seed(0)).tolist()]
    other = images.unflatten(2, (4, 8))[:, :, order].flatten(2, 3)
    index = [0, *(1 + 4 * row + column for row in order for column in range(4))]
    without = hf_posenc.patch(stock, "none")
    assert_close(without(pixel_values=other)[0], without(pixel_values=images)[0][:, index])
    model = hf_posenc.patch(stock, "rope_2d")
    assert_apart(model(pixel_values=other)[0], model(pixel_values=images)[0][:, index])


@torch.no_grad()
def test_timms_models_load_in_another_process(tmp_path):
    model, images = hf_posenc.patch(timm_model("vit_tiny_patch16_224"), "rope_2d"), torch.randn(1, 3, 32, 32)
    model.save_pretrained(tmp_path / "model")
    torch.save({"inputs": images, "output": model(pixel_values=images)[0]}, tmp_path / "case.pt")
    path = Path(importlib.import_module("timm").__file__).parents[1]
    said = run_python(LOAD, path, "", tmp_path / "model", tmp_path / "case.pt", fresh=True)
    assert said.split() == ["PosEncTimmWrapperModel", "True"]


@pytest.mark.parametrize("own", ["alibi_pos_bias", "rotary_pos_emb"])
@torch.no_grad()
def test_x_transformers_own_encodings(own, monkeypatch):
    """ALiBi and RoPE equal x-transformers' own."""
    x_transformers = pytest.importorskip("x_transformers")
    monkeypatch.setattr(custom, "ROWS", dict(custom.ROWS))
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("x_transformer")
    hf_posenc.register_attention(module.Attention, is_causal=True)
    stock = randomize(module.XTransformer(module.XTransformerConfig())).eval()
    more = {"alibi_pos_bias": {"alibi_num_heads": 4}, "rotary_pos_emb": {"rotary_emb_dim": 8}}[own]
    layers = x_transformers.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **{own: True}, **more)
    theirs = x_transformers.TransformerWrapper(num_tokens=61, max_seq_len=24, attn_layers=layers, use_abs_pos_emb=False).eval()
    weights = {key: value for key, value in stock.inner.state_dict().items() if "pos_emb" not in key}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and all("rotary" in key or "rel_pos" in key for key in missing)
    ours = hf_posenc.patch(stock, "alibi") if own == "alibi_pos_bias" else hf_posenc.patch(stock, "rope", layout="interleaved")
    assert_close(ours(tokens())[0], theirs(tokens(), return_embeddings=True))
