"""A model with the encoding of window.py: `FOLDER save`, then `FOLDER load` and `FOLDER load_without_the_package` elsewhere."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

FOLDER, STEP = Path(sys.argv[1]), sys.argv[2]
SIZES = dict(vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(0))


def logits(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(ids).logits


if STEP == "save":
    import window

    import hf_posenc

    torch.manual_seed(0)
    model = hf_posenc.patch(BertForMaskedLM(BertConfig(**SIZES)), "window", width=3)
    assert isinstance(hf_posenc.list_encodings()["window"], type) and window.Window.width == 128
    changed = IDS.clone()
    changed[:, 8] = 1
    apart = (logits(model) - logits(model, changed)).abs().amax((0, 2)) > 0
    assert apart.tolist() == [5 <= place <= 11 for place in range(12)]  # one layer, three tokens to each side
    model.save_pretrained(FOLDER / "model")
    torch.save(logits(model), FOLDER / "logits.pt")
elif STEP == "load":
    import window

    import hf_posenc

    model = AutoModelForMaskedLM.from_pretrained(FOLDER / "model")
    assert torch.equal(logits(model), torch.load(FOLDER / "logits.pt"))
    assert type(hf_posenc.unpatch(model)) is BertForMaskedLM
else:
    sys.modules["hf_posenc"] = None  # isn't installed here
    sys.modules["window"] = None
    model = AutoModelForMaskedLM.from_pretrained(FOLDER / "model", trust_remote_code=True)
    assert torch.equal(logits(model), torch.load(FOLDER / "logits.pt"))
    model.save_pretrained(FOLDER / "again")
    again = AutoModelForMaskedLM.from_pretrained(FOLDER / "again", trust_remote_code=True)
    assert torch.equal(logits(again), torch.load(FOLDER / "logits.pt"))
    assert not any(name.startswith("hf_posenc.") for name in sys.modules)
