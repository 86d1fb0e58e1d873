"""The real MiniLM-L6 (BERT, 22.7 M parameters, 512 learned positions), from its package."""

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import hf_posenc
from conftest import run_python
from models import CORE, ENCODINGS, first, slow, suits

TEXTS = ["A rose is a rose.", "The position of each word tells who bit whom: the dog the man, or the man the dog."]


@pytest.fixture(scope="module")
def model(minilm):
    return AutoModel.from_pretrained(minilm)


@pytest.fixture(scope="module")
def batch(minilm):
    return AutoTokenizer.from_pretrained(minilm)(TEXTS, padding=True, return_tensors="pt")


@pytest.mark.parametrize("encoding", [name if name in CORE else slow(name) for name in ENCODINGS if suits("bert", name)])
@torch.no_grad()
def test_patch_and_back(model, batch, encoding):
    expected = first(model(**batch))
    new = hf_posenc.patch(model, encoding)
    assert not torch.equal(first(new(**batch)), expected)
    assert torch.equal(first(hf_posenc.unpatch(new)(**batch)), expected)
    assert torch.equal(first(model(**batch)), expected)


@torch.no_grad()
def test_beyond_512_tokens(model):
    ids = torch.randint(1000, 2000, (1, 700), generator=torch.Generator().manual_seed(0))
    with pytest.raises((IndexError, RuntimeError)):
        model(ids)
    longer = hf_posenc.patch(model, "alibi", max_length=700)
    assert first(longer(ids)).isfinite().all()
    with pytest.raises(ValueError, match="701 tokens"):
        longer(torch.cat([ids, ids[:, :1]], dim=1))


@torch.no_grad()
def test_table_as_an_encoding_is_the_model_itself(model, batch, tmp_path):
    new, real = hf_posenc.patch(model, "learned", init="host"), batch["attention_mask"].bool()
    expected = first(model(**batch))
    assert torch.equal(first(new(**batch))[real], expected[real])
    new.save_pretrained(tmp_path)
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
