"""Several processes on a CPU (FSDP2, DDP, and distributed checkpoints), compared with one process with the same
global batch.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM

from distributed_worker import SAVED, STEPS, adamw, batch, build, load, train
from models import ENCODINGS, first, patched, slow, suits, tokens

TOLERANCE = dict(rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module", params=["learned+shaw", slow("relative"), slow("t5")])
def encoding(request):
    """Encodings with parameters."""
    return request.param


@pytest.fixture(scope="module")
def results(encoding, tmp_path_factory, launch):
    """A directory with a checkpoint and a saved model of two processes, and the results of two and three processes."""
    folder = tmp_path_factory.mktemp("distributed")
    codes, said = launch("distributed_worker", folder, encoding, processes=3)
    assert codes == [0, 0, 0], said[-4000:]
    return folder, json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def alone(encoding):
    """The results of one process, and the model that it trained."""
    model = build(encoding)
    return train(model, adamw(model), batch(), range(STEPS)), model.eval()


def test_two_processes_train_as_one(results, alone):
    trained, (expected, _) = results[1]["trained"], alone
    assert trained["processes"] == 2
    for found in (trained["fsdp"], trained["ddp"]):
        assert found["losses"] == pytest.approx(expected["losses"], **TOLERANCE)
        assert found["gradients"].keys() == expected["gradients"].keys() and found["gradients"]
        for name, norms in expected["gradients"].items():
            assert min(norms) > 0
            assert found["gradients"][name] == pytest.approx(norms, rel=1e-3), name


def test_a_sharded_model_reloads_in_an_ordinary_process(encoding, results, alone):
    model, folder = alone[1], results[0] / "model"
    reloaded = AutoModelForMaskedLM.from_pretrained(folder)
    name = type(reloaded).__name__
    assert json.loads((folder / "config.json").read_text())["architectures"] == [name] == ["PosEncBertForMaskedLM"]
    torch.testing.assert_close(reloaded(tokens()).logits, model(tokens()).logits, atol=1e-4, rtol=1e-4)
    start, end, saved = build(encoding).state_dict(), model.state_dict(), load_file(folder / "model.safetensors")
    for key in [key for key in start if "posenc." in key]:
        assert torch.equal(saved[key], start[key]) == ("posenc.original." in key), key
        torch.testing.assert_close(saved[key], end[key], atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_of_two_processes_resumes_in_three_and_in_one(encoding, results, alone):
    folder, measured = results
    model = build(encoding)
    found = train(model, load(model, folder), batch(), range(SAVED, STEPS))
    assert measured["resumed"]["processes"] == 3
    for resumed in (found, measured["resumed"]["fsdp"]):
        assert resumed["losses"] == pytest.approx(alone[0]["losses"][SAVED:], **TOLERANCE)


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if suits("bert", name)])
def test_no_parameter_is_left_unused(encoding):
    """DDP doesn't need find_unused_parameters, except for a pooler that the loss doesn't use."""
    unused = {}
    for head in ("ForMaskedLM", "Model"):
        model = patched("bert", encoding, head).train()
        first(model(tokens())).square().mean().backward()
        unused[head] = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert unused == {"ForMaskedLM": set(), "Model": {"pooler.dense.weight", "pooler.dense.bias"}}
