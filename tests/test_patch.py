"""Properties of a model that `patch` keeps and `unpatch` restores."""

import copy
import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from transformers import AutoModel, EncoderDecoderModel

import hf_posenc
from closeness import assert_equal
from models import ALL_WAYS, HOSTS, LENGTH, VOCABULARY, first, patched, randomize, randomize_encoding, stock, tiny, tokens

every_host = pytest.mark.parametrize("host", HOSTS)


def test_threads_start_alike_and_leave_torch_as_it_was():
    model, function, state = stock("bert"), torch.linspace, torch.get_rng_state()
    expected = hf_posenc.patch(model, "relative").state_dict()
    with ThreadPoolExecutor(2) as pool:
        patched = list(pool.map(lambda _: hf_posenc.patch(model, "relative"), range(24)))
    for each in patched:
        assert_equal(each.state_dict(), expected)
    assert torch.linspace is function and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("host", ["dinov3", "llama", "modernbert", "EomtDinov3ForUniversalSegmentation"])
def test_a_model_on_another_device_than_the_default(host):
    """Positions are found with inputs on the model's device."""
    model = tiny(host) if host.startswith("Eomt") else stock(host)
    expected = hf_posenc.patch(model, "alibi")
    with torch.device("meta"):
        patched = hf_posenc.patch(model, "alibi")
    assert_equal(patched.state_dict(), expected.state_dict())
    assert {tensor.device for tensor in (*patched.parameters(), *patched.buffers())} == {torch.device("cpu")}


def test_resized_and_dropped_out_models_carry_over():
    model = stock("bert", "ForMaskedLM")
    model.resize_token_embeddings(70)
    model.bert.embeddings.dropout.p = 0.77
    new = hf_posenc.patch(model, "alibi")
    assert new.get_input_embeddings().weight.shape[0] == 70 and new.bert.embeddings.dropout.p == 0.77


@every_host
def test_unpatch_after_training_restores_the_positions(host, tmp_path):
    model = patched(host, "alibi", HOSTS[host].head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "trained")
    for trained in (model.eval(), AutoModel.from_pretrained(tmp_path / "trained")):
        again = hf_posenc.unpatch(trained)
        old = stock(host, HOSTS[host].head).base_model
        for name in HOSTS[host].tables:
            assert torch.equal(again.base_model.get_parameter(name), old.get_parameter(name))


def test_without_kept_positions_unpatch_names_the_base(in_the_hubs_cache):
    model = stock("bert")
    model.name_or_path = model.config.name_or_path = in_the_hubs_cache
    new = hf_posenc.patch(model, "alibi", keep_original=False)
    assert not any("host" in name for name in new.state_dict())
    with pytest.raises(ValueError, match="somebody/base"):
        hf_posenc.unpatch(new)
    with pytest.raises(ValueError, match="patched"):
        hf_posenc.unpatch(model)


def test_max_length_is_undone():
    again = hf_posenc.unpatch(hf_posenc.patch(stock("gpt2"), "alibi", max_length=99))
    assert again.config.n_positions == LENGTH and again.wpe.num_embeddings == LENGTH


def test_kept_positions_are_not_trained_and_not_shared():
    model = stock("bert")
    new = hf_posenc.patch(model, "alibi")
    kept = dict(new.named_buffers())["posenc.original.embeddings.position_embeddings.weight"]
    table = model.embeddings.position_embeddings.weight
    assert torch.equal(kept, table) and kept.data_ptr() != table.data_ptr() and not kept.requires_grad


def test_distilbert_fills_a_sinusoidal_table_of_its_own():
    model = stock("distilbert", sinusoidal_pos_embds=True)
    new = hf_posenc.patch(model, "alibi")
    assert torch.equal(first(hf_posenc.unpatch(new)(tokens())), first(model(tokens())))
    assert first(AutoModel.from_config(new.config)(tokens())).isfinite().all()


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_a_table_that_is_not_used_is_not_resized(head):
    model = hf_posenc.patch(stock("distilbert", head), "alibi")
    expected = first(model(tokens()))
    with pytest.raises(ValueError, match="has the 'alibi' encoding.*extend.model, max_length=64"):
        model.resize_position_embeddings(64)
    assert torch.equal(first(model(tokens())), expected)


@pytest.mark.parametrize("max_length", [64, 7])
@pytest.mark.parametrize("host", [name for name, host in HOSTS.items() if host.tables])
def test_buffers_of_another_length(host, max_length):
    """Buffers of ids and token types are as long as the table, also after `unpatch`."""
    original = stock(host)
    model = hf_posenc.patch(original, "sinusoidal", max_length=max_length)
    for changed, expected in ((model, None), (hf_posenc.unpatch(model), original)):
        for name, buffer in changed.named_buffers():
            if name.endswith("position_ids"):
                assert torch.equal(buffer.flatten(), torch.arange(buffer.shape[-1]))
            elif name.endswith("token_type_ids"):
                assert not buffer.any()
            assert not buffer.is_meta
        if expected is not None:
            assert {name: b.shape for name, b in changed.named_buffers()} == {
                name: b.shape for name, b in expected.named_buffers()
            }
            assert torch.equal(first(changed(tokens())), first(expected(tokens())))


