"""A model saved over another one, in one file over several and the reverse: `FOLDER save`, then `FOLDER load` elsewhere."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModel, BertConfig, BertModel

import hf_posenc

FOLDER, STEP = Path(sys.argv[1]), sys.argv[2]
SIZES = dict(vocab_size=40, num_attention_heads=2, intermediate_size=64)
IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(0))
SHARDED = {"max_shard_size": "20KB"}
CASES = {"single_over_sharded": (SHARDED, {}), "sharded_over_single": ({}, SHARDED), "smaller": (SHARDED, SHARDED)}


def made(seed, encoding, layers, width):
    torch.manual_seed(seed)
    sizes = dict(SIZES, num_hidden_layers=layers, hidden_size=width)
    return hf_posenc.patch(BertModel(BertConfig(**sizes)), encoding).eval()


def output(model):
    with torch.no_grad():
        return model(IDS).last_hidden_state


if STEP == "save":
    for name, (before, after) in CASES.items():
        made(0, "learned+shaw", 3, 64).save_pretrained(FOLDER / name, **before)
        (FOLDER / name / "notes.txt").write_text("mine")
        model = made(1, "alibi", 2, 32)
        model.save_pretrained(FOLDER / name, **after)
        files = {path.name for path in (FOLDER / name).iterdir()}
        assert ("model.safetensors.index.json" in files) == ("model.safetensors" not in files) == bool(after), files
        assert (FOLDER / name / "notes.txt").read_text() == "mine"
        torch.save(output(model), FOLDER / f"{name}.pt")
else:
    for name in CASES:
        model = AutoModel.from_pretrained(FOLDER / name)
        assert type(model).__name__ == "PosEncBertModel" and model.config.position_encoding["type"] == "alibi"
        assert torch.equal(output(model), torch.load(FOLDER / f"{name}.pt")), name
        weights = {path.name for path in (FOLDER / name).glob("*.safetensors")}
        index = FOLDER / name / "model.safetensors.index.json"
        listed = {*json.loads(index.read_text())["weight_map"].values()} if index.exists() else {"model.safetensors"}
        assert weights == listed, weights ^ listed
