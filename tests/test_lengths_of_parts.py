"""Promises of length where a part of the model keeps the host's own positions, or reads its table's rows."""

import pytest
import torch
from transformers import AutoModel

import hf_posenc
from tools.hosts import tiny


@pytest.fixture(scope="module")
def bart():
    return tiny.build("bart")


def ids(length):
    return torch.randint(3, 61, (1, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("max_length", [12, 128])
@torch.no_grad()
def test_a_length_of_the_encoder_alone(bart, max_length, tmp_path):
    model = hf_posenc.patch(bart, "alibi", where="encoder", max_length=max_length)
    assert model.config.max_position_embeddings == bart.config.max_position_embeddings
    inputs = {"input_ids": ids(max_length), "decoder_input_ids": ids(7)}
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModel.from_pretrained(tmp_path)(**inputs)[0], model(**inputs)[0])
    with pytest.raises(ValueError, match=f"max_length={max_length}"):
        model(input_ids=ids(max_length + 1), decoder_input_ids=ids(7))
    stock = hf_posenc.unpatch(model)
    assert stock.config.max_position_embeddings == bart.config.max_position_embeddings
    longer = hf_posenc.extend(model, max_length=200)
    assert longer(input_ids=ids(200), decoder_input_ids=ids(7))[0].isfinite().all()


@pytest.mark.parametrize("max_length", [None, 64])
@torch.no_grad()
def test_a_part_of_clip_reads_longer_texts(max_length):
    stock = tiny.build("clip")
    model = hf_posenc.patch(stock, "alibi", submodel="text_model", max_length=max_length)
    alone = hf_posenc.patch(stock.text_model, "alibi", max_length=64)
    text = ids(40)
    assert torch.equal(model.text_model(input_ids=text)[0], alone(input_ids=text)[0])


@pytest.mark.parametrize("where", [{"encoder": "rope", "decoder": "alibi"}, {"encoder": "rope", "cross": None}])
def test_an_encoding_that_would_act_nowhere(bart, where):
    with pytest.raises(ValueError, match=r"acts nowhere|None is no encoding"):
        hf_posenc.patch(bart, "shaw", where=where)
    assert hf_posenc.inspect(hf_posenc.patch(bart, "shaw", where={"encoder": {}, "decoder": "alibi"}))
