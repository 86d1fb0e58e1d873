"""Custom model classes, and the page about them."""

import importlib
import pickle
import re
import sys
from copy import deepcopy

import pytest
import torch
from torch import nn
from transformers import AutoModel, BertConfig, BertModel, DynamicCache, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention

import hf_posenc
from closeness import assert_apart, assert_close
from conftest import ROOT, run_python
from models import LLAMA, randomize, randomize_encoding, tokens
from oracles import in_pieces, sinusoids

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guides" / "custom_model.md").read_text(), re.DOTALL)
FILES = {text.split()[1]: text for text in BLOCKS if text.startswith("# my_")}
"""Blocks of the page that are files."""
ENCODINGS = ("sinusoidal", "rope", "alibi", "shaw", "learned", "sinusoidal+rope+alibi")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def own(folder):
    """The modules of the page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield {name.removesuffix(".py"): importlib.import_module(name.removesuffix(".py")) for name in FILES}


@pytest.fixture
def kept(monkeypatch):
    """Removes what a test registers."""
    from hf_posenc.architectures.components import registered
    from hf_posenc.attention import custom

    monkeypatch.setattr(custom, "ROWS", dict(custom.ROWS))
    monkeypatch.setattr(registered, "DECLARED", dict(registered.DECLARED))


def made(own, name):
    """A model of the page with random weights, and its inputs."""
    module, cls, config = {
        "tiny": ("my_models", "TinyModel", "TinyConfig"),
        "other": ("my_others", "OtherModel", "OtherConfig"),
        "vit": ("my_vit", "PlainViTModel", "PlainViTConfig"),
    }[name]
    torch.manual_seed(0)
    model = randomize(getattr(own[module], cls)(getattr(own[module], config)())).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return model, {"pixel_values": images} if name == "vit" else {"input_ids": tokens(2, 11)}


@pytest.mark.slow
def test_the_page_runs(folder, tmp_path):
    """The page runs in a new interpreter. Its saved model loads in another one that imports only the user's module."""
    lines = [text for text in BLOCKS if not text.startswith("# my_")]
    run_python("\n".join(["import os, sys", f"sys.path.insert(0, {str(folder)!r})", "os.chdir(sys.argv[1])", *lines]), tmp_path)
    code = f"""
import sys
sys.path.insert(0, {str(folder)!r})
import hf_posenc, my_models
from transformers import AutoModel
print(type(AutoModel.from_pretrained(sys.argv[1])).__name__)
print(type(hf_posenc.PosEncTinyModel.from_pretrained(sys.argv[1])).__name__)
"""
    assert run_python(code, tmp_path / "tiny-rope").split() == ["PosEncTinyModel"] * 2
    without = """
import hf_posenc, sys
from transformers import AutoModel
AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
"""
    with pytest.raises(AssertionError, match="defined in my_models.*import hf_posenc and my_models"):
        run_python(without, tmp_path / "tiny-rope")


@pytest.mark.parametrize(
    ("name", "encoding"),
    [*(("tiny", encoding) for encoding in ENCODINGS), ("other", "learned+shaw"), ("other", "rope"), ("vit", ENCODINGS[-1])],
)
@torch.no_grad()
def test_patch_save_load_unpatch(name, encoding, own, tmp_path):
    stock, inputs = made(own, name)
    model = randomize_encoding(hf_posenc.patch(stock, encoding))
    output = model(**inputs)[0]
    assert_apart(output, hf_posenc.patch(stock, "none")(**inputs)[0])
    assert type(model).__name__ == f"PosEnc{type(stock).__name__}" and isinstance(model, type(stock))
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert type(again) is type(model) and isinstance(model, getattr(hf_posenc, type(model).__name__))
    for twin in (again, deepcopy(model), pickle.loads(pickle.dumps(model)), type(model).from_pretrained(tmp_path)):
        assert torch.equal(twin(**inputs)[0], output)
    for patched in (model, again):
        back = hf_posenc.unpatch(patched)
        assert type(back) is type(stock) and torch.equal(back(**inputs)[0], stock(**inputs)[0])
    if name == "tiny":
        again.set_attn_implementation("eager")
        assert_close(again(**inputs)[0], output)
        padded = {"input_ids": inputs["input_ids"], "attention_mask": torch.tensor([[0] * 3 + [1] * 8, [1] * 11])}
        assert_close(model(**padded)[0][:1, 3:], model(input_ids=inputs["input_ids"][:1, 3:])[0])


@torch.no_grad()
def test_as_itself(own):
    """A model with its own table as a learned encoding gives the original output."""
    stock, inputs = made(own, "tiny")
    assert_close(hf_posenc.patch(stock, "learned", init="host")(**inputs)[0], stock(**inputs)[0])


