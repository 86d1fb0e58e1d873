"""The process in which `test_longer_hosts.py` loads extended models. Original classes load first, without hf_posenc."""

import sys
from pathlib import Path

import torch
from transformers import AutoModel

folder = Path(sys.argv[1])
alone, stretched = torch.load(folder / "expected.pt")
with torch.no_grad():
    for name, kind, inputs, expected in alone:
        model = AutoModel.from_pretrained(folder / name)
        assert type(model).__name__ == kind and torch.equal(model(**inputs)[0], expected), name
    assert "hf_posenc" not in sys.modules
    import hf_posenc

    for name, short, alike, long, expected in stretched:
        model = AutoModel.from_pretrained(folder / name)
        assert torch.equal(model(short)[0], alike) and torch.equal(model(long)[0], expected), name
        assert torch.equal(hf_posenc.unpatch(model)(short)[0], alike), name
        assert hf_posenc.inspect(model).options["trained_rows"] == short.shape[1], name
