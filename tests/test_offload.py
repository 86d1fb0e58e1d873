"""Weights that Accelerate offloads and loads when a module is called."""

import copy

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from transformers import AutoModel

import hf_posenc
import valued
from closeness import assert_equal
from models import ALL_WAYS, HOSTS, by_structure, first, patched, stock, tokens

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
few_pairs = pytest.mark.parametrize(
    ("host", "encoding"), [pytest.param(*host.values, ALL_WAYS, marks=host.marks) for host in by_structure(HOSTS)]
)


@few_pairs
@torch.no_grad()
def test_a_device_map(host, encoding, tmp_path):
    """The device map is chosen by the free memory, or puts either the encoding or all other modules on disk."""
    model = patched(host, encoding)
    expected = first(model(tokens()))
    model.save_pretrained(tmp_path / "model")
    folder = {"offload_folder": str(tmp_path / "offload")}
    children = dict.fromkeys((name for name, _ in model.named_children()), "disk")
    for device_map, memory in (
        ("auto", None),
        ("auto", {"cpu": "40KB"}),
        ("auto", {"cpu": "1KB"}),
        ({**children, "posenc": "cpu"}, None),
        ({**dict.fromkeys(children, "cpu"), "posenc": "disk"}, None),
    ):
        loaded = AutoModel.from_pretrained(tmp_path / "model", device_map=device_map, max_memory=memory, **folder)
        assert_equal(first(loaded(tokens())), expected)
    dispatched = dispatch_model(
        copy.deepcopy(model), {**children, "posenc": "cpu"}, main_device="cpu", offload_dir=tmp_path / "d"
    )
    assert_equal(first(dispatched(tokens())), expected)


@pytest.mark.parametrize("kind", valued.KINDS)
@torch.no_grad()
def test_an_own_encoding(kind, tmp_path):
    """Custom encodings work with offloading, including their modules, buffers, and plain tensors."""
    model = hf_posenc.patch(stock("gpt2"), kind)
    expected = first(model(tokens()))
    offloaded = copy.deepcopy(model)
    cpu_offload(offloaded, execution_device="cpu", offload_buffers=True)
    assert_equal(first(offloaded(tokens())), expected)
    assert all(parameter.is_meta for parameter in offloaded.parameters())  # including those that are only read


@torch.no_grad()
def test_decoding_with_offloaded_weights():
    model = patched("gpt2", ALL_WAYS, "LMHeadModel")
    offloaded = copy.deepcopy(model)
    cpu_offload(offloaded, execution_device="cpu")
    settings = dict(max_new_tokens=5, do_sample=False, eos_token_id=None, attention_mask=torch.ones(2, 6, dtype=torch.long))
    assert torch.equal(offloaded.generate(tokens(2, 6), **settings), model.generate(tokens(2, 6), **settings))
