"""Errors of `patch` and of a forward pass, and that they leave no partial changes."""

import pytest
import torch

import hf_posenc
from models import first, patched, stock, tiny, tokens


def refused(**arguments):
    """The error message of `patch` for BERT, after a check that the model is unchanged."""
    model = stock("bert")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules = [type(module) for module in model.modules()]
    with pytest.raises(ValueError) as error:
        hf_posenc.patch(model, **arguments)
    assert [type(module) for module in model.modules()] == modules and not type(model.config).__name__.startswith("PosEnc")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    first(model(tokens()))
    return str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"encoding": "alibbi"}, ["'alibbi'", "'alibi'", "import the module"]),
        ({"encoding": "alibi", "slope": 3}, ["'slope'", "did you mean 'slopes'?", "'per_layer'"]),
        ({"encoding": "rope", "theta": "big"}, ["theta", "'big'", "above 1"]),
        ({"encoding": "rope", "theta": 0.5}, ["theta", "0.5", "above 1"]),
        ({"encoding": "rope", "layout": "pairs"}, ["'pairs'", "'half' or 'interleaved'"]),
        ({"encoding": "relative", "max_distance": True}, ["True", "integer"]),
        ({"encoding": "alibi", "max_length": 0}, ["max_length=0", "above 0"]),
        ({"encoding": "alibi", "max_length": 3.5}, ["max_length=3.5"]),
        ({"encoding": 7}, ["7", "a name or a dict"]),
        ({"encoding": {"theta": 3.0}}, ["theta", "a name or a dict"]),
        ({"encoding": None}, ["None", "a name or a dict"]),
    ],
)
def test_bad_arguments(arguments, words):
    message = refused(**arguments)
    assert all(word in message for word in words), message


def test_odd_head_dim():
    model = stock("bert", hidden_size=36, num_attention_heads=4)
    with pytest.raises(ValueError, match="head_dim is 9"):
        hf_posenc.patch(model, "rope")
    assert first(hf_posenc.patch(model, "alibi")(tokens())).isfinite().all()


@pytest.mark.parametrize("encoding", ["alibi", "rope", "relative", "shaw"])
def test_tokens_added_within_a_model(encoding):
    model = patched("bert", encoding)
    model.embeddings.register_forward_hook(lambda module, args, output: torch.cat([output, output[:, :3]], dim=1))
    with pytest.raises(ValueError, match="14.*11"):
        model(tokens())


def test_patching_twice():
    with pytest.raises(ValueError, match=r"alibi"):
        hf_posenc.patch(patched("bert", "alibi"), "rope")


@pytest.mark.parametrize(
    ("host", "config", "reason"),
    [
        ("ResNetModel", dict(hidden_sizes=[8], depths=[1], embedding_size=8), "neither positional components nor attention"),
        ("IBertModel", dict(quant_mode=True), "quant_mode=False"),
        ("FNetModel", {}, "Fourier"),
    ],
)
def test_unsupported_hosts(host, config, reason):
    with pytest.raises(ValueError, match=reason):
        hf_posenc.patch(tiny(host, **config), "alibi")


def test_wrapped_models(tmp_path):
    model = stock("bert")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    distributed = torch.nn.parallel.DistributedDataParallel(model)
    torch.distributed.destroy_process_group()
    cases = {
        "torch.compile": torch.compile(model, backend="eager"),
        "DistributedDataParallel": distributed,
        "PreTrainedModel": torch.nn.Linear(2, 2),
        "None": None,
    }
    for word, wrapped in cases.items():
        with pytest.raises(ValueError, match=word):
            hf_posenc.patch(wrapped, "alibi")
    model.embeddings._hf_hook = object()
    with pytest.raises(ValueError, match="device_map"):
        hf_posenc.patch(model, "alibi")
    del model.embeddings._hf_hook
    model.hf_quantizer = object()
    with pytest.raises(ValueError, match="quantized"):
        hf_posenc.patch(model, "alibi")


def test_models_changed_by_hand():
    model = stock("bert")
    model.encoder.layer[0].intermediate.dense = torch.nn.Linear(32, 40)
    with pytest.raises(ValueError, match=r"encoder\.layer\.0\.intermediate\.dense.*another shape"):
        hf_posenc.patch(model, "alibi")
    model.encoder.layer[0].intermediate = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"intermediate' is a Identity"):
        hf_posenc.patch(model, "alibi")


@pytest.mark.parametrize("host", ["bert", "mpnet", "megatron-bert"])
def test_only_a_part_has_no_positions(host):
    """Calling only the encoder raises an error, even after a forward pass of the model. Calling `model.forward` works."""
    model = patched(host, "alibi")
    assert torch.equal(first(model.forward(tokens())), first(model(tokens())))
    with pytest.raises(RuntimeError, match="without positions"):
        model.encoder(torch.zeros(1, 3, 32))
