"""Checkpoints of earlier versions of hf-posenc (tests/saved_checkpoints.py) load bit-identically."""

import json
import zipfile

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

from conftest import ROOT, run_python
from models import INSTALLED

SAVED = ROOT / "tests" / "saved"


KINDS = sorted(path.name for path in SAVED.iterdir())


HEADS = {
    "ForMaskedLM": AutoModelForMaskedLM,
    "ForCausalLM": AutoModelForCausalLM,
    "LMHeadModel": AutoModelForCausalLM,
    "ForSequenceClassification": AutoModelForSequenceClassification,
}


def load(folder, **options):
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    auto = next((auto for suffix, auto in HEADS.items() if name.endswith(suffix)), AutoModel)
    return auto.from_pretrained(folder, **options)


def check(folder, model):
    """Loaded weights and buffers are bit-identical to the saved ones. Outputs may differ by rounding between machines."""
    expected = load_file(folder / "expected.safetensors")
    output = expected.pop("output")
    inputs = {name: expected.pop(name) for name in [*expected] if "." not in name and name not in dict(model.named_buffers())}
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    for name, tensor in {**load_file(folder / "model.safetensors"), **expected}.items():
        name = name.replace("posenc.host.", "posenc.original.")
        assert torch.equal(state[name], tensor), name
    with torch.no_grad():
        found = model(**inputs)
    found = found if isinstance(found, torch.Tensor) else found.to_tuple()[0]
    torch.testing.assert_close(found, output, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "own"])
def test_checkpoints_of_earlier_versions_load_and_load_after_they_are_saved_again(kind, tmp_path):
    folder, model = tmp_path / kind, load(SAVED / kind)
    check(SAVED / kind, model)
    model.save_pretrained(folder)
    (folder / "expected.safetensors").write_bytes((SAVED / kind / "expected.safetensors").read_bytes())
    check(folder, load(folder))
    assert not any("posenc.host." in name for name in load_file(folder / "model.safetensors"))
    assert "host" not in AutoConfig.from_pretrained(folder).to_dict()["position_encoding"]


OWN = """
import sys
from pathlib import Path

import bare

bare.hide()
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM

for folder in (Path(sys.argv[1]), Path(sys.argv[1]) / "again"):
    model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    expected, weights = load_file(Path(sys.argv[1]) / "expected.safetensors"), load_file(folder / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
    with torch.no_grad():
        output = model(expected["input_ids"], expected["attention_mask"])[0]
    torch.testing.assert_close(output, expected["output"], rtol=1e-5, atol=1e-6)
    if folder.name != "again":
        model.save_pretrained(folder / "again")
"""


@pytest.mark.skipif(
    Version("5.23") > INSTALLED or Version(torch.__version__) < Version("2.13"), reason="that code refuses older versions"
)
def test_code_of_earlier_versions_runs(tmp_path):
    """The copy of the library and the user's encoding run in a process that can't import hf_posenc."""
    for path in (SAVED / "own").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with zipfile.ZipFile(tmp_path / "code.zip") as file:
        file.extractall(tmp_path)
    environment = {"PYTHONPATH": str(ROOT / "tests"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    run_python(OWN, tmp_path, fresh=True, **environment)
