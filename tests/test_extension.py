"""`extend`: longer inputs for a patched model, without loss of its training."""

import pytest
import torch
from torch import nn
from transformers import AutoModel

import hf_posenc
from closeness import assert_equal
from hf_posenc.encodings import PositionEncoding
from models import ALL_WAYS, HOSTS, LENGTH, by_structure, first, patched, randomize_encoding, stock, tokens
from reloading import keep, reload

FURTHER = LENGTH + 60


def tensors(model):
    """Name -> parameter or buffer, including those that aren't saved."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


@pytest.mark.parametrize("host", by_structure(HOSTS))
def test_a_longer_promise(host):
    model = patched(host, ALL_WAYS, HOSTS[host].head, max_length=LENGTH)
    before, config = first(model(tokens(length=LENGTH))), model.config.to_dict()
    longer = hf_posenc.extend(model, FURTHER)
    assert type(longer) is type(model) and not any(module.training for module in longer.modules())
    theirs, ours = tensors(model), tensors(longer)
    assert all(ours[name] is value for name, value in theirs.items() if "posenc" in name.split("."))
    assert all(value is dict(model.named_parameters())[name] for name, value in longer.named_parameters())
    length_field = longer.config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    spec, rows = {**config["position_encoding"], "max_length": FURTHER}, FURTHER + HOSTS[host].offset
    assert longer.config.to_dict() == {**config, "position_encoding": spec, length_field: rows}
    assert model.config.to_dict() == config
    assert hf_posenc.inspect(longer).max_length == FURTHER
    assert_equal(first(longer(tokens(length=LENGTH))), before)
    assert first(longer(tokens(length=FURTHER))).isfinite().all()
    for each, length in (model, LENGTH), (longer, FURTHER):
        with pytest.raises(ValueError, match=rf"max_length={length} .*hf_posenc\.extend\(model, max_length"):
            each(tokens(length=length + 1))
    back = hf_posenc.unpatch(longer)
    assert back.config.to_dict() == stock(host, HOSTS[host].head).config.to_dict()
    assert_equal(first(back(tokens())), first(stock(host, HOSTS[host].head)(tokens())))
    with torch.no_grad():
        longer.base_model.posenc.relative.weight += 1
    assert torch.equal(longer.base_model.posenc.relative.weight, model.base_model.posenc.relative.weight)


def test_saved_and_reloaded(tmp_path):
    for host in ("roberta", "llama"):
        longer = hf_posenc.extend(patched(host, "sinusoidal+shaw", max_length=LENGTH), FURTHER)
        keep(tmp_path / host, longer, stock(host), tokens(length=FURTHER), short=tokens())
    reload(tmp_path)


@pytest.mark.parametrize("host", ["bert", "roberta", "gpt2"])
def test_no_limit(host):
    limited = patched(host, "t5", max_length=FURTHER)
    free = hf_posenc.extend(limited, None)
    twin = randomize_encoding(hf_posenc.patch(stock(host), "t5"))
    assert free.config.to_dict() == twin.config.to_dict()
    assert free.config.max_position_embeddings == twin.config.max_position_embeddings == LENGTH + HOSTS[host].offset
    assert hf_posenc.inspect(free).max_length is None
    assert_equal(first(free(tokens(length=FURTHER + 30))), first(twin(tokens(length=FURTHER + 30))))
    assert hf_posenc.inspect(hf_posenc.extend(free, None)).max_length is None


def test_from_scratch():
    config = hf_posenc.PosEncBertConfig(
        position_encoding={"type": "relative", "max_length": 9}, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=48, vocab_size=70,
    )  # fmt: skip
    model = hf_posenc.PosEncBertModel(config).eval()
    longer = hf_posenc.extend(model, 700)
    assert longer.config.max_position_embeddings == 700 and first(longer(tokens(length=700))).isfinite().all()
    assert hf_posenc.inspect(hf_posenc.extend(model, None)).max_length is None


def test_what_else_carries_over():
    model = patched("gpt2", "relative+alibi", "LMHeadModel", max_length=LENGTH)
    model.train().generation_config.max_new_tokens, model.transformer.drop.p = 7, 0.25
    model.transformer.posenc.relative.weight.requires_grad_(False)
    model.name_or_path = "somebody/base"
    longer = hf_posenc.extend(model, FURTHER)
    assert longer.generation_config.max_new_tokens == 7 and longer.generation_config is not model.generation_config
    assert (
        longer.transformer.drop.p == 0.25
        and longer.transformer.posenc.alibi.training
        and longer.name_or_path == "somebody/base"
    )
    assert not longer.transformer.posenc.relative.weight.requires_grad
    assert longer.lm_head.weight is longer.transformer.wte.weight is model.lm_head.weight


def test_a_layer():
    layer = hf_posenc.PositionEmbedding("sinusoidal", 8, scale="learned", max_length=5, dropout=0.5).eval()
    inputs = torch.randn(1, 9, 8)
    with pytest.raises(ValueError, match=r"9 positions are more than max_length=5.*hf_posenc\.extend\(layer, max_length"):
        layer(inputs)
    for length in (9, None):
        longer = hf_posenc.extend(layer, length)
        assert longer.posenc.factor is layer.posenc.factor and longer.config.max_length == length
        assert not longer.training and longer.dropout.p == 0.5 and layer.config.max_length == 5
        assert_equal(longer(inputs)[:, :5], layer(inputs[:, :5]))
    tables = hf_posenc.TokenPositionEmbedding(70, "sinusoidal", 8, max_length=5)
    assert hf_posenc.extend(tables, 11)(tokens()).shape == (2, 11, 8) and tables.positions.config.max_length == 5
    with pytest.raises(ValueError, match=r"max_length.*hf_posenc\.extend\(layer, max_length=…, method=…\)"):
        hf_posenc.PositionEmbedding("learned", 8, max_length=5)(inputs)
    with pytest.raises(ValueError, match="learned.*max_length"):
        hf_posenc.extend(hf_posenc.PositionEmbedding("learned", 8, max_length=5), 9)
    for argument in ({"where": "encoder"}, {"submodel": "text_model"}):
        for each in (layer, tables):
            with pytest.raises(ValueError, match=next(iter(argument.values()))):
                hf_posenc.extend(each, 11, **argument)


@pytest.mark.parametrize(
    ("host", "encoding", "remedy"),
    [
        ("bert", "learned", "extends a table: 'linear'"),
        ("bert", "alibi+learned", "extends a table"),
        ("gpt2", "normalized", "train again"),
    ],
)
def test_positions_made_for_their_length(host, encoding, remedy):
    """A learned table and fractions of the length have no maximum length that `extend` can raise."""
    model = patched(host, encoding)
    for length in (FURTHER, None):
        with pytest.raises(ValueError, match=f"'{encoding.rpartition('+')[2]}'.*max_length.*{remedy}"):
            hf_posenc.extend(model, length)
    with pytest.raises(ValueError, match=r"hf_posenc\.extend\(model, max_length, method=…\)"):
        model(tokens(length=FURTHER))


def test_an_encoding_of_ones_own_loses_nothing(own_registry):
    """Tensors are kept if they fit. Otherwise, `extend` raises an error: it neither reinitializes nor omits them."""

    class Sized(PositionEncoding, type="sized"):
        by: str = "rows"

        def __init__(self, geometry, **options):
            super().__init__(geometry, **options)
            rows = geometry.max_length or 1
            if self.by == "rows":
                self.weight = nn.Parameter(torch.zeros(rows))
            elif self.by == "buffer":
                self.register_buffer("steps", torch.arange(rows), persistent=False)
            elif self.by == "module":
                self.parts = nn.ModuleList(nn.Linear(1, 1) for _ in range(rows))
            elif self.by == "limit" and geometry.max_length is not None:
                self.weight = nn.Parameter(torch.zeros(1))
            elif self.by == "nothing":
                self.parts = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))

        def distance_bias(self, distance):
            return distance.float()[None]

    for by, length in (("rows", FURTHER), ("buffer", FURTHER), ("module", FURTHER), ("limit", None)):
        with pytest.raises(ValueError, match="sized.*max_length"):
            hf_posenc.extend(hf_posenc.patch(stock("bert"), "sized", by=by, max_length=LENGTH), length)
    model = hf_posenc.patch(stock("bert"), "sized", by="nothing", max_length=LENGTH)
    assert hf_posenc.extend(model, FURTHER).posenc.parts[1].weight is model.posenc.parts[1].weight


@pytest.mark.parametrize(
    ("model", "length", "words"),
    [
        (lambda: stock("bert"), 99, r"BertModel.*hf_posenc\.patch.*alibi"),
        (lambda: stock("llama"), 99, "LlamaModel"),
        (
            lambda: patched("bert", "alibi", max_length=9),
            8,
            "max_length=8",
        ),
        (lambda: patched("bert", "alibi"), 9, "max_length=9.*no length limit"),
        (lambda: patched("bert", "alibi", max_length=9), 0, "max_length=0 .*integer above 0 or None"),
        (lambda: patched("bert", "alibi", max_length=9), "10", "max_length='10' isn't valid"),
        (lambda: patched("bert", "alibi", max_length=9), 2**25, "max_length=33554432 isn't valid"),
        (
            lambda: hf_posenc.PositionEmbedding("sinusoidal", 8, scale="learned", max_length=5).to("meta"),
            9,
            "on the meta device",
        ),
        (lambda: nn.Linear(1, 1), 9, "Linear.*PreTrainedModel.*extend first"),
    ],
)
def test_refused(model, length, words):
    with pytest.raises(ValueError, match=words):
        hf_posenc.extend(model(), length)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_sentence_transformer(minilm):
    from sentence_transformers import SentenceTransformer

    model = hf_posenc.patch(SentenceTransformer(minilm, device="cpu"), "relative", max_length=600)
    longer = hf_posenc.extend(model, 1024)
    assert type(longer) is SentenceTransformer and longer[0].model.posenc.weight is model[0].model.posenc.weight
    assert longer.max_seq_length == longer.tokenizer.model_max_length == 1024 and model.max_seq_length == 600


class Damped(hf_posenc.PositionEncoding, type="test-damped"):
    """A bias by distance as a fraction of the maximum length, which is in a non-persistent buffer."""

    def __init__(self, geometry, **options):
        super().__init__(geometry, **options)
        self.slope = torch.nn.Parameter(torch.linspace(0.5, 2.0, geometry.num_attention_heads))
        self.register_buffer("longest", torch.tensor(float(geometry.max_length or 100)), persistent=False)

    def distance_bias(self, distance):
        return -self.slope[:, None] * distance.abs() / self.longest


@pytest.mark.filterwarnings("ignore:.*saved without its code:UserWarning")
@pytest.mark.slow
def test_what_is_not_saved_follows_the_length(tmp_path):
    """Values that aren't saved are as they will be after loading. Saved values stay the same objects."""
    model = hf_posenc.patch(stock("bert"), "test-damped", max_length=16)
    longer = hf_posenc.extend(model, 50)
    assert longer.posenc.longest == 50 and model.posenc.longest == 16 and longer.posenc.slope is model.posenc.slope
    longer.save_pretrained(tmp_path)
    assert torch.equal(first(AutoModel.from_pretrained(tmp_path)(tokens())), first(longer(tokens())))
