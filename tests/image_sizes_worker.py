"""The process in which `test_image_sizes.py` loads models of another size. Original classes load first, without hf_posenc."""

import sys
from pathlib import Path

import torch
from transformers import AutoModel

folder = Path(sys.argv[1])
for name, kind, inputs, expected in torch.load(folder / "expected.pt"):
    if kind.startswith("PosEnc"):
        import hf_posenc  # noqa: F401
    else:
        assert "hf_posenc" not in sys.modules
    model = AutoModel.from_pretrained(folder / name)
    with torch.no_grad():
        assert type(model).__name__ == kind and torch.equal(model(**inputs)[0], expected), name
