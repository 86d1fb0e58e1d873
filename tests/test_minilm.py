"""The real MiniLM-L6 (BERT, 22.7 M parameters, 512 learned positions), from its package."""

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import hf_posenc
from models import first

TEXTS = ["A rose is a rose.", "The position of each word tells who bit whom: the dog the man, or the man the dog."]


@torch.no_grad()
def test_minilm(minilm, tmp_path):
    """MiniLM's own table as an encoding changes nothing, also after loading. Another encoding accepts inputs that are too long
    for the table.
    """
    model = AutoModel.from_pretrained(minilm)
    batch = AutoTokenizer.from_pretrained(minilm)(TEXTS, padding=True, return_tensors="pt")
    real, expected = batch["attention_mask"].bool(), first(model(**batch))
    itself = hf_posenc.patch(model, "learned", init="host")
    itself.save_pretrained(tmp_path)
    for each in (itself, AutoModel.from_pretrained(tmp_path)):
        assert torch.equal(first(each(**batch))[real], expected[real])
        assert torch.equal(first(hf_posenc.unpatch(each)(**batch)), expected)
    new = hf_posenc.patch(model, "alibi", max_length=700)
    assert not torch.equal(first(new(**batch)), expected) and torch.equal(first(model(**batch)), expected)
    assert torch.equal(first(hf_posenc.unpatch(new)(**batch)), expected)
    ids = torch.randint(1000, 2000, (1, 701), generator=torch.Generator().manual_seed(0))
    with pytest.raises((IndexError, RuntimeError)):
        model(ids)
    assert first(new(ids[:, :700])).isfinite().all()
    with pytest.raises(ValueError, match="701 tokens"):
        new(ids)