@pytest.mark.parametrize("change", [lambda model: model, hf_posenc.unpatch, lambda model: hf_posenc.extend(model, None)])
def test_a_model_made_of_patched_ones_keeps_their_weights(change):
    """Transformers initializes all modules of a new model that aren't marked as initialized."""
    more = {"is_decoder": True, "add_cross_attention": True}
    parts = [change(patched("bert", "relative", max_length=LENGTH)), change(patched("bert", ALL_WAYS, "LMHeadModel", **more))]
    expected = [{name: value.clone() for name, value in part.state_dict().items()} for part in parts]
    model = EncoderDecoderModel(encoder=parts[0], decoder=parts[1])
    assert_equal(model.encoder.state_dict(), expected[0])
    assert_equal(model.decoder.state_dict(), expected[1])


@pytest.mark.parametrize("way", ["from its config", "meta device"])
def test_kept_positions_of_a_model_made_anew(way):
    """They hold initial values, as the original table would."""
    config = hf_posenc.patch(stock("bert"), "alibi").config
    if way == "from its config":
        model = AutoModel.from_config(config)
    else:
        with torch.device("meta"):
            model = AutoModel.from_config(config)
        model.to_empty(device="cpu").init_weights()
    table = model.get_buffer("posenc.original.embeddings.position_embeddings.weight")
    assert table.isfinite().all() and 0.01 < table.std() < 0.04


def test_a_frozen_model_stays_frozen():
    model = stock("bert")
    model.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in hf_posenc.unpatch(hf_posenc.patch(model, "alibi")).parameters())


SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
IMAGES = dict(image_size=16, patch_size=4)
BUILT = [
    ("BertModel", {"vocab_size": VOCABULARY}, {"add_pooling_layer": False}),
    ("ViTModel", IMAGES, {"use_mask_token": True}),
    ("ViTModel", IMAGES, {"use_mask_token": True, "add_pooling_layer": False}),
]


@pytest.mark.parametrize(("name", "sizes", "arguments"), BUILT)
@torch.no_grad()
def test_parts_that_the_config_does_not_tell(name, sizes, arguments, tmp_path):
    """Submodules that depend on `__init__` arguments are in all derived models, and reload as in the original model."""
    stock_class = getattr(transformers, name)
    model = randomize(stock_class(stock_class.config_class(**SMALL, **sizes), **arguments)).eval()
    given = {"pixel_values": torch.randn(1, 3, 16, 16)} if name == "ViTModel" else {"input_ids": tokens()}
    new = randomize_encoding(hf_posenc.patch(model, "alibi"))
    names = {key for key in new.state_dict() if "posenc" not in key}
    assert names == {key for key in model.state_dict() if "position_embeddings" not in key}
    assert_equal(first(hf_posenc.unpatch(new)(**given)), first(model(**given)))
    limited = hf_posenc.extend(hf_posenc.patch(model, "alibi", max_length=20), max_length=30)
    assert names <= limited.state_dict().keys()
    if name == "BertModel":
        assert_equal(first(hf_posenc.patch(model, "learned", init="host")(**given)), first(model(**given)))
        assert hf_posenc.extend(model, max_length=600, method="linear").state_dict().keys() == model.state_dict().keys()
    new.save_pretrained(tmp_path)
    again = type(new).from_pretrained(tmp_path, **arguments)
    assert torch.equal(first(again(**given)), first(new(**given))) and again.state_dict().keys() == new.state_dict().keys()
    model.save_pretrained(tmp_path / "stock")
    made = type(new).from_pretrained(tmp_path / "stock", position_encoding="alibi", **arguments)
    assert names <= made.state_dict().keys()
    assert type(new)(new.config, **arguments).state_dict().keys() == new.state_dict().keys()


def test_parts_that_were_added_or_taken_out():
    for change in (lambda model: model.add_module("extra", torch.nn.Linear(2, 2)), lambda model: model.encoder.layer.pop(1)):
        model = copy.deepcopy(stock("bert"))
        change(model)
        with pytest.raises(ValueError, match=r"(has extra|'encoder.layer.1).*replaced parts"):
            hf_posenc.patch(model, "alibi")


@pytest.mark.parametrize("name", ["BertModel", "ViTModel", "GPT2LMHeadModel", "BertConfig"])
def test_derived_classes_have_the_signatures_of_the_original(name):
    original, derived = getattr(transformers, name), getattr(hf_posenc, f"PosEnc{name}")
    for method in ("__init__", "forward") if "Model" in name else ("__init__",):
        expected = inspect.signature(getattr(original, method)).parameters
        found = inspect.signature(getattr(derived, method)).parameters
        assert [*expected] == [each for each in found if each not in ("position_encoding", "position_plan")]
        assert all(found[each] == expected[each] for each in expected)
    if "Model" in name:
        assert inspect.signature(derived) == inspect.signature(original)
