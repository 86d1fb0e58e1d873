"""The plan that patch writes into a config: what building and loading install by."""

import json

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BartConfig,
    BartForCausalLM,
    BartModel,
    BertModel,
    FalconConfig,
    FalconModel,
    GPTJConfig,
    GPTJModel,
    T5Config,
    T5EncoderModel,
    T5Model,
)

import hf_posenc
from hf_posenc.architectures import detection
from hf_posenc.architectures.structure import tokens_of
from hf_posenc.configuration import StackPlan
from models import HOSTS, first, patched, stock, tokens

BART = dict(d_model=16, vocab_size=20, max_position_embeddings=32, forced_eos_token_id=None) | {
    f"{stack}_{name}": 2 for stack in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")
}
T5 = dict(d_model=16, d_kv=4, num_heads=4, d_ff=16, num_layers=2, vocab_size=20, decoder_start_token_id=0)


def plans(model):
    return model.config.position_plan


def edited(folder, change):
    """A saved config with another plan."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["position_plan"] = change(config["position_plan"])
    path.write_text(json.dumps(config))


def test_what_a_plan_says():
    (plan,) = plans(patched("bert", "alibi"))
    assert plan["stack"] == "BertModel" and plan["path"] == "" and plan["attentions"] == ["encoder.layer.*.attention.self"]
    assert plan["components"] == [["PositionTable", "embeddings.position_embeddings"]] and "is_decoder" in plan["masks"]
    decoder, encoder = sorted(plans(hf_posenc.patch(T5Model(T5Config(**T5)), "alibi")), key=lambda plan: plan["path"])
    assert (encoder["path"], encoder.get("role")) == ("encoder", None) and (decoder["path"], decoder["role"]) == (
        "decoder",
    ) * 2
    assert decoder["cross_attentions"] == ["block.*.layer.*.EncDecAttention"] and "cross_attentions" not in encoder
    gptj = GPTJModel(GPTJConfig(n_embd=16, n_layer=2, n_head=2, rotary_dim=4, vocab_size=20, n_positions=32))
    (plan,) = plans(hf_posenc.patch(gptj, "alibi"))
    assert plan["components"] == [["SinusoidBuffer", "h.*.attn.embed_positions"]] and plan["custom_attentions"]


@pytest.mark.parametrize("host", HOSTS)
def test_loading_finds_nothing(host, tmp_path):
    model = patched(host, "shaw" if HOSTS[host].tables else "alibi", max_length=64)
    model.save_pretrained(tmp_path)
    expected = first(model(tokens()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detection, "find_all", lambda *_: pytest.fail("detected"))
        again = AutoModel.from_pretrained(tmp_path)
        assert torch.equal(first(again(tokens())), expected)
        assert plans(again) == plans(model)


def test_heads_share_a_plan(tmp_path):
    model = patched("bert", "alibi", "ForMaskedLM")
    model.save_pretrained(tmp_path / "head")
    model.base_model.save_pretrained(tmp_path / "bare")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detection, "find_all", lambda *_: pytest.fail("detected"))
        for folder in ("head", "bare"):
            for auto in (AutoModel, AutoModelForMaskedLM):
                loaded = auto.from_pretrained(tmp_path / folder).base_model
                assert torch.equal(first(loaded(tokens())), first(model.base_model(tokens())))


def test_a_model_with_fewer_stacks(tmp_path):
    model = hf_posenc.patch(BartModel(BartConfig(**BART)), "alibi", keep_original=False)
    model.save_pretrained(tmp_path)
    decoder = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "posenc" in decoder.model.decoder._modules and type(decoder).__name__ == "PosEncBartForCausalLM"
    model = hf_posenc.patch(T5Model(T5Config(**T5)).eval(), "alibi")
    model.save_pretrained(tmp_path)
    encoder = hf_posenc.PosEncT5EncoderModel.from_pretrained(tmp_path)
    ids = torch.arange(1, 7)[None]
    assert torch.equal(encoder(ids)[0], model.encoder(ids)[0]) and isinstance(encoder, T5EncoderModel)


def test_a_model_with_more_stacks_is_an_error(tmp_path):
    hf_posenc.patch(BartForCausalLM(BartConfig(**BART)), "alibi").save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"leaves out 'encoder.layers.0.self_attn': restore the config .* position_plan to None"
    ):
        hf_posenc.PosEncBartModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change, words",
    [
        (
            lambda plan: [{**plan[0], "attentions": ["encoder.layers.*.attention"]}],
            r"names 'encoder.layers.\*.attention', where",
        ),
        (
            lambda plan: [{**plan[0], "components": [["PositionTable", "embeddings.places"]]}],
            r"names 'embeddings.places', where .* no PositionTable",
        ),
        (lambda plan: [{**plan[0], "components": [["Tabel", "embeddings"]]}], r"names 'embeddings', where .* no Tabel"),
        (lambda plan: [{**plan[0], "stack": "GPT2Model"}], "describes a GPT2Model, which it does not have"),
        (
            lambda plan: [{**plan[0], "attentions": ["encoder.layer.0.attention.self"]}],
            "leaves out 'encoder.layer.1.attention.self'",
        ),
        (lambda plan: [{**plan[0], "components": [["PositionTable", "pooler"]]}], "names 'pooler', where .* no PositionTable"),
        (lambda plan: [{**plan[0], "components": [["LinearBias", "pooler.x"]]}], "names 'pooler.x', where .* no LinearBias"),
        (lambda plan: [{**plan[0], "attentions": ["pooler"]}], "names 'pooler', where .* no attention"),
        (lambda plan: plan * 20000, "more than 65536 values"),
        (lambda plan: [{"stack": "BertModel"}], "is written by patch and not to be edited"),
        (lambda plan: [{**plan[0], "windows": "yes"}], "position_plan.windows='yes': allowed is True or False"),
        (lambda plan: "all", "position_plan='all': allowed is a list"),
    ],
)
def test_a_plan_that_does_not_fit_names_the_module(change, words, tmp_path):
    patched("bert", "alibi").save_pretrained(tmp_path)
    edited(tmp_path, change)
    with pytest.raises(ValueError, match=words):
        AutoModel.from_pretrained(tmp_path)


def test_without_a_plan_the_parts_are_found_and_saved(tmp_path):
    model = patched("bert", "alibi")
    model.save_pretrained(tmp_path)
    edited(tmp_path, lambda plan: None)
    again = AutoModel.from_pretrained(tmp_path)
    assert plans(again) is None and torch.equal(first(again(tokens())), first(model(tokens())))
    again.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["position_plan"] == plans(model)


def test_a_config_saved_alone_gets_a_plan(tmp_path):
    config = hf_posenc.PosEncBertConfig(position_encoding="alibi", num_hidden_layers=1)
    assert config.position_plan is None
    config.save_pretrained(tmp_path)
    (plan,) = json.loads((tmp_path / "config.json").read_text())["position_plan"]
    assert StackPlan.parse(plan).attentions == ("encoder.layer.*.attention.self",)


def test_stock_models_have_none(tmp_path):
    model = hf_posenc.unpatch(patched("bert", "alibi"))
    assert not hasattr(model.config, "position_plan")
    model.save_pretrained(tmp_path)
    assert "position_plan" not in json.loads((tmp_path / "config.json").read_text())


def test_tokens_of_a_model_that_asks_a_part_it_does_not_have():
    class Asking(BertModel):
        def get_input_embeddings(self):
            return self.missing.get_input_embeddings()

    assert tokens_of(Asking(stock("bert").config)) is not None


def test_where_names_more_than_the_plan_has(tmp_path):
    hf_posenc.patch(BartModel(BartConfig(**BART)), "alibi", where=["encoder"]).save_pretrained(tmp_path)
    wider = {"type": "alibi", "where": ["encoder", "decoder"]}
    with pytest.raises(ValueError, match="position_plan has no 'decoder', which position_encoding"):
        hf_posenc.PosEncBartModel.from_pretrained(tmp_path, position_encoding=wider)


@pytest.mark.parametrize("alibi", [False, True])
def test_settings_that_choose_other_positions(alibi, tmp_path):
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20)
    model = hf_posenc.patch(FalconModel(FalconConfig(alibi=alibi, **sizes)).eval(), "alibi")
    assert ["alibi", alibi] in plans(model)[0]["settings"]
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="config.alibi is another than when config.position_plan was made"):
        AutoModel.from_pretrained(tmp_path, alibi=not alibi)
    again = AutoModel.from_pretrained(tmp_path, alibi=alibi)
    assert torch.equal(first(again(tokens() % 20)), first(model(tokens() % 20)))