@torch.no_grad()
@pytest.mark.parametrize("name", ["tiny", "other", "vit"])
def test_vectors_take_the_place_of_the_models_own(name, own):
    """The output equals that of an original model whose learned vectors are sinusoids. A class token has none."""
    stock, inputs = made(own, name)
    found = hf_posenc.patch(stock, "sinusoidal")(**inputs)[0]
    table = next(
        value for key, value in stock.named_parameters() if key.endswith(("position_embeddings.weight", "where", "embed"))
    )
    rows = table.view(-1, table.shape[-1])
    rows.zero_()
    vectors = sinusoids([range(len(rows) - 1 if name == "vit" else len(rows))], rows.shape[-1])[0]
    rows[len(rows) - len(vectors) :] = vectors
    assert_close(found, stock(**inputs)[0])


@torch.no_grad()
def test_a_length_of_its_own(own, tmp_path):
    """The positions kept for `unpatch` have the original length for any `max_length`."""
    for name in ("tiny", "other"):
        stock, inputs = made(own, name)
        model = hf_posenc.patch(stock, "alibi", max_length=100)
        assert model.config.max_position_embeddings == 100
        model.save_pretrained(tmp_path / name)
        back = hf_posenc.unpatch(AutoModel.from_pretrained(tmp_path / name))
        assert torch.equal(back(**inputs)[0], stock(**inputs)[0])


@torch.no_grad()
def test_two_classes_of_one_name(own, folder, tmp_path):
    (folder / "my_twins.py").write_text(
        FILES["my_models.py"].replace('"tiny"', '"twin"').replace("self.norm(hidden", "(hidden")
    )
    twins = importlib.import_module("my_twins")
    try:
        one, inputs = made(own, "tiny")
        other = randomize(twins.TinyModel(twins.TinyConfig())).eval()
        for stock in (one, other):
            model = hf_posenc.patch(stock, "rope")
            model.save_pretrained(tmp_path)
            again = AutoModel.from_pretrained(tmp_path)
            assert type(again) is type(model) and isinstance(again, type(stock))
            for twin in (again, pickle.loads(pickle.dumps(model))):
                assert torch.equal(twin(**inputs)[0], model(**inputs)[0])
        with pytest.raises(AttributeError, match="TinyModel is defined in my_models and in my_twins"):
            _ = hf_posenc.PosEncTinyModel
    finally:
        sys.modules.pop("my_twins")


class OwnLlamaConfig(LlamaConfig):
    model_type = "own-llama"


class OwnLlamaAttention(LlamaAttention):
    """LlamaAttention in another module than the eager function that its forward uses."""


class OwnLlamaModel(LlamaModel):
    """Calls post_init twice, and replaces modules in between."""

    config_class = OwnLlamaConfig

    def __init__(self, config):
        super().__init__(config)
        for number, layer in enumerate(self.layers):
            layer.self_attn = OwnLlamaAttention(config, number)
        self.post_init()


class OwnLlamaForCausalLM(LlamaForCausalLM):
    config_class = OwnLlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnLlamaModel(config)
        self.post_init()


@pytest.mark.parametrize("encoding", ["rope", "sinusoidal+alibi"])
@torch.no_grad()
def test_a_subclass_of_a_model_of_transformers(encoding, tmp_path):
    """The model has grouped queries and a cache. The Auto classes don't know it."""
    stock = randomize(OwnLlamaForCausalLM(OwnLlamaConfig(vocab_size=61, **LLAMA))).eval()
    model, ids = hf_posenc.patch(stock, encoding), tokens(2, 12)
    full = model(ids).logits
    assert_apart(full, hf_posenc.patch(stock, "none")(ids).logits)
    assert_close(in_pieces(model, ids, (7, 8), None, DynamicCache(config=model.config)), full)
    model.set_attn_implementation("eager")
    assert_close(model(ids).logits, full)
    model.save_pretrained(tmp_path)
    assert torch.equal(hf_posenc.PosEncOwnLlamaForCausalLM.from_pretrained(tmp_path)(ids).logits, full)
    base = hf_posenc.PosEncOwnLlamaModel.from_pretrained(tmp_path)
    assert_close(base(ids)[0] @ model.lm_head.weight.T, full)
    back = hf_posenc.unpatch(model)
    back.set_attn_implementation("sdpa")
    assert torch.equal(back(ids).logits, stock(ids).logits)
    if encoding == "rope":
        assert_close(full, stock(ids).logits)  # its own theta


