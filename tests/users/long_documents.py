"""A classifier of documents three times as long as its BERT reads: `FOLDER train`, then `FOLDER predict` elsewhere."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

import hf_posenc

FOLDER, STEP = Path(sys.argv[1]), sys.argv[2]
SIZES = dict(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
LENGTH, SIGN = 96, 39


def documents(count, seed):
    """Padded documents. Those of class 1 contain the sign, after the first 32 tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, SIGN, (count, LENGTH), generator=generator)
    labels = torch.arange(count) % 2
    ids[labels == 1, 40:48] = SIGN
    mask = torch.ones_like(ids)
    mask[::3, 60:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for step in range(40):
        optimizer.zero_grad()
        model(**documents(16, seed=step)).loss.backward()
        optimizer.step()
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(**documents(40, seed=1000)).logits


if STEP == "train":
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(**SIZES, max_position_embeddings=32)).save_pretrained(FOLDER / "short")
    for name in ("extended", "patched"):
        model = AutoModelForSequenceClassification.from_pretrained(FOLDER / "short")
        if name == "extended":
            model = hf_posenc.extend(model, max_length=LENGTH, method="cubic")
            assert type(model) is BertForSequenceClassification
        else:
            model = hf_posenc.patch(model, "alibi", max_length=LENGTH)
        train(model).save_pretrained(FOLDER / name)
        torch.save(logits(model), FOLDER / f"{name}.pt")
else:
    for name in ("extended", "patched"):
        model = AutoModelForSequenceClassification.from_pretrained(FOLDER / name)
        found = logits(model)
        assert torch.equal(found, torch.load(FOLDER / f"{name}.pt")), name
        right = found.argmax(-1) == documents(40, seed=1000)["labels"]
        assert right.float().mean() > 0.9, (name, right)
