"""A checkpoint of Transformers 4.57 with `relative_key`, and the output that 4.57 gave: `FOLDER CHECKPOINT`."""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM

import hf_posenc

FOLDER, CHECKPOINT = Path(sys.argv[1]), Path(sys.argv[2])

kept = load_file(CHECKPOINT / "expected.safetensors")
inputs = {name.removeprefix("inputs."): tensor for name, tensor in kept.items() if name.startswith("inputs.")}
real = inputs["attention_mask"].bool()


@torch.no_grad()
def error(model):
    return (model.eval()(**inputs).logits - kept["relative_key.output"])[real].abs().max().item()


model = hf_posenc.from_v4(CHECKPOINT, AutoModelForMaskedLM)
assert error(model) < 1e-5
assert error(AutoModelForMaskedLM.from_pretrained(CHECKPOINT)) > 1e-2  # Transformers 5 ignores the setting
model.save_pretrained(FOLDER / "new")
new = AutoModelForMaskedLM.from_pretrained(FOLDER / "new")
assert new.config.position_encoding["type"] == "shaw" and error(new) < 1e-5
longer = hf_posenc.extend(new, max_length=40)
assert error(longer) < 1e-5
assert longer(torch.ones(1, 40, dtype=torch.long)).logits.shape[:2] == (1, 40)