class ManyChoicesModel(LlamaModel):
    """A model with arguments that its config doesn't record."""

    config_class, built = OwnLlamaConfig, 0

    def __init__(self, config, a=True, b=True, c=True, d=True, e=True, f=True, g=False, h=False, i=False, j=False):
        super().__init__(config)
        type(self).built += 1
        if g:
            self.added = nn.Linear(4, 4)
        if h:
            self.second = nn.Linear(4, 4)
        self.post_init()


def test_init_arguments_are_found_in_few_trials():
    config = OwnLlamaConfig(vocab_size=61, **LLAMA)
    assert "added" in dict(hf_posenc.patch(ManyChoicesModel(config, g=True), "alibi").named_modules())
    assert {"added", "second"} <= {*dict(hf_posenc.patch(ManyChoicesModel(config, g=True, h=True), "alibi").named_modules())}
    model = ManyChoicesModel(config)
    model.other, before = nn.Linear(4, 4), ManyChoicesModel.built
    with pytest.raises(ValueError, match="other"):
        hf_posenc.patch(model, "alibi")
    assert ManyChoicesModel.built - before < 100


class Angles(nn.Module):
    """Rotary positions in another format than that of Transformers."""

    def forward(self, length):
        angles = torch.arange(length)[:, None] / 100 ** (torch.arange(4) / 4)
        return angles.cos(), angles.sin()


def unturned(answer):
    cos, sin = answer
    return cos * 0 + 1, sin * 0


def turning(own):
    """A model with such positions and custom attention code."""
    tiny = own["my_models"]

    class TurningAttention(tiny.TinyAttention):
        def forward(self, hidden_states, angles):
            q, k, v = self.qkv(hidden_states).unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
            (cos, sin), turned = angles, []
            for states in (q, k):
                a, b = states.chunk(2, dim=-1)
                turned.append(torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1))
            q, k = turned
            return self.out(((q * 0.5 @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(-2))

    class TurningConfig(tiny.TinyConfig):
        model_type = "turning"

    class TurningModel(tiny.PreTrainedModel):
        config_class = TurningConfig

        def __init__(self, config):
            super().__init__(config)
            self.embed_tokens = nn.Embedding(61, 32)
            self.angles = Angles()
            self.layers = nn.ModuleList([nn.ModuleDict({"attention": TurningAttention(config)}) for _ in range(2)])
            self.post_init()

        def get_input_embeddings(self):
            return self.embed_tokens

        def forward(self, input_ids):
            states = self.embed_tokens(input_ids)
            for layer in self.layers:
                states = states + layer["attention"](states, self.angles(input_ids.shape[1]))
            return (states,)

    return TurningModel, TurningConfig, TurningAttention


@torch.no_grad()
def test_a_module_of_another_form(own, kept):
    cls, config, attention = turning(own)
    stock = randomize(cls(config())).eval()
    with pytest.raises(hf_posenc.UnsupportedModelError):
        hf_posenc.patch(stock, "rope")
    hf_posenc.register_attention(attention, scaling=1.0)
    with pytest.raises(hf_posenc.UnsupportedModelError, match="no known.*for layers.*custom_model.md") as refused:
        hf_posenc.patch(stock, "rope")
    error = refused.value
    assert error.message in str(error) and str(error).endswith(error.remedy) and len(error.message) < len(str(error)) / 2
    hf_posenc.register_positions(cls, "angles", disabled_output=unturned)
    ids = tokens(2, 9)
    without = hf_posenc.patch(stock, "none")
    assert_close(without(ids)[0].flip(1), without(ids.flip(1))[0])
    assert_apart(stock(ids)[0].flip(1), stock(ids.flip(1))[0])
    # An encoding of hf-posenc with the same rotation gives the original output.
    assert_close(hf_posenc.patch(stock, "rope", theta=100.0)(ids)[0], stock(ids)[0])


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@pytest.mark.parametrize("follows", [True, False])
@torch.no_grad()
def test_the_rows_of_a_registered_tensor_are_a_limit(kind, follows, own, kept, tmp_path):
    """The original code adds a disabled tensor as zeros of its shape, so it limits the length with every encoding."""
    other = own["my_others"]

    class Rows(other.OtherModel):
        def __init__(self, config):
            super().__init__(config)
            rows = torch.zeros(1, config.max_position_embeddings if follows else 20, config.hidden_size)
            del self.where
            if kind == "parameter":
                self.where = nn.Parameter(rows)
            else:
                self.register_buffer("where", rows)

    stock = randomize(Rows(other.OtherConfig())).eval()
    limit = stock.config.max_position_embeddings if follows else 20
    model = hf_posenc.patch(stock, "alibi")
    for report in (hf_posenc.inspect(stock), hf_posenc.inspect(model)):
        assert report.max_length == limit and f"{limit} tokens" in str(report)
    assert model(tokens(2, limit))[0].shape[1] == limit
    with pytest.raises(ValueError, match=f"{limit + 1} tokens is longer than max_length={limit}"):
        model(tokens(2, limit + 1))
    model.save_pretrained(tmp_path)
    assert hf_posenc.inspect(type(model).from_pretrained(tmp_path)).max_length == limit
    if follows:
        for longer in (hf_posenc.extend(model, 100), hf_posenc.patch(stock, "alibi", max_length=100)):
            assert_close(longer(tokens(2, 9))[0], model(tokens(2, 9))[0])
            assert longer(tokens(2, 100))[0].shape[1] == hf_posenc.inspect(longer).max_length == 100
    else:
        assert hf_posenc.patch(stock, "alibi", max_length=20).config.max_position_embeddings == 20
        for call in (lambda: hf_posenc.extend(model, 100), lambda: hf_posenc.patch(stock, "alibi", max_length=100)):
            with pytest.raises(ValueError, match="max_length=100 is above 20.*Rows"):
                call()
    assert hf_posenc.unpatch(model).config.max_position_embeddings == stock.config.max_position_embeddings
    assert hf_posenc.inspect(hf_posenc.patch(made(own, "tiny")[0], "alibi")).max_length is None


def test_what_is_said_wrongly(own, kept):
    cls, config, attention = turning(own)
    for call in (
        lambda: hf_posenc.register_positions(BertModel, "embeddings.position_embeddings"),
        lambda: hf_posenc.register_attention(BertModel),
    ):
        with pytest.raises(ValueError, match="BertModel is.*of Transformers"):
            call()
    with pytest.raises(ValueError, match="subclass of PreTrainedModel"):
        hf_posenc.register_positions(attention, "angles")
    with pytest.raises(ValueError, match="subclass of torch.nn.Module"):
        hf_posenc.register_attention("attention")
    hf_posenc.register_attention(attention)
    for path, disabled_output, what in (("angels", None, "nothing"), ("angles", None, "a Angles"), ("embed_tokens", len, "")):
        hf_posenc.register_positions(cls, path, disabled_output=disabled_output)
        if what:
            with pytest.raises(hf_posenc.UnsupportedModelError, match=f"refers to {what} in this TurningModel"):
                hf_posenc.patch(cls(config()), "rope")
        from hf_posenc.architectures.components import registered

        registered.DECLARED.clear()


def test_what_a_class_lacks(own, kept):
    tiny = own["my_models"]

    class Unfinished(tiny.TinyModel):
        def __init__(self, config):
            tiny.PreTrainedModel.__init__(self, config)
            self.embed_tokens, self.position_embeddings = nn.Embedding(61, 32), nn.Embedding(24, 32)
            self.layers = nn.ModuleList([tiny.TinyLayer(config)])

    class Borrowed(tiny.TinyModel):
        config_class = BertConfig

    class Deaf(tiny.TinyModel):
        def __init__(self, config):
            super().__init__(config)
            self.layers[0].attention.__class__ = DeafAttention

    class DeafAttention(tiny.TinyAttention):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            tiny.ALL_ATTENTION_FUNCTIONS["sdpa"]

    class NamelessConfig(tiny.TinyConfig):
        model_type = ""

    class SizelessConfig(tiny.TinyConfig):
        model_type = "sizeless"
        num_attention_heads: None = None

    with pytest.raises(ValueError, match="Unfinished.__init__ doesn't end with self.post_init"):
        hf_posenc.patch(Unfinished(tiny.TinyConfig()), "rope")
    with pytest.raises(ValueError, match="Borrowed.*BertConfig.*bert"):
        hf_posenc.patch(Borrowed(BertConfig(hidden_size=32, num_attention_heads=4)), "rope")
    with pytest.raises(hf_posenc.UnsupportedModelError, match=r"DeafAttention.*self\.config\._attn_implementation"):
        hf_posenc.patch(Deaf(tiny.TinyConfig()), "rope")
    nameless = tiny.TinyModel(tiny.TinyConfig())
    nameless.config.__class__ = NamelessConfig
    with pytest.raises(ValueError, match="Auto"):
        hf_posenc.patch(nameless, "rope")
    sizeless = tiny.TinyModel(tiny.TinyConfig())
    sizeless.config = SizelessConfig()
    with pytest.raises(ValueError, match="SizelessConfig has no num_attention_heads"):
        hf_posenc.patch(sizeless, "rope")
